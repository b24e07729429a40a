"""Where and how every call of a training run should run on a cluster: the fastest plan that fits, for `train plan=FILE`.

rlhf-spmd plan --config configs/quickstart_ppo.yaml cluster.nodes=2 cluster.gpus_per_node=8 cluster.gpu=h100 plan.out=plan.yaml
rlhf-spmd plan profile --nproc-per-node 8 --config FILE plan.out=profile.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from rlhf_spmd.config.constraints import Seconds
from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.controller import Graph
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.files import DataError
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.machine import ClusterConfig, Machine, is_file
from rlhf_spmd.planner.memory import ERROR
from rlhf_spmd.planner.placement import AUTO
from rlhf_spmd.planner.plan_file import PlanFile, read_plan
from rlhf_spmd.planner.plan_summary import PlanSummary, compare, measured_seconds, read_trace
from rlhf_spmd.planner.planning import CallTimes, ModelCall, PlanResult, ProblemBuilder, to_file
from rlhf_spmd.planner.problem import Choice, simulate
from rlhf_spmd.planner.profile import ProfileTimes, read_profile, write_profile
from rlhf_spmd.planner.search import SearchResult
from rlhf_spmd.planner.shapes import Workload
from rlhf_spmd.preflight import plan_stand_ins
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.preflight.memory_check import check_memory, decide_checkpointing, with_checkpointing
from rlhf_spmd.preflight.memory_estimate import StepFacts, copied_roles
from rlhf_spmd.preflight.placing import place
from rlhf_spmd.preflight.plan_profile import profile
from rlhf_spmd.preflight.plan_roles import checked_plan, model_calls, placed_calls
from rlhf_spmd.preflight.prepare import UNKNOWN_STEPS, describe
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.process.command_line import read_command_line, refuse
from rlhf_spmd.process.program import ProgramContext, run_program
from rlhf_spmd.train import keys as train_keys
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig, read_config
from rlhf_spmd.workers import ModelWorker
from rlhf_spmd.workers.role_plan import RolePlan, generating_roles


@dataclass(frozen=True)
class SearchConfig:
    """``plan``.

    - search: how plans are searched for: `exact`, `mcmc`, `enumerate`, `grid`, or a module of your own by its dotted name or file
    - fixed: a plan, which is evaluated instead; `config`: the configuration's own placement and layouts
    - time_limit_s: of the search, seconds
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
        find(f"{where}.search", "rlhf_spmd.planner.search", self.search, exports="search")


SECTIONS = {
    "models": dict[str, plan_stand_ins.PlannedRoleConfig],
    "cluster": ClusterConfig,
    "workload": plan_stand_ins.WorkloadConfig,
    "plan": SearchConfig,
}


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made from. ``work``: lengths of rows. ``described``: roles that are not placed yet."""

    config: TrainConfig
    calls: list[ModelCall]
    work: Workload
    graph: Graph
    described: dict[str, RolePlan]

    @cached_property
    def usual(self) -> PlanResult | str | None:
        """The plan of the configuration's own placement and layouts, or why there is none; None if it leaves them to the planner."""
        if self.config.placement.strategy == AUTO:
            return None
        try:
            return evaluate(self, "config")
        except ValueError as error:
            return str(error)


def read_run(path: str | None, overrides: Sequence[str]) -> PlanRequest:
    """Local; needs neither data nor tokenizers nor weights. Raises ConfigError, ValueError or DataError, one line each."""
    config, module = read_config(path, overrides, more=SECTIONS)
    sized = [role for role, one in config.models.items() if one.spec is not None]  # type: ignore[attr-defined]
    rewards = {role: replace(one, model=None) if role in sized else one for role, one in config.rewards.items()}
    config = replace(config, rewards=rewards, reward=replace(config.reward, model=None) if "reward" in sized else config.reward)
    run = RunPlan(config, module, tokenizer=cast(Any, plan_stand_ins.CharacterTokenizer()))
    with plan_stand_ins.directories(config.models) as given:
        run = describe(run, given, weights=False)
    roles = dict(run.roles)
    for role, one in generating_roles(roles).items():
        roles[role] = replace(one, config=without_exactness(one.config))
    training = {name: plan_stand_ins.stand_in(data) for name, data in run.streams.items() if isinstance(data, DatasetConfig)}
    graph = trace(replace(run, roles=roles, training=training, exact_rollouts=exact_rollouts(config, roles)))
    workload: plan_stand_ins.WorkloadConfig = run.config.workload  # type: ignore[attr-defined]
    work = workload.of(next(iter(run.streams.values())), config.sampling.n)
    return PlanRequest(run.config, model_calls(graph, roles, work), work, graph, roles)


