"""From the calls of a step to the problem that is searched, and from what a search finds to ``plan.yaml``. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rlhf_spmd.config.registry import find
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.device_times import CallTimes, DeviceTimes, KindSpeeds, measured_speeds
from rlhf_spmd.planner.machine import GIB, Machine
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.options import OptionBuilder
from rlhf_spmd.planner.plan_file import PlanFile
from rlhf_spmd.planner.problem import CallNode, Option, Plan, Problem, RankRange, Schedule, simulate
from rlhf_spmd.planner.search import NoFasterPlanError, NoPlanError, SearchResult

CACHE_MARGIN = 1.02  # cache that the generator is told to take, as a share of what the plan counts on


@dataclass(frozen=True)
class ProblemBuilder:
    """Builds the problem that is searched.

    - times: of each kind of device
    - budget: tokens of a micro-batch
    - ahead: steps that generation runs ahead of training
    - fixed: a plan, if only its options are wanted
    """

    calls: Sequence[ModelCall]
    machine: Machine
    times: Sequence[CallTimes]
    budget: int
    ahead: int = 0
    fixed: PlanFile | None = None

    @cached_property
    def speeds(self) -> KindSpeeds:
        """Return the speeds of the kinds of devices: those of the fixed plan, or those that the times of the calls have.

        Raises ValueError if the fixed plan has several speeds for one kind.
        """
        if self.fixed is None:
            return measured_speeds(self.calls, self.machine, self.times, self.budget)
        compute = self._kind_speeds("speeds", self.fixed.speeds) or (1.0,) * len(self.times)
        return KindSpeeds(compute, self._kind_speeds("generation_speeds", self.fixed.generation_speeds) or compute)

    def _kind_speeds(self, key: str, speeds: Sequence[float]) -> tuple[float, ...]:
        """Return the speed of each kind's ranks; empty if there are none. ``speeds``: of each rank."""
        by_kind: dict[int, set[float]] = {}
        for kind, speed in zip(self.machine.kinds, speeds, strict=False):
            by_kind.setdefault(kind, set()).add(speed)
        if any(len(values) > 1 for values in by_kind.values()):
            raise ValueError(
                f"placement.{key}: ranks of one kind in cluster.groups have different speeds; give each kind a group of its own"
            )
        return tuple(by_kind[kind].pop() for kind in sorted(by_kind))

    def problem(self) -> Problem:
        """Return the problem. Raises ValueError if a call has no layout, or the fixed plan has a layout that cannot be, or if a call
        cannot run ahead of training."""
        for call in self.calls:
            if self.ahead and call.kind == "generate" and call.shares_home and call.settings.trained:
                raise ValueError(
                    f"rollout.max_staleness lets generation run {self.ahead} steps ahead, on other ranks; plans keep {call.name} "
                    f"where {call.role} trains, because its weights have few bits or it generates several times in a step; leave "
                    "it out"
                )
        machine = self.machine
        builder = OptionBuilder(machine, DeviceTimes(self.times, self.speeds), self.budget)
        call_nodes: dict[int, CallNode] = {}
        for index, call in enumerate(self.calls):
            if call.shares_home:
                continue
            indices = [index]  # of the tied calls
            if call.home:
                indices += [i for i, other in enumerate(self.calls) if other.shares_home and other.role == call.role]
            tied_calls = [self.calls[i] for i in indices]
            if self.fixed is None:
                options = builder.searched_options(tied_calls)
            else:
                options = builder.fixed_options(tied_calls, self.calls, self.fixed)
            for i, node, node_options in zip(indices, tied_calls, options, strict=True):
                call_nodes[i] = CallNode(node.name, node.role, node.after, tuple(node_options), node.home, node.shares_home)
        reserve = memory.HOST_RESERVE if machine.device.on_host else memory.RESERVE
        return Problem(
            calls=tuple(call_nodes[i] for i in range(len(self.calls))),
            local_size=machine.local_size,
            memory=tuple(amount - reserve for amount in machine.memory),
            weights={call.role: call.shape.params * machine.device.itemsize for call in self.calls},
            link=machine.device.link,
            network=machine.network,
            ahead=self.ahead,
            generating=frozenset(i for i, call in enumerate(self.calls) if call.kind == "generate" and call.settings.trained),
            kinds=machine.kinds,
        )


