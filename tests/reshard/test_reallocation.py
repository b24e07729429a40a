"""Reallocation between any two layouts: exactly the bytes that are missing, each once, from the cheapest source, bit for bit."""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import cycle

import numpy as np
import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.published import published_config
from rlhf_spmd.models.sharding import plan_params, tensor_shapes
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard, shard_rows, zero_rows
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import Delta, Holding, Storages, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.bucketing import TransferContext, TransferStep, plan_steps, split_messages
from rlhf_spmd.reshard.holdings import holdings as holdings_of
from rlhf_spmd.reshard.plan import ParamSlice, SliceCopy, TransferPlan

SPEC = ModelSpec("llama", 37, 8, 16, 5, 4, 2, 2, attention_bias=True)  # 37 tokens: no tp divides them; tp 4: KV heads twice
SPECS = {
    "biases": (SPEC, "lm"),
    "tied": (replace(SPEC, tie_word_embeddings=True, attention_bias=False), "lm"),
    "value head": (replace(SPEC, qk_norm=True), "value"),
    "one KV head": (replace(SPEC, num_key_value_heads=1), "lm"),
    "no head": (replace(SPEC, num_attention_heads=8, num_key_value_heads=8, head_dim=1), "none"),
}
LLAMA_70B = ModelSpec("llama", 128256, 8192, 28672, 80, 64, 8, 128)
Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


def holdings(spec: ModelSpec, head: str, layout: Layout, ranks: list[int]) -> list[Holding]:
    return [
        Holding(
            tuple(ranks[layout.index(pp, dp, 0, tp)] for dp in range(layout.dp)),
            plan_params(spec, head, pp, layout.pp, tp, layout.tp),
            layout.dp_shard,
        )
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    ]


def shards_of(side: list[Holding], rank: int) -> dict[str, ParamShard]:
    for holding in side:
        if rank in holding.ranks:
            at, of = holding.ranks.index(rank) % holding.parts, holding.parts
            if of == 1:
                return dict(holding.shards)
            return {name: shard_rows(shard, *zero_rows(shard.shape[0], at, of)) for name, shard in holding.shards.items()}
    return {}


class Model:
    """Every element of every tensor has a number of its own, so that values say where they come from."""

    def __init__(self, spec: ModelSpec, head: str) -> None:
        self.shapes = tensor_shapes(spec, head)
        self.tensors: Arrays = {}
        self.numel = 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            self.tensors[name] = np.arange(self.numel, self.numel + size).reshape(shape)
            self.numel += size

    def local(self, shards: Mapping[str, ParamShard], fill: bool = True) -> Arrays:
        arrays = {name: np.full(shard.shape, -1) for name, shard in shards.items()}
        for name, shard in shards.items() if fill else ():
            for box in shard.boxes:
                arrays[name][box.local_slices] = self.tensors[box.name][box.global_slices]
        return arrays


def ids(arrays: Arrays) -> np.ndarray:
    """All element numbers, sorted."""
    return np.sort(np.concatenate([array.ravel() for array in arrays.values()])) if arrays else np.zeros(0, dtype=int)


def simulate(plans: dict[int, TransferPlan], before: dict[int, Arrays], after: dict[int, Arrays]) -> dict[int, Counter[int]]:
    """Applies all ranks' plans as execution does; returns the elements that each rank received, by sender."""
    received: dict[int, Counter[int]] = {rank: Counter() for rank in plans}
    for rank, plan in plans.items():
        for piece in [*plan.local_copies(), *plan.remote_copies()]:
            source, target = piece.source, piece.target
            if piece.receiver == rank:
                assert (after[rank][target.parameter][target.slices] == -1).all(), "written twice"
                after[rank][target.parameter][target.slices] = before[piece.sender][source.parameter][source.slices]
                received[rank][piece.sender] += 0 if piece.sender == rank else target.numel
        for pair in plan.traffic:
            assert rank in pair and moved(plans[pair[0]], pair) == moved(plans[pair[1]], pair), (
                "both ends go through the same pieces"
            )
    return {rank: +counts for rank, counts in received.items()}


