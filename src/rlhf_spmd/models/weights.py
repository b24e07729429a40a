"""Weights from and to Hugging Face directories: every rank reads only the boxes it holds. Only safetensors, never a pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.file_forms import file_forms, file_names, find_tensor, is_score_bias
from rlhf_spmd.models.lora import PREFIX, LoraConfig, check_peft_config, is_adapter
from rlhf_spmd.models.sharding import plan_whole_model, tensor_shapes
from rlhf_spmd.models.spec import ModelSpec, Names
from rlhf_spmd.models.stored import ADAPTER_CONFIG, StoredModel, read_eos_ids, read_json
from rlhf_spmd.parallel.boxes import Box, ParamShard
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.zero import local_part

__all__ = ["init_random", "load_pretrained", "random_tensor", "read_eos_ids", "write_random_model"]

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's
STORED_HEAD = PREFIX + Names.value_head  # beside a reward model's adapters
INIT_STD = 0.02  # transformers' default initializer_range


def load_pretrained(
    decoder: Decoder, path: str | Path, missing_head_ok: bool = False, shards: Mapping[str, ParamShard] | None = None
) -> None:
    """Fill a decoder from a Hugging Face directory; any float dtype on disk is converted to the parameters'.

    ``shards``: what of each parameter this rank holds, if ZeRO has cut the decoder's. The value head ``score.weight`` may be
    absent with ``missing_head_ok``: it then starts at zero.
    Raises ValueError naming the file and tensor for missing, unknown or misshapen tensors and for unreadable files.
    Each rank reads its own slices only; no communication.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        checkpoint = StoredModel(Path(path), decoder.spec, stack)
        checkpoint.check_names(file_names(decoder.spec, tensor_shapes(decoder.spec, "both")))
        for target, box in chain(_parameter_boxes(decoder, shards), _quantized_boxes(decoder)):
            tensor = find_tensor(checkpoint, box.name, box.shape, missing_head_ok)
            if tensor is None:
                target.zero_()
            else:
                target.copy_(tensor[box.global_slices])


def check_pretrained(spec: ModelSpec, path: str | Path, head: str, missing_head_ok: bool = False) -> None:
    """Check that :func:`load_pretrained` will find what it needs, in any layout: reads the files' headers, no weights.

    Raises ValueError as it does, for files cut short too.
    """
    with contextlib.ExitStack() as stack:
        checkpoint = StoredModel(Path(path), spec, stack)
        checkpoint.check_count()
        checkpoint.check_names(file_names(spec, tensor_shapes(spec, "both")))
        for name, shape in tensor_shapes(spec, head).items():
            find_tensor(checkpoint, name, shape, missing_head_ok)


def init_random(decoder: Decoder, seed: int, shards: Mapping[str, ParamShard] | None = None) -> None:
    """Draw random weights, the same global ones in every layout: each Hugging Face tensor from (seed, its name).

    ``shards`` as for :func:`load_pretrained`. One tensor at a time is whole.
    """
    with torch.no_grad():
        for target, box in chain(_parameter_boxes(decoder, shards), _quantized_boxes(decoder)):
            target.copy_(random_tensor(decoder.spec, box.name, box.shape, seed)[box.global_slices])


def init_adapters(decoder: Decoder, lora: LoraConfig, seed: int, shards: Mapping[str, ParamShard] | None = None) -> None:
    """Read the adapters from ``lora.path``, with the value head that may be there. Without a path draw A uniform within
    1 / sqrt(in), as PEFT does, from (seed, its name), and set B to zero.

    ``shards`` as for :func:`load_pretrained`.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        stored = {} if lora.path is None else _stored_adapter(decoder.spec, lora.path, stack)
        for target, box in _parameter_boxes(decoder, shards, adapters=True):
            if stored:
                target.copy_(stored[box.name][box.global_slices])
            elif box.name.endswith(".lora_B.weight"):
                target.zero_()
            else:
                bound = 1 / math.sqrt(box.shape[1])
                drawn = torch.empty(box.shape).uniform_(-bound, bound, generator=_generator(seed, box.name))
                target.copy_(drawn[box.global_slices])
        for target, box in _parameter_boxes(decoder, shards) if STORED_HEAD in stored else ():
            if box.name == Names.value_head:
                target.copy_(stored[STORED_HEAD][box.global_slices])


def keep_initial_adapter(decoder: Decoder, path: str) -> None:
    """Keep the adapter in ``path`` beside the trained one, for passes that must not have the trained one. No communication."""
    factors = stored_factors(decoder, path, {name: shard for name, shard in decoder.shards.items() if is_adapter(name)})
    for name, adapter in decoder.adapters.items():
        adapter.start = factors[name.removesuffix(".lora")]


def stored_factors(decoder: Decoder, path: str, shards: Mapping[str, ParamShard]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of an adapter by the names of the matrices that have one, such as ``layers.0.qkv``, as the decoder would have
    them. ``shards``: ``plan_params`` of the adapter's parameters. No communication."""
    factors: dict[str, Tensor] = {}
    device = next(decoder.parameters()).device
    with contextlib.ExitStack() as stack:
        stored = _stored_adapter(decoder.spec, path, stack)
        for name, shard in shards.items():
            factors[name] = torch.empty(shard.shape, dtype=decoder.dtype, device=device)
            for box in shard.boxes:
                factors[name][box.local_slices].copy_(stored[box.name][box.global_slices])
    names = [name.removesuffix(".lora.a") for name in factors if name.endswith(".lora.a")]
    return {name: (factors[f"{name}.lora.a"], factors[f"{name}.lora.b"]) for name in names}


