"""The configuration of ``train``: its schema, how it is read, and the checks of an algorithm's module."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, ClassVar

from omegaconf.errors import OmegaConfBaseException

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.checkpoint.directory import checkpoints_of, named_checkpoint
from rlhf_spmd.config.constraints import NonNegativeInt, NumRows, PositiveInt, Range, Seconds, Seed
from rlhf_spmd.config.interpolation import select
from rlhf_spmd.config.load import Merge, check_tree, load, read_tree
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import ConfigError, is_inline, section_keys, type_hints
from rlhf_spmd.config.words import first_line
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.libraries import with_library
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.models.lora import with_stored_settings
from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_json
from rlhf_spmd.parallel.device_setup import MOST_THREADS
from rlhf_spmd.planner.placement import AUTO, PlacementConfig
from rlhf_spmd.planner.plan_file import PlanFile, apply_plan, read_plan
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.telemetry import run_dir
from rlhf_spmd.telemetry.trackers import LoggerConfig
from rlhf_spmd.workers import RoleConfig

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
    - log_samples: responses, of agents episodes, written to `rollouts.jsonl` per step
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
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"test_freq": ("keep_best",)}

    def check(self, where: str) -> None:
        from transformers.utils.hub import convert_file_size_to_int

        try:
            convert_file_size_to_int(self.max_shard_size)
        except ValueError:
            raise ValueError(
                f"{where}.max_shard_size={self.max_shard_size!r} is no size; give one such as 5GB or 200MB"
            ) from None
        directory = Path(self.dir).absolute()
        root = next(path for path in (directory, *directory.parents) if path.exists())
        if not (root.is_dir() and os.access(root, os.W_OK)):
            raise ValueError(f"{where}.dir={self.dir}: {root} is not a directory that this user can write to; give another one")
        if self.resume not in RESUME and not named_checkpoint(Path(self.resume)).is_dir():
            raise ValueError(f"{where}.resume={self.resume!r} is none of {', '.join(RESUME)}, and no checkpoint directory")
        if self.resume not in RESUME and checkpoints_of(Path(self.resume)).is_dir():
            newest = checkpoints_of(Path(self.resume)) / run_dir.LATEST_FILE
            raise ValueError(f"{where}.resume={self.resume} is the directory of a run; give {newest}, or one of its step_N")


@dataclass(frozen=True)
class QueueConfig:
    """``rollout``: prompts wait, are answered and leave as whole groups. By default a step's rows begin and end in it.

    - in_flight: prompts that are answered at a time, of which a step takes `data.train_batch_size`, those whose responses ended
      first; null: as many. See [generation.md](generation.md#responses-that-take-several-steps)
    - max_staleness: by how many steps the weights that drew a token may be older than those that learn it; older tokens are read and
      not learned. Prompts in flight use `in_flight / train_batch_size` - 1 of these steps, rounded up. Generation on ranks of its
      own runs [ahead of training](placement.md#one-step-ahead) by the rest. null: rows may take any number of steps, and
      generation and training take turns
    - chunks: chunks in which rows leave generation for roles on other ranks, see [Streaming](placement.md#streaming); 1: all together
    """

    in_flight: NumRows | None = None
    max_staleness: NonNegativeInt | None = None
    chunks: PositiveInt = 1


@dataclass(frozen=True)
class TrainConfig:
    """``algorithm`` is the ``Config`` of the module that ``algorithm.name`` names. That class's ``streams`` describe ``data`` and
    the algorithm's other sections of data.

    - rewards: rewards by name, each with the keys of `reward` (`rewards.cost.function`). The names of the algorithm's reward roles
      are for these. Any other name adds a reward, and all scores are added up; it must not be the beginning of other metrics'
      names. `reward` is short for `rewards.reward`: give one of the two, or only rewards of other names
    - environments: environments by name, each with the keys of `environment` (`environments.search.cls`). A row's column
      `environment` names its own; a row that names none has `environment`
    - plan: a file that `plan` wrote ([planner.md](planner.md)), which decides placement and layouts. The command line overrides
      it, and it overrides the file
    """

    run: RunConfig = field(default_factory=RunConfig)
    algorithm: Any = None  # the type of a field that is replaced must be Any
    data: Any = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    models: dict[str, RoleConfig] = field(default_factory=dict)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: QueueConfig = field(default_factory=QueueConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    agent: AgentConfig = field(default_factory=AgentConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    environments: dict[str, EnvironmentConfig] = field(default_factory=dict)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    plan: Any = None
    rules: ClassVar[Rules] = (
        Rule(
            ("placement.strategy", "agent.{s.agent.key}"),
            lambda config: config.agent.is_on and config.placement.strategy == AUTO,
            "plans count one row for each sample",
            "run `rlhf-spmd plan` without agent, with lengths of whole conversations in workload, and give plan=FILE",
        ),
        Rule(
            ("run.steps", "data.epochs"),
            lambda config: config.run.steps is not None and config.epochs is not None,
            "both say how long the run is",
            "set run.steps=null, or leave data.epochs out",
        ),
        Rule(
            ("run.steps",),
            lambda config: config.run.steps is None and config.epochs is None,
            "nothing says how long the run is",
            "give run.steps, or data.epochs",
        ),
        Rule(
            ("rollout.in_flight", "data.train_batch_size"),
            lambda config: (config.rollout.in_flight or math.inf) < config.data.train_batch_size,
            "the first counts the prompts in flight, of which a step takes the second",
            "raise the first or leave it out",
        ),
        Rule(
            ("rollout.max_staleness", "rollout.in_flight"),
            lambda config: config.rollout.max_staleness is not None and config.rollout.max_staleness < config.carried_steps,
            "rows take {s.carried_steps} steps more than the one that began them, and what they drew then would not be learned",
            "raise the first or lower the second",
        ),
    )

    @property
    def epochs(self) -> float | None:
        """``data.epochs``; None where the data have no such key."""
        return getattr(self.data, "epochs", None)

    @property
    def prompts_in_flight(self) -> int | None:
        """``rollout.in_flight`` if it is more than a step takes, else None."""
        in_flight = self.rollout.in_flight
        return in_flight if in_flight is not None and in_flight > self.data.train_batch_size else None

    @property
    def carried_steps(self) -> int:
        """How many steps after the one that began it an average row in flight ends, rounded up."""
        return 0 if self.prompts_in_flight is None else -(-self.prompts_in_flight // self.data.train_batch_size) - 1

    @property
    def steps_ahead(self) -> int:
        """How many steps generation runs ahead of training: the part of ``rollout.max_staleness`` that rows in flight leave."""
        return max((self.rollout.max_staleness or 0) - self.carried_steps, 0)

    @property
    def weight_versions(self) -> int:
        """How many versions of the weights generation ahead of training keeps, validation's newest among them; 0 if it is not ahead."""
        return 1 + self.steps_ahead + (self.run.test_freq > 0) if self.steps_ahead else 0

    @property
    def learnt_staleness(self) -> int | None:
        """``rollout.max_staleness`` if tokens may be older, so that some are not learned; else None."""
        return None if self.prompts_in_flight is None else self.rollout.max_staleness


@dataclass(frozen=True)
class ConfigSource:
    """Where a configuration comes from: a file or a mapping, and overrides.

    - default: the algorithm where none is named
    - directory: where relative directories of the run begin. By default the working directory when this object is made, since the
      user's code may change it later
    """

    file: str | Mapping[str, Any] | None = None
    overrides: Sequence[str] = ()
    default: str = "ppo"
    directory: Path = field(default_factory=Path.cwd)

    def read(self, planned: PlanFile | None = None) -> tuple[TrainConfig, ModuleType]:
        """Return the checked configuration and the algorithm's module. ``planned``: a plan that overrides everything."""
        return read_config(self.file, self.overrides, self.default, planned=planned, directory=self.directory)


def read_config(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    default: str = "ppo",
    more: Mapping[str, Any] = MappingProxyType({}),
    planned: PlanFile | None = None,
    directory: Path | None = None,
) -> tuple[TrainConfig, ModuleType]:
    """Return the checked configuration and the algorithm's module.

    - default: the algorithm where none is named
    - more: further sections, or other types of sections
    - planned: a plan that overrides everything
    - directory: where relative directories of the run begin; None: the working directory before the user's code is imported, which
      may change it

    Raises ConfigError, one line.
    """
    directory = directory or Path.cwd()
    modules: list[ModuleType] = []

    def sections(raw: Mapping[str, Any]) -> dict[str, Any]:
        if "algorithm=null" in overrides:
            raise ValueError("algorithm=null would leave the default algorithm in its place; give algorithm.name=<another one>")
        algorithm = raw.get("algorithm") or {}
        name = str(algorithm.get("name", default)) if isinstance(algorithm, Mapping) else str(algorithm)
        module = find("algorithm", "rlhf_spmd.algorithms", name, required_attribute="step")
        modules.append(module)
        config = algorithm_config(module)
        data = {s.key: None if s.optional and raw.get(s.key) is None else s.config for s in config.streams.values()}
        return {"algorithm": config, **data, **more}

    def revise(file: dict[str, Any], merge: Merge) -> dict[str, Any]:
        merged = merge(file)
        if planned is not None:
            return apply_plan(merged, planned)
        return merged if more or merged.get("plan") is None else merge(apply_plan(file, read_plan(str(merged["plan"]))))

    config = with_library(load(TrainConfig, path, overrides, sections, revise))
    run = config.run
    resume = run.resume if run.resume in RESUME else str(directory / run.resume)
    config = replace(config, run=replace(run, dir=str(directory / run.dir), resume=resume))
    check_tree(config)
    models = {role: _with_stored_adapter(model, f"models.{role}.lora") for role, model in config.models.items()}
    return replace(config, models=models), modules[0]


def _with_stored_adapter(model: RoleConfig, where: str) -> RoleConfig:
    """Return ``model`` with the rank of the adapter that it begins with, if it does not give one. Raises ConfigError."""
    if model.lora.rank or model.lora.path is None:
        return model
    file = Path(model.lora.path) / ADAPTER_CONFIG
    try:
        return replace(model, lora=with_stored_settings(model.lora, read_json(file), str(file)))
    except ValueError as error:
        raise ConfigError(f"{where}.path={model.lora.path}, and {where}.rank is not given: {error}") from error


def algorithm_config(module: ModuleType) -> type[AlgorithmConfig]:
    """Return the ``Config`` of an algorithm's module. Raises ValueError for a class whose settings no configuration could change."""
    config = getattr(module, "Config", None)
    if not (isinstance(config, type) and issubclass(config, AlgorithmConfig) and is_dataclass(config)):
        raise ValueError(
            f"algorithm '{module.__name__}': its Config must be a dataclass that derives from rlhf_spmd.algorithms.base."
            f"AlgorithmConfig; it is {config!r}"
        )
    for what, check in (
        ("step must take (models, data, config, global_step)", lambda: inspect.signature(module.step).bind(*"mdcg")),
        ("the types of its Config cannot be read", lambda: type_hints(module.Config)),
    ):
        try:
            check()
        # The boundary to the user's code: whatever its annotations raise.
        except Exception as error:
            raise ValueError(f"algorithm '{module.__name__}': {what}: {first_line(error)}") from error
    ignored = f"algorithm '{module.__name__}': its Config's own settings would be ignored;"
    settings = {f.name for f in fields(config)}
    pieces = {key: f.name for f in fields(config) if is_inline(f) for key in section_keys(type_hints(config)[f.name])}  # type: ignore[arg-type]
    if twice := sorted(settings & pieces.keys()):
        raise ValueError(
            f"{ignored} {twice[0]} is a key of its field {pieces[twice[0]]}: give it there, by inline(..., {twice[0]}=...)"
        )
    typed = {name for kind in config.__mro__ for name in vars(kind).get("__annotations__", {})}
    for kind in config.__mro__:
        if issubclass(kind, AlgorithmConfig) and "__dataclass_fields__" not in vars(kind):
            raise ValueError(f"{ignored} put @dataclass(frozen=True) above {kind.__name__}")
        for name, value in vars(kind).items():
            is_code = name.startswith("_") or isinstance(value, type) or hasattr(value, "__get__")
            if name not in vars(kind).get("__annotations__", {}) and (name in settings or not (is_code or name in typed)):
                raise ValueError(f"{ignored} give {name} a type, as in '{name}: int = ...' (or ClassVar[int] if it is none)")
    return config


def run_dir_hint(path: str | None, overrides: Sequence[str]) -> Path | None:
    """Return the absolute path of ``run.dir`` by command line, file and defaults, as far as they can be read; else None.

    ``exit_status.json`` goes there if the configuration is refused.
    """
    try:
        tree = read_tree(path, overrides)
        settings = {key: value for key, value in (tree.get("run") or {}).items() if value is not None}
        run = {"name": RunConfig.name, "dir": RunConfig.dir, **settings}
        directory = select({**tree, "run": run}, "run.dir")
    except (ConfigError, OmegaConfBaseException, TypeError, ValueError):
        named = [value.removeprefix("run.dir=") for value in overrides if value.startswith("run.dir=") and "${" not in value]
        directory = named[-1] if named else None
    return Path(directory).absolute() if isinstance(directory, str) and directory else None
