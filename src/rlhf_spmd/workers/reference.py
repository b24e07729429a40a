"""The reference policy: frozen log-probabilities that the KL term measures against."""

from __future__ import annotations

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import ROW_INPUTS


class ReferenceWorker(ModelWorker):
    @register(THREE_D, inputs=ROW_INPUTS, outputs=("ref_log_prob",), split_groups=True)
    def compute_ref_log_prob(self, batch: Batch) -> Batch | None:
        """``ref_log_prob``: ragged [response tokens], at the sampling temperature."""
        result = self.log_probs(batch, self.build.temperature)
        return batch.with_fields(ref_log_prob=result) if result is not None else None