def _stored_adapter(spec: ModelSpec, path: str, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Return safetensors' slice objects of PEFT's directory, by the names that boxes have."""
    file = stack.enter_context(safe_open(Path(path) / ADAPTER_FILE, framework="pt", device="cpu"))
    return {name.replace(spec.text_prefix, ""): file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def check_adapter(spec: ModelSpec, lora: LoraConfig, head: str, where: str) -> None:
    """Check that :func:`init_adapters` will find in ``lora.path`` what it needs; a head of values may be there. Raises ValueError."""
    assert lora.path is not None
    folder = Path(lora.path)
    plan = plan_whole_model(spec, "none", lora)
    expected = {box.name: box.shape for name, shard in plan.items() if is_adapter(name) for box in shard.boxes}
    try:
        with safe_open(folder / ADAPTER_FILE, framework="pt", device="cpu") as stored:
            shapes = {name.replace(spec.text_prefix, ""): tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where}.path={lora.path}: {ADAPTER_FILE} cannot be read: {error}") from error
    config = read_json(folder / ADAPTER_CONFIG)
    if head == "value" and STORED_HEAD in shapes:
        expected[STORED_HEAD] = (1, spec.hidden_size)
    differing = min((name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)), default=None)
    if differing is not None:
        raise ValueError(
            f"{where}.path={lora.path}: tensor {differing} there is {shapes.get(differing)}, by {where}.rank={lora.rank} and "
            f"target_modules={lora.target_modules} it is {expected.get(differing)}; they must be the adapter's, whose "
            f"{ADAPTER_CONFIG} has target_modules={config.get('target_modules')}"
        )
    check_peft_config(config, lora, str(folder / ADAPTER_CONFIG), where)


def _parameter_boxes(
    decoder: Decoder, shards: Mapping[str, ParamShard] | None, adapters: bool = False
) -> Iterator[tuple[Tensor, Box]]:
    """Yield the part of a local parameter that each box fills, and the box: of the model's weights, or of its adapters."""
    for name, parameter in decoder.named_parameters():
        for box in (shards or decoder.shards)[name].boxes if is_adapter(name) == adapters else ():
            RECORDER.tick()  # a large model takes longer than ranks may stand still
            yield local_part(parameter)[box.local_slices], box


def _quantized_boxes(decoder: Decoder) -> Iterator[tuple[Tensor, Box]]:
    """Yield the parts of quantized matrices, which ZeRO does not cut. All must be filled: a matrix is set after its last part."""
    for name, matrix in decoder.quantized.items():
        RECORDER.tick()
        values = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.codes.device)
        for box in decoder.shards[name].boxes:
            yield values[box.local_slices], box
        matrix.set(values)


def random_tensor(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial fp32 value of a tensor: norms multiply by 1, biases 0, matrices normal with ``initializer_range`` (0.02),
    biases of routers' scores 0."""
    if is_score_bias(spec, name):
        return torch.zeros(shape)
    if name.endswith(".A_log"):  # decays of transformers' range; all equal would let no head remember longer than others
        return torch.empty(shape).uniform_(0.01, 16, generator=_generator(seed, name)).log_()
    if len(shape) == 1:
        unit_offset = spec.norm_unit_offset and not name.endswith((".dt_bias", "linear_attn.norm.weight"))
        return torch.zeros(shape) if name.endswith((".bias", ".sinks")) or unit_offset else torch.ones(shape)
    std = float(spec.hf_config.get("initializer_range", INIT_STD))
    assert math.isfinite(std), f"initializer_range={std}"
    return torch.randn(shape, generator=_generator(seed, name)).mul_(std)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def write_random_model(path: str | Path, config: Mapping[str, Any], seed: int) -> ModelSpec:
    """Write a Hugging Face directory with random weights (those of :func:`init_random`), for tests and first runs.

    ``config`` is the contents of its config.json, from which transformers builds the same model; an architecture named
    ``...ForSequenceClassification`` gets a value head instead of the language-model head. Returns the spec.
    """
    path = Path(path)
    spec = spec_from_config(config, "config")
    path.mkdir(parents=True, exist_ok=True)
    classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())
    shapes = tensor_shapes(spec, "value" if classifier else "lm")
    drawn = {name: random_tensor(spec, name, shape, seed) for name, shape in shapes.items()}
    tensors = {form.name: form.build([drawn[part] for part in form.parts]) for form in file_forms(spec, shapes)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    return spec
