"""AdamW over this rank's local shards: plain tensors by parameter name, so that a checkpoint can cut and join states by boxes.

The optimizer never communicates: the engine hands it summed, clipped gradients of exactly the rows that the rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_spmd.kernels import can, wait
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.data_parallel import buckets

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimConfig:
    """``models.<role>.optim``; the names are verl's.

    ``lr_warmup_steps`` counts optimizer steps; where it is negative, ``lr_warmup_steps_ratio`` of all steps. ``clip_grad`` is
    the largest global gradient norm (null or 0: no clipping). ``min_lr_ratio`` is the part of ``lr`` that a linear or cosine
    schedule ends with. ``master_weights``: keep fp32 copies of half-precision parameters (no effect in fp32 and fp64).
    ``offload``: what the optimizer keeps lies in host memory, pinned on GPUs (on CPUs that is where it is anyway).
    """

    lr: float = 1e-6
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    clip_grad: float | None = 1.0
    master_weights: bool = True
    offload: bool = False

    def check(self, where: str) -> None:
        """``where`` names the config node, as in ``models.actor.optim``. Raises ValueError: key, value and what is allowed."""

        def refuse(key: str, allowed: str) -> None:
            raise ValueError(f"{where}.{key}={getattr(self, key)}: must be {allowed}")

        if self.lr_scheduler_type not in SCHEDULES:
            refuse("lr_scheduler_type", f"one of {', '.join(SCHEDULES)}")
        for key in ("lr", "weight_decay"):
            if not (getattr(self, key) >= 0 and math.isfinite(getattr(self, key))):
                refuse(key, "a finite number, at least 0")
        for key in ("lr_warmup_steps_ratio", "min_lr_ratio"):
            if not 0 <= getattr(self, key) <= 1:
                refuse(key, "between 0 and 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            refuse("betas", "two numbers, each at least 0 and below 1")
        if not self.eps > 0:
            refuse("eps", "above 0")
        if self.clip_grad is not None and not self.clip_grad >= 0:
            refuse("clip_grad", "null or at least 0 (0 and null: no clipping)")


def warmup_steps(config: OptimConfig, total: int) -> int:
    """Optimizer steps of linear warm-up in a run of ``total`` steps."""
    return config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total)


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The learning rate of optimizer step ``step`` (the first is 0) of ``total``. Pure.

    Linear warm-up from lr / warmup to lr (from 0, the first step would do nothing), then the schedule down to
    min_lr_ratio * lr at ``total``, and constant beyond.
    """
    warmup = warmup_steps(config, total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left[config.lr_scheduler_type])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of parameters of ``dtype`` are summed: fp32 for the half precisions, otherwise their own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Optimizer:
    """AdamW (Loshchilov and Hutter; the arithmetic is torch's own) over named local tensors.

    It holds states, not parameters: the parameters are handed in at every step, since their storage may move between steps
    (resharding does that). ``step_count`` is the number of steps taken, ``total_steps`` the length of the schedule.

    A step goes bucket by bucket. States on the host come to the device for it and go back, in stream order, so the arithmetic
    is the same as without ``offload``, and the device holds the states of one bucket.
    """

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor], total_steps: int) -> None:
        """``params``: this rank's local shards, any shapes (0 rows too), all of one dtype and device."""
        self.config = config
        self.total_steps = total_steps
        self.step_count = 0
        self._states: dict[str, dict[str, Tensor]] = {}
        for name, param in params.items():
            dtype = accumulation_dtype(param.dtype) if config.master_weights else param.dtype
            where: dict[str, Any] = {"device": param.device}
            if config.offload:
                where = {"device": "cpu", "pin_memory": can(param.device).pinned}
            keys = ("exp_avg", "exp_avg_sq", "master") if dtype != param.dtype else ("exp_avg", "exp_avg_sq")
            self._states[name] = {key: torch.zeros(param.shape, dtype=dtype, **where) for key in keys}
        self.refresh_masters(params)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.config, self.step_count, self.total_steps)

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> float:
        """Update ``params`` in place (same names and shapes as at construction); returns the learning rate used."""
        lr = self.lr
        for names in buckets({name: param.numel() for name, param in params.items() if param.numel()}):
            RECORDER.tick()
            device = params[names[0]].device
            kept = [self._states[name] for name in names]
            states = [{key: x.to(device, non_blocking=True) for key, x in state.items()} for state in kept]
            self._update([params[name] for name in names], [grads[name] for name in names], states, lr)
            for state, new in zip(kept, states, strict=True):
                for key, x in state.items():
                    if new[key] is not x:
                        x.copy_(new[key], non_blocking=True)
        if self.config.offload:
            wait()  # the host may read its states now
        self.step_count += 1
        return lr

    def _update(self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], lr: float) -> None:
        updated = [state.get("master", param) for state, param in zip(states, params, strict=True)]
        adamw(
            updated,
            [grad.to(new.dtype) for grad, new in zip(grads, updated, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(torch.full((len(updated),), float(self.step_count), device=updated[0].device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=lr,
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )
        for param, new in zip(params, updated, strict=True):
            if new is not param:
                param.copy_(new)

    @torch.no_grad()
    def refresh_masters(self, params: Mapping[str, Tensor]) -> None:
        """Take the master weights from the parameters again, after these were overwritten."""
        for name, state in self._states.items():
            if "master" in state:
                state["master"].copy_(params[name])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> {"exp_avg", "exp_avg_sq" and, for half-precision parameters, "master"}, each of the shard's shape.

        The tensors themselves: writing into them in place loads the optimizer (with ``step_count``).
        """
        return self._states
