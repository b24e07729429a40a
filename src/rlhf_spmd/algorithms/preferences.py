"""What algorithms that learn from pairs share: their knobs, the reference's log-probs, their objective, how they are validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rlhf_spmd.algorithms.base import AlgorithmConfig, Section
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.batch import Field
from rlhf_spmd.data.preferences import PreferencesConfig
from rlhf_spmd.objectives.preferences import LOSS_TYPES, pair_indices, preference_loss, row_sums
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.arithmetic import RoleClass, Whole
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.critic import ScoreWorker
from rlhf_spmd.workers.objective import Objective, Rows, Totals

# (number of each of two rows by field, [pairs] each) -> losses [pairs], and what to report the mean of
PairLoss = Callable[[dict[str, Tensor], dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class PairsConfig(AlgorithmConfig):
    """A step is one optimizer step on ``data.train_batch_size`` pairs."""

    max_token_len_per_gpu: int = 16384
    streams: ClassVar[Mapping[str, Section]] = {"pairs": Section("data", PreferencesConfig)}

    def check(self, where: str) -> None:
        check_bounds(self, where, "max_token_len_per_gpu", least=1)

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {"actor": ActorWorker}

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.max_token_len_per_gpu, where="algorithm.max_token_len_per_gpu")


@dataclass(frozen=True)
class ScoresConfig(PairsConfig):
    """Of models that give a score to a whole response, trained from pairs and exported with one label."""

    exported: ClassVar[str] = "reward"

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {self.exported: ScoreWorker}


def check_loss_type(loss_type: str, smoothing: float, where: str) -> None:
    """Raises ValueError for a loss that there is not, and for a ``label_smoothing`` that it does not take."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"{where}.loss_type={loss_type!r} is not known; allowed: {', '.join(LOSS_TYPES)}")
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"{where}.label_smoothing={smoothing} must be at least 0 and less than 0.5")
    if smoothing and loss_type not in ("sigmoid", "robust"):
        raise ValueError(f"{where}.label_smoothing={smoothing} does nothing with {where}.loss_type={loss_type}; leave it out")
    if not smoothing and loss_type == "robust":
        raise ValueError(f"{where}.loss_type=robust corrects for {where}.label_smoothing, the share of wrong pairs; give it")


def of_pairs(loss: PairLoss, reads: tuple[str, ...], model: str, temperature: float = 1.0) -> Objective:
    """The mean of a loss over pairs. The loss gets of each side the fields that it reads, the sum of ``log_probs`` as ``logps`` and
    their number as ``tokens``, or ``row_values``: whatever ``model`` names."""

    def whole(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = dict(fields)
        if "log_probs" in numbers:
            numbers["logps"] = row_sums(numbers.pop("log_probs"), rows.lengths)
            numbers["tokens"] = rows.lengths.to(numbers["logps"])
        chosen, rejected = (
            {name: x[at.to(x.device)] for name, x in numbers.items()} for at in pair_indices(rows.group_ids, fields["chosen"])
        )
        losses, told = loss(chosen, rejected)
        num_pairs = totals.rows / 2
        return losses.sum() / num_pairs, {name: x.detach().double().sum() / num_pairs for name, x in told.items()}

    return Objective(whole, ("chosen", *reads), (model,), temperature, keep_groups=True)


def implied_rewards(chosen: Tensor, rejected: Tensor, logps: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Statistics by TRL's names of the rewards [pairs] that a policy's log-probs imply."""
    report = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    report["rewards/accuracies"] = chosen > rejected
    return report | {"logps/chosen": logps[0], "logps/rejected": logps[1]}


def direct_preference(config: Any, temperature: float) -> Objective:
    """DPO's losses (``loss_type``), of sums of log-probs or with ``length_normalized`` of means per token."""

    def loss(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        sides = [
            (side["logps"] - side["ref_logps"]) / (side["tokens"] if config.length_normalized else 1)
            for side in (chosen, rejected)
        ]
        losses = preference_loss(sides[0] - sides[1], config.beta, config.loss_type, config.label_smoothing)
        return losses, implied_rewards(config.beta * sides[0], config.beta * sides[1], (chosen["logps"], rejected["logps"]))

    return of_pairs(loss, ("ref_logps",), "log_probs", temperature)


def reference_log_probs(models: Any, rows: Reference) -> Reference:
    """``rows`` with ``ref_logps``: the reference's log-prob of each response, float64 [rows]."""
    tokens = models.reference.compute_ref_log_prob(rows)
    return rows.union(models.arithmetic.apply(rows.union(tokens), sum_log_probs, ("ref_log_prob",), gives=("ref_logps",)))


def sum_log_probs(fields: dict[str, Tensor], rows: Rows, whole: Whole) -> tuple[dict[str, Field], dict[str, float]]:
    return {"ref_logps": row_sums(fields["ref_log_prob"], rows.lengths)}, {}


def next_with_reference(models: Any, stream: Any) -> Reference:
    """The step's rows with ``ref_logps``, which the reference computes in the first epoch and the data keep for the others."""
    rows = stream.next()
    if "ref_logps" not in rows:
        rows = reference_log_probs(models, rows)
        stream.keep(rows, "ref_logps", models.controller.get_field(rows, "ref_logps"))
    return rows


def validate_by(data: Any, stream: str, evaluate: Callable[[Reference], Reference]) -> dict[str, float]:
    """``val/loss`` and the other statistics of an objective over all validation rows. Collective over the world: every rank of it must
    call, in program order."""
    sums: dict[str, float] = {}
    for part in data.validate_rows(stream, evaluate):
        for name, share in part.items():
            sums[name] = sums.get(name, 0.0) + share
    rows = sums.pop("rows")
    return {f"val/{name}": total / rows for name, total in sums.items()}
