"""Whether a run may go on from a checkpoint: the same experiment, the same dtypes, a state that a run saves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.manifest import DTYPES, CheckpointError, Manifest
from rlhf_spmd.config.interpolation import digest, escaped, written
from rlhf_spmd.config.load import flatten, read_file, to_dict
from rlhf_spmd.config.written import resolve
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers.config import RoleConfig

EXPERIMENT = re.compile(
    r"algorithm\.name|models\.\w+\.(path|random_init|lora\.(rank|alpha|use_rslora|bits|path))|rewards?\.(\w+\.)?model|data\.path"
)  # keys that make it another experiment
STATE_TYPES = {
    "step": int,
    "stopped": bool,
    "optimizer_steps": dict,
    "skipped_steps": dict,
    "data": dict,
    "roles": dict,
    "kept": list,
    "versions": dict,
    "environment": dict,
}


def environment_digests(config: TrainConfig) -> dict[str, str]:
    """Return digests, by key, of values from the environment that decide which experiment this is: ``config.yaml`` has only their
    references.
    """
    values, shown = flatten(to_dict(config, escaped)), flatten(to_dict(config, written))
    return {key: digest(text) for key, text in values.items() if text != shown[key] and EXPERIMENT.fullmatch(key)}


def compare_runs(
    path: Path, config: TrainConfig, saved: Mapping[str, Any], present: Mapping[str, Any], lacking: Sequence[str] = ()
) -> str:
    """Return the settings that differ from those of the run whose checkpoint is ``path``, for people.

    ``saved``, ``present``: the state of that run and of this one. ``lacking``: roles of this run that the checkpoint does not hold.
    Raises ValueError where it is another experiment, unless ``run.resume`` says that this is meant.
    """
    file = _config_of(path)
    values, new = flatten(to_dict(config, escaped)), flatten(to_dict(config, written))
    old = flatten(resolve(read_file(file, "the run's configuration"))) if os.path.lexists(file) else new
    if not old:
        raise ValueError(f"the run's configuration '{file}' is empty, so no settings can be compared; mend it or move it away")
    digests = saved["environment"]
    pairs = {key: (new.get(key, "null"), old.get(key, "null")) for key in {**old, **new}}
    changed = {}
    for key, (is_now, was) in pairs.items():
        value = values.get(key, "null")
        is_equal = digest(value) == digests[key] if key in digests else was in (is_now, value)
        if not is_equal and key not in ("run.dir", "run.resume"):
            changed[key] = f"{key}={is_now} (was {was if was != is_now else 'another value'})"
    # null is "as the actor" of a model's path, but a choice of bits and of the adapter that training begins with
    chosen = [key for key in changed if "null" not in pairs[key] or key.endswith((".lora.bits", ".lora.path"))]
    differing = [key for key in chosen if EXPERIMENT.fullmatch(key)]
    other = [changed[key] for key in differing if key in digests or not same_path(values.get(key, "null"), pairs[key][1])]
    for name, stream in present["data"].items():
        then, now = saved["data"].get(name, {}).get("fingerprint"), stream["fingerprint"]
        if then != now:
            other.append(f"the {name} in the data are {now} (were {then})")
    if other and config.run.resume == "auto":
        forced = f", since it holds no role {lacking[0]!r}" if lacking else ", or run.resume=force to go on with it"
        raise ValueError(f"{path} is of another experiment: {', '.join(other)}; give another run.dir{forced}")
    return f"other settings than in {file}: {', '.join(changed.values())}" if changed else ""


def _config_of(checkpoint: Path) -> Path:
    """Return the config.yaml of a checkpoint's run. The checkpoint, or the directory of all of them, may be a link."""
    as_named, resolved = (path.parents[1] / CONFIG_FILE for path in (checkpoint.absolute(), checkpoint.resolve()))
    return as_named if os.path.lexists(as_named) else resolved


def same_path(*paths: str) -> bool:
    return len({Path(path).expanduser().resolve() for path in paths}) == 1


def check_dtypes(path: Path, models: Mapping[str, RoleConfig], device: torch.device) -> None:
    """Raises ValueError where a role's weights have another dtype than in the checkpoint ``path``. Adapters have a dtype of
    their own."""
    manifest = read_manifest(path)
    for role, config in models.items():
        saved, present = DTYPES[manifest.dtype_of(role)], config.torch_dtype(device)
        if not config.lora.rank and saved != present:
            now, then = (str(dtype).removeprefix("torch.") for dtype in (present, saved))
            where = f"models.{role}.dtype={config.dtype}{'' if config.dtype == now else f' ({now})'}"
            raise ValueError(f"{where}, but {path} has {then}; go on with {then}")


def check_state(manifest: Manifest) -> None:
    """Raises CheckpointError for a state that ``Checkpoints`` does not save: somebody has edited it."""
    for key, kind in STATE_TYPES.items():
        value = manifest.state.get(key)
        if not isinstance(value, kind):
            raise CheckpointError(
                f"the manifest of step {manifest.step} has {key}={value!r:.80} in its state, no {kind.__name__}"
            )
    if odd := [name for name, stream in manifest.state["data"].items() if not isinstance(stream, dict)]:
        raise CheckpointError(f"the manifest of step {manifest.step} has no dict as data.{odd[0]} in its state")
    if manifest.state["step"] != manifest.step:
        raise CheckpointError(f"the manifest of step {manifest.step} has step={manifest.state['step']} in its state")


@contextmanager
def reading_state(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the body finds that the state of the checkpoint ``path`` lacks something."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its state is not what a run saves ({type(error).__name__}: {error})") from error
