"""What every algorithm's configuration says, the knobs of those that sample, and the parts that their steps share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.dataset import DatasetConfig, RowsConfig
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import model_device
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers import ActorWorker, BatchLimits, Computed, Function, GlobalReduce, RewardWorker, RoleClass, Rows


@dataclass(frozen=True)
class Section:
    """A stream of data: the top-level key of the configuration that describes it, and as what. ``optional``: null leaves it out."""

    key: str
    config: type[RowsConfig]
    optional: bool = False

    @property
    def only_validates(self) -> bool:
        return self.optional and not issubclass(self.config, DatasetConfig)


@dataclass(frozen=True)
class AlgorithmConfig:
    """``algorithm``. An algorithm derives from it and adds its own knobs.

    ``streams``: what the step finds in ``data``, by name. ``exported``: the role that the run is for; its directory has the
    tokenizer, and roles that need a model and name none take its. ``min_samples``: the least ``sampling.n`` that makes sense.
    ``needs_reward``: a run without a reward is refused. ``rows_in_flight``: the step can take prompts in flight, by
    :func:`sample`.

    - name: one of [algorithms.md](algorithms.md), or your own module by its dotted name or file; program `sft` takes `sft` where
      it is not given
    """

    name: str = ""
    streams: ClassVar[Mapping[str, Section]] = {"prompts": Section("data", DataConfig)}
    exported: ClassVar[str] = "actor"
    min_samples: ClassVar[int] = 1
    needs_reward: ClassVar[bool] = True
    rows_in_flight: ClassVar[bool] = True

    @property
    def bypasses_log_probs(self) -> bool:
        """Whether the old log-probs are the rollout's, whatever weights it came from."""
        return False

    def check(self, where: str) -> None:
        """Raises ValueError naming the key and the value."""

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        """Raises ValueError where the algorithm's settings contradict the other sections of the configuration, or the models."""

    @property
    def moved(self) -> tuple[str, ...]:
        """Roles whose weights change without an optimizer: they are in checkpoints as those of trained roles are."""
        return ()

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        """Role -> the class of its object in ``models``. Besides there is always ``models.compute``."""
        return {"actor": ActorWorker, "reward": RewardWorker}

    @property
    def limits(self) -> BatchLimits:
        """How rows are cut into micro-batches."""
        return BatchLimits()

    @property
    def mini_batch_size(self) -> int | None:
        """Groups of an optimizer step; None: all of a step's."""
        return None

    def updates(self, role: str, steps: int, batch_size: int) -> int:
        """Optimizer steps of a role in a run of ``steps`` steps with ``batch_size`` groups each: the length of its schedule."""
        return steps

    def check_streams(self, given: Collection[str], where: str) -> None:
        """Raises ValueError where ``given``, the streams that the configuration describes, do not fit the other settings."""

    @property
    def goal(self) -> float | None:
        """The run ends when ``val/reward_mean`` has reached this."""
        return None


@dataclass(frozen=True)
class MovingReferenceConfig(AlgorithmConfig):
    """A reference that follows the actor (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656); the names are TRL's.

    With ``sync_ref_model``, after every ``ref_model_sync_steps`` steps: reference = ``ref_model_mixup_alpha`` * actor + the
    rest * reference.

    - sync_ref_model: the reference follows the actor, see [algorithms.md](algorithms.md#a-reference-that-follows)
    - ref_model_mixup_alpha: the actor's share in the new reference, above 0; 1 replaces it
    - ref_model_sync_steps: steps between two times that it follows
    """

    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps")}

    def check(self, where: str) -> None:
        check_bounds(self, where, "ref_model_mixup_alpha", above=0, most=1)
        check_bounds(self, where, "ref_model_sync_steps", least=1)
        if self.sync_ref_model and "reference" not in self.roles:
            raise ValueError(f"{where}.sync_ref_model=true: {self.name} has no reference with these settings; leave it out")

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        super().check_together(config, plans, tokenizer)
        if not self.sync_ref_model:
            return
        if rank := plans["actor"].config.lora.rank:
            raise ValueError(
                f"algorithm.sync_ref_model=true: a reference cannot follow adapters, models.actor.lora.rank={rank}; leave one out"
            )
        if plans["reference"].spec != plans["actor"].spec:
            raise ValueError(
                f"algorithm.sync_ref_model=true: models.reference.path={plans['reference'].config.path!r} is another architecture than "
                f"models.actor.path={plans['actor'].config.path!r}; a reference that follows must be the same"
            )
        dtype = plans["reference"].config.torch_dtype(model_device())
        if self.ref_model_mixup_alpha < 1 and dtype.itemsize < 4:
            raise ValueError(
                f"algorithm.ref_model_mixup_alpha={self.ref_model_mixup_alpha}: in {dtype} the reference would round its small steps "
                "away and stay where it is; set models.reference.dtype=float32, or ref_model_mixup_alpha=1"
            )
        if self.ref_model_sync_steps > config.run.steps:
            raise ValueError(
                f"algorithm.ref_model_sync_steps={self.ref_model_sync_steps}: with run.steps={config.run.steps} the reference would "
                "never follow; lower it, or leave sync_ref_model out"
            )

    @property
    def moved(self) -> tuple[str, ...]:
        return ("reference",) if self.sync_ref_model else ()


def move_reference(models: Any, config: AlgorithmConfig, number: int) -> list[Reference]:
    """The end of every step: the reference follows, if this is a step after which it does."""
    if not (isinstance(config, MovingReferenceConfig) and config.sync_ref_model) or number % config.ref_model_sync_steps:
        return []
    return [models.reference.follow(None, models.actor, config.ref_model_mixup_alpha)]


