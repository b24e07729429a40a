"""Safetensors files, written one tensor at a time and hashed on the way, so that a whole model is never in memory.

The format: 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data.
``safetensors.torch.save_file`` writes the same files, but takes all tensors at once and does not sync them to disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rlhf_spmd.checkpoint.manifest import DTYPE_NAMES
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.telemetry.run_dir import writing

_CHUNK = 16 << 20  # bytes that are hashed and written at a time; they stay in the cache between the two


@dataclass(frozen=True)
class Spec:
    """A tensor to write: key, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def hash_tensor(tensor: Tensor, file: BinaryIO | None = None) -> str:
    """Return the sha256 of a contiguous CPU tensor's bytes. Also writes them to ``file``, if given."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "only contiguous CPU tensors have raw bytes"
    digest = hashlib.sha256()
    for chunk in tensor.detach().reshape(-1).view(torch.uint8).split(_CHUNK):
        RECORDER.tick()  # a large model takes longer than ranks may be silent
        # a copy: after Tensor.numpy() a storage can never be resized again, which resharding does to FSDP's shards
        data: Any = chunk.clone().numpy()
        digest.update(data)
        if file is not None:
            file.write(data)
    return digest.hexdigest()


def write_safetensors(path: Path, specs: Sequence[Spec], get: Callable[[Spec], Tensor]) -> list[str]:
    """Write ``get(spec)`` for every spec, one after the other, and sync the file to disk. Return the sha256 of each tensor's bytes.

    Raises WriteError with the file's name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        header[spec.key] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hashes = []
    with writing(path), open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            tensor = get(spec).detach().to("cpu").contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{spec} announced, {tensor.shape} came"
            hashes.append(hash_tensor(tensor, file))
        file.flush()
        os.fsync(file.fileno())
    return hashes
