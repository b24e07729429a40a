"""Optimizers over this rank's local shards: plain tensors by parameter name, so a checkpoint can cut and join states by boxes.

The engine passes summed, clipped gradients of exactly the rows that the rank owns. Only Muon communicates, for its whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_spmd.kernels import wait
from rlhf_spmd.kernels.pinned_memory import host_zeros
from rlhf_spmd.models.quantized import bitsandbytes_functional
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS, buckets
from rlhf_spmd.workers.muon import Muon
from rlhf_spmd.workers.optim_config import OptimConfig, StateForms, States, Tensors, accumulation_dtype, learning_rate

BLOCK = 256
SCALE = ".scale"  # suffix of a moment's name for its scales
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW:
    """Loshchilov and Hutter 2019, arXiv 1711.05101; torch's own arithmetic."""

    bucket = BUCKET_ELEMENTS

    def state_forms(self, shape: Sequence[int], dtype: torch.dtype) -> StateForms:
        """Return the states of a parameter."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, dtype))

    def update(self, config: OptimConfig, params: Tensors, grads: list[Tensor], states: States, step: int, lr: float) -> None:
        """Update parameters and states in place. The first ``step`` is 0. Gradients have the parameters' dtype, here and below."""
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


class EightBit:
    """AdamW with moments in 8 bits (Dettmers et al. 2021, arXiv 2110.02861): bitsandbytes' arithmetic over local shards.

    A moment is a byte per element, which names one of 256 numbers from -1 to 1, and a float32 scale per block of 256 elements in the
    order of the local shard. So blocks depend on the layout, and numbers differ between layouts by what 8 bits round off. Needs
    bitsandbytes, which ``OptimConfig.check`` has found.
    """

    bucket = BUCKET_ELEMENTS

    def __init__(self) -> None:
        functional = bitsandbytes_functional()
        self._functional: Any = functional
        self._maps = {key: functional.create_dynamic_map(signed=signed) for key, signed in SIGNED.items()}

    def state_forms(self, shape: Sequence[int], dtype: torch.dtype) -> StateForms:
        """Return the states of a parameter."""
        scales = (-(-math.prod(shape) // BLOCK),)
        return dict.fromkeys(SIGNED, (shape, torch.uint8)) | {key + SCALE: (scales, torch.float32) for key in SIGNED}

    def update(self, config: OptimConfig, params: Tensors, grads: list[Tensor], states: States, step: int, lr: float) -> None:
        """Update parameters and states in place. The first ``step`` is 0."""
        for param, grad, state in zip(params.values(), grads, states, strict=True):
            assert param.is_contiguous(), "bitsandbytes reads memory as it lies"
            self._maps = {key: table.to(param.device) for key, table in self._maps.items()}
            flat = [grad.reshape(-1), param.view(-1), *(state[key].view(-1) for key in SIGNED)]
            numbers = (*config.betas, 0.0, 0.0, config.eps, step + 1, lr)
            scales = [state[key + SCALE] for key in SIGNED]
            quantization = (*self._maps.values(), *scales)
            self._functional.optimizer_update_8bit_blockwise("adam", *flat, *numbers, *quantization, config.weight_decay)

    def to_float32(self, state: Tensors) -> dict[str, Tensor]:
        """Return the state with its moments in float32 on the host; other entries unchanged."""
        wide = {key: x for key, x in state.items() if not key.endswith(SCALE)}
        for key in self._quantized(state):
            table = self._table(key, state[key].device)
            wide[key] = self._functional.dequantize_blockwise(
                state[key], absmax=state[key + SCALE], code=table, blocksize=BLOCK
            ).cpu()
        return wide

    def from_float32(self, wide: Tensors, state: Tensors) -> None:
        """Write the inverse of :meth:`to_float32` into ``state``, with the same bits as before it."""
        for key in self._quantized(state):
            values = wide[key].to(state[key].device).flatten()
            table = self._table(key, state[key].device)
            blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
            scales = blocks.abs().amax(1)
            between = (table[1:] + table[:-1]) / 2  # nearest value; bitsandbytes' own search on CPUs misses some small ones
            codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo().tiny)[:, None], between)
            state[key].copy_(codes.view(-1)[: len(values)].view_as(state[key]))
            state[key + SCALE].copy_(scales)

    def _quantized(self, state: Tensors) -> list[str]:
        return [key for key in SIGNED if key + SCALE in state and state[key].numel()]

    def _table(self, key: str, device: torch.device) -> Tensor:
        """Return the numbers that bytes stand for.

        The map lacks -1. Its least, -0.99, becomes -1, so a block's largest is its scale again.
        """
        table = self._maps[key].to(device, copy=True)
        if SIGNED[key]:
            table[0] = -1.0
        return table


UpdateRule = AdamW | EightBit | Muon


