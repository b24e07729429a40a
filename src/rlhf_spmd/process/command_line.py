"""The command line of all programs: a configuration file, overrides, and questions that need no run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.parallel.launch import Launch, read_launch
from rlhf_spmd.process.arguments import cache_keys, help_text, ignore_closed_pipes, read_arguments, shared_parser
from rlhf_spmd.process.exit import announce
from rlhf_spmd.process.launcher import default_num_ranks, start_ranks
from rlhf_spmd.telemetry.run_dir import EXIT_CODES


@dataclass(frozen=True)
class CommandLine:
    """The parsed command line. ``launch``: this rank's place; in a dry run, rank 0's place in the job."""

    config: str | None
    overrides: list[str]
    launch: Launch
    dry_run: bool = False


def read_command_line(
    name: str,
    description: str | None,
    keys: Callable[[Sequence[str]], Iterable[Key]],
    read: Callable[[str | None, Sequence[str]], Any],
    argv: Sequence[str] | None,
    has_ranks: bool = True,
    run_dir_of: Callable[[str | None, Sequence[str]], Path | None] = lambda config, overrides: None,
) -> CommandLine:
    """Read a program's arguments; ``argv`` None: those of this process.

    Ends the process if only help or the configuration is asked for. Started without torchrun, it starts the ranks, waits for them and
    ends with their code; it reads no configuration, which may import the user's code. ``keys`` returns the configuration's keys for
    some overrides. ``read`` returns the checked configuration of a file and overrides. ``run_dir_of`` returns where exit_status.json
    goes.
    """
    ignore_closed_pipes()
    try:
        launch = read_launch()
    except ValueError as error:  # each rank reports its own: there is nobody to agree with
        announce(f"config error: {error}")
        raise SystemExit(EXIT_CODES["config"]) from None
    parser = shared_parser(name, description)
    try:
        options, overrides = read_arguments(parser, argv)
    except ValueError as error:
        refuse(error)
    config, *more = options.config or [None]
    if more:
        refuse(f"--config {config} and --config {more[0]}: give one file, and overrides such as run.steps=20")
    if options.help or options.print_config:
        try:
            if options.help:
                all_keys = list(keys(overrides))
                text = help_text(parser, all_keys, overrides)
                cache_keys(name, description, overrides, all_keys)
            else:
                text = to_yaml(read(config, overrides))
        except ValueError as error:
            refuse(error)
        if launch.rank == 0:
            print(text.rstrip())
        raise SystemExit(0)
    number = str(default_num_ranks()) if options.nproc_per_node == "auto" else options.nproc_per_node
    if number is not None:
        if not (number.isdecimal() and int(number)):
            refuse(f"--nproc-per-node={number}: must be a whole number, at least 1")
        if launched() or not has_ranks:
            why = "torchrun has started the ranks" if has_ranks else f"{name} is one process"
            refuse(f"--nproc-per-node={number}: {why}; leave it out")
        launch = Launch(0, int(number), 0, int(number))
        if launch.size > 1 and not options.dry_run:
            arguments = [*overrides, *(["--config", config] if config else [])]
            try:
                command = [sys.executable, "-u", "-m", f"rlhf_spmd.{name}", *arguments]
                code = start_ranks(command, launch.size, run_dir_of(config, overrides))
            except ValueError as error:
                refuse(error)
            raise SystemExit(code)
    return CommandLine(config, overrides, launch, options.dry_run)


def launched() -> bool:
    """Return True if torchrun or another launcher started this process as a rank."""
    return dist.is_torchelastic_launched() or read_launch().size > 1


def refuse(why: object) -> NoReturn:
    """End like bad input: one line, from the first rank."""
    if read_launch().rank == 0:
        announce(f"config error: {why}")
    raise SystemExit(EXIT_CODES["config"])
