"""Training, from configuration to export. After ``scripts/quickstart.sh``, which makes data and a model:

rlhf-spmd train --nproc-per-node 2 --config configs/quickstart_ppo.yaml run.dir=runs/mine sampling.n=8
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlhf_spmd.config.keys import Key, list_keys
from rlhf_spmd.config.registry import find, located
from rlhf_spmd.kernels import processor_kind
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.preflight.roles import build_models
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.input_digests import run_digests
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program
from rlhf_spmd.training.banner import describe, describe_roles
from rlhf_spmd.training.job import TrainJob, build_context, build_data, run_script
from rlhf_spmd.training.run_config import run_dir_hint
from rlhf_spmd.training.train_config import TrainConfig, read_config
from rlhf_spmd.training.trainer import Trainer, start_controller


def train(context: ProgramContext[TrainJob]) -> None:
    """Build the models, run all steps, export. Collective over the world: every rank of it must call."""
    job, world = context.prepared, context.world
    controller, algorithm = start_controller(context), job.config.algorithm
    settings = build_context(job, controller, world)
    mine = torch.tensor([int(settings.exact_rollouts), processor_kind(), -processor_kind()])  # hosts may differ
    exact, least, most = world.all.all_reduce(mine, "exact_rollouts", "min").tolist()
    models = build_models(job.plans, replace(settings, exact_rollouts=exact == 1 and least == -most))
    data = build_data(job, controller)
    trainer = Trainer(context, models, data)
    if trainer.is_first:
        print(describe(job, world), file=sys.stderr)

    def validate(global_step: int) -> dict[str, float]:
        with located("algorithm", algorithm.name, job.algorithm):
            found: dict[str, float] = job.algorithm.validate(models, data, algorithm, global_step)
        return found

    trainer.run(partial(run_script, job, models, data), validate)


def keys(overrides: Sequence[str] = (), default: str = "ppo", more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Key]:
    """Yield every key of the configuration, with those of the algorithm that the overrides name, else of ``default``.

    ``more``: see :func:`read_config`. Raises ValueError.
    """
    given = [value.removeprefix("algorithm.name=") for value in overrides if value.startswith("algorithm.name=")]
    algorithm = find("algorithm", "rlhf_spmd.algorithms", (given or [default])[-1], exports="step").Config
    return list_keys(TrainConfig, {"algorithm": algorithm, **{s.key: s.config for s in algorithm.streams.values()}, **more})


def main(argv: Sequence[str] | None = None, name: str = "train", about: str | None = __doc__, default: str = "ppo") -> None:
    """The command line: ``--config FILE`` and overrides such as ``sampling.n=4``. ``default``: the algorithm where none is named."""
    command = read_command_line(
        name, about, partial(keys, default=default), lambda a, b: read_config(a, b, default)[0], argv, run_dir_of=run_dir_hint
    )
    path, overrides, launch = command.config, command.overrides, command.launch
    run_program(
        lambda: prepare(path, overrides, launch.size, default, launch.local_size, launch),
        train,
        settings_of,
        run_dir_hint(path, overrides),
        saves_on_signal=True,
        dry_run=(lambda job: describe_roles(job, launch)) if command.dry_run else None,
    )


def settings_of(job: TrainJob) -> ProgramSettings:
    """How the process boundary treats the run: its directory, its time limit, its threads, what all ranks must have alike."""
    run, apart = job.config.run, 1 + job.config.placement.max_staleness
    return ProgramSettings(
        Path(run.dir), run.timeout_s, run.threads, collective_timeout_factor=apart, must_match=run_digests(job)
    )


if __name__ == "__main__":
    main()
