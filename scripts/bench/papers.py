"""What the simulations of the papers' evaluations share: published model sizes, problems of a step, and limits on its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np

from measure import ROOT
from rlhf_spmd import plan
from rlhf_spmd.planner.costs import CALL_SECONDS, FormulaTimes
from rlhf_spmd.planner.device_times import CallTimes
from rlhf_spmd.planner.machine import ClusterConfig, Machine
from rlhf_spmd.planner.memory import RankMemory
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.planning import ProblemBuilder
from rlhf_spmd.planner.problem import CallNode, Option, Plan, Problem, RankRange, simulate
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, greedy_choices, plan_of
from rlhf_spmd.planner.shapes import Workload, call_settings

KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SHAPES = {  # in the order of KEYS
    "llama 7B": (4096, 11008, 32, 32, 32, 32000),
    "llama 13B": (5120, 13824, 40, 40, 40, 32000),
    "llama 33B": (6656, 17920, 60, 52, 52, 32000),
    "llama 34B": (8192, 22016, 48, 64, 8, 32000),
    "llama 65B": (8192, 22016, 80, 64, 64, 32000),
    "llama 70B": (8192, 28672, 80, 64, 8, 32000),
    "llama3 7B": (4096, 14336, 32, 32, 8, 128256),  # ReaL, table 1
    "llama3 13B": (5120, 13824, 40, 40, 40, 128256),
    "llama3 34B": (8192, 22016, 48, 64, 8, 128256),
    "llama3 70B": (8192, 28672, 80, 64, 8, 128256),
}


def step_builder(
    algorithm: str,
    models: Mapping[str, str],
    cluster: ClusterConfig,
    settings: Sequence[str],
    budget: int = 16384,
    times: Callable[[Machine], CallTimes] = FormulaTimes,
    calls: Callable[[Sequence[ModelCall]], Sequence[ModelCall]] = list,
) -> ProblemBuilder:
    """Return the builder of a step of ``configs/quickstart_<algorithm>.yaml`` with ``settings`` on ``cluster``.

    - models: role -> a model of :data:`SHAPES`
    - budget: tokens of a micro-batch
    - times: seconds of calls on a machine
    - calls: the calls that the paper's system makes, from ours
    """
    sizes = [
        f"models.{role}.spec.{key}={value}"
        for role, size in models.items()
        for key, value in zip(KEYS, SHAPES[size], strict=True)
    ]
    config = str(ROOT / "configs" / f"quickstart_{algorithm}.yaml")
    request = plan.read_request(config, ["run.test_freq=0", *settings, *sizes])  # the papers do not validate
    machine, _ = plan.machine_of(cluster)
    kind_times = [times(machine.with_kind(kind)) for kind in range(len(cluster.device_names))]
    ahead = request.config.steps_ahead
    return ProblemBuilder(calls(request.calls), machine, kind_times, budget, ahead)


def with_generation_from_shards(problem: Problem, calls: Sequence[ModelCall], machine: Machine, budget: int) -> Problem:
    """Return the problem with more options of generation: each rank keeps its shard, and every token gathers all layers in turn.

    A token's gathers hide behind its computation, or the other way round. ``calls``: of the problem. ``machine``: with the kind of
    device that generates. ``budget``: tokens of a micro-batch.
    """
    nodes = list(problem.calls)
    times = FormulaTimes(machine)
    for index in problem.generating:
        call = calls[index]
        options = [option for option in nodes[index].options if option.tp * option.pp == 1 < option.size]
        for number, option in enumerate(options):
            settings = call_settings([(1, 1, option.size)], micro_tokens=[budget], zero=[3])
            gathered = RankMemory(call.shape, settings, call.settings, 0).infer(call.work)["gathered weights"]
            token = float(times.infer_seconds(call.shape, Workload(1, 0, (1,)), settings)[0]) - CALL_SECONDS
            options[number] = replace(
                option,
                seconds=max(option.seconds, (1 + call.work.response) * token),
                call_bytes=tuple(amount + float(np.max(gathered)) for amount in option.call_bytes),
                zero=3,
                settings=replace(option.settings, zero=3),
            )
        nodes[index] = replace(nodes[index], options=(*nodes[index].options, *options))
    return replace(problem, calls=tuple(nodes))


def limited(problem: Problem, keep: Callable[[CallNode, Option], bool]) -> Problem:
    """Return the problem with the options that ``keep`` accepts, which is asked for each call; tied calls keep the same ones.

    Raises ValueError if a call keeps none.
    """
    kept: dict[int, list[int]] = {}
    for indices in [*problem.tied.values(), *((i,) for i in problem.movable)]:
        tied = [problem.calls[i] for i in indices]
        options = [n for n in range(len(tied[0].options)) if all(keep(call, call.options[n]) for call in tied)]
        if not options:
            raise ValueError(f"{tied[0].name} keeps no option")
        kept |= dict.fromkeys(indices, options)
    nodes = tuple(
        replace(call, options=tuple(call.options[n] for n in kept[index])) for index, call in enumerate(problem.calls)
    )
    return replace(problem, calls=nodes)


def fastest_plan_in_groups(problem: Problem, groups: Sequence[tuple[str, ...]], least_share: float = 1 / 16) -> Plan | None:
    """Return the fastest plan whose roles share ranks as ``groups`` say, over all numbers of ranks; None if none fits.

    A group may name a call that moves, as in ``plan.yaml``; the other calls of its role stay at the role's ranks.
    ``least_share``: the smallest share of the ranks that a group gets.
    """
    ranges = RankRanges(problem)
    tables = CandidateTables(problem)
    sizes = [size for size in ranges.by_size if size >= problem.size * least_share]
    best: tuple[float, Plan | None] = (inf, None)
    for allocation in product(sizes, repeat=len(groups)):
        homes = _placed(ranges, groups, allocation)
        if homes is None:
            continue
        calls = ((i, problem.calls[i]) for i in problem.movable)
        movable = {i: homes.get(call.name, homes[call.role]) for i, call in calls}
        plan = fastest_plan_on(tables, {role: homes[role] for role in problem.homes}, movable)
        if plan:
            best = min(best, (simulate(problem, plan).seconds, plan), key=lambda each: each[0])
    return best[1]


def fastest_plan_on(tables: CandidateTables, homes: Mapping[str, RankRange], movable: Mapping[int, RankRange]) -> Plan | None:
    """Return a plan on these ranks that no other option of a single home makes faster; None if none fits.

    The greedy choice takes the option that trains fastest. Another one may save its role's other calls more than it costs.
    """
    decided: dict[str, int] = {}
    best: tuple[float, Plan | None] = (inf, None)
    while True:
        before = best[0]
        for role, ranks in homes.items():
            for option in tables.home_options(role, tables.problem.extent(ranks)):
                choices = greedy_choices(tables, homes, movable, decided | {role: option})
                if choices is None:
                    continue
                plan = plan_of(choices)
                schedule = simulate(tables.problem, plan)
                if schedule.fits and schedule.seconds < best[0]:
                    best = schedule.seconds, plan
                    decided = {name: choices[tables.problem.homes[name]].option for name in homes}
        if best[0] == before:
            return best[1]


def _placed(ranges: RankRanges, groups: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> dict[str, RankRange] | None:
    """Return role or call -> its ranks with these sizes of the groups on all ranks, the largest first; None if there are no such
    ranges."""
    if sum(sizes) != ranges.all_ranks.count:
        return None
    first = 0
    homes: dict[str, RankRange] = {}
    for group, size in sorted(zip(groups, sizes, strict=True), key=lambda each: -each[1]):
        ranks = next((ranks for ranks in ranges.by_size[size] if ranks.first == first), None)
        if ranks is None:
            return None
        homes |= dict.fromkeys(group, ranks)
        first += size
    return homes
