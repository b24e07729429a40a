"""Plans of one PPO step on this machine: seconds of each call and of the step as planned from a profile, and as measured.

    python scripts/bench/planner_runs.py --model M --ranks 2 --steps 6 --out planner_runs.json

Profiles the machine (``plan profile``), plans every placement and layout below as it is given (``plan.fixed=config``), searches for the
best plan, runs all of them, and compares. Measured seconds of a call are its slowest rank's, the median over the steps after the first,
from trace.json; those of a step the wall time from the end of the first step to the end of the last one over their number. Models have
random weights, rows random ids of one length, as in step.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import machine_facts, save, table
from rlhf_spmd.planner.plan_page import measured_seconds
from step import SOURCE, WORK, overrides, write_model, write_rows

TP2, PP2 = "layout.tp=2", "layout.pp=2"
ROLES = ("actor", "critic", "reference")


def of(setting: str, *roles: str) -> tuple[str, ...]:
    return tuple(f"models.{role}.{setting}" for role in roles or ROLES)


# for two ranks, and as multiples of them for more
PLANS: dict[str, tuple[str, ...]] = {
    "dp": (),
    "tp 2": of(TP2),
    "tp 2, generation tp 2": (*of(TP2), "models.actor.generation.tp=2"),
    "pp 2": of(PP2),
    "pp 2, generation pp 2": (*of(PP2), "models.actor.generation.pp=2"),
    "zero 1": of("layout.zero=1"),
    "zero 3": of("layout.zero=3"),
    "full checkpointing": of("activation_checkpointing=full", "actor", "critic"),
    "split": ("placement.strategy=split",),
    "interleave": ("placement.strategy=interleave",),
    "separate": ("placement.strategy=separate",),
    "actor tp 2, others dp": of(TP2, "actor"),
    "critic tp 2, others dp": of(TP2, "critic"),
    "critic and reference pp 2": of(PP2, "critic", "reference"),
}


def start(ranks: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = (
        [sys.executable]
        if not ranks
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([*launcher, "-m", module, *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{module} {' '.join(arguments)} ended with code {done.returncode}\n{done.stderr[-3000:]}")
    return done


def measured(run_dir: Path) -> dict[str, Any]:
    trace = json.loads((run_dir / "trace.json").read_text())
    calls = measured_seconds(trace)
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "compute" and isinstance((event.get("args") or {}).get("step"), int):
            step = event["args"]["step"]
            ends[step] = max(ends.get(step, 0.0), (event["ts"] + event["dur"]) / 1e6)
    first, last = min(ends), max(ends)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": (ends[last] - ends[first]) / (last - first),
        "calls": calls,
        "peak_gb": max(r["memory/peak_gb"] for r in rows if "memory/peak_gb" in r),
    }


def spearman(one: list[float], other: list[float]) -> float:
    """Of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*(list(map(float, each)) for each in ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plans", choices=list(PLANS), nargs="+", default=list(PLANS))
    parser.add_argument("--profile", type=Path, help="one that was made before; null: made here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = WORK[args.model]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_model(root / "model", work)
        write_rows(root / "ppo.jsonl", work, 4 * work.num_prompts, with_responses=False)
        given = overrides("ppo", root, work, args.steps) | {"models.actor.generation.reuse_rollout_log_probs": False}
        settings = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]
        profile = args.profile or root / "profile.json"
        if args.profile is None:
            start(args.ranks, "rlhf_spmd.plan", "profile", *settings, f"plan.out={profile}")
        cluster = ["cluster.nodes=1", f"cluster.gpus_per_node={args.ranks}", f"cluster.gpu={profile}"]
        plans: dict[str, Any] = {}
        for plan in ["best", *args.plans]:
            out, run_dir = root / f"{len(plans)}.yaml", root / f"run_{len(plans)}"
            chosen = () if plan == "best" else ("plan.fixed=config", *PLANS[plan])
            planned = json.loads(start(0, "rlhf_spmd.plan", *settings, *cluster, *chosen, f"plan.out={out}", "--json").stdout)
            start(args.ranks, "rlhf_spmd.train", *settings, f"run.dir={run_dir}", f"plan={out}")
            found = measured(run_dir)
            calls = {call: [each["seconds"], found["calls"].get(call)] for call, each in planned["calls"].items()}
            plans[plan] = {
                "planned": planned["step_seconds"],
                "measured": found["step"],
                "calls": calls,
                "peak_gb": found["peak_gb"],
            }
            plans[plan]["optimal"] = planned["optimal"]
            print(
                f"{plan}: planned {planned['step_seconds']:.3f} s, measured {found['step']:.3f} s", file=sys.stderr, flush=True
            )
    report(plans, args)


def report(plans: dict[str, Any], args: argparse.Namespace) -> None:
    names = list(dict.fromkeys(call for plan in plans.values() for call in plan["calls"]))
    rows, errors = [], []
    for plan, found in plans.items():
        cells = []
        for call in names:
            planned, seconds = found["calls"].get(call, (None, None))
            if not seconds:
                cells.append("-")
                continue
            errors.append(abs(planned / seconds - 1))
            cells.append(f"{planned:.2f} / {seconds:.2f} ({planned / seconds - 1:+.0%})")
        step = f"{found['planned']:.2f} / {found['measured']:.2f} ({found['planned'] / found['measured'] - 1:+.0%})"
        rows.append([plan, step, *cells])
    print(table(["plan: planned / measured s", "step", *names], rows, 1))
    order = spearman([each["planned"] for each in plans.values()], [each["measured"] for each in plans.values()])
    best = min(each["measured"] for each in plans.values())
    facts = {
        "mean_call_error": statistics.mean(errors),
        "calls_within_20_percent": sum(error <= 0.2 for error in errors) / len(errors),
        "mean_step_error": statistics.mean(abs(each["planned"] / each["measured"] - 1) for each in plans.values()),
        "spearman": order,
        "best_over_fastest_measured": plans["best"]["measured"] / best,
    }
    print(json.dumps(facts))
    save(
        {
            "bench": "planner_runs",
            "model": args.model,
            "ranks": args.ranks,
            "machine": machine_facts(),
            "plans": plans,
            **facts,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
