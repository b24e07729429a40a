"""Where and how every call of a training run should run on a cluster: the fastest plan that fits, for `train plan=FILE`.

rlhf-spmd plan --config configs/quickstart_ppo.yaml cluster.nodes=2 cluster.gpus_per_node=8 cluster.gpu=h100 plan.out=plan.yaml
rlhf-spmd plan profile --nproc-per-node 8 --config FILE plan.out=profile.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from rlhf_spmd.config.constraints import Seconds
from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import Graph
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.files import DataError
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.device_times import CallTimes
from rlhf_spmd.planner.machine import ClusterConfig, Machine, is_file
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.placement import AUTO, check_speeds
from rlhf_spmd.planner.plan_file import PlanFile, read_plan
from rlhf_spmd.planner.plan_summary import PlanSummary, comparison, measured_seconds, read_trace, table
from rlhf_spmd.planner.planning import PlanResult, ProblemBuilder, to_file
from rlhf_spmd.planner.problem import Choice, simulate
from rlhf_spmd.planner.profile import ProfileTimes, read_profile, write_profile
from rlhf_spmd.planner.search import SearchResult
from rlhf_spmd.planner.shapes import Workload
from rlhf_spmd.preflight import plan_stand_ins
from rlhf_spmd.preflight.checks import BATCH_RULES, RunSettings, check_batches
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.preflight.memory_check import check_memory, decide_checkpointing, with_checkpointing
from rlhf_spmd.preflight.memory_estimate import facts_of
from rlhf_spmd.preflight.placing import roles_on_pools
from rlhf_spmd.preflight.plan_profile import profile
from rlhf_spmd.preflight.plan_roles import checked_plan, model_calls, placed_calls, planned_run
from rlhf_spmd.preflight.prepare import UNKNOWN_STEPS, add_unplaced_roles
from rlhf_spmd.preflight.role_memory import StepFacts
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.process.command_line import read_command_line, refuse
from rlhf_spmd.process.program import ProgramContext, run_program
from rlhf_spmd.train import keys as train_keys
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig, read_config
from rlhf_spmd.workers import ModelWorker, RoleConfig
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans, generating_roles


@dataclass(frozen=True)
class SearchConfig:
    """``plan``.

    - search: how plans are searched for: `exact`, `mcmc`, `enumerate`, `grid`, or a module of your own by its dotted name or file
    - fixed: a plan, which is evaluated instead; `config`: the configuration's own placement and layouts
    - time_limit_s: of the search, seconds, in equal parts for each number of tokens of a micro-batch that is tried; estimates do
      not count
    - seed: of `mcmc`
    - out: file that the plan is written to; of `plan profile` the profile; null: no file
    - measured: directory of a run that followed the plan: compared with it, call by call
    """

    search: str = "exact"
    fixed: str | None = None
    time_limit_s: Seconds = 60.0
    seed: int = 0
    out: str | None = None
    measured: str | None = None

    def check(self, where: str) -> None:
        out = None if self.out is None else Path(self.out)
        if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
            raise ValueError(f"{where}.out={self.out}: must be a file in a directory that exists")
        find(f"{where}.search", "rlhf_spmd.planner.search", self.search, required_attribute="search")


PLAN_RULES: Rules = (
    Rule(
        ("plan.fixed", "placement.strategy"),
        lambda config: config.plan.fixed == "config" and config.placement.strategy == AUTO,
        "there is no placement of the configuration to evaluate",
        "leave plan.fixed out",
    ),
    Rule(
        ("agent.max_rows",),
        lambda config: config.agent.is_on,
        "plans count one row for each sample",
        "leave agent out, and give lengths of whole conversations in workload",
    ),
)
PROFILE_RULES: Rules = (
    Rule(
        ("plan.out",),
        lambda config: config.plan.out is None,
        "plan profile writes to it",
        "name a file, as in plan.out=profile.json",
    ),
)
SECTIONS = {
    "models": dict[str, plan_stand_ins.PlannedRoleConfig],
    "cluster": ClusterConfig,
    "workload": plan_stand_ins.WorkloadConfig,
    "plan": SearchConfig,
}


@dataclass(frozen=True)
class PlanRequest:
    """A configuration, traced, with the cluster that it is planned for.

    - cluster, search: the sections ``cluster`` and ``plan`` of the configuration, which a training run does not have
    - calls: the calls of roles with a model
    - work: lengths of rows
    - graph: the traced step
    - unplaced_roles: every role before it has ranks
    """

    config: TrainConfig
    cluster: ClusterConfig
    search: SearchConfig
    calls: list[ModelCall]
    work: Workload
    graph: Graph
    unplaced_roles: dict[str, RolePlan]

    @cached_property
    def target(self) -> tuple[Machine, list[CallTimes]]:
        """Return :func:`machine_of` the cluster."""
        return machine_of(self.cluster)

    @cached_property
    def configured(self) -> PlanResult | str | None:
        """Return the plan of the configuration's own placement and layouts, or why there is none.

        None if the configuration leaves them to the planner.
        """
        if self.config.placement.strategy == AUTO:
            return None
        try:
            return evaluate_configuration(self)
        except ValueError as error:
            return str(error)

    def step(self) -> StepFacts:
        """Return the facts of a step with rows at their limits."""
        sections = [getattr(self.config, section.key) for section in self.config.algorithm.streams.values()]
        prompts = [section.max_prompt_length for section in sections if hasattr(section, "max_prompt_length")]
        prompt = float(max(prompts, default=self.work.prompt))
        device = torch.device("cpu" if self.target[0].device.on_host else "cuda")
        return facts_of(self.config, self.graph, prompt, self.work.responses, device, self.unplaced_roles)


def read_request(path: str | None, overrides: Sequence[str], rules: Rules = PLAN_RULES) -> PlanRequest:
    """Return the request of a configuration. Local; needs neither data nor tokenizers nor weights.

    Raises ConfigError, ValueError or DataError, one line each.
    """
    config, module = read_config(path, overrides, more=SECTIONS)
    check_rules(rules, config)
    check_rules(BATCH_RULES, RunSettings(config=config))
    # roles whose models are given by sizes; there is no directory of theirs to read
    sized_roles = [role for role, model in config.models.items() if model.spec is not None]  # type: ignore[attr-defined]
    rewards = {role: replace(reward, model=None) if role in sized_roles else reward for role, reward in config.rewards.items()}
    reward = replace(config.reward, model=None) if "reward" in sized_roles else config.reward
    config = replace(config, rewards=rewards, reward=reward)
    run_plan = RunPlan(config, module, tokenizer=cast(Any, plan_stand_ins.CharacterTokenizer()))
    with plan_stand_ins.model_directories(config.models) as models:
        run_plan = add_unplaced_roles(run_plan, models, weights=False)
    role_plans = dict(run_plan.roles)
    for role, role_plan in generating_roles(role_plans).items():
        role_plans[role] = replace(role_plan, config=without_exactness(role_plan.config))
    training = {
        name: plan_stand_ins.stand_in(data, config.rollout.in_flight or 0)
        for name, data in run_plan.streams.items()
        if isinstance(data, DatasetConfig)
    }
    graph = trace(replace(run_plan, roles=role_plans, training=training, exact_rollouts=exact_rollouts(config, role_plans)))
    planned: Any = run_plan.config  # with the sections that a training run does not have
    num_ranks = sum(hosts * devices for hosts, devices, _ in planned.cluster.hosts)
    check_speeds(config.placement, num_ranks)
    work = planned.workload.workload(next(iter(run_plan.streams.values())), config.sampling.n)
    calls = model_calls(graph, role_plans, work, config.weight_versions)
    return PlanRequest(run_plan.config, planned.cluster, planned.plan, calls, work, graph, role_plans)


def without_exactness(config: RoleConfig) -> RoleConfig:
    """Return ``config`` with a separate call for training's log-probs, as on GPUs, unless it says otherwise."""
    if config.generation.reuse_rollout_log_probs is not None:
        return config
    return replace(config, generation=replace(config.generation, reuse_rollout_log_probs=False))


