"""AdamW with moments in 8 bits (Dettmers et al. 2021, arXiv 2110.02861): bitsandbytes' arithmetic over local shards.

A moment is a byte for each element, which names one of 256 numbers from -1 to 1, and a float32 scale for each block of 256 elements as
they lie in the local shard. So blocks depend on the layout, and numbers differ between layouts by what 8 bits round off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_spmd.models.quantized import bitsandbytes_functional
from rlhf_spmd.parallel.data_parallel import BUCKET_ELEMENTS

if TYPE_CHECKING:
    from rlhf_spmd.workers.optimizer import OptimConfig

Tensors = Mapping[str, Tensor]
States = Sequence[Tensors]
Kept = dict[str, tuple[Sequence[int], torch.dtype]]

BLOCK = 256
SCALE = ".scale"  # a moment's scales have its name and this
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class EightBit:
    """Needs bitsandbytes; ``OptimConfig.check`` has seen that it is there."""

    bucket = BUCKET_ELEMENTS

    def __init__(self) -> None:
        functional = bitsandbytes_functional()
        self._functional: Any = functional
        self._maps = {key: functional.create_dynamic_map(signed=signed) for key, signed in SIGNED.items()}

    def kept(self, shape: Sequence[int], dtype: torch.dtype) -> Kept:
        """What is kept of a parameter."""
        scales = (-(-math.prod(shape) // BLOCK),)
        return dict.fromkeys(SIGNED, (shape, torch.uint8)) | {key + SCALE: (scales, torch.float32) for key in SIGNED}

    def update(self, config: OptimConfig, params: Tensors, grads: list[Tensor], states: States, step: int, lr: float) -> None:
        """Parameters and states in place. The first ``step`` is 0."""
        for param, grad, state in zip(params.values(), grads, states, strict=True):
            assert param.is_contiguous(), "bitsandbytes reads memory as it lies"
            self._maps = {key: table.to(param.device) for key, table in self._maps.items()}
            flat = [grad.reshape(-1), param.view(-1), *(state[key].view(-1) for key in SIGNED)]
            maps, scales = self._maps.values(), [state[key + SCALE] for key in SIGNED]
            numbers = (*config.betas, 0.0, 0.0, config.eps, step + 1, lr)
            self._functional.optimizer_update_8bit_blockwise("adam", *flat, *numbers, *maps, *scales, config.weight_decay)

    def widen(self, state: Tensors) -> dict[str, Tensor]:
        """The state with its moments in float32, on the host; the rest as it is."""
        found = {key: x for key, x in state.items() if not key.endswith(SCALE)}
        for key in self._narrow(state):
            table = self._table(key, state[key].device)
            found[key] = self._functional.dequantize_blockwise(
                state[key], absmax=state[key + SCALE], code=table, blocksize=BLOCK
            ).cpu()
        return found

    def narrow(self, wide: Tensors, state: Tensors) -> None:
        """The inverse of :meth:`widen`, into ``state``, bit for bit of what that gave."""
        for key in self._narrow(state):
            values, table = wide[key].to(state[key].device).flatten(), self._table(key, state[key].device)
            blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
            scales = blocks.abs().amax(1)
            between = (table[1:] + table[:-1]) / 2  # the nearest: bitsandbytes' own search on CPUs misses some small ones
            codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo().tiny)[:, None], between)
            state[key].copy_(codes.view(-1)[: len(values)].view_as(state[key]))
            state[key + SCALE].copy_(scales)

    def _narrow(self, state: Tensors) -> list[str]:
        return [key for key in SIGNED if key + SCALE in state and state[key].numel()]

    def _table(self, key: str, device: torch.device) -> Tensor:
        """The numbers of a byte. The map lacks -1, for which its least stands, -0.99; as -1 a block's largest is again its scale."""
        table = self._maps[key].to(device, copy=True)
        if SIGNED[key]:
            table[0] = -1.0
        return table
