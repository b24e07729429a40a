"""Reallocation between any two layouts: exactly the bytes that are missing, each once, from the cheapest source, bit for bit."""

from __future__ import annotations

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.models.published import published_config
from rlhf_spmd.models.sharding import check_layout, plan_params, tensor_shapes
from rlhf_spmd.models.spec import ModelSpec, spec_from_config
from rlhf_spmd.parallel.boxes import Box, ParamShard, shard_rows, whole_shard, zero_rows
from rlhf_spmd.parallel.collectives import RECORDER, Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import Delta, Holding, Storages, Transfer, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.bucketing import TransferContext, TransferStep, plan_steps, split_messages
from rlhf_spmd.reshard.holdings import holdings as holdings_of
from rlhf_spmd.reshard.plan import ParamSlice, Plan, SliceCopy

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


def start_once(
    plan: Plan, rank: int, sources: Tensors, targets: Tensors, group: Group, message_bytes: int, buffer_bytes: int
) -> Transfer:
    """All tensors have one dtype."""
    dtype = next(tensor.dtype for tensor in (*sources.values(), *targets.values()))
    steps = transfer_steps(plan, rank, sources, targets, group.ranks, dtype, message_bytes)
    return start_transfer(steps, sources, targets, group, dtype, buffer_bytes)


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


def simulate(plans: dict[int, Plan], before: dict[int, Arrays], after: dict[int, Arrays]) -> dict[int, Counter[int]]:
    """Applies all ranks' plans as execution does; returns the elements that each rank received, by sender."""
    received: dict[int, Counter[int]] = {rank: Counter() for rank in plans}
    for rank, plan in plans.items():
        for piece in [*plan.copies(), *plan.moves()]:
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


def moved(plan: Plan, pair: tuple[int, int]) -> list[SliceCopy]:
    return [piece for piece in plan.moves() if (piece.sender, piece.receiver) == pair]


