"""What the generator's options gain, and memory over many cycles: the scripts at their smallest size."""

from __future__ import annotations

from pathlib import Path

from bench_runs import run_script


def test_rollout_compares_every_option_with_itself_turned_off(tmp_path: Path) -> None:
    tiny = ("--model", "tiny", "--scale", "0.1", "--updates", "2", "--repeats", "1")
    report, printed = run_script("rollout.py", tmp_path / "rollout.json", *tiny)
    cases = {(case["part"], case["case"]): case for case in report["cases"]}
    assert {part for part, _ in cases} == {"pipeline", "replicas", "guesses", "groups"}
    for (part, name), case in cases.items():
        assert f"| {name} |" in printed and case["wall_s"] > 0 and 0 <= case["idle"] < 1
        assert case["drawn"] == next(other["drawn"] for other in report["cases"] if other["part"] == part) or part == "guesses"
    assert cases["replicas", "long ones together, rebalance_steps=8"]["moved_rows"] > 0
    assert cases["pipeline", "micro_batches=2"]["steps"] > 1.5 * cases["pipeline", "micro_batches=1"]["steps"]
    shared, alone = (cases["groups", f"enable_prefix_caching={on}"]["prefill"] for on in (True, False))
    assert 0 < 8 * shared <= alone


def test_memory_stays_over_many_cycles(tmp_path: Path) -> None:
    """Two ranks; the figures of 1,000 cycles are in docs/benchmarks.md. One KV page a cycle would be 4 KiB. Some 170 cycles pass
    until all that is kept by design is there."""
    sizes = ("--cycles", "230", "--settled", "180", "--samples", "23", "--ranks", "2")
    report, printed = run_script("cycles.py", tmp_path / "cycles.json", *sizes)
    assert len(report["rows"]) == 2
    for row in report["rows"]:
        for key in ("storages", "storage_bytes"):
            least, most = row[key]
            assert 0 < least == most and str(least) in printed
        assert abs(row["heap_kib_per_cycle"]) < 2.0
