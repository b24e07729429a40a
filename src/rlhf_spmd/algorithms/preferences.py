"""What algorithms that learn from pairs share: settings, the reference's log-probs, objective and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import AlgorithmConfig, StreamSpec
from rlhf_spmd.config.constraints import PositiveFloat, PositiveInt, Range
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.preferences import PreferencesConfig
from rlhf_spmd.objectives.advantages import row_sums
from rlhf_spmd.objectives.preferences import LossType, pair_indices, preference_loss
from rlhf_spmd.workers import ActorWorker, BatchLimits, GlobalReduce, Objective, RoleClass, Rows, ScoreWorker, Totals
from rlhf_spmd.workers.compute import Computed

# (fields [pairs] of the chosen rows, fields [pairs] of the rejected rows) -> losses [pairs], and statistics [pairs] to report
PairLoss = Callable[[dict[str, Tensor], dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class PairLearningConfig(AlgorithmConfig):
    """A step is one optimizer step on ``data.train_batch_size`` pairs or labelled rows.

    - max_token_len_per_gpu: tokens of a micro-batch on one rank; at least the longest pair or row
    """

    max_token_len_per_gpu: PositiveInt = 16384
    streams: ClassVar[Mapping[str, StreamSpec]] = {"pairs": StreamSpec("data", PreferencesConfig)}

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {"actor": ActorWorker}

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.max_token_len_per_gpu, where="algorithm.max_token_len_per_gpu")


@dataclass(frozen=True)
class ScoreModelConfig(PairLearningConfig):
    """Models that give one score to a whole response, trained from pairs and exported with one label."""

    exported: ClassVar[str] = "reward"

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {self.exported: ScoreWorker}


@dataclass(frozen=True)
class DirectLossConfig:
    """DPO's losses.

    - beta: how far the policy may go from the reference
    - loss_type: `sigmoid`, `ipo`, `hinge` or `robust`
    - label_smoothing: the share of pairs that are taken to be the wrong way round; for `sigmoid` (conservative DPO) and `robust`
    - length_normalized: log-ratios as means per token in place of sums (TRL's `ipo` has that)
    """

    beta: PositiveFloat = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: Annotated[float, Range(least=0, below=0.5)] = 0.0
    length_normalized: bool = False

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"loss_type=sigmoid or loss_type=robust": ("label_smoothing",)}
    rules: ClassVar[Rules] = (
        Rule(
            ("loss_type", "label_smoothing"),
            lambda s: s.loss_type == "robust" and s.label_smoothing == 0,
            "the loss corrects for the share of wrong pairs",
            "set label_smoothing to that share",
        ),
    )

    def objective(self, temperature: float = 1.0) -> Objective:
        """Return the loss ``loss_type`` of sums of log-probs at ``temperature``, or with ``length_normalized`` of means per token."""

        def loss(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            better, worse = (
                (side["logps"] - side["ref_logps"]) / (side["tokens"] if self.length_normalized else 1)
                for side in (chosen, rejected)
            )
            losses = preference_loss(better - worse, self.beta, self.loss_type, self.label_smoothing)
            return losses, implied_rewards(self.beta * better, self.beta * worse, (chosen["logps"], rejected["logps"]))

        return pair_objective(loss, ("ref_logps",), "log_probs", temperature)


def pair_objective(loss: PairLoss, reads: tuple[str, ...], model: str, temperature: float = 1.0) -> Objective:
    """Return the mean of a loss over pairs.

    ``loss`` gets the fields ``reads`` of each side. Where ``model`` is ``log_probs`` it also gets their sum as ``logps`` and their
    number as ``tokens``, else ``row_values``.
    """

    def mean_loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = {name: x for name, x in fields.items() if name != "chosen"}
        if "log_probs" in numbers:
            numbers["logps"] = row_sums(numbers.pop("log_probs").double(), rows.lengths)
            numbers["tokens"] = rows.lengths.to(numbers["logps"], non_blocking=True)
        device = next(iter(numbers.values())).device
        sides = torch.stack(pair_indices(rows.group_ids, fields["chosen"])).to(device, non_blocking=True)
        chosen, rejected = ({name: x[side] for name, x in numbers.items()} for side in sides)
        losses, report = loss(chosen, rejected)
        num_pairs = totals.rows / 2
        return losses.sum() / num_pairs, {name: x.detach().double().sum() / num_pairs for name, x in report.items()}

    return Objective(mean_loss, ("chosen", *reads), (model,), temperature, keep_groups=True, on_cpu=("chosen",))


def implied_rewards(chosen: Tensor, rejected: Tensor, logps: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return statistics, by TRL's names, of the rewards [pairs] that a policy's log-probs imply."""
    report = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    report["rewards/accuracies"] = chosen > rejected
    return report | {"logps/chosen": logps[0], "logps/rejected": logps[1]}


def reference_log_probs(models: Any, rows: Reference) -> Reference:
    """Return ``rows`` with ``ref_logps``, the reference's log-prob of each response, float64 [rows]."""
    tokens = models.reference.compute_ref_log_prob(rows)
    return rows.union(models.compute.apply(rows.union(tokens), sum_log_probs, ("ref_log_prob",), outputs=("ref_logps",)))


def sum_log_probs(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
    return {"ref_logps": row_sums(fields["ref_log_prob"].double(), rows.lengths)}, {}


def next_with_reference(models: Any, stream: Any) -> Reference:
    """Return the step's rows with ``ref_logps``. The reference computes them when a row first comes; the data keep them for later
    steps."""
    rows = stream.next()
    if "ref_logps" in rows:
        return rows
    earlier_rows, new_rows = stream.split_by_kept(rows, "ref_logps")
    new_rows = reference_log_probs(models, new_rows)
    stream.keep(new_rows, "ref_logps", models.controller.get_field(new_rows, "ref_logps"))
    return earlier_rows.concat(new_rows) if len(earlier_rows) else new_rows


def validation_statistics(data: Any, stream: str, evaluate: Callable[[Reference], Reference]) -> dict[str, float]:
    """Return ``val/loss`` and the other statistics of an objective over all validation rows.

    Collective over the world: every rank of it must call, in program order.
    """
    sums: dict[str, float] = {}
    for part in data.validation.evaluate_rows(stream, evaluate):
        for name, share in part.items():
            sums[name] = sums.get(name, 0.0) + share
    rows = sums.pop("rows")
    return {f"val/{name}": total / rows for name, total in sums.items()}
