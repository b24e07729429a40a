"""The options that all programs share, and what ``--help`` prints; without torch."""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd.config.keys import Key
from rlhf_spmd.telemetry.run_dir import atomic_write_json, read_json

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


PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class ProgramKeys:
    """``about``: the program's description; ``default``: the algorithm where none is named, "" where there are none; ``keys``: by
    algorithm."""

    about: str
    default: str
    keys: Mapping[str, Sequence[Key]]


def load_keys(program: str) -> ProgramKeys | None:
    """None where nothing is known of the program as it is now."""
    file = _file(program)
    found = read_json(file) if file else None
    if not isinstance(found, dict) or found.get("fingerprint") != fingerprint():
        return None
    keys = {algorithm: [Key(*row) for row in rows] for algorithm, rows in found["keys"].items()}
    return ProgramKeys(found["about"], found["default"], keys)


def save_keys(program: str, known: ProgramKeys) -> None:
    """Where nothing can be written, nothing is remembered."""
    keys: dict[str, Any] = {algorithm: list(map(astuple, its)) for algorithm, its in known.keys.items()}
    file = _file(program)
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(file, {"fingerprint": fingerprint(), "about": known.about, "default": known.default, "keys": keys})


def fingerprint() -> str:
    """A hash of Python's version and of the paths, sizes and times of the package's files."""
    files = sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")))
    facts = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.sha256(repr((sys.version, facts)).encode()).hexdigest()


def _file(program: str) -> Path | None:
    """None for a user who has no home, as some containers' have."""
    try:
        return Path("~/.cache/rlhf_spmd/keys").expanduser() / f"{program}.json"
    except RuntimeError:
        return None


class _Pipe(io.FileIO):
    """What is written after the reader has gone goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def ignore_closed_pipes() -> None:
    """From now on nothing fails because nobody reads standard output or standard error any more: ``| head`` ends no run, and makes no
    traceback. May be called again; streams that somebody else has put there are left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)
        if type(stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer) is io.FileIO:
            stream.flush()
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            given: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
            given |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(pipe) if is_buffered else pipe, **given))
