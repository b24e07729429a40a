"""Optimizers over this rank's local shards: plain tensors by parameter name, so that a checkpoint can cut and join states by boxes.

The engine hands in summed, clipped gradients of exactly the rows that the rank owns. Nothing communicates but Muon's whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.kernels import wait
from rlhf_spmd.kernels.pinned import host_zeros
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS, buckets
from rlhf_spmd.workers.eight_bit import EightBit, Kept, States, Tensors
from rlhf_spmd.workers.muon import Muon

OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimConfig:
    """``models.<role>.optim``; the names are verl's.

    - name: `adamw`; `adamw_8bit`: bitsandbytes' AdamW, moments in 8 bits but those of biases and norms (needs `rlhf_spmd[optim]`);
      `muon`: torch's Muon for the matrices of the layers, in steps of the size of AdamW's, so that `lr` and `weight_decay` mean the
      same, and AdamW for all else; see [parallelism.md](parallelism.md#optimizers)
    - lr: learning rate; a critic, whose value head starts at zero, wants more, say `1e-5`
    - head_lr: learning rate of the value head, in a model without one of the output matrix, by the same schedule; null: `lr`
    - momentum: Muon's
    - lr_scheduler_type: `constant`, `linear`, `cosine`
    - lr_warmup_steps: optimizer steps of linear warm-up; negative: by ratio
    - lr_warmup_steps_ratio: share of all optimizer steps that warm up
    - min_lr_ratio: share of `lr` that linear and cosine end with
    - weight_decay: of AdamW
    - betas: of AdamW
    - eps: of AdamW
    - clip_grad: largest global gradient norm; null or 0: no clipping
    - master_weights: fp32 copies of half-precision parameters (no effect in fp32 and fp64)
    - offload: optimizer states and those copies rest in host memory, pinned on GPUs, see [parallelism.md](parallelism.md)
    """

    name: str = "adamw"
    lr: float = 1e-6
    head_lr: float | None = None
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    momentum: float = 0.95
    clip_grad: float | None = 1.0
    master_weights: bool = True
    offload: bool = False
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"name=muon": ("momentum",)}

    def check(self, where: str) -> None:
        """``where`` names the config node, as in ``models.actor.optim``. Raises ValueError: key, value and what is allowed."""

        def refuse(key: str, allowed: str) -> None:
            raise ValueError(f"{where}.{key}={getattr(self, key)}: must be {allowed}")

        for key, known in (("name", OPTIMIZERS), ("lr_scheduler_type", SCHEDULES)):
            if getattr(self, key) not in known:
                refuse(key, f"one of {', '.join(known)}")
        if self.name == "adamw_8bit" and find_spec("bitsandbytes") is None:
            raise ValueError(f"{where}.name=adamw_8bit needs the package bitsandbytes: pip install 'rlhf_spmd[optim]'")
        check_bounds(self, where, "lr", "head_lr", "weight_decay", least=0)
        if not 0 <= self.momentum < 1:
            refuse("momentum", "at least 0 and below 1")
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


class AdamW:
    """Loshchilov and Hutter 2019, arXiv 1711.05101; the arithmetic is torch's own."""

    bucket = BUCKET_ELEMENTS

    def kept(self, shape: Sequence[int], dtype: torch.dtype) -> Kept:
        """What is kept of a parameter."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))

    def update(self, config: OptimConfig, params: Tensors, grads: list[Tensor], states: States, step: int, lr: float) -> None:
        """Parameters and states in place. The first ``step`` is 0. Here and in the others gradients are of the parameters' dtype."""
        updated = list(params.values())
        adamw(
            updated,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(torch.full((len(updated),), float(step), device=updated[0].device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )


class Optimizer:
    """AdamW, EightBit and Muon over named local tensors, each over its own.

    It holds states, not parameters: the parameters are handed in at every step, since their storage may move between steps
    (resharding does that). ``step_count`` is the number of steps taken, ``total_steps`` the length of the schedule.

    A step goes bucket by bucket. States on the host come to the device for it and go back, in stream order, so the arithmetic
    is the same as without ``offload``, and the device holds the states of one bucket.
    """

    def __init__(
        self, config: OptimConfig, params: Tensors, total_steps: int, heads: Collection[str] = (), muon: Muon | None = None
    ) -> None:
        """``params``: this rank's local shards, any shapes (0 rows too), all of one dtype and device. ``heads``: names of those that
        learn with ``head_lr``. ``muon``: for the names that it has."""
        self.config, self.total_steps, self.step_count = config, total_steps, 0
        self._usual, self._eight_bit = AdamW(), EightBit() if config.name == "adamw_8bit" else None
        # (arithmetic, of the head) -> name -> elements in its buckets
        self._groups: dict[tuple[Any, bool], dict[str, int]] = {}
        kept: dict[str, Kept] = {}
        for name, param in params.items():
            arithmetic: Any = self._eight_bit if self._eight_bit is not None and param.dim() > 1 else self._usual
            size = param.numel()
            if muon is not None and name in muon.sizes:
                arithmetic, size = muon, muon.sizes[name]
            if size:
                self._groups.setdefault((arithmetic, name in heads), {})[name] = size
            dtype = accumulation_dtype(param.dtype) if config.master_weights else param.dtype
            kept[name] = arithmetic.kept(param.shape, dtype) | (
                {"master": (param.shape, dtype)} if dtype != param.dtype else {}
            )
        self._states = self._zeros(kept, next((param.device for param in params.values()), torch.device("cpu")))
        self.refresh_masters(params)

    def _zeros(self, kept: Mapping[str, Kept], device: torch.device) -> dict[str, dict[str, Tensor]]:
        forms = [form for its in kept.values() for form in its.values()]
        on_host = host_zeros(forms, device) if self.config.offload else None
        zeros = iter(on_host or [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in forms])
        return {name: {key: next(zeros) for key in its} for name, its in kept.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.config, self.step_count, self.total_steps)

    @torch.no_grad()
    def step(self, params: Tensors, grads: Tensors) -> float:
        """Update ``params`` in place (same names and shapes as at construction); returns the learning rate used.

        With Muon collective over the mesh's dp and tp: every rank of them must call, in program order.
        """
        lr, head_lr = self.lr, self.config.lr if self.config.head_lr is None else self.config.head_lr
        head_lr = learning_rate(replace(self.config, lr=head_lr), self.step_count, self.total_steps)
        for (arithmetic, is_head), sizes in self._groups.items():
            for names in buckets(sizes, arithmetic.bucket):
                RECORDER.tick()
                device = params[names[0]].device
                kept = [self._states[name] for name in names]
                states = [{key: x.to(device, non_blocking=True) for key, x in state.items()} for state in kept]
                updated = {name: state.get("master", params[name]) for state, name in zip(states, names, strict=True)}
                summed = [grads[name].to(new.dtype) for name, new in updated.items()]
                arithmetic.update(self.config, updated, summed, states, self.step_count, head_lr if is_head else lr)
                for name, new in updated.items():
                    if new is not params[name]:
                        params[name].copy_(new)
                for state, moved in zip(kept, states, strict=True):
                    for key, x in state.items():
                        if moved[key] is not x:
                            x.copy_(moved[key], non_blocking=True)
        if self.config.offload:
            wait()  # the host may read its states now
        self.step_count += 1
        return lr

    @torch.no_grad()
    def refresh_masters(self, params: Tensors) -> None:
        """Take the master weights from the parameters again, after these were overwritten."""
        for name, state in self._states.items():
            if "master" in state:
                state["master"].copy_(params[name])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> {"exp_avg" and "exp_avg_sq", or "momentum_buffer", and for half-precision parameters "master"}, each of
        the shard's shape: the tensors themselves, and copies on the host in float32 of what is kept in 8 bits.

        Writing into them in place, and then :meth:`take_states`, loads the optimizer (with ``step_count``).
        """
        if self._eight_bit is None:
            return self._states
        return {name: self._eight_bit.widen(state) for name, state in self._states.items()}

    def take_states(self, states: Mapping[str, Tensors]) -> None:
        """Keep what has been written into :meth:`state_tensors`; in the layout that it was read in the bits are the same again."""
        if self._eight_bit is not None:
            for name, state in self._states.items():
                self._eight_bit.narrow(states[name], state)
