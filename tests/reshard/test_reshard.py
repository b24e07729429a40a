"""The plans of transitions: every layout, every method, exact to the element, without a process group."""

from __future__ import annotations

import math
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from places import ROOT
from reshard_cases import (
    SPECS,
    Simulated,
    fits,
    generation_shards,
    generation_shards_at,
    layout_of,
    train_shards,
    train_shards_at,
)
from reshard_plans import check_plans
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.reshard import METHODS, choose_method, missing_elements
from rlhf_spmd.reshard.bucketing import TransferContext, TransferMessage, TransferStep, plan_bucket
from rlhf_spmd.reshard.plan import ParamSlice
from rlhf_spmd.reshard.reshard_methods import single_slice
from rlhf_spmd.reshard.transfer import IN_FLIGHT, BackgroundTask, Transfer
from tiers import pairwise, tiers


def training_layouts(most_ranks: int = 8) -> Iterator[Layout]:
    for pp, tp, dp, zero in product((1, 2, 4), (1, 2, 4), (1, 2, 3, 4), (0, 1, 3)):
        if pp * tp * dp <= most_ranks and (dp > 1 or not zero):
            yield Layout(pp, tp, dp, zero)
            if dp == 4 and zero:
                yield Layout(pp, tp, dp, zero, zero_size=2)


def is_possible(case: dict[str, Any]) -> bool:
    train, (pp, tp) = case["train"], case["generation"]
    divides = train.pp % pp == 0 and train.tp % tp == 0
    return train.size % (pp * tp) == 0 and (divides or train.zero == 3)


AXES = {"name": list(METHODS), "train": list(training_layouts()), "generation": list(product((1, 2, 4), (1, 2, 4)))}
CASES = [(case["name"], case["train"], *case["generation"]) for case in pairwise(AXES, is_possible)]