@dataclass(frozen=True)
class RolloutConfig(MovingReferenceConfig):
    """Of algorithms that train on what the model samples; the names are verl's. Batch sizes count prompts.

    - ppo_mini_batch_size: prompts per optimizer step; must divide `data.train_batch_size`, or exceed it (then one mini-batch).
      See [parallelism.md](parallelism.md#mini-batches)
    - ppo_epochs: passes over the rollout, each with mini-batches of its own
    - use_dynamic_bsz: micro-batches by tokens; `false`: by rows
    - ppo_max_token_len_per_gpu: tokens of a micro-batch on one rank; at least the longest prompt and response together
    - ppo_micro_batch_size_per_gpu: rows of a micro-batch on one rank, for `use_dynamic_bsz=false`
    """

    ppo_mini_batch_size: int = 256
    ppo_epochs: int = 1
    use_dynamic_bsz: bool = True
    ppo_max_token_len_per_gpu: int = 16384
    ppo_micro_batch_size_per_gpu: int | None = None

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", least=1)
        if not self.use_dynamic_bsz and (self.ppo_micro_batch_size_per_gpu or 0) < 1:
            raise ValueError(f"{where}.use_dynamic_bsz=false needs {where}.ppo_micro_batch_size_per_gpu, at least 1")
        if self.use_dynamic_bsz and self.ppo_micro_batch_size_per_gpu is not None:
            raise ValueError(
                f"{where}.ppo_micro_batch_size_per_gpu={self.ppo_micro_batch_size_per_gpu} does nothing with "
                f"{where}.use_dynamic_bsz=true; leave it out, or set use_dynamic_bsz=false"
            )

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.ppo_max_token_len_per_gpu, None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu)

    @property
    def mini_batch_size(self) -> int:
        return self.ppo_mini_batch_size

    def training_steps(self, role: str, steps: int) -> int:
        """In how many of a run's ``steps`` a trained role is updated."""
        return steps

    def updates(self, role: str, steps: int, batch_size: int) -> int:
        return self.training_steps(role, steps) * -(-batch_size // self.ppo_mini_batch_size) * self.ppo_epochs

    @property
    def schedule(self) -> dict[str, int]:
        """What ``update`` is told of mini-batches and epochs."""
        return {"mini_batch_size": self.ppo_mini_batch_size, "epochs": self.ppo_epochs}


def sample(models: Any, data: Any, number: int) -> tuple[Reference, Reference]:
    """The step's prompts with the actor's responses, and the call that made these.

    With ``data.gen_batch_size`` more prompts are in flight than the step takes: those whose responses have ended first.
    """
    prompts = data.prompts.next()
    rollout = models.actor.generate_sequences(prompts, data.sampling, number, data.prompts.num_groups)
    if data.prompts.num_groups is not None:
        reports = models.controller.get(rollout)[0]
        ended = data.prompts.take_ended([group for report in reports for group in report["groups"]])
        return prompts.union(rollout).take(ended), rollout
    return prompts.union(rollout), rollout


def score(models: Any, rows: Reference) -> tuple[Reference, list[Reference]]:
    """``scores`` of responses, the sum of all rewards that add up (``models.rewards``), nan where none of them scores a response or a
    call of one failed; and the calls that made them."""
    calls = [reward.compute_reward(rows) for reward in models.rewards]
    if len(calls) == 1:
        return calls[0].select("scores"), calls
    names = [(f"{reward.name}_scores", f"{reward.name}_failed") for reward in models.rewards]
    scored = [
        call.rename(scores=score, failed=fail).select(score, fail) for call, (score, fail) in zip(calls, names, strict=True)
    ]
    reads = tuple(name for pair in names for name in pair)
    total = models.compute.apply(rows.union(*scored), add_scores, reads, outputs=("scores",))
    return total, [*calls, total]


def add_scores(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> Computed:
    """The sum of the fields ``*_scores``; nan for a row that none of them scores, and for one in a field ``*_failed``, whose sum would
    lack what that call would have said. Raises RewardError where no reward has scored any row of the run so far."""
    given, failed = (
        torch.stack([field.double() for name, field in fields.items() if name.endswith(end)]) for end in ("_scores", "_failed")
    )
    scored = ~given.isnan().all(0) & ~failed.any(0)
    total = given.masked_fill(given.isnan(), 0.0).cumsum(0)[-1]  # in order, whatever the number of rows
    sums = whole.sum(torch.stack([total[scored].sum(), scored.sum().double(), total.new_tensor(len(rows))])).tolist()
    if not sums[1] and "scored" not in whole.state:
        raise RewardError(
            f"no reward scores any of the first {sums[2]:.0f} rows; look at what the functions return, and at data_sources"
        )
    whole.state["scored"] = True
    return {"scores": total.where(scored, torch.nan)}, {"reward/total_mean": sums[0] / sums[1]} if sums[1] else {}


def validate(models: Any, data: Any, config: Any, number: int, stream: str = "prompts") -> dict[str, float]:
    """Mean score of the validation prompts' responses, means of what else the reward functions returned, and what ``evaluate`` says
    of each set.

    Collective over the world: every rank of it must call, in program order.
    """
    return data.validate_rewards(stream, lambda *given: _answer_and_score(models, number, *given))


def _answer_and_score(
    models: Any, number: int, rows: Reference, sampling: SamplingConfig, read_answers: Function
) -> tuple[Reference, list[Reference]]:
    """``scores`` and what ``read_answers`` makes of the responses, and the calls whose values are reported."""
    answered = rows.union(models.actor.generate_sequences(rows, sampling, number))
    scores, calls = score(models, answered)
    answered = answered.union(scores)
    read = models.compute.apply(answered, read_answers, ("response_ids", "scores", "stopped"), outputs=("answer_codes",))
    return scores.union(read), [*calls, read]
