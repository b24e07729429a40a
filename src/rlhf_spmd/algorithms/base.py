"""What every algorithm's configuration says, the settings of algorithms that sample, and the parts that their steps share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import PositiveFraction, PositiveInt
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.batch import Field
from rlhf_spmd.data.dataset import DatasetConfig, RowsConfig
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import model_device
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers import ActorWorker, BatchLimits, Computed, GlobalReduce, RewardWorker, RoleClass, Rows


@dataclass(frozen=True)
class StreamSpec:
    """How a stream of data is configured: ``key``, the top-level key of its section, and ``config``, that section's class.

    ``optional``: null leaves the stream out.
    """

    key: str
    config: type[RowsConfig]
    optional: bool = False

    @property
    def only_validates(self) -> bool:
        return self.optional and not issubclass(self.config, DatasetConfig)


@dataclass(frozen=True)
class AlgorithmConfig:
    """``algorithm``. An algorithm's ``Config`` derives from it and adds settings of its own.

    ``streams``: what the step finds in ``data``, by name. ``exported``: the role that the run is for; the tokenizer is its
    directory's, and roles that need a model and name none take its model. ``min_samples``: the least ``sampling.n`` that makes sense.
    ``needs_reward``: a run without a reward is refused. ``rows_in_flight``: the step takes prompts in flight, by :func:`sample`.
    ``takes_agents``: a prompt may have other numbers of rows than ``sampling.n``. ``advantages_by_token``: each token has an
    advantage by what follows it, not the one of its row.

    - name: one of [algorithms.md](algorithms.md), or your own module by its dotted name or file; program `sft` takes `sft` where
      it is not given
    """

    name: str = ""
    streams: ClassVar[Mapping[str, StreamSpec]] = {"prompts": StreamSpec("data", DataConfig)}
    exported: ClassVar[str] = "actor"
    min_samples: ClassVar[int] = 1
    needs_reward: ClassVar[bool] = True
    rows_in_flight: ClassVar[bool] = True
    takes_agents: ClassVar[bool] = False

    @property
    def advantages_by_token(self) -> bool:
        return False

    @property
    def bypasses_log_probs(self) -> bool:
        """Return True if the rollout's log-probs serve as the old ones, whatever weights drew the tokens."""
        return False

    def check(self, where: str) -> None:
        """Raise ValueError for values that types and ``rules`` do not refuse. ``where``: ``algorithm``."""

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise ValueError where the algorithm's settings contradict other sections of the configuration, or the models."""

    @property
    def roles_without_optimizer(self) -> tuple[str, ...]:
        """Return the roles whose weights change without an optimizer; checkpoints hold them as they hold trained roles."""
        return ()

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        """Return each role's class in ``models``, by name. Besides there is always ``models.compute``."""
        return {"actor": ActorWorker, "reward": RewardWorker}

    @property
    def limits(self) -> BatchLimits:
        """Return how rows are cut into micro-batches."""
        return BatchLimits()

    @property
    def mini_batch_size(self) -> int | None:
        """Return the number of groups of an optimizer step; None: all of a step's groups."""
        return None

    def updates(self, role: str, steps: int, batch_size: int) -> int:
        """Return the optimizer steps of a role in ``steps`` steps of ``batch_size`` groups: the length of its schedule."""
        return steps

    def check_streams(self, configured_streams: Collection[str], where: str) -> None:
        """Raise ValueError where the configured streams do not fit the other settings."""

    @property
    def goal(self) -> float | None:
        """Return the ``val/reward_mean`` at which the run ends; None: it goes on."""
        return None


@dataclass(frozen=True)
class MovingReferenceConfig:
    """A reference that follows the actor (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656); the names are TRL's.

    With ``sync_ref_model``, after every ``ref_model_sync_steps`` steps: reference = ``ref_model_mixup_alpha`` * actor + the
    rest * reference.

    - sync_ref_model: the reference follows the actor, see [algorithms.md](algorithms.md#a-reference-that-follows)
    - ref_model_mixup_alpha: the actor's share in the new reference; 1 replaces it
    - ref_model_sync_steps: steps between two times that the reference follows
    """

    sync_ref_model: bool = False
    ref_model_mixup_alpha: PositiveFraction = 0.6
    ref_model_sync_steps: PositiveInt = 512
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps")}


@dataclass(frozen=True)
class MovingReferenceSettings:
    """What :data:`MOVING_REFERENCE_RULES` reads of a run with ``sync_ref_model``. ``dtype``: the dtype of the reference's weights."""

    algorithm: MovingReferenceConfig
    models: Mapping[str, Any]
    run: Any
    dtype: torch.dtype
    is_same_architecture: bool


