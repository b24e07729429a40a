"""``models.<role>``: what a role is made of, where it lives, how it is split."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.workers.optimizer import OptimConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class RoleConfig:
    """One model role. ``path`` is a Hugging Face directory; critic and reference take the actor's if they name none;
    with ``random_init`` only its configuration and tokenizer are read and the weights are drawn from ``run.seed``.

    ``pool`` is a name in ``placement.pools``. ``dtype`` auto: bfloat16 on GPUs, float32 on CPUs; with bfloat16 parameters
    ``optim.master_weights`` keeps float32 copies beside the optimizer states. ``generation`` counts for the actor only.
    """

    path: str | None = None
    random_init: bool = False
    pool: str | None = None
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    dtype: str = "auto"
    activation_checkpointing: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def check(self, where: str) -> None:
        if self.dtype not in (*DTYPES, "auto"):
            raise ValueError(f"{where}.dtype={self.dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class BatchLimits:
    """How a role cuts its rows into micro-batches: by token budget, or by a fixed number of rows."""

    max_tokens: int = 16384
    rows: int | None = None
