"""Calls beside each other: one configuration under every placement, and how long rows wait
with and without ``placement.rollout_chunks``.

    python scripts/bench/placement.py strategies --config configs/quickstart_ppo.yaml --ranks 4 --out placements.json
    python scripts/bench/placement.py strategies --config configs/quickstart_grpo.yaml --learn --seeds 0 1 2 --out ahead.json
    python scripts/bench/placement.py streaming --chunks 1 2 4 8 --steps 6 --out streaming.json

Real runs of ``rlhf_spmd.train``, whose trace says when each call ran on each rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from measure import (
    ROOT,
    RunError,
    chosen,
    environment,
    machine_facts,
    median,
    on_ranks,
    read_metrics,
    run_parts,
    run_program,
    save,
    table,
)

# Strategies

Spans = list[tuple[float, float]]
AHEAD = ("placement.strategy=separate", "placement.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true")
STRATEGIES: dict[str, tuple[str, ...]] = {  # name -> overrides, for 4 ranks
    "colocate": (),
    "split": ("placement.strategy=split",),
    "split, 1 + 3": ("placement.strategy=split", "placement.ratios={critic: 0.75}"),
    "standalone": ("placement.strategy=standalone",),
    "interleave": ("placement.strategy=interleave",),
    "separate": ("placement.strategy=separate",),
    "separate, one step ahead": AHEAD,
    "separate, 1 + 3, one step ahead": (*AHEAD, "placement.ratios={actor.generate_sequences: 0.25}"),
}
LEARNING = ("colocate", "separate", "separate, one step ahead")


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The spans merged: disjoint and ascending."""
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
    try:
        rows = run_program(run_dir, ranks, {"run.export": False}, "--config", str(config), *overrides)
    except RunError as error:
        return {"error": str(error)[:200]}
    steps = [row for row in rows if "timing_s/step" in row]
    later = steps[min(2, len(steps) - 1) :]
    trace = json.loads((run_dir / "trace.json").read_text())
    generation, others = (spans_of(trace, generates, later[0]["step"] - 1) for generates in (True, False))
    whole = [*generation, *others]
    seconds = (max(end for _, end in whole) - min(start for start, _ in whole)) / len(later)
    result: dict[str, Any] = {"step_s": seconds, "slowest_rank_s": median([row["timing_s/step"] for row in later])}
    result |= {"generate_s": median([row["timing_s/generate_sequences"] for row in later])}
    result |= {"reshard_mb": median([row["reshard/bytes"] for row in later]) / 1e6}
    result |= {"peak_gb": max(row["memory/peak_gb"] for row in later), "overlap": overlap(generation, others)}
    tested = [row["val/reward_mean"] for row in rows if "val/reward_mean" in row]
    return result | ({"val_before": tested[0], "val_after": tested[-1]} if tested else {})


def strategies(
    config: Path,
    ranks: int = 4,
    steps: int = 12,
    placements: Sequence[str] | None = None,
    learn: bool = False,
    seeds: Sequence[int] = (0,),
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> None:
    """One configuration under every placement: seconds per step, and what ran at the same time.

    The configuration is run as it stands, but for the placement; part 1 of the quickstart makes what its files need. ``step_s``
    is the wall time of the steps after the first two over their number, ``overlap`` the time in which both generation and another
    call were under way on some rank, as a share of the shorter of the two, from trace.json. ``--learn``: whole runs, with the
    validation's mean reward before and after for each seed.
    """
    names = list(LEARNING) if learn and placements is None else chosen(placements, STRATEGIES)
    short = () if learn else (f"run.steps={steps}", "run.test_freq=0", "run.save_freq=0")
    runs = []
    with tempfile.TemporaryDirectory() as root:
        for seed in seeds:
            for number, name in enumerate(names):
                more = (*STRATEGIES[name], *short, f"run.seed={seed}", *overrides)
                found = run(config, ranks, Path(root) / f"{seed}_{number}", more)
                runs.append({"placement": name, "seed": seed, **found})
                print(
                    f"{name}, seed {seed}: {found.get('error') or format(found['step_s'], '.3f') + ' s per step'}", flush=True
                )
    figures = ["step_s", "slowest_rank_s", "generate_s", "overlap", "reshard_mb", "peak_gb"]
    figures += ["val_before", "val_after"] if learn else []
    print(table(runs, " ".join(["placement", "seed", *figures])))
    save({"machine": machine_facts(), "config": config.name, "ranks": ranks, "runs": runs}, out)


# Streaming

RESULTS = {"reward": "compute_reward", "reference": "compute_ref_log_prob", "both": ""}


def train_and_note(step_s: float, row_s: float, arguments: list[str]) -> None:
    """A rank of a run: the training program, which also notes moments of rows in its trace."""
    from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch
    from rlhf_spmd.train import main as train
    from rlhf_spmd.workers import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker

    timelines: list[Any] = []
    finish = DecodeMicroBatch.finish

    def note(name: str, ids: list[int]) -> None:
        if ids:
            timelines[0].instant(name, "rows", ids=" ".join(map(str, ids)))

    def noting_finish(self: DecodeMicroBatch, *given: Any) -> Any:
        step = finish(self, *given)
        time.sleep(step_s)
        note("ended", [item.row.request.row_id for item in step.work if item.row.ended])
        return step

    def noting(method: Callable[..., Any], name: str) -> None:
        spec = method.spec  # type: ignore[attr-defined]
        body = spec.body

        def noting_body(self: Any, *given: Any, **more: Any) -> Any:
            timelines[:] = [self.controller.timeline]
            made = body(self, *given, **more)
            if name:
                time.sleep(row_s * len(given[0]))
                note(name, given[0].row_ids.tolist())
            return made

        object.__setattr__(spec, "body", noting_body)

    DecodeMicroBatch.finish = noting_finish  # type: ignore[method-assign,assignment]
    noting(ActorWorker.generate_sequences, "")
    noting(RewardWorker.compute_reward, RESULTS["reward"])
    noting(ReferenceWorker.compute_ref_log_prob, RESULTS["reference"])
    noting(CriticWorker.compute_values, "compute_values")
    train(arguments)


def waits(trace: Path) -> dict[str, float]:
    """Median seconds from a row's end to each of :data:`RESULTS`."""
    moments: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)  # what -> (step, row) -> when every rank had it
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "rows" and event["args"]["step"] > 1:
            for row in map(int, event["args"]["ids"].split()):
                key = event["args"]["step"], row
                moments[event["name"]][key] = max(event["ts"] / 1e6, moments[event["name"]].get(key, 0.0))
    ended = moments["ended"]
    reward, reference = (moments[RESULTS[name]] for name in ("reward", "reference"))
    assert ended.keys() == reward.keys() == reference.keys() and ended, "some rows were not noted"
    both = {key: max(reward[key], reference[key]) for key in ended}
    found = {"reward": reward, "reference": reference, "both": both}
    return {name: median([its[key] - ended[key] for key in ended]) for name, its in found.items()}


