"""Training, from configuration to export. After ``scripts/quickstart.sh``, which makes data and a model:

rlhf-spmd train --nproc-per-node 2 --config configs/quickstart_ppo.yaml run.dir=runs/mine sampling.n=8
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from rlhf_spmd import notebook
from rlhf_spmd.algorithms.base import AlgorithmConfig, move_reference
from rlhf_spmd.config.keys import Key, list_keys
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.config.registry import find, located
from rlhf_spmd.controller import MICRO_DP, Controller, Graph, Reference
from rlhf_spmd.controller.protocols import ProtocolRanks
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.loader import build_loader, load_dataset
from rlhf_spmd.data.prompts import DataConfig, PromptDataset, PromptsConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.environments.config import EnvironmentConfig, check_rows, environment_key, named_environments
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import model_device, processor_kind
from rlhf_spmd.parallel.world import Launch, World, lone_store
from rlhf_spmd.planner.placement import AUTO, PlacementConfig
from rlhf_spmd.planner.plan_file import PlanFile, apply_plan, check_ranks, read_plan
from rlhf_spmd.process.agreement import run_digests
from rlhf_spmd.process.command_line import read_command_line
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program
from rlhf_spmd.rewards.config import RewardConfig, named_rewards, reward_key
from rlhf_spmd.telemetry.logger import LoggerConfig
from rlhf_spmd.training import checks, plan_inputs, roles
from rlhf_spmd.training.banner import describe, describe_roles
from rlhf_spmd.training.memory import step_facts
from rlhf_spmd.training.memory_check import check_launch
from rlhf_spmd.training.placing import place
from rlhf_spmd.training.planning import plan_run
from rlhf_spmd.training.reward_roles import repeated_of, rewarded_roles, with_templates
from rlhf_spmd.training.run_config import RunConfig, run_dir_hint
from rlhf_spmd.training.streams import Data, InFlightStream, RowStream, ValidationRows
from rlhf_spmd.training.trainer import Trainer, start_controller
from rlhf_spmd.workers import RoleConfig, WorkerContext

VALIDATION_SEED = 1_000_003  # validation draws other numbers than training


@dataclass(frozen=True)
class TrainConfig:
    """The whole configuration of ``train``. ``algorithm`` is the Config of the module that ``algorithm.name`` names; ``data``, and
    what other sections of data the algorithm has, are what its ``streams`` say.

    - rewards: rewards by name, each with the keys of `reward` (`rewards.cost.function`). Names of the algorithm's reward roles are
      for these; any other name is one more reward, whose scores are added; it is not what other metrics begin with. `reward` is
      `rewards.reward`: give one of the two
    - environments: environments by name, each with the keys of `environment` (`environments.search.cls`); a row's column
      `environment` names its own, and a row that names none has `environment`
    - plan: a file that `plan` wrote ([planner.md](planner.md)): it decides placement and layouts; the command line goes before
      it, and it before the file
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


@dataclass(frozen=True)
class TrainJob:
    """A run that was checked: everything that is known before a process group exists. ``training`` and ``validation``: data sets
    by stream. ``checkpointing``: see :class:`WorkerContext`. ``memory``: what the fullest rank needs, in words. ``warnings``: lines
    that the
    run begins with."""

    config: TrainConfig
    algorithm: ModuleType
    plans: dict[str, roles.RolePlan]
    rewards: dict[str, RewardConfig]
    tokenizer: Any
    training: dict[str, TokenDataset]
    validation: dict[str, TokenDataset]
    checkpointing: str = "none"
    memory: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def sections(self) -> list[Any]:
        """Of each stream of data its section of the configuration, None for one that is left out."""
        return [getattr(self.config, section.key) for section in self.config.algorithm.streams.values()]

    def sampling(self, validates: bool = False) -> SamplingConfig:
        """As the run uses it: with the data's limit where it has none, and a seed of the run's."""
        config = self.config
        chosen, seed = (config.val_sampling, VALIDATION_SEED) if validates else (config.sampling, 0)
        limit = next((data.max_response_length for data in self.sections if isinstance(data, PromptsConfig)), None)
        return replace(chosen, max_response_length=chosen.max_response_length or limit, seed=config.run.seed + seed)


