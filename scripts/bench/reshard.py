"""Transitions of weights from training to generation: bytes, memory and time of the three methods.

    python scripts/bench/reshard.py --out reshard.json       on 2, 4 and 8 gloo ranks, about 4 minutes on 2 cores
    python scripts/bench/reshard.py --plan --out plan.json   Llama sizes on 8 to 1024 ranks by planning alone, about 10 minutes

Formulas are multiples of M, the bytes of the tensors that a layout splits (docs/parallelism.md); bytes and peaks are means over
ranks. ``replicated`` is what norms add, ``beyond`` what the counted peak has beyond the formula, there and back: buffers of the
buckets on their way and the training parameters that they replace; ``bucket`` is the most that this may be. Times are medians
over repetitions of the slowest rank's time. Beside ours: one plain ``all_gather_into_tensor`` of the same bytes in the same group,
and ``DTensor.full_tensor`` of the same parameters. A second table: transition and a first forward pass of 512 tokens, one after
the other and overlapping.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from measure import MIB, machine_facts, median, on_ranks, table
from reshard_costs import costs_of
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.process.ending import end_process
from rlhf_spmd.reshard import METHODS, HybridWeights, choose_method, missing_elements
from rlhf_spmd.reshard.methods import Method, TransitionPlan
from rlhf_spmd.reshard.plan import held_by

BUCKET_BYTES = 256 << 20
Shards = Mapping[str, ParamShard]
ShardsAt = Callable[[int, int], Shards]
MODEL = ModelSpec("llama", 4096, 512, 1536, 4, 8, 8, 64)  # 17.8 M parameters; every layout below divides all of it
CASES = {  # ranks -> (training layout, p_g, t_g)
    2: [(Layout(tp=2), 1, 1), (Layout(pp=2), 1, 1), (Layout(dp=2, zero=3), 1, 1)],
    4: [
        (Layout(tp=4), 1, 1),
        (Layout(tp=4), 1, 2),
        (Layout(tp=2, dp=2), 1, 1),
        (Layout(pp=2, tp=2), 1, 1),
        (Layout(pp=2, tp=2), 1, 2),
        (Layout(pp=2, tp=2), 2, 1),
        (Layout(dp=4, zero=3), 1, 1),
        (Layout(dp=4, zero=3), 1, 2),
        (Layout(tp=2, dp=2, zero=2), 1, 1),
    ],
    8: [
        (Layout(tp=8), 1, 2),
        (Layout(tp=4, dp=2), 1, 2),
        (Layout(pp=2, tp=4), 1, 2),
        (Layout(pp=2, tp=2, dp=2, zero=1), 1, 2),
        (Layout(dp=8, zero=3), 2, 2),
    ],
}
LLAMAS = {  # hidden, intermediate, layers, heads, KV heads, vocabulary; stages that training takes
    "7B": (ModelSpec("llama", 32000, 4096, 11008, 32, 32, 32, 128), 1),
    "13B": (ModelSpec("llama", 32000, 5120, 13824, 40, 40, 40, 128), 1),
    "34B": (ModelSpec("llama", 32000, 8192, 22016, 48, 64, 8, 128), 2),
    "70B": (ModelSpec("llama", 32000, 8192, 28672, 80, 64, 8, 128), 4),
}


def train_shards_at(spec: ModelSpec, layout: Layout) -> ShardsAt:
    return cache(lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp))


def generation_shards_at(spec: ModelSpec, layout: GenerationLayout) -> ShardsAt:
    return cache(lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, layout.blocks))


def shards_of(spec: ModelSpec, layout: GenerationLayout, index: int) -> tuple[Shards, Shards]:
    """What a rank holds in training and what in generation."""
    return held_by(layout.train, train_shards_at(spec, layout.train), index), held_by(
        layout, generation_shards_at(spec, layout), index
    )


def elements(shards: Shards, norms: bool) -> int:
    return sum(math.prod(shard.shape) for name, shard in shards.items() if ("norm" in name) == norms)


def split_elements(spec: ModelSpec) -> int:
    return elements(plan_params(spec, "lm", 0, 1, 0, 1), norms=False)


def layout_of(name: str, train: Layout, pp: int, tp: int) -> GenerationLayout:
    return generation_layout(train, pp, tp, METHODS[name].consecutive)


def describe(train: Layout, pp: int, tp: int) -> str:
    return f"{train.pp}-{train.tp}-{train.dp}" + (f" z{train.zero}" if train.zero else "") + f" -> {pp}-{tp}"


# -- measuring


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
        stage, _, tp_rank = layout.coordinate(world.rank)
        tp = Group("tp", tuple(range(layout.tp)), tp_rank)
        self.decoder = decoder = Decoder(MODEL, "lm", stage, layout.pp, tp, torch.float32, "meta", blocks=layout.blocks)
        self.hybrid = HybridWeights(
            train_shards_at(MODEL, layout.train),
            lambda: self.parameters,
            decoder,
            generation_shards_at(MODEL, layout),
            self.group,
            method,
            layout,
            world.rank,
            max_bucket_bytes=bucket_bytes,
        )

    @torch.no_grad()
    def first_pass(self, wait: bool) -> None:
        self.hybrid.to_generation(wait)
        self.decoder(torch.arange(512), PackedAttention([64] * 8, torch.device("cpu")))

    def peer_parameters(self) -> list[DTensor]:
        """What the transition makes, as DTensors in equal parts over the gather group; the whole model where ranks need
        different parts of it, which DTensor has no other way to."""
        if self.group.size == 1:
            return []
        mesh = DeviceMesh.from_group(self.group.process_group, "cpu", mesh_dim_names=("gather",))
        plan, parameters = self.hybrid.plan, []
        whole = plan.cuts or not plan.buckets
        shards = plan_params(MODEL, "lm", 0, 1, 0, 1) if whole else self.wanted
        for name, shard in shards.items():
            if len(shard.shape) == 2:
                dim = 1 if name.endswith(("out.weight", "down.weight")) else 0
                shape = [n // self.group.size if d == dim else n for d, n in enumerate(shard.shape)]
                parameters.append(DTensor.from_local(torch.randn(shape), mesh, [Shard(dim)], run_check=False))
        return parameters


def measure(world: World, name: str, train: Layout, pp: int, tp: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """One row. Collective over the world: every rank of it must call, in program order."""
    layout = layout_of(name, train, pp, tp)
    model = Model(world, name, layout, bucket_bytes)
    hybrid = model.hybrid
    group, peers = model.group, model.peer_parameters()
    (received,) = mean(world, [hybrid.plan.transfer.received(hybrid.index)])
    share = torch.randn(round(received / max(group.size - 1, 1)))
    gathered = torch.empty(group.size * len(share))

    def plain() -> None:
        group.all_gather_into(gathered, share, "bench")

    def full_tensor() -> list[Tensor]:
        return [parameter.full_tensor() for parameter in peers]

    before = {key: parameter.detach().clone() for key, parameter in model.parameters.items()}
    bodies: list[Callable[[], object]] = [hybrid.to_generation, hybrid.to_training, plain, full_tensor]
    to_generation, to_training, gather, peer = interleaved(world, bodies, repeats)
    first_pass = []
    if name == "zero_redundancy" and pp == tp == 1:
        bodies = [part for wait in (True, False) for part in (lambda w=wait: model.first_pass(w), hybrid.to_training)]
        first_pass = interleaved(world, bodies, repeats)[::2]
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.parameters.items()), "not the same bits"
    costs, whole = hybrid_costs(name, layout), 4 * split_elements(MODEL)
    needed = missing_elements(model.shards, model.wanted)
    norms = elements(model.wanted, True) + (elements(model.shards, True) if costs.twice else 0)
    if hybrid.plan.cuts:
        norms += elements(plan_params(MODEL, "lm", 0, 1, 0, 1), True) - elements(model.wanted, True)
    transition, replicated = hybrid.transition, float(norms_received(hybrid.plan, world.rank))
    assert transition is not None
    local = [transition.bytes_received, 4 * replicated, transition.peak_bytes, 4 * norms, 4 * needed]
    received, replicated, peak, held_norms, lacked, bucket = mean(world, [*local, hybrid.bucket_bytes])
    formula = float(costs.received * whole) if costs.received is not None else lacked - replicated
    return {
        "layout": describe(train, pp, tp),
        "ranks": world.size,
        "engine": name,
        "group": group.size,
        "formula_bytes": formula,
        "counted_bytes": received - replicated,
        "replicated_bytes": replicated,
        "exact": received - replicated == formula,
        "formula_peak": float(costs.peak * whole) + held_norms,
        "counted_peak": peak,
        "twice_bytes": float(costs.twice * whole),
        "bucket_bytes": bucket,
        "to_generation_s": to_generation,
        "to_training_s": to_training,
        "all_gather_s": gather,
        "full_tensor_s": peer,
        "first_pass_s": first_pass,
    }


def interleaved(world: World, bodies: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each body on its slowest rank; they take turns. Collective over the world."""
    seconds: list[list[float]] = [[] for _ in bodies]
    for repeat in range(repeats + 1):
        for times, body in zip(seconds, bodies, strict=True):
            world.all.barrier("bench")
            elapsed = torch.tensor([timed(body)], dtype=torch.float64)
            slowest = float(world.all.all_reduce(elapsed, "bench", "max"))
            if repeat:  # the first one connects
                times.append(slowest)
    return [median(times) for times in seconds]


