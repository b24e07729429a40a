"""Section ``run`` of the configuration: how long a run is, where it writes, and what it goes on from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.checkpoint.directory import checkpoints_of, named_checkpoint
from rlhf_spmd.config.constraints import NonNegativeInt, PositiveInt, Range, Seconds, Seed
from rlhf_spmd.config.interpolation import select
from rlhf_spmd.config.load import read_tree
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.parallel.device_setup import MOST_THREADS
from rlhf_spmd.telemetry import run_dir

RESUME = ("auto", "force", "never")


@dataclass(frozen=True)
class RunConfig:
    """``run``.

    - name: name of the run
    - dir: the run directory; with several nodes on a file system that all see. One job at a time may use it, see
      [clusters.md](clusters.md#one-job-per-run-directory)
    - seed: of sampling, of random weights and, unless `data.seed` is given, of the order of the data
    - steps: steps of the whole run; a resumed run goes on to this number; null: `data.epochs` says the length
    - save_freq: steps between checkpoints; 0: only at the end
    - background_save: write the checkpoints of `save_freq` while the next step runs. Needs host memory for a copy of what a rank
      writes; false: every rank waits instead. A checkpoint that is exported, or the last one, is waited for in any case
    - test_freq: steps between validations, besides one before the first step and one at the end; 0: never. Needs validation data:
      `data.val_path`, in `sft` also `val_prompts`
    - resume: `auto`: go on from the newest good checkpoint in `run.dir`, if there is one. A checkpoint of another algorithm
      (`algorithm.name`), other models (their `path`) or other data (`data.path`, or other prompts or pairs in it) is refused. `force`:
      as `auto`, and refuses none. `never`. Or a checkpoint directory. The run prints which settings have changed
    - keep_checkpoints: how many checkpoints stay, the newest ones; null: all
    - timeout_s: the longest that one rank may keep the others waiting
    - threads: threads of a rank on CPUs, see [generation.md](generation.md#kernels); not read on GPUs
    - log_samples: responses written to `rollouts.jsonl` per step
    - export: write `export/` at the end
    - export_freq: write `exports/step_N/` and a checkpoint every so many steps; 0: never. Rank 0 writes an export with one thread
      while all other ranks wait: about the time of reading and writing the weights once
    - export_merged: write the whole model of an actor with adapters, too; false: only `adapter/`
    - max_shard_size: the largest safetensors file of an export, as transformers reads it (`200MB`, `2GiB`)
    - keep_best: a metric of validation, such as `val/reward_mean`. The checkpoint of its best step stays and is exported as
      `exports/best/`. The highest value is best; the lowest for names that end in `loss`, `perplexity` or `kl`. Needs `run.test_freq`
    """

    name: str = "run"
    dir: str = "runs/${run.name}"
    seed: Seed = 0
    steps: PositiveInt | None = 100
    save_freq: NonNegativeInt = 0
    background_save: bool = True
    test_freq: NonNegativeInt = 0
    resume: str = "auto"
    keep_checkpoints: Annotated[int, Range(least=2)] | None = 2
    timeout_s: Seconds = 600.0
    threads: Annotated[int, Range(least=1, most=MOST_THREADS)] = 1
    log_samples: NonNegativeInt = 4
    export: bool = True
    export_freq: NonNegativeInt = 0
    export_merged: bool = True
    max_shard_size: str = "5GB"
    keep_best: str | None = None

    def check(self, where: str) -> None:
        from transformers.utils.hub import convert_file_size_to_int

        try:
            convert_file_size_to_int(self.max_shard_size)
        except ValueError:
            raise ValueError(
                f"{where}.max_shard_size={self.max_shard_size!r} is no size; give one such as 5GB or 200MB"
            ) from None
        if self.keep_best is not None and not self.test_freq:
            raise ValueError(
                f"{where}.keep_best={self.keep_best} is a metric of validation, and {where}.test_freq is 0; set it"
            )
        here = Path(self.dir).absolute()
        root = next(path for path in (here, *here.parents) if path.exists())
        if not (root.is_dir() and os.access(root, os.W_OK)):
            raise ValueError(f"{where}.dir={self.dir}: {root} is not a directory that this user can write to; give another one")
        if self.resume not in RESUME and not named_checkpoint(Path(self.resume)).is_dir():
            raise ValueError(f"{where}.resume={self.resume!r} is none of {', '.join(RESUME)}, and no checkpoint directory")
        if self.resume not in RESUME and checkpoints_of(Path(self.resume)).is_dir():
            newest = checkpoints_of(Path(self.resume)) / run_dir.LATEST
            raise ValueError(f"{where}.resume={self.resume} is the directory of a run; give {newest}, or one of its step_N")


def run_dir_hint(path: str | None, overrides: Sequence[str]) -> Path | None:
    """Return where exit_status.json goes when the configuration is refused, absolute, or None: ``run.dir`` of command line, file and
    defaults, as far as they can be read.
    """
    try:
        tree = read_tree(path, overrides)
        given = {key: value for key, value in (tree.get("run") or {}).items() if value is not None}
        run = {"name": RunConfig.name, "dir": RunConfig.dir, **given}
        found = select({**tree, "run": run}, "run.dir")
    except (ConfigError, OmegaConfBaseException, TypeError, ValueError):
        said = [value.removeprefix("run.dir=") for value in overrides if value.startswith("run.dir=") and "${" not in value]
        found = said[-1] if said else None
    return Path(found).absolute() if isinstance(found, str) and found else None