def machine_of(cluster: ClusterConfig) -> tuple[Machine, list[CallTimes]]:
    """Return the machine, and the times of calls on each kind of device. Raises ValueError if a profile that ``cluster.gpu`` names
    cannot be read."""
    names = cluster.device_names
    if not is_file(names[0]):
        machine = cluster.machine()
        return machine, [FormulaTimes(machine.with_kind(kind)) for kind in range(len(names))]
    profiles = [read_profile(name) for name in names]
    machine = cluster.machine({name: measured.device for name, measured in zip(names, profiles, strict=True)})
    for name, measured in zip(names, profiles, strict=True):
        measured.check_ranks(machine.size, f"cluster: gpu={name}")
    if len({(measured.device.itemsize, measured.device.on_host) for measured in profiles}) > 1:
        raise ValueError(
            f"cluster.groups: the profiles {', '.join(names)} are of different types of numbers, or of CPUs and GPUs"
        )
    return machine, [ProfileTimes(measured, machine.with_kind(kind)) for kind, measured in enumerate(profiles)]


def search_plan(request: PlanRequest) -> PlanResult:
    """Return the plan that a search finds, or the one that ``plan.fixed`` names. Raises ValueError, one line.

    The configuration's own placement and layouts are a candidate: no plan is slower than them if they are sure to fit.
    """
    settings = request.search
    if settings.fixed is not None:
        return evaluate_configuration(request) if settings.fixed == "config" else evaluate_file(request, settings.fixed)
    search: dict[str, Any] = {"name": settings.search, "time_limit_s": settings.time_limit_s, "seed": settings.seed}
    configured = request.configured
    if not isinstance(configured, PlanResult) or configured.refusal is not None or configured.warning is not None:
        configured = None
    try:
        planned = checked_plan(request.config, request.calls, request.unplaced_roles, request.step(), *request.target, **search)
    except ValueError:
        if configured is None:
            raise
        return configured
    if configured is None or configured.seconds >= planned.seconds:
        return planned
    bound = min(planned.search.lower_bound, configured.seconds)
    result = replace(planned.search, plan=configured.search.plan, seconds=configured.seconds, lower_bound=bound)
    return replace(configured, search=result)