def hybrid_costs(name: str, layout: GenerationLayout) -> Any:
    return costs_of(choose_method(name, layout), layout)


def timed(body: Callable[[], object]) -> float:
    begin = time.perf_counter()
    body()
    return time.perf_counter() - begin


def mean(world: World, values: Sequence[float]) -> list[float]:
    total = world.all.all_reduce(torch.tensor(values, dtype=torch.float64), "bench")
    return (total / world.size).tolist()


def run_ranks(out: Path, repeats: int, bucket_bytes: int) -> None:
    """One rank of a torchrun. Writes the rows of all layouts of this number of ranks."""
    launch = read_launch()
    world = init_world(launch, connect_store(launch), device=torch.device("cpu"))
    rows = []
    for train, pp, tp in CASES[world.size]:
        for name in METHODS:
            rows.append(measure(world, name, train, pp, tp, repeats, bucket_bytes))
            if world.rank == 0:
                print(row_text(rows[-1]), file=sys.stderr, flush=True)
    if world.rank == 0:
        out.write_text(json.dumps(rows), encoding="utf-8")
    world.all.barrier("bench")
    end_process(0)


HEADS = ["layout", "ranks", "engine", "formula MB", "counted MB", "replicated", "formula peak", "counted peak"]
HEADS += ["beyond", "bucket", "ms", "back ms", "of all-gather", "of full_tensor"]


