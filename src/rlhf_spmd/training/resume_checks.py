"""Whether a run may resume from a checkpoint: the same experiment, the same dtypes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.manifest import DTYPES
from rlhf_spmd.config.interpolation import as_yaml_text, digest, escaped
from rlhf_spmd.config.load import flatten, read_file, to_dict
from rlhf_spmd.config.plain_yaml import resolve
from rlhf_spmd.telemetry import run_dir
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers.config import RoleConfig

# keys that make a run another experiment if they differ
EXPERIMENT_KEYS = re.compile(
    r"algorithm\.name|models\.\w+\.(path|random_init|lora\.(rank|alpha|use_rslora|bits|path))|rewards?\.(\w+\.)?model|data\.path"
)


def environment_digests(config: TrainConfig) -> dict[str, str]:
    """Return digests of values of :data:`EXPERIMENT_KEYS` that come from the environment, by key.

    ``config.yaml`` has only references to such values.
    """
    values = flatten(to_dict(config, escaped))
    texts = flatten(to_dict(config, as_yaml_text))
    return {key: digest(text) for key, text in values.items() if text != texts[key] and EXPERIMENT_KEYS.fullmatch(key)}


def compare_runs(
    path: Path, config: TrainConfig, saved: Mapping[str, Any], present: Mapping[str, Any], missing_roles: Sequence[str] = ()
) -> str:
    """Return, for people, the settings that differ from those of the run whose checkpoint is ``path``.

    - saved, present: the state in the checkpoint, and the state of this run
    - missing_roles: roles of this run that the checkpoint does not hold

    Raises ValueError for another experiment, unless ``run.resume`` allows it.
    """
    file = _config_of(path)
    values = flatten(to_dict(config, escaped))
    new = flatten(to_dict(config, as_yaml_text))
    old = flatten(resolve(read_file(file, "the run's configuration"))) if os.path.lexists(file) else new
    if not old:
        raise ValueError(f"the run's configuration '{file}' is empty, so no settings can be compared; mend it or move it away")
    digests = saved["environment"]
    pairs = {key: (new.get(key, "null"), old.get(key, "null")) for key in {**old, **new}}
    changed: dict[str, str] = {}
    for key, (now, before) in pairs.items():
        value = values.get(key, "null")
        is_equal = digest(value) == digests[key] if key in digests else before in (now, value)
        if not is_equal and key not in ("run.dir", "run.resume"):
            changed[key] = f"{key}={now} (was {before if before != now else 'another value'})"
    # for the path of a model null means the actor's; for bits and for the first adapter null is a value
    comparable = [key for key in changed if "null" not in pairs[key] or key.endswith((".lora.bits", ".lora.path"))]
    differing = [key for key in comparable if EXPERIMENT_KEYS.fullmatch(key)]
    differences = [changed[key] for key in differing if key in digests or not same_path(values.get(key, "null"), pairs[key][1])]
    for name, stream in present["data"].items():
        then = saved["data"].get(name, {}).get("fingerprint")
        now = stream["fingerprint"]
        if then != now:
            differences.append(f"the {name} in the data are {now} (were {then})")
    if differences and config.run.resume == "auto":
        remedy = f", since it holds no role {missing_roles[0]!r}" if missing_roles else ", or run.resume=force to go on with it"
        raise ValueError(f"{path} is of another experiment: {', '.join(differences)}; give another run.dir{remedy}")
    return f"other settings than in {file}: {', '.join(changed.values())}" if changed else ""


def _config_of(checkpoint: Path) -> Path:
    """Return the config.yaml of a checkpoint's run. The checkpoint, or the directory of all checkpoints, may be a link."""
    as_named, resolved = (path.parents[1] / run_dir.CONFIG_FILE for path in (checkpoint.absolute(), checkpoint.resolve()))
    return as_named if os.path.lexists(as_named) else resolved


def same_path(*paths: str) -> bool:
    return len({Path(path).expanduser().resolve() for path in paths}) == 1


def check_dtypes(path: Path, models: Mapping[str, RoleConfig], device: torch.device) -> None:
    """Raise ValueError if a role's weights have another dtype than in the checkpoint ``path``.

    Roles with adapters are not compared: adapters have a dtype of their own.
    """
    manifest = read_manifest(path)
    for role, config in models.items():
        saved = DTYPES[manifest.dtype_of(role)]
        present = config.torch_dtype(device)
        if not config.lora.rank and saved != present:
            now, then = (str(dtype).removeprefix("torch.") for dtype in (present, saved))
            where = f"models.{role}.dtype={config.dtype}{'' if config.dtype == now else f' ({now})'}"
            raise ValueError(f"{where}, but {path} has {then}; go on with {then}")