def evaluate_configuration(request: PlanRequest) -> PlanResult:
    """Return the plan of the configuration's own placement and layouts. Raises ValueError if they cannot be."""
    config = request.config
    machine, _ = request.target
    role_plans = roles_on_pools(
        request.unplaced_roles,
        config.placement,
        machine.size,
        machine.local_size,
        lambda: request.graph,
        config.steps_ahead,
    )
    check_batches(config, role_plans)
    step = request.step()
    role_plans = with_checkpointing(role_plans, decide_checkpointing(role_plans, step, machine.memory))
    speeds = (tuple(config.placement.speeds), tuple(config.placement.generation_speeds))
    file = PlanFile(machine.size, machine.local_size, {}, placed_calls(request.calls, role_plans), 0.0, *speeds)
    return _evaluate(request, file, role_plans, step)


def evaluate_file(request: PlanRequest, path: str) -> PlanResult:
    """Return the plan in the file ``path``. Raises ValueError if it is not a plan of this step on this cluster."""
    machine, _ = request.target
    file = read_plan(path, "plan.fixed")
    check_calls(file, request.calls, machine, path)
    result = _evaluate(request, file, *planned_run(request.config, file, request.unplaced_roles, request.step()))
    if result.refusal is not None:  # its remedies are keys
        return replace(result, refusal=f"{result.refusal}; what {path} sets must be changed there")
    if result.warning is None and any(call.memory_gb > call.room_gb for call in result.file.calls.values()):
        return replace(
            result, warning="not all rows in flight have room in the cache, so generation takes longer than this says"
        )
    return result


def _evaluate(request: PlanRequest, file: PlanFile, role_plans: RolePlans, step: StepFacts) -> PlanResult:
    """Return a plan with its predictions. ``role_plans``, ``step``: of a run that follows it."""
    machine, _ = request.target
    refusal = warning = None
    try:
        warning = check_memory(role_plans, step, machine.memory, machine.local_size, host_memory=machine.host_memory)
    except ValueError as error:
        refusal = str(error)
    budget = step.limits.max_tokens
    builder = ProblemBuilder(request.calls, *request.target, budget, request.config.steps_ahead, file)
    problem = builder.problem()
    for call in filter(problem.must_be_apart, problem.calls):
        home = file.calls[problem.calls[problem.homes[call.role]].name]
        if home.rank_range.overlaps(file.calls[call.name].rank_range):
            raise ValueError(
                f"rollout.max_staleness={request.config.rollout.max_staleness} lets {call.name} run ahead of training, but "
                f"{call.role} trains on its ranks; take placement.strategy=separate"
            )
    choices = tuple(Choice(file.calls[call.name].rank_range, 0) for call in problem.calls)
    schedule = simulate(problem, choices)
    result = SearchResult(choices, schedule.seconds, 0.0, False, 1, 0.0)
    return PlanResult(to_file(builder, problem, choices, schedule, file.algorithm), result, refusal, warning)


