"""Plans beside real runs on this machine: the memory of small PPO, GRPO and SFT runs, and the seconds of PPO steps.

    python scripts/bench/planner_runs.py memory --out memory.json
    python scripts/bench/planner_runs.py seconds --model M --ranks 2 --steps 6 --out seconds.json

Models have random weights, rows random ids of one length, as in ``train.py step``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from measure import environment, machine_facts, run_parts, run_program, save, table, texts_of
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.plan_summary import measured_seconds
from rlhf_spmd.preflight.memory_estimate import measure, step_facts
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.preflight.step_graph import trace
from train import WORK, Work, settings_of, write_inputs

# Memory

SMALL_WORK = Work("110M", 4, 2, 64, 128, 1, 8)
BUDGET = 800  # tokens of a micro-batch
FULL = {"models.actor.activation_checkpointing": "full"}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {  # algorithm, ranks, layout of its roles, more
    "sft, 1 rank": ("sft", 1, {}, {}),
    "sft, 1 rank, selective": ("sft", 1, {}, {"models.actor.activation_checkpointing": "selective"}),
    "sft, 1 rank, full": ("sft", 1, {}, FULL),
    "sft, 1 rank, bfloat16": ("sft", 1, {}, {"models.actor.dtype": "bfloat16"}),
    "sft, tp 2": ("sft", 2, {"tp": 2}, {}),
    "sft, pp 2": ("sft", 2, {"pp": 2}, {}),
    "grpo, dp 2": ("grpo", 2, {}, {}),
    "grpo, dp 2, zero 1": ("grpo", 2, {"zero": 1}, {}),
    "grpo, dp 2, zero 3, full": ("grpo", 2, {"zero": 3}, FULL),
    "ppo, 1 rank": ("ppo", 1, {}, {}),
    "ppo, tp 2": ("ppo", 2, {"tp": 2}, {}),
    "ppo, dp 2, zero 2": ("ppo", 2, {"zero": 2}, {}),
    "ppo, pp 2 * dp 2": ("ppo", 4, {"pp": 2}, {}),
}
ROLES = {"sft": ("actor",), "grpo": ("actor", "reference"), "ppo": ("actor", "critic", "reference")}


def settings_for(case: str, root: Path, model: str) -> dict[str, Any]:
    algorithm, _, layout, more = CASES[case]
    settings = settings_of(algorithm, root, SMALL_WORK, 2) | {"run.resume": "never", "models.actor.path": root / model}
    limit = "max_token_len_per_gpu" if algorithm == "sft" else "ppo_max_token_len_per_gpu"
    settings |= {f"algorithm.{limit}": BUDGET} | ({"algorithm.use_kl_loss": True} if algorithm == "grpo" else {})
    for role in ROLES[algorithm]:
        settings |= {f"models.{role}.path": root / model, f"models.{role}.random_init": True}
        settings |= {f"models.{role}.layout.{key}": value for key, value in layout.items()}
    return settings | more


def predict(case: str, root: Path) -> tuple[float, str]:
    """GiB without what a process takes anyway, and the largest parts."""
    given = [*texts_of(settings_for(case, root, "model")), f"run.dir={root}/predicted"]
    ready = prepare(None, given, CASES[case][1])
    report = measure(ready.roles, step_facts(ready, trace(ready), torch.device("cpu")))
    kind = int(report.peaks.argmax())
    words = ", ".join(f"{name} {size / GIB:.2f}" for name, size in report.largest(kind, 6))
    return float(report.peaks[kind] - report.reserve) / GIB, words


def memory(only: str = "", out: Path | None = None) -> None:
    """Memory as the planner predicts it beside ``memory/peak_gb`` of real runs: two steps, a thread per rank; cases whose names
    contain ``--only``. On CPUs ``memory/peak_gb`` is the most that a process held resident, its libraries too; what it has
    without a model comes from the same run with a tiny one, and is added to the prediction."""
    rows, bases = [], dict[tuple[str, int], float]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_inputs(root, SMALL_WORK, "model")
        write_inputs(root, replace(SMALL_WORK, model="tiny"), "tiny")  # whose ids both models have

        def peak(case: str, model: str) -> float:
            metrics = run_program(
                root / f"run_{len(list(root.iterdir()))}", CASES[case][1], settings_for(case, root, model), stop_after=2
            )
            return max(float(row["memory/peak_gb"]) for row in metrics)

        for case in (case for case in CASES if only in case):
            algorithm, ranks, *_ = CASES[case]
            base = bases[algorithm, ranks] = bases.get((algorithm, ranks)) or peak(case, "tiny")
            (predicted, parts), measured = predict(case, root), peak(case, "model")
            row = {"case": case, "base": base, "predicted": predicted + base, "measured": measured}
            rows.append({**row, "off": (predicted + base) / measured - 1, "parts": parts})
            print(rows[-1], flush=True)
    print(table(rows, "case base predicted measured off"))
    save({"machine": machine_facts(), "cases": rows}, out)


# Seconds

TP2, PP2 = "layout.tp=2", "layout.pp=2"


def of(setting: str, *roles: str) -> tuple[str, ...]:
    return tuple(f"models.{role}.{setting}" for role in roles or ROLES["ppo"])


PLANS: dict[str, tuple[str, ...]] = {  # for two ranks, and as multiples of them for more
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


def plan(ranks: int, *arguments: str) -> str:
    """What ``rlhf_spmd.plan`` prints; ``ranks``: 0 without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "-m", "rlhf_spmd.plan", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rlhf_spmd.plan {' '.join(arguments)} ended with code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def measured_step(run_dir: Path) -> tuple[float, dict[str, float]]:
    """Seconds of a step and of its calls."""
    trace = json.loads((run_dir / "trace.json").read_text())
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "compute" and isinstance((event.get("args") or {}).get("step"), int):
            step = event["args"]["step"]
            ends[step] = max(ends.get(step, 0.0), (event["ts"] + event["dur"]) / 1e6)
    first, last = min(ends), max(ends)
    return (ends[last] - ends[first]) / (last - first), measured_seconds(trace)


