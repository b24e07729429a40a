"""The planner's cost model and searches against what HybridFlow published. Pure arithmetic on one core.

    python scripts/bench/planner.py --out crossover.json

Llama-3 shapes, seconds of a step; what counts is the order of plans.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from measure import ROOT, machine_facts, run_parts, save, table
from rlhf_spmd import plan
from rlhf_spmd.planner.costs import Calibration, FormulaTimes
from rlhf_spmd.planner.planning import ProblemBuilder
from rlhf_spmd.planner.problem import Problem, RankRange, simulate
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, greedy_choices, plan_of

# Placements on real models

SHAPES = {  # HybridFlow's models are Llama's of these sizes
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def ppo_problem(models: Mapping[str, str], gpus: int) -> Problem:
    """Return PPO on A100 with 25 Gb/s a GPU between hosts, 1,024 rows of 1,024 + 1,024 tokens. ``models``: role -> size."""
    settings = ["data.max_prompt_length=1024", "data.max_response_length=1024", "algorithm.ppo_max_token_len_per_gpu=16384"]
    settings += ["data.train_batch_size=1024", "algorithm.ppo_mini_batch_size=128", "reward.function=null"]
    for role, size in models.items():
        settings.append(f"models.{role}.spec.vocab_size=32000")
        settings += [f"models.{role}.spec.{key}={value}" for key, value in zip(KEYS, SHAPES[size], strict=True)]
    run = plan.read_request(str(ROOT / "configs" / "quickstart_ppo.yaml"), settings)
    cluster = replace(run.config.cluster, nodes=max(gpus // 8, 1), gpus_per_node=min(gpus, 8), gpu="a100", network_gb_s=3.125)  # type: ignore[attr-defined]
    machine, _ = plan.machine_of(cluster)
    return ProblemBuilder(run.calls, machine, FormulaTimes(machine, Calibration()), 16384, 0).problem()


def best_with(problem: Problem, groups: Sequence[tuple[str, ...]]) -> float:
    """Seconds of the fastest step whose roles share ranks as ``groups`` say, over all numbers of ranks; inf where none fits."""
    ranges, ways, best = RankRanges(problem), CandidateTables(problem), float("inf")
    for sizes in product(*([size for size in ranges.by_size if size >= problem.size // 16] for _ in groups)):
        if sum(sizes) != problem.size:
            continue
        at, homes = 0, dict[str, RankRange]()
        for group, size in zip(groups, sizes, strict=True):
            ranks = next((ranks for ranks in ranges.by_size[size] if ranks.first == at), None)
            if ranks is None:
                break
            homes |= dict.fromkeys(group, ranks)
            at += size
        else:
            found = greedy_choices(ways, homes, {node: homes[problem.calls[node].role] for node in problem.movable})
            if found:
                schedule = simulate(problem, plan_of(found))
                best = min(best, schedule.seconds if schedule.fits else best)
    return best


PLACEMENTS: dict[str, list[tuple[str, ...]]] = {
    "colocate": [("actor", "reference", "critic", "reward")],
    "split": [("actor", "reference"), ("critic", "reward")],
    "standalone": [("actor",), ("reference",), ("critic",), ("reward",)],
}
# (actor, critic and reward): placement that was fastest at so many GPUs (HybridFlow, figure 12 and its text)
HYBRIDFLOW = {
    ("13B", "13B"): {16: "colocate", 32: "colocate", 64: "colocate", 128: "standalone"},
    ("34B", "34B"): {96: "split", 128: "split"},
    ("13B", "70B"): {64: "colocate", 96: "split", 128: "split"},
}


def crossover(out: Path | None = None) -> None:
    """HybridFlow, section 8.3: PPO on A100, 8 a host, 200 Gb/s a host, 1,024 rows of 1,024 + 1,024; all roles together, two sets
    (actor and reference; critic and reward), or each alone, every set on its best number of ranks, every call in its best
    layout."""
    found = list[dict[str, Any]]()
    for (actor, critic), best in HYBRIDFLOW.items():
        for gpus, said in best.items():
            models = {"actor": actor, "critic": critic, "reward": critic}
            problem = ppo_problem(models, gpus)
            seconds = {name: best_with(problem, groups) for name, groups in PLACEMENTS.items()}
            ours = min(seconds, key=lambda name: seconds[name])
            found.append({"actor": actor, "critic": critic, "gpus": gpus, "paper": said, "ours": ours, "seconds": seconds})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    keys = " ".join(["actor critic gpus", *PLACEMENTS, "paper ours"])
    print(table([{**row, **row["seconds"]} for row in found], keys))
    save({"bench": "planner_crossover", "machine": machine_facts(), "crossover": found}, out)


if __name__ == "__main__":
    run_parts(crossover)
