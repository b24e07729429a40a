"""Jobs on a model that is not trained: where its weights are read, what a job has finished, and its command line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch

from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.directory import COMMIT, committed, named_checkpoint, read_manifest
from rlhf_spmd.checkpoint.load import load_checkpoint
from rlhf_spmd.checkpoint.manifest import DTYPES
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.constraints import Range, Seconds
from rlhf_spmd.config.keys import Key, list_keys
from rlhf_spmd.config.load import check_tree, load, resolved_key
from rlhf_spmd.data.dataset import RowsConfig
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec, read_spec
from rlhf_spmd.models.weights import check_pretrained
from rlhf_spmd.parallel.device_setup import MOST_THREADS
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.program import ProgramSettings, run_program
from rlhf_spmd.process.startup_checks import file_digests, text_digest, weights_digest
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE, EXPORT_DIR, atomic_write_text, exported_checkpoint, writing
from rlhf_spmd.workers.config import ComputeConfig

ROLE = "actor"  # the role whose weights are read from a run's checkpoints


@dataclass(frozen=True)
class ModelConfig(ComputeConfig):
    """``model``.

    - path: Hugging Face directory, a run's directory (its newest checkpoint, read from the export of that if there is one) or one
      of its checkpoints
    """

    path: str = field(kw_only=True)


@dataclass(frozen=True)
class LoadedConfig:
    """A model that is not trained.

    - timeout_s: seconds for which one rank may keep the others waiting
    - threads: threads of a rank on CPUs
    """

    model: ModelConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    timeout_s: Seconds = 3600.0
    threads: Annotated[int, Range(least=1, most=MOST_THREADS)] = 1


@dataclass(frozen=True)
class InferenceConfig(LoadedConfig):
    """The common configuration of ``generate``, ``evaluate`` and ``score``.

    - out: jsonl file to write
    """

    out: str = field(kw_only=True)
    data: RowsConfig = field(default_factory=RowsConfig)


@dataclass(frozen=True)
class LoadedModel:
    """What is known of a model before the ranks meet, checked.

    ``config`` has ``model``. ``checkpoint``: where the weights are, if not in the model's directory.
    """

    config: Any
    spec: ModelSpec
    layout: Layout
    checkpoint: Path | None
    tokenizer: Any

    @property
    def alike(self) -> dict[str, str]:
        """What must be the same on all ranks, see :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        sources = base_directory(self.config.model.path, self.checkpoint), self.checkpoint
        return {"set of weights": str([weights_digest(Path(source)) for source in sources if source is not None])}


Config = TypeVar("Config", bound=LoadedConfig)


def read_config(schema: type[Config], path: str | None, overrides: Sequence[str]) -> Config:
    """Raises ConfigError, one line."""
    config = load(schema, path, overrides)
    check_tree(config)
    return config


def find_weights(path: str) -> tuple[str, Path | None]:
    """The directory with the model's configuration and tokenizer, and the checkpoint with its weights, if they are elsewhere.

    ``path`` is a Hugging Face directory, a run's directory, or one of its checkpoints. A run's directory stands for its newest
    checkpoint. The run's export is read instead if it was made from that checkpoint, or if there is none. Raises ValueError for a
    checkpoint whose run does not name the model that it started from.
    """
    here = named_checkpoint(Path(path))
    whole = committed(here)
    exported = (here / EXPORT_DIR / "config.json").is_file() and (here / CONFIG_FILE).is_file()
    if exported and (not whole or exported_checkpoint(here) == whole[0].path.name):
        return str(here / EXPORT_DIR), None
    checkpoint = here if (here / COMMIT).is_file() else whole[0].path if whole else None
    if (here / "config.json").is_file() or checkpoint is None:
        return path, None
    written = checkpoint.parent.parent / CONFIG_FILE
    key = f"models.{ROLE}.path"
    model = resolved_key(written, key) if written.exists() else None
    if model is None:
        raise ValueError(f"model.path={path} is a checkpoint, and {written} does not name {key}, whose tokenizer it needs")
    return model, checkpoint


def read_weights(config: Config, launch: Launch) -> tuple[Config, ModelSpec, Layout, Path | None]:
    """The configuration with the model's directory in full, the model's architecture, the layout, and the checkpoint or None.

    The checkpoint has the weights if they are not in the model's directory. Local: no communication. Raises ValueError, one line.
    """
    given = Path(config.model.path)
    directory, checkpoint = find_weights(config.model.path)
    if launch.rank == 0 and (given / CONFIG_FILE).is_file():
        of = (checkpoint.name if checkpoint else exported_checkpoint(given)) or "an unknown checkpoint"
        print(f"model.path={given}: the weights of {of}, from {checkpoint or directory}", file=sys.stderr)
    config = replace(config, model=replace(config.model, path=local_directory(directory, "model.path")))
    spec = read_spec(config.model.path)
    layout = resolve_layout(config.layout, launch.size, "layout on all ranks")
    check_layout(spec, layout.pp, layout.tp, "layout", layout.vpp)
    if checkpoint is None:
        check_pretrained(spec, config.model.path, "lm")
    else:
        find_adapters(checkpoint, ROLE)  # raises now what it would raise on every rank
    return config, spec, layout, checkpoint


def base_directory(directory: str, checkpoint: Path | None) -> str | None:
    """The directory whose weights are loaded before :func:`load_from_checkpoint`; None if the checkpoint has all of them."""
    return directory if checkpoint is None or find_adapters(checkpoint, ROLE) is not None else None


