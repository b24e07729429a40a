"""The whole configuration of ``train``: its schema, how it is read, and what makes a module an algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import ConfigError, first_line, is_inline, section_keys, type_hints
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.models.lora import with_stored_settings
from rlhf_spmd.models.stored import ADAPTER_CONFIG, read_json
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.planner.plan_file import PlanFile, apply_plan, read_plan
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.telemetry.trackers import LoggerConfig
from rlhf_spmd.training.run_config import RESUME, RunConfig
from rlhf_spmd.workers import RoleConfig


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
    reward: RewardConfig = field(default_factory=RewardConfig)
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    environments: dict[str, EnvironmentConfig] = field(default_factory=dict)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    plan: Any = None


def read_config(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    default: str = "ppo",
    more: Mapping[str, Any] = MappingProxyType({}),
    planned: PlanFile | None = None,
    here: Path | None = None,
) -> tuple[TrainConfig, ModuleType]:
    """Return the checked configuration and the algorithm's module.

    ``default``: the algorithm where none is named. ``more``: further sections, or other types of known ones. ``planned``: a plan that
    overrides everything. ``here``: where relative directories of the run begin; None: the working directory before the user's code is
    imported, which may change it. Raises ConfigError, one line.
    """
    here = here or Path.cwd()
    chosen: list[ModuleType] = []

    def sections(raw: Mapping[str, Any]) -> dict[str, Any]:
        if "algorithm=null" in overrides:
            raise ValueError("algorithm=null would leave the default algorithm in its place; give algorithm.name=<another one>")
        algorithm = raw.get("algorithm") or {}
        name = str(algorithm.get("name", default)) if isinstance(algorithm, Mapping) else str(algorithm)
        module = find("algorithm", "rlhf_spmd.algorithms", name, exports="step")
        chosen.append(module)
        config = algorithm_config(module)
        data = {s.key: None if s.optional and raw.get(s.key) is None else s.config for s in config.streams.values()}
        return {"algorithm": config, **data, **more}

    def revise(file: dict[str, Any], whole: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        if planned is not None:
            return apply_plan(dict(whole), planned), False
        return (file if more or whole.get("plan") is None else apply_plan(file, read_plan(str(whole["plan"])))), True

    config = load(TrainConfig, path, overrides, sections, revise)
    run = config.run
    resume = run.resume if run.resume in RESUME else str(here / run.resume)
    config = replace(config, run=replace(run, dir=str(here / run.dir), resume=resume))
    check_tree(config)
    models = {role: _with_stored_adapter(model, f"models.{role}.lora") for role, model in config.models.items()}
    return replace(config, models=models), chosen[0]


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
    said = f"algorithm '{module.__name__}': its Config's own settings would be ignored;"
    settings = {f.name for f in fields(config)}
    pieces = {key: f.name for f in fields(config) if is_inline(f) for key in section_keys(type_hints(config)[f.name])}  # type: ignore[arg-type]
    if twice := sorted(settings & pieces.keys()):
        raise ValueError(
            f"{said} {twice[0]} is a key of its field {pieces[twice[0]]}: give it there, by inline(..., {twice[0]}=...)"
        )
    typed = {name for kind in config.__mro__ for name in vars(kind).get("__annotations__", {})}
    for kind in config.__mro__:
        if issubclass(kind, AlgorithmConfig) and "__dataclass_fields__" not in vars(kind):
            raise ValueError(f"{said} put @dataclass(frozen=True) above {kind.__name__}")
        for name, value in vars(kind).items():
            is_code = name.startswith("_") or isinstance(value, type) or hasattr(value, "__get__")
            if name not in vars(kind).get("__annotations__", {}) and (name in settings or not (is_code or name in typed)):
                raise ValueError(f"{said} give {name} a type, as in '{name}: int = ...' (or ClassVar[int] if it is none)")
    return config
