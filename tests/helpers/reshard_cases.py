"""Layouts, models and values for the tests of resharding; and a transition carried out without ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor

from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.reshard import METHODS, choose_method
from rlhf_spmd.reshard.holdings import held_by
from rlhf_spmd.reshard.plan import SliceCopy

Shards = dict[str, ParamShard]

SPECS = {  # name -> model, head
    "gqa": (ModelSpec("llama", 64, 32, 48, 4, 8, 4, 4), "lm"),
    "tied, biases, qk norm": (
        ModelSpec(
            "qwen3",
            64,
            32,
            48,
            4,
            8,
            8,
            4,
            attention_bias=True,
            attention_out_bias=True,
            qk_norm=True,
            tie_word_embeddings=True,
        ),
        "lm",
    ),
    "odd vocabulary, 2 KV heads": (ModelSpec("llama", 61, 32, 48, 4, 8, 2, 4, tie_word_embeddings=True), "lm"),
    "value head": (ModelSpec("llama", 64, 32, 48, 4, 8, 4, 4), "value"),
}


def layout_of(method: str, train: Layout, pp: int, tp: int, expert_parallel_generation: bool = False) -> GenerationLayout:
    return generation_layout(train, pp, tp, METHODS[method].consecutive, expert_parallel_generation)


def train_shards(spec: ModelSpec, layout: Layout, index: int, head: str = "lm") -> Shards:
    return dict(held_by(layout, train_shards_at(spec, layout, head), index))


def generation_shards(spec: ModelSpec, layout: GenerationLayout, index: int, head: str = "lm") -> Shards:
    return dict(held_by(layout, generation_shards_at(spec, layout, head), index))


def train_shards_at(spec: ModelSpec, layout: Layout, head: str = "lm", without: str = "?") -> Callable[[int, int], Shards]:
    return lambda pp, tp: leave_out(without, plan_params(spec, head, pp, layout.pp, tp, layout.tp))


def generation_shards_at(
    spec: ModelSpec, layout: GenerationLayout, head: str = "lm", without: str = "?"
) -> Callable[[int, int], Shards]:
    whole = layout.expert_parallel_generation
    return lambda pp, tp: leave_out(
        without, plan_params(spec, head, pp, layout.pp, tp, layout.tp, layout.fused_slices, expert_parallel_generation=whole)
    )


def leave_out(without: str, shards: Shards) -> Shards:
    return {name: shard for name, shard in shards.items() if without not in name}


def fits(spec: ModelSpec, *layouts: Layout | GenerationLayout) -> bool:
    try:
        for layout in layouts:
            check_layout(spec, "layout", layout.pp, layout.tp)
    except ValueError:
        return False
    return True


@cache
def global_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Not to be written to."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 31 + 7))


def filled(shards: Shards) -> dict[str, Tensor]:
    tensors = {}
    for name, shard in shards.items():
        tensors[name] = torch.full(shard.shape, torch.nan)
        for box in shard.boxes:
            tensors[name][box.local_slices] = global_value(box.name, box.shape)[box.global_slices]
    return tensors


class Simulated:
    """All ranks of one transition at once, without processes: plans, training values and the generation values they make."""

    def __init__(
        self, name: str, layout: GenerationLayout, spec: ModelSpec, head: str = "lm", bucket: int = 1 << 30, without: str = "?"
    ) -> None:
        """``without``: leaves out the parameters that have this in their name."""
        self.layout, self.method = layout, choose_method(name, layout)
        indices = range(layout.train.size)
        self.train = [leave_out(without, train_shards(spec, layout.train, index, head)) for index in indices]
        self.wanted = [leave_out(without, generation_shards(spec, layout, index, head)) for index in indices]
        self.groups = [self.method.gather_ranks(layout, index) for index in indices]
        sides = train_shards_at(spec, layout.train, head, without), generation_shards_at(spec, layout, head, without)
        self.plans = [self.method.plan(layout, index, *sides, bucket) for index in indices]

    @cached_property
    def values(self) -> list[dict[str, Tensor]]:
        return [filled(shards) for shards in self.train]

    def generation(self, index: int) -> dict[str, Tensor]:
        """What the plan makes of the ranks' values; asserts that nothing is written twice, and that both ends agree."""
        plan, got = self.plans[index], {n: torch.full(s.shape, torch.nan) for n, s in self.wanted[index].items()}
        made = {name: torch.full(shard.shape, torch.nan) for name, shard in plan.gathered.items()} if plan.from_whole else got
        taken: dict[int, list[SliceCopy]] = {}
        for piece in [*plan.transfer.remote_copies(), *plan.transfer.local_copies()]:
            if piece.receiver == index:
                values = self.values[piece.sender][piece.source.parameter][piece.source.slices]
                put(made[piece.target.parameter][piece.target.slices], values)
                taken.setdefault(piece.sender, []).append(piece)
        for sender in taken.keys() - {index}:
            assert [piece for piece in self.given(sender) if piece.receiver == index] == taken[sender]
        for piece in plan.from_whole:
            put(got[piece.target.parameter][piece.target.slices], made[piece.source.parameter][piece.source.slices])
        return got

    @cache  # noqa: B019
    def given(self, sender: int) -> list[SliceCopy]:
        return [piece for piece in self.plans[sender].transfer.remote_copies() if piece.sender == sender]


def put(place: Tensor, values: Tensor) -> None:
    assert place.isnan().all(), "written twice"
    place.copy_(values)
