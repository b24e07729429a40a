"""A Hugging Face directory: its architecture, and which file each tensor lies in. Only safetensors, never a pickle.

Matrices that are published in FP8 (e4m3) are read as bf16: elements times the scale of their block, in fp32, rounded once, as
DeepSeek's ``fp8_cast_bf16.py`` does it. The scales of a tensor X are ``X_scale_inv``: one of each 128 x 128 elements, where the last
blocks may be smaller (DeepSeek-V3, Qwen3), or a single one (Ministral 3). Scales of activations, which such a model may have too, are
not read: products are in the model's own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.keys import FP8_BLOCK
from rlhf_spmd.models.spec import ModelSpec, end_ids
from rlhf_spmd.parallel.collectives import RECORDER

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
E4M3 = "F8_E4M3"
SCALES = "_scale_inv"  # what the names of scales end with
ACTIVATIONS = ".activation_scale"
COMPARED_ROWS = 4096  # rows of two matrices that are compared at a time
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # a buffer that old exports contain
_VISION = re.compile(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\.")
_untied: dict[tuple[Any, ...], bool] = {}  # by path and files of a directory: the head is not the embedding


def read_spec(path: str | Path) -> ModelSpec:
    """Return the architecture of a Hugging Face directory, whose weights need not be there. ``tie_word_embeddings`` is false where
    an output matrix lies there that differs from the embedding, as transformers has it.

    Raises ValueError naming the file, the key and the value.
    """
    source = Path(path) / "config.json"
    spec = spec_from_config(read_json(source), str(source), read_eos_ids(path))
    if not spec.tie_word_embeddings or not any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX)):
        return spec
    files = sorted(Path(path).glob("*.safetensors"))
    stamps = (str(path), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))
    if stamps not in _untied:  # several roles have the same model, whose matrices are large
        with ExitStack() as stack:
            _untied[stamps] = StoredModel(Path(path), spec, stack).has_own_head()
    return replace(spec, tie_word_embeddings=False) if _untied[stamps] else spec


def read_eos_ids(path: str | Path) -> tuple[int, ...]:
    """Return the end-of-sequence token ids: generation_config.json if it names any, else config.json; () where neither does.

    Raises ValueError naming the file and the value.
    """
    for name in ("generation_config.json", "config.json"):
        source = Path(path) / name
        if source.is_file():
            ids = end_ids(read_json(source).get("eos_token_id"), str(source))
            if ids is not None:
                return ids
    return ()


class StoredModel:
    """The tensors of a directory, opened when first needed.

    - files: the file of each tensor, by its name there
    - file_names: the name there of each tensor of the language model, by its name in the model
    """

    def __init__(self, path: Path, spec: ModelSpec, stack: ExitStack) -> None:
        self.path = path
        self.spec = spec
        self._stack = stack
        if (path / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{path}: {ADAPTER_CONFIG} lies beside the model, which transformers would load with that adapter; give each a "
                "directory, and the adapter's as lora.path"
            )
        self._open: dict[str, Any] = {}
        index = path / INDEX
        if (path / WEIGHTS).is_file():
            self.source = path / WEIGHTS
            self.files = dict.fromkeys(self._file(WEIGHTS).keys(), WEIGHTS)
        elif index.is_file():
            self.source = index
            self.files = _read_index(index)
        else:
            pickles = ", ".join(sorted(p.name for p in path.glob("*.bin"))[:2])
            hint = f" ({pickles} cannot be used: pickles are never read; convert them)" if pickles else ""
            raise ValueError(f"{path}: neither {WEIGHTS} nor {INDEX} is there{hint}")
        num_extra_layers = int(spec.hf_config.get("num_nextn_predict_layers") or 0)  # which predict several tokens at once
        extra = tuple(f"model.layers.{spec.num_hidden_layers + i}." for i in range(num_extra_layers))
        extra = extra if spec.delta_rule is None else (*extra, "mtp.")
        names = (name for name in self.files if not (spec.text_prefix and _VISION.match(name)))
        self.file_names = {name.replace(spec.text_prefix, ""): name for name in names if not name.startswith(extra)}

    def check_count(self) -> None:
        """Raise ValueError where there cannot be all layers and experts of the model: at once, without a list of their names."""
        spec, mixture = self.spec, self.spec.experts
        experts = 0
        if mixture is not None and not (mixture.files_are_transposed or mixture.files_are_stacked):
            experts = mixture.num_experts * (spec.num_hidden_layers - len(mixture.dense_layers))
        if len(self.file_names) < max(spec.num_hidden_layers, experts):
            expected = f"num_hidden_layers={spec.num_hidden_layers}" + (f" with {experts} experts" if experts else "")
            raise ValueError(
                f"{self.source}: {len(self.file_names)} tensors are too few for the model of config.json, {expected}"
            )

    def check_names(self, expected: Collection[str]) -> None:
        """Raise ValueError for a tensor whose name is neither ``expected`` nor a head's."""
        heads = self.spec.names.lm_head, self.spec.names.value_head
        tensors = {name: scaled_tensor(name) for name in self.file_names}
        candidates = {name for name, tensor in tensors.items() if tensor not in expected and tensor not in heads}
        unknown = sorted(name for name in candidates if not _IGNORED.search(name))
        if unknown:
            raise ValueError(
                f"{self.source}: {len(unknown)} tensors that a {self.spec.family} model does not have, such as '{unknown[0]}'"
            )

    def has_own_head(self) -> bool:
        """Return True if an output matrix lies here beside the embedding and differs from it; False where a file of theirs is missing.

        Raises ValueError for a file that cannot be read.
        """
        names = [self.file_names[name] for name in (self.spec.names.embed, self.spec.names.lm_head) if name in self.file_names]
        if len(names) < 2 or not all((self.path / self.files[name]).is_file() for name in names):
            return False
        embed, head = (self._file(self.files[name]).get_slice(name) for name in names)
        shape = embed.get_shape()
        if shape != head.get_shape() or len(shape) != 2:
            return shape != head.get_shape()
        for row in range(0, shape[0], COMPARED_ROWS):
            RECORDER.tick()  # ranks may not stand still for as long as a large model takes
            if not torch.equal(*(each[row : row + COMPARED_ROWS].float() for each in (embed, head))):
                return True
        return False

    def find(self, name: str, shape: tuple[int, ...], missing_head_ok: bool) -> Any:
        """Return safetensors' slice object of a tensor of the model; None for a value head that may be absent and is."""
        stored = name
        if name == self.spec.names.embed and self.spec.tie_word_embeddings and name not in self.file_names:
            stored = self.spec.names.lm_head  # the one matrix of a tied model is saved under either name
        if stored in self.file_names:
            why = "a reward model or critic has one label," if name == self.spec.names.value_head else "config.json implies"
            return self.slices(stored, shape, why)
        if name in (self.spec.names.value_head, self.spec.names.second_head) and missing_head_ok:
            return None
        hint = "; a reward model needs a value head of one label" if name == self.spec.names.value_head else ""
        raise ValueError(f"{self.source}: tensor '{name}' is missing{hint}")

    def slices(self, name: str, shape: tuple[int, ...], why: str, dtypes: Collection[str] = FLOATS) -> Any:
        """Return safetensors' slice object of a tensor, or one like it that reads FP8, after checking its shape and dtype. ``why``:
        the reason for that shape, for the message."""
        tensor, source = self._slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{source}: tensor '{name}' has shape {list(tensor.get_shape())}, but {why} {list(shape)}")
        scales = f"{name}{SCALES}"
        if tensor.get_dtype() == E4M3 and dtypes is FLOATS:
            blocks = scales_shape(shape) if self._slice(scales)[0].get_shape() else ()
            return ScaledSlice(tensor, self.slices(scales, blocks, f"blocks of {FP8_BLOCK} x {FP8_BLOCK} have"))
        allowed = (E4M3,) if scales in self.file_names else dtypes
        if tensor.get_dtype() not in allowed:
            raise ValueError(f"{source}: tensor '{name}' has dtype {tensor.get_dtype()}; allowed: {', '.join(allowed)}")
        return tensor

    def _slice(self, name: str) -> tuple[Any, Path]:
        """Return a tensor as it lies in its file, and the file."""
        if name not in self.file_names:
            raise ValueError(f"{self.source}: tensor '{name}' is missing")
        stored = self.file_names[name]
        source = self.path / self.files[stored]
        try:
            return self._file(self.files[stored]).get_slice(stored), source
        except SafetensorError as error:
            raise ValueError(f"{source}: tensor '{name}' cannot be read: {error}") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(safe_open(self.path / name, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / name}: cannot be read as safetensors: {error}") from error
        return self._open[name]


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: 'weight_map' is missing; it must map tensor names to files")
    for tensor, file in weight_map.items():
        # a file of the same directory, never a path out of it
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index}: tensor '{tensor}' lies in {file!r}, which is not the name of a .safetensors file here")
    return weight_map


