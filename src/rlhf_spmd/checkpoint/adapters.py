"""Low-rank adapters in a checkpoint: written as a PEFT directory, or added to the weights beside which they were trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.files import Spec, write_safetensors
from rlhf_spmd.checkpoint.load import read_whole
from rlhf_spmd.checkpoint.manifest import DTYPES, PARAM, StoredBox
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.kernels import choose_ops
from rlhf_spmd.models.adapters import merge
from rlhf_spmd.models.file_forms import find_tensor
from rlhf_spmd.models.lora import ALL_LINEAR, PREFIX, AdapterPart, LoraConfig, adapter_tensor
from rlhf_spmd.models.quantized import quantized_tensors, rounded
from rlhf_spmd.models.sharding import tensor_shapes
from rlhf_spmd.models.spec import ModelSpec, Names
from rlhf_spmd.models.stored import ADAPTER_CONFIG, StoredModel, read_spec
from rlhf_spmd.models.weights import ADAPTER_FILE
from rlhf_spmd.parallel.boxes import Box, whole_shard

STATE = "lora"  # key in a checkpoint's state: role -> settings of its adapters


class SavedAdapters:
    """A role's adapters. ``pieces``: name of a trained tensor -> its stored boxes. ``dtype``: the dtype of all these tensors."""

    def __init__(self, directory: Path, pieces: dict[str, list[StoredBox]], settings: dict[str, Any]) -> None:
        self._directory = directory
        self.pieces = pieces
        self.lora = LoraConfig(**settings)
        self.dtype = DTYPES[next(iter(pieces.values()))[0].dtype]

    def read(self, name: str) -> Tensor:
        """Return a trained tensor. Raises CheckpointError."""
        pieces = self.pieces[name]
        return read_whole(self._directory, pieces, Spec(name, self.dtype, pieces[0].shape))

    def add(self, box: Box, stored: Any, device: torch.device, quantized: Collection[str]) -> Tensor:
        """Return a box of a model's tensor with its adapter added, if it has one, in ``dtype`` on ``device``.

        ``stored``: safetensors' slice object of the tensor. ``quantized``: tensors that were in ``lora.bits`` bits during training.
        """
        names = [adapter_tensor(box.name, which) for which in "AB"]
        if box.name in quantized and self.lora.bits is not None:  # rounding needs whole rows
            rows, columns = box.global_slices
            values = rounded(stored[rows, :].to(device, self.dtype), self.lora.bits)[:, columns]
        else:
            values = stored[box.global_slices].to(device, self.dtype)
        if names[0] not in self.pieces:
            return values
        rows, columns = box.global_slices
        a, b = self.read(names[0])[:, columns].to(device), self.read(names[1])[rows].to(device)
        parts = [AdapterPart(slice(0, len(a)), slice(0, len(b)), slice(0, len(b)))]
        return merge(choose_ops(self.dtype, values.device), values, a, b, parts, self.lora.scale)

    @torch.no_grad()
    def add_to(self, spec: ModelSpec, state: RoleState, source: Path) -> None:
        """Add the adapters to the weights of the model in ``source``, in any layout. Sums are rounded once."""
        with ExitStack() as stack:
            stored = StoredModel(source, spec, stack)
            quantized = quantized_tensors(spec, self.lora)
            for name, parameter in state.tensors.items():
                for box in state.shards[name].boxes:
                    if adapter_tensor(box.name, "A") in self.pieces or box.name in quantized:
                        values = find_tensor(stored, box.name, box.shape, False)
                        parameter[box.local_slices].copy_(self.add(box, values, parameter.device, quantized))

    def merged(self, source: Path, stack: ExitStack) -> tuple[list[Spec], Callable[[Spec], Tensor]]:
        """Return the tensors of the model in ``source`` with the adapters added, and how to read each."""
        spec = read_spec(source)
        stored = StoredModel(source, spec, stack)
        quantized = quantized_tensors(spec, self.lora)
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # a process that trains on a GPU merges there

        def get(tensor: Spec) -> Tensor:
            if tensor.key in self.pieces:
                return self.read(tensor.key)
            (box,) = whole_shard(tensor.key, tensor.shape).boxes
            return self.add(box, find_tensor(stored, tensor.key, tensor.shape, False), device, quantized).cpu()

        shapes = tensor_shapes(spec, "value" if Names.value_head in self.pieces else "lm")
        return [Spec(name, self.dtype, shape) for name, shape in sorted(shapes.items())], get

    def write(self, out: Path, source: Path) -> None:
        """Write a directory that ``peft.PeftModel.from_pretrained`` loads beside the model in ``source``."""
        adapters = [name for name in self.pieces if name.startswith(PREFIX)]
        prefix = read_spec(source).text_prefix
        heads = [name for name in self.pieces if name == Names.value_head]
        stored = {name.replace(".layers.", f".{prefix}layers."): name for name in adapters}
        stored |= {PREFIX + name: name for name in heads}
        targets = self.lora.target_modules
        modules = sorted({name.split(".")[-3] for name in adapters}) if targets == ALL_LINEAR else list(targets)
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
            "base_model_name_or_path": str(source.absolute()),
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "use_rslora": self.lora.use_rslora,
            # a vision tower has matrices of the same names
            "target_modules": rf".*\.{re.escape(prefix)}.*\b({'|'.join(map(re.escape, modules))})" if prefix else modules,
            "modules_to_save": [name.partition(".")[0] for name in heads] or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        out.mkdir()
        (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        specs = [Spec(key, self.dtype, self.pieces[name][0].shape) for key, name in sorted(stored.items())]
        write_safetensors(out / ADAPTER_FILE, specs, lambda spec: self.read(stored[spec.key]))


def find_adapters(directory: Path, role: str) -> SavedAdapters | None:
    """Return the adapters of a role; None if its weights themselves were trained.

    Raises CheckpointError, and ValueError if a package that they need is missing.
    """
    manifest = read_manifest(directory)
    settings = manifest.state.get(STATE, {}).get(role)
    if settings is None:
        return None
    adapters = SavedAdapters(directory, manifest.pieces_of(role, PARAM), settings)
    adapters.lora.check(f"{directory}: the {role}'s lora")
    return adapters
