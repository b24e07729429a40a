"""The reference policy, whose log-probs the KL term compares with. Its weights stay fixed, or follow the actor's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rlhf_spmd.controller import ONE_TO_ALL, THREE_D, CallRecord, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.models.weights import keep_initial_adapter
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import ROW_INPUTS
from rlhf_spmd.workers.train_engine import TrainEngine
from rlhf_spmd.workers.weight_sync import WeightSync


@contextmanager
def as_training_began(engine: TrainEngine) -> Iterator[None]:
    """Run passes of the model with the adapter that training began with, ``lora.path``, or without any."""
    path = engine.lora.path if engine.lora is not None else None
    for chunk in engine.chunks:
        if path is not None and any(adapter.start is None for adapter in chunk.adapters.values()):
            keep_initial_adapter(chunk, path)
        chunk.enable_adapters(False)
    try:
        yield
    finally:
        for chunk in engine.chunks:
            chunk.enable_adapters(True)


class ReferenceWorker(ModelWorker):
    _from_actor: WeightSync | None = None  # built for the first ``follow``
    _arrived: dict[str, Tensor]  # the actor's weights as this rank's shards

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        if call.spec.name != "follow":
            return
        if self._from_actor is None:
            self._from_actor = WeightSync(call.args[0].owned_weights, self.weights, "follow")
        self._arrived = {}
        if self.member:
            self._arrived = {name: torch.empty_like(shard) for name, shard in self.engine.local_tensors().items()}
        self._from_actor.copy(self._arrived)
        self._from_actor.settle()  # the actor goes on to learn

    @register(ONE_TO_ALL, kind="train")
    def follow(self, actor: ModelWorker, alpha: float) -> None:
        """Set weights = ``alpha`` * the actor's + (1 - ``alpha``) * weights, at least in float32.

        Collective over both pools: every rank of them must call, in program order.
        """
        arrived, self._arrived = self._arrived, {}
        with torch.no_grad():
            for name, shard in self.engine.local_tensors().items():
                wide = torch.promote_types(shard.dtype, torch.float32)
                shard.copy_(shard.to(wide).lerp_(arrived.pop(name).to(wide), alpha))

    @register(THREE_D, inputs=ROW_INPUTS, outputs=("ref_log_prob",), split_groups=True, streams=True)
    def compute_ref_log_prob(self, batch: Batch, temperature: float | None = None) -> Batch | None:
        """Return ``ref_log_prob``: ragged [response tokens], at ``temperature``, by default that of sampling.

        A role that is trained computes as it began.
        """
        with as_training_began(self.engine) if self.trained else nullcontext():
            result = self.log_probs(batch, temperature or self.context.temperature)
        return batch.with_fields(ref_log_prob=result) if result is not None else None