def read_config(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    default: str = "ppo",
    more: Mapping[str, Any] = MappingProxyType({}),
    planned: PlanFile | None = None,
) -> tuple[TrainConfig, ModuleType]:
    """The checked configuration and the algorithm's module. ``more``: sections besides, or of other types. ``planned``: a plan, which
    goes over everything. Raises ConfigError, one line."""
    chosen: list[ModuleType] = []

    def sections(raw: Mapping[str, Any]) -> dict[str, Any]:
        if "algorithm=null" in overrides:
            raise ValueError("algorithm=null would leave the default algorithm in its place; give algorithm.name=<another one>")
        algorithm = raw.get("algorithm") or {}
        name = str(algorithm.get("name", default)) if isinstance(algorithm, Mapping) else str(algorithm)
        module = find("algorithm", "rlhf_spmd.algorithms", name, exports="step")
        chosen.append(module)
        config = checks.settings_of(module)
        data = {s.key: None if s.optional and raw.get(s.key) is None else s.config for s in config.streams.values()}
        return {"algorithm": config, **data, **more}

    def revise(file: dict[str, Any], whole: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        if planned is not None:
            return apply_plan(dict(whole), planned), False
        return (file if more or whole.get("plan") is None else apply_plan(file, read_plan(str(whole["plan"])))), True

    config = load(TrainConfig, path, overrides, sections, revise)
    check_tree(config)
    return config, chosen[0]


def prepare(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    world_size: int,
    default: str = "ppo",
    local_size: int | None = None,
    launch: Launch | None = None,
    planned: PlanFile | None = None,
    read: Callable[[], tuple[dict[str, TokenDataset], dict[str, TokenDataset]]] | None = None,
) -> TrainJob:
    """Read and check configuration, models' configurations, tokenizer and data. ``local_size``: ranks of a host, by default all.
    ``launch``: of this rank, on whose device the run has to fit. ``planned``: see :func:`read_config`. ``read``: what gives the data,
    if it was asked already. Local: no communication. Raises ConfigError, ValueError or DataError, one line each.
    """
    config, module = read_config(path, overrides, default, planned=planned)
    check_ranks(config.plan, world_size)
    config, epochs = checks.check_duration(config)
    algorithm: AlgorithmConfig = config.algorithm
    for role, model in config.models.items():
        model.generation.check_device(f"models.{role}.generation")
    sections, rewards, described = describe_run(config, config.models)
    environments = named_environments(config.environment, config.environments)
    sections = checks.with_tools(sections, environments)
    tokenizer = load_tokenizer(roles.model_directory(described, algorithm.exported))
    described = roles.find_text_readers(described, rewards, algorithm.exported, tokenizer, config.data)
    read = read or cache(lambda: read_data(config, sections, tokenizer, described))
    unplaced = cache(lambda: TrainJob(config, module, described, rewards, tokenizer, *read()))
    traced = cache(lambda: trace(unplaced()))
    if config.placement.strategy == AUTO:
        work = plan_inputs.usual_rows(next(iter(sections.values())), config.sampling.n, read()[0])
        step = step_facts(unplaced(), traced(), model_device())
        planned = plan_run(config, described, step, work, world_size, local_size or world_size)
        return prepare(path, overrides, world_size, default, local_size, launch, planned, read)
    plans = place(described, config.placement, world_size, local_size or world_size, traced)
    ahead = checks.in_flight(config) is not None
    for plan in roles.generating(plans).values():
        for name, one in environments.items():
            one.check_together(environment_key(name), config.run.timeout_s, plan.config.generation.rebalance_steps, ahead)
    checks.check_validation(config, algorithm, hasattr(module, "validate"))
    checks.check_batches(config, plans)
    checks.check_idle(config, algorithm)
    checks.check_staleness(config, plans, traced)
    checks.check_lengths(config, algorithm, plans)
    checks.exact_rollouts(config, plans)  # raises if it is demanded and cannot be
    algorithm.check_together(config, plans, tokenizer)
    training, validation = read()
    if epochs is not None:
        rows = next(len(training[name]) for name, section in algorithm.streams.items() if section.key == "data")
        config = checks.with_steps(config, math.ceil(epochs * rows / config.data.train_batch_size))
        checks.check_batches(config, plans)
        algorithm.check_together(config, plans, tokenizer)
    places, scored = checks.scored_rows(algorithm, sections, training, validation)
    for name, reward in rewards.items():
        reward.check_together(reward_key(name), config.run.timeout_s)
        reward.check_rows(reward_key(name), scored, places)
    without = [name for name, reward in rewards.items() if reward.function is None and described[name].spec is None]
    check_rows(environments, scored, places, not rewards or len(without) < len(rewards))
    roles.check_templates(plans, rewards, tokenizer, scored)
    ready = TrainJob(config, module, plans, rewards, tokenizer, training, validation)
    if launch is None:
        return ready
    checkpointing, memory, *warnings = check_launch(ready, traced(), launch)
    for idle in (checks.idle_updates, checks.idle_stream, checks.idle_calls):
        warnings += idle(config, plans, traced())
    return replace(ready, checkpointing=checkpointing, memory=memory, warnings=tuple(filter(None, warnings)))


def describe_run(
    config: TrainConfig, models: Mapping[str, RoleConfig], weights: bool = True
) -> tuple[dict[str, Any], dict[str, RewardConfig], dict[str, roles.RolePlan]]:
    """Sections of data by stream, rewards by role, and the roles of ``models`` before they are placed; ``weights``: see
    :func:`~rlhf_spmd.training.roles.describe_roles`. Raises ValueError."""
    algorithm: AlgorithmConfig = config.algorithm
    sections = {name: getattr(config, section.key) for name, section in algorithm.streams.items()}
    sections = {name: data for name, data in sections.items() if data is not None}
    algorithm.check_streams(sections, "algorithm")
    rewards = named_rewards(config.reward, config.rewards)
    has_environment = any(one.gives_reward for one in named_environments(config.environment, config.environments).values())
    classes = rewarded_roles(algorithm, sections, rewards, bool(rewards) or has_environment or "reward" in models)
    described = roles.describe_roles(models, classes, algorithm.exported, rewards, has_environment, weights)
    return sections, with_templates(described, rewards, sections), described


def read_data(
    config: TrainConfig, sections: Mapping[str, Any], tokenizer: Any, plans: Mapping[str, roles.RolePlan]
) -> tuple[dict[str, TokenDataset], dict[str, TokenDataset]]:
    """The training and the validation data of each stream, checked against models and token budget. Raises ValueError, DataError."""
    algorithm: AlgorithmConfig = config.algorithm
    training: dict[str, TokenDataset] = {}
    validation: dict[str, TokenDataset] = {}
    for name, data in sections.items():
        if isinstance(data, DatasetConfig):
            training[name] = load_dataset(data, tokenizer)
            build_loader(training[name], data, config.run.seed)  # raises if there are too few rows
        if not isinstance(data, DatasetConfig) or data.val_path:
            validation[name] = load_dataset(data, tokenizer, validation=True)
        for use, dataset in (("sampling", training.get(name)), ("val_sampling", validation.get(name))):
            if dataset is not None:
                roles.check_vocabulary(dataset, plans[algorithm.exported])
            if isinstance(data, PromptsConfig) and (dataset is not None or use == "val_sampling"):
                assert dataset is None or isinstance(dataset, PromptDataset)
                roles.check_prompts(use, getattr(config, use), dataset, tokenizer, plans)
            elif dataset is not None:
                checks.check_rows(algorithm.streams[name].key, data, dataset, algorithm, plans)
    return training, validation


def build_settings(ready: TrainJob, controller: Controller, world: World) -> WorkerContext:
    """What every role is built from."""
    config, algorithm = ready.config, ready.config.algorithm
    max_prompt_length = max((getattr(section, "max_prompt_length", 0) for section in ready.sections), default=0)
    return WorkerContext(
        controller,
        world,
        algorithm.limits,
        config.run.seed,
        total_updates={role: algorithm.updates(role, config.run.steps, config.data.train_batch_size) for role in ready.plans},
        temperature=ready.sampling().log_prob_temperature,
        rewards=ready.rewards,
        max_prompt_length=max_prompt_length,
        max_response_length=ready.sampling().max_response_length or 0,
        environments=named_environments(config.environment, config.environments),
        encoding=config.data,
        tokenizer=ready.tokenizer,
        num_samples=config.run.log_samples,
        exact_rollouts=checks.exact_rollouts(config, ready.plans),
        partial_rollouts=checks.in_flight(config) is not None,
        rollout_log_probs=algorithm.bypasses_log_probs,
        checkpointing=ready.checkpointing,
    )


def script_of(ready: TrainJob, models: Any, data: Data, number: int) -> list[Reference]:
    """The algorithm's step and what ends each; returns the calls that are reported."""
    with located("algorithm", ready.config.algorithm.name, ready.algorithm):
        calls = ready.algorithm.step(models, data, ready.config.algorithm, number)
    is_list = isinstance(calls, list)
    bad = [(at, type(one).__name__) for at, one in enumerate(calls if is_list else ()) if not isinstance(one, Reference)]
    if bad or not is_list:
        entry = ", whose entry {} is of type {}".format(*bad[0]) if bad else ""
        what = "one call; return [it]" if isinstance(calls, Reference) else f"{calls!r:.80}{entry}"
        raise ValueError(
            f"{ready.algorithm.__name__}.step returned {what}; it must return the list of the calls that it reports: what "
            "models.actor.update(...) and other calls of roles return"
        )
    return [*calls, *move_reference(models, ready.config.algorithm, number)]


def trace(ready: TrainJob) -> Graph:
    """The calls of the run's last step, which trains all that any trains, or of the one before if it makes more different ones;
    ``ready.plans`` may be any, on pools of any size. The script is traced by a rank that is in no pool, where roles are descriptions,
    on streams of its own, so that those of the run stay where they are. The step before is traced first: a script may keep rows for
    the next one. Local: no communication, no weights, no device.
    """
    last = ready.config.run.steps
    assert last is not None, "checks.check_duration has seen to it"
    size = 1 + max(pool.ranks[-1] for plan in ready.plans.values() for pool in plan.pools)
    world = World(Launch(rank=size, size=size + 1), torch.device("cpu"), lone_store(), timeout_s=1.0)
    controller = Controller(world.all)
    models, data = roles.build_models(ready.plans, build_settings(ready, controller, world)), build_data(ready, controller)
    try:
        graphs = [data.trace(partial(script_of, ready, models, data, number)) for number in (max(last - 1, 1), last)]
    except AttributeError as error:
        refused = checks.absent(error, ready.plans)
        if refused is None:
            raise
        raise refused from error
    return max(reversed(graphs), key=lambda graph: len({call.name for call in graph.nodes}))


def train(context: ProgramContext[TrainJob]) -> None:
    """Build the models, run all steps, export. Collective over the world: every rank of it must call."""
    ready, world = context.prepared, context.world
    controller, algorithm = start_controller(context), ready.config.algorithm
    settings = build_settings(ready, controller, world)
    mine = torch.tensor([int(settings.exact_rollouts), processor_kind(), -processor_kind()])  # hosts may differ
    exact, least, most = world.all.all_reduce(mine, "exact_rollouts", "min").tolist()
    models = roles.build_models(ready.plans, replace(settings, exact_rollouts=exact == 1 and least == -most))
    data = build_data(ready, controller)
    session = Trainer(context, models, data)
    if session.is_first:
        print(describe(ready, world), file=sys.stderr)

    def validate(number: int) -> dict[str, float]:
        with located("algorithm", algorithm.name, ready.algorithm):
            found: dict[str, float] = ready.algorithm.validate(models, data, algorithm, number)
        return found

    session.run(partial(script_of, ready, models, data), validate)


def build_data(ready: TrainJob, controller: Controller) -> Data:
    """What the algorithm's step finds in ``data``."""
    config = ready.config
    sections = {name: getattr(config, section.key) for name, section in config.algorithm.streams.items()}
    homes = [plan.at("generate_sequences") for plan in roles.generating(ready.plans).values()]
    streams: dict[str, RowStream] = {}
    for name, dataset in ready.training.items():
        section = sections[name]
        loader = build_loader(dataset, section, config.run.seed)
        ahead = checks.in_flight(config) if section is config.data else None
        if ahead is not None:
            replicas = ProtocolRanks(MICRO_DP, homes[0].shape, homes[0].pool, controller.speeds)
            streams[name] = InFlightStream(loader, config.sampling.n, ahead, replicas.num_parts, replicas.speeds)
        else:
            streams[name] = RowStream(loader, config.sampling.n if isinstance(section, DataConfig) else 1, len(streams))
    validation = {
        name: ValidationRows(dataset, sections[name].val_batch_size, list(sections[name].val_sets), repeated_of(dataset, ready))
        for name, dataset in ready.validation.items()
    }
    sampling = ready.sampling(), ready.sampling(validates=True)
    return Data(controller, streams, validation, *sampling, ready.tokenizer, config.run.log_samples)


def keys(overrides: Sequence[str] = (), default: str = "ppo", more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Key]:
    """Of the algorithm that the overrides name, or the default one. ``more``: see :func:`read_config`. Raises ValueError."""
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
        dry_run=(lambda ready: describe_roles(ready, launch)) if command.dry_run else None,
    )


def settings_of(ready: TrainJob) -> ProgramSettings:
    run, apart = ready.config.run, 1 + ready.config.placement.max_staleness
    return ProgramSettings(Path(run.dir), run.timeout_s, run.threads, calls_apart=apart, must_match=run_digests(ready))


class _Program(ModuleType):
    """``rlhf_spmd.train(config)``: a package's attribute ``train`` is this module as soon as anybody has imported it."""

    def __call__(self, config: Mapping[str, Any]) -> Path:
        return notebook.train(config)


sys.modules[__name__].__class__ = _Program

if __name__ == "__main__":
    main()