def random_layout(rng: random.Random, spec: ModelSpec, world: int) -> tuple[Layout, list[int]]:
    most = rng.choice([world, world // 2])
    while True:
        layout = Layout(*(rng.choice([1, 1, 2, 2, 3, 4, 5]) for _ in range(3)), rng.choice([0, 0, 1, 3]))
        if layout.zero and layout.dp == 4:
            layout = replace(layout, zero_size=rng.choice([None, 2, 2]))
        try:
            check_layout(spec, layout.pp, layout.tp, "")
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
    kept = {rank: list(plan.copies()) for rank, plan in plans.items()}
    assert whole.traffic == {(sender, rank): n for rank, senders in received.items() for sender, n in senders.items()}
    assert sorted(whole.copies()) == sorted(piece for pieces in kept.values() for piece in pieces)


@pytest.mark.parametrize("name", SPECS)
def test_random_pairs_of_layouts_there_and_back(name: str) -> None:
    """45 pairs for each of five models (225): ranks overlapping, nested, disjoint, other numbers of them; hosts of 1 to 4 ranks."""
    spec, head = SPECS[name]
    model, rng = Model(spec, head), random.Random(name)
    kinds: Counter[str] = Counter()
    for _ in range(45):
        world, per_host = rng.choice([4, 6, 9]), rng.choice([1, 2, 3, 4])
        (a, ranks_a), (b, ranks_b) = random_layout(rng, spec, world), random_layout(rng, spec, world)
        if rng.random() < 0.2 and len(ranks_a) < world:  # disjoint by chance is rare
            world = len(ranks_a) + len(ranks_b)
            ranks_a, ranks_b = list(range(len(ranks_a))), list(range(len(ranks_a), world))
        both = set(ranks_a) & set(ranks_b)
        kinds["disjoint" if not both else "nested" if both in (set(ranks_a), set(ranks_b)) else "overlapping"] += 1
        kinds["zero"] += bool((a.zero and a.dp > 1) or (b.zero and b.dp > 1))
        sides = holdings(spec, head, a, ranks_a), holdings(spec, head, b, ranks_b)
        move_and_check(model, *sides, lambda rank, n=per_host: rank // n, world)
        move_and_check(model, *reversed(sides), lambda rank, n=per_host: rank // n, world)
    assert min(kinds[kind] for kind in ("disjoint", "nested", "overlapping", "zero")) >= 5, kinds


Line = tuple[str, tuple[int, ...], tuple[int, ...]]  # parameter, start, size


def plain_plan(a: list[Holding], b: list[Holding], host_of: Callable[[int], int]) -> dict[tuple[int, int], list[Line]]:
    """(source, target) -> what the target gets, in order: tensor after tensor, cell after cell, all ranks of a cell looked at."""
    boxes: dict[str, tuple[list[Any], list[Any]]] = {}  # tensor -> of either side (rank, parameter, box)
    for number, side in ((1, b), (0, a)):
        for rank in (rank for holding in side for rank in holding.ranks):
            for parameter, shard in shards_of(side, rank).items():
                for box in shard.boxes:
                    if number or box.name in boxes:
                        boxes.setdefault(box.name, ([], []))[number].append((rank, parameter, box))
    names = sorted(boxes, key=[box.name for h in b for shard in h.shards.values() for box in shard.boxes].index)
    kinds: dict[Any, list[str]] = {}
    for name in names:
        key = [[(rank, box.shape, box.start, box.size, box.local) for rank, _, box in side] for side in boxes[name]]
        rows = [
            [
                (i, s.shape[0])
                for i, h in enumerate(side)
                if h.parts > 1
                for s in h.shards.values()
                if name in map(name_of, s.boxes)
            ]
            for side in (a, b)
        ]
        kinds.setdefault(str((key, rows)), []).append(name)
    turns = {name: i for i, name in enumerate(name for alike in kinds.values() for name in alike)}
    plan: dict[tuple[int, int], list[Line]] = {}
    for name in names:
        dims = range(len(boxes[name][1][0][2].shape))
        every = [box for side in boxes[name] for _, _, box in side]
        cuts = [sorted({e for x in every for e in (x.start[d], x.start[d] + x.size[d])}) for d in dims]
        cells = list(product(*(pairwise(edges) for edges in cuts)))
        for cell in cells:
            inside = [[held for held in side if _within(cell, held[2])] for side in boxes[name]]
            sources, targets = ({rank: (parameter, box) for rank, parameter, box in side} for side in inside)
            if not targets:
                continue
            of_region = [other for other in cells if _within(other, inside[0][0][2])]
            pairs = [(rank, rank) for rank in sources.keys() & targets.keys()]
            hosts = {host_of(rank) for rank in sources}
            for host in (*hosts, None):
                senders = sorted(rank for rank in sources if host in (host_of(rank), None))
                receivers = sorted(targets.keys() - sources.keys())
                receivers = [t for t in receivers if (host_of(t) if host_of(t) in hosts else None) == host]
                first = (turns[name] * len(of_region) + of_region.index(cell)) * (len(receivers) % len(senders))
                pairs += [(senders[(first + k) % len(senders)], receiver) for k, receiver in enumerate(receivers)]
            for sender, receiver in pairs:
                parameter, box = targets[receiver]
                start = tuple(low - s + at for (low, _), s, at in zip(cell, box.start, box.local, strict=True))
                plan.setdefault((sender, receiver), []).append((parameter, start, tuple(high - low for low, high in cell)))
    return plan


def name_of(box: Box) -> str:
    return box.name


def _within(cell: tuple[tuple[int, int], ...], box: Box) -> bool:
    return all(s <= low and high <= s + n for (low, high), s, n in zip(cell, box.start, box.size, strict=True))


def test_the_plan_is_the_plain_one() -> None:
    """Who gives what to whom, in which order, against a plan that looks at every rank and every cell of every tensor."""
    rng = random.Random(5)
    for number in range(40):
        spec, head = list(SPECS.values())[number % len(SPECS)]
        world, per_host = rng.choice([4, 6, 9]), rng.choice([1, 2, 3, 4])
        a, b = (holdings(spec, head, *random_layout(rng, spec, world)) for _ in range(2))
        plain = plain_plan(a, b, lambda rank, n=per_host: rank // n)
        for rank in range(world):
            plan, got = plan_transfer(a, b, lambda rank, n=per_host: rank // n, rank), dict[tuple[int, int], list[ParamSlice]]()
            for piece in [*plan.moves(), *plan.copies()]:
                if piece.receiver == rank:
                    got.setdefault((piece.sender, rank), []).append(piece.target)
            assert got == {pair: parts for pair, parts in plain.items() if pair[1] == rank}


def test_equal_sources_share_the_work() -> None:
    """Replicas that hold the same parameters send the same amount, up to one piece of each kind of tensor."""
    spec, head = SPECS["biases"]
    for source, target in (
        (Layout(1, 2, 4), Layout(1, 4, 3)),
        (Layout(2, 1, 3), Layout(1, 1, 2)),
        (Layout(1, 1, 5), Layout(1, 1, 7, 3)),
        (Layout(1, 2, 3), Layout(5, 1, 1)),
        (Layout(1, 2, 6), Layout(1, 1, 4)),
    ):
        a = holdings(spec, head, source, list(range(source.size)))
        b = holdings(spec, head, target, list(range(source.size, source.size + target.size)))
        plan = plan_transfer(a, b, lambda rank: 0)
        sent = Counter(dict.fromkeys(range(source.size), 0))
        for (sender, _), elements in plan.traffic.items():
            sent[sender] += elements
        pieces: dict[str, int] = {}  # the largest of each kind: the same parameter of all layers
        for part in (piece.source for piece in plan.moves()):
            kind = part.parameter.rpartition("layers.")[2].partition(".")[2] or part.parameter
            pieces[kind] = max(pieces.get(kind, 0), part.numel)
        for holding in a:
            loads = [sent[rank] for rank in holding.ranks]
            print(f"{source} -> {target}: elements sent by replicas {loads}")
            assert max(loads) - min(loads) <= sum(pieces.values())
            assert max(loads) <= 1.5 * sum(loads) / len(loads)


def test_pairs_stay_the_same_where_sources_divide_evenly() -> None:
    a = holdings(SPEC, "lm", Layout(1, 2, 2), [0, 1, 2, 3])
    b = holdings(SPEC, "lm", Layout(1, 2, 4), list(range(4, 12)))
    for rank in range(4, 12):
        assert len(plan_transfer(a, b, lambda rank: rank // 2, rank).traffic) == 1


def test_what_no_rank_holds_is_named() -> None:
    a = holdings(SPEC, "none", Layout(1, 2, 1), [0, 1])
    b = holdings(SPEC, "lm", Layout(1, 1, 1), [2])
    with pytest.raises(ValueError, match=r"lm_head.weight: no rank of the source side holds the part from \(0, 0\)"):
        plan_transfer(a, b, lambda rank: 0, 2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(8, 8, 16), Layout(4, 4, 64)),
        (Layout(8, 8, 16, 3), Layout(4, 4, 64)),
        (Layout(4, 4, 64, 1), Layout(8, 8, 16, 3)),
        (Layout(1, 8, 128, 3, zero_size=16), Layout(1, 4, 256)),
        (Layout(1, 1, 1024, 3), Layout(1, 1, 1024, 3, zero_size=8)),
    ],
    ids=str,
)
def test_a_70b_model_on_1024_ranks(source: Layout, target: Layout) -> None:
    ranks = list(range(1024))
    start = time.process_time()
    a, b = holdings(LLAMA_70B, "lm", source, ranks), holdings(LLAMA_70B, "lm", target, ranks)
    described = time.process_time() - start
    seconds, total = [], sum(int(np.prod(shape)) for shape in tensor_shapes(LLAMA_70B, "lm").values())
    for rank in (0, 333, 517, 1023):
        start = time.process_time()
        plan = plan_transfer(a, b, lambda rank: rank // 8, rank)
        seconds.append(time.process_time() - start)
        wanted = sum(box.numel for shard in shards_of(b, rank).values() for box in shard.boxes)
        assert plan.received(rank) + sum(piece.target.numel for piece in plan.copies()) == wanted
        assert plan.received(rank) <= wanted <= total / (target.pp * target.tp * target.dp_shard) * 1.2
    spread = f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f} ms"
    print(f"{source} -> {target}: a rank's part {spread}, holdings {described * 1e3:.0f} ms")


def test_deepseek_v3_on_1024_ranks() -> None:
    """45,000 tensors, most of them experts' that ranks of ep share. The garbage collector would take most of the time."""
    config = published_config("unsloth/DeepSeek-V3-bf16")
    assert config is not None
    spec = spec_from_config(config, "test")
    here, there = Layout(8, 1, 128, 1, ep=64), Layout(4, 8, 32)
    of_layout = [cache(lambda pp, tp, at=at: plan_params(spec, "lm", pp, at.pp, tp, at.tp)) for at in (here, there)]
    a, b = (holdings_of(at, shards, range(1024)) for at, shards in zip((here, there), of_layout, strict=True))
    runs, start = sum(one["collections"] for one in gc.get_stats()), time.process_time()
    plan = plan_transfer(a, b, lambda rank: rank // 8, 37)
    assert time.process_time() - start < 10  # 2 seconds; the bound is for busy machines
    assert gc.isenabled() and sum(one["collections"] for one in gc.get_stats()) < runs + 10  # without care, a thousand
    wanted = sum(box.numel for shard in shards_of(b, 37).values() for box in shard.boxes)
    assert plan.received(37) + sum(piece.target.numel for piece in plan.copies()) == wanted


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


@pytest.mark.parametrize("limit", [1 << 20, 1 << 10, 100])
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


def move_for_real(world: World, bucket_bytes: int, in_flight_bytes: int) -> dict[str, tuple[int, int, float]]:
    spec, head = SPECS["value head"]
    model, found = Model(spec, head), {}
    for number, (name, (a, ranks_a, b, ranks_b)) in enumerate(PAIRS.items()):
        group = world.group(sorted({*ranks_a, *ranks_b}), "reallocation", channel=f"test{number}")
        sides = [holdings(spec, head, a, ranks_a), holdings(spec, head, b, ranks_b)]
        if group is None:
            continue
        group.connect()
        for there in (sides, sides[::-1]):
            before, after = (
                {n: torch.from_numpy(v).double() for n, v in model.local(shards_of(s, world.rank)).items()} for s in there
            )
            target = {name: torch.full_like(tensor, -1.0) for name, tensor in after.items()}
            plan = plan_transfer(*there, lambda rank: rank // 2, world.rank)
            counted = RECORDER.sent["weight_sync"], RECORDER.received["weight_sync"]
            move = start_once(plan, world.rank, before, target, group, bucket_bytes, in_flight_bytes)
            if not target:  # only sends: goes on by itself
                move.proceed()
            move.wait()
            assert all(torch.equal(tensor, after[name]) for name, tensor in target.items()), f"{name}: other values"
            sent, received = RECORDER.sent["weight_sync"] - counted[0], RECORDER.received["weight_sync"] - counted[1]
            assert received == plan.received(world.rank) * 8
            assert sent == sum(n for (sender, _), n in plan.traffic.items() if sender == world.rank) * 8
            found[name] = sent, received
    return found


@pytest.mark.parametrize(("bucket_bytes", "in_flight_bytes"), [(1 << 20, 1 << 20), (300, 1000), (64, 0)])
def test_four_ranks(bucket_bytes: int, in_flight_bytes: int) -> None:
    """Small buckets and hardly anything in flight: no order of messages locks the ranks."""
    results = run_ranks(4, move_for_real, bucket_bytes, in_flight_bytes)
    assert all(sum(found[name][0] for found in results if name in found) > 0 for name in PAIRS)


def updated(weights: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """After an update that few elements show: 1 of 200, of every third tensor all, and zeros of either sign and nans among them."""
    found = {}
    for at, (name, tensor) in enumerate(sorted(weights.items())):
        values = tensor.clone().view(-1)
        draw = torch.Generator().manual_seed(1000 * number + at)
        few = torch.rand(len(values), generator=draw) < (1.0 if (at + number) % 3 == 0 else 0.005)
        values[few] = (values[few].double() * 1.5 + 1).to(values.dtype)
        values[:4] = torch.tensor([0.0, -0.0, math.nan, -1.0]).roll(number)[: len(values)].to(values.dtype)
        found[name] = values.view(tensor.shape)
    return found


def cut_out(whole: dict[str, torch.Tensor], shards: Mapping[str, ParamShard]) -> dict[str, torch.Tensor]:
    found = {}
    for name, shard in shards.items():
        found[name] = torch.zeros(shard.shape, dtype=next(iter(whole.values())).dtype)
        for box in shard.boxes:
            found[name][box.local_slices] = whole[box.name][box.global_slices]
    return found


def send_changes(world: World, bucket_bytes: int, in_flight_bytes: int) -> dict[str, list[int]]:
    """Bytes received in the first, full transfer, after each of three updates, and once more where nothing has changed."""
    spec, head = SPECS["value head"]
    start, sizes = Model(spec, head).tensors, dict[str, list[int]]()
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    for number, ((name, (a, ranks_a, b, ranks_b)), kind) in enumerate(product(PAIRS.items(), kinds)):
        group = world.group(sorted({*ranks_a, *ranks_b}), "reallocation", channel=f"delta{number}")
        sides = [holdings(spec, head, a, ranks_a), holdings(spec, head, b, ranks_b)]
        if group is None:
            continue
        group.connect()
        mine, there = (shards_of(side, world.rank) for side in sides)
        plan, delta = plan_transfer(*sides, lambda rank: rank // 2, world.rank), Delta()
        # sources in fp32 or fp64, as master weights are
        whole = {n: torch.from_numpy(v).to(torch.float64 if kind == "fp64" else torch.float32) for n, v in start.items()}
        target = {n: torch.full(shard.shape, -1.0, dtype=kinds[kind]) for n, shard in there.items()}
        args = cut_out(whole, mine), target, group.ranks, kinds[kind], bucket_bytes
        steps = transfer_steps(plan, world.rank, *args)
        for step in range(5):
            whole = updated(whole, step) if 0 < step < 4 else whole
            counted = RECORDER.received["weight_sync"]
            move = start_transfer(steps, cut_out(whole, mine), target, group, kinds[kind], in_flight_bytes, delta)
            if not target:
                move.proceed()
            move.wait()
            sizes.setdefault(f"{name}, {kind}", []).append(RECORDER.received["weight_sync"] - counted)
            wanted = cut_out({n: t.to(kinds[kind]) for n, t in whole.items()}, there)
            different = [n for n, t in target.items() if not torch.equal(t.view(torch.uint8), wanted[n].view(torch.uint8))]
            assert not different, f"{name}, {kind}, transfer {step}: {different}"
        assert all(len(kept) == sum(part.numel for part in parts) for parts, kept in delta.sent.items())
    return sizes


@pytest.mark.parametrize(("bucket_bytes", "in_flight_bytes"), [(1 << 20, 1 << 20), (300, 100)])
def test_only_what_has_changed_is_sent_again(bucket_bytes: int, in_flight_bytes: int) -> None:
    for found in run_ranks(4, send_changes, bucket_bytes, in_flight_bytes):
        for name, (full, *changes, nothing) in found.items():
            assert (full == 0) == (nothing == 0) and nothing <= full / (8 if bucket_bytes > 300 else 2), name  # numbers only
            assert all(size < 0.8 * full for size in changes if full and bucket_bytes > 300), (name, full, changes)


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
    if world.rank == 0:
        move = start_once(plan, 0, before, target, group, 256, 1024)
        move.proceed()
        world.all.barrier("test")  # rank 1 comes only now
        world.all.barrier("test")  # and has everything before this rank waits for anything
        move.wait()
    else:
        world.all.barrier("test")
        start_once(plan, 1, before, target, group, 256, 1024).wait()
        world.all.barrier("test")
    assert all(torch.equal(tensor, after[name]) for name, tensor in target.items())
    return plan.traffic[0, 1] * 8


def test_a_sender_goes_on_while_it_sends() -> None:
    assert run_ranks(2, goes_on_while_it_sends)[0] > 10 * 1024


def other_dtypes(world: World) -> str:
    try:
        start_transfer([], {"a": torch.zeros(1)}, {"b": torch.zeros(1, dtype=torch.float64)}, world.all, torch.float32)
    except AssertionError as error:
        return str(error)
    return ""


def test_targets_of_another_dtype_are_refused() -> None:
    assert "targets are not all torch.float32" in run_ranks(2, other_dtypes)[0]


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


def test_what_stays_on_a_rank_holds_up_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of megabytes before the next message starts would keep its peer waiting."""
    said: list[str] = []
    original = Transfer._copy

    def copy(self: Transfer, pieces: Any) -> None:
        said.extend(["copy"] * bool(pieces))
        original(self, pieces)

    def exchange(sends: Any, receives: Any, label: str) -> list[Any]:
        said.append("exchange")
        return [SimpleNamespace(wait=lambda: said.append("wait"))]

    monkeypatch.setattr(Transfer, "_copy", copy)
    both = [Holding((rank,), {"a": whole_shard("a", (6, 1 << 16))}) for rank in range(2)]
    plan = plan_transfer(both[:1], both, lambda rank: 0, 0)
    steps = plan_steps(plan, TransferContext(0, (0, 1), {"a": (6, 1 << 16)}, {"a": (6, 1 << 16)}, False, 1 << 17))
    assert [bool(step.copies) for step in steps] == [True, False, False, False]
    source, target = torch.randn(6, 1 << 16), torch.zeros(6, 1 << 16)
    group = SimpleNamespace(start_exchange=exchange)
    args = len(steps), steps.__getitem__, {"a": source}, {"a": target}, group, torch.float32, 1 << 30, "weight_sync"
    transfer = Transfer(*args)  # type: ignore[arg-type]
    assert said == ["exchange"] * 3
    transfer.wait()
    assert said == ["exchange"] * 3 + ["copy"] + ["wait"] * 3 and torch.equal(source, target)