def without_exactness(config: Any) -> Any:
    """``config`` with a call of its own for training's log-probs, as on GPUs, unless it demands otherwise."""
    generation = config.generation
    is_open = generation.reuse_rollout_log_probs is None
    return replace(config, generation=replace(generation, reuse_rollout_log_probs=False)) if is_open else config


def machine_of(cluster: ClusterConfig) -> tuple[Machine, CallTimes]:
    """The machine, and the times of calls there, by the profile that ``cluster.gpu`` names, if it does. Raises ValueError if it
    cannot be read."""
    if not is_file(cluster.hosts[0][2]):
        machine = cluster.machine()
        return machine, FormulaTimes(machine)
    measured = read_profile(cluster.hosts[0][2])
    measured.check_ranks(sum(hosts * each for hosts, each, _ in cluster.hosts), "cluster.gpu")
    machine = cluster.machine(measured.device)
    return machine, ProfileTimes(measured, machine)


def plan(request: PlanRequest) -> PlanResult:
    """Searches a plan, or evaluates the one that ``plan.fixed`` names. Raises ValueError, one line.

    The configuration's own placement and layouts are a candidate: no plan is slower than them if they are sure to fit.
    """
    config, settings = request.config, request.config.plan
    if settings.fixed is not None:
        return evaluate(request, settings.fixed)
    machine, times = machine_of(config.cluster)  # type: ignore[attr-defined]
    search = {"name": settings.search, "time_limit_s": settings.time_limit_s, "seed": settings.seed}
    usual = request.usual
    accepted = usual if isinstance(usual, PlanResult) and usual.refusal is None and usual.warning is None else None
    try:
        planned = checked_plan(config, request.calls, request.described, step_of(request, machine), machine, times, **search)
    except ValueError:
        if accepted is None:
            raise
        return accepted
    if accepted is None or accepted.seconds >= planned.seconds:
        return planned
    bound = min(planned.search.lower_bound, accepted.seconds)
    search_result = replace(planned.search, plan=accepted.search.plan, seconds=accepted.seconds, lower_bound=bound)
    return replace(accepted, search=search_result)


def step_of(request: PlanRequest, machine: Machine) -> StepFacts:
    """The step with rows at their limits."""
    config = request.config
    sections = [getattr(config, section.key) for section in config.algorithm.streams.values()]
    prompts = [section.max_prompt_length for section in sections if hasattr(section, "max_prompt_length")]
    prompt, device = float(max(prompts, default=request.work.prompt)), "cpu" if machine.device.on_host else "cuda"
    limits, ahead, validates = config.algorithm.limits, config.placement.max_staleness, config.run.test_freq > 0
    copied = copied_roles(config, request.described)
    return StepFacts(request.graph, prompt, request.work.responses, limits, torch.device(device), ahead, validates, copied)