def row_cells(row: dict[str, Any]) -> list[str]:
    def mb(value: float) -> str:
        return f"{value / 1e6:.3f}" if value < 1e6 else f"{value / 1e6:.2f}"

    def ratio(a: str, b: str) -> str:
        return f"{row[a] / row[b]:.2f}x" if row["counted_bytes"] else "-"

    cells = [row["layout"], str(row["ranks"]), row["engine"], mb(row["formula_bytes"]), mb(row["counted_bytes"])]
    cells += [mb(row["replicated_bytes"]), mb(row["formula_peak"]), mb(row["counted_peak"])]
    cells += [mb(row["counted_peak"] - row["formula_peak"]), mb(row["bucket_bytes"]), f"{row['to_generation_s'] * 1e3:.1f}"]
    cells += [f"{row['to_training_s'] * 1e3:.1f}", ratio("to_generation_s", "all_gather_s")]
    return [*cells, ratio("to_generation_s", "full_tensor_s")]


def within(row: dict[str, Any]) -> bool:
    return row["counted_peak"] <= row["formula_peak"] + row["bucket_bytes"]


def row_text(row: dict[str, Any]) -> str:
    return "  ".join(row_cells(row))


# -- planning alone: Method.plan as the ranks call it


@dataclass(frozen=True)
class Planned:
    model: str
    ranks: int
    layout: str
    engine: str
    formula: float | None
    received: float
    replicated: float
    formula_peak: float
    peak: float
    twice: float
    plans: int
    plan_s: float


