"""The checkpoints of a run: what they hold, writing one while the next steps run, resuming from one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from rlhf_spmd.checkpoint.adapters import STATE as ADAPTERS
from rlhf_spmd.checkpoint.directory import SavedStep, checkpoints_of, named_checkpoint, read_manifest, step_directory
from rlhf_spmd.checkpoint.load import find_resumable, load_checkpoint, read_pieces
from rlhf_spmd.checkpoint.manifest import PARAM, CheckpointError, Manifest
from rlhf_spmd.checkpoint.save import Draft, RoleState, prepare_checkpoint
from rlhf_spmd.controller import Controller
from rlhf_spmd.parallel.boxes import whole_shard
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.reshard import BackgroundTask
from rlhf_spmd.telemetry import run_dir, run_lock
from rlhf_spmd.training.exports import Exports
from rlhf_spmd.training.resume_checks import check_dtypes, compare_runs, environment_digests
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.streams import Data
from rlhf_spmd.training.train_config import RESUME
from rlhf_spmd.workers import ActorWorker, ComputeWorker, ModelWorker
from rlhf_spmd.workers.weight_sync import AsyncWeightReplica

ROWS_IN_FLIGHT = "rows_in_flight"  # a checkpoint's name for the rows that generation goes on with
STATE_TYPES = {"step": int, "stopped": bool, "kept": list}
STATE_TYPES |= dict.fromkeys(("optimizer_steps", "skipped_steps", "data", "roles", "versions", "environment"), dict)


class CheckpointWriter:
    """Writes checkpoints, at most one at a time. ``board.last_checkpoint`` names the last one that is committed.

    All ranks write the same checkpoints in the same order. The collectives of their threads have a channel of their own, so they
    never wait for those of the steps. As a context it ends after the thread, unless the run is ended at once.
    """

    def __init__(self, world: World, board: Board) -> None:
        self._world = world
        self._board = board
        self._task: BackgroundTask | None = None

    @cached_property
    def _group(self) -> Group:
        group = self._world.group(range(self._world.size), "checkpoints", channel="checkpoints")
        assert group is not None, "the world's group has every rank"
        return group

    def write(self, draft: Draft) -> None:
        """Write the draft.

        Collective over the world: every rank of it must call, in program order. Raises CheckpointError on all of them.
        """
        self._write(draft, self._world.all)

    def start(self, draft: Draft) -> None:
        """Copy the draft's values and write them in the background.

        Collective over the world: every rank of it must call, in program order, after :meth:`wait`.
        """
        assert self._task is None, "a checkpoint is in flight"
        copied = draft.copied()
        self._group.connect()  # here, where all ranks are
        self._task = BackgroundTask(lambda: self._write(copied, self._group), "checkpoint")

    def check(self) -> None:
        """Raise CheckpointError if the checkpoint in flight has failed. Does not wait."""
        if self._task is not None and not self._task.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is in flight on this rank. Raises CheckpointError if it has failed."""
        task = self._task
        self._task = None
        if task is not None:
            task.wait()

    def _write(self, draft: Draft, group: Group) -> None:
        self._board.last_checkpoint = str(draft.write(group))

    def __enter__(self) -> CheckpointWriter:
        # a first thread now, with the memory that torch takes for it, and not when memory is short
        BackgroundTask(lambda: torch.zeros(1), "checkpoint").wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the thread, also after a failure: the other ranks complete the checkpoint, too. A Ctrl-C does not wait."""
        if self._task is not None and (self._world.size == 1 or kind is None or issubclass(kind, Exception)):
            self._task.join()


class Checkpoints:
    """Saves the models and data of a run, and loads them.

    - exports: the exports of the run; a checkpoint holds their best step so far
    - damaged: checkpoints of the run that cannot be read
    - reached_goal: the run had reached its goal in the checkpoint that it resumed from
    """

    def __init__(self, context: ProgramContext[RunPlan], models: SimpleNamespace, data: Data, exports: Exports) -> None:
        self.run_plan: RunPlan = context.prepared
        self.world, self.board = context.world, context.board
        self.models = models
        self.data = data
        self.exports = exports
        self.controller: Controller = models.controller
        self.config = self.run_plan.config.run
        self.run_dir = Path(self.config.dir)
        self.is_first = self.world.rank == 0
        self.writer = CheckpointWriter(self.world, self.board)
        self.workers: dict[str, ModelWorker] = {role: getattr(models, role) for role in self.run_plan.changing_roles}
        self.damaged: tuple[SavedStep, ...] = ()
        self.reached_goal = False

    def save(self, global_step: int, reached_goal: bool = False, in_background: bool = False) -> None:
        """Wait for the checkpoint in flight, then write one of this step, or start to write it.

        Collective over the world: every rank of it must call, in program order. Raises CheckpointError on all of them.
        """
        with self.controller.timeline.span("save_checkpoint", category="io"):
            self.writer.wait()
            progress = self.controller.get(*(worker.progress() for worker in self.workers.values()))
            state = {"step": global_step, "stopped": reached_goal, **self._state()}
            for key in ("optimizer_steps", "skipped_steps"):
                state[key] = {role: values[0][key] for role, values in zip(self.workers, progress, strict=True)}
            role_states = {role: role_state(worker) for role, worker in self.workers.items() if worker.member}
            role_states |= rows_in_flight(self.workers) | older_weights(self.workers)
            if self.is_first:
                run_lock.check_still_held(self.run_dir)
                run_dir.forget_exports(self.run_dir, step_directory(self.run_dir, global_step).name)
            keep = self.config.keep_checkpoints
            draft = prepare_checkpoint(self.run_dir, global_step, role_states, state, self.world.all, keep, self.damaged)
            (self.writer.start if in_background else self.writer.write)(draft)

    def _state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds besides the roles that change.

        Collective over the world: every rank of it must call, in program order.
        """
        compute_workers = {role: worker for role, worker in vars(self.models).items() if isinstance(worker, ComputeWorker)}
        progress = self.controller.get(*(worker.progress() for worker in compute_workers.values()))
        adapters = {role: worker.config.lora for role, worker in self.workers.items() if worker.config.lora.rank}
        return {
            "data": self.data.state_dict(),
            "roles": {role: values[0] for role, values in zip(compute_workers, progress, strict=True)},
            "kept": sorted(self.data.kept),
            "environment": environment_digests(self.run_plan.config),
            "versions": self.controller.versions.state(),
            "best": self.exports.best,
            ADAPTERS: {role: asdict(lora) for role, lora in adapters.items()},
        }

    def resume(self) -> int:
        """Load the checkpoint that ``run.resume`` asks for. Return its step; 0 for a new run.

        Collective over the world: every rank of it must call. Raises CheckpointError. Raises ValueError if the run would mix with the
        checkpoints of an older one, or resume another experiment.
        """
        path = self._find()
        if path is None:
            metrics = self.run_dir / run_dir.METRICS_FILE
            if metrics.is_file() and metrics.stat().st_size:
                self._say(f"no checkpoint in {self.run_dir}: it begins anew, what it had logged is in *.before")
            return 0
        manifest = read_manifest(path)
        check_state(manifest)
        state = manifest.state
        missing_roles = sorted(self.workers.keys() - set(manifest.roles))
        if difference := compare_runs(path, self.run_plan.config, state, self._state(), missing_roles):
            self._say(difference)
        check_dtypes(path, {role: self.run_plan.roles[role].config for role in self.workers}, self.world.device)
        self.board.last_checkpoint = str(path)
        with reading_state(path):
            self.controller.versions.load_state(state["versions"])
        self._load_workers(path, state)
        with reading_state(path):
            self._load_state(state)
        load_rows_in_flight(path, self.workers)
        load_older_weights(path, self.workers)
        self.reached_goal = bool(state["stopped"])
        of_this_run = path.resolve().parent == checkpoints_of(self.run_dir).resolve()
        self.exports.restore(state.get("best") if of_this_run else None)  # a best step of another run does not count
        self._say(f"resumed from {path} (step {state['step']})")
        return int(state["step"])

    def _find(self) -> Path | None:
        """Return the checkpoint to resume from, or None. Raises ValueError if ``run.resume`` allows none."""
        # also if ``run.resume`` is a path: damaged checkpoints must not count as kept
        newest = find_resumable(self.run_dir, self.world.all, check_state)
        self.damaged = newest.damaged
        if self.config.resume == "never" and newest.directory is not None:
            raise ValueError(
                f"run.resume=never, but run.dir={self.config.dir} holds {newest.directory.name}; give another run.dir"
            )
        for warning in newest.warnings:
            self._say(f"warning: {warning}")
        return newest.directory if self.config.resume in RESUME else named_checkpoint(Path(self.config.resume))

    def _load_workers(self, path: Path, state: Mapping[str, Any]) -> None:
        for role, worker in self.workers.items():
            worker.weights.version = self.controller.versions.newest(role)
            if not worker.member:
                continue
            tensors = role_state(worker)
            load_checkpoint(path, role, tensors, worker.mesh.pool)
            if worker.engine.optimizer is not None:
                worker.engine.optimizer.take_states(tensors.optim)
                with reading_state(path):
                    worker.engine.optimizer.step_count = int(state["optimizer_steps"][role])
                    worker.engine.optimizer.skipped = int(state["skipped_steps"][role])

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Restore streams and roles without a model. Raises CheckpointError for a state that this run cannot have."""
        self.data.load_state_dict(state["data"])
        if state["kept"]:
            lost = f"the script kept rows for later steps ({', '.join(state['kept'])}), which checkpoints do not hold"
            self._say(
                f"warning: {lost}: it begins without them, so numbers differ from those of a run that was not interrupted"
            )
        for role, saved in state["roles"].items():
            if not hasattr(self.models, role):
                raise CheckpointError(f"the checkpoint has a state of role '{role}', which this algorithm has not")
            getattr(self.models, role).load_state_dict(saved)

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, file=sys.stderr)


def role_state(worker: ModelWorker) -> RoleState:
    """Return the tensors that this rank holds of a role whose weights change, by reference: saving reads, loading writes them."""
    engine = worker.engine
    states = engine.optimizer.state_tensors() if engine.optimizer else {}
    shards = engine.param_shards()
    weights = worker.owned_weights.between_calls()
    return RoleState({name: shards[name] for name in engine.saved}, {name: weights[name] for name in engine.saved}, states)


def rows_in_flight(workers: Mapping[str, ModelWorker]) -> dict[str, RoleState]:
    """Return the rows in flight that this rank saves. They pass no other rank."""
    actors = [worker for worker in workers.values() if isinstance(worker, ActorWorker)]
    tensors = {name: rows for worker in actors for name, rows in worker.rollout_state().items()}
    shards = {name: whole_shard(name, tuple(x.shape)) for name, x in tensors.items()}
    return {ROWS_IN_FLIGHT: RoleState(shards, tensors)} if tensors else {}


def load_rows_in_flight(directory: Path, workers: Mapping[str, ModelWorker]) -> None:
    """Let every replica read all rows in flight and keep its own. Raises CheckpointError."""
    manifest = read_manifest(directory)
    if ROWS_IN_FLIGHT not in manifest.roles:
        return
    saved = manifest.pieces_of(ROWS_IN_FLIGHT, PARAM)
    for worker in workers.values():
        if isinstance(worker, ActorWorker):
            pieces = [piece for name, parts in saved.items() if name.startswith(f"{worker.name}.") for piece in parts]
            worker.restore_rollouts(rows for _, rows in read_pieces(directory, pieces))


def older_weights(workers: Mapping[str, ModelWorker]) -> dict[str, RoleState]:
    """Return the older weights that generation ahead of training still needs, on the ranks that hold them."""
    states: dict[str, RoleState] = {}
    for role, replica in _async_replicas(workers):
        if replica.member:
            shards = replica.engine.param_shards()
            states |= {
                older_weights_name(role, version): RoleState(shards, values)
                for version, values in replica.older_versions().items()
            }
    return states


def load_older_weights(directory: Path, workers: Mapping[str, ModelWorker]) -> None:
    """Load the older weights that generation ahead of training still needs.

    Collective over the world: every rank of it must call, in program order. Raises CheckpointError.
    """
    for role, replica in _async_replicas(workers):
        versions = replica.context.controller.versions
        for version in sorted(versions.needed_later(role) - {versions.newest(role)}):
            values = replica.allocate_version(version)
            if replica.member:
                state = RoleState(replica.engine.param_shards(), values)
                load_checkpoint(directory, older_weights_name(role, version), state, replica.mesh.pool)


def _async_replicas(workers: Mapping[str, ModelWorker]) -> Iterator[tuple[str, AsyncWeightReplica]]:
    for role, worker in workers.items():
        generating = worker.worker_of("generate_sequences")
        if isinstance(generating, ModelWorker) and isinstance(generating.weights, AsyncWeightReplica):
            yield role, generating.weights


def older_weights_name(role: str, version: int) -> str:
    """Return the name that an older version of a role's weights has in a checkpoint."""
    return f"{role}_at_version_{version}"


def check_state(manifest: Manifest) -> None:
    """Raise CheckpointError for a state that ``Checkpoints`` does not save, as after an edit."""
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
    """Raise CheckpointError if the body cannot read the state of the checkpoint ``path``."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its state is not what a run saves ({type(error).__name__}: {error})") from error
