"""The planner's searches beside each other on made-up tables: seconds of the plan, gap to the optimum, search time.

    python scripts/bench/planner_search.py --limit 4 --out planner_search.json

Costs are arithmetic only (operations over rates, a few per cent for tensor slices and pipeline bubbles), so that the searches are
compared, not the estimator. ``--limit``: seconds for each search; ``--ahead``: steps that generation is ahead of training. One
core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from measure import chosen, line, run_parts, save, table
from rlhf_spmd.config.registry import find
from rlhf_spmd.planner.problem import CallNode, Option, Problem

LOCAL, MEMORY, FLOPS, BANDWIDTH, LINK, NETWORK = 8, 76e9, 0.55 * 989e12, 2.6e12, 350e9, 40e9
PROMPT, RESPONSE = 1024, 1024


@dataclass(frozen=True)
class Model:
    params: float
    layers: int
    hidden: int
    kv: int  # bytes of a token's keys and values in one layer


MODELS = {"7b": Model(8.0e9, 32, 4096, 4096), "13b": Model(14e9, 40, 5120, 20480), "70b": Model(70.6e9, 80, 8192, 4096)}

# role:kind of each call; what infers waits for call 0, or for the one whose number it has, what trains for all that infers
GRAPHS = {
    "ppo": "actor:generate reward critic reference critic:train actor:train",
    "grpo": "actor:generate reward actor reference actor:train",
    "remax": "actor:generate actor:generate reward reward:1 reference actor:train",
    "safe": "actor:generate reward cost actor critic cost_critic reference critic:train cost_critic:train actor:train",
}


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
        yield Option(
            size,
            pp,
            tp,
            compute + sync,
            held,
            (kept + (part * 2 if zero == 3 else 0),),
            settings={"zero": zero, "micro_tokens": micro, "full": full},
        )


def infer(model: Model, ranks: int, rows: int) -> Iterator[Option]:
    tokens = rows * (PROMPT + RESPONSE)
    for (size, tp, pp, dp), micro in product(layouts(ranks, model), (2048, 8192, 32768)):
        if rows >= dp:
            batches = max(math.ceil(tokens / dp / micro), 1)
            slices = 1 + 0.05 * math.log2(tp) + 0.15 * model.hidden / (micro * 8)
            seconds = 2 * model.params * tokens / size / FLOPS * slices * (1 + (pp - 1) / batches)
            yield Option(
                size,
                pp,
                tp,
                seconds,
                2 * model.params / (tp * pp),
                (micro * model.hidden * 34 / tp,),
                settings={"micro_tokens": micro},
            )


def generate(model: Model, ranks: int, rows: int) -> Iterator[Option]:
    for (size, tp, pp, dp), flying, graphs in product(layouts(ranks, model), (16, 32, 64, 128, 256, 512), (False, True)):
        if rows >= dp and pp <= 4:
            waves, at_once = math.ceil(rows / dp / flying), min(flying, rows / dp)
            cache = at_once * (PROMPT + RESPONSE) * model.kv * model.layers / (tp * pp)
            read = (2 * model.params / (tp * pp) + 0.75 * cache) / BANDWIDTH
            host = model.layers / pp * (2e-6 * (tp > 1) * 20 + (5e-6 if graphs else 300e-6))
            step = max(read, 2 * model.params * at_once / (tp * pp) / FLOPS) + host
            seconds = waves * RESPONSE * step * pp + 2 * model.params * rows * PROMPT / size / FLOPS
            yield Option(
                size,
                pp,
                tp,
                seconds,
                0.0,
                (cache * (1.1 if graphs else 1.0),),
                settings={"max_num_seqs": flying, "graphs": graphs},
            )


def problem(algorithm: str, ranks: int, large: str, small: str, rows: int, ahead: int = 0) -> Problem:
    """Actor and reference are ``large``, all others ``small``; by default of as many rows as the ranks."""
    graph = [(role, kind) for role, _, kind in (text.partition(":") for text in GRAPHS[algorithm].split())]
    infers, calls = [n for n, (_, kind) in enumerate(graph) if not kind or kind.isdecimal()], list[CallNode]()
    for n, (role, kind) in enumerate(graph):
        model = MODELS[large if role in ("actor", "reference") else small]
        before = infers if kind == "train" else [] if kind == "generate" else [int(kind or 0)]
        home = kind == "train" if (role, "train") in graph else not any(call.role == role for call in calls)
        options = {"generate": generate, "train": train}.get(kind, infer)(model, ranks, rows)
        calls.append(CallNode(f"{n}.{role}", role, frozenset(before), tuple(options), home))
    weights = {call.role: 2 * MODELS[large if call.role in ("actor", "reference") else small].params for call in calls}
    generating = frozenset(n for n, (_, kind) in enumerate(graph) if kind == "generate")
    return Problem(tuple(calls), LOCAL, (MEMORY,) * ranks, weights, LINK, NETWORK, ahead, generating if ahead else frozenset())


CASES = {
    16: [("7b", "7b", 512)],
    128: [("70b", "7b", 1024), ("70b", "70b", 4096)],
    1024: [("70b", "7b", 4096), ("70b", "70b", 8192)],
}


def run_searches(made: Problem, searches: Sequence[str], limit: float) -> Iterator[dict[str, Any]]:
    """A row for each; ``above`` is against the bound of the first that proves one."""
    bound = 0.0
    for name in searches:
        try:
            found = find("plan.search", "rlhf_spmd.planner.search", name, required_attribute="search").search(made, limit=limit)
        except ValueError as error:
            yield {"search": name, "error": str(error)}
            continue
        bound = bound or found.lower_bound
        row = {"search": name, "step_s": found.seconds, "bound_s": found.lower_bound, "evaluated": found.evaluations}
        yield {**row, "above": found.seconds / bound - 1 if bound else None, "search_s": found.search_seconds}


def planner_search(
    ranks: Sequence[int] = tuple(CASES),
    algorithms: Sequence[str] | None = None,
    searches: Sequence[str] = ("exact", "mcmc", "enumerate", "grid"),
    limit: float = 10.0,
    ahead: int = 0,
    out: Path | None = None,
) -> None:
    columns, rows = "algorithm ranks models search step_s bound_s above evaluated search_s", []
    print(table([], columns))
    for number in ranks:
        for (large, small, batch), algorithm in product(CASES[number], chosen(algorithms, GRAPHS)):
            head = {"algorithm": algorithm, "ranks": number, "models": f"{large} + {small}"}
            for row in run_searches(problem(algorithm, number, large, small, batch, ahead), searches, limit):
                rows.append({**head, **row})
                print(line(rows[-1], columns), flush=True)
    save({"bench": "planner_search", "rows": rows}, out)


if __name__ == "__main__":
    run_parts(planner_search)
