"""Time from a row's end to its reward and to its reference log-probs, with and without ``placement.rollout_chunks``.

    python scripts/bench/streaming.py --portions 1 2 4 8 --steps 6 --out streaming.json

PPO on the quickstart's task, its model untrained, on 4 ranks: the actor on two, reward, reference and critic on the two others. Runs
take turns, ``--rounds`` times each. Every rank notes in the trace when rows end and when their results are made; the figures are
read back from ``trace.json``, over the steps after the first: medians over rows, and of the rounds the median. A row waits for the
others of its portion to end, then for its turn. ``generation`` and ``step``: medians of a step's seconds. The runs must have the same
responses.

Where ranks share cores, generation is the slower the more others compute beside it, and nothing is hidden. ``--sleep STEP ROW`` shows
what ranks with a device each would have: milliseconds that every step of generation, and each row of a reward, reference or critic,
sleeps besides.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine_facts, median, on_ranks, save, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {"reward": "compute_reward", "reference": "compute_ref_log_prob", "both": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--portions", type=int, nargs="+", default=[1, 2, 4, 8], help="values of placement.rollout_chunks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with 4 responses each")
    parser.add_argument("--response", type=int, default=96, help="tokens of the longest")
    parser.add_argument(
        "--at-once", type=int, default=16, help="rows that a replica generates at once, as where a cache is full"
    )
    parser.add_argument("--sleep", type=float, nargs=2, default=[0, 0], metavar=("STEP", "ROW"), help="milliseconds")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is not counted")
    with tempfile.TemporaryDirectory() as directory:
        runs = [measure(Path(directory), args, portions) for _ in range(args.rounds) for portions in args.portions]
    assert all(run["responses"] == runs[0]["responses"] for run in runs), "the runs have different responses"
    found = [summarise([run for run in runs if run["portions"] == portions]) for portions in args.portions]
    heads = ["portions", *(f"row's end to {name}, s" for name in RESULTS), "generation, s", "step, s"]
    print(
        table(
            heads,
            [[str(run["portions"]), *(f"{run[key]:.3f}" for key in (*RESULTS, "generation", "step"))] for run in found],
            1,
        )
    )
    save({"machine": machine_facts(), "settings": vars(args) | {"out": None}, "runs": found}, args.out)


def measure(directory: Path, args: argparse.Namespace, portions: int) -> dict[str, Any]:
    """One run in a directory of its own."""
    task, run_dir = directory / "task", directory / f"run_{len(list(directory.iterdir()))}"
    if not task.exists():
        from rlhf_spmd.data.sort_digits import main as write_task

        write_task(["--out", str(task)])
    settings = {
        "run.dir": run_dir,
        "run.steps": args.steps,
        **{f"run.{key}": 0 for key in ("test_freq", "save_freq")},
        "run.export": "false",
        "run.log_samples": 4 * args.prompts,
        "data.path": task / "train.jsonl",
        "data.val_path": "null",
        "data.train_batch_size": args.prompts,
        "data.max_response_length": args.response,
        "models.actor.path": task / "model",
        "models.actor.random_init": "true",
        "models.actor.generation.max_num_seqs": args.at_once,
        "placement.pools": "{generate: [0, 1], read: [2, 3]}",
        "models.actor.pool": "generate",
        **{f"models.{role}.pool": "read" for role in ("critic", "reference", "reward")},
        "placement.rollout_chunks": portions,
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    if on_ranks(4, __file__, *map(str, args.sleep), "--config", str(ROOT / "configs" / "quickstart_ppo.yaml"), *arguments):
        sys.exit(f"the run with {portions} portions failed")
    samples = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return {
        "portions": portions,
        **waits(run_dir / "trace.json"),
        "generation": median([row["timing_s/generate_sequences"] for row in metrics]),
        "step": median([row["timing_s/step"] for row in metrics]),
        "responses": [(sample["step"], sample["row_id"], sample["response"]) for sample in samples],
    }


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
    return {
        "reward": median([reward[key] - ended[key] for key in ended]),
        "reference": median([reference[key] - ended[key] for key in ended]),
        "both": median([max(reward[key], reference[key]) - ended[key] for key in ended]),
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "portions": runs[0]["portions"],
        **{key: median([run[key] for run in runs]) for key in (*RESULTS, "generation", "step")},
    }


def train_and_note() -> None:
    """A rank of a run: the training program, which also notes moments of rows."""
    from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch
    from rlhf_spmd.train import main as train
    from rlhf_spmd.workers import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker

    step_s, row_s = (float(sys.argv.pop(1)) / 1e3 for _ in range(2))
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
    train()


if __name__ == "__main__":
    train_and_note() if "RANK" in os.environ else main()
