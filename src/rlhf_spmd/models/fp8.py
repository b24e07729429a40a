"""Matrices that are published in FP8 (e4m3), read as bf16: elements times the scale of their block, in fp32, rounded once.

So DeepSeek's ``fp8_cast_bf16.py`` has it. The scales of a tensor X are ``X_scale_inv``: one of each 128 x 128 elements, where the last
blocks may be smaller (DeepSeek-V3, Qwen3), or a single one (Ministral 3). Scales of activations, which such a model may have too, are
not read: products are in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.models.keys import reject_unless

E4M3, BLOCK = "F8_E4M3", 128
SCALES, ACTIVATIONS = "_scale_inv", ".activation_scale"


def check_fp8(config: Mapping[str, Any], source: str) -> None:
    """Raises ValueError if ``quantization_config`` is there and says something other than FP8 as it is read here."""
    if config.get("quantization_config") is None:
        return
    found, where = config["quantization_config"], f"{source}: quantization_config"
    if not isinstance(found, Mapping):
        raise ValueError(f"{source}: 'quantization_config' is {found!r}; it must be an object")
    reject_unless({"quant_method": "none", **found}, where, "quant_method", "fp8")
    reject_unless(found, where, "fmt", "e4m3")
    reject_unless(found, where, "weight_block_size", [BLOCK, BLOCK])


def scaled_tensor(name: str) -> str:
    """The tensor that scales called ``name`` belong to; ``name`` itself where it does not name scales."""
    return name.replace(ACTIVATIONS, ".weight").removesuffix(SCALES)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of the scales of a tensor's blocks."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


class ScaledSlice:
    """In place of safetensors' slice object, for a tensor in FP8: reads the elements that are asked for, and all scales."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self._codes, self._scales = codes, scales

    def __getitem__(self, places: Any) -> Tensor:
        """bf16 of the shape that the tensor has at ``places``: slices, or numbers in front of the last two dims."""
        at: list[Any] = [*places] if isinstance(places, tuple) else [places]
        shape, values = self._codes.get_shape(), self._codes[tuple(at)].float()
        if not self._scales.get_shape():
            return _product(values, self._scales[...])
        *outer, rows, columns = at + [slice(None)] * (len(shape) - len(at))
        scales = self._scales[(*outer, slice(None), slice(None))]
        row, column = (torch.arange(size)[part] // BLOCK for size, part in zip(shape[-2:], (rows, columns), strict=True))
        return _product(values, scales[..., row, :][..., column])


def _product(values: Tensor, scales: Tensor) -> Tensor:
    return values.mul_(scales.float()).bfloat16()
