"""The benchmark of transitions runs at its smallest size: its bytes are the formula's, its memory too but for buckets."""

from __future__ import annotations

from typing import Any

import pytest

Ran = tuple[dict[str, Any], str]


@pytest.mark.script("reshard.py ranks --sizes 2 --repeats 1")
def test_two_ranks(ran: Ran) -> None:
    report, printed = ran
    assert {(row["layout"], row["engine"]) for row in report["rows"]} == {
        (layout, engine)
        for layout in ("1-2-1 -> 1-1", "2-1-1 -> 1-1", "1-1-2 z3 -> 1-1")
        for engine in ("zero_redundancy", "full_gather", "naive_groups")
    }
    for row in report["rows"]:
        assert row["exact"] and row["counted_bytes"] == row["formula_bytes"] > 0
        assert 0 <= row["beyond_bytes"] == row["counted_peak_bytes"] - row["formula_peak_bytes"] <= row["bucket_bytes"]
        assert min(row["to_generation_s"], row["to_training_s"], row["all_gather_s"], row["full_tensor_s"]) > 0
        assert row["layout"] in printed and row["engine"] in printed
    assert "9 of 9 rows; beyond the formula one bucket at most in 9" in printed


@pytest.mark.script("reshard.py plans --models 7B 70B --most-ranks 16")
def test_planning_alone(ran: Ran) -> None:
    """The plans of ranks receive what the formula says, and peak at what it says beside norms and buckets."""
    report, printed = ran
    rows = report["rows"]
    assert {row["ranks"] for row in rows} == {8, 16} and {row["model"] for row in rows} == {"7B", "70B"} and "70B" in printed
    for row in rows:
        assert row["plans"] >= 1 and row["plan_s"] > 0
        if row["formula_bytes"] is not None:
            assert row["planned_bytes"] == pytest.approx(row["formula_bytes"], rel=1e-6)  # rows in 8 or 16 parts
        buckets = 2 * (2 << 28)
        formula, peak = row["formula_peak_bytes"], row["planned_peak_bytes"]
        assert formula <= peak * 1.002 and peak <= formula * 1.002 + buckets
        if row["engine"] == "zero_redundancy":
            naive = next(
                r for r in rows if r["engine"] == "naive_groups" and (r["model"], r["layout"]) == (row["model"], row["layout"])
            )
            assert row["planned_bytes"] <= naive["planned_bytes"] and peak < naive["planned_peak_bytes"]