MOVING_REFERENCE_RULES: Rules = (
    *(
        Rule(
            (f"models.{role}.lora.rank", "algorithm.sync_ref_model"),
            lambda s, role=role: s.models[role].lora.rank > 0,  # type: ignore[misc]  # mypy: the default is the loop's role
            "a reference cannot follow adapters",
            "leave one of the two out",
        )
        for role in ("actor", "reference")
    ),
    Rule(
        ("models.reference.path", "models.actor.path", "algorithm.sync_ref_model"),
        lambda s: not s.is_same_architecture,
        "a reference that follows has the actor's architecture",
        "leave models.reference.path out",
    ),
    Rule(
        ("algorithm.ref_model_mixup_alpha", "models.reference.dtype"),
        lambda s: s.algorithm.ref_model_mixup_alpha < 1 and s.dtype.itemsize < 4,
        "in {s.dtype} the reference would round its small steps away and stay where it is",
        "set models.reference.dtype=float32, or ref_model_mixup_alpha=1",
    ),
    Rule(
        ("algorithm.ref_model_sync_steps", "run.steps"),
        lambda s: s.algorithm.ref_model_sync_steps > s.run.steps,
        "the reference would never follow",
        "lower ref_model_sync_steps, or leave sync_ref_model out",
    ),
)


