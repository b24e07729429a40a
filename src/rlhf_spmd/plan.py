"""Where and how every call of a training run should run on a cluster: the fastest plan that fits, for `train plan=FILE`.

python -m rlhf_spmd.plan --config configs/quickstart_ppo.yaml cluster.nodes=2 cluster.gpus_per_node=8 cluster.gpu=h100
torchrun --nproc-per-node 8 -m rlhf_spmd.plan profile --config FILE plan.out=profile.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.config.keys import list_keys
from rlhf_spmd.config.registry import find
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.files import DataError
from rlhf_spmd.parallel.program import ProgramContext, ProgramSettings, read_command_line, run_program
from rlhf_spmd.parallel.world import read_launch
from rlhf_spmd.planner.machine import ClusterConfig, Machine, is_file
from rlhf_spmd.planner.profile import Profile, read_profile, write_profile
from rlhf_spmd.planner.search import Found
from rlhf_spmd.planner.shape import Workload
from rlhf_spmd.planner.simulate import simulate
from rlhf_spmd.runtime import outline, planning
from rlhf_spmd.runtime.plan_file import PlanFile, read_plan
from rlhf_spmd.runtime.planned_calls import PlannedNode, planned_nodes
from rlhf_spmd.runtime.profiling import profile
from rlhf_spmd.train import Prepared, TrainConfig, check_duration, describe_run, read_config, trace

BUDGETS = (2.0, 1.0, 0.5, 0.25)  # of the configuration's token budget, those that are tried


@dataclass(frozen=True)
class SearchConfig:
    """``plan``. ``search``: a module of ``planner.search``, or the dotted name of one's own. ``fixed``: a plan, which is evaluated
    instead. ``time_limit_s`` and ``seed``: of the search. ``out``: where the plan goes (of ``profile``: the profile)."""

    search: str = "exact"
    fixed: str | None = None
    time_limit_s: float = 60.0
    seed: int = 0
    out: str = "plan.yaml"

    def check(self, where: str) -> None:
        check_bounds(self, where, "time_limit_s", above=0)
        find(f"{where}.search", "rlhf_spmd.planner.search", self.search, exports="search")


SECTIONS = {
    "models": dict[str, outline.PlannedRoleConfig],
    "cluster": ClusterConfig,
    "workload": outline.WorkloadConfig,
    "plan": SearchConfig,
}


@dataclass(frozen=True)
class Planned:
    """What was found, and what it is of. ``budget``: tokens of a micro-batch."""

    file: PlanFile
    found: Found
    fits: bool
    nodes: Sequence[PlannedNode] = field(default_factory=list)


def read_run(path: str | None, overrides: Sequence[str]) -> tuple[TrainConfig, list[PlannedNode], Workload]:
    """The configuration, the calls of its step, and the rows. Local; needs neither data nor tokenizers nor weights.

    Raises ConfigError, ValueError or DataError, one line each.
    """
    config, module = read_config(path, overrides, more=SECTIONS)
    config, _ = check_duration(config)
    models = {role: without_exactness(one) for role, one in config.models.items()}
    with outline.directories(models) as given:
        sections, rewards, described = describe_run(replace(config, models=given), given)
    training = {name: outline.stand_in(one) for name, one in sections.items() if isinstance(one, DatasetConfig)}
    described = {role: replace(one, config=without_exactness(one.config)) for role, one in described.items()}
    ready = Prepared(config, module, described, rewards, outline.CharacterTokenizer(), training, {})
    work = config.workload.of(next(iter(sections.values())), config.sampling.n)  # type: ignore[attr-defined]
    return config, planned_nodes(trace(ready), described, work), work


def without_exactness(config: Any) -> Any:
    """Training's log-probs take a call of their own, as on GPUs, unless the configuration demands otherwise."""
    generation = config.generation
    return replace(config, generation=replace(generation, exact=False)) if generation.exact is None else config


def machine_of(cluster: ClusterConfig) -> tuple[Machine, Profile | None]:
    """Raises ValueError for a profile that cannot be read."""
    measured = read_profile(cluster.hosts[0][2]) if is_file(cluster.hosts[0][2]) else None
    return cluster.machine(measured.device if measured else None), measured


