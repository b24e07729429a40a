"""Matrices that are not trained, in 4 or 8 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): bitsandbytes' arithmetic.

An element is one of 16 numbers (NF4) or of 256 times a fp32 scale, the largest of its block: 64 elements along a row. Rows are whole
blocks on every rank, so each layout has the same blocks, and numbers do not depend on it. Nor do they on the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard

BLOCK = 64
CHUNK_BLOCKS = 1 << 14  # blocks that are rounded at a time


class Quantized(nn.Module):
    """A matrix [out_local, in_local], not initialised. ``dtype``: the dtype of its values."""

    def __init__(self, shape: tuple[int, ...], bits: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.bits = bits
        self.dtype = dtype
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", torch.empty(math.prod(shape) * bits // 8, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(math.prod(shape) // BLOCK, device=device))

    def set(self, values: Tensor) -> None:
        """Set each element to the nearest number that ``bits`` allow. ``values``: [out_local, in_local] in ``dtype``."""
        codes, scales = _narrow(values, self.bits)
        self.codes.copy_(codes.view(-1))
        self.scales.copy_(scales)

    def values(self) -> Tensor:
        """Return a new tensor [out_local, in_local] with the matrix in ``dtype``."""
        return _widen(self.codes, self.scales, self.bits, self.shape, self.dtype)


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return ``values`` [n, a multiple of 64] as a :class:`Quantized` rounds them."""
    codes, scales = _narrow(values.contiguous(), bits)
    return _widen(codes.view(-1), scales, bits, values.shape, values.dtype)


def _narrow(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    if bits == 4:
        codes, state = bitsandbytes_functional().quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
        return codes, state.absmax
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1).float()
    table = _table(values.device)
    midpoints = (table[1:] + table[:-1]) / 2
    parts = zip(blocks.split(CHUNK_BLOCKS), scales.clamp(min=torch.finfo().tiny).split(CHUNK_BLOCKS), strict=True)
    # the nearest on every device: bitsandbytes' own search on CPUs misses some
    return torch.cat([torch.bucketize(part / scale[:, None], midpoints).byte() for part, scale in parts]), scales


def _widen(codes: Tensor, scales: Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    functional = bitsandbytes_functional()
    kind = {"blocksize": BLOCK, "shape": torch.Size(shape), "dtype": dtype}
    if bits == 4:
        state = functional.QuantState(scales, quant_type="nf4", **kind)
        values: Tensor = functional.dequantize_4bit(codes.view(-1, 1), state)
    else:
        state = functional.QuantState(scales, code=_table(codes.device), **kind)
        values = functional.dequantize_blockwise(codes.view(*shape), state)
    return values


@cache
def bitsandbytes_functional() -> Any:
    """Return the module ``bitsandbytes.functional``. It is imported only where it is used: that takes a second."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of a product of its own that it cannot have
    from bitsandbytes import functional

    logger.setLevel(level)
    return functional


@cache
def _table(device: torch.device) -> Tensor:
    """Return the numbers that a byte stands for."""
    table: Tensor = bitsandbytes_functional().create_dynamic_map().to(device)
    return table


def _matrices(spec: ModelSpec, lora: LoraConfig, tp: int) -> list[ParamShard]:
    """Return a rank's matrices that lie in ``lora.bits``."""
    plan = plan_params(spec, "none", 0, 1, 0, tp, lora=lora) if lora.bits is not None else {}
    return [plan[f"{name.removesuffix('.lora.a')}.weight"] for name in plan if name.endswith(".lora.a")]


def quantized_tensors(spec: ModelSpec, lora: LoraConfig) -> frozenset[str]:
    """Return the tensors of the model that lie in ``lora.bits``: those that have adapters, and what is fused with them (k_proj
    beside q_proj)."""
    return frozenset(box.name for matrix in _matrices(spec, lora, 1) for box in matrix.boxes)


def check_quantized(spec: ModelSpec, lora: LoraConfig, tp: int, key: str) -> None:
    """Raise ValueError if rows are not whole blocks on ranks of this ``tp``."""
    for matrix in _matrices(spec, lora, tp):
        if matrix.shape[1] % BLOCK:
            tensor = matrix.boxes[0].name.removesuffix(".weight")
            raise ValueError(
                f"{key}.bits={lora.bits}: with tp={tp} a rank would have {matrix.shape[1]} columns of {tensor}, which must be a "
                f"multiple of {BLOCK}; choose another tp, or leave bits out"
            )