@dataclass(frozen=True)
class RolloutConfig(AlgorithmConfig):
    """Algorithms that train on what the model samples; the names are verl's. Batch sizes count prompts.

    - ppo_mini_batch_size: prompts per optimizer step; must divide `data.train_batch_size`, or exceed it (then one mini-batch).
      See [parallelism.md](parallelism.md#mini-batches)
    - ppo_epochs: passes over the rollout, each with mini-batches of its own
    - use_dynamic_bsz: micro-batches by tokens; `false`: by rows
    - ppo_max_token_len_per_gpu: tokens of a micro-batch on one rank; at least the longest prompt and response together
    - ppo_micro_batch_size_per_gpu: rows of a micro-batch on one rank, for `use_dynamic_bsz=false`
    """

    reference_sync: MovingReferenceConfig = inline(MovingReferenceConfig)
    ppo_mini_batch_size: PositiveInt = 256
    ppo_epochs: PositiveInt = 1
    use_dynamic_bsz: bool = True
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"use_dynamic_bsz=false": ("ppo_micro_batch_size_per_gpu",)}
    rules: ClassVar[Rules] = (
        Rule(
            ("sync_ref_model", "name"),
            lambda s: s.reference_sync.sync_ref_model and "reference" not in s.roles,
            "the algorithm has no reference with these settings",
            "leave sync_ref_model out",
        ),
        Rule(
            ("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
            lambda s: not s.use_dynamic_bsz and s.ppo_micro_batch_size_per_gpu is None,
            "a micro-batch by rows needs their number",
            "set ppo_micro_batch_size_per_gpu",
        ),
    )

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        if self.reference_sync.sync_ref_model:
            actor = plans["actor"]
            reference = plans.get("reference", actor)  # an actor with adapters is its own reference, which is refused
            models = {"actor": actor.config, "reference": reference.config}
            dtype = reference.config.torch_dtype(model_device())
            is_same = reference.spec == actor.spec
            check_rules(
                MOVING_REFERENCE_RULES, MovingReferenceSettings(self.reference_sync, models, config.run, dtype, is_same)
            )

    @property
    def roles_without_optimizer(self) -> tuple[str, ...]:
        return ("reference",) if self.reference_sync.sync_ref_model else ()

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.ppo_max_token_len_per_gpu, None if self.use_dynamic_bsz else self.ppo_micro_batch_size_per_gpu)

    @property
    def mini_batch_size(self) -> int:
        return self.ppo_mini_batch_size

    def training_steps(self, role: str, steps: int) -> int:
        """Return in how many of a run's ``steps`` a trained role is updated."""
        return steps

    def updates(self, role: str, steps: int, batch_size: int) -> int:
        return self.training_steps(role, steps) * -(-batch_size // self.ppo_mini_batch_size) * self.ppo_epochs

    @property
    def schedule(self) -> dict[str, int]:
        """Return mini-batches and epochs, as ``update`` takes them."""
        return {"mini_batch_size": self.ppo_mini_batch_size, "epochs": self.ppo_epochs}


def move_reference(models: Any, config: AlgorithmConfig, global_step: int) -> list[Reference]:
    """Return the call by which the reference follows the actor; [] in other steps. The last calls of every step."""
    if (
        not (isinstance(config, RolloutConfig) and config.reference_sync.sync_ref_model)
        or global_step % config.reference_sync.ref_model_sync_steps
    ):
        return []
    return [models.reference.follow(None, models.actor, config.reference_sync.ref_model_mixup_alpha)]


def sample(models: Any, data: Any, global_step: int) -> tuple[Reference, Reference]:
    """Return the step's prompts with the actor's responses, and the call that generated them.

    With ``rollout.in_flight`` more prompts are in flight than a step takes; the step then takes those whose responses ended first.
    With agents a prompt has as many rows as its episodes have conversations.
    """
    prompts = data.prompts.next()
    rollout = models.actor.generate_sequences(prompts, data.sampling, global_step, data.prompts.num_groups)
    if not data.prompts.takes_reported:
        return prompts.union(rollout), rollout
    ids = data.prompts.take_reported(models.controller.get(rollout)[0])
    return prompts.union(rollout).take(ids), rollout


def score(models: Any, rows: Reference, shown: frozenset[int] | None = None) -> tuple[Reference, list[Reference]]:
    """Return ``scores`` and ``answer_codes`` of the responses, and the calls that made them. ``shown``: ids of the rows that are
    reported as samples; None: some of every step.

    A score is the sum of all rewards in ``models.rewards``. It is nan where none of them scores the response, or where the call of
    one failed. The answer in a response is that of the first reward that reads one.
    """
    calls = [reward.compute_reward(rows, shown) for reward in models.rewards]
    if [reward.name for reward in models.rewards] == ["reward"]:
        return calls[0].select("scores", "answer_codes"), calls
    fields = ("scores", "failed", "answer_codes")
    renames = [{field: f"{reward.name}_{field}" for field in fields} for reward in models.rewards]
    scored = [call.rename(**names).select(*names.values()) for call, names in zip(calls, renames, strict=True)]
    reads = tuple(name for names in renames for name in names.values())
    total = models.compute.apply(rows.union(*scored), add_scores, reads, outputs=("scores", "answer_codes"))
    return total, [*calls, total]


def add_scores(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
    """Return the sum of the fields ``*_scores``, nan if no reward scores the row, or if any call for the row failed; and the first
    of ``*_answer_codes`` that is no nan.

    Raises RewardError if no reward has scored any row of the run so far.
    """
    scores, failed, codes = (
        torch.stack([field.double() for name, field in fields.items() if name.endswith(end)])
        for end in ("_scores", "_failed", "_answer_codes")
    )
    has_score = ~scores.isnan().all(0) & ~failed.any(0)
    total = scores.masked_fill(scores.isnan(), 0.0).cumsum(0)[-1]  # in order, whatever the number of rows
    sums = torch.stack([total[has_score].sum(), has_score.sum().double(), total.new_tensor(len(rows))])
    score_sum, num_scored, num_rows = reduce.sum(sums).tolist()
    if not num_scored and "scored" not in reduce.state:
        raise RewardError(
            f"no reward scores any of the first {num_rows:.0f} rows; look at what the functions return, and at data_sources"
        )
    reduce.state["scored"] = True
    first = (~codes.isnan()).int().argmax(0, keepdim=True)
    computed: dict[str, Field] = {"scores": total.where(has_score, torch.nan), "answer_codes": codes.gather(0, first)[0]}
    return computed, {"reward/total_mean": [score_sum, num_scored]} if num_scored else {}


def validate(models: Any, data: Any, config: Any, global_step: int, stream: str = "prompts") -> dict[str, float]:
    """Return the mean score of the responses to validation prompts, means of the other numbers that reward functions returned, and
    the metrics of ``evaluate`` for each set.

    Collective over the world: every rank of it must call, in program order.
    """
    rows_per_episode = data.validation.rows_per_episode

    def answer_and_score(rows: Reference, sampling: SamplingConfig, shown: frozenset[int]) -> tuple[Reference, list[Reference]]:
        """Return ``scores`` and ``answer_codes`` of the responses, and the calls whose values are reported."""
        answers = rows.union(models.actor.generate_sequences(rows, sampling, global_step))
        if rows_per_episode > 1:  # the rows of an episode have one score, and the first is always there
            assert rows.rows is not None, "validation rows"
            answers = answers.take(rows.rows.row_ids[rows.rows.row_ids % rows_per_episode == 0])
        return score(models, answers, shown)

    return data.validation.evaluate_rewards(stream, answer_and_score)
