"""``models.<role>``: a role's model, pool and layout (``RoleConfig``); and ``WorkerContext``, from which all workers are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.config.constraints import NonNegativeFloat
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.optim_config import OptimConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class CallConfig:
    """``models.<role>.calls.<method>``: ranks and layout of one method's calls. The weights are reallocated for every call;
    gradients and optimizer states stay where the role is.

    - pool: pool of one inference method's calls ([Reallocation](placement.md#reallocation-and-per-call-layouts)); null: the
      role's
    - delta: send only the elements that have changed since the last call ([Only what has
      changed](placement.md#only-what-has-changed))
    """

    pool: str | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    delta: bool = False


@dataclass(frozen=True)
class ComputeConfig:
    """How a model is computed.

    - dtype: `auto` (bfloat16 on GPUs, float32 on CPUs), `float32`, `bfloat16`, `float64` (also `fp32`, `bf16`, `fp64`)
    - attention: `cpp` (kernels that are compiled at first use, on CPUs), `torch`, or `auto`. On CPUs `auto` is `cpp` where that
      compiles, else `torch`, see [generation.md](generation.md#kernels). On GPUs it is flash attention, see [gpus.md](gpus.md)
    """

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["auto", "cpp", "torch"] = "auto"

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype on ``device``."""
        if self.dtype == "auto":
            return capabilities(device).dtype
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class RoleConfig(ComputeConfig):
    """One model role. ``generation`` counts for the actor and for judges. For ``activation_*`` see ``Decoder.keep_activations``.

    - path: Hugging Face directory, or a name on the hub (`Qwen/Qwen2.5-0.5B-Instruct`), which one process of a host downloads into
      the hub's cache (`HF_HOME`, `HF_HUB_OFFLINE` and `hf auth login` count; fetch large ones before the job: `hf download NAME`);
      critic and reference take the actor's if null, the reference with the adapter of the actor's `lora.path`; a reward has no model
      if null
    - random_init: read configuration and tokenizer from `path` and draw the weights from `run.seed`
    - pool: a name in `placement.pools`; null: `placement.strategy` decides
    - activation_checkpointing: `none`, `selective` or `full`: what of a layer the backward pass computes again, see
      [parallelism.md](parallelism.md); `auto`: the first of them with which the run should fit into memory, the results have the same
      bits
    - activation_offload: keep what the backward pass needs in host memory
    - router_aux_loss_coef: what the load-balancing loss of a mixture of experts is multiplied by before it is added to the role's, see
      [models.md](models.md#experts)
    - router_replay: `R2`: updates take the experts that the forward pass of the old log-probs took; `R3`: both take those of
      generation, see [models.md](models.md#router-replay)
    - calls: method: ranks and layout of its calls, where they are not the role's
    - offload: between the role's calls its weights rest in host memory, pinned on GPUs, see
      [placement.md](placement.md#weights-in-host-memory); what the optimizer keeps has `optim.offload`
    - prefetch: with `offload`: the weights come back while the call before computes, at the price of both roles' memory at once
    """

    path: str | None = None
    random_init: bool = False
    pool: str | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    activation_offload: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    router_aux_loss_coef: NonNegativeFloat = 0.0
    router_replay: Literal["disabled", "R2", "R3"] = "disabled"
    calls: dict[str, CallConfig] = field(default_factory=dict)
    offload: bool = False
    prefetch: bool = False

    rules: ClassVar[Rules] = (
        Rule(
            ("optim.name", "dtype"),
            lambda s: s.optim.name == "adamw_8bit" and s.dtype == "float64",
            "bitsandbytes computes in float32",
            "set optim.name=adamw",
        ),
        Rule(
            ("lora.bits", "dtype"),
            lambda s: s.lora.bits is not None and s.dtype == "float64",
            "bitsandbytes has no float64",
            "set dtype=bfloat16 or float32",
        ),
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"offload": ("prefetch",)}


@dataclass(frozen=True)
class BatchLimits:
    """How a role cuts rows into micro-batches: by a token budget, or by a number of rows. ``where``: name of the setting."""

    max_tokens: int = 16384
    rows: int | None = None
    where: str = "algorithm.ppo_max_token_len_per_gpu"


@dataclass(frozen=True)
class WorkerContext:
    """What every role is built from, besides its own configuration.

    - limits: how rows are cut into micro-batches
    - seed: ``run.seed``
    - total_updates: role -> optimizer steps of the whole run
    - temperature: the temperature of sampling, and so of log-probs
    - rewards: role -> its reward's settings
    - added_rewards: roles whose scores are added up
    - environments: name -> its settings
    - agent: the agents that answer rows in place of one response
    - run_dir: the run's directory
    - encoding: how messages between turns are rendered
    - tokenizer: the actor's
    - num_samples: number of scored rows that come back as text for people to read
    - max_prompt_length, max_response_length: limits of sampling in tokens; 0: unknown
    - exact_rollouts: generation's log-probs equal training's, bit for bit
    - partial_rollouts: rows may cross steps
    - max_staleness: by how many steps the weights that drew a token may be older than the step that learns it; null: by any number
    - rollout_log_probs: the old log-probs are always generation's
    - checkpointing: the level that this rank's memory needs, for ``activation_checkpointing=auto``
    """

    controller: Controller
    world: World
    limits: BatchLimits
    seed: int
    total_updates: Mapping[str, int] = field(default_factory=dict)
    temperature: float = 1.0
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)
    added_rewards: tuple[str, ...] = ()
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    agent: AgentConfig = field(default_factory=AgentConfig)
    run_dir: Path = Path()
    encoding: EncodingConfig | None = None
    tokenizer: Any = None
    num_samples: int = 0
    max_prompt_length: int = 0
    max_response_length: int = 0
    exact_rollouts: bool = False
    partial_rollouts: bool = False
    max_staleness: int | None = None
    rollout_log_probs: bool = False
    checkpointing: str = "none"
