"""Transitions of weights from training to generation: bytes, memory and time of the three methods.

    python scripts/bench/reshard.py ranks --out reshard.json    on 2, 4 and 8 gloo ranks, about 4 minutes on 2 cores
    python scripts/bench/reshard.py plans --out plans.json      Llama sizes on 8 to 1024 ranks by planning alone, about 10 minutes

Formulas are multiples of M, the bytes of the tensors that a layout splits (docs/parallelism.md); bytes and peaks are means over ranks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from measure import MIB, join_world, line, machine_facts, median, on_ranks, run_parts, save, slowest, table
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
LLAMAS = {  # stages that training takes
    "7B": (ModelSpec("llama", 32000, 4096, 11008, 32, 32, 32, 128), 1),
    "13B": (ModelSpec("llama", 32000, 5120, 13824, 40, 40, 40, 128), 1),
    "34B": (ModelSpec("llama", 32000, 8192, 22016, 48, 64, 8, 128), 2),
    "70B": (ModelSpec("llama", 32000, 8192, 28672, 80, 64, 8, 128), 4),
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
    answers = Fraction(1, layout.train.size) if method.everyone and layout.train.dp_shard == 1 else own
    return Costs(1 - answers, 1 + own, own)


def num_shards(layout: GenerationLayout) -> int:
    """Distinct training shards: p * t, and with ZeRO times the ranks of a shard group."""
    train = layout.train
    return train.pp * train.tp * train.dp_shard


# Transitions on ranks


def shards_at(spec: ModelSpec, layout: Layout | GenerationLayout) -> ShardsAt:
    blocks = layout.blocks if isinstance(layout, GenerationLayout) else 1
    return cache(lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, blocks))


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
        decoder = Decoder(MODEL, "lm", stage, layout.pp, tp, torch.float32, "meta", blocks=layout.blocks)
        train, generation = shards_at(MODEL, layout.train), shards_at(MODEL, layout)
        here: dict[str, Any] = {"max_bucket_bytes": bucket_bytes}
        self.hybrid = HybridWeights(
            train, lambda: self.parameters, decoder, generation, group, method, layout, world.rank, **here
        )

    def peer_parameters(self) -> list[DTensor]:
        """What the transition makes, as DTensors in equal parts over the gather group; the whole model where ranks need
        different parts of it, which DTensor has no other way to."""
        if self.group.size == 1:
            return []
        mesh = DeviceMesh.from_group(self.group.process_group, "cpu", mesh_dim_names=("gather",))
        plan, parameters = self.hybrid.plan, []
        whole = plan.from_whole or not plan.buckets
        for name, shard in (plan_params(MODEL, "lm", 0, 1, 0, 1) if whole else self.wanted).items():
            if len(shard.shape) == 2:
                dim = 1 if name.endswith(("out.weight", "down.weight")) else 0
                shape = [n // self.group.size if d == dim else n for d, n in enumerate(shard.shape)]
                parameters.append(DTensor.from_local(torch.randn(shape), mesh, [Shard(dim)], run_check=False))
        return parameters


def mean(world: World, values: Sequence[float]) -> list[float]:
    return (world.all.all_reduce(torch.tensor(values, dtype=torch.float64), "bench") / world.size).tolist()


def transition(world: World, name: str, train: Layout, pp: int, tp: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """The figures of one case. Collective over the world: every rank of it must call, in program order."""
    layout = layout_of(name, train, pp, tp)
    model = Model(world, name, layout, bucket_bytes)
    hybrid, group, peers = model.hybrid, model.group, model.peer_parameters()
    (received,) = mean(world, [hybrid.plan.transfer.received(hybrid.index)])
    share = torch.randn(round(received / max(group.size - 1, 1)))
    gathered = torch.empty(group.size * len(share))

    def plain() -> None:
        group.all_gather_into(gathered, share, "bench")

    def full_tensor() -> list[Tensor]:
        return [parameter.full_tensor() for parameter in peers]

    before = {key: parameter.detach().clone() for key, parameter in model.parameters.items()}
    seconds = slowest(world, [hybrid.to_generation, hybrid.to_training, plain, full_tensor], repeats)
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
    row |= dict(zip(("to_generation_s", "to_training_s", "all_gather_s", "full_tensor_s"), seconds, strict=True))
    if row["counted_bytes"]:
        row |= {f"of_{name}": row["to_generation_s"] / row[f"{name}_s"] for name in ("all_gather", "full_tensor")}
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
COLUMNS += "bucket_bytes to_generation_s to_training_s of_all_gather of_full_tensor"


def ranks(sizes: Sequence[int] = tuple(CASES), repeats: int = 5, bucket_mib: int = 256, out: Path | None = None) -> None:
    """Measured on as many ranks as ``--sizes`` say.

    ``replicated`` is what norms add, ``beyond`` what the counted peak has beyond the formula, there and back: buffers of the buckets
    on their way and the training parameters that they replace; ``bucket`` is the most that this may be. Times are medians over
    repetitions of the slowest rank's time. Beside ours: one plain ``all_gather_into_tensor`` of the same bytes in the same group, and
    ``DTensor.full_tensor`` of the same parameters.
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


