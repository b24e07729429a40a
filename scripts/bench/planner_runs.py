"""Plans beside real runs on this machine: seconds of a step as planned from a profile, and as measured.

    python scripts/bench/planner_runs.py turns --model S --out planner_turns.json
    python scripts/bench/planner_runs.py ahead --model S --out planner_ahead.json
    python scripts/bench/planner_runs.py unequal --model S --out planner_unequal.json

Models have random weights, rows random ids of one length, as in ``train.py step``. Two ranks, one thread each. ``--profiles``: a
directory that keeps the profiles of the machine for the next part.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import environment, machine_facts, run_parts, run_program, save, table, texts_of, torchrun
from rlhf_spmd.planner.plan_summary import measured_seconds
from train import WORK, settings_of, write_inputs

RANKS = 2
MAX_TOKENS = 2048  # of a micro-batch
PERIOD_S = 0.02  # of a slowed rank's stops
ROLES = ("actor", "critic", "reference")
AHEAD = {"rollout.max_staleness": 1, "algorithm.rollout_correction": "{bypass_mode: true}"}


@dataclass(frozen=True)
class Plan:
    """A plan to run. ``settings``: of its configuration. ``fixed``: of a placement that is evaluated; None: the searched plan."""

    name: str
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any] | None = None


def for_roles(**settings: Any) -> dict[str, Any]:
    """Return the settings of every role with a model; two underscores stand for a dot."""
    return {f"models.{role}.{key.replace('__', '.')}": value for role in ROLES for key, value in settings.items()}


TURNS = (
    Plan("searched", {}),
    Plan("dp", {}, {}),
    Plan("tp 2", {}, for_roles(layout__tp=2)),
    Plan("pp 2", {}, for_roles(layout__pp=2)),
    Plan("interleave", {}, {"placement.strategy": "interleave"}),
    Plan("separate", {}, {"placement.strategy": "separate"}),
)
IN_FLIGHT = {"rollout.in_flight": 32}
AHEAD_PLANS = (
    Plan("one step ahead, searched", AHEAD),
    Plan("one step ahead, separate", AHEAD, {"placement.strategy": "separate"}),
    Plan("two steps ahead, separate", AHEAD | {"rollout.max_staleness": 2}, {"placement.strategy": "separate"}),
    Plan("twice the rows in flight, searched", IN_FLIGHT),
    Plan("twice the rows in flight, dp", IN_FLIGHT, {}),
    Plan("twice the rows in flight, separate", IN_FLIGHT, {"placement.strategy": "separate"}),
    Plan("twice the rows in flight, one step ahead, separate", IN_FLIGHT | AHEAD, {"placement.strategy": "separate"}),
)
UNEQUAL = (
    Plan("searched", {}),
    Plan("dp, rows by speed", {}, {"placement.speeds": "[1.0,0.5]"}),
    Plan("dp, as many rows for each", {}, {}),
    Plan("interleave, as many rows for each", {}, {"placement.strategy": "interleave"}),
)


@contextlib.contextmanager
def slowed(ranks: Sequence[int], share: float) -> Iterator[str]:
    """Let these ranks of the programs started meanwhile run for ``share`` of the time. Yield a word for their environment.

    A thread stops and continues their processes, many times a second, so computing and sending both slow down.
    """
    word = f"{os.getpid()}_{time.time_ns()}"
    has_ended = threading.Event()

    def stop_and_go() -> None:
        processes: list[int] = []
        while not has_ended.is_set():
            processes = _processes(word, ranks) if time.time() % 0.5 < PERIOD_S or not processes else processes
            _signal(processes, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            _signal(processes, signal.SIGCONT)
            time.sleep(PERIOD_S * share)

    thread = threading.Thread(target=stop_and_go)
    if ranks:
        thread.start()
    try:
        yield word
    finally:
        has_ended.set()
        if ranks:
            thread.join()


def _processes(word: str, ranks: Sequence[int]) -> list[int]:
    """Return the processes of these ranks whose environment has ``word``."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"BENCH_WORD={word}".encode() in variables and any(f"RANK={rank}".encode() in variables for rank in ranks):
            processes.append(int(path.parent.name))
    return processes


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def run_plan(ranks: int, *arguments: str, **variables: str) -> str:
    """Return what ``rlhf_spmd.plan`` prints. ``ranks``: 0 without torchrun."""
    launcher = torchrun(ranks) if ranks else []
    command = [sys.executable, *launcher, "-m", "rlhf_spmd.plan", *arguments]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rlhf_spmd.plan {' '.join(arguments)} ended with code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def measured_step(run_dir: Path) -> tuple[float, dict[str, float]]:
    """Return seconds of a step, from the end of the second step to the end of the last, and seconds of its calls."""
    trace = json.loads((run_dir / "trace.json").read_text(encoding="utf-8"))
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        step = (event.get("args") or {}).get("step")
        if event.get("ph") == "X" and event.get("cat") == "compute" and isinstance(step, int):
            ends[step] = max(ends.get(step, 0.0), (event["ts"] + event["dur"]) / 1e6)
    _, second, *_, last = sorted(ends)
    return (ends[last] - ends[second]) / (last - second), measured_seconds(trace)


