"""What ``generate``, ``evaluate`` and ``score`` share: a model directory and rows in, a jsonl file out, one command line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_spmd.checkpoint.adapters import find_adapters
from rlhf_spmd.checkpoint.directory import COMMIT, committed, named_checkpoint, read_manifest
from rlhf_spmd.checkpoint.load import load_checkpoint
from rlhf_spmd.checkpoint.manifest import DTYPES
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.bounds import SECONDS, check_bounds
from rlhf_spmd.config.keys import Key, list_keys
from rlhf_spmd.config.load import check_tree, load, resolved_key
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.dataset import RowsConfig
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec, read_spec
from rlhf_spmd.models.weights import check_pretrained
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.world import MOST_THREADS, Launch, World
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.program import ProgramSettings, run_program
from rlhf_spmd.process.rank_consistency import file_digests, text_digest, weights_digest
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE, EXPORT_DIR, atomic_write_text, exported_checkpoint
from rlhf_spmd.workers.config import ComputeConfig

ROLE = "actor"  # of a run's checkpoints: the role that generates


@dataclass(frozen=True)
class ModelConfig(ComputeConfig):
    """``model``.

    - path: Hugging Face directory, a run's directory (its newest checkpoint, read from its export where that is of it) or one of
      its checkpoints
    """

    path: str = field(kw_only=True)


@dataclass(frozen=True)
class LoadedConfig:
    """A model that is read and not trained.

    - timeout_s: the longest that one rank may keep the others waiting
    - threads: threads of a rank on CPUs
    """

    model: ModelConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    timeout_s: float = 3600.0
    threads: int = 1

    def check(self, where: str) -> None:
        check_bounds(self, where, "timeout_s", **SECONDS)
        check_bounds(self, where, "threads", least=1, most=MOST_THREADS)


@dataclass(frozen=True)
class InferenceConfig(LoadedConfig):
    """What ``generate``, ``evaluate`` and ``score`` all take.

    - out: jsonl file to write
    """

    out: str = field(kw_only=True)
    data: RowsConfig = field(default_factory=RowsConfig)


@dataclass(frozen=True)
class LoadedModel:
    """What is known of it before there are ranks, checked. ``config`` has ``model``. ``checkpoint``: where the weights are, if not in
    the model's directory."""

    config: Any
    spec: ModelSpec
    layout: Layout
    checkpoint: Path | None
    tokenizer: Any

    @property
    def alike(self) -> dict[str, str]:
        """See :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        sources = read_first(self.config.model.path, self.checkpoint), self.checkpoint
        return {"set of weights": str([weights_digest(Path(source)) for source in sources if source is not None])}


Config = TypeVar("Config", bound=LoadedConfig)


def read_config(schema: type[Config], path: str | None, overrides: Sequence[str]) -> Config:
    """Raises ConfigError, one line."""
    config = load(schema, path, overrides)
    check_tree(config)
    return config


def find_weights(path: str) -> tuple[str, Path | None]:
    """The directory with the model's configuration and tokenizer, and the checkpoint with its weights where they are not there.

    ``path``: a Hugging Face directory; a run's directory, which stands for its newest checkpoint (read from its export where that
    is of it, or there is no checkpoint); or one of its checkpoints. Raises ValueError for a checkpoint whose run does not say
    what it began with.
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
    """The configuration with the model's directory in full, its architecture, the layout, and the checkpoint with its weights where
    they are not there. Local: no communication. Raises ValueError, one line."""
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
        find_adapters(checkpoint, ROLE)  # needs what it needs before there are ranks
    return config, spec, layout, checkpoint


def read_first(directory: str, checkpoint: Path | None) -> str | None:
    """The directory whose weights :func:`take_checkpoint` adds to; None where the checkpoint has all of them."""
    return directory if checkpoint is None or find_adapters(checkpoint, ROLE) is not None else None


def take_checkpoint(spec: ModelSpec, held: RoleState, directory: str, checkpoint: Path | None, world: World) -> None:
    """What the checkpoint, if there is one, has of the weights that this rank holds, in their dtype; of adapters their sum with
    the weights of ``directory``, which are there.

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
    beside = frozenset([spec.names.second_head])  # of an actor that is the critic, too
    load_checkpoint(checkpoint, ROLE, RoleState(held.shards, stored), world.all, beside)
    with torch.no_grad():
        for name, value in held.tensors.items():
            value.copy_(stored.pop(name))


def check_out(out: Path, *sources: str) -> None:
    """Make the directory of ``out`` and see that a file can be put there: before hours of work, not after. Raises ValueError."""
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


def own_rows(tokens: Sequence[int], mesh: Mesh) -> list[int]:
    """Those that this rank's replica computes, by number; token counts balanced over replicas."""
    parts = partition_by_tokens(tokens, mesh.layout.dp)
    return [number for number, part in enumerate(parts.tolist()) if part == mesh.dp_rank]


def gather_records(world: World, records: Sequence[tuple[Any, Any]], label: str) -> list[tuple[Any, Any]] | None:
    """On rank 0 all ranks' (row id or place, what was made for it, as JSON) in the order of the rows; None elsewhere.

    Collective over the world: every rank of it must call, in program order.
    """
    parts = world.all.gather_json(records, label)
    return parts and sorted(((row_id, made) for part in parts for row_id, made in part), key=lambda record: record[0])


def not_finite(row: int, name: Any, model: ModelConfig) -> FloatingPointError:
    """What to raise for row number ``row``, which is called ``name`` outside."""
    return FloatingPointError(
        f"row {row} (id {name!r}) has log-probs that are not finite; check the weights in {model.path}, or set model.dtype=float32"
    )


def write_rows(out: str, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def inference_program(
    name: str,
    description: str | None,
    schema: type[LoadedConfig],
    prepare: Callable[[str | None, Sequence[str], Launch], Any],
    work: Callable[[Any, World, Board], None],
    when_told: str | None = None,
) -> tuple[Callable[..., Iterator[Key]], Callable[..., None]]:
    """``keys(overrides)`` and ``main(argv)`` of a program: ``prepare(config file, overrides, launch)``, then
    ``work(prepared, world, board)`` on all ranks. ``when_told`` to end: what it
    does then, if it looks at ``board.preempted`` itself. The command line has overrides, and ``--config FILE`` if there are many."""

    def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
        return list_keys(schema, {})

    def settings(ready: LoadedModel) -> ProgramSettings:
        config = ready.config
        files = {"model.path (its tokenizer and configuration)": text_digest(Path(config.model.path)), **file_digests(config)}
        return ProgramSettings(
            timeout_s=config.timeout_s, threads=config.threads, alike={**ready.alike, **files}, when_told=when_told or ""
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
