"""Roles without a model: arithmetic on rows, where the rows already lie."""

from __future__ import annotations

from typing import Any, ClassVar

from rlhf_spmd.controller import RANK_ZERO, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.workers.model_worker import Build, ModelWorker


class ArithmeticWorker(Worker):
    """Every rank of the pool is a data-parallel rank. ``home``: the role lives on the pool of the first of these that there is."""

    home: ClassVar[tuple[str, ...]] = ("actor",)

    def __init__(self, build: Build, name: str, pool: ResourcePool) -> None:
        layout = Layout(dp=len(pool.ranks))
        super().__init__(build.controller, name, pool, GroupShape(layout))
        self.mesh = build_mesh(build.world, pool.ranks, layout)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of this role, as JSON; the same on every rank of the pool."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Every rank of the world calls it."""

    @register(RANK_ZERO)
    def progress(self) -> dict[str, Any]:
        """:meth:`state_dict`, for checkpoints."""
        return self.state_dict()


RoleClass = type[ModelWorker] | type[ArithmeticWorker]