def evaluate(request: PlanRequest, path: str) -> PlanResult:
    """The plan in the file ``path``, or with "config" the configuration's own placement and layouts. Raises ValueError."""
    config = request.config
    machine, times = machine_of(config.cluster)  # type: ignore[attr-defined]
    refusal = warning = None
    budget = config.algorithm.limits.max_tokens
    if path == "config":
        if config.placement.strategy == AUTO:
            raise ConfigError("plan.fixed=config needs a placement, and placement.strategy=auto is none; leave plan.fixed out")
        plans = place(request.described, config.placement, machine.size, machine.local_size, lambda: request.graph)
        step = step_of(request, machine)
        plans = with_checkpointing(plans, decide_checkpointing(plans, step, machine.memory))
        try:
            warning = check_memory(plans, step, machine.memory, machine.local_size, host_memory=machine.host_memory)
        except ValueError as error:
            refusal = str(error)
        file = PlanFile(machine.size, machine.local_size, {}, placed_calls(request.calls, plans), {})
    else:
        file = read_plan(path)
        check_calls(file, request.calls, machine, path)
        budget = int(file.algorithm.get(config.algorithm.limits.where.removeprefix("algorithm."), budget))
    builder = ProblemBuilder(request.calls, machine, times, budget, config.placement.max_staleness, file)
    problem = builder.problem()
    chosen = tuple(Choice(file.calls[call.name].rank_range, 0) for call in problem.calls)
    schedule = simulate(problem, chosen)
    if not schedule.fits and path != "config":
        refusal = f"it needs {schedule.excess:.0%} more memory than a rank has"
        if schedule.excess <= ERROR:  # which training only warns of
            refusal, warning = None, f"{refusal}; that may be too much"
    found = SearchResult(chosen, schedule.seconds, 0.0, False, 1, 0.0)
    return PlanResult(to_file(builder, problem, chosen, schedule, file.algorithm), found, refusal, warning)


def check_calls(fixed: PlanFile, calls: Sequence[ModelCall], machine: Machine, path: str) -> None:
    """Raises ValueError if a given plan has other calls or ranks."""
    names = {call.name: None for call in calls}
    missing = [name for name in names if name not in fixed.calls]
    more = [name for name in fixed.calls if name not in names]
    if missing or more:
        raise ValueError(
            f"plan.fixed={path} is of other calls: {'it lacks ' + missing[0] if missing else 'there is no ' + more[0]}; the step's are "
            f"{', '.join(names)}"
        )
    last = max(call.rank_range.end for call in fixed.calls.values())
    if last > machine.size:
        raise ValueError(f"plan.fixed={path} has rank {last - 1}, and the cluster has ranks 0 to {machine.size - 1}")


def to_json(planned: PlanResult, summary: PlanSummary) -> dict[str, Any]:
    calls = {name: asdict(call) | {"ranks": list(call.rank_range.ranks)} for name, call in planned.file.calls.items()}
    found = planned.search
    return {
        "calls": calls,
        "step_seconds": planned.seconds,
        "lower_bound_seconds": found.lower_bound,
        "optimal": found.optimal,
        "search_seconds": found.search_seconds,
        "fits": planned.refusal is None,
        "refusal": planned.refusal,
        "warning": planned.warning,
        "algorithm": dict(planned.file.algorithm),
        **summary.to_json(),
    }


def summary_of(request: PlanRequest, planned: PlanResult) -> PlanSummary:
    """What the plan comes to, beside the configuration's own placement and layouts."""
    config = request.config
    machine, _ = machine_of(config.cluster)  # type: ignore[attr-defined]
    usual = request.usual if config.plan.fixed is None else None
    rows, steps = max(call.work.rows for call in request.calls), config.run.steps
    tokens = rows * (request.work.prompt + sum(request.work.responses) / len(request.work.responses))
    cluster = config.cluster.text(machine)  # type: ignore[attr-defined]
    return PlanSummary(planned, machine, cluster, tokens, None if steps == UNKNOWN_STEPS else steps, usual)


