"""The command line that all programs share: a configuration file, overrides, and questions that are answered without a run."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.parallel.board import announce
from rlhf_spmd.parallel.launcher import start_ranks, usual_number
from rlhf_spmd.parallel.output import let_readers_go
from rlhf_spmd.parallel.world import Launch, read_launch
from rlhf_spmd.telemetry.run_dir import EXIT_CODES

RANKS = ("--nproc-per-node", "--nproc_per_node")  # torchrun has both


class Parser(argparse.ArgumentParser):
    """Of the program ``name``: what it cannot read is refused in one line."""

    def __init__(self, name: str, description: str | None, add_help: bool = True) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(f"rlhf-spmd {name}", None, description, formatter_class=layout, add_help=add_help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        refuse(message)


@dataclass(frozen=True)
class CommandLine:
    """``launch``: the place of this rank; of a dry run, which is alone, that of rank 0 in the job it is about."""

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
) -> CommandLine:
    """What a program is called with; None: this process's own arguments. Ends the process with what is only asked, or where it has
    started the program's ranks and they have ended.

    ``keys``: of the configuration, given the overrides. ``read``: the checked configuration of a file and overrides.
    """
    let_readers_go()
    parser = _parser(name, description)
    # what is unknown is refused as an override, once for all ranks
    given, unknown = parser.parse_known_intermixed_args(argv)
    try:
        overrides, launch = unknown + given.overrides, read_launch()
    except ValueError as error:  # each rank's own: there is nobody to agree with
        announce(f"config error: {error}")
        raise SystemExit(EXIT_CODES["config"]) from None
    config, *more = given.config or [None]
    if more:
        refuse(f"--config {config} and --config {more[0]}: give one file, and overrides such as run.steps=20")
    if given.help or given.print_config:
        try:
            text = _help(parser, keys(overrides)) if given.help else to_yaml(read(config, overrides))
        except ValueError as error:
            refuse(error)
        if launch.rank == 0:
            print(text.rstrip())
        raise SystemExit(0)
    number = str(usual_number()) if given.nproc_per_node == "auto" else given.nproc_per_node
    if number is not None:
        if not (number.isdecimal() and int(number)):
            refuse(f"--nproc-per-node={number}: must be a whole number, at least 1")
        if launched() or not has_ranks:
            why = "torchrun has started the ranks" if has_ranks else f"{name} is one process"
            refuse(f"--nproc-per-node={number}: {why}; leave it out")
        launch = Launch(0, int(number), 0, int(number))
        if launch.size > 1 and not given.dry_run:
            arguments = [*overrides, *(["--config", config] if config else [])]
            try:
                read(config, overrides)  # most mistakes, before any rank is started
                code = start_ranks([sys.executable, "-u", "-m", f"rlhf_spmd.{name}", *arguments], launch.size)
            except ValueError as error:
                refuse(error)
            raise SystemExit(code)
    return CommandLine(config, overrides, launch, given.dry_run)


def read_words(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file and the overrides of a command line."""
    given, unknown = _parser("", None).parse_known_intermixed_args(arguments)
    return (given.config or [None])[0], unknown + given.overrides


def launched() -> bool:
    """Whether this process is a rank that torchrun, or another launcher, has started."""
    return dist.is_torchelastic_launched() or read_launch().size > 1


def refuse(why: object) -> NoReturn:
    """End as bad input does, with one line, from the first rank."""
    if read_launch().rank == 0:
        announce(f"config error: {why}")
    raise SystemExit(EXIT_CODES["config"])


def _parser(name: str, description: str | None) -> Parser:
    parser = Parser(name, description, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="print this and end")
    parser.add_argument("--config", metavar="FILE", action="append", help="YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML and end")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, models, data and memory, start nothing")
    ranks = "ranks to start on this machine; default, and auto: its GPUs, or 1. Not under torchrun"
    parser.add_argument(*RANKS, metavar="N", help=ranks)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of the configuration, listed below")
    return parser


def _help(parser: Parser, keys: Iterable[Key]) -> str:
    width = min(shutil.get_terminal_size((120, 0)).columns, 120)
    return "\n".join([parser.format_help(), "keys, their defaults and types:", *(key.lines(width) for key in keys)])