def profile_of(directory: Path, settings: Mapping[str, Any], share: float) -> Path:
    """Return the profile of this machine with both ranks running for ``share`` of the time, which is measured if it is missing."""
    path = directory / f"profile_{share:g}.json"
    if not path.exists():
        with slowed(range(RANKS) if share < 1 else (), share) as word:
            run_plan(RANKS, "profile", *texts_of(settings), f"plan.out={path}", BENCH_WORD=word)
    return path


def compare(
    plans: Sequence[Plan],
    names: Sequence[str] | None,
    model: str,
    steps: int,
    directory: Path | None,
    share: float,
    bench: str,
    out: Path | None,
) -> None:
    """Plan and run each plan, or those of ``names``. ``share``: of the time in which the last rank runs."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_inputs(root, replace(WORK[model], num_prompts=2 * WORK[model].num_prompts))  # enough to be in flight
        settings = settings_of("ppo", root, WORK[model], steps) | {"models.actor.generation.reuse_rollout_log_probs": False}
        settings["algorithm.ppo_max_token_len_per_gpu"] = MAX_TOKENS
        profiles = [profile_of(directory or root, settings, share) for share in dict.fromkeys((1.0, share))]
        groups = ",".join(f"{{nodes: {RANKS // len(profiles)}, gpu: {path}}}" for path in profiles)
        link = json.loads(profiles[-1].read_text(encoding="utf-8"))["device"]["link"]
        cluster = [f"cluster.groups=[{groups}]", "cluster.gpus_per_node=1", f"cluster.network_gb_s={link / 1e9}"]
        for index, plan in enumerate(plan for plan in plans if names is None or plan.name in names):
            path = root / f"{index}.yaml"
            run_dir = root / f"run_{index}"
            fixed = [] if plan.fixed is None else ["plan.fixed=config", *texts_of(plan.fixed)]
            texts = texts_of({**settings, **plan.settings})
            planned = json.loads(run_plan(0, *texts, *cluster, *fixed, f"plan.out={path}", "--json"))
            with slowed((RANKS - 1,) if share < 1 else (), share) as word:
                run_program(run_dir, RANKS, {**settings, **plan.settings}, f"plan={path}", BENCH_WORD=word)
            step, calls = measured_step(run_dir)
            row = {"plan": plan.name, "planned": planned["step_seconds"], "measured": step}
            row["off"] = row["planned"] / step - 1
            row["optimal"] = planned["optimal"]
            row["calls"] = {call: [placed["seconds"], calls.get(call)] for call, placed in planned["calls"].items()}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(rows, "plan planned measured off optimal"))
    print(f"mean error {sum(abs(row['off']) for row in rows) / len(rows):.1%}")
    save({"bench": bench, "model": model, "share": share, "machine": machine_facts(), "rows": rows}, out)


def turns(
    names: Sequence[str] | None = None,
    model: str = "S",
    steps: int = 6,
    profiles: Path | None = None,
    out: Path | None = None,
) -> None:
    """Placements and layouts of PPO whose generation and training take turns."""
    compare(TURNS, names, model, steps, profiles, 1.0, "planner_runs", out)


def ahead(
    names: Sequence[str] | None = None,
    model: str = "S",
    steps: int = 7,
    profiles: Path | None = None,
    out: Path | None = None,
) -> None:
    """Generation ahead of training, and twice as many prompts in flight as a step takes."""
    compare(AHEAD_PLANS, names, model, steps, profiles, 1.0, "planner_ahead", out)


def unequal(
    names: Sequence[str] | None = None,
    model: str = "S",
    steps: int = 6,
    share: float = 0.5,
    profiles: Path | None = None,
    out: Path | None = None,
) -> None:
    """The second rank runs for ``--share`` of the time only."""
    compare(UNEQUAL, names, model, steps, profiles, share, "planner_unequal", out)


if __name__ == "__main__":
    run_parts(turns, ahead, unequal)