def moved(plan: TransferPlan, pair: tuple[int, int]) -> list[SliceCopy]:
    return [piece for piece in plan.remote_copies() if (piece.sender, piece.receiver) == pair]


def random_layout(rng: random.Random, spec: ModelSpec, world: int) -> tuple[Layout, list[int]]:
    most = rng.choice([world, world // 2])
    while True:
        layout = Layout(*(rng.choice([1, 1, 2, 2, 3, 4, 5]) for _ in range(3)), rng.choice([0, 0, 1, 3]))
        if layout.zero and layout.dp == 4:
            layout = replace(layout, zero_size=rng.choice([None, 2, 2]))
        try:
            check_layout(spec, "", layout.pp, layout.tp)
        except ValueError:
            continue
        if layout.size <= most:
            return layout, sorted(rng.sample(range(world), layout.size))


def move_and_check(model: Model, a: list[Holding], b: list[Holding], host_of: Callable[[int], int], world: int) -> None:
    """``a`` to ``b``: every property that a plan must have, by the numbers of the elements."""
    plans = {rank: plan_transfer(a, b, host_of, rank) for rank in range(world)}
    held = {rank: model.local(shards_of(a, rank)) for rank in plans}
    wanted = {rank: model.local(shards_of(b, rank)) for rank in plans}
    arrived = {rank: model.local(shards_of(b, rank), fill=False) for rank in plans}
    received = simulate(plans, held, arrived)
    on_host: dict[int, np.ndarray] = {}
    for rank in plans:
        on_host[host_of(rank)] = np.union1d(on_host.get(host_of(rank), []), ids(held[rank]))
    for rank, plan in plans.items():
        assert all(np.array_equal(arrived[rank][name], array) for name, array in wanted[rank].items()), "other values"
        missing = np.setdiff1d(ids(wanted[rank]), ids(held[rank]))
        assert received[rank].total() == plan.received(rank) == len(missing), "not exactly what is missing"
        foreign = sum(n for sender, n in received[rank].items() if host_of(sender) != host_of(rank))
        assert foreign == len(np.setdiff1d(missing, on_host[host_of(rank)])), "another host was asked for what this one has"
    whole = plan_transfer(a, b, host_of)
    kept = {rank: list(plan.local_copies()) for rank, plan in plans.items()}
    assert whole.traffic == {(sender, rank): n for rank, senders in received.items() for sender, n in senders.items()}
    assert sorted(whole.local_copies()) == sorted(piece for pieces in kept.values() for piece in pieces)


@pytest.mark.parametrize("name", SPECS)
def test_random_pairs_of_layouts_there_and_back(name: str) -> None:
    """25 pairs for each of five models: ranks overlapping, nested, disjoint, other numbers of them; hosts of 1 to 4 ranks."""
    spec, head = SPECS[name]
    model, rng = Model(spec, head), random.Random(name)
    for _ in range(25):
        world, per_host = rng.choice([4, 6, 9]), rng.choice([1, 2, 3, 4])
        (a, ranks_a), (b, ranks_b) = random_layout(rng, spec, world), random_layout(rng, spec, world)
        if rng.random() < 0.2 and len(ranks_a) < world:  # disjoint by chance is rare
            world = len(ranks_a) + len(ranks_b)
            ranks_a, ranks_b = list(range(len(ranks_a))), list(range(len(ranks_a), world))
        sides = holdings(spec, head, a, ranks_a), holdings(spec, head, b, ranks_b)
        move_and_check(model, *sides, lambda rank, n=per_host: rank // n, world)
        move_and_check(model, *reversed(sides), lambda rank, n=per_host: rank // n, world)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(1, 2, 4), Layout(1, 4, 3)),
        (Layout(1, 1, 5), Layout(1, 1, 7, 3)),
        (Layout(1, 2, 3), Layout(5, 1, 1)),
        (Layout(1, 2, 6), Layout(1, 1, 4)),
    ],
    ids=str,
)
def test_equal_sources_share_the_work(source: Layout, target: Layout) -> None:
    spec, head = SPECS["biases"]
    a = holdings(spec, head, source, list(range(source.size)))
    b = holdings(spec, head, target, list(range(source.size, source.size + target.size)))
    sent = Counter(dict.fromkeys(range(source.size), 0))
    for (sender, _), elements in plan_transfer(a, b, lambda rank: 0).traffic.items():
        sent[sender] += elements
    for holding in a:
        loads = [sent[rank] for rank in holding.ranks]
        print(f"{source} -> {target}: elements sent by replicas {loads}")
        assert max(loads) <= 1.5 * sum(loads) / len(loads)


def test_what_no_rank_holds_is_named() -> None:
    a = holdings(SPEC, "none", Layout(1, 2, 1), [0, 1])
    b = holdings(SPEC, "lm", Layout(1, 1, 1), [2])
    with pytest.raises(ValueError, match=r"lm_head.weight: no rank of the source side holds the part from \(0, 0\)"):
        plan_transfer(a, b, lambda rank: 0, 2)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Layout(8, 8, 16, 3), Layout(4, 4, 64)), (Layout(1, 1, 1024, 3), Layout(1, 1, 1024, 3, zero_size=8))],
    ids=str,
)
def test_a_70b_model_on_1024_ranks(source: Layout, target: Layout) -> None:
    """Each rank gets as much as it lacks, and plans that alone."""
    ranks = list(range(1024))
    a, b = holdings(LLAMA_70B, "lm", source, ranks), holdings(LLAMA_70B, "lm", target, ranks)
    for rank in (0, 517, 1023):
        check_amounts(plan_transfer(a, b, lambda rank: rank // 8, rank), b, rank)


def check_amounts(plan: TransferPlan, target: list[Holding], rank: int) -> None:
    wanted = sum(box.numel for shard in shards_of(target, rank).values() for box in shard.boxes)
    assert plan.received(rank) + sum(piece.target.numel for piece in plan.local_copies()) == wanted


@pytest.mark.long
def test_deepseek_v3_on_1024_ranks() -> None:
    """45,000 tensors, most of them experts' that ranks of ep share. The garbage collector would take most of the time."""
    config = published_config("unsloth/DeepSeek-V3-bf16")
    assert config is not None
    spec = spec_from_config(config, "test")
    here, there = Layout(8, 1, 128, 1, ep=64), Layout(4, 8, 32)
    of_layout = [cache(lambda pp, tp, at=at: plan_params(spec, "lm", pp, at.pp, tp, at.tp)) for at in (here, there)]
    a, b = (holdings_of(at, shards, range(1024)) for at, shards in zip((here, there), of_layout, strict=True))
    collections = sum(generation["collections"] for generation in gc.get_stats())
    plan = plan_transfer(a, b, lambda rank: rank // 8, 37)
    assert gc.isenabled()
    assert sum(generation["collections"] for generation in gc.get_stats()) < collections + 10  # without care, a thousand
    check_amounts(plan, b, 37)


def test_buckets_are_bounded_and_hold_everything_once() -> None:
    parts = [
        ParamSlice("a", (0, 0), (10, 4)),
        ParamSlice("b", (3,), (5,)),
        ParamSlice("c", (2, 1), (1, 7)),
        ParamSlice("d", (0,), (30,)),
    ]
    parts += [ParamSlice("e", (2 * row,), (1,)) for row in range(20)]  # not one below the other

    def rows(part: ParamSlice) -> list[tuple[str, int]]:
        return [(part.parameter, part.start[0] + i) for i in range(part.size[0])]

    for limit in (1, 5, 7, 8, 20, 200, 10_000):
        buckets = [
            [piece.source for piece in cut]
            for cut in split_messages((SliceCopy(0, 1, part, part) for part in parts), limit, limit // 64)
        ]
        assert all(sum(part.numel for part in bucket) <= max(limit, 7) for bucket in buckets)  # a row of c has 7
        assert sorted(row for bucket in buckets for part in bucket for row in rows(part)) == sorted(
            row for part in parts for row in rows(part)
        )
        assert {part.numel // part.size[0] for bucket in buckets for part in bucket if part.parameter == "a"} == {4}
    assert len(buckets) == 1


def exchanges(a: list[Holding], b: list[Holding], members: list[int], rank: int, limit: int) -> list[TransferStep]:
    shapes = ({name: shard.shape for name, shard in shards_of(side, rank).items()} for side in (a, b))
    return plan_steps(
        plan_transfer(a, b, lambda rank: 0, rank), TransferContext(rank, members, *shapes, converted=False, limit=limit)
    )


def rounds(a: list[Holding], b: list[Holding], limit: int) -> tuple[int, int]:
    """Each rank starts its next exchange when the one before has ended, as NCCL does: an exchange ends when all that have a part in
    it have started theirs. The rounds that this takes, and the exchanges of the rank that has most. What one sends to another must be
    what the other takes, in the same order."""
    members = sorted({rank for holding in (*a, *b) for rank in holding.ranks})
    steps = {rank: [step for step in exchanges(a, b, members, rank, limit) if step.messages] for rank in members}
    messages: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}  # (rank, peer, sends) -> its step, elements
    for rank, some in steps.items():
        for i, step in enumerate(some):
            assert len(step.messages) == len({message.sends for message in step.messages})
            for which, peer in step.transfers:
                message = step.messages[which]
                messages.setdefault((rank, members[peer], message.sends), []).append((i, message.numel))
    needs: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (rank, step) -> peers, which step each must have started
    for (rank, peer, sends), mine in messages.items():
        theirs = messages[peer, rank, not sends]
        assert [numel for _, numel in mine] == [numel for _, numel in theirs]
        for (i, _), (j, _) in zip(mine, theirs, strict=True):
            needs.setdefault((rank, i), []).append((peer, j))
    at, number = dict.fromkeys(members, 0), 0  # the step that each rank is in
    while waiting := [rank for rank in members if at[rank] < len(steps[rank])]:
        ended = [rank for rank in waiting if all(at[peer] >= step for peer, step in needs[rank, at[rank]])]
        assert ended, f"ranks wait for each other: {at}"
        at, number = at | {rank: at[rank] + 1 for rank in ended}, number + 1
    return number, max(map(len, steps.values()))


@pytest.mark.parametrize("limit", [1 << 20, 100])
def test_exchanges_one_after_the_other_lock_nobody(limit: int) -> None:
    rng = random.Random(limit)
    for number in range(30):
        spec, head = list(SPECS.values())[number % len(SPECS)]
        a, b = (holdings(spec, head, *random_layout(rng, spec, 12)) for _ in range(2))
        rounds(a, b, limit)


@pytest.mark.parametrize("apart", [True, False])
def test_ranks_wait_for_no_round_that_is_not_theirs(apart: bool) -> None:
    """Every giver has something for every taker: as many rounds as a rank has peers, where pools lie apart too."""
    spec, head = SPECS["value head"]
    for taking in (Layout(1, 1, 4), Layout(1, 2, 2)):
        a = holdings(spec, head, Layout(1, 1, 4, 3), [0, 1, 2, 3])
        b = holdings(spec, head, taking, [4, 5, 6, 7] if apart else [0, 1, 2, 3])
        number, most = rounds(a, b, 1 << 20)
        assert number == most, (taking, number, most)


# -- on ranks

PAIRS: dict[str, tuple[Layout, list[int], Layout, list[int]]] = {
    "disjoint, other number of ranks": (Layout(1, 2, 1), [0, 1], Layout(2, 1, 1), [2, 3]),
    "three to one": (Layout(1, 1, 3, 3), [0, 1, 2], Layout(1, 1, 1), [3]),
    "one to all": (Layout(1, 1, 1), [2], Layout(2, 2, 1), [0, 1, 2, 3]),
    "overlapping": (Layout(1, 2, 1), [0, 2], Layout(3, 1, 1), [1, 2, 3]),
    "zero to tensor slices": (Layout(1, 1, 4, 3), [0, 1, 2, 3], Layout(2, 2, 1), [0, 1, 2, 3]),
}


def updated(weights: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """After an update that few elements show: 1 of 200, of every third tensor all, and zeros of either sign and nans among them."""
    weights_after = {}
    for at, (name, tensor) in enumerate(sorted(weights.items())):
        values = tensor.clone().view(-1)
        draw = torch.Generator().manual_seed(1000 * number + at)
        few = torch.rand(len(values), generator=draw) < (1.0 if (at + number) % 3 == 0 else 0.005)
        values[few] = (values[few].double() * 1.5 + 1).to(values.dtype)
        values[:4] = torch.tensor([0.0, -0.0, math.nan, -1.0]).roll(number)[: len(values)].to(values.dtype)
        weights_after[name] = values.view(tensor.shape)
    return weights_after


def cut_out(weights: dict[str, torch.Tensor], shards: Mapping[str, ParamShard]) -> dict[str, torch.Tensor]:
    parts = {}
    for name, shard in shards.items():
        parts[name] = torch.zeros(shard.shape, dtype=next(iter(weights.values())).dtype)
        for box in shard.boxes:
            parts[name][box.local_slices] = weights[box.name][box.global_slices]
    return parts


def send_changes(world: World, bucket_bytes: int, in_flight_bytes: int) -> dict[str, list[int]]:
    """Bytes received in the first, full transfer, after each of two updates, and once more where nothing has changed."""
    spec, head = SPECS["value head"]
    start, sizes = Model(spec, head).tensors, dict[str, list[int]]()
    dtypes = cycle([torch.bfloat16, torch.float32, torch.float64])
    both_ways = [(name, way) for name in PAIRS for way in (1, -1)]
    for number, ((name, way), dtype) in enumerate(zip(both_ways, dtypes, strict=False)):
        a, ranks_a, b, ranks_b = PAIRS[name]
        group = world.group(sorted({*ranks_a, *ranks_b}), "reallocation", channel=f"delta{number}")
        sides = [holdings(spec, head, a, ranks_a), holdings(spec, head, b, ranks_b)][::way]
        if group is None:
            continue
        group.connect()
        mine, wanted_shards = (shards_of(side, world.rank) for side in sides)
        plan, delta = plan_transfer(*sides, lambda rank: rank // 2, world.rank), Delta()
        # sources in fp32 or fp64, as master weights are
        weights = {n: torch.from_numpy(v).to(max(dtype, torch.float32, key=lambda d: d.itemsize)) for n, v in start.items()}
        target = {n: torch.full(shard.shape, -1.0, dtype=dtype) for n, shard in wanted_shards.items()}
        steps = transfer_steps(plan, world.rank, cut_out(weights, mine), target, group.ranks, dtype, bucket_bytes)
        received = sizes.setdefault(f"{name}, {way}, {dtype}", [])
        for step in range(4):
            weights = updated(weights, step) if 0 < step < 3 else weights
            before = RECORDER.received["weight_sync"], RECORDER.sent["weight_sync"]
            move = start_transfer(steps, cut_out(weights, mine), target, group, dtype, in_flight_bytes, delta)
            if not target:  # only sends: goes on by itself
                move.proceed()
            move.wait()
            received.append(RECORDER.received["weight_sync"] - before[0])
            if step == 0:
                sent = sum(n for (sender, _), n in plan.traffic.items() if sender == world.rank)
                assert received == [plan.received(world.rank) * dtype.itemsize]
                assert RECORDER.sent["weight_sync"] - before[1] == sent * dtype.itemsize
            wanted = cut_out({n: t.to(dtype) for n, t in weights.items()}, wanted_shards)
            different = [n for n, t in target.items() if not torch.equal(t.view(torch.uint8), wanted[n].view(torch.uint8))]
            assert not different, f"{name}, {way}, {dtype}, transfer {step}: {different}"
        assert all(len(kept) == sum(part.numel for part in parts) for parts, kept in delta.sent.items())
    return sizes


@pytest.mark.parametrize(("bucket_bytes", "in_flight_bytes"), [(1 << 20, 1 << 20), (100, 0)])
def test_every_bit_arrives_and_only_what_has_changed_is_sent_again(bucket_bytes: int, in_flight_bytes: int) -> None:
    """Also in small buckets with hardly anything in flight: no order of messages locks the ranks."""
    for sizes in run_ranks(4, send_changes, bucket_bytes, in_flight_bytes):
        for name, (full, *changes, nothing) in sizes.items():
            assert (full == 0) == (nothing == 0), name
            if full and bucket_bytes > 100:  # else counts of changes take as much as what has changed
                assert nothing <= full / 8 and max(changes) < 0.8 * full, (name, full, changes, nothing)


def goes_on_while_it_sends(world: World) -> int:
    """Rank 0 sends far more than may be in flight to rank 1, which is not there yet, and waits for it only when all is sent."""
    spec, head = SPECS["biases"]
    model = Model(spec, head)
    a, b = holdings(spec, head, Layout(), [0]), holdings(spec, head, Layout(), [1])
    group = world.group([0, 1], "reallocation", channel="beside")
    assert group is not None
    group.connect()
    before, after = ({n: torch.from_numpy(v) for n, v in model.local(shards_of(side, world.rank)).items()} for side in (a, b))
    target = {name: torch.full_like(tensor, -1) for name, tensor in after.items()}
    plan = plan_transfer(a, b, lambda rank: rank, world.rank)
    steps = transfer_steps(plan, world.rank, before, target, group.ranks, torch.int64, 256)
    if world.rank == 0:
        move = start_transfer(steps, before, target, group, torch.int64, 1024)
        move.proceed()
        world.all.barrier("test")  # rank 1 comes only now
        world.all.barrier("test")  # and has everything before this rank waits for anything
        move.wait()
    else:
        world.all.barrier("test")
        start_transfer(steps, before, target, group, torch.int64, 1024).wait()
        world.all.barrier("test")
    assert all(torch.equal(tensor, after[name]) for name, tensor in target.items())
    return plan.traffic[0, 1] * 8


def test_a_sender_goes_on_while_it_sends() -> None:
    assert run_ranks(2, goes_on_while_it_sends)[0] > 10 * 1024


def test_storages_are_given_up_and_come_back() -> None:
    whole = torch.arange(24.0)
    tensors = [whole[:12].view(3, 4), whole[12:], torch.ones(5, dtype=torch.bfloat16)]
    copies = [tensor.clone() for tensor in tensors]
    storages = Storages(tensors)
    assert storages.nbytes == 24 * 4 + 5 * 2  # what is shared counts once
    for _ in range(2):
        storages.offload()
        assert storages.nbytes == 0 and whole.untyped_storage().nbytes() == 0
        storages.reload()
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    tensors[1].fill_(5.0)
    tensors[2].fill_(3.0)
    storages.offload(tensors, tensors[2:])
    assert storages.nbytes == 0
    storages.reload()
    assert torch.equal(tensors[1], copies[1]) and bool((tensors[2] == 3).all()), "only what has changed goes to the host"
    storages.free()
    assert storages.nbytes == 0
    storages.allocate()
    assert storages.nbytes == 24 * 4 + 5 * 2 and not whole.any()
    tensors[1].fill_(7.0)
    assert float(whole.sum()) == 12 * 7.0  # the same views
