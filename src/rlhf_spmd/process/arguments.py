"""The options of all programs and their help; without torch.

A program's keys are dataclasses beside its code, which imports torch: that takes two seconds by itself. So ``--help`` caches them in
``~/.cache/rlhf_spmd/keys`` with a fingerprint of this package's files; any change makes the cache unknown.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd.config.keys import Key, SectionRefusal, help_lines
from rlhf_spmd.telemetry.run_dir import UNWRITTEN, atomic_write_json, read_json

RANKS = ("--nproc-per-node", "--nproc_per_node")  # torchrun accepts both


class Parser(argparse.ArgumentParser):
    """Reads the command line of the program ``name``. Raises ValueError, one line, for what it cannot read."""

    def __init__(self, name: str, description: str | None, add_help: bool = True) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(f"rlhf-spmd {name}", None, description, formatter_class=layout, add_help=add_help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def shared_parser(name: str, description: str | None) -> Parser:
    """Return the parser of a program with a configuration."""
    parser = Parser(name, description, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="print this and end; with a WORD: the keys that contain it")
    parser.add_argument("--config", metavar="FILE", action="append", help="YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML and end")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, models, data and memory, start nothing")
    ranks = "ranks to start on this machine; default, and auto: its GPUs, or 1. Not under torchrun"
    parser.add_argument(*RANKS, metavar="N", help=ranks)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of the configuration, listed below")
    return parser


def read_arguments(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the overrides. Unknown words count as overrides, which are refused once for all ranks.

    Raises ValueError.
    """
    options, unknown = parser.parse_known_intermixed_args(argv)
    return options, unknown + options.overrides


def read_config_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the configuration file and the overrides of a command line. Raises ValueError."""
    options, overrides = read_arguments(shared_parser("", None), arguments)
    return (options.config or [None])[0], overrides


def help_text(parser: Parser, keys: Iterable[Key], arguments: Sequence[str]) -> str:
    """Return what ``--help`` prints: everything, or only the keys whose names contain a word of ``arguments``.

    Raises ValueError if no key does.
    """
    width = min(shutil.get_terminal_size((120, 0)).columns, 120)
    words = [word for word in arguments if "=" not in word]
    if not words:
        return "\n".join([parser.format_help(), "keys, their defaults and types:", *help_lines(keys, width)])
    lines = list(help_lines((key for key in keys if any(word in key.name for word in words)), width))
    if not lines:
        raise ValueError(f"--help {' '.join(words)}: no key contains that; {parser.prog} --help lists all")
    return "\n".join(lines)


PACKAGE = Path(__file__).parents[1]


def cached_help(program: str, arguments: Sequence[str]) -> str | None:
    """Return what ``--help`` prints, from the cache; None without ``--help``, or if the cache does not have it.

    Return None on ranks of a job, too: there the program's first rank prints for all.
    """
    is_help = {"-h", "--help"} & {*arguments} and not {"RANK", "WORLD_SIZE"} & {*os.environ}
    if not is_help or list(arguments[:1]) == ["profile"]:
        return None
    with suppress(OSError, RuntimeError, ValueError):  # the program itself says what is wrong
        words = [word for word in arguments if (program, word) != ("plan", "--json")]  # plan's only option of its own
        _, overrides = read_arguments(shared_parser(program, None), words)
        cache = read_json(_cache_file(program, overrides))
        if isinstance(cache, dict) and cache.get("fingerprint") == fingerprint():
            keys = [
                Key(name, default, kind, text, tuple(SectionRefusal(*refusal) for refusal in refusals))
                for name, default, kind, text, refusals in cache["keys"]
            ]
            return help_text(shared_parser(program, cache["about"]), keys, overrides)
    return None


def cache_keys(program: str, about: str | None, overrides: Sequence[str], keys: Sequence[Key]) -> None:
    """Cache what ``--help`` prints, if the cache can be written."""
    with suppress(OSError, RuntimeError):  # a user without a home, as in some containers
        file = _cache_file(program, overrides)
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(file, {"fingerprint": fingerprint(), "about": about, "keys": list(map(astuple, keys))})


def _cache_file(program: str, overrides: Sequence[str]) -> Path:
    """Return the cache of a program's keys with the algorithm that the overrides name. Raises RuntimeError if there is none."""
    algorithms = [value.removeprefix("algorithm.name=") for value in overrides if value.startswith("algorithm.name=")]
    name = (algorithms or ["usual"])[-1]
    if not name.isidentifier():
        raise RuntimeError("keys of the user's own modules are not cached")
    return Path("~/.cache/rlhf_spmd/keys").expanduser() / f"{program}-{name}.json"


def fingerprint() -> str:
    """Return a hash of Python's version and of the paths, sizes and times of the package's files."""
    files = sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")))
    facts = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.sha256(repr((sys.version, facts)).encode()).hexdigest()


class _Pipe(io.FileIO):
    """Discards what is written after the reader has gone.

    - is_log: discard and count what cannot be written, too, as on a full disk
    """

    is_log = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except OSError:
            if not self.is_log:
                raise
            UNWRITTEN["standard error"] += bytes(data).count(b"\n")
        return memoryview(data).nbytes


def ignore_closed_pipes() -> None:
    """Let output raise nothing after its reader has gone: ``| head`` ends no run with a traceback.

    Nor does a full disk behind standard error. May be called again; streams that other code has installed are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)
        if type(stream.buffer.raw if is_buffered else stream.buffer) is io.FileIO:
            stream.flush()
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            pipe.is_log = name == "stderr"
            options: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
            options |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(pipe) if is_buffered else pipe, **options))