def spearman(one: list[float], other: list[float]) -> float:
    """The rank correlation of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*(list(map(float, each)) for each in ranks))


def seconds(
    model: str = "M",
    ranks: int = 2,
    steps: int = 6,
    plans: Sequence[str] = tuple(PLANS),
    profile: Path | None = None,
    out: Path | None = None,
) -> None:
    """Plans of one PPO step on this machine: seconds of each call and of the step as planned from a profile, and as measured.

    Profiles the machine (``plan profile``) unless ``--profile`` names what was made before, plans every placement and layout of
    ``--plans`` as it is given (``plan.fixed=config``), searches for the best plan, runs all of them, and compares. Measured
    seconds of a call are its slowest rank's, the median over the steps after the first, from trace.json; those of a step the wall
    time from the end of the first step to the end of the last one over their number.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_inputs(root, WORK[model])
        given = settings_of("ppo", root, WORK[model], steps) | {"models.actor.generation.reuse_rollout_log_probs": False}
        settings, made = texts_of(given), profile or root / "profile.json"
        if profile is None:
            plan(ranks, "profile", *settings, f"plan.out={made}")
        cluster = ["cluster.nodes=1", f"cluster.gpus_per_node={ranks}", f"cluster.gpu={made}"]
        for kind in ["best", *plans]:
            path, run_dir = root / f"{len(found)}.yaml", root / f"run_{len(found)}"
            fixed = () if kind == "best" else ("plan.fixed=config", *PLANS[kind])
            planned = json.loads(plan(0, *settings, *cluster, *fixed, f"plan.out={path}", "--json"))
            metrics = run_program(run_dir, ranks, given, f"plan={path}")
            step, calls = measured_step(run_dir)
            row = {"plan": kind, "planned": planned["step_seconds"], "measured": step, "optimal": planned["optimal"]}
            row["calls"] = {call: [each["seconds"], calls.get(call)] for call, each in planned["calls"].items()}
            row["off"] = row["planned"] / step - 1
            row["peak_gb"] = max(r["memory/peak_gb"] for r in metrics if "memory/peak_gb" in r)
            found[kind] = row
            print(f"{kind}: planned {row['planned']:.3f} s, measured {step:.3f} s", file=sys.stderr, flush=True)
    report(found, {"bench": "planner_seconds", "model": model, "ranks": ranks, "machine": machine_facts()}, out)


def report(found: dict[str, Any], facts: dict[str, Any], out: Path | None) -> None:
    names = dict.fromkeys(call for row in found.values() for call in row["calls"])
    wrong, rows = [], []
    for row in found.values():
        for planned, measured in row["calls"].values():
            wrong += [abs(planned / measured - 1)] if measured else []
        told = {call: f"{both[0]:.2f} / {both[1]:.2f}" for call, both in row["calls"].items() if both[1]}
        rows.append({**row, **told})
    print(table(rows, " ".join(["plan planned measured off", *names])))
    facts["mean_call_error"] = statistics.mean(wrong)
    facts["calls_within_20_percent"] = sum(error <= 0.2 for error in wrong) / len(wrong)
    facts["mean_step_error"] = statistics.mean(abs(row["off"]) for row in found.values())
    facts["spearman"] = spearman(*([row[key] for row in found.values()] for key in ("planned", "measured")))
    facts["best_over_fastest_measured"] = found["best"]["measured"] / min(row["measured"] for row in found.values())
    print(json.dumps(facts))
    save({**facts, "plans": found}, out)


if __name__ == "__main__":
    run_parts(memory, seconds)
