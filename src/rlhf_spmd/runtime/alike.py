"""What all ranks of a run must have the same of. Each reads files of its own host, which may be other copies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rlhf_spmd.config.interpolation import compared
from rlhf_spmd.config.load import flatten, to_dict

OWN = ("path", "val_path", "cache_dir", "dir")  # keys whose values may differ between hosts: what is there may not


def run_digests(ready: Any) -> dict[str, str]:
    """Of a checked training run, by name: each setting, and digests of the rows of each stream of data and of the weights, as far as
    samples of their files tell."""
    settings = flatten(to_dict(ready.config, compared))
    found = {key: text for key, text in settings.items() if key.rpartition(".")[2] not in OWN}
    found |= {f"set of rows ({name})": dataset.fingerprint for name, dataset in ready.training.items()}
    found |= {f"set of validation rows ({name})": dataset.fingerprint for name, dataset in ready.validation.items()}
    paths = {role: Path(model.path) for role, model in ready.config.models.items() if model.path is not None}
    return found | {f"models.{role}.path (its weights)": weights_digest(path) for role, path in paths.items()}


def weights_digest(directory: Path) -> str:
    """Of a model's files of weights: their names and sizes, and samples of the first."""
    files = sorted(directory.glob("*.safetensors"))
    return json.dumps([*([file.name, file.stat().st_size] for file in files), *map(sample_of, files[:1])])


def sample_of(path: Path) -> str:
    """A hash of 64 parts of a file, spread over it."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for part in range(64):
            file.seek(part * size // 64)
            digest.update(file.read(4096))
    return digest.hexdigest()
