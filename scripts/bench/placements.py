"""One configuration under every placement: seconds per step, and what ran at the same time.

    python scripts/bench/placements.py --config configs/quickstart_ppo.yaml --ranks 4 --steps 12 --out placements.json
    python scripts/bench/placements.py --config configs/quickstart_grpo.yaml --learn --seeds 0 1 2 --out learning_ahead.json

The configuration is run as it stands, but for the placement; part 1 of the quickstart makes what its files need. ``step_s`` is the
wall time of the steps after the first two over their number, ``overlap`` the time in which both generation and
another call were under way on some rank, as a share of the shorter of the two, from trace.json. ``--learn``: whole runs, with the
validation's mean reward before and after for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure import machine_facts, save, table

ROOT = Path(__file__).resolve().parents[2]
Spans = list[tuple[float, float]]
AHEAD = ("placement.strategy=separate", "placement.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true")
# name -> overrides, for 4 ranks
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "colocate": (),
    "split": ("placement.strategy=split",),
    "split, 1 + 3": ("placement.strategy=split", "placement.ratios={critic: 0.75}"),
    "standalone": ("placement.strategy=standalone",),
    "interleave": ("placement.strategy=interleave",),
    "separate": ("placement.strategy=separate",),
    "separate, one step ahead": (*AHEAD,),
    "separate, 1 + 3, one step ahead": (
        *AHEAD,
        "placement.ratios={actor.generate_sequences: 0.25}",
    ),
}
LEARNING = ("colocate", "separate", "separate, one step ahead")


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Disjoint and ascending."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(one: Spans, other: Spans) -> float:
    """Time in which a span of both is open, as a share of the shorter one's; 0 where one has none."""
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)
    shorter = min(sum(end - start for start, end in spans) for spans in (one, other))
    return both / shorter if shorter else 0.0


def spans_of(trace: dict[str, Any], generates: bool, after: int) -> Spans:
    """The union over ranks of the spans of generation, or of all other calls, in the steps after this one, seconds."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "compute"]
    mine = [event for event in events if event["args"]["step"] > after and generates == ("generate" in event["name"])]
    return union((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in mine)


def run(config: Path, ranks: int, run_dir: Path, overrides: Iterable[str]) -> dict[str, Any]:
    """{"error": ...} where it does not end as it should."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        *launcher,
        "-m",
        "rlhf_spmd.train",
        "--config",
        str(config),
        f"run.dir={run_dir}",
        "run.export=false",
        *overrides,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    status = run_dir / "exit_status.json"
    if not status.exists() or json.loads(status.read_text())["class"] != "done":
        lines = [line for line in done.stderr.splitlines() if line.startswith("rlhf_spmd")] or done.stderr.splitlines()[-1:]
        return {"error": lines[0][:200] if lines else "no output"}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing_s/step" in row]
    later = steps[min(2, len(steps) - 1) :]
    trace = json.loads((run_dir / "trace.json").read_text())
    first = later[0]["step"] - 1
    generation, others = (spans_of(trace, generates, first) for generates in (True, False))
    whole = [*generation, *others]
    seconds = (max(end for _, end in whole) - min(start for start, _ in whole)) / len(later)
    result: dict[str, Any] = {
        "step_s": seconds,
        "slowest_rank_s": statistics.median(row["timing_s/step"] for row in later),
        "generate_s": statistics.median(row["timing_s/generate_sequences"] for row in later),
        "reshard_mb": statistics.median(row["reshard/bytes"] for row in later) / 1e6,
        "peak_gb": max(row["memory/peak_gb"] for row in later),
        "overlap": overlap(generation, others),
    }
    tested = [row["val/reward_mean"] for row in rows if "val/reward_mean" in row]
    return result | ({"val_before": tested[0], "val_after": tested[-1]} if tested else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--placements", choices=list(PLACEMENTS), nargs="+")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the configuration, for all placements")
    args = parser.parse_args()
    names = args.placements or list(LEARNING if args.learn else PLACEMENTS)
    report: dict[str, Any] = {"machine": machine_facts(), "config": args.config.name, "ranks": args.ranks, "runs": []}
    short = () if args.learn else (f"run.steps={args.steps}", "run.test_freq=0", "run.save_freq=0")
    with tempfile.TemporaryDirectory() as root:
        for seed in args.seeds:
            for name in names:
                run_dir = Path(root) / f"{seed}_{names.index(name)}"
                more = (*PLACEMENTS[name], *short, f"run.seed={seed}", *args.overrides)
                found = run(args.config, args.ranks, run_dir, more)
                report["runs"].append({"placement": name, "seed": seed, **found})
                print(
                    f"{name}, seed {seed}: {found.get('error') or format(found['step_s'], '.3f') + ' s per step'}", flush=True
                )
    figures = ["step_s", "slowest_rank_s", "generate_s", "overlap", "reshard_mb", "peak_gb"]
    figures += ["val_before", "val_after"] if args.learn else []
    rows = [
        [entry["placement"], str(entry["seed"]), *(f"{entry[key]:.3f}" if key in entry else "-" for key in figures)]
        for entry in report["runs"]
    ]
    print(table(["placement", "seed", *figures], rows, 2))
    save(report, args.out)


if __name__ == "__main__":
    main()
