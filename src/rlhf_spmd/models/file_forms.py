"""Tensors whose form in a model's files is not that of the decoder, which the boxes of plans and checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels.routing import as_parts, from_parts
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import StoredModel

Shape = tuple[int, ...]


class FileForm(NamedTuple):
    """One tensor of the files: ``join`` makes it of the model's tensors ``parts``. ``dtype`` None: that of the others."""

    name: str
    shape: Shape
    parts: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]
    dtype: torch.dtype | None = None


def file_forms(spec: ModelSpec, shapes: Mapping[str, Shape]) -> list[FileForm]:
    """The tensors of the files, from those of the model with their ``shapes``."""
    forms = []
    for name, shape in shapes.items():
        if is_correction(spec, name):
            forms.append(FileForm(name, shape[:1], (name,), lambda tensors: from_parts(tensors[0]), torch.float32))
        else:
            forms.append(FileForm(name, shape, (name,), lambda tensors: tensors[0]))
    return forms


def find_tensor(stored: StoredModel, spec: ModelSpec, name: str, shape: Shape, missing_head_ok: bool) -> Any:
    """A tensor of the model from its files: safetensors' slice object, or a whole tensor where its form is another; None for a value
    head that may be absent and is. Raises ValueError."""
    if is_correction(spec, name):
        return as_parts(stored.find(spec, name, shape[:1], False)[:])
    return stored.find(spec, name, shape, missing_head_ok)


def is_correction(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor is the correction of a router, of which the files have the sums in fp32 (``kernels.routing.as_parts``)."""
    corrected = spec.experts is not None and spec.experts.corrected
    return corrected and name.endswith(spec.names.correction.rpartition(".")[2])
