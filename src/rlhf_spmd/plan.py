"""Where and how every call of a training run should run on a cluster: the fastest plan that fits, for `train plan=FILE`.

rlhf-spmd plan --config configs/quickstart_ppo.yaml cluster.nodes=2 cluster.gpus_per_node=8 cluster.gpu=h100
rlhf-spmd plan profile --nproc-per-node 8 --config FILE plan.out=profile.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd import train
from rlhf_spmd.config.bounds import SECONDS, check_bounds
from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.controller import Graph
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.files import DataError
from rlhf_spmd.planner.costs import Formulas
from rlhf_spmd.planner.machine import ClusterConfig, Machine, is_file
from rlhf_spmd.planner.placement import AUTO
from rlhf_spmd.planner.plan_file import PlanFile, read_plan
from rlhf_spmd.planner.plan_page import compare, measured_seconds, page, read_trace
from rlhf_spmd.planner.problem import Choice
from rlhf_spmd.planner.profile import Measured, Profile, read_profile, write_profile
from rlhf_spmd.planner.search import Found
from rlhf_spmd.planner.shape import Workload
from rlhf_spmd.planner.simulate import simulate
from rlhf_spmd.process.command_line import read_command_line, refuse
from rlhf_spmd.process.program import ProgramContext, run_program
from rlhf_spmd.train import TrainConfig, TrainJob, describe_run, read_config, trace
from rlhf_spmd.training import checks, planning
from rlhf_spmd.training import plan_inputs as outline
from rlhf_spmd.training.checked_plan import checked_plan
from rlhf_spmd.training.checks import UNKNOWN_STEPS
from rlhf_spmd.training.memory import StepFacts
from rlhf_spmd.training.memory_check import check_memory, decide_checkpointing, with_checkpointing
from rlhf_spmd.training.placing import place
from rlhf_spmd.training.plan_summary import PlanSummary, summarise
from rlhf_spmd.training.planned_calls import PlannedNode, placed_calls, planned_nodes
from rlhf_spmd.training.profiling import profile
from rlhf_spmd.training.roles import RolePlan, generating


@dataclass(frozen=True)
class SearchConfig:
    """``plan``.

    - search: how plans are searched for: `exact`, `mcmc`, `enumerate`, `grid`, or a module of your own by its dotted name or file
    - fixed: a plan, which is evaluated instead; `config`: the configuration's own placement and layouts
    - time_limit_s: of the search, seconds
    - seed: of `mcmc`
    - out: where the plan goes, and beside it its picture as HTML; of `plan profile` the profile
    - measured: directory of a run that followed the plan: compared with it, call by call
    """

    search: str = "exact"
    fixed: str | None = None
    time_limit_s: float = 60.0
    seed: int = 0
    out: str = "plan.yaml"
    measured: str | None = None

    def check(self, where: str) -> None:
        check_bounds(self, where, "time_limit_s", **SECONDS)
        out = Path(self.out)
        if out.suffix == ".html" or out.is_dir() or not out.absolute().parent.is_dir():
            raise ValueError(
                f"{where}.out={self.out}: must be a file in a directory that exists, and not .html, which its picture is"
            )
        find(f"{where}.search", "rlhf_spmd.planner.search", self.search, exports="search")


SECTIONS = {
    "models": dict[str, outline.PlannedRoleConfig],
    "cluster": ClusterConfig,
    "workload": outline.WorkloadConfig,
    "plan": SearchConfig,
}


@dataclass(frozen=True)
class Run:
    """What a plan is made from. ``work``: lengths of rows. ``described``: roles that are not placed yet."""

    config: TrainConfig
    nodes: list[PlannedNode]
    work: Workload
    graph: Graph
    described: dict[str, RolePlan]


def read_run(path: str | None, overrides: Sequence[str]) -> Run:
    """Local; needs neither data nor tokenizers nor weights. Raises ConfigError, ValueError or DataError, one line each."""
    config, module = read_config(path, overrides, more=SECTIONS)
    config, _ = checks.check_duration(config)
    sized = [role for role, one in config.models.items() if one.spec is not None]
    rewards = {role: replace(one, model=None) if role in sized else one for role, one in config.rewards.items()}
    config = replace(config, rewards=rewards, reward=replace(config.reward, model=None) if "reward" in sized else config.reward)
    with outline.directories(config.models) as given:
        sections, rewards, described = describe_run(replace(config, models=given), given, weights=False)
    training = {name: outline.stand_in(one) for name, one in sections.items() if isinstance(one, DatasetConfig)}
    for role, one in generating(described).items():
        described[role] = replace(one, config=without_exactness(one.config))
    graph = trace(TrainJob(config, module, described, rewards, outline.CharacterTokenizer(), training, {}))
    work = config.workload.of(next(iter(sections.values())), config.sampling.n)
    return Run(config, planned_nodes(graph, described, work), work, graph, described)


def without_exactness(config: Any) -> Any:
    """Training's log-probs take a call of their own, as on GPUs, unless the configuration demands otherwise."""
    generation = config.generation
    return replace(config, generation=replace(generation, exact=False)) if generation.exact is None else config


