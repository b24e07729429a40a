"""The command line and the process boundary that ``generate``, ``evaluate``, ``score`` and ``serve`` share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_spmd.config.keys import Key, list_keys
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.data.dataset import RowsConfig
from rlhf_spmd.environments.libraries import with_library
from rlhf_spmd.inference.loaded_model import CheckedModel, Config, ModelSourceConfig
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.input_digests import file_digests, text_digest
from rlhf_spmd.process.program import ProgramSettings, run_program


@dataclass(frozen=True)
class InferenceConfig(ModelSourceConfig):
    """The common configuration of ``generate``, ``evaluate`` and ``score``.

    - out: jsonl file to write
    """

    out: str = field(kw_only=True)
    data: RowsConfig = field(default_factory=RowsConfig)


def read_config(schema: type[Config], path: str | None, overrides: Sequence[str]) -> Config:
    """Return the checked configuration. Raises ConfigError, one line."""
    config = load(schema, path, overrides)
    config = with_library(config) if hasattr(config, "environment") else config
    check_tree(config)
    return config


def say_warnings(launch: Launch, lines: Iterable[str]) -> None:
    """Print warnings about the settings, once for all ranks."""
    for line in lines if launch.rank == 0 else ():
        print(f"warning: {line}", file=sys.stderr)


def inference_program(
    name: str,
    description: str | None,
    schema: type[ModelSourceConfig],
    prepare: Callable[[str | None, Sequence[str], Launch], Any],
    work: Callable[[Any, World, Board], None],
    interrupt_notice: str = "",
) -> tuple[Callable[..., Iterator[Key]], Callable[..., None]]:
    """Return the functions ``keys(overrides)`` and ``main(argv)`` of a program.

    ``main`` calls ``prepare(config file, overrides, launch)``, then ``work(prepared, world, board)`` on all ranks.
    ``interrupt_notice``: for a program that reads ``board.preempted`` itself, a line about what it does when a signal ends it.
    """

    def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
        return list_keys(schema, {})

    def settings(loaded: CheckedModel[ModelSourceConfig]) -> ProgramSettings:
        config = loaded.config
        files = {"model.path (its tokenizer and configuration)": text_digest(Path(config.model.path)), **file_digests(config)}
        must_match = {**loaded.must_match, **files}
        return ProgramSettings(
            timeout_s=config.timeout_s, threads=config.threads, must_match=must_match, interrupt_notice=interrupt_notice
        )

    def dry_run_line(loaded: CheckedModel[ModelSourceConfig], num_ranks: int) -> str:
        return f"{name}: good for {num_ranks} rank{'s' * (num_ranks > 1)}, {loaded.layout}"

    def main(argv: Sequence[str] | None = None) -> None:
        command = read_command_line(name, description, keys, partial(read_config, schema), argv)
        run_program(
            lambda: prepare(command.config, command.overrides, command.launch),
            lambda context: work(context.prepared, context.world, context.board),
            settings,
            saves_on_signal=bool(interrupt_notice),
            dry_run=partial(dry_run_line, num_ranks=command.launch.size) if command.dry_run else None,
        )

    return keys, main