def load_from_checkpoint(spec: ModelSpec, held: RoleState, directory: str, checkpoint: Path | None, world: World) -> None:
    """Load the checkpoint, if there is one, into the weights that this rank holds, in their dtype.

    Adapters are added to the weights of ``directory``, which were loaded before.
    Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError.
    """
    if checkpoint is None:
        return
    adapters = find_adapters(checkpoint, ROLE)
    if adapters is not None:
        adapters.add_to(spec, held, Path(directory))
        return
    dtype = DTYPES[read_manifest(checkpoint).dtype_of(ROLE)]
    stored = {name: torch.empty(value.shape, dtype=dtype) for name, value in held.tensors.items()}
    beside = frozenset([spec.names.second_head])  # an actor that is also the critic has one
    load_checkpoint(checkpoint, ROLE, RoleState(held.shards, stored), world.all, beside)
    with torch.no_grad():
        for name, value in held.tensors.items():
            value.copy_(stored.pop(name))


def check_out(out: Path, *sources: str) -> None:
    """Make the directory of ``out`` and check that a file can be written there, before hours of work. Raises ValueError."""
    try:
        if out.exists() and not out.is_file():
            raise ValueError(f"out={out} is {'a directory' if out.is_dir() else 'not a regular file'}; name a file")
        for source in sources:
            if out.exists() and os.path.exists(source) and out.samefile(source):
                raise ValueError(f"out={out} is the input, data.path={source}; name another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"out={out}: cannot write in {out.parent}: {error.strerror or error}") from error


def not_finite(row: int, name: Any, model: ModelConfig) -> FloatingPointError:
    """The error to raise for row number ``row``, which the input calls ``name``."""
    return FloatingPointError(
        f"row {row} (id {name!r}) has log-probs that are not finite; check the weights in {model.path}, or set model.dtype=float32"
    )


def write_rows(out: str, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def other_job(out: str, what: str) -> ValueError:
    """The error to raise if ``out`` has results of another job."""
    return ValueError(
        f"out={out}: {what} of a job with another model, other prompts or other settings; remove it, or give another out"
    )


class Journal:
    """The finished rows of a job on disk, from which a job that was killed goes on.

    Each rank that answers for rows writes a file of lines [set, row id, row]. A line that a kill cut off does not count. Raises
    ValueError for the rows of another job, if ``checks``, which only the first rank does.
    """

    def __init__(self, directory: Path, job: str, out: str, checks: bool) -> None:
        self.directory, self.job = directory, job
        self._file: Any = None
        for path in sorted(directory.glob("*.jsonl")) if checks else ():
            with path.open(encoding="utf-8", errors="replace") as lines:
                first = lines.readline()
            if first.endswith("\n") and first.rstrip("\n") != json.dumps(job):
                raise other_job(out, f"{directory} holds rows")

    def read(self, places: Collection[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
        """The rows that earlier starts of the job have finished, of those at ``places``: (set, row id)."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for path in sorted(self.directory.glob("*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                lines.readline()
                for line in lines:
                    if line.endswith("\n"):
                        number, row_id, row = json.loads(line)
                        if (number, row_id) in places:
                            found[number, row_id] = row
        return found

    def append(self, records: Sequence[tuple[tuple[int, int], Any]]) -> None:
        """Write and flush ``records``, which survive a kill of this process. Raises WriteError."""
        with writing(self.directory):
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                path = self.directory / f"{time.time_ns()}-{os.getpid()}.jsonl"
                self._file = path.open("x", encoding="utf-8", errors="replace")
                self._file.write(json.dumps(self.job) + "\n")
            self._file.writelines(json.dumps([*place, row]) + "\n" for place, row in records)
            self._file.flush()

    def remove(self) -> None:
        """Delete the files, when the results are in place and no rank writes any more."""
        for path in self.directory.glob("*.jsonl"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there was no directory
            self.directory.rmdir()


def inference_program(
    name: str,
    description: str | None,
    schema: type[LoadedConfig],
    prepare: Callable[[str | None, Sequence[str], Launch], Any],
    work: Callable[[Any, World, Board], None],
    when_told: str | None = None,
) -> tuple[Callable[..., Iterator[Key]], Callable[..., None]]:
    """The functions ``keys(overrides)`` and ``main(argv)`` of a program.

    ``main`` calls ``prepare(config file, overrides, launch)``, then ``work(prepared, world, board)`` on all ranks.
    ``when_told``: what the program does when it is told to end, if it reads ``board.preempted`` itself. The command line has
    overrides, and ``--config FILE`` if there are many.
    """

    def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
        return list_keys(schema, {})

    def settings(ready: LoadedModel) -> ProgramSettings:
        config = ready.config
        files = {"model.path (its tokenizer and configuration)": text_digest(Path(config.model.path)), **file_digests(config)}
        return ProgramSettings(
            timeout_s=config.timeout_s, threads=config.threads, must_match={**ready.alike, **files}, when_told=when_told or ""
        )

    def main(argv: Sequence[str] | None = None) -> None:
        command = read_command_line(name, description, keys, partial(read_config, schema), argv)
        run_program(
            lambda: prepare(command.config, command.overrides, command.launch),
            lambda context: work(context.prepared, context.world, context.board),
            settings,
            saves_on_signal=when_told is not None,
            dry_run=(
                lambda ready: f"{name}: good for {command.launch.size} rank{'s' * (command.launch.size > 1)}, {ready.layout}"
            )
            if command.dry_run
            else None,
        )

    return keys, main