def plan_rows(models: Sequence[str], most_ranks: int) -> Iterator[Planned]:
    """bf16 bytes, means over ranks. ``formula`` is that of the tensors that layouts split, None where a rank receives what it
    lacks; ``received`` is what the plans say of them, ``replicated`` of the norms. ``peak`` is that of the ranks whose plans were
    made; ``plan_s``: process time of one plan."""
    for model in models:
        spec, stages = LLAMAS[model]
        for ranks in [n for n in (1 << power for power in range(3, 11)) if n <= most_ranks]:
            slices = min(8, ranks // stages)
            dense = Layout(stages, slices, ranks // (stages * slices))
            pairs = [(dense, 1, slices // 2), (Layout(dp=ranks, zero=3), 1, 2 if stages == 1 else 8)]
            for train, pp, tp in pairs:
                for name in METHODS:
                    yield plan_row(model, spec, name, train, pp, tp)


def plan_row(model: str, spec: ModelSpec, name: str, train: Layout, pp: int, tp: int) -> Planned:
    layout, whole = layout_of(name, train, pp, tp), 2 * split_elements(spec)
    method = choose_method(name, layout)
    costs, sides = costs_of(method, layout), (train_shards_at(spec, train), generation_shards_at(spec, layout))
    indices, seconds, sums = planned_ranks(method, layout), [], torch.zeros(3, dtype=torch.float64)
    for index in indices:
        begin = time.process_time()
        plan = method.plan(layout, index, *sides, BUCKET_BYTES // 2, lambda rank: rank // 8)
        seconds.append(time.process_time() - begin)
        held, _ = shards_of(spec, layout, index)
        sums += torch.tensor([*group_mean(plan, index, len(method.gather_ranks(layout, index))), planned_peak(plan, held)])
    received, norms, peak = (2 * sums / len(indices)).tolist()
    return Planned(
        model,
        train.size,
        describe(train, pp, tp),
        name,
        None if costs.received is None else float(costs.received * whole),
        received - norms,
        norms,
        float(costs.peak * whole),
        peak,
        float(costs.twice * whole),
        len(indices),
        median(seconds),
    )


def planned_ranks(method: Method, layout: GenerationLayout) -> list[int]:
    """One of each gather group in the first replica: what its members receive is the same, and other replicas' plans too. Where
    each rank has a plan of its own all of up to 64 ranks, or four."""
    size = layout.train.size
    if method.consecutive and not method.whole:
        return list(range(0, size, 1 if size <= 64 else size // 4))
    first = layout.train.replica_group(0)
    return sorted({min(set(method.gather_ranks(layout, rank)) & set(first)) for rank in first})


def group_mean(plan: TransitionPlan, rank: int, members: int) -> tuple[float, float]:
    """Elements received, and of these norms, by a mean member of the gather group: what one has itself differs, by its stage."""
    if not plan.buckets:
        return plan.transfer.received(rank), norms_received(plan, rank)
    pieces = [piece for piece in (*plan.transfer.moves(), *plan.transfer.copies()) if piece.taker == rank]
    norms = [piece for piece in pieces if "norm" in piece.source.parameter]
    each, of_norms = (sum(p.source.numel * (members - p.holders) / members for p in some) for some in (pieces, norms))
    return each, of_norms


def norms_received(plan: TransitionPlan, rank: int) -> int:
    """Elements of norms that come to a rank from others."""
    norms = [name for name in plan.transfer.order if "norm" in name]
    return sum(piece.source.numel for piece in plan.transfer.moves(norms) if piece.taker == rank)


def planned_peak(plan: TransitionPlan, held: Shards) -> int:
    """Elements of parameters while bucket after bucket comes: what the buckets up to the one under way make, and the training shards
    whose values it and later ones need. (Execution starts further ones as far as all stay within one bucket, see docs.)"""
    sizes = {name: math.prod(shard.shape) for name, shard in plan.made.items()}
    train = sum(math.prod(shard.shape) for shard in held.values())
    made = list(accumulate(sum(sizes[target] for target in bucket) for bucket in plan.buckets))
    if not plan.places:
        return train + sum(sizes.values())
    left, most = train, 0
    finished = plan.finished(held)
    for number, names in enumerate(finished):
        most = max(most, made[number] + left)
        left -= sum(math.prod(held[name].shape) for name in names)
    return most


def show_plan(models: Sequence[str], most_ranks: int, out: Path | None) -> None:
    begin = time.perf_counter()
    rows = list(plan_rows(models, most_ranks))
    heads = ["model", "ranks", "layout", "engine", "formula GB", "planned GB", "norms MB", "formula peak GB", "planned peak GB"]
    heads += ["held twice GB", "plans", "one plan ms"]

    def cells(r: Planned) -> list[str]:
        gb = [f"{x / 1e9:.2f}" for x in (r.received, r.formula_peak, r.peak, r.twice)]
        formula = "-" if r.formula is None else f"{r.formula / 1e9:.2f}"
        start = [r.model, str(r.ranks), r.layout, r.engine, formula, gb[0], f"{r.replicated / 1e6:.1f}"]
        return [*start, *gb[1:], str(r.plans), f"{r.plan_s * 1e3:.0f}"]

    print(table(heads, [cells(row) for row in rows], 4))
    print(f"\n{sum(row.plans for row in rows)} plans in {time.perf_counter() - begin:.1f} s")
    if out:
        out.write_text(json.dumps({"bench": "reshard plan", "rows": [vars(row) for row in rows]}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="no ranks: formulas and plans of large models")
    parser.add_argument("--models", nargs="+", default=list(LLAMAS), choices=list(LLAMAS), help="of --plan")
    parser.add_argument("--most-ranks", type=int, default=1024, help="of --plan")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, help="timed transitions of each engine and layout")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.plan:
        show_plan(args.models, args.most_ranks, args.out)
        return
    if "RANK" in os.environ:
        run_ranks(args.out, args.repeats, args.bucket_mib * MIB)
        return
    facts, rows = machine_facts() | {"torch": torch.__version__}, []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in args.ranks:
            out = Path(scratch) / f"{ranks}.json"
            sizes = "--repeats", str(args.repeats), "--bucket-mib", str(args.bucket_mib)
            if code := on_ranks(ranks, __file__, *sizes, "--out", str(out)):
                sys.exit(code)
            rows += json.loads(out.read_text(encoding="utf-8"))
    print(table(HEADS, [row_cells(row) for row in rows], 3))
    passes = [(row["layout"], str(row["ranks"]), *row["first_pass_s"]) for row in rows if row["first_pass_s"]]
    cells = [[layout, ranks, f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", f"{b / a:.2f}x"] for layout, ranks, a, b in passes]
    print("\n" + table(["layout", "ranks", "transition, then forward, ms", "overlapping, ms", "ratio"], cells, 1))
    print(
        f"\nM = {4 * split_elements(MODEL) / 1e6:.2f} MB; bytes exact in {sum(row['exact'] for row in rows)} of {len(rows)} rows; "
        f"beyond the formula one bucket at most in {sum(within(row) for row in rows)}"
    )
    if args.out:
        args.out.write_text(json.dumps({"bench": "reshard", "machine": facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
