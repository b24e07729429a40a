"""Router replay: updates take the experts of an earlier forward pass.

- R2 (Zheng et al., arXiv 2507.18071): the experts of the pass of the old log-probs, which this module records
- R3 (Ma et al., arXiv 2510.11370): the experts of generation, which ``generation.routed_experts`` records; the pass of the old
  log-probs takes them too

Without it an update may choose other experts for a token than the pass before: its weights have changed, or on GPUs its batch, and the
ratio of the log-probs jumps. Only the choice is kept; the weights of the chosen experts are those of the current router.

The choices are the field ``routed_experts`` of the rows: ragged [tokens, mixtures, experts of a token], uint8 or, beyond 256 experts,
int16. Tokens are those of prompt and response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.kernels import Ops, RoutingRule
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.workers.objective import ROUTED_EXPERTS, MicroBatch
from rlhf_spmd.workers.train_engine import TrainEngine


def check_replay(spec: ModelSpec, is_actor: bool, where: str) -> None:
    """Raise ValueError if a role cannot replay. ``is_actor``: it may train on rows that it generates. ``where``: the setting."""
    if spec.experts is None:
        raise ValueError(f"{where}: models of {spec.family} have no experts; leave it out")
    if not is_actor:
        raise ValueError(f"{where}: this role does not train on rows that it generates, so it records no experts; leave it out")


class RouterRecord:
    """The experts that the tokens of one micro-batch take on this rank: ``chosen`` by layer, [T, K]."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.chosen: dict[int, Tensor] = {}

    def route(
        self, ops: Ops, layer: int, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return and record what ``Ops.route`` chooses, of a layer by its global index."""
        weights, chosen = ops.route(logits, score_bias, rule, dtype)
        self.chosen[layer] = chosen.to(self._dtype)
        return weights, chosen


class ExpertRecords:
    """The experts of all rows of one call."""

    def __init__(self, engine: TrainEngine) -> None:
        self._mesh = engine.mesh
        self._balance = engine.balance
        assert engine.spec.experts is not None, f"models of {engine.spec.family} have no experts"
        self._dtype = engine.spec.experts.number_dtype
        self._packed: Sequence[MicroBatch] = ()
        self._records: list[RouterRecord] = []

    def begin(self, packed: Sequence[MicroBatch]) -> list[RouterRecord]:
        """Return what the routers of each micro-batch report to."""
        self._packed = packed
        self._records = [RouterRecord(self._dtype) for _ in packed]
        return self._records

    def field(self, batch: Batch) -> Ragged:
        """Return ``routed_experts`` of the rows of ``batch``, on the CPU.

        Collective over pp and cp: every rank of them must call, in program order.
        """
        mesh, balance = self._mesh, self._balance
        sizes = [len(micro.tokens) for micro in self._packed]
        experts = torch.zeros(sum(sizes), len(balance.numbers), balance.experts_per_token, dtype=self._dtype)
        parts = experts.split(sizes) if sizes else ()
        for part, record in zip(parts, self._records, strict=True):
            local = part[mesh.cp.rank :: mesh.cp.size]
            if len(local) and record.chosen:
                layer_experts = torch.stack([chosen[: len(local)] for chosen in record.chosen.values()], 1).cpu()
                local[:, [balance.numbers[layer] for layer in record.chosen]] = layer_experts
        for group in (mesh.pp, mesh.cp):
            group.all_reduce(experts.view(torch.uint8), ROUTED_EXPERTS)
        rows = [
            part if micro.token_index is None else part[micro.token_index]
            for part, micro in zip(parts, self._packed, strict=True)
        ]
        lengths = [micro.lengths for micro in self._packed]
        fields = {ROUTED_EXPERTS: Ragged(torch.cat([experts[:0], *rows]), torch.cat([batch.row_ids[:0], *lengths]))}
        ids = torch.cat([batch.row_ids[:0], *(micro.fields.row_ids for micro in self._packed)])
        rows_of_call = Batch(ids, ids, fields).reorder(batch.row_ids) if len(batch) else Batch(ids, ids, fields)
        field: Ragged = rows_of_call[ROUTED_EXPERTS]
        return field
