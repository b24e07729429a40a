"""A controller without ranks of its own: workers that count what they are asked."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from rlhf_spmd.controller import (
    ALL_TO_ALL,
    DP,
    MICRO_DP,
    ONE_TO_ALL,
    PP_AS_DP,
    PP_ONLY,
    RANK_ZERO,
    THREE_D,
    Controller,
    GroupShape,
    Protocol,
    ResourcePool,
    Worker,
    register,
)
from rlhf_spmd.data.batch import Batch, Ragged, encode_json, ragged
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.world import World

REVERSED_DP = Protocol(
    "REVERSED_DP",
    parts=lambda shape: shape.size,
    distribute=lambda shape, index: shape.size - 1 - index,
    collect=lambda shape: list(reversed(range(shape.size))),
)


class Toy(Worker):
    """Methods that return what they were given, so that a test sees who got what."""

    @register(MICRO_DP, inputs=("prompt_ids",), outputs=("response_ids", "secret"), kind="generate", lengths_of="response_ids")
    def generate(self, batch: Batch) -> Batch:
        """Response of row i: i % 5 + 1 tokens of value i."""
        if not len(batch):
            return batch
        rows = [torch.full((int(i) % 5 + 1,), int(i)) for i in batch.row_ids]
        return batch.with_fields(
            response_ids=ragged(rows, torch.int64), secret=ragged([torch.zeros(100)] * len(rows), torch.float32)
        )

    @register(THREE_D, inputs=("response_ids",), outputs=("doubled",), split_groups=True)
    def double(self, batch: Batch) -> Batch:
        if not len(batch):
            return batch
        return batch.with_fields(doubled=Ragged(batch["response_ids"].values * 2, batch["response_ids"].lengths))

    @register(THREE_D, inputs=("doubled", "response_ids", "prompt_ids", "tripled?"), kind="train")
    def update(self, steps: list[list[Batch]], *, mini_batch_size: int | None = None, epochs: int = 1) -> list[Any]:
        batches = [batch for (batch,) in steps]
        for batch in filter(len, batches):
            assert torch.equal(batch["doubled"].values, batch["response_ids"].values * 2)
            assert "secret" not in batch
        return [batch.row_ids.tolist() for batch in batches]

    @register(THREE_D, inputs=("response_ids",))
    def rows(self, batch: Batch) -> list[int]:
        return batch.row_ids.tolist()

    @register(THREE_D, inputs=("prompt_ids",), outputs=("count",))
    def count(self, batch: Batch) -> Batch:
        """Prompt tokens, at least two."""
        return batch.with_fields(count=batch["prompt_ids"].lengths) if len(batch) else batch

    @register(DP, inputs=("prompt_ids",), outputs=("echo",))
    def dp(self, batch: Batch) -> Any:
        return batch.with_fields(echo=batch["prompt_ids"]), batch.row_ids.tolist()

    @register(PP_AS_DP, inputs=("echo",))
    def pp_as_dp(self, batch: Batch) -> Any:
        return batch.row_ids.tolist() if len(batch) else []

    @register(REVERSED_DP, inputs=("prompt_ids",))
    def backwards(self, batch: Batch) -> Any:
        return [self.controller.rank, batch.row_ids.tolist()]

    @register(ONE_TO_ALL, kind="control")
    def everyone(self, word: str) -> str:
        return f"{word}{self.controller.rank}"

    @register(ALL_TO_ALL, kind="control")
    def own(self, value: int) -> int:
        return value * 10

    @register(RANK_ZERO, kind="control")
    def first(self) -> int:
        return self.controller.rank

    @register(PP_ONLY, kind="control")
    def stages(self) -> int:
        return self.controller.rank

    @register(THREE_D, inputs=("prompt_ids", "made?"), outputs=("made",))
    def hold(self, batch: Batch, until: str, then: str) -> Batch:
        """Returns when another rank has said ``until``, and says ``then``."""
        if until:
            self.store.wait([until], timedelta(seconds=60))
        self.store.set(then, "")
        return batch.with_fields(made=torch.zeros(len(batch)))


def build(world: World, kind: type[Toy] = Toy, /, **roles: tuple[list[int], Layout]) -> tuple[Controller, dict[str, Any]]:
    controller = Controller(world.all)
    toys: dict[str, Any] = {}
    for name, (ranks, layout) in roles.items():
        shape = GroupShape(layout, GenerationLayout(layout, 1, 1))
        toys[name] = kind(controller, name, ResourcePool(name, tuple(ranks)), shape)
    return controller, toys


def prompts(num_prompts: int, n: int) -> Batch:
    ids = torch.arange(num_prompts)
    rows = {
        "prompt_ids": ragged([torch.arange(int(i) + 2) for i in ids], torch.int64),
        "row": encode_json([{"i": int(i)} for i in ids]),
    }
    return Batch(ids, ids, rows).repeat(n)