class Optimizer:
    """AdamW, EightBit and Muon over named local tensors, each over its own parameters.

    It holds states, not parameters: these are passed at every step, since resharding may move their storage.

    - step_count: steps of the schedule so far
    - skipped: the number of these steps that changed nothing
    - total_steps: the length of the schedule

    A step goes bucket by bucket. States on the host come to the device and go back in stream order, so the arithmetic
    is the same as without ``offload``, and the device holds the states of one bucket.
    """

    def __init__(
        self, config: OptimConfig, params: Tensors, total_steps: int, heads: Collection[str] = (), muons: Sequence[Muon] = ()
    ) -> None:
        """``params``: this rank's local shards, of any shape (even 0 rows), all of one dtype and device.

        ``heads``: names of the parameters that learn with ``head_lr``. ``muons``: each updates the parameters in its ``sizes``.
        """
        self.config = config
        self.total_steps = total_steps
        self.step_count = 0
        self.skipped = 0
        self._adamw = AdamW()
        self._eight_bit = EightBit() if config.name == "adamw_8bit" else None
        # (rule, whether it is a head) -> name -> elements in its buckets
        self._groups: dict[tuple[UpdateRule, bool], dict[str, int]] = {}
        forms_by_name: dict[str, StateForms] = {}
        for name, param in params.items():
            rule: UpdateRule = self._eight_bit if self._eight_bit is not None and param.dim() > 1 else self._adamw
            size = param.numel()
            for muon in muons:
                if name in muon.sizes:
                    rule = muon
                    size = muon.sizes[name]
            if size:
                self._groups.setdefault((rule, name in heads), {})[name] = size
            dtype = accumulation_dtype(param.dtype) if config.master_weights else param.dtype
            forms_by_name[name] = rule.state_forms(param.shape, dtype) | (
                {"master": (param.shape, dtype)} if dtype != param.dtype else {}
            )
        self._states = self._zeros(forms_by_name, next((param.device for param in params.values()), torch.device("cpu")))
        self.refresh_masters(params)

    def _zeros(self, forms_by_name: Mapping[str, StateForms], device: torch.device) -> dict[str, dict[str, Tensor]]:
        forms = [form for forms_of in forms_by_name.values() for form in forms_of.values()]
        on_host = host_zeros(forms, device) if self.config.offload else None
        zeros = iter(on_host or [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in forms])
        return {name: {key: next(zeros) for key in forms_of} for name, forms_of in forms_by_name.items()}

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.config, self.step_count, self.total_steps)

    @torch.no_grad()
    def step(self, params: Tensors, grads: Tensors) -> float:
        """Update ``params`` in place (names and shapes as at construction). Return the learning rate used.

        With Muon: collective over the mesh's dp and tp: every rank of them must call, in program order.
        """
        lr = self.lr
        peak_head_lr = self.config.lr if self.config.head_lr is None else self.config.head_lr
        head_lr = learning_rate(replace(self.config, lr=peak_head_lr), self.step_count, self.total_steps)
        for (rule, is_head), sizes in self._groups.items():
            for names in buckets(sizes, rule.bucket):
                RECORDER.tick()
                device = params[names[0]].device
                stored = [self._states[name] for name in names]
                states = [{key: x.to(device, non_blocking=True) for key, x in state.items()} for state in stored]
                updated = {name: state.get("master", params[name]) for state, name in zip(states, names, strict=True)}
                summed = [grads[name].to(new.dtype) for name, new in updated.items()]
                rule.update(self.config, updated, summed, states, self.step_count - self.skipped, head_lr if is_head else lr)
                for name, new in updated.items():
                    if new is not params[name]:
                        params[name].copy_(new)
                for state, moved in zip(stored, states, strict=True):
                    for key, x in state.items():
                        if moved[key] is not x:
                            x.copy_(moved[key], non_blocking=True)
        if self.config.offload:
            wait()  # then the host may read its states
        self.step_count += 1
        return lr

    def skip(self) -> float:
        """Go on in the schedule and leave parameters and states as they are. Return the learning rate of the step that it skips."""
        lr = self.lr
        self.step_count += 1
        self.skipped += 1
        return lr

    @torch.no_grad()
    def refresh_masters(self, params: Tensors) -> None:
        """Copy the parameters into the master weights, after the parameters were overwritten."""
        for name, state in self._states.items():
            if "master" in state:
                state["master"].copy_(params[name])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return parameter name -> state name -> tensor of the shard's shape.

        The states are "exp_avg" and "exp_avg_sq", or "momentum_buffer"; and "master" for half-precision parameters. These are the
        tensors themselves; 8-bit states are copies on the host in float32. To load the optimizer, write into them, call
        :meth:`take_states` and set ``step_count`` and ``skipped``.
        """
        if self._eight_bit is None:
            return self._states
        return {name: self._eight_bit.to_float32(state) for name, state in self._states.items()}

    def take_states(self, states: Mapping[str, Tensors]) -> None:
        """Store what was written into :meth:`state_tensors`. In the layout that saved it, the bits are the same again."""
        if self._eight_bit is not None:
            for name, state in self._states.items():
                self._eight_bit.from_float32(states[name], state)