# Transitions by planning alone: Method.plan as the ranks call it


def planned_transition(model: str, name: str, train: Layout, pp: int, tp: int) -> dict[str, Any]:
    spec, layout = LLAMAS[model][0], layout_of(name, train, pp, tp)
    method, whole = choose_method(name, layout), 2 * all_elements(spec, norms=False)
    costs, sides = costs_of(method, layout), (shards_at(spec, train), shards_at(spec, layout))
    indices, seconds, sums = planned_ranks(method, layout), [], torch.zeros(3, dtype=torch.float64)
    for index in indices:
        begin = time.process_time()
        plan = method.plan(layout, index, *sides, 128 * MIB, lambda rank: rank // 8)
        seconds.append(time.process_time() - begin)
        held, _ = shards_of(spec, layout, index)
        sums += torch.tensor([*group_mean(plan, index, len(method.gather_ranks(layout, index))), planned_peak(plan, held)])
    received, norms, peak = (2 * sums / len(indices)).tolist()
    row: dict[str, Any] = {"model": model, "ranks": train.size, "layout": f"{describe(train)} -> {pp}-{tp}", "engine": name}
    row |= {"formula_bytes": None if costs.received is None else float(costs.received * whole)}
    row |= {"planned_bytes": received - norms, "norms_bytes": norms, "formula_peak_bytes": float(costs.peak * whole)}
    row |= {"planned_peak_bytes": peak, "twice_bytes": float(costs.twice * whole)}
    return {**row, "plans": len(indices), "plan_s": median(seconds)}


def planned_ranks(method: Method, layout: GenerationLayout) -> list[int]:
    """One of each gather group in the first replica: what its members receive is the same, and other replicas' plans too. Where
    each rank has a plan of its own all of up to 64 ranks, or four."""
    size = layout.train.size
    if method.consecutive and not method.gathers_model:
        return list(range(0, size, 1 if size <= 64 else size // 4))
    first = layout.train.replica_group(0)
    return sorted({min(set(method.gather_ranks(layout, rank)) & set(first)) for rank in first})


def group_mean(plan: TransitionPlan, rank: int, members: int) -> tuple[float, float]:
    """Elements received, and of these norms, by a mean member of the gather group: what one has itself differs, by its stage."""
    if not plan.buckets:
        return plan.transfer.received(rank), norms_received(plan, rank)
    pieces = [piece for piece in (*plan.transfer.moves(), *plan.transfer.copies()) if piece.receiver == rank]
    norms = [piece for piece in pieces if "norm" in piece.source.parameter]
    each, of_norms = (sum(p.source.numel * (members - p.holders) / members for p in some) for some in (pieces, norms))
    return each, of_norms


def norms_received(plan: TransitionPlan, rank: int) -> int:
    """Elements of norms that come to a rank from others."""
    norms = [name for name in plan.transfer.order if "norm" in name]
    return sum(piece.source.numel for piece in plan.transfer.moves(norms) if piece.receiver == rank)


def planned_peak(plan: TransitionPlan, held: Shards) -> int:
    """Elements of parameters while bucket after bucket comes: what the buckets up to the one under way make, and the training shards
    whose values it and later ones need. (Execution starts further ones as far as all stay within one bucket, see docs.)"""
    sizes = {name: math.prod(shard.shape) for name, shard in plan.gathered.items()}
    left = sum(math.prod(shard.shape) for shard in held.values())
    if not plan.locations:
        return left + sum(sizes.values())
    most = 0
    made = accumulate(sum(sizes[target] for target in bucket) for bucket in plan.buckets)
    for so_far, names in zip(made, plan.finished(held), strict=False):
        most = max(most, so_far + left)
        left -= sum(math.prod(held[name].shape) for name in names)
    return most


def plans(models: Sequence[str] = tuple(LLAMAS), most_ranks: int = 1024, out: Path | None = None) -> None:
    """Planned alone, bf16 bytes.

    ``formula`` is that of the tensors that layouts split, - where a rank receives what it lacks; ``planned`` is what the plans say of
    them, ``norms`` of the norms. The planned peak is that of the ranks whose plans were made; one plan: process time.
    """
    begin, rows = time.perf_counter(), []
    for model, ranks in ((model, 1 << power) for model in models for power in range(3, 11)):
        stages = LLAMAS[model][1]
        slices = min(8, ranks // stages)
        dense = Layout(stages, slices, ranks // (stages * slices))
        pairs = [(dense, 1, slices // 2), (Layout(dp=ranks, zero=3), 1, 2 if stages == 1 else 8)]
        if ranks <= most_ranks:
            rows += [planned_transition(model, name, *pair) for pair in pairs for name in METHODS]
    keys = "formula_bytes planned_bytes norms_bytes formula_peak_bytes planned_peak_bytes twice_bytes plans plan_s"
    print(table(rows, f"model ranks layout engine {keys}"))
    print(f"\n{sum(row['plans'] for row in rows)} plans in {time.perf_counter() - begin:.1f} s")
    save({"bench": "reshard plan", "rows": rows}, out)


if __name__ == "__main__":
    run_parts(ranks, plans)
