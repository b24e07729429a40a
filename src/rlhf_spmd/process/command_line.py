"""The command line of all programs: a configuration file, overrides, and options such as ``--help`` that start no run."""

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
    """The parsed command line.

    - config: the configuration file, None without one
    - launch: this rank's place in the job; in a dry run, that of rank 0
    """

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
    """Return a program's arguments. End the process if they ask for help, for the configuration, or for several ranks.

    For several ranks, start them, wait for them and end with their code, without reading the configuration, which may import the
    user's code.

    - name, description: of the program, for its help
    - keys: returns the configuration's keys for some overrides
    - read: returns the checked configuration of a file and overrides
    - argv: the arguments; None: those of this process
    - has_ranks: False for a program of one process
    - run_dir_of: returns where exit_status.json goes, for a file and overrides
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
    config, *other_files = options.config or [None]
    if other_files:
        refuse(f"--config {config} and --config {other_files[0]}: give one file, and overrides such as run.steps=20")
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
    num_ranks = str(default_num_ranks()) if options.nproc_per_node == "auto" else options.nproc_per_node
    if num_ranks is not None:
        if not (num_ranks.isdecimal() and int(num_ranks)):
            refuse(f"--nproc-per-node={num_ranks}: must be a whole number, at least 1")
        if is_launched() or not has_ranks:
            why = "torchrun has started the ranks" if has_ranks else f"{name} is one process"
            refuse(f"--nproc-per-node={num_ranks}: {why}; leave it out")
        launch = Launch(0, int(num_ranks), 0, int(num_ranks))
        if launch.size > 1 and not options.dry_run:
            arguments = [*overrides, *(["--config", config] if config else [])]
            try:
                command = [sys.executable, "-u", "-m", f"rlhf_spmd.{name}", *arguments]
                code = start_ranks(command, launch.size, run_dir_of(config, overrides))
            except ValueError as error:
                refuse(error)
            raise SystemExit(code)
    return CommandLine(config, overrides, launch, options.dry_run)


def is_launched() -> bool:
    """Return True if torchrun or another launcher started this process as a rank."""
    return dist.is_torchelastic_launched() or read_launch().size > 1


def refuse(why: object) -> NoReturn:
    """End this process like bad input: the first rank prints one line."""
    if read_launch().rank == 0:
        announce(f"config error: {why}")
    raise SystemExit(EXIT_CODES["config"])
