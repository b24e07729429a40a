"""The hybrid engine's plans: every layout, every engine, exact to the element, without a process group."""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction

import pytest
import torch

from reshard_cases import SPECS, Simulated, cases, fits, layout_of
from reshard_plans import check_plans
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import Box, ParamShard, zero_rows
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.reshard import ENGINES, Holding, missing_elements, num_shards
from rlhf_spmd.reshard.plan import plan_gather, plan_homes

CASES = list(cases())


@pytest.mark.parametrize("part", range(8))
def test_every_layout_and_engine(part: int) -> None:
    """Each combination with one of the models and bucket sizes, in turn."""
    for number in range(part, len(CASES), 8):
        name, train, pp, tp = CASES[number]
        spec, head = list(SPECS.values())[number // 8 % len(SPECS)]
        layout = layout_of(name, train, pp, tp)
        assert fits(spec, train, layout)
        check_plans(Simulated(name, layout, spec, head, 1 if number // 3 % 2 else 1 << 30))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", ENGINES)
def test_every_model(name: str, spec: tuple[ModelSpec, str]) -> None:
    for train, pp, tp in ((Layout(2, 4, 1), 1, 2), (Layout(1, 2, 4, 3), 2, 4), (Layout(2, 2, 2, 2), 1, 1)):
        if tp <= train.tp or train.zero == 3:
            check_plans(Simulated(name, layout_of(name, train, pp, tp), *spec))


@pytest.mark.parametrize("part", range(4))
def test_the_first_that_holds_an_element_sends_it(part: int) -> None:
    """Element by element, against all that every member holds: a part that all of them hold is copied, else its first holder sends
    it, and in ``full_gather`` replicas answer for their rows."""
    rng = random.Random(part)
    for number in range(30):
        name, train, pp, tp = rng.choice(CASES)
        layout, (spec, head) = layout_of(name, train, pp, tp), list(SPECS.values())[number % len(SPECS)]
        if not fits(spec, train, layout):
            continue
        run, index = Simulated(name, layout, spec, head, rng.choice([1, 3000, 1 << 30])), rng.randrange(train.size)
        plan, group = run.plans[index], run.groups[index]
        senders = {target: torch.full(shape, -2) for target, shape in plan.whole.items()}
        senders = senders or {target: torch.full(shard.shape, -2) for target, shard in run.wanted[index].items()}
        expected = {target: senders[target].clone() for bucket in plan.buckets for target in bucket.targets}
        share = train.dp if name == "full_gather" and not train.zero else 1
        held = [held_elements(run.train[rank], train.coordinate(rank)[1] % share, share) for rank in group]
        for target, places in expected.items():
            boxes = [Box(target, tuple(places.shape), (0,) * places.dim(), tuple(places.shape), (0,) * places.dim())]
            for box in boxes if plan.whole else run.wanted[index][target].boxes:
                empty = torch.zeros(box.shape, dtype=torch.bool)
                holds = torch.stack([elements.get(box.name, empty)[box.global_slices] for elements in held])
                places[box.local_slices] = -1 if holds.all() else holds.int().argmax(0)
        for bucket in plan.buckets:
            for member, pieces in [(-1, bucket.copies), *enumerate(bucket.sends)]:
                for piece in pieces:
                    senders[piece.target][piece.target_box.local_slices] = member
        assert all(torch.equal(senders[target], places) for target, places in expected.items()), (name, layout)


def held_elements(shards: Mapping[str, ParamShard], part: int, parts: int) -> dict[str, torch.Tensor]:
    """Global tensor -> which of its elements these shards hold, only one of ``parts`` shares of their rows if not replicated."""
    held: dict[str, torch.Tensor] = {}
    for shard in shards.values():
        first, last = zero_rows(shard.shape[0], part, 1 if shard.replicated else parts)
        for box in shard.boxes:
            rows = torch.arange(box.size[0]) + box.local[0]
            mine = ((rows >= first) & (rows < last)) | bool(shard.replicated)
            here = held.setdefault(box.name, torch.zeros(box.shape, dtype=torch.bool))[box.global_slices]
            here |= mine.view(-1, *[1] * (here.dim() - 1))
    return held


@pytest.mark.parametrize("zero", [0, 3])
def test_views_for_all_but_replicated_kv_heads(zero: int) -> None:
    for spec, head in SPECS.values():
        run = Simulated("zero_redundancy", layout_of("zero_redundancy", Layout(1, 4, 2, zero), 1, 2), spec, head)
        for plan in run.plans:
            for name, home in plan.homes.items():
                if not zero and home.view is None:
                    assert "qkv" in name and spec.num_key_value_heads < 4


EVEN = ModelSpec("llama", 64, 64, 64, 4, 16, 16, 4)  # everything divides; norms are replicated and listed apart


@pytest.mark.parametrize("name", ENGINES)
def test_received_bytes_are_the_formula(name: str) -> None:
    """Of the tensors that a layout splits; embedding and head lie on single stages, so for them the mean over ranks counts."""
    for engine, train, pp, tp in CASES:
        if engine != name or train.dp == 3 or train.zero == 1 or train.size == 1:
            continue
        run = Simulated(name, layout_of(engine, train, pp, tp), EVEN, without="norm")
        whole = sum(box.numel for n, s in plan_params(EVEN, "lm", 0, 1, 0, 1).items() if "norm" not in n for box in s.boxes)
        received = run.engine.costs(run.layout).received
        mean = Fraction(sum(plan.elements_received for plan in run.plans), train.size)
        if received is None:
            assert mean == Fraction(sum(map(missing_elements, run.train, run.wanted)), train.size)
        else:
            assert mean == received * whole, (train, pp, tp)


def test_the_table_of_the_paper() -> None:
    p, t, d = 2, 4, 3
    layout = GenerationLayout(Layout(p, t, d), 1, 2)
    flat = GenerationLayout(Layout(p, t, d), 1, 2, consecutive=True)
    ours, full, naive = (ENGINES[name].costs(layout if name == "zero_redundancy" else flat) for name in ENGINES)
    assert ours.received == Fraction(t * p - 2, 2 * t * p) and ours.peak == Fraction(1, 2) and ours.twice == 0
    assert full.received == Fraction(t * p * d - 1, t * p * d) and full.peak == 1 + full.twice
    assert naive.received == Fraction(t * p - 1, t * p) and naive.peak == 1 + naive.twice and naive.twice == Fraction(1, t * p)
    assert num_shards(GenerationLayout(Layout(p, t, d, 3), 1, 2)) == p * t * d


@pytest.mark.parametrize("name", ENGINES)
def test_buckets(name: str) -> None:
    """All members cut alike; a bucket is at most the limit or one unit; a layer's members send equal amounts."""
    spec, head = SPECS["gqa"]
    run = Simulated(name, layout_of(name, Layout(1, 4, 2, 0), 1, 2), spec, head, 2000)
    for index, plan in enumerate(run.plans):
        first = run.plans[run.groups[index][0]]
        assert [(b.targets, b.sizes) for b in plan.buckets] == [(b.targets, b.sizes) for b in first.buckets]
        assert len(plan.buckets) > 4
        assert all(len(set(bucket.sizes)) == 1 for bucket in plan.buckets)


def test_what_does_not_fit() -> None:
    spec, _ = SPECS["gqa"]
    full = plan_params(spec, "lm", 0, 1, 0, 1)
    halves = [plan_params(spec, "lm", 0, 1, rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match=r"no training shard of its group holds model\.embed_tokens\.weight"):
        plan_gather([Holding((0,), halves[1])], full, 0)
    with pytest.raises(ValueError, match=r"training parameter embed\.weight .* is not part of this rank's generation shard"):
        plan_homes(full, halves[0])


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
        assert sorted(seen) == [(p, d, t) for p in range(layout.pp) for d in range(layout.dp) for t in range(layout.tp)]
        assert [layout.index(*coordinate) for coordinate in seen] == list(range(8))
        assert all(layout.tp_group(i) == [i // 2 * 2, i // 2 * 2 + 1] for i in range(8))
