"""Transitions of weights from training to generation: bytes, memory and time of the three methods.

    python scripts/bench/reshard.py --out reshard.json    on 2, 4 and 8 gloo ranks, about 4 minutes on 2 cores

Formulas are multiples of M, the bytes of the tensors that a layout splits (docs/parallelism.md); bytes and peaks are means over ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from measure import MIB, join_world, line, machine_facts, on_ranks, run_parts, save, slowest, table
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import METHODS, HybridWeights, choose_method, missing_elements
from rlhf_spmd.reshard.holdings import held_by
from rlhf_spmd.reshard.reshard_methods import Method, TransitionPlan

Shards = Mapping[str, ParamShard]
ShardsAt = Callable[[int, int], Shards]
MODEL = ModelSpec("llama", 4096, 512, 1536, 4, 8, 8, 64)  # 17.8 M parameters, fp32; every layout of CASES divides all of it
CASES = {  # ranks -> (training layout, p_g, t_g)
    2: [(Layout(tp=2), 1, 1), (Layout(pp=2), 1, 1), (Layout(dp=2, zero=3), 1, 1)],
    4: [
        *((Layout(tp=4), 1, t) for t in (1, 2)),
        (Layout(tp=2, dp=2), 1, 1),
        *((Layout(pp=2, tp=2), p, t) for p, t in ((1, 1), (1, 2), (2, 1))),
        *((Layout(dp=4, zero=3), 1, t) for t in (1, 2)),
        (Layout(tp=2, dp=2, zero=2), 1, 1),
    ],
    8: [
        *((layout, 1, 2) for layout in (Layout(tp=8), Layout(tp=4, dp=2), Layout(pp=2, tp=4), Layout(2, 2, 2, 1))),
        (Layout(dp=8, zero=3), 2, 2),
    ],
}


# What a transition costs by the papers' formulas


@dataclass(frozen=True)
class Costs:
    """In multiples of M, the bytes of the tensors that the layout splits; the mean over ranks where stages differ.

    received: per rank and transition; None: it differs from rank to rank, see :func:`missing_elements`. peak: most parameter
    memory, buckets aside. twice: what is held a second time while generating.
    """

    received: Fraction | None
    peak: Fraction
    twice: Fraction


def costs_of(method: Method, layout: GenerationLayout) -> Costs:
    """(t p - t_g p_g) / (t_g p_g * t p) received by ``zero_redundancy`` without ZeRO."""
    part, own = Fraction(1, layout.pp * layout.tp), Fraction(1, num_shards(layout))
    if not method.consecutive:
        return Costs(part - own, part, Fraction(0))
    if not method.gathers_model:
        return Costs(None, part + own, own)
    answers = Fraction(1, layout.train.size) if method.gathers_from_pool and layout.train.dp_shard == 1 else own
    return Costs(1 - answers, 1 + own, own)


def num_shards(layout: GenerationLayout) -> int:
    """Distinct training shards: p * t, and with ZeRO times the ranks of a shard group."""
    train = layout.train
    return train.pp * train.tp * train.dp_shard


# Transitions on ranks


def shards_at(spec: ModelSpec, layout: Layout | GenerationLayout) -> ShardsAt:
    fused_slices = layout.fused_slices if isinstance(layout, GenerationLayout) else 1
    return cache(lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, fused_slices))


def shards_of(spec: ModelSpec, layout: GenerationLayout, index: int) -> tuple[Shards, Shards]:
    """What a rank holds in training and what in generation."""
    sides: tuple[Layout | GenerationLayout, ...] = (layout.train, layout)
    train, generation = (held_by(side, shards_at(spec, side), index) for side in sides)
    return train, generation


def elements(shards: Shards, norms: bool) -> int:
    return sum(math.prod(shard.shape) for name, shard in shards.items() if ("norm" in name) == norms)


def all_elements(spec: ModelSpec, norms: bool) -> int:
    return elements(plan_params(spec, "lm", 0, 1, 0, 1), norms)


def layout_of(name: str, train: Layout, pp: int, tp: int) -> GenerationLayout:
    return generation_layout(train, pp, tp, METHODS[name].consecutive)


def describe(layout: Layout) -> str:
    return f"{layout.pp}-{layout.tp}-{layout.dp}" + (f" z{layout.zero}" if layout.zero else "")


class Model:
    """Random training parameters, a generation module and the weights of both on one rank."""

    def __init__(self, world: World, name: str, layout: GenerationLayout, bucket_bytes: int) -> None:
        method = choose_method(name, layout)
        group = world.group(method.gather_ranks(layout, world.rank), "gather", channel="gather")
        assert group is not None
        group.connect()
        self.group = group
        self.shards, self.wanted = shards_of(MODEL, layout, world.rank)
        self.parameters: dict[str, Tensor] = {
            name: nn.Parameter(torch.randn(s.shape) if len(s.shape) > 1 else torch.ones(s.shape))
            for name, s in self.shards.items()
        }
        stage, _, _, tp_rank = layout.coordinate(world.rank)
        tp = Group("tp", tuple(range(layout.tp)), tp_rank)
        decoder = Decoder(MODEL, "lm", stage, layout.pp, tp, torch.float32, "meta", fused_slices=layout.fused_slices)
        train, generation = shards_at(MODEL, layout.train), shards_at(MODEL, layout)
        here: dict[str, Any] = {"max_bucket_bytes": bucket_bytes}
        self.hybrid = HybridWeights(
            train, lambda: self.parameters, decoder, generation, group, method, layout, world.rank, **here
        )


def mean(world: World, values: Sequence[float]) -> list[float]:
    return (world.all.all_reduce(torch.tensor(values, dtype=torch.float64), "bench") / world.size).tolist()


def transition(world: World, name: str, train: Layout, pp: int, tp: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """The figures of one case. Collective over the world: every rank of it must call, in program order."""
    layout = layout_of(name, train, pp, tp)
    model = Model(world, name, layout, bucket_bytes)
    hybrid, group = model.hybrid, model.group
    (received,) = mean(world, [hybrid.plan.transfer.received(hybrid.index)])
    share = torch.randn(round(received / max(group.size - 1, 1)))
    gathered = torch.empty(group.size * len(share))

    def plain() -> None:
        group.all_gather_into(gathered, share, "bench")

    before = {key: parameter.detach().clone() for key, parameter in model.parameters.items()}
    seconds = slowest(world, [hybrid.to_generation, hybrid.to_training, plain], repeats)
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.parameters.items()), "not the same bits"
    costs, whole = costs_of(choose_method(name, layout), layout), 4 * all_elements(MODEL, norms=False)
    norms = elements(model.wanted, True) + (elements(model.shards, True) if costs.twice else 0)
    norms += (all_elements(MODEL, norms=True) - elements(model.wanted, True)) if hybrid.plan.from_whole else 0
    done, replicated = hybrid.cost, 4.0 * norms_received(hybrid.plan, world.rank)
    lacks = 4.0 * missing_elements(model.shards, model.wanted)
    local = [done.bytes_received, replicated, done.peak_bytes, 4 * norms, lacks, hybrid.bucket_bytes]
    received, replicated, peak, held_norms, lacked, bucket = mean(world, local)
    formula = float(costs.received * whole) if costs.received is not None else lacked - replicated
    row: dict[str, Any] = {
        "layout": f"{describe(train)} -> {pp}-{tp}",
        "ranks": world.size,
        "engine": name,
        "group": group.size,
    }
    row |= {"formula_bytes": formula, "counted_bytes": received - replicated, "replicated_bytes": replicated}
    held = float(costs.peak * whole) + held_norms
    row |= {"exact": received - replicated == formula, "formula_peak_bytes": held, "counted_peak_bytes": peak}
    row |= {"beyond_bytes": peak - held, "bucket_bytes": bucket, "twice_bytes": float(costs.twice * whole)}
    row |= dict(zip(("to_generation_s", "to_training_s", "all_gather_s"), seconds, strict=True))
    if row["counted_bytes"]:
        row["of_all_gather"] = row["to_generation_s"] / row["all_gather_s"]
    return row


def transitions(repeats: int, bucket_bytes: int) -> dict[str, Any]:
    world, rows = join_world(), []
    for train, pp, tp in CASES[world.size]:
        for name in METHODS:
            rows.append(transition(world, name, train, pp, tp, repeats, bucket_bytes))
            if world.rank == 0:
                print(line(rows[-1], COLUMNS), file=sys.stderr, flush=True)
    world.all.barrier("bench")
    return {"rows": rows}


COLUMNS = "layout ranks engine formula_bytes counted_bytes replicated_bytes formula_peak_bytes counted_peak_bytes beyond_bytes "
COLUMNS += "bucket_bytes to_generation_s to_training_s of_all_gather"


def ranks(sizes: Sequence[int] = tuple(CASES), repeats: int = 5, bucket_mib: int = 256, out: Path | None = None) -> None:
    """Measured on as many ranks as ``--sizes`` say.

    ``replicated`` is what norms add, ``beyond`` what the counted peak has beyond the formula, there and back: buffers of the buckets
    on their way and the training parameters that they replace; ``bucket`` is the most that this may be. Times are medians over
    repetitions of the slowest rank's time. Beside ours: one plain ``all_gather_into_tensor`` of the same bytes in the same group.
    """
    runs = [on_ranks(size, transitions, repeats=repeats, bucket_bytes=bucket_mib * MIB) for size in sizes]
    rows = [row for run in runs for row in run["rows"]]
    print(table(rows, COLUMNS))
    within = sum(row["beyond_bytes"] <= row["bucket_bytes"] for row in rows)
    print(
        f"\nM = {4 * all_elements(MODEL, norms=False) / 1e6:.2f} MB; bytes exact in {sum(row['exact'] for row in rows)} of "
        f"{len(rows)} rows; beyond the formula one bucket at most in {within}"
    )
    save({"bench": "reshard", "machine": machine_facts(), "rows": rows}, out)


def norms_received(plan: TransitionPlan, rank: int) -> int:
    """Elements of norms that come to a rank from others."""
    norms = [name for name in plan.transfer.order if "norm" in name]
    return sum(piece.source.numel for piece in plan.transfer.remote_copies(norms) if piece.receiver == rank)


if __name__ == "__main__":
    run_parts(ranks)
