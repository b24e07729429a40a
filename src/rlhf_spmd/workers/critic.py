"""Roles with a trained value head: a critic (a value per response position), and reward or cost models (a score per row)."""

from __future__ import annotations

from typing import ClassVar

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import ROW_INPUTS, response_values


class ScoreWorker(ModelWorker):
    """A reward or cost model in training. Its score is the value head at a row's last token (an objective's ``row_values``)."""

    head = "value"
    trained = True
    new_head = True
    lr = 1e-5
    head_lr: ClassVar[float | None] = 1e-4


class CriticWorker(ScoreWorker):
    head_lr: ClassVar[float | None] = None

    @register(THREE_D, inputs=ROW_INPUTS, outputs=("values",), split_groups=True, streams=True)
    def compute_values(self, batch: Batch) -> Batch | None:
        """Return ``values``: ragged [response tokens], the value before each token is emitted."""
        result = self.infer(batch, response_values)
        return batch.with_fields(values=result) if result is not None else None
