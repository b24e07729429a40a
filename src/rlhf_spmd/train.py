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
from rlhf_spmd.config.registry import find
from rlhf_spmd.kernels import processor_kind
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.banner import dry_run_text, run_banner
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.input_digests import run_digests
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program
from rlhf_spmd.training.build import build_context, build_data, build_models, run_script, start_controller, validate
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig, read_config, run_dir_hint
from rlhf_spmd.training.trainer import Trainer


def train(program: ProgramContext[RunPlan]) -> None:
    """Build the models, run all steps, export. Collective over the world: every rank of it must call."""
    run_plan = program.prepared
    world = program.world
    controller = start_controller(program)
    context = replace(build_context(run_plan, controller, world), exact_rollouts=exact_on_all_hosts(run_plan, world))
    models = build_models(run_plan.roles, context)
    data = build_data(run_plan, controller)
    trainer = Trainer(program, models, data)
    if world.rank == 0:
        print(run_banner(run_plan, world), file=sys.stderr)
    try:
        trainer.run(partial(run_script, run_plan, models, data), partial(validate, run_plan, models, data))
    finally:  # a caller of train(config) goes on
        for role in run_plan.roles:
            getattr(models, role).close()


def exact_on_all_hosts(run_plan: RunPlan, world: World) -> bool:
    """Return True if rollouts are exact on every rank and all hosts have the same kind of processor, in one all-reduce.

    Collective over the world: every rank of it must call, in program order.
    """
    kind = processor_kind()
    facts = torch.tensor([int(run_plan.exact_rollouts), kind, -kind])
    exact, smallest_kind, minus_largest_kind = world.all.all_reduce(facts, "exact_rollouts", "min").tolist()
    return exact == 1 and smallest_kind == -minus_largest_kind


def keys(overrides: Sequence[str] = (), default: str = "ppo", more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Key]:
    """Yield every key of the configuration, with those of the algorithm that the overrides name, else of ``default``.

    ``more``: see :func:`read_config`. Raises ValueError.
    """
    names = [value.removeprefix("algorithm.name=") for value in overrides if value.startswith("algorithm.name=")]
    algorithm = find("algorithm", "rlhf_spmd.algorithms", (names or [default])[-1], required_attribute="step").Config
    return list_keys(TrainConfig, {"algorithm": algorithm, **{s.key: s.config for s in algorithm.streams.values()}, **more})


def main(argv: Sequence[str] | None = None, name: str = "train", about: str | None = __doc__, default: str = "ppo") -> None:
    """The command line: ``--config FILE`` and overrides such as ``sampling.n=4``. ``default``: the algorithm where none is named."""

    def read(path: str | None, overrides: Sequence[str]) -> TrainConfig:
        return read_config(path, overrides, default)[0]

    command = read_command_line(name, about, partial(keys, default=default), read, argv, run_dir_of=run_dir_hint)
    path = command.config
    overrides = command.overrides
    launch = command.launch
    run_program(
        lambda: prepare(path, overrides, launch.size, default, launch.local_size, launch),
        train,
        settings_of,
        run_dir_hint(path, overrides),
        saves_on_signal=True,
        dry_run=(lambda run_plan: dry_run_text(run_plan, launch)) if command.dry_run else None,
    )


def settings_of(run_plan: RunPlan) -> ProgramSettings:
    """Return the settings of the process boundary: run directory, time limit, threads, and digests that all ranks must share."""
    run = run_plan.config.run
    return ProgramSettings(
        Path(run.dir),
        run.timeout_s,
        run.threads,
        collective_timeout_factor=1 + run_plan.config.steps_ahead,
        must_match=run_digests(run_plan),
    )


if __name__ == "__main__":
    main()