def table(planned: PlanResult) -> str:
    """The plan for people."""
    titles = ("call", "ranks", "pp", "tp", "dp", "zero", "recompute", "micro-batches", "from s", "seconds", "GiB/rank")
    rows = [titles]
    for name, call in planned.file.calls.items():
        of = f" of {call.zero_size}" if call.zero_size else ""
        more = ("offload " if call.offload else "") + ("optim.offload" if call.optim_offload else "")
        rows.append(
            (
                f"{name}{' *' if call.home else ''}",
                call.ranks,
                str(call.pp),
                str(call.tp) + (" sp" if call.sequence_parallel else ""),
                str(call.dp) + "".join(f" {axis}{n}" for axis, n in (("cp", call.cp), ("ep", call.ep)) if n > 1),
                str(call.zero) + of + (f" {more.strip()}" if more else ""),
                call.activation_checkpointing if call.activation_checkpointing != "none" else "-",
                str(call.micro_batches),
                f"{call.start:.3g}",
                f"{call.seconds:.3g}",
                f"{call.memory_gb:.1f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    found = planned.search
    proof = "the optimum" if found.optimal else f"at least {found.lower_bound:.4g} s" if found.lower_bound else "no bound"
    lines.append(f"step {planned.seconds:.4g} s ({proof}; searched for {found.search_seconds:.2f} s)")
    lines.append("* the role's weights stay here")
    return "\n".join(lines)


def read_profiled(path: str | None, overrides: Sequence[str]) -> PlanRequest:
    """As :func:`read_run`, for what a profile is made of."""
    request = read_run(path, overrides)
    if request.config.plan.out is None:
        raise ConfigError("plan.out is not given; plan profile writes to it, as in plan.out=profile.json")
    return request


def measure(context: ProgramContext[PlanRequest]) -> None:
    """Collective over the world: every rank of it must call, in program order."""
    request, world = context.prepared, context.world
    calls = sorted(request.calls, key=lambda call: call.kind == "generate")  # the last one's generation settings count
    heads = {role: one.worker.head for role, one in request.described.items() if issubclass(one.worker, ModelWorker)}
    models = {(call.spec, heads[call.role]): call.generation for call in calls}
    dtype = request.described[request.calls[0].role].config.torch_dtype(world.device)
    work = replace(request.work, rows=max(call.work.rows for call in calls))
    found = profile(world, models, work, request.config.algorithm.limits.max_tokens, dtype)
    if world.rank == 0:
        write_profile(found, Path(request.config.plan.out))
        print(f"profile written: plan with cluster.gpu={request.config.plan.out}", file=sys.stderr)


def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
    """The keys of the algorithm that the overrides name, and of the plan."""
    return train_keys(overrides, more=SECTIONS)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. With ``profile`` before the other arguments it measures instead; ``--json`` prints JSON."""
    given = list(sys.argv[1:] if argv is None else argv)
    profiles, as_json = "profile" in given[:1], "--json" in given

    def read(path: str | None, overrides: Sequence[str]) -> TrainConfig:
        return read_config(path, overrides[profiles:], more=SECTIONS)[0]

    asks = bool({"-h", "--help"} & {*given})
    rest = [one for one in given[profiles and asks :] if one != "--json"]
    command = read_command_line("plan", __doc__, keys, read, rest, has_ranks=profiles)
    config, overrides = command.config, command.overrides[profiles:]
    if command.dry_run:
        refuse("--dry-run: plan trains nothing; leave it out")
    if profiles:
        run_program(lambda: read_profiled(config, overrides), measure)
        return
    try:
        if command.launch.size > 1:
            raise ConfigError("plan is one process: start it without torchrun, which only `plan profile` needs")
        request = read_run(config, overrides)
        planned, settings = plan(request), request.config.plan
        summary = summary_of(request, planned)
        written = []
        compared = None if settings.measured is None else comparison(planned.file, settings.measured)
        if settings.out is not None and settings.fixed in (None, "config") and planned.refusal is None:
            Path(settings.out).write_text(planned.file.to_yaml(), encoding="utf-8")
            written = [f"written: {settings.out} (start with plan={settings.out})"]
    except (DataError, ValueError, OSError) as error:
        print(f"config error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if as_json:
        print(json.dumps(to_json(planned, summary)))
    else:
        print("\n".join([table(planned), "", *summary.lines(), *written]))
    if compared is not None:
        print(compared, file=sys.stderr)
    if planned.refusal is not None:
        raise SystemExit(2)


def comparison(file: PlanFile, run: str) -> str:
    """Each call's planned and measured seconds. Raises ValueError as :func:`read_trace`."""
    rows = compare(file, measured_seconds(read_trace(file, run)))
    return "\n".join(
        f"{name}: planned {planned:.3g} s, {'not measured' if error is None else f'measured {seconds:.3g} s, {error:+.0%}'}"
        for name, planned, seconds, error in rows
    )


if __name__ == "__main__":
    main()
