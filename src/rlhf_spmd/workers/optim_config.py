"""``models.<role>.optim``, the learning-rate schedule, and the types that optimizers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import Fraction, NonNegativeFloat, PositiveFloat, Range
from rlhf_spmd.config.rules import Rule, Rules

Tensors = Mapping[str, Tensor]  # by parameter name
States = Sequence[Tensors]  # of each parameter, by the state's name
StateForms = dict[str, tuple[Sequence[int], torch.dtype]]  # shape and dtype of a parameter's states, by the state's name


@dataclass(frozen=True)
class OptimConfig:
    """``models.<role>.optim``; the names are verl's.

    - name: `adamw`; `adamw_8bit`: bitsandbytes' AdamW, moments in 8 bits but those of biases and norms;
      `muon`: torch's Muon for the matrices of the layers, in steps of the size of AdamW's, so that `lr` and `weight_decay` mean the
      same, and AdamW for all else; see [parallelism.md](parallelism.md#optimizers)
    - lr: learning rate; null: 1e-6, of critics, of reward and cost models and in `sft` 1e-5
    - head_lr: learning rate of the value head, in a model without one of the output matrix, by the same schedule; null: `lr`, and
      where that is null too, 1e-4 of the new head of a reward or cost model, and 1e-5 with `share_actor_critic`
    - momentum: Muon's
    - lr_scheduler_type: `constant`, `linear`, `cosine`
    - lr_warmup_steps: optimizer steps of linear warm-up; negative: by ratio
    - lr_warmup_steps_ratio: share of all optimizer steps that warm up
    - min_lr_ratio: share of `lr` that linear and cosine end with
    - weight_decay: of AdamW, on all trained parameters, norms and biases too
    - betas: of AdamW
    - eps: of AdamW
    - clip_grad: largest global gradient norm; null or 0: no clipping
    - master_weights: fp32 copies of half-precision parameters (no effect in fp32 and fp64)
    - offload: optimizer states and those copies rest in host memory, pinned on GPUs, see [parallelism.md](parallelism.md)
    """

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    lr: NonNegativeFloat | None = None
    head_lr: NonNegativeFloat | None = None
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: Fraction = 0.0
    min_lr_ratio: Fraction = 0.0
    weight_decay: NonNegativeFloat = 0.01
    betas: list[Annotated[float, Range(least=0, below=1)]] = field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Range(least=0, below=1)] = 0.95
    clip_grad: NonNegativeFloat | None = 1.0
    master_weights: bool = True
    offload: bool = False
    rules: ClassVar[Rules] = (Rule(("betas",), lambda s: len(s.betas) != 2, "AdamW has two", "give two numbers"),)
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"name=muon": ("momentum",)}

    def check(self, where: str) -> None:
        """Raise ValueError without the optimizer's library. ``where``: the section, as in ``models.actor.optim``."""
        if self.name == "adamw_8bit" and find_spec("bitsandbytes") is None:
            raise ValueError(f"{where}.name=adamw_8bit needs the library: pip install bitsandbytes")


def with_role_rates(config: OptimConfig, lr: float, head_lr: float | None) -> OptimConfig:
    """Return the settings with ``lr``, and this ``head_lr``, where they leave ``lr`` to the role."""
    if config.lr is not None:
        return config
    return replace(config, lr=lr, head_lr=head_lr if config.head_lr is None else config.head_lr)


def warmup_steps(config: OptimConfig, total: int) -> int:
    """Return the number of optimizer steps of linear warm-up in a run of ``total`` steps."""
    return config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total)


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0) of ``total``. Pure.

    Linear warm-up goes from lr / warmup to lr (starting at 0, the first step would do nothing). Then the schedule falls to
    min_lr_ratio * lr at ``total``, and stays there.
    """
    assert config.lr is not None, "with_role_rates sets the learning rate of each role"
    warmup = warmup_steps(config, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    remaining = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining[config.lr_scheduler_type])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` parameters are summed: fp32 for half precisions, otherwise ``dtype`` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