def streamed(root: Path, chunks: int, sleep: Sequence[float], settings: dict[str, Any]) -> dict[str, Any]:
    """One run in a directory of its own."""
    run_dir = root / f"run_{len(list(root.iterdir()))}"
    texts = [f"{key}={value}" for key, value in {**settings, "run.dir": run_dir, "placement.rollout_chunks": chunks}.items()]
    config = ["--config", str(ROOT / "configs" / "quickstart_ppo.yaml")]
    step_s, row_s = (milliseconds / 1e3 for milliseconds in sleep)
    on_ranks(4, train_and_note, step_s=step_s, row_s=row_s, arguments=[*config, *texts])
    samples = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    metrics = read_metrics(run_dir)[1:]
    seconds = {"generation": "timing_s/generate_sequences", "step": "timing_s/step"}
    return {
        "chunks": chunks,
        **waits(run_dir / "trace.json"),
        **{name: median([row[key] for row in metrics]) for name, key in seconds.items()},
        "responses": [(sample["step"], sample["row_id"], sample["response"]) for sample in samples],
    }


def streaming(
    chunks: Sequence[int] = (1, 2, 4, 8),
    steps: int = 6,
    rounds: int = 2,
    prompts: int = 32,
    response: int = 96,
    at_once: int = 16,
    sleep: Sequence[float] = (0.0, 0.0),
    out: Path | None = None,
) -> None:
    """Time from a row's end to its reward and to its reference log-probs, for each number of ``--chunks``.

    PPO on the quickstart's task, its model untrained, on 4 ranks: the actor on two, reward, reference and critic on the two
    others; ``--prompts`` with 4 responses each a step, of ``--response`` tokens at most; a replica generates ``--at-once`` rows
    at a time, as where a cache is full. Runs take turns, ``--rounds`` times each. Every rank notes in the trace when rows end and
    when their results are made; the figures are read back from ``trace.json``, over the steps after the first: medians over rows,
    and of the rounds the median. A row waits for the others of its chunk to end, then for its turn. ``generation`` and
    ``step``: medians of a step's seconds. The runs must have the same responses.

    Where ranks share cores, generation is the slower the more others compute beside it, and nothing is hidden. ``--sleep STEP
    ROW`` shows what ranks with a device each would have: milliseconds that every step of generation, and each row of a reward,
    reference or critic, sleeps besides.
    """
    if steps < 2:
        sys.exit("--steps must be at least 2: the first step is not counted")
    with tempfile.TemporaryDirectory() as name:
        task, root = Path(name) / "task", Path(name) / "runs"
        command = [sys.executable, str(ROOT / "examples" / "sort_digits.py"), "--out", str(task)]
        subprocess.run(command, env=environment(), check=True)
        root.mkdir()
        settings = {
            "run.steps": steps,
            "run.test_freq": 0,
            "run.save_freq": 0,
            "run.export": "false",
            "run.log_samples": 4 * prompts,
        }
        settings |= {"data.path": task / "train.jsonl", "data.val_path": "null", "data.train_batch_size": prompts}
        settings |= {
            "data.max_response_length": response,
            "models.actor.path": task / "model",
            "models.actor.random_init": "true",
        }
        settings |= {"models.actor.generation.max_num_seqs": at_once, "placement.pools": "{generate: [0, 1], read: [2, 3]}"}
        settings |= {f"models.{role}.pool": "read" for role in ("critic", "reference", "reward")} | {
            "models.actor.pool": "generate"
        }
        runs = [streamed(root, number, sleep, settings) for _ in range(rounds) for number in chunks]
    assert all(one["responses"] == runs[0]["responses"] for one in runs), "the runs have different responses"
    keys, found = (*RESULTS, "generation", "step"), []
    for number in chunks:
        mine = [one for one in runs if one["chunks"] == number]
        found.append({"chunks": number, **{key: median([one[key] for one in mine]) for key in keys}})
    print(table(found, " ".join(["chunks", *keys])))
    given = {"steps": steps, "rounds": rounds, "prompts": prompts, "response": response, "at_once": at_once, "sleep": sleep}
    save({"machine": machine_facts(), "settings": given, "runs": found}, out)


if __name__ == "__main__":
    run_parts(strategies, streaming)
