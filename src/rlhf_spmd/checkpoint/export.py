"""Export of a checkpoint's role as a Hugging Face directory: one tensor in memory at a time, without a process group."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.files import Spec, write_safetensors
from rlhf_spmd.checkpoint.load import read_whole
from rlhf_spmd.checkpoint.manifest import DTYPES, PARAM, CheckpointError
from rlhf_spmd.data.encoding import TEMPLATE_FILE
from rlhf_spmd.models.file_forms import file_forms
from rlhf_spmd.models.spec import ModelSpec, with_end_tokens
from rlhf_spmd.models.stored import read_json, read_spec
from rlhf_spmd.parallel.data_parallel import buckets
from rlhf_spmd.telemetry.run_dir import atomic_write_text

# copied if the source directory has them, without keys that name files of Python
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",  # named ones, such as tool_use
)
REMOTE_CODE = ("auto_map", "custom_pipelines")  # transformers' keys of Python files, which are not copied
# numbers of layers that predict further tokens; these layers are not exported
MULTI_TOKEN_PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
ADAPTER_DIR = "adapter"  # PEFT's directory inside an export
VALUE_HEAD = "score.weight"
CLASSIFIER = "ForSequenceClassification"
SECOND_HEAD = "v_head.weight"  # of a policy that is its own critic; transformers has no class with both heads


def export_hugging_face(
    checkpoint_dir: Path,
    role: str,
    source_model_dir: Path,
    out_dir: Path,
    max_shard_bytes: int = 4 << 30,
    dtype: torch.dtype | None = None,
    card: str | None = None,
    merged: bool = True,
    tokenizer: Any = None,
    chat_template: str | None = None,
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``out_dir`` so that ``transformers`` loads it, and return it.

    Configuration and tokenizer come from ``source_model_dir`` (the role's ``path``). A model with a value head becomes
    ``<Family>ForSequenceClassification`` with one label; a model with both heads leaves the value head out. The configuration names all
    tokens that end a response, and with a value head a padding token that ends no row.

    - dtype: the exported dtype; None: the stored one
    - card: the text of README.md
    - merged: for a role with adapters, which go to the directory ``adapter``: also write the model with them
    - tokenizer: the directory's, if it has one
    - chat_template: the template that the role was trained with, if it is not the tokenizer's
    - check_owner: raises if the run directory is no longer this job's

    An earlier export at ``out_dir`` is replaced only when the new one is complete and ``check_owner`` returns. Raises CheckpointError
    (damaged box, no such role, a file that cannot be written), ValueError (paths) and whatever ``check_owner`` raises.
    """
    out_dir = Path(out_dir)
    source = Path(source_model_dir)
    if not (source / "config.json").is_file():
        raise ValueError(f"export: {source} has no config.json; name the directory that role '{role}' was loaded from")
    is_export = (out_dir / "config.json").is_file() or (out_dir / ADAPTER_DIR).is_dir()
    if out_dir.exists() and any(out_dir.iterdir()) and not is_export:
        raise ValueError(f"export: {out_dir} is not empty and not a model directory; choose another one")
    draft = out_dir.with_name(f".{out_dir.name}.tmp")
    try:
        _remove(draft)
        draft.mkdir(parents=True)
        specs = _write_tensors(draft, Path(checkpoint_dir), role, source, max_shard_bytes, dtype, merged)
        copy_companions(source, draft, chat_template)
        _write_config(draft, source, specs, tokenizer, chat_template)
        if card is not None:
            atomic_write_text(draft / "README.md", card)
        check_owner()
        _replace(out_dir, draft)
    except OSError as error:
        file = error.filename2 or error.filename or out_dir  # a copy writes the second file
        raise CheckpointError(f"cannot write export {file}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out_dir


def _write_tensors(
    draft: Path, checkpoint_dir: Path, role: str, source: Path, max_shard_bytes: int, dtype: torch.dtype | None, merged: bool
) -> list[Spec]:
    """Write a role's adapters and its model. Return the model's tensors; none for adapters alone."""
    adapters = find_adapters(checkpoint_dir, role)
    if adapters is not None:
        adapters.write(draft / ADAPTER_DIR, source)
        if not merged:
            return []
    with ExitStack() as stack:
        tensors, get = _whole_tensors(checkpoint_dir, role) if adapters is None else adapters.merged(source, stack)
        specs, joined = in_files(read_spec(source), [replace(spec, dtype=dtype or spec.dtype) for spec in tensors], get)
        _write_weights(draft, plan_files(specs, max_shard_bytes), joined)
    return specs


def _write_config(draft: Path, source: Path, specs: Sequence[Spec], tokenizer: Any, chat_template: str | None) -> None:
    """Write ``config.json``, unless there are only adapters, and name end and padding tokens in the other files."""
    spec = with_end_tokens(read_spec(source), tokenizer, chat_template)
    name_ends(draft, spec.eos_token_ids)
    if not specs:
        return
    config = with_ends(export_config(read_json(source / "config.json"), specs), spec.eos_token_ids)
    if any(tensor.key == VALUE_HEAD for tensor in specs):
        pad = padding(spec, tokenizer)
        config["pad_token_id"] = pad
        if tokenizer is not None and pad is not None:
            name_padding(draft, tokenizer.convert_ids_to_tokens(pad))
    atomic_write_text(draft / "config.json", json.dumps(config, indent=2) + "\n")


def _replace(out_dir: Path, draft: Path) -> None:
    """Rename ``draft`` to ``out_dir``, and remove the earlier export there."""
    previous = out_dir.with_name(f".{out_dir.name}.old")
    _remove(previous)
    if out_dir.exists():
        os.rename(out_dir, previous)
    os.rename(draft, out_dir)
    _remove(previous)


def copy_companions(source: Path, out: Path, chat_template: str | None) -> None:
    """Copy generation settings and tokenizer.

    ``chat_template`` replaces all templates of the source: transformers would prefer a named one for tools.
    """
    for file in sorted(file for name in COMPANIONS for file in source.glob(name)):
        target = out / file.relative_to(source)
        if chat_template is not None and ("chat_template" in target.name or target.parent != out):
            continue
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    if chat_template is not None:
        atomic_write_text(out / TEMPLATE_FILE, chat_template)
    tokenizer = out / "tokenizer_config.json"
    if tokenizer.is_file():
        stale = (*REMOTE_CODE, *["chat_template"] * (chat_template is not None))
        _rewrite(tokenizer, {key: value for key, value in read_json(tokenizer).items() if key not in stale})


def _remove(path: Path) -> None:
    """Remove a directory if it exists. If an export is a symbolic link, remove only the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _whole_tensors(checkpoint_dir: Path, role: str) -> tuple[list[Spec], Callable[[Spec], Tensor]]:
    """Return the tensors of a role whose weights are in the checkpoint, and how to read each."""
    pieces = read_manifest(checkpoint_dir).pieces_of(role, PARAM)
    exported = sorted((name, parts) for name, parts in pieces.items() if name != SECOND_HEAD)
    specs = [Spec(name, DTYPES[parts[0].dtype], parts[0].shape) for name, parts in exported]
    return specs, lambda spec: read_whole(checkpoint_dir, pieces[spec.key], spec)


def in_files(
    spec: ModelSpec, tensors: Sequence[Spec], get: Callable[[Spec], Tensor]
) -> tuple[list[Spec], Callable[[Spec], Tensor]]:
    """Return the tensors that the model's files have, and a function that makes one of them from the model's own."""
    by_name = {tensor.key: tensor for tensor in tensors}
    forms = {form.name: form for form in file_forms(spec, {name: tensor.shape for name, tensor in by_name.items()})}

    def joined(wanted: Spec) -> Tensor:
        form = forms[wanted.key]
        return form.build([get(by_name[part]) for part in form.parts]).to(wanted.dtype)

    specs = [Spec(form.name, form.dtype or by_name[form.parts[0]].dtype, form.shape) for form in forms.values()]
    return specs, joined


def plan_files(specs: Sequence[Spec], max_shard_bytes: int) -> dict[str, list[Spec]]:
    """Return file name -> tensors in order. Each file has at most ``max_shard_bytes``, unless a single tensor is larger. Pure."""
    by_key = {spec.key: spec for spec in specs}
    parts = list(buckets({key: spec.num_bytes for key, spec in by_key.items()}, max_shard_bytes))
    if len(parts) == 1:
        return {"model.safetensors": list(specs)}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": [by_key[key] for key in part] for i, part in enumerate(parts, 1)}


def export_config(config: dict[str, Any], specs: Sequence[Spec]) -> dict[str, Any]:
    """Return the source's config.json with the exported dtype and the class with the exported head.

    Keys of layers that are not exported are 0 or left out. Pure.
    """
    names = {spec.key for spec in specs}
    if "text_config" in config:  # the language part of a model that sees; its class for text has the same name
        text = str(config["text_config"].get("model_type")).removesuffix("_text")
        vision_family = str((config.get("architectures") or [""])[0]).partition("For")[0]
        same_family = text in (config.get("model_type"), "None")
        family = vision_family if same_family else text.capitalize()  # Mistral3's is Mistral or Ministral3
        shared: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        config = {**config["text_config"], **shared, "architectures": [f"{family}ForCausalLM"]}
    dropped = ("quantization_config", *REMOTE_CODE)  # quantized weights are read, but not written
    config = {key: value for key, value in config.items() if key not in dropped}
    config |= {key: 0 for key in MULTI_TOKEN_PREDICTION_KEYS if config.get(key)}
    dtype = str(specs[0].dtype).removeprefix("torch.")
    config = {**config, "dtype": dtype}
    if "torch_dtype" in config:  # the name before transformers 5
        config["torch_dtype"] = dtype
    if VALUE_HEAD in names:
        family = (config.get("architectures") or ["Model"])[0].split("For")[0].removesuffix("Model")
        family += "Text" if str(config.get("model_type")).endswith("_text") else ""  # Gemma3TextForSequenceClassification
        config |= {"architectures": [f"{family}{CLASSIFIER}"], "num_labels": 1, "tie_word_embeddings": False}
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config
    if "lm_head.weight" in names:  # some families are tied unless their configuration denies it
        config["tie_word_embeddings"] = False
    classes = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(CLASSIFIER) for name in classes):  # a reward model's directory, whose head is left out
        config["architectures"] = [f"{name.removesuffix(CLASSIFIER).removesuffix('Text')}ForCausalLM" for name in classes]
        for key in ("num_labels", "id2label", "label2id", "problem_type"):
            config.pop(key, None)
    return config


def _write_weights(out: Path, files: dict[str, list[Spec]], get: Callable[[Spec], Tensor]) -> None:
    for name, specs in files.items():
        write_safetensors(out / name, specs, get)
    if len(files) > 1:
        num_elements = sum(math.prod(spec.shape) for specs in files.values() for spec in specs)
        num_bytes = sum(spec.num_bytes for specs in files.values() for spec in specs)
        weight_map = {spec.key: name for name, specs in files.items() for spec in specs}
        index = {"metadata": {"total_parameters": num_elements, "total_size": num_bytes}, "weight_map": weight_map}
        atomic_write_text(out / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def with_ends(config: Mapping[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """Return ``config`` with ``ends`` as its ``eos_token_id``; unchanged if it already says the same. Pure."""
    current = config.get("eos_token_id")
    if not ends or set(current if isinstance(current, list) else [current]) == {*ends}:
        return {**config}
    return {**config, "eos_token_id": [*ends] if len(ends) > 1 else next(iter(ends))}


def padding(spec: ModelSpec, tokenizer: Any) -> int | None:
    """Return the token to pad scored rows with; None if there is none. Then transformers refuses several rows at once.

    Transformers reads the score at the last token that is not padding, so padding must not be a token that ends a response. These are
    tried in turn: the tokenizer's padding token, a special token with "pad" in its name, the token of unknown words, the first token of
    a text, any special token. Without a tokenizer, those in config.json.
    """
    config = spec.hf_config
    candidates = [config.get("pad_token_id"), config.get("bos_token_id")]
    if tokenizer is not None:
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        named = [number for number, text in special.items() if "pad" in text.lower()]
        candidates = [tokenizer.pad_token_id, *named, tokenizer.unk_token_id, tokenizer.bos_token_id, *special]
    return next(
        (t for t in candidates if isinstance(t, int) and t not in spec.eos_token_ids and 0 <= t < spec.vocab_size), None
    )


def name_ends(directory: Path, ends: Collection[int]) -> None:
    """Write ``ends`` into the directory's ``generation_config.json``, if it has one."""
    file = directory / "generation_config.json"
    if file.is_file():
        _rewrite(file, with_ends(read_json(file), ends))


def name_padding(directory: Path, token: str) -> None:
    """Write the padding ``token`` into the directory's tokenizer files."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if file.is_file():
            _rewrite(file, {**read_json(file), "pad_token": token})


def _rewrite(file: Path, value: dict[str, Any]) -> None:
    if value != read_json(file):
        atomic_write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