def plan(path: str | None, overrides: Sequence[str]) -> Planned:
    """Raises ConfigError, ValueError or DataError, one line each."""
    config, nodes, work = read_run(path, overrides)
    settings: SearchConfig = config.plan
    machine, measured = machine_of(config.cluster)  # type: ignore[attr-defined]
    times = planning.Measured(measured) if measured else planning.Formulas(machine)
    limits, ahead = config.algorithm.limits, config.placement.max_staleness
    key = limits.where.removeprefix("algorithm.")
    fixed = read_plan(settings.fixed) if settings.fixed else None
    if fixed is not None:
        check_calls(fixed, nodes, machine, settings.fixed)
        budgets = [int(fixed.algorithm.get(key, limits.max_tokens))]
    else:
        budgets = [round(limits.max_tokens * share) for share in BUDGETS]
        budgets = [one for one in budgets if one >= work.longest] or [limits.max_tokens]
    started = time.perf_counter()
    search = find("plan.search", "rlhf_spmd.planner.search", settings.search, exports="search").search
    best: Planned | None = None
    bound, refused = float("inf"), ""
    for budget in budgets if limits.rows is None else budgets[:1]:
        made = planning.Planning(nodes, machine, times, budget, ahead, fixed)
        problem = made.problem()
        try:
            if fixed is not None:
                chosen = planning.fixed_plan(problem, fixed)
                seconds = simulate(problem, chosen).seconds
                found = Found(chosen, seconds, seconds, False, 1, 0.0)
            else:
                found = search(problem, settings.time_limit_s / len(budgets), settings.seed)
        except ValueError as error:
            refused = refused or str(error)
            continue
        schedule = simulate(problem, found.plan)
        bound = min(bound, found.lower_bound)
        if best is None or schedule.seconds < best.found.seconds:
            algorithm = {key: budget} if limits.rows is None else {}
            file = planning.to_file(made, problem, found.plan, schedule, algorithm)
            best = Planned(file, found, schedule.fits, nodes)
    if best is None:
        raise ValueError(refused)
    found = replace(best.found, lower_bound=bound, search_seconds=time.perf_counter() - started)
    return replace(best, found=found)


def check_calls(fixed: PlanFile, nodes: Sequence[PlannedNode], machine: Machine, path: str | None) -> None:
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


def to_json(planned: Planned) -> dict[str, Any]:
    calls = {name: asdict(call) | {"ranks": list(call.mesh.ranks)} for name, call in planned.file.calls.items()}
    found = planned.found
    return {
        "calls": calls,
        "step_seconds": planned.file.told["step_seconds"],
        "lower_bound_seconds": found.lower_bound,
        "optimal": found.optimal,
        "search_seconds": found.search_seconds,
        "fits": planned.fits,
        "algorithm": dict(planned.file.algorithm),
    }


def table(planned: Planned) -> str:
    """The plan for people."""
    titles = ("call", "ranks", "pp", "tp", "dp", "zero", "recompute", "micro-batches", "from s", "seconds", "GiB/rank")
    rows = [titles]
    for name, call in planned.file.calls.items():
        more = ("offload " if call.offload else "") + ("optim.offload" if call.optim_offload else "")
        rows.append(
            (
                f"{name}{' *' if call.home else ''}",
                call.ranks,
                str(call.pp),
                str(call.tp) + (" sp" if call.sequence_parallel else ""),
                str(call.dp),
                str(call.zero) + (f" {more.strip()}" if more else ""),
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
    if not planned.fits:
        lines.append("does NOT fit into the memory of its ranks")
    return "\n".join(lines)


def measure(context: ProgramContext[tuple[TrainConfig, list[PlannedNode], Workload]]) -> None:
    """Collective over the world: every rank of it must call."""
    config, nodes, work = context.prepared
    models = dict.fromkeys((node.spec, node.plan.worker.head) for node in nodes)  # type: ignore[union-attr]
    dtype = nodes[0].plan.config.torch_dtype(context.world.device)
    rows = max(node.work.rows for node in nodes)
    found = profile(context.world, models, replace(work, rows=rows), config.algorithm.limits.max_tokens, dtype)
    if context.world.rank == 0:
        write_profile(found, Path(config.plan.out))
        print(f"{config.plan.out}: cluster.gpu={config.plan.out} plans with it", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    profiles, as_json = "profile" in given[:1], "--json" in given

    def keys() -> Iterator[str]:
        return list_keys(TrainConfig, SECTIONS)

    config, overrides = read_command_line("plan", __doc__, keys, [one for one in given[profiles:] if one != "--json"])
    if profiles:
        run_program(lambda: read_run(config, overrides), measure, lambda ready: ProgramSettings())
        return
    try:
        if read_launch().size > 1:
            raise ConfigError("plan searches in one process; start it without torchrun (but plan profile)")
        planned = plan(config, overrides)
        out = Path(overrides_out(config, overrides))
        if planned.fits:
            out.write_text(planned.file.to_yaml(), encoding="utf-8")
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(to_json(planned)) if as_json else table(planned))
    if not planned.fits:
        raise SystemExit(2)


def overrides_out(path: str | None, overrides: Sequence[str]) -> str:
    return str(read_config(path, overrides, more=SECTIONS)[0].plan.out)


if __name__ == "__main__":
    main()
