"""What all model roles share: weights on a mesh, and rows cut into packed micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller import RANK_ZERO, THREE_D, CallRecord, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.controller.signature import InputSpec, Signature
from rlhf_spmd.data.balance import cut_micro_batches
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.workers.config import RoleConfig, WorkerContext
from rlhf_spmd.workers.model_weights import ModelWeights, OwnedWeights
from rlhf_spmd.workers.objective import (
    MASK,
    ROUTED_EXPERTS,
    MicroBatch,
    Objective,
    Rows,
    Totals,
    as_objectives,
    compute_model_outputs,
    keep_learnt_tokens,
    log_prob_metrics,
    num_model_tokens,
    pack_rows,
    response_log_probs,
    sequence_lengths,
    take_field,
)
from rlhf_spmd.workers.router_replay import ExpertRecords
from rlhf_spmd.workers.train_engine import TrainEngine
from rlhf_spmd.workers.weight_sync import AsyncWeightReplica, WeightReplica

USES_WEIGHTS = ("generate", "infer", "train")  # kinds of calls


class ModelWorker(Worker):
    """A role with a model. On ranks outside the pool, and without a ``spec``, it is the description only and has no ``engine``.

    - head: "lm", "value" or "both"
    - new_head: a value head that the model's directory lacks starts at zero
    - lr, head_lr: learning rates where the configuration leaves them to the role, as in verl and TRL. ``head_lr`` None: as ``lr``
    - compares_rollout_log_probs: whether the next update compares the rollout's log-probs with those that it computes
    - weights: the weights that calls on this worker use: the role's own, or, in a worker for one method, a replica of them
    """

    head: ClassVar[str] = "lm"
    trained: ClassVar[bool] = False
    new_head: ClassVar[bool] = False
    lr: ClassVar[float] = 1e-6
    head_lr: ClassVar[float | None] = None
    compares_rollout_log_probs = False

    def __init__(
        self,
        context: WorkerContext,
        name: str,
        pool: ResourcePool,
        shape: GroupShape,
        config: RoleConfig,
        spec: ModelSpec | None,
        replica: WeightReplica | None = None,
        method: str | None = None,
    ) -> None:
        """``replica`` and ``method`` are for a worker that runs the calls of one method on their own pool and layout."""
        super().__init__(context.controller, name, pool, shape)
        self.context = context
        self.config = config
        self.spec = spec
        self.method = method
        self.weights: ModelWeights = replica or OwnedWeights(
            context, name, pool, shape, config, spec, self.head, self.trained, self.new_head
        )
        self.mesh = self.weights.mesh
        self.device = self.weights.device
        self.prefetches = self.member and spec is not None and replica is None and config.offload and config.prefetch
        self.build_role()

    @property
    def engine(self) -> TrainEngine:
        """Return this rank's engine. Only members of a role with a model have one."""
        return self.weights.engine

    def build_role(self) -> None:
        """Build what a role needs beside its weights, at the end of construction: on every rank of the world, in program order."""

    @property
    def replayed(self) -> tuple[str, ...]:
        """Return the field of the experts that an update takes, where rows have it."""
        return () if self.config.router_replay == "disabled" else (f"{ROUTED_EXPERTS}?",)

    @property
    def owned_weights(self) -> OwnedWeights:
        """Return the weights of a role, which are not a replica's."""
        assert isinstance(self.weights, OwnedWeights), f"{self.name}: the replica for {self.method} owns no weights"
        return self.weights

    def runs(self, method: str) -> bool:
        """Return True if calls of ``method`` run on this worker, not on a replica (or, in a replica, on the role's own worker)."""
        return self.method == method if method in self.config.calls else self.method is None

    def add_replica(self, method: str, pool: ResourcePool, shape: GroupShape) -> None:
        """Run the calls of ``method`` on their own pool and layout.

        Collective over the world: every rank of it must call, in program order.
        """
        is_ahead = self.controller.versions.ahead > 0 and self.trained and getattr(type(self), method).spec.kind == "generate"
        replica = (AsyncWeightReplica if is_ahead else WeightReplica)(self.owned_weights, method, pool, shape)
        worker = type(self)(self.context, self.name, pool, shape, self.config, self.spec, replica, method)
        worker.weight_sources = self.pool.ranks
        self.method_workers[method] = worker

    def prefetch(self) -> None:
        self.owned_weights.prefetch()

    def enter(self, call: CallRecord) -> None:
        """Prepare for a call. Replicas receive the weights first; the owner resumes after its sends."""
        for worker in self.method_workers.values():
            assert isinstance(worker, ModelWorker) and isinstance(worker.weights, WeightReplica)
            worker.weights.settle()
        if call.spec.kind in USES_WEIGHTS:
            self.weights.enter(call)

    def leave(self, call: CallRecord) -> None:
        if call.spec.kind in USES_WEIGHTS:
            self.weights.leave(call)

    def micro_batches(
        self, batch: Batch, keep_groups: bool = False, min_saving: float = 0.0
    ) -> tuple[list[list[int]], list[MicroBatch], Totals]:
        """Return rows cut into packed micro-batches: the row positions of each, the micro-batches, and the mini-batch's global counts.

        Every data-parallel rank gets equally many. Rows of a group share their prompt, so they come together where that saves tokens;
        with ``keep_groups`` always. ``min_saving``: see :func:`pack_rows`.

        Collective over mesh.dp: every rank of it must call, in program order.
        """
        limits = self.context.limits
        lengths = np.array(sequence_lengths(batch), dtype=np.int64)
        prompts = batch["prompt_ids"].lengths.numpy() if len(batch) else lengths
        shared = np.maximum(prompts - 1, 0)  # all tokens of a prompt but the last one, see pack_rows
        if ROUTED_EXPERTS in batch:
            shared = shared * 0  # they may differ between rows
        columns = lengths, shared, batch.group_ids.numpy()
        max_tokens = limits.max_tokens * self.mesh.cp.size  # the ranks of cp share the tokens
        cut = functools.partial(cut_micro_batches, *columns, max_tokens, limits.rows, keep_groups, where=limits.where)
        index = cut()
        response_tokens = int(num_model_tokens(batch).sum()) if len(batch) else 0
        counts = torch.stack(self.mesh.dp.all_gather(torch.tensor([len(index), response_tokens, len(batch)]), "control"))
        num_micro_batches = int(counts[:, 0].max())
        if num_micro_batches > len(index):
            index = cut(number=num_micro_batches)
        totals = Totals(int(counts[:, 1].sum()), int(counts[:, 2].sum()))
        return index, [pack_rows(batch.take(rows), self.device, min_saving) for rows in index], totals

    def infer(
        self,
        batch: Batch,
        head: Callable[[Decoder, Tensor, MicroBatch], Tensor],
        lengths: Tensor | None = None,
        records: ExpertRecords | None = None,
    ) -> Ragged | None:
        """Return what ``head`` computes in forward passes of all rows; None except on the last stage, and without rows.

        ``head`` returns ``lengths`` [rows] numbers per row. By default that is one per response token of the model, and the tokens of
        environments get 0. ``records``: gets the experts that the rows take.

        Collective over the pool: every rank of it must call, in program order.
        """
        index, packed, _ = self.micro_batches(batch, min_saving=self.engine.inference_min_saving)
        outputs = self.engine.forward(packed, head, () if records is None else records.begin(packed))
        if not self.mesh.last_stage or not len(batch):
            return None
        order = torch.tensor([row for rows in index for row in rows])
        values = torch.cat([output for rows, output in zip(index, outputs, strict=True) if rows]).cpu()
        spreads = lengths is None and MASK in batch
        lengths = num_model_tokens(batch) if lengths is None else lengths
        result = Ragged(values, lengths[order]).take(torch.argsort(order))
        if not result.values.isfinite().all():
            row = batch.row_ids.repeat_interleave(result.lengths)[~result.values.isfinite()][0]
            raise FloatingPointError(f"row {row}: the result of {self.name} is not finite; {self._remedy()}")
        return result.unmasked(batch[MASK]) if spreads else result

    def _remedy(self) -> str:
        learning = f"lower models.{self.name}.optim.lr={self.config.optim.lr}, " if self.trained else ""
        return f"{learning}check the weights that it started with, or set models.{self.name}.dtype=float32"

    def log_probs(self, batch: Batch, temperature: float, records: ExpertRecords | None = None) -> Ragged | None:
        """Return the log-prob of every response token of the model, as :meth:`infer` returns it."""

        def head(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> Tensor:
            return response_log_probs(decoder, hidden, micro, temperature)[0]

        return self.infer(batch, head, records=records)

    @register(
        THREE_D,
        kind="train",
        describe=lambda self, objective, *, mini_batch_size=None, epochs=1: Signature(
            f"update_{self.name}",
            tuple(InputSpec((*part.row_inputs, *self.replayed), part.keep_groups) for part in as_objectives(objective)),
            mini_batch_size=mini_batch_size,
            epochs=epochs,
        ),
    )
    def update(
        self,
        steps: list[list[Batch]],
        objective: Objective | Sequence[Objective],
        *,
        mini_batch_size: int | None = None,
        epochs: int = 1,
    ) -> dict[str, float]:
        """Train, and return the mean statistics over the steps, the number of ``skipped_updates``, and ``ppo_kl`` of the first step.

        There is an optimizer step per epoch and mini-batch of ``mini_batch_size`` groups (prompts; None: all groups).

        With several references and as many objectives, one step adds up their losses of a mini-batch. The groups of the first
        reference determine the number of mini-batches.

        Collective over the pool: every rank of it must call, in program order.
        """
        objectives = as_objectives(objective)
        differences: list[Tensor] = []  # between log-probs of the same weights, before the first update
        reports: list[dict[str, float]] = []
        for batches in steps:
            compares = self.compares_rollout_log_probs and not reports
            reports.append(self._step(batches, objectives, differences if compares else None))
        if not self.engine.weights_finite():
            raise FloatingPointError(f"the weights of {self.name} are not finite after its update; {self._remedy()}")
        named = [{name if "/" in name else f"{self.name}/{name}": x for name, x in report.items()} for report in reports]
        names = dict.fromkeys(name for report in named for name in report)
        values_by_name = {name: [report[name] for report in named if name in report] for name in names}
        means = {name: sum(values) / len(values) for name, values in values_by_name.items()}
        skipped = f"{self.name}/skipped_updates"
        means[skipped] = sum(values_by_name[skipped])
        if (kl := f"{self.name}/ppo_kl") in named[0]:
            means[f"{kl}_first"] = named[0][kl]
        return means | log_prob_metrics(torch.cat(differences)) if differences else means

    def _step(
        self, batches: Sequence[Batch], objectives: Sequence[Objective], differences: list[Tensor] | None
    ) -> dict[str, float]:
        """Make one optimizer step, and return its statistics. Only the last stage has those of the losses.

        ``differences``: gets the differences between the rollout's log-probs and those of this step, which should be equal.
        """
        stats = self._accumulate(batches, objectives, differences)
        if all(objective.reports_loss_itself for objective in objectives):
            stats.pop("loss", None)
        summed = self._sum_over_dp(stats)
        return summed | {f"{self.name}/{name}": value for name, value in self.engine.optimizer_step().items()}

    def _accumulate(
        self, batches: Sequence[Batch], objectives: Sequence[Objective], differences: list[Tensor] | None
    ) -> dict[str, Tensor]:
        """Add up the gradients of all losses. Return statistics summed over micro-batches; {} except on the last stage."""
        stats: dict[str, Tensor] = {}
        for batch, objective in zip(batches, objectives, strict=True):
            _, packed, totals = self.micro_batches(keep_learnt_tokens(batch, objective.learn_if), objective.keep_groups)
            if totals.rows:  # a shorter stream may have no rows in this mini-batch
                loss = functools.partial(_loss, objective, totals, differences if objective is objectives[0] else None)
                sums = self.engine.forward_backward(packed, loss, objective.weight / totals.rows)
                for name, value in sums.items() if totals.tokens else ():  # without learnt rows there are no statistics
                    stats[name] = stats[name] + value if name in stats else value
        return stats

    def _sum_over_dp(self, stats: dict[str, Tensor]) -> dict[str, float]:
        """Return the statistics summed over data-parallel ranks; {} except on the last stage."""
        if not (self.mesh.last_stage and stats):
            return {}
        names = sorted(stats)
        values = torch.stack([stats[name] for name in names]).cpu()
        self.mesh.dp.all_reduce(values, "control")
        return dict(zip(names, values.tolist(), strict=True))

    @register(
        THREE_D,
        describe=lambda self, objective: Signature(
            f"evaluate_{self.name}", (InputSpec(objective.row_inputs, objective.keep_groups),)
        ),
    )
    def evaluate(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Return the objective's loss and statistics, without training.

        To combine replicas, add each number up over them and divide by the sum of ``rows``. The result is what an update on these rows
        would report.

        Collective over the pool: every rank of it must call, in program order.
        """
        _, packed, totals = self.micro_batches(keep_learnt_tokens(batch, objective.learn_if), objective.keep_groups)
        loss = functools.partial(_loss, replace(objective, weight=1.0), totals, None)
        sums: dict[str, float] = {"rows": len(batch)}
        for value, stats in filter(None, self.engine.forward(packed, loss)):
            for name, share in {"loss": value, **stats}.items():
                sums[name] = sums.get(name, 0.0) + float(share) * totals.rows
        return sums

    @register(RANK_ZERO, kind="control")
    def progress(self) -> dict[str, int]:
        """Return the role's state for a checkpoint, besides its tensors."""
        optimizer = self.engine.optimizer
        return {
            "optimizer_steps": optimizer.step_count if optimizer else 0,
            "skipped_steps": optimizer.skipped if optimizer else 0,
        }


def _loss(
    objective: Objective, totals: Totals, differences: list[Tensor] | None, decoder: Decoder, hidden: Tensor, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of a micro-batch, and its statistics. ``differences``: see ``ModelWorker._step``."""
    devices = {name: torch.device("cpu") if name in objective.on_cpu else hidden.device for name in objective.inputs}
    fields = compute_model_outputs(objective, decoder, hidden, micro)
    fields |= {name: take_field(micro.fields, name, device) for name, device in devices.items()}
    if differences is not None and "old_log_probs" in fields:
        differences.append((fields["log_probs"].detach() - fields["old_log_probs"]).abs())
    totals_above_zero = replace(totals, tokens=max(totals.tokens, 1))  # without learnt rows the loss is 0
    value, stats = objective.evaluate(fields, Rows.of(micro.fields), totals_above_zero)
    return value * objective.weight, stats
