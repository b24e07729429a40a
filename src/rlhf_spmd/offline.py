"""What ``generate`` and ``score`` share: a model directory and a jsonl file in, a jsonl file out, one command line."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.parallel.program import ProgramContext, ProgramSettings, run_program
from rlhf_spmd.parallel.world import Launch, World, read_launch
from rlhf_spmd.workers.config import RoleConfig


@dataclass(frozen=True)
class ModelConfig:
    """``path``: a Hugging Face directory. ``dtype`` auto: bfloat16 on GPUs, float32 on CPUs. ``attention``: as a role's."""

    path: str
    dtype: str = "auto"
    attention: str = "auto"

    def check(self, where: str) -> None:
        RoleConfig(dtype=self.dtype, attention=self.attention).check(where)

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        return RoleConfig(dtype=self.dtype).torch_dtype(device)


def check_out(out: Path, source: Path) -> None:
    """Make the directory of ``out`` and see that a file can be put there: before hours of work, not after. Raises ValueError."""
    try:
        if out.exists() and not out.is_file():
            raise ValueError(f"out={out} is {'a directory' if out.is_dir() else 'not a regular file'}; name a file")
        if out.exists() and source.exists() and out.samefile(source):
            raise ValueError(f"out={out} is the input, data.path={source}; name another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"out={out}: cannot write in {out.parent}: {error.strerror or error}") from error


def run_offline_program(
    name: str,
    description: str | None,
    prepare: Callable[[str | None, Sequence[str], Launch], Any],
    work: Callable[[Any, World, Callable[[], None]], None],
    argv: Sequence[str] | None,
) -> None:
    """The command line: ``prepare(config file, overrides, launch)``, then ``work(prepared, world, tick)`` on all ranks."""
    parser = argparse.ArgumentParser(prog=f"rlhf_spmd.{name}", description=description)
    parser.add_argument("--config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys: model.path=DIR data.path=IN out=OUT")
    arguments = parser.parse_intermixed_args(argv)

    def body(context: ProgramContext[Any]) -> None:
        work(context.prepared, context.world, context.board.tick)

    run_program(
        lambda: prepare(arguments.config, arguments.overrides, read_launch()),
        body,
        lambda ready: ProgramSettings(timeout_s=ready.config.timeout_s),
    )
