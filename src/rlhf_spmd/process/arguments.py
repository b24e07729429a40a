"""The options that all programs share, and what ``--help`` prints; without torch."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Sequence
from typing import NoReturn

from rlhf_spmd.config.keys import Key

RANKS = ("--nproc-per-node", "--nproc_per_node")  # torchrun has both


class Parser(argparse.ArgumentParser):
    """Reads the command line of the program ``name``. Raises ValueError, one line, for what it cannot read."""

    def __init__(self, name: str, description: str | None, add_help: bool = True) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(f"rlhf-spmd {name}", None, description, formatter_class=layout, add_help=add_help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def shared_parser(name: str, description: str | None) -> Parser:
    """Of programs with a configuration."""
    parser = Parser(name, description, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="print this and end")
    parser.add_argument("--config", metavar="FILE", action="append", help="YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML and end")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, models, data and memory, start nothing")
    ranks = "ranks to start on this machine; default, and auto: its GPUs, or 1. Not under torchrun"
    parser.add_argument(*RANKS, metavar="N", help=ranks)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of the configuration, listed below")
    return parser


def read_arguments(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides: what is unknown is one of them, to be refused as such once for all ranks. Raises ValueError."""
    given, unknown = parser.parse_known_intermixed_args(argv)
    return given, unknown + given.overrides


def read_words(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file and the overrides of a command line. Raises ValueError."""
    given, overrides = read_arguments(shared_parser("", None), arguments)
    return (given.config or [None])[0], overrides


def help_text(parser: Parser, keys: Iterable[Key]) -> str:
    """What ``--help`` prints."""
    width = min(shutil.get_terminal_size((120, 0)).columns, 120)
    return "\n".join([parser.format_help(), "keys, their defaults and types:", *(key.lines(width) for key in keys)])