def machine_of(cluster: ClusterConfig) -> tuple[Machine, Profile | None]:
    """Raises ValueError for a profile that cannot be read."""
    measured = read_profile(cluster.hosts[0][2]) if is_file(cluster.hosts[0][2]) else None
    if measured:
        measured.check_ranks(sum(hosts * each for hosts, each, _ in cluster.hosts), "cluster.gpu")
    return cluster.machine(measured.device if measured else None), measured


def plan(run: Run) -> planning.Planned:
    """Raises ValueError, one line."""
    settings: SearchConfig = run.config.plan
    machine, measured = machine_of(run.config.cluster)  # type: ignore[attr-defined]
    times: planning.Times = Measured(measured, machine) if measured else Formulas(machine)
    if settings.fixed is not None:
        return evaluate(run, machine, times)
    search: dict[str, Any] = {"name": settings.search, "time_limit_s": settings.time_limit_s, "seed": settings.seed}
    return checked_plan(run.config, run.nodes, run.described, step_of(run, machine), machine, times, **search)


def step_of(run: Run, machine: Machine) -> StepFacts:
    """Its rows at their limits."""
    sections = [getattr(run.config, section.key) for section in run.config.algorithm.streams.values()]
    prompt = max(
        (section.max_prompt_length for section in sections if hasattr(section, "max_prompt_length")), default=run.work.prompt
    )
    device = torch.device("cpu" if machine.device.on_host else "cuda")
    limits, ahead = run.config.algorithm.limits, run.config.placement.max_staleness
    return StepFacts(run.graph, float(prompt), run.work.responses, limits, device, ahead, run.config.run.test_freq > 0)


def evaluate(run: Run, machine: Machine, times: planning.Times) -> planning.Planned:
    """The plan that ``plan.fixed`` names, or the configuration's own placement and layouts. Raises ValueError."""
    config, path = run.config, str(run.config.plan.fixed)
    verdict, budget = None, config.algorithm.limits.max_tokens
    if path == "config":
        if config.placement.strategy == AUTO:
            raise ConfigError(
                "plan.fixed=config evaluates a placement, and placement.strategy=auto is none; leave plan.fixed out"
            )
        plans = place(run.described, config.placement, machine.size, machine.local_size, lambda: run.graph)
        step = step_of(run, machine)
        plans = with_checkpointing(plans, decide_checkpointing(plans, step, machine.memory))
        try:
            verdict = check_memory(plans, step, machine.memory, machine.local_size, host_memory=machine.host_memory)
        except ValueError as error:
            verdict = str(error)
        file = PlanFile(machine.size, machine.local_size, {}, placed_calls(run.nodes, plans), {})
    else:
        file = read_plan(path)
        check_calls(file, run.nodes, machine, path)
        budget = int(file.algorithm.get(config.algorithm.limits.where.removeprefix("algorithm."), budget))
    made = planning.Planning(run.nodes, machine, times, budget, config.placement.max_staleness, file)
    problem = made.problem()
    chosen = tuple(Choice(file.calls[call.name].mesh, 0) for call in problem.calls)
    schedule = simulate(problem, chosen)
    if not schedule.fits and path != "config":
        verdict = f"it needs {schedule.excess:.0%} more memory than a rank has"
    found = Found(chosen, schedule.seconds, 0.0, False, 1, 0.0)
    return planning.Planned(planning.to_file(made, problem, chosen, schedule, file.algorithm), found, verdict)


def check_calls(fixed: PlanFile, nodes: Sequence[PlannedNode], machine: Machine, path: str) -> None:
    """Raises ValueError where a given plan is of other calls or ranks."""
    missing = [node.name for node in nodes if node.name not in fixed.calls]
    more = [name for name in fixed.calls if name not in {node.name for node in nodes}]
    if missing or more:
        raise ValueError(
            f"plan.fixed={path} is of other calls: {'it lacks ' + missing[0] if missing else 'there is no ' + more[0]}; the step's are "
            f"{', '.join(dict.fromkeys(node.name for node in nodes))}"
        )
    last = max(call.mesh.end for call in fixed.calls.values())
    if last > machine.size:
        raise ValueError(f"plan.fixed={path} has rank {last - 1}, and the cluster has ranks 0 to {machine.size - 1}")


