"""What the papers found, out of our simulator: searches on real models, HybridFlow's crossover, ReaL's gain, APP's separation.

    python scripts/bench/planner_findings.py --parts search crossover gain separation --out planner_findings.json

Pure arithmetic on one core: no devices, no runs. Settings are the papers', as far as they give them:

- search: certified optima for PPO, GRPO, ReMax and Safe-RLHF with 8B to 70B Llama-3 shapes on 16, 128 and 1,024 H100, and the other
  searches on the same tables. 512 rows of 1,024 + 1,024 tokens for each 16 GPUs.
- crossover (HybridFlow, section 8.3): PPO on A100 x 8 a host, 200 Gb/s a host, 1,024 rows of 1,024 + 1,024; all roles together, two
  sets (actor and reference; critic and reward), or each alone, every set on its best number of ranks, every call in its best layout.
- gain (ReaL, sections 8.1 and 8.2): the best plan against one layout of pre-training for all calls (tp inside the host, as few stages
  as fit).
- separation (APP): generation on ranks of its own one step ahead of training, against all roles on all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from measure import machine_facts, save, table
from rlhf_spmd import plan
from rlhf_spmd.config.registry import find
from rlhf_spmd.planner.costs import Calibration, FormulaTimes
from rlhf_spmd.planner.planning import ProblemBuilder
from rlhf_spmd.planner.problem import Problem, RankRange, simulate
from rlhf_spmd.planner.search import NoPlanError
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, fill, whole_plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHAPES = {  # ReaL's table 1; HybridFlow's models are Llama's of the same sizes
    "7B": (4096, 14336, 32, 32, 8),
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
ROLES = {
    "ppo": ("actor", "critic", "reward"),
    "grpo": ("actor", "reward"),
    "remax": ("actor", "reward"),
    "safe_rlhf": ("actor", "critic", "reward", "cost", "cost_critic"),
}


def planning(
    algorithm: str,
    models: Mapping[str, str],
    gpus: int,
    rows: int,
    gpu: str = "h100",
    network: float = 50.0,
    ahead: int = 0,
    vocab: int = 128256,
) -> ProblemBuilder:
    """``models``: role -> size; others as the actor. ``network``: GB/s of a GPU to other hosts."""
    sizes = [
        f"models.{role}.spec.{key}={value}"
        for role, size in models.items()
        for key, value in zip(KEYS, SHAPES[size], strict=True)
    ]
    sizes += [f"models.{role}.spec.vocab_size={vocab}" for role in models]
    samples = 8 if algorithm == "grpo" else 1
    lengths = ["data.max_prompt_length=1024", "data.max_response_length=1024", "algorithm.ppo_max_token_len_per_gpu=16384"]
    batch = [
        f"data.train_batch_size={rows // samples}",
        f"sampling.n={samples}",
        f"algorithm.ppo_mini_batch_size={rows // samples // 8}",
    ]
    run = plan.read_run(str(CONFIGS / f"quickstart_{algorithm}.yaml"), [*sizes, *lengths, *batch, "reward.function=null"])
    cluster = replace(run.config.cluster, nodes=max(gpus // 8, 1), gpus_per_node=min(gpus, 8), gpu=gpu, network_gb_s=network)  # type: ignore[attr-defined]
    machine, _ = plan.machine_of(cluster)
    return ProblemBuilder(run.calls, machine, FormulaTimes(machine, Calibration()), 16384, ahead)


def search_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for algorithm, size, gpus in product(ROLES, ("7B", "70B"), args.gpus):
        rows = 512 * max(gpus // 16, 1)
        made = planning(
            algorithm, {role: "7B" if size == "7B" or role not in ("actor",) else size for role in ROLES[algorithm]}, gpus, rows
        )
        started = time.perf_counter()
        problem = made.problem()
        row: dict[str, Any] = {"algorithm": algorithm, "actor": size, "gpus": gpus, "tables_s": time.perf_counter() - started}
        row["options"] = sum(len(call.options) for call in problem.calls)
        for name in args.searches:
            try:
                one = find("", "rlhf_spmd.planner.search", name, exports="search").search(problem, args.limit, 0)
                row[name] = {
                    "seconds": one.seconds,
                    "search_s": one.search_seconds,
                    "optimal": one.optimal,
                    "bound": one.lower_bound,
                }
            except NoPlanError as error:
                row[name] = {"error": str(error)}
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    lines = []
    for row in found:
        best = row["exact"].get("seconds")
        cells = [row["algorithm"], row["actor"], str(row["gpus"]), f"{row['options']:,}", f"{row['tables_s']:.2f}"]
        for name in args.searches:
            one = row[name]
            gap = "" if name == "exact" or not best or "error" in one else f" (+{one['seconds'] / best - 1:.1%})"
            proof = (
                ""
                if name != "exact" or "error" in one
                else " optimal"
                if one["optimal"]
                else f" gap {one['seconds'] / one['bound'] - 1:.1%}"
            )
            cells.append("-" if "error" in one else f"{one['seconds']:.1f}{gap}{proof}, {one['search_s']:.2f}")
        lines.append(cells)
    print(
        table(
            ["algorithm", "actor", "GPUs", "options", "tables s", *(f"{name}: step s, search s" for name in args.searches)],
            lines,
            3,
        )
    )
    return found


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
            found = fill(ways, homes, {node: homes[problem.calls[node].role] for node in problem.lent})
            if found:
                schedule = simulate(problem, whole_plan(found))
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


def crossover_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, lines = [], []
    for (actor, critic), best in HYBRIDFLOW.items():
        for gpus, said in best.items():
            made = planning("ppo", {"actor": actor, "critic": critic, "reward": critic}, gpus, 1024, "a100", 3.125, vocab=32000)
            problem = made.problem()
            seconds = {name: best_with(problem, groups) for name, groups in PLACEMENTS.items()}
            ours = min(seconds, key=lambda name: seconds[name])
            found.append({"actor": actor, "critic": critic, "gpus": gpus, "paper": said, "ours": ours, "seconds": seconds})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            lines.append([f"{actor} + {critic}", str(gpus), *(f"{value:.1f}" for value in seconds.values()), said, ours])
    print(table(["models", "GPUs", *(f"{name}, s" for name in PLACEMENTS), "paper's fastest", "ours"], lines, 2))
    return found


def pretraining_layout(problem: Problem) -> float:
    """One layout for all calls on all ranks: tp of a host, the fewest stages that fit; inf where none does."""
    whole = RankRange(0, problem.size)
    for pp in sorted({option.pp for call in problem.calls for option in call.options}):
        calls = []
        for call in problem.calls:
            kept = tuple(o for o in call.options if (o.size, o.tp, o.pp) == (problem.size, min(problem.local_size, 8), pp))
            calls.append(replace(call, options=kept))
        if not all(call.options for call in calls):
            continue
        smaller = replace(problem, calls=tuple(calls))
        found = fill(CandidateTables(smaller), dict.fromkeys(problem.homes, whole), dict.fromkeys(problem.lent, whole))
        if found:
            schedule = simulate(smaller, whole_plan(found))
            if schedule.fits:
                return schedule.seconds
    return float("inf")


# (actor, critic, GPUs, rows at a context of 2,048): ReaL's settings; throughput of its search over its heuristic, tables 6 and text
REAL = [("7B", "7B", 16, 512), ("13B", "7B", 32, 1024), ("34B", "7B", 64, 2048), ("70B", "7B", 128, 4096)]


def gain_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, lines = [], []
    for actor, critic, gpus, rows in REAL:
        problem = planning("ppo", {"actor": actor, "critic": critic, "reward": critic}, gpus, rows).problem()
        best = find("", "rlhf_spmd.planner.search", "exact", exports="search").search(problem, args.limit, 0)
        heuristic = pretraining_layout(problem)
        found.append({"actor": actor, "critic": critic, "gpus": gpus, "searched": best.seconds, "heuristic": heuristic})
        lines.append(
            [f"{actor} + {critic}", str(gpus), f"{heuristic:.1f}", f"{best.seconds:.1f}", f"{heuristic / best.seconds:.2f}"]
        )
    print(table(["models", "GPUs", "one layout, s", "searched, s", "times as fast"], lines, 2))
    return found


def separation_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    found, lines = [], []
    for size, gpus in product(("7B", "13B", "34B", "70B"), (32, 64)):
        seconds: dict[str, float] = {}
        models = dict.fromkeys(("actor", "critic", "reward"), size)
        problem = planning("ppo", models, gpus, 512, "a100", 3.125, vocab=32000).problem()
        seconds["flattening"] = best_with(problem, PLACEMENTS["colocate"])
        ahead = planning("ppo", models, gpus, 512, "a100", 3.125, ahead=1, vocab=32000).problem()
        seconds["separation, one step ahead"] = best_separated(ahead)
        found.append({"models": size, "gpus": gpus, "seconds": seconds})
        one, other = seconds.values()
        lines.append([size, str(gpus), f"{one:.1f}", f"{other:.1f}", f"{one / other:.2f}"])
    print(table(["models", "GPUs", "flattening, s", "separation, s", "times as fast"], lines, 2))
    return found


def best_separated(problem: Problem) -> float:
    """Generation on the first ranks, everything else on the others, over all shares."""
    ranges, ways, best = RankRanges(problem), CandidateTables(problem), float("inf")
    for size in ranges.by_size:
        apart = next((ranks for ranks in ranges.by_size[size] if ranks.first == 0), None)
        rest = next((ranks for ranks in ranges.by_size.get(problem.size - size, ()) if ranks.first == size), None)
        if apart is None or rest is None:
            continue
        lent = {node: apart if node in problem.generating else rest for node in problem.lent}
        found = fill(ways, dict.fromkeys(problem.homes, rest), lent)
        if found:
            schedule = simulate(problem, whole_plan(found))
            best = min(best, schedule.seconds if schedule.fits else best)
    return best


PARTS = {"search": search_part, "crossover": crossover_part, "gain": gain_part, "separation": separation_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--searches", nargs="+", default=["exact", "mcmc", "enumerate", "grid"])
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each search")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for part in args.parts:
        print(f"\n{part}\n")
        found[part] = PARTS[part](args)
    save({"bench": "planner_findings", "machine": machine_facts(), **found}, args.out)


if __name__ == "__main__":
    main()
