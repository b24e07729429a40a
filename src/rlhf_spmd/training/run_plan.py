"""``RunPlan``: all that is known about a run before a process group exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING

from rlhf_spmd.controller import Graph
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.prompts import PromptsConfig, ValidationPromptsConfig
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.training.train_config import ConfigSource, TrainConfig
from rlhf_spmd.workers.role_plan import RolePlan, generating_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StreamConfig = DatasetConfig | ValidationPromptsConfig  # with rows to train on, or only to validate by
VALIDATION_SEED = 1_000_003  # validation draws other numbers than training


@dataclass(frozen=True)
class RunPlan:
    """A run as ``preflight`` decides it, stage by stage. The program builds and runs it.

    The request:

    - config: the configuration; while ``epochs`` says the length, ``run.steps`` is more than any run has
    - algorithm: the module with the algorithm's ``step``
    - source: the file and overrides that the configuration comes from
    - num_ranks, ranks_per_host: numbers of ranks in the job, and on each host
    - launch: this rank's place, on whose device the run has to fit; None: memory and disk are not checked

    What the stages add:

    - epochs: the length of the run until the data are known; then None
    - streams: the configuration of each stream of data
    - roles: the roles, those with a model first; without ranks until they are placed
    - rewards, environments: settings by name
    - tokenizer: the tokenizer in the exported model's directory
    - training, validation: data sets by stream
    - graph: the calls of a step
    - exact_rollouts: generation's log-probs equal those of a training forward bit for bit
    - checkpointing: the level of activation checkpointing for ``activation_checkpointing=auto``
    - memory: the memory that the fullest rank needs, in words
    - warnings: lines that the run prints first
    """

    config: TrainConfig
    algorithm: ModuleType
    source: ConfigSource = field(default_factory=ConfigSource)
    num_ranks: int = 1
    ranks_per_host: int = 1
    launch: Launch | None = None
    epochs: float | None = None
    streams: Mapping[str, StreamConfig] = field(default_factory=dict)
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    training: Mapping[str, TokenDataset] = field(default_factory=dict)
    validation: Mapping[str, TokenDataset] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    exact_rollouts: bool = False
    checkpointing: str = "none"
    memory: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        assert self.config.run.steps is not None, "the first stage has set it"
        return self.config.run.steps

    @property
    def exported(self) -> RolePlan:
        """The role whose model the run exports."""
        return self.roles[self.config.algorithm.exported]

    @property
    def changing_roles(self) -> dict[str, RolePlan]:
        """The roles that checkpoints hold: those that learn, or change without an optimizer."""
        return {
            role: role_plan
            for role, role_plan in self.roles.items()
            if role_plan.trained or role in self.config.algorithm.roles_without_optimizer
        }

    @property
    def generating(self) -> dict[str, RolePlan]:
        return generating_roles(self.roles)

    def sampling(self, validates: bool = False) -> SamplingConfig:
        """Return the run's sampling settings, with the data's response limit if they have none, and a seed made of ``run.seed``."""
        config = self.config
        sampling, seed = (config.val_sampling, VALIDATION_SEED) if validates else (config.sampling, 0)
        limit = next((data.max_response_length for data in self.streams.values() if isinstance(data, PromptsConfig)), None)
        return replace(sampling, max_response_length=sampling.max_response_length or limit, seed=config.run.seed + seed)