def to_json(planned: planning.Planned) -> dict[str, Any]:
    calls = {name: asdict(call) | {"ranks": list(call.mesh.ranks)} for name, call in planned.file.calls.items()}
    found = planned.found
    return {
        "calls": calls,
        "step_seconds": planned.file.told["step_seconds"],
        "lower_bound_seconds": found.lower_bound,
        "optimal": found.optimal,
        "search_seconds": found.search_seconds,
        "fits": planned.verdict is None,
        "refusal": planned.verdict,
        "algorithm": dict(planned.file.algorithm),
    }


def summary_of(run: Run, planned: planning.Planned) -> PlanSummary:
    """Beside what is planned, the configuration's own placement and layouts are judged."""
    machine, _ = machine_of(run.config.cluster)  # type: ignore[attr-defined]
    own: planning.Planned | str | None = None
    if run.config.plan.fixed is None and run.config.placement.strategy != AUTO:
        try:
            own = plan(replace(run, config=replace(run.config, plan=replace(run.config.plan, fixed="config"))))
        except ValueError as error:
            own = str(error)
    rows = max(node.work.rows for node in run.nodes)
    tokens = rows * (run.work.prompt + sum(run.work.responses) / len(run.work.responses))
    steps = run.config.run.steps
    return summarise(planned, machine, tokens, None if steps == UNKNOWN_STEPS else steps, own)


def table(planned: planning.Planned) -> str:
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
                str(call.dp),
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
    found = planned.found
    proof = "the optimum" if found.optimal else f"at least {found.lower_bound:.4g} s" if found.lower_bound else "no bound"
    lines.append(f"step {planned.file.told['step_seconds']:.4g} s ({proof}; searched for {found.search_seconds:.2f} s)")
    lines.append("* the role's weights stay here")
    return "\n".join(lines)


def measure(context: ProgramContext[Run]) -> None:
    """Collective over the world: every rank of it must call."""
    run, world = context.prepared, context.world
    nodes = sorted(run.nodes, key=lambda node: node.kind == "generate")  # those count whose role generates
    models = {(node.spec, node.plan.worker.head): node.plan.config.generation for node in nodes}  # type: ignore[union-attr]
    dtype = run.nodes[0].plan.config.torch_dtype(world.device)
    work = replace(run.work, rows=max(node.work.rows for node in run.nodes))
    found = profile(world, models, work, run.config.algorithm.limits.max_tokens, dtype)
    if world.rank == 0:
        write_profile(found, Path(run.config.plan.out))
        print(f"profile written: plan with cluster.gpu={run.config.plan.out}", file=sys.stderr)


def keys(overrides: Sequence[str] = ()) -> Iterator[Key]:
    """Of a run of the algorithm that the overrides name, and of the plan."""
    return train.keys(overrides, more=SECTIONS)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. ``profile`` before the other arguments measures instead; ``--json`` prints JSON."""
    given = list(sys.argv[1:] if argv is None else argv)
    profiles, as_json = "profile" in given[:1], "--json" in given

    def read(path: str | None, overrides: Sequence[str]) -> TrainConfig:
        return read_config(path, overrides[profiles:], more=SECTIONS)[0]

    rest = [one for one in given if one != "--json"]
    command = read_command_line("plan", __doc__, keys, read, rest, has_ranks=profiles)
    config, overrides = command.config, command.overrides[profiles:]
    if command.dry_run:
        refuse("--dry-run: plan trains nothing; leave it out")
    if profiles:
        run_program(lambda: read_run(config, overrides), measure)
        return
    try:
        if command.launch.size > 1:
            raise ConfigError("plan is one process: start it without torchrun, which only `plan profile` needs")
        run = read_run(config, overrides)
        planned, settings = plan(run), run.config.plan
        summary = summary_of(run, planned)
        out = Path(settings.out)
        picture, writes = out.with_suffix(".html"), settings.fixed in (None, "config") and planned.verdict is None
        if writes:
            out.write_text(planned.file.to_yaml(), encoding="utf-8")
        picture.write_text(page(planned.file, settings.measured, summary.lines()), encoding="utf-8")
    except (DataError, ValueError, OSError) as error:
        print(f"config error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if as_json:
        print(json.dumps(to_json(planned) | summary.to_json()))
    else:
        written = [f"written: {out} (start with plan={out})"] if writes else []
        print("\n".join([table(planned), "", *summary.lines(), *written, f"picture: {picture}"]))
    if settings.measured is not None:
        print(comparison(planned.file, settings.measured), file=sys.stderr)
    if planned.verdict is not None:
        raise SystemExit(2)


def comparison(file: PlanFile, run: str) -> str:
    """Each call's planned and measured seconds."""
    rows = compare(file, measured_seconds(read_trace(file, run)))
    return "\n".join(
        f"{name}: planned {planned:.3g} s, {'not measured' if error is None else f'measured {seconds:.3g} s, {error:+.0%}'}"
        for name, planned, seconds, error in rows
    )


if __name__ == "__main__":
    main()