def check_calls(file: PlanFile, calls: Sequence[ModelCall], machine: Machine, path: str) -> None:
    """Raise ValueError if a plan has other calls or ranks."""
    names = {call.name: None for call in calls}
    differences = [f"there is no {name}{nearest(name, list(names)) or ';'}" for name in file.calls if name not in names]
    differences += [f"it lacks {name};" for name in names if name not in file.calls]
    if differences:
        raise ValueError(f"plan.fixed={path} is of other calls: {differences[0]} the step's are {', '.join(names)}")
    last = max(call.rank_range.end for call in file.calls.values())
    has_speeds = bool(file.speeds or file.generation_speeds)
    if last > machine.size or (has_speeds and file.ranks != machine.size):
        raise ValueError(
            f"plan.fixed={path} is for {max(last, file.ranks)} ranks, and the cluster has {machine.size}; plan with the same cluster"
        )


def summary_of(request: PlanRequest, planned: PlanResult) -> PlanSummary:
    """Return the summary of a plan, beside the configuration's own placement and layouts."""
    machine, _ = request.target
    steps = request.config.run.steps
    tokens = max(call.work.rows for call in request.calls) * request.work.length
    return PlanSummary(
        planned,
        machine,
        request.cluster.text(machine),
        tokens,
        None if steps == UNKNOWN_STEPS else steps,
        request.configured if request.search.fixed is None else None,
    )


def measure_profile(context: ProgramContext[PlanRequest]) -> None:
    """Measure the models and write the profile. Collective over the world: every rank of it must call, in program order."""
    request = context.prepared
    world = context.world
    calls = sorted(request.calls, key=lambda call: call.kind == "generate")  # the last one's generation settings count
    heads = {
        role: role_plan.worker.head
        for role, role_plan in request.unplaced_roles.items()
        if issubclass(role_plan.worker, ModelWorker)
    }
    models = {(call.spec, heads[call.role]): call.generation for call in calls}
    dtype = request.unplaced_roles[request.calls[0].role].config.torch_dtype(world.device)
    work = replace(request.work, rows=max(call.work.rows for call in calls))
    measured = profile(world, models, work, request.config.algorithm.limits.max_tokens, dtype)
    if world.rank == 0:
        assert request.search.out is not None, "PROFILE_RULES"
        write_profile(measured, Path(request.search.out))
        print(f"profile written: plan with cluster.gpu={request.search.out}", file=sys.stderr)


def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
    """Yield the keys of the algorithm that the overrides name, and of the plan."""
    return train_keys(overrides, more=SECTIONS)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. With ``profile`` before the other arguments it measures instead; ``--json`` prints JSON."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    is_profile = arguments[:1] == ["profile"]
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    if is_profile and {"-h", "--help"} & {*arguments}:
        del arguments[0]
    num_words = 1 if is_profile else 0  # before the overrides: the ranks of `plan profile` start with `profile`, too

    def read(path: str | None, overrides: Sequence[str]) -> TrainConfig:
        return read_config(path, overrides[num_words:], more=SECTIONS)[0]

    command = read_command_line("plan", __doc__, keys, read, arguments, has_ranks=is_profile)
    overrides = command.overrides[num_words:]
    if command.dry_run:
        refuse("--dry-run: plan trains nothing; leave it out")
    if is_profile:
        run_program(lambda: read_request(command.config, overrides, PROFILE_RULES), measure_profile)
        return
    try:
        if command.launch.size > 1:
            raise ConfigError("plan is one process: start it without torchrun, which only `plan profile` needs")
        text, compared, fits = plan_texts(read_request(command.config, overrides), as_json)
    except (DataError, ValueError, OSError) as error:
        print(f"config error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(text)
    if compared is not None:
        print(compared, file=sys.stderr)
    if not fits:
        raise SystemExit(2)


def plan_texts(request: PlanRequest, as_json: bool) -> tuple[str, str | None, bool]:
    """Return the plan as text, its comparison with the run in ``plan.measured``, and whether it fits. Writes it to ``plan.out``."""
    settings = request.search
    planned = search_plan(request)
    summary = summary_of(request, planned)
    compared = None
    if settings.measured is not None:
        compared = comparison(planned.file, measured_seconds(read_trace(planned.file, settings.measured)))
    written = []
    if settings.out is not None and settings.fixed in (None, "config") and planned.refusal is None:
        Path(settings.out).write_text(planned.file.to_yaml(), encoding="utf-8")
        written = [f"written: {settings.out} (start with plan={settings.out})"]
    text = json.dumps(summary.to_json()) if as_json else "\n".join([table(planned), "", *summary.lines(), *written])
    return text, compared, planned.refusal is None


if __name__ == "__main__":
    main()
