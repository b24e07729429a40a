"""Digests of a program's input, which must be equal on all ranks: settings, data, weights and the files that settings name."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_spmd.config.interpolation import comparable_text
from rlhf_spmd.config.load import flatten, to_dict
from rlhf_spmd.config.registry import split_name

LARGEST = 16 << 20  # largest file to hash, in bytes; larger ones are data, which are compared by their rows
TEXT_FILES = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
)
HOST_PATHS = ("path", "val_path", "cache_dir", "dir")  # keys whose values may differ between hosts, but not the contents


def run_digests(run: Any) -> dict[str, str]:
    """Return what must be equal on all ranks of a checked run, by name: settings, and digests of data, weights and files.

    Weights are sampled, not read whole.
    """
    settings = flatten(to_dict(run.config, comparable_text))
    values = {key: text for key, text in settings.items() if key.rpartition(".")[2] not in HOST_PATHS}
    values |= {f"set of rows ({name})": dataset.fingerprint for name, dataset in run.training.items()}
    values |= {f"set of validation rows ({name})": dataset.fingerprint for name, dataset in run.validation.items()}
    models = run.config.models.items()
    paths = {f"models.{role}.path": Path(model.path) for role, model in models if model.path is not None}
    paths |= {f"models.{role}.lora.path": Path(model.lora.path) for role, model in models if model.lora.path is not None}
    digests = {path: (weights_digest(path), text_digest(path)) for path in {*paths.values()}}
    for key, path in paths.items():
        weights, texts = digests[path]
        values |= {f"{key} (its weights)": weights, f"{key} (its tokenizer and configuration)": texts}
    return values | file_digests(run.config)


def file_digests(config: Any) -> dict[str, str]:
    """Return digests, by key, of the files that settings name: the user's functions and templates."""
    digests = {}
    for key, text in flatten(to_dict(config)).items():
        if not set(HOST_PATHS) & set(key.split(".")):
            for file in _named_files(text):
                digests[f"{key} (its file)"] = f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
    return digests


def _named_files(text: str) -> Iterator[Path]:
    """Yield the file that ``text`` names: ``file.py:function``, ``package.module:function`` outside this package, or a path."""
    name, function = split_name(text)
    if not (function or re.search(r"/|\.[a-zA-Z]", name)):
        return  # most settings are no path: a thousand ranks need not ask the file system
    module = sys.modules.get(name) if (function or "." in name) and not name.startswith("rlhf_spmd.") else None
    path = Path(str(getattr(module, "__file__", None) or name)).expanduser()
    try:
        if 0 < len(name) < 4096 and path.is_file() and path.stat().st_size <= LARGEST:
            yield path
    except (OSError, ValueError):  # a text that cannot be a path
        return


def text_digest(directory: Path) -> str:
    """Return a digest of a model's tokenizer and configuration files."""
    digest = hashlib.sha256()
    for file in sorted({file for name in TEXT_FILES for file in directory.glob(name)}):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def weights_digest(directory: Path) -> str:
    """Return names and sizes of a model's weight files, and a digest of samples of the first."""
    files = sorted(directory.glob("*.safetensors"))
    return json.dumps([*([file.name, file.stat().st_size] for file in files), *map(sample_digest, files[:1])])


def sample_digest(path: Path) -> str:
    """Return a hash of 64 parts of a file, spread over it."""
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        for part in range(64):
            file.seek(part * size // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()