@dataclass(frozen=True)
class PlanResult:
    """A plan and how it was found.

    - refusal: why it does not fit and what would; None if it fits
    - warning: why it may not fit; None if it is sure to fit
    """

    file: PlanFile
    search: SearchResult
    refusal: str | None = None
    warning: str | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds of a step, as the file has them."""
        return self.file.step_seconds


def best_plan(
    calls: Sequence[ModelCall],
    machine: Machine,
    times: Sequence[CallTimes],
    budgets: Sequence[int],
    budget_key: str | None,
    ahead: int,
    name: str = "exact",
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> PlanResult:
    """Return the best plan that the search ``name`` finds with one of these token budgets of micro-batches.

    ``budget_key``: the algorithm's setting of the budget, if the plan is to set it. Raises ValueError if no plan fits.
    """
    search = find("plan.search", "rlhf_spmd.planner.search", name, required_attribute="search").search
    started = time.perf_counter()
    plans: list[PlanResult] = []
    refusals: list[str] = []
    lower_bounds: list[float] = []
    timed = False
    for budget in budgets:
        builder = ProblemBuilder(calls, machine, times, budget, ahead)
        ceiling = min((plan.search.seconds for plan in plans), default=math.inf)
        problem = replace(builder.problem(), ceiling=ceiling)
        try:
            result: SearchResult = search(problem, time_limit_s / len(budgets), seed)
        except NoFasterPlanError as error:
            lower_bounds.append(error.lower_bound)
            timed |= error.lower_bound < ceiling
            continue
        except NoPlanError as error:
            refusals.append(str(error))
            continue
        algorithm = {} if budget_key is None else {budget_key: budget}
        file = to_file(builder, problem, result.plan, simulate(problem, result.plan), algorithm)
        plans.append(PlanResult(file, result))
        lower_bounds.append(result.lower_bound)
        timed |= result.timed
    if not plans:
        raise ValueError(refusals[-1])
    best = min(plans, key=lambda plan: plan.search.seconds)
    bound = min(*lower_bounds, best.search.seconds)
    optimal = bound == best.search.seconds
    seconds = time.perf_counter() - started
    return replace(best, search=replace(best.search, lower_bound=bound, optimal=optimal, search_seconds=seconds, timed=timed))


def to_file(
    builder: ProblemBuilder, problem: Problem, plan: Plan, schedule: Schedule, algorithm: Mapping[str, Any]
) -> PlanFile:
    """Return ``plan`` with its predictions. ``algorithm``: settings of that section."""
    placed = {}
    for call, call_node, choice, (start, end) in zip(builder.calls, problem.calls, plan, schedule.spans, strict=True):
        option = call_node.options[choice.option]
        _, copy_bytes = problem.weight_copy_cost(call_node, plan[problem.homes[call_node.role]], choice)
        resident = _fullest_resident(problem, plan, choice.rank_range)
        is_configured = builder.fixed is not None and builder.fixed.calls[call.name].gpu_memory_utilization is None
        is_planned = call.kind == "generate" and not is_configured
        share = (
            _memory_share(builder.machine, problem, choice.rank_range, resident + copy_bytes, option, call.generation.kv_cache)
            if is_planned
            else None
        )
        needed, room = _fullest_rank(builder.machine, problem, choice.rank_range, resident + copy_bytes, option)
        placed[call.name] = replace(
            option.settings,
            ranks=str(choice.rank_range),
            gpu_memory_utilization=share,
            start=round(start, 4),
            seconds=round(end - start, 4),
            memory_gb=round(needed / GIB, 2),
            room_gb=round(room / GIB, 2),
        )
    machine = builder.machine
    if builder.fixed is None:
        speeds = tuple(builder.speeds.compute[kind] for kind in machine.kinds)
        generation_speeds = tuple(builder.speeds.generation[kind] for kind in machine.kinds)
    else:
        speeds = builder.fixed.speeds
        generation_speeds = builder.fixed.generation_speeds
    step_seconds = round(schedule.seconds, 4)
    return PlanFile(machine.size, machine.local_size, algorithm, placed, step_seconds, speeds, generation_speeds)


def _fullest_resident(problem: Problem, plan: Plan, ranks: RankRange) -> float:
    """Return the bytes that homes hold on the fullest of ``ranks``."""
    homes = [(plan[i].rank_range, problem.calls[i].options[plan[i].option].resident) for i in problem.homes.values()]
    edges = {ranks.first, *(edge for home, _ in homes for edge in (home.first, home.end))}
    return max(sum(amount for home, amount in homes if rank in home.ranks) for rank in sorted(edges) if rank in ranks.ranks)


def _fullest_rank(machine: Machine, problem: Problem, ranks: RankRange, resident: float, option: Option) -> tuple[float, float]:
    """Return the bytes of the rank that has least left in a call on ``ranks`` beside ``resident`` bytes, and its device's."""
    by_kind = zip(problem.parts_of_kinds(ranks), option.call_bytes, strict=True)
    needs = [(resident + amount, machine.memory[parts[0].first]) for parts, amount in by_kind]
    return min(needs, key=lambda need: need[1] - need[0])


def _memory_share(
    machine: Machine, problem: Problem, ranks: RankRange, resident: float, option: Option, kv_cache: str
) -> float:
    """Return ``gpu_memory_utilization`` of a generating call on ``ranks`` beside ``resident`` bytes of weights and states."""
    memory = slice(ranks.first, ranks.end)
    if machine.device.on_host:
        share = option.cache * CACHE_MARGIN / max(min(problem.memory[memory]) - resident, 1.0)
    else:
        share = max(
            (resident + amount + (CACHE_MARGIN - 1) * option.cache) / machine.memory[parts[0].first]
            for parts, amount in zip(problem.parts_of_kinds(ranks), option.call_bytes, strict=True)
        )
        if kv_cache != "keep":  # nothing else of this process needs memory meanwhile
            share = max(share, GenerationConfig().memory_share(on_host=False))
    return round(min(max(share, 0.05), 0.95), 3)
