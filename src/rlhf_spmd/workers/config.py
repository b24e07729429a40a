"""``models.<role>``: what a role is made of, where it lives, how it is split."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels import ATTENTION, can
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.workers.optimizer import OptimConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class CallConfig:
    """``models.<role>.calls.<method>``: ranks and layout of one method's calls. ``pool`` null: the role's. The weights are
    reallocated for every call; gradients and optimizer states stay where the role is. ``delta``: what came for the last call is kept
    at both ends, and only elements that have changed since are sent."""

    pool: str | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    delta: bool = False


@dataclass(frozen=True)
class ComputeConfig:
    """``dtype`` auto: bfloat16 on GPUs, float32 on CPUs. ``attention``: "cpp" (kernels compiled at first use, on CPUs), "torch", or
    "auto", which is the first of these that can be had."""

    dtype: str = "auto"
    attention: str = "auto"

    def check(self, where: str) -> None:
        if self.dtype not in (*DTYPES, "auto"):
            raise ValueError(f"{where}.dtype={self.dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")
        if self.attention not in ATTENTION:
            raise ValueError(f"{where}.attention={self.attention!r} is not known; allowed: {', '.join(ATTENTION)}")

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype == "auto":
            return can(device).dtype
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class RoleConfig(ComputeConfig):
    """One model role. ``path`` is a Hugging Face directory; critic and reference take the actor's if they name none;
    with ``random_init`` only its configuration and tokenizer are read and the weights are drawn from ``run.seed``.

    ``pool`` is a name in ``placement.pools``. With bfloat16 parameters ``optim.master_weights`` keeps float32 copies beside the
    optimizer states. ``generation`` counts for the actor and for judges.
    ``activation_checkpointing``: none, selective or full; auto: the first of these with which the run should fit into memory;
    ``activation_offload``: what is kept for the backward pass lies in host
    memory. Both: see ``Decoder.keep_activations``. ``offload``: between the role's calls its weights rest in host memory, pinned on
    GPUs; what the optimizer keeps has ``optim.offload``. ``prefetch``: they come back while the call before it computes.
    """

    path: str | None = None
    random_init: bool = False
    pool: str | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    activation_checkpointing: str = "auto"
    activation_offload: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    calls: dict[str, CallConfig] = field(default_factory=dict)
    offload: bool = False
    prefetch: bool = False

    def check(self, where: str) -> None:
        super().check(where)
        if self.prefetch and not self.offload:
            raise ValueError(
                f"{where}.prefetch=true brings weights back from host memory, and {where}.offload is false; leave it out"
            )
        if self.activation_checkpointing not in ("auto", *CHECKPOINTING):
            raise ValueError(
                f"{where}.activation_checkpointing={self.activation_checkpointing!r} is not known; "
                f"allowed: auto, {', '.join(CHECKPOINTING)}"
            )


@dataclass(frozen=True)
class BatchLimits:
    """How a role cuts its rows into micro-batches: by token budget, or by a fixed number of rows. ``where``: the setting's name."""

    max_tokens: int = 16384
    rows: int | None = None
    where: str = "algorithm.ppo_max_token_len_per_gpu"
