"""Roles without a model: an algorithm's functions compute fields of rows, on the ranks that already have the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.controller import DP, RANK_ZERO, GroupShape, InputSpec, ResourcePool, Signature, Worker, register
from rlhf_spmd.data.batch import Batch, Field
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.workers.config import WorkerContext
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import MASK, Rows, take_field


@dataclass(frozen=True)
class GlobalReduce:
    """Reductions over all ranks, and the role's state, for a function that sees only the rows of its rank.

    - sum, max: reduce a tensor over all ranks; every rank must call
    - state: the role's JSON, the same on every rank and part of checkpoints
    """

    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]
    state: dict[str, Any]

    def sums(self, **parts: Tensor) -> dict[str, Tensor]:
        """Return each part, of any shape, summed over all ranks in one message; float64, flat. Every rank must call."""
        flat = [part.detach().double().reshape(-1) for part in parts.values()]
        return dict(zip(parts, self.sum(torch.cat(flat)).split([len(part) for part in flat]), strict=True))

    def ranges(self, **parts: Tensor) -> dict[str, float]:
        """Return ``<name>/max`` and ``<name>/min`` of each part over all ranks, in one message. Every rank must call."""
        ends = [[float(x.max()), -float(x.min())] if len(x) else [-math.inf, -math.inf] for x in parts.values()]
        extremes = self.max(torch.tensor(ends, dtype=torch.float64)).tolist()
        pairs = zip(parts, extremes, strict=True)
        return {key: value for name, (high, low) in pairs for key, value in ((f"{name}/max", high), (f"{name}/min", -low))}


Computed = tuple[dict[str, Field], dict[str, Any]]
"""What a :data:`Function` returns.

- fields by name: a tensor [rows], or a field per token, made by ``Rows.per_token``
- metrics, the same on every rank, which may be lists of sums (``recorder.merge_values``)
"""

Function = Callable[[dict[str, Tensor], Rows, GlobalReduce], Computed]
"""A function of rows, which :meth:`ComputeWorker.apply` calls on every rank, also on ranks without rows, with empty tensors.

Its arguments:

- fields by name, [tokens] or [rows] each
- the rows
- reductions over all ranks
"""


class ComputeWorker(Worker):
    """A role in which every rank of the pool is a data-parallel rank.

    ``pool_of``: uses the pool of the first listed role that exists; by default, that of the last trained role.
    """

    pool_of: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: WorkerContext, name: str, pool: ResourcePool) -> None:
        layout = Layout(dp=len(pool.ranks))
        super().__init__(context.controller, name, pool, GroupShape(layout))
        self.mesh = build_mesh(context.world, pool.ranks, layout)
        self.state: dict[str, Any] = {}

    @register(
        DP,
        kind="compute",
        describe=lambda self, function, inputs, outputs=(), keep_groups=False: Signature(
            function.__name__, (InputSpec((*inputs, "response_ids?", f"{MASK}?"), keep_groups),), tuple(outputs)
        ),
    )
    def apply(
        self,
        batch: Batch,
        function: Function,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...] = (),
        keep_groups: bool = False,
    ) -> tuple[Batch, dict[str, float]]:
        """Return the rows with only the fields ``outputs``, which ``function`` computes from ``inputs``, and its metrics.

        The call is named after ``function``.

        Collective over the pool: every rank of it must call, in program order.
        """
        # copies: a function may write to them, and they are another call's results
        fields = {name: take_field(batch, name, torch.device("cpu")).clone() for name in inputs}
        pool = self.mesh.pool
        reduce = GlobalReduce(
            lambda x: pool.all_reduce(x.clone(), "control"), lambda x: pool.all_reduce(x.clone(), "control", "max"), self.state
        )
        results, metrics = function(fields, Rows.of(batch), reduce)
        for name, field in results.items() if len(batch) else ():
            if (rows := len(field if isinstance(field, Tensor) else field.lengths)) != len(batch):
                raise ValueError(
                    f"{function.__name__} returns field '{name}' with {rows} entries for {len(batch)} rows; "
                    "a field is a tensor [rows], or made by Rows.per_token"
                )
        return (batch.with_fields(**results) if len(batch) else batch), metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the role's state for a checkpoint, as JSON; the same on every rank of the pool."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Every rank of the world calls it."""
        self.state.update(state)

    @register(RANK_ZERO, kind="control")
    def progress(self) -> dict[str, Any]:
        """Return the :meth:`state_dict`, for checkpoints."""
        return self.state_dict()


RoleClass = type[ModelWorker] | type[ComputeWorker]
