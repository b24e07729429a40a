"""What a checkpoint holds of a run: states of roles and rows in flight; and whether it is of the same experiment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.load import load_checkpoint, read_pieces
from rlhf_spmd.checkpoint.manifest import DTYPES, PARAM, CheckpointError, Manifest
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.interpolation import digest, escaped, written
from rlhf_spmd.config.load import flatten, read_file, to_dict
from rlhf_spmd.config.written import resolve
from rlhf_spmd.controller import Controller
from rlhf_spmd.parallel.boxes import whole_shard
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE
from rlhf_spmd.training.streams import Data
from rlhf_spmd.workers import ActorWorker, ComputeWorker, ModelWorker
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.weight_sync import AsyncWeightReplica

ROWS_IN_FLIGHT = "rows_in_flight"  # a checkpoint's name for the rows that generation goes on with
EXPERIMENT = re.compile(
    r"algorithm\.name|models\.\w+\.(path|random_init|lora\.(rank|alpha|use_rslora|bits|path))|rewards?\.(\w+\.)?model|data\.path"
)  # keys that make it another experiment


def role_state(worker: ModelWorker) -> RoleState:
    """Return what this rank holds of a role whose weights change, by reference: saving reads it, loading writes it."""
    engine = worker.engine
    states = engine.optimizer.state_tensors() if engine.optimizer else {}
    shards, weights = engine.param_shards(), worker.owned.between_calls()
    return RoleState({name: shards[name] for name in engine.saved}, {name: weights[name] for name in engine.saved}, states)


def rows_in_flight(saved: Mapping[str, ModelWorker]) -> dict[str, RoleState]:
    """Return the rows in flight that this rank saves; they go through no other rank."""
    actors = [worker for worker in saved.values() if isinstance(worker, ActorWorker)]
    tensors = {name: rows for worker in actors for name, rows in worker.rollout_state().items()}
    shards = {name: whole_shard(name, tuple(x.shape)) for name, x in tensors.items()}
    return {ROWS_IN_FLIGHT: RoleState(shards, tensors)} if tensors else {}


def restore_rows_in_flight(directory: Path, saved: Mapping[str, ModelWorker]) -> None:
    """Every replica reads all rows in flight and keeps its own. Raises CheckpointError."""
    manifest = read_manifest(directory)
    if ROWS_IN_FLIGHT not in manifest.roles:
        return
    found = manifest.pieces_of(ROWS_IN_FLIGHT, PARAM)
    for worker in saved.values():
        if isinstance(worker, ActorWorker):
            pieces = [piece for name, its in found.items() if name.startswith(f"{worker.name}.") for piece in its]
            worker.restore_rollouts(rows for _, rows in read_pieces(directory, pieces))


def weights_ahead(saved: Mapping[str, ModelWorker]) -> dict[str, RoleState]:
    """Return the older weights that generation ahead of training will still take, on the ranks that hold them."""
    found: dict[str, RoleState] = {}
    for role, replica in _async_replicas(saved):
        if replica.member:
            shards = replica.engine.param_shards()
            found |= {_older(role, version): RoleState(shards, values) for version, values in replica.needed().items()}
    return found


def restore_weights_ahead(directory: Path, saved: Mapping[str, ModelWorker]) -> None:
    """Collective over the world: every rank of it must call, in program order. Raises CheckpointError."""
    for role, replica in _async_replicas(saved):
        versions = replica.context.controller.versions
        for version in sorted(versions.needed_later(role) - {versions.newest(role)}):
            values = replica.keep(version)
            if replica.member:
                state = RoleState(replica.engine.param_shards(), values)
                load_checkpoint(directory, _older(role, version), state, replica.mesh.pool)


def _async_replicas(saved: Mapping[str, ModelWorker]) -> Iterator[tuple[str, AsyncWeightReplica]]:
    for role, worker in saved.items():
        generating = worker.worker_of("generate_sequences")
        if isinstance(generating, ModelWorker) and isinstance(generating.model, AsyncWeightReplica):
            yield role, generating.model


def _older(role: str, version: int) -> str:
    """Return a checkpoint's name for an older version of a role's weights."""
    return f"{role}_at_version_{version}"


def environment_digests(config: Any) -> dict[str, str]:
    """Return digests, by key, of values from the environment that decide which experiment this is: ``config.yaml`` has only their
    references.
    """
    values, shown = flatten(to_dict(config, escaped)), flatten(to_dict(config, written))
    return {key: digest(text) for key, text in values.items() if text != shown[key] and EXPERIMENT.fullmatch(key)}


def compare_runs(
    path: Path, config: Any, saved: Mapping[str, Any], present: Mapping[str, Any], lacking: Sequence[str] = ()
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
    digests = saved.get("environment", {})
    pairs = {key: (new.get(key, "null"), old.get(key, "null")) for key in {**old, **new}}
    changed = {}
    for key, (is_now, was) in pairs.items():
        value = values.get(key, "null")
        is_same = digest(value) == digests[key] if key in digests else was in (is_now, value)
        if not is_same and key not in ("run.dir", "run.resume"):
            changed[key] = f"{key}={is_now} (was {was if was != is_now else 'another value'})"
    # null is "as the actor" of a model's path, but a choice of bits and of the adapter that training begins with
    meant = [key for key in changed if "null" not in pairs[key] or key.endswith((".lora.bits", ".lora.path"))]
    named = {key: changed[key] for key in meant if EXPERIMENT.fullmatch(key)}
    other = [text for key, text in named.items() if key in digests or not same_path(values.get(key, "null"), pairs[key][1])]
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
    named, found = (path.parents[1] / CONFIG_FILE for path in (checkpoint.absolute(), checkpoint.resolve()))
    return named if os.path.lexists(named) else found


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


def role_states(controller: Controller, models: SimpleNamespace) -> dict[str, Any]:
    """The states of roles without a model. Collective over the world: every rank of it must call, in program order."""
    workers = {role: worker for role, worker in vars(models).items() if isinstance(worker, ComputeWorker)}
    found = controller.get(*(worker.progress() for worker in workers.values()))
    return {role: values[0] for role, values in zip(workers, found, strict=True)}


def check_state(manifest: Manifest) -> None:
    """Raises CheckpointError for a state that :class:`Trainer` does not save: somebody has edited it."""
    kinds = {"step": int, "stopped": bool, "optimizer_steps": dict, "data": dict, "roles": dict, "kept": list}
    for key, kind in kinds.items():
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
def read_state(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the body finds that the state of the checkpoint ``path`` lacks something."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its state is not what a run saves ({type(error).__name__}: {error})") from error


def restore(state: dict[str, Any], data: Data, models: SimpleNamespace) -> None:
    """Put the ``state`` that :class:`Trainer` saved back into place. Raises CheckpointError for a state that this run cannot take."""
    data.load_state_dict(state["data"])
    if state["kept"] and models.controller.rank == 0:
        lost = f"the script kept rows for later steps ({', '.join(state['kept'])}), which checkpoints do not hold"
        print(
            f"warning: {lost}: it begins without them, so numbers differ from those of a run that was not interrupted",
            file=sys.stderr,
        )
    for role, saved in state["roles"].items():
        if not hasattr(models, role):
            raise CheckpointError(f"the checkpoint has a state of role '{role}', which this algorithm has not")
        getattr(models, role).load_state_dict(saved)
