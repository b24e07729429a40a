"""The benchmark of transitions runs at its smallest size: its bytes are the formula's, its memory too but for buckets."""

from __future__ import annotations

from pathlib import Path

from test_bench import run_script


def test_two_ranks(tmp_path: Path) -> None:
    report, printed = run_script("reshard.py", tmp_path / "reshard.json", "--ranks", "2", "--repeats", "1")
    assert {(row["layout"], row["engine"]) for row in report["rows"]} == {
        (layout, engine)
        for layout in ("1-2-1 -> 1-1", "2-1-1 -> 1-1", "1-1-2 z3 -> 1-1")
        for engine in ("zero_redundancy", "full_gather", "naive_groups")
    }
    for row in report["rows"]:
        assert row["exact"] and row["counted_bytes"] == row["formula_bytes"] > 0
        assert row["formula_peak"] <= row["counted_peak"] <= row["formula_peak"] + 2 * row["bucket_bytes"]
        assert min(row["to_generation_s"], row["to_training_s"], row["all_gather_s"], row["full_tensor_s"]) > 0
        assert row["layout"] in printed and row["engine"] in printed
    assert "9 of 9 rows" in printed


def test_planning_alone(tmp_path: Path) -> None:
    report, printed = run_script("reshard.py", tmp_path / "plan.json", "--plan")
    rows = report["rows"]
    assert {row["ranks"] for row in rows} == {1 << power for power in range(3, 11)}
    assert {row["model"] for row in rows} == {"7B", "13B", "34B", "70B"} and "70B" in printed
    for row in rows:
        if row["engine"] == "zero_redundancy":
            naive = next(
                r for r in rows if r["engine"] == "naive_groups" and (r["model"], r["layout"]) == (row["model"], row["layout"])
            )
            assert row["received"] <= naive["received"] and row["peak"] < naive["peak"]
            assert abs(row["planned"] - row["received"]) < 0.1 * row["received"]