@pytest.mark.parametrize("part", tiers(range(4), [0, 1]))
def test_every_layout_and_method(part: int) -> None:
    """Each two of method, training layout and generation layout, with one of the models and bucket sizes, in turn."""
    for number in range(part, len(CASES), 4):
        name, train, pp, tp = CASES[number]
        spec, head = list(SPECS.values())[number // 4 % len(SPECS)]
        layout = layout_of(name, train, pp, tp)
        assert fits(spec, train, layout)
        check_plans(Simulated(name, layout, spec, head, 1 if number // 3 % 2 else 1 << 30))


@pytest.mark.parametrize(
    ("train", "pp", "tp"),
    [
        (Layout(dp=1024, zero=3, zero_size=8), 1, 4),
        (Layout(1, 8, 128, 1, zero_size=2), 1, 4),
    ],
    ids=str,
)
def test_a_transition_on_1024_ranks_stays_in_a_shard_group(train: Layout, pp: int, tp: int) -> None:
    """Whoever gives is of the same copy of the model: those of the shard group, and where the grid is another one of all its stages
    and slices. All ranks of such a group name the same ranks."""
    spec, head = SPECS["value head"]
    layout = layout_of("zero_redundancy", train, pp, tp)
    method, hold = (
        choose_method("zero_redundancy", layout),
        (train_shards_at(spec, train, head), generation_shards_at(spec, layout, head)),
    )
    for index in (0, 333, 1023):
        group = method.gather_ranks(layout, index)
        assert len(group) <= 64 and index in group and all(method.gather_ranks(layout, other) == group for other in group)
        copies = {train.coordinate(rank).dp // train.dp_shard for rank in group}
        assert copies == {train.coordinate(index).dp // train.dp_shard}
        plan = method.plan(layout, index, *hold, 1 << 20)
        assert {rank for pair in plan.transfer.traffic for rank in pair} <= set(group)
        wanted = generation_shards(spec, layout, index, head)
        assert plan.transfer.received(index) == missing_elements(train_shards(spec, train, index, head), wanted)


@pytest.mark.parametrize("zero", [0, 3])
def test_views_for_all_but_replicated_kv_heads(zero: int) -> None:
    for spec, head in SPECS.values():
        run = Simulated("zero_redundancy", layout_of("zero_redundancy", Layout(1, 4, 2, zero), 1, 2), spec, head)
        for plan in run.plans:
            for name, place in plan.locations.items():
                if not zero and single_slice(place, run.train[0][name].shape) is None:
                    assert "qkv" in name and spec.num_key_value_heads < 4


EVEN = ModelSpec("llama", 64, 64, 64, 4, 16, 16, 4)  # everything divides; norms are replicated and listed apart


sys.path.append(str(ROOT / "scripts" / "bench"))
COSTS = runpy.run_path(str(ROOT / "scripts" / "bench" / "reshard.py"))  # the formulas


@pytest.mark.parametrize("name", METHODS)
def test_received_bytes_are_the_formula(name: str) -> None:
    """Of the tensors that a layout splits; embedding and head lie on single stages, so for them the mean over ranks counts."""
    for method, train, pp, tp in CASES:
        if method != name or train.dp == 3 or train.zero == 1 or train.size == 1:
            continue
        run = Simulated(name, layout_of(method, train, pp, tp), EVEN, without="norm")
        whole = sum(box.numel for n, s in plan_params(EVEN, "lm", 0, 1, 0, 1).items() if "norm" not in n for box in s.boxes)
        received = COSTS["costs_of"](run.method, run.layout).received
        mean = Fraction(sum(plan.transfer.received(index) for index, plan in enumerate(run.plans)), train.size)
        if received is None:
            assert mean == Fraction(sum(map(missing_elements, run.train, run.wanted)), train.size)
        else:
            assert mean == received * whole, (train, pp, tp)


@pytest.mark.parametrize("name", METHODS)
def test_buckets(name: str) -> None:
    """All members cut alike; a bucket is at most the limit or one unit; a layer's members send equal amounts."""
    spec, head = SPECS["gqa"]
    run = Simulated(name, layout_of(name, Layout(1, 4, 2, 0), 1, 2), spec, head, 2000)
    for index, plan in enumerate(run.plans):
        group = run.groups[index]
        assert plan.buckets == run.plans[group[0]].buckets and len(plan.buckets) > 4
        for bucket in range(len(plan.buckets)):
            sent = Counter(dict.fromkeys(group, 0))
            for piece in plan.transfer.remote_copies(plan.tensors(bucket)):
                if piece.receiver == index:
                    sent[piece.sender] += piece.source.numel
                elif piece.receiver == next(member for member in group if member != index):
                    sent[index] += piece.source.numel
            assert len(set(sent.values())) == 1


def test_what_does_not_fit() -> None:
    spec, _ = SPECS["gqa"]
    full, half = (plan_params(spec, "lm", 0, 1, 0, tp) for tp in (1, 2))
    layout = GenerationLayout(Layout(), 1, 1)
    with pytest.raises(ValueError, match=r"training parameter embed\.weight is not part of this rank's generation shard"):
        METHODS["zero_redundancy"].plan(layout, 0, lambda pp, tp: full, lambda pp, tp: half, 1 << 20)


def test_generation_layouts() -> None:
    with pytest.raises(ValueError, match=r"generation.tp=3 must divide the training layout's tp=4: .*with layout.zero=3"):
        generation_layout(Layout(1, 4, 3), 1, 3)
    with pytest.raises(ValueError, match=r"generation.pp=2 \* generation.tp=4 = 8 ranks must divide the 4 ranks"):
        generation_layout(Layout(1, 1, 4, 3), 2, 4)
    assert not generation_layout(Layout(2, 4, 2, 3), 1, 2).consecutive
    assert (
        generation_layout(Layout(2, 2, 1, vpp=2), 2, 1).consecutive
        and not generation_layout(Layout(2, 2, 1, vpp=2), 1, 1).consecutive
    )
    for layout in (generation_layout(Layout(1, 1, 8, 3), 2, 2), generation_layout(Layout(2, 2, 2), 1, 2, consecutive=True)):
        seen = [layout.coordinate(index) for index in range(8)]
        assert sorted(seen) == [(p, d, 0, t) for p in range(layout.pp) for d in range(layout.dp) for t in range(layout.tp)]
        assert [layout.index(*coordinate) for coordinate in seen] == list(range(8))
        assert all(layout.along(i, "tp") == [i // 2 * 2, i // 2 * 2 + 1] for i in range(8))


SHARED_HEADS = ModelSpec("llama", 61, 256, 512, 4, 8, 2, 32, tie_word_embeddings=True)  # parts that are messages of their own


def messages_of(run: Simulated, index: int, bucket: int, on_gpu: bool) -> TransferStep:
    plan = run.plans[index]
    sizes = [sum(math.prod(plan.gathered[target].shape) for target in targets) for targets in plan.buckets]
    shapes = {name: shard.shape for name, shard in run.train[index].items()}
    made = {name: shard.shape for name, shard in plan.gathered.items()}
    ends = TransferContext(index, run.method.gather_ranks(run.layout, index), shapes, made, False, max(sizes))
    tensors = plan.tensors(bucket)
    return plan_bucket(list(plan.transfer.remote_copies(tensors)), list(plan.transfer.local_copies(tensors)), ends, on_gpu)


@pytest.mark.parametrize(
    ("train", "name", "on_gpu"),
    [
        (Layout(tp=4), "zero_redundancy", False),
        (Layout(tp=4), "full_gather", True),
        (Layout(pp=2, tp=4), "zero_redundancy", True),
        (Layout(pp=2, tp=4), "naive_groups", False),
        (Layout(tp=4, dp=2, zero=1), "naive_groups", True),
        (Layout(tp=4, dp=2, zero=3), "zero_redundancy", True),
        (Layout(tp=4, dp=2, zero=3), "full_gather", False),
    ],
    ids=str,
)
def test_messages_of_a_pair_come_in_one_order(train: Layout, name: str, on_gpu: bool) -> None:
    """Where some of the members hold a part (KV heads that two ranks share) its givers take turns, so that not all get the same."""
    run = Simulated(name, layout_of(name, train, 1, 1), SHARED_HEADS, bucket=1 << 27)
    numbers = {len(plan.buckets) for plan in run.plans}
    assert len(numbers) == 1
    for bucket in range(numbers.pop()):
        sent, received = (defaultdict[tuple[int, int], list[list[int]]](list) for _ in range(2))
        for index in range(train.size):
            step, members = messages_of(run, index, bucket, on_gpu), run.method.gather_ranks(run.layout, index)
            for number, peer in step.transfers:
                message = step.messages[number]
                book, pair = (sent, (index, members[peer])) if message.sends else (received, (members[peer], index))
                book[pair].append([part.numel for part in message.parts])
        assert sent == received


def test_messages_under_way_are_bounded() -> None:
    """Also those that need no buffer: each is a kernel or a socket's work that others wait behind."""
    rows, sent = IN_FLIGHT // 4 // 1024, []
    weight = torch.empty(20 * rows, 1024, device="meta")
    messages = [TransferMessage(True, (ParamSlice("weight", (i * rows, 0), (rows, 1024)),), None) for i in range(20)]
    steps = [TransferStep([message], [(0, 1)]) for message in messages]
    group: Any = SimpleNamespace(start_exchange=lambda outward, *_: [sent.append(flat) for _, flat in outward])
    transfer = Transfer(20, steps.__getitem__, {"weight": weight}, {}, group, weight.dtype, 1, "weight_sync")
    assert sum(flat.numel() for flat in sent) == IN_FLIGHT
    transfer.wait()
    assert sum(flat.numel() for flat in sent) == weight.numel()


def test_a_task_ends_whose_handler_raises_and_its_thread_takes_another() -> None:
    """As where memory has run out."""

    def fail(*_: object) -> None:
        raise MemoryError

    task = BackgroundTask(fail, "first", fail)
    assert task._ended.wait(10)
    with pytest.raises(MemoryError):
        task.wait()
    following = BackgroundTask(lambda: None, "second")
    assert following._ended.wait(10)
