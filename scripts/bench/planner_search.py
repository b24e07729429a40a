"""The planner's searches beside each other on made-up tables: seconds of the plan, gap to the optimum, search time.

Usage: python scripts/bench/planner_search.py [--ranks 16 128 1024] [--algorithms ppo grpo] [--searches exact mcmc] [--limit 10]

Costs are arithmetic only (operations over rates, a few per cent for tensor slices and pipeline bubbles), so that the searches are
compared, not the estimator. One core; no devices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rlhf_spmd.config.registry import find
from rlhf_spmd.planner.problem import CallNode, Option, Problem
from rlhf_spmd.planner.search import SearchResult

LOCAL, MEMORY, FLOPS, BANDWIDTH, LINK, NETWORK = 8, 76e9, 0.55 * 989e12, 2.6e12, 350e9, 40e9
PROMPT, RESPONSE = 1024, 1024


@dataclass(frozen=True)
class Model:
    params: float
    layers: int
    hidden: int
    kv: int  # bytes of a token's keys and values in one layer


MODELS = {"7b": Model(8.0e9, 32, 4096, 4096), "13b": Model(14e9, 40, 5120, 20480), "70b": Model(70.6e9, 80, 8192, 4096)}

# name, role, kind, names of the calls before
PPO = [
    ("generate", "actor", "generate", ()),
    ("reward", "reward", "infer", ("generate",)),
    ("values", "critic", "infer", ("generate",)),
    ("reference", "reference", "infer", ("generate",)),
    ("train_critic", "critic", "train", ("reward", "values", "reference")),
    ("train_actor", "actor", "train", ("reward", "values", "reference")),
]
GRPO = [
    ("generate", "actor", "generate", ()),
    ("reward", "reward", "infer", ("generate",)),
    ("log_probs", "actor", "infer", ("generate",)),
    ("reference", "reference", "infer", ("generate",)),
    ("train_actor", "actor", "train", ("reward", "reference", "log_probs")),
]
REMAX = [
    ("generate", "actor", "generate", ()),
    ("greedy", "actor", "generate", ()),
    ("reward", "reward", "infer", ("generate",)),
    ("baseline", "reward", "infer", ("greedy",)),
    ("reference", "reference", "infer", ("generate",)),
    ("train_actor", "actor", "train", ("reward", "baseline", "reference")),
]
SAFE = [
    ("generate", "actor", "generate", ()),
    ("reward", "reward", "infer", ("generate",)),
    ("cost", "cost", "infer", ("generate",)),
    ("log_probs", "actor", "infer", ("generate",)),
    ("values", "critic", "infer", ("generate",)),
    ("cost_values", "cost_critic", "infer", ("generate",)),
    ("reference", "reference", "infer", ("generate",)),
    ("train_critic", "critic", "train", ("reward", "cost", "log_probs", "values", "cost_values", "reference")),
    ("train_cost_critic", "cost_critic", "train", ("reward", "cost", "log_probs", "values", "cost_values", "reference")),
    ("train_actor", "actor", "train", ("reward", "cost", "log_probs", "values", "cost_values", "reference")),
]
ALGORITHMS = {"ppo": PPO, "grpo": GRPO, "remax": REMAX, "safe": SAFE}


def layouts(ranks: int, model: Model) -> Iterator[tuple[int, int, int, int]]:
    sizes = [1 << n for n in range(ranks.bit_length()) if 1 << n <= ranks] + ([3 * ranks // 4] if ranks >= 32 else [])
    for size, tp, pp in product(sizes, (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        if size % (tp * pp) == 0 and model.layers % pp == 0:
            yield size, tp, pp, size // (tp * pp)


def train(model: Model, ranks: int, rows: int, mini_batches: int = 8) -> Iterator[Option]:
    tokens = rows * (PROMPT + RESPONSE)
    for (size, tp, pp, dp), zero, micro, full in product(layouts(ranks, model), (0, 1, 3), (2048, 8192, 16384), (False, True)):
        if rows // mini_batches < dp or (zero and dp == 1) or (zero == 3 and pp > 1):
            continue
        batches = max(math.ceil(tokens / mini_batches / dp / micro), 1)
        slices = 1 + 0.05 * math.log2(tp) + 0.15 * model.hidden / (micro * 8)
        compute = (8 if full else 6) * model.params * tokens / size / FLOPS * slices * (1 + (pp - 1) / batches)
        part = model.params / (tp * pp)
        sync = mini_batches * part * (4 if zero < 3 else 4 * (1 + batches)) / (LINK if size <= LOCAL else NETWORK) * (dp > 1)
        held = part * {0: 18, 1: 6 + 12 / dp, 3: 18 / dp}[zero]
        kept = min(pp, batches) * micro * model.hidden * model.layers / pp * ((2 + 34 / model.layers * pp) if full else 34) / tp
        yield Option(size, pp, tp, compute + sync, held, kept + (part * 2 if zero == 3 else 0), (zero, micro, full))


def infer(model: Model, ranks: int, rows: int) -> Iterator[Option]:
    tokens = rows * (PROMPT + RESPONSE)
    for (size, tp, pp, dp), micro in product(layouts(ranks, model), (2048, 8192, 32768)):
        if rows >= dp:
            batches = max(math.ceil(tokens / dp / micro), 1)
            slices = 1 + 0.05 * math.log2(tp) + 0.15 * model.hidden / (micro * 8)
            seconds = 2 * model.params * tokens / size / FLOPS * slices * (1 + (pp - 1) / batches)
            yield Option(size, pp, tp, seconds, 2 * model.params / (tp * pp), micro * model.hidden * 34 / tp, micro)


def generate(model: Model, ranks: int, rows: int) -> Iterator[Option]:
    for (size, tp, pp, dp), flying, graphs in product(layouts(ranks, model), (16, 32, 64, 128, 256, 512), (False, True)):
        if rows >= dp and pp <= 4:
            waves, at_once = math.ceil(rows / dp / flying), min(flying, rows / dp)
            cache = at_once * (PROMPT + RESPONSE) * model.kv * model.layers / (tp * pp)
            read = (2 * model.params / (tp * pp) + 0.75 * cache) / BANDWIDTH
            host = model.layers / pp * (2e-6 * (tp > 1) * 20 + (5e-6 if graphs else 300e-6))
            step = max(read, 2 * model.params * at_once / (tp * pp) / FLOPS) + host
            seconds = waves * RESPONSE * step * pp + 2 * model.params * rows * PROMPT / size / FLOPS
            yield Option(size, pp, tp, seconds, 0.0, cache * (1.1 if graphs else 1.0), (flying, graphs))


def problem(algorithm: str, ranks: int, large: str, small: str, rows: int, ahead: int = 0) -> Problem:
    """Actor and reference are ``large``, all others ``small``; by default of as many rows as the ranks."""
    graph = ALGORITHMS[algorithm]
    names = [name for name, *_ in graph]
    kinds = {"train": train, "infer": infer, "generate": generate}
    calls: list[CallNode] = []
    for name, role, kind, before in graph:
        model = MODELS[large if role in ("actor", "reference") else small]
        trained = any(other == role and k == "train" for _, other, k, _ in graph)
        home = kind == "train" if trained else not any(call.role == role for call in calls)
        options = tuple(kinds[kind](model, ranks, rows))
        calls.append(CallNode(name, role, frozenset(map(names.index, before)), options, home))
    weights = {call.role: 2 * MODELS[large if call.role in ("actor", "reference") else small].params for call in calls}
    generating = frozenset(n for n, (_, _, kind, _) in enumerate(graph) if kind == "generate")
    return Problem(tuple(calls), LOCAL, (MEMORY,) * ranks, weights, LINK, NETWORK, ahead, generating if ahead else frozenset())


CASES = {
    16: [("7b", "7b", 512)],
    128: [("70b", "7b", 1024), ("70b", "70b", 4096)],
    1024: [("70b", "7b", 4096), ("70b", "70b", 8192)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--searches", nargs="+", default=["exact", "mcmc", "enumerate", "grid"])
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each search")
    parser.add_argument("--ahead", type=int, default=0, help="steps that generation is ahead of training")
    args = parser.parse_args()
    print("algorithm  ranks models     search        step s   bound s   above evaluated  took s")
    for ranks in args.ranks:
        for (large, small, rows), algorithm in product(CASES[ranks], args.algorithms):
            table = problem(algorithm, ranks, large, small, rows, args.ahead)
            best: SearchResult | None = None
            for name in args.searches:
                module = find("plan.search", "rlhf_spmd.planner.search", name, exports="search")
                try:
                    found = module.search(table, limit=args.limit)
                except ValueError as error:
                    print(f"{algorithm:10} {ranks:5} {large + '+' + small:10} {name:10} {error}")
                    continue
                best = best or found
                above = found.seconds / best.lower_bound - 1 if best.lower_bound else math.nan
                print(
                    f"{algorithm:10} {ranks:5} {large + '+' + small:10} {name:10} {found.seconds:9.3f} {found.lower_bound:9.3f} "
                    f"{above:7.2%} {found.evaluations:9} {found.search_seconds:7.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