def read_json(source: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model directory. Raises ValueError naming the file."""
    if not source.is_file():
        raise ValueError(f"{source}: no such file; a Hugging Face model directory must contain {source.name}")
    try:
        value = parse_json(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    return value


def scaled_tensor(name: str) -> str:
    """Return the tensor that scales called ``name`` belong to; ``name`` itself where it does not name scales."""
    return name.replace(ACTIVATIONS, ".weight").removesuffix(SCALES)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of ``shape``."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


class ScaledSlice:
    """A slice object like safetensors', for a tensor in FP8: it reads the elements that an index names, and all scales."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self._codes = codes
        self._scales = scales

    def __getitem__(self, places: Any) -> Tensor:
        """Return the bf16 elements at ``places``: slices, or numbers in front of the last two dims."""
        index: list[Any] = [*places] if isinstance(places, tuple) else [places]
        shape = self._codes.get_shape()
        values = self._codes[tuple(index)].float()
        if not self._scales.get_shape():
            return _product(values, self._scales[...])
        *outer, rows, columns = index + [slice(None)] * (len(shape) - len(index))
        scales = self._scales[(*outer, slice(None), slice(None))]
        row, column = (torch.arange(size)[part] // FP8_BLOCK for size, part in zip(shape[-2:], (rows, columns), strict=True))
        return _product(values, scales[..., row, :][..., column])


def _product(values: Tensor, scales: Tensor) -> Tensor:
    return values.mul_(scales.float()).bfloat16()
