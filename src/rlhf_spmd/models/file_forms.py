"""Tensors whose form in a model's files differs from the decoder's, which plans and checkpoints have.

- The bias of a router's scores: files have the sums of its terms, in fp32.
- Experts with ``files_are_transposed``: files have the matrices of all experts in one tensor [E, in, out], in which gate and up take
  turns, and biases alike. As gpt-oss is published, the matrices are MXFP4 (OCP Microscaling Formats 1.0): ``_blocks`` uint8
  [E, out, in / 32, 16] of two numbers each, the one in the lower bits first, and ``_scales`` uint8 [E, out, in / 32], exponents of
  two above -127. bf16 holds the products exactly.
- Experts with ``files_are_stacked`` (Qwen3.5 on the hub): files have the matrices of all experts in one tensor [E, out, in], gates
  above the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels.routing import split_to_bf16_terms, sum_terms
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import StoredModel

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(?P<all>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>gate|up|down)_proj\.(?P<kind>weight|bias)$")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of E2M1 by code; then the same with a minus


class FileForm(NamedTuple):
    """One tensor of the files: ``build`` returns it from the model's tensors ``parts``. ``dtype`` None: that of the others."""

    name: str
    shape: Shape
    parts: tuple[str, ...]
    build: Callable[[list[Tensor]], Tensor]
    dtype: torch.dtype | None = None


def file_forms(spec: ModelSpec, shapes: Mapping[str, Shape]) -> list[FileForm]:
    """Return the tensors of the files, from those of the model with their ``shapes``."""
    forms = []
    fused: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if spec.experts is not None and spec.experts.files_are_transposed and (joined_name := _joined_name(name)):
            fused.setdefault(joined_name, []).append(name)
        elif is_score_bias(spec, name):
            forms.append(FileForm(name, shape[:1], (name,), lambda tensors: sum_terms(tensors[0]), torch.float32))
        else:
            forms.append(FileForm(name, shape, (name,), lambda tensors: tensors[0]))
    for joined_name, parts in fused.items():
        parts.sort(key=_expert_of)
        build = partial(_fuse, "gate_up" in joined_name)
        forms.append(FileForm(joined_name, _fused_shape(spec, joined_name), tuple(parts), build))
    return forms


def file_names(spec: ModelSpec, shapes: Mapping[str, Shape]) -> set[str]:
    """Return the names that tensors of the model may have in its files."""
    names = {form.name for form in file_forms(spec, shapes)}
    if spec.experts is not None and spec.experts.files_are_stacked:
        names |= {joined_name for name in names if (joined_name := _joined_name(name))}
    if spec.experts is not None and spec.experts.files_are_transposed:
        names |= {f"{name}_{part}" for name in names if name.endswith("_proj") for part in ("blocks", "scales")}
    return names


def find_tensor(stored: StoredModel, name: str, shape: Shape, missing_head_ok: bool) -> Any:
    """Return a tensor of the model from its files: safetensors' slice object, or a whole tensor where its form is another; None for a
    value head that may be absent and is. Raises ValueError."""
    spec = stored.spec
    if is_score_bias(spec, name):
        return split_to_bf16_terms(stored.find(name, shape[:1], False)[:])
    joined_name = _joined_name(name) if spec.experts is not None else ""
    if joined_name and spec.experts is not None and spec.experts.files_are_stacked and joined_name in stored.file_names:
        number, matrix = _expert_of(name)
        rows = shape[0] * (1 if matrix == "down" else 2)
        gate_up = stored.find(joined_name, (spec.experts.num_experts, rows, shape[1]), False)[number]
        return gate_up[shape[0] :] if matrix == "up" else gate_up[: shape[0]]
    if joined_name and spec.experts is not None and spec.experts.files_are_transposed:
        return _slice_expert(stored, joined_name, *_expert_of(name))
    return stored.find(name, shape, missing_head_ok)


def is_score_bias(spec: ModelSpec, name: str) -> bool:
    """Return True for the bias of a router's scores. A file has it in fp32, a decoder has the terms of
    :func:`~rlhf_spmd.kernels.routing.split_to_bf16_terms`."""
    score_biased = spec.experts is not None and spec.experts.score_biased
    return score_biased and name.endswith(spec.names.score_bias.rpartition(".")[2])


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 values [..., groups * 32] of MXFP4 ``blocks`` [..., groups, 16] and ``scales`` [..., groups], both uint8."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    values = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2).bfloat16()


def _joined_name(name: str) -> str:
    """Return the tensor that files of joined experts have in place of an expert's; empty for other tensors."""
    match = _EXPERT.match(name)
    if match is None:
        return ""
    matrix = "down_proj" if match["matrix"] == "down" else "gate_up_proj"
    return f"{match['all']}.{matrix}{'_bias' if match['kind'] == 'bias' else ''}"


def _expert_of(name: str) -> tuple[int, str]:
    """Return the number of the expert of a tensor, and which of its matrices it belongs to. In the order of the fused tensor."""
    match = _EXPERT.match(name)
    assert match is not None, f"{name} is no tensor of an expert"
    return int(match["number"]), match["matrix"]


def _fused_shape(spec: ModelSpec, joined_name: str) -> Shape:
    assert spec.experts is not None
    width = spec.experts.intermediate_size
    rows, columns = (spec.hidden_size, 2 * width) if "gate_up" in joined_name else (width, spec.hidden_size)
    return (spec.experts.num_experts, columns) if joined_name.endswith("_bias") else (spec.experts.num_experts, rows, columns)


def _fuse(interleaved: bool, tensors: list[Tensor]) -> Tensor:
    """Return the weights [out, in] or biases [out] of all experts as one tensor [E, in, out] or [E, out]. ``interleaved``: gate and
    up take turns."""
    transposed = [tensor.t() if tensor.ndim == 2 else tensor for tensor in tensors]
    if not interleaved:
        return torch.stack(transposed)
    pairs = zip(transposed[::2], transposed[1::2], strict=True)
    return torch.stack([torch.stack(pair, -1).flatten(-2) for pair in pairs])


def _slice_expert(stored: StoredModel, fused: str, number: int, matrix: str) -> Tensor:
    """Return the weight [out, in] or the bias [out] of one expert."""
    count, *inner = _fused_shape(stored.spec, fused)
    columns = slice(None) if matrix == "down" else slice(int(matrix == "up"), None, 2)
    if f"{fused}_blocks" in stored.file_names:
        shape = count, inner[1], inner[0] // 32
        blocks = stored.slices(f"{fused}_blocks", (*shape, 16), "config.json implies", ("U8",))
        scales = stored.slices(f"{fused}_scales", shape, "config.json implies", ("U8",))
        return dequantize(blocks[number][columns], scales[number][columns])
    tensor: Tensor = stored.find(fused, (count, *inner), False)[number]
    return tensor[..., columns].t() if tensor.ndim == 2 else tensor[columns]
