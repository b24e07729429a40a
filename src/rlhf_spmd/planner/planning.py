"""From the calls of a step to the problem that is searched, and from what a search finds to ``plan.yaml``. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlhf_spmd.config.registry import find
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.quantized import check_quantized
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.machine import GIB, Machine
from rlhf_spmd.planner.memory import RoleSettings
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile
from rlhf_spmd.planner.problem import CallNode, Option, Plan, Problem, RankRange, Schedule, simulate
from rlhf_spmd.planner.search import NoPlanError, SearchResult
from rlhf_spmd.planner.search.candidates import RankRanges, dominated
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Workload, call_settings, divisors

MOST_STAGES = 16
IN_FLIGHT = (1, 4, 16, 64, 256, 1024)  # rows in flight that are tried
SPARE = 1.02  # cache that the generator is told to take, as a share of what the plan counts on


class CallTimes(Protocol):
    """Seconds [n] of calls, by formulas or from a profile. ``slices``: the values of tp that have times."""

    def slices(self, shape: ModelShape) -> list[int]: ...
    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray: ...
    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray: ...
    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class ModelCall:
    """A call of a role with a model, which a plan places.

    ``name``: ``role.call``. ``method``: as the configuration names it. ``after``: calls that must have ended, by their indices.
    ``settings``: what memory depends on, as configured. ``dealt``: groups or rows that go to its replicas. ``captures``: on
    replicas of one rank, decode steps can be CUDA graphs. ``home`` and ``at_home``: as of :class:`CallNode`. ``cp``: as
    configured; it is not searched.
    """

    name: str
    role: str
    method: str
    kind: str
    after: frozenset[int]
    spec: ModelSpec
    shape: ModelShape
    work: Workload
    settings: RoleSettings
    generation: GenerationConfig
    lora: LoraConfig
    dealt: int
    captures: bool = False
    home: bool = False
    at_home: bool = False
    cp: int = 1

    @property
    def ep(self) -> list[int]:
        """The numbers of ranks that are tried to share the experts."""
        return [1] if self.spec.experts is None or self.kind == "generate" else divisors(self.spec.experts.count)


def layouts(call: ModelCall, size: int, slices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(pp, tp, dp) of ``size`` ranks that the model, its rows and cp allow, tp one of ``slices``. Stages have equally many
    layers if any number of stages allows that."""
    found, size = [], size // call.cp if size % call.cp == 0 else 0
    work, generates, layers = call.work, call.kind == "generate", call.spec.num_hidden_layers
    uneven = all(layers % n for n in range(2, MOST_STAGES + 1))  # nothing divides DeepSeek-V3's 61
    for tp in (n for n in slices if size and size % n == 0):
        for pp in (n for n in divisors(size // tp) if n <= MOST_STAGES and (layers % n == 0 or (uneven and n <= layers))):
            dp = size // tp // pp
            least = call.dealt if generates else call.dealt // work.mini_batches
            if dp > least or (generates and least % dp):
                continue
            try:
                _check_model(call, pp, tp, call.cp, 1, "")
                check_quantized(call.spec, call.lora, tp, "")
            except ValueError:
                continue
            found.append((pp, tp, dp))
    return found


def _keeps_experts_whole(call: ModelCall) -> bool:
    return call.kind == "generate" and call.generation.ep > 1


def _check_model(call: ModelCall, pp: int, tp: int, cp: int, ep: int, where: str) -> None:
    """Raises ValueError if the model cannot be cut so."""
    whole = _keeps_experts_whole(call)
    check_layout(call.spec, where, pp, tp, cp=cp, ep=tp if whole else ep, expert_parallel_generation=whole)


@dataclass(frozen=True)
class ProblemBuilder:
    """Makes the problem that is searched. ``budget``: tokens of a micro-batch. ``fixed``: a plan, if only its options are
    wanted."""

    calls: Sequence[ModelCall]
    machine: Machine
    times: CallTimes
    budget: int
    ahead: int = 0
    fixed: PlanFile | None = None

    def problem(self) -> Problem:
        """Raises ValueError if a call has no layout, or the fixed plan has a layout that cannot be."""
        machine, nodes = self.machine, dict[int, CallNode]()
        every = range_sizes(machine.size, machine.local_size) if self.fixed is None else []
        for number, call in enumerate(self.calls):
            if call.at_home:
                continue
            tied = [i for i, other in enumerate(self.calls) if call.home and other.at_home and other.role == call.role]
            together = [number, *tied]
            calls = [self.calls[i] for i in together]
            sizes = every if self.fixed is None else [self.fixed.calls[call.name].rank_range.count]
            found = [options for size in sizes for options in self._options(calls, size)]
            if not found:
                raise ValueError(
                    f"no layout of {call.name} on up to {machine.size} ranks fits its model and rows: {call.work.rows} rows in "
                    f"{call.work.mini_batches} mini-batches, {call.spec.num_hidden_layers} layers, "
                    f"{call.spec.num_attention_heads} heads"
                )
            for i, one, options in zip(together, calls, zip(*found, strict=True), strict=True):
                nodes[i] = CallNode(one.name, one.role, one.after, options, home=one.home, at_home=one.at_home)
        reserve = memory.HOST_RESERVE if machine.device.on_host else memory.RESERVE
        return Problem(
            tuple(nodes[i] for i in range(len(self.calls))),
            machine.local_size,
            tuple(amount - reserve for amount in machine.memory),
            {call.role: call.shape.params * machine.device.itemsize for call in self.calls},
            machine.device.link,
            machine.network,
            self.ahead,
            frozenset(i for i, call in enumerate(self.calls) if call.kind == "generate" and call.settings.trained),
        )

    def _options(self, tied: Sequence[ModelCall], size: int) -> list[tuple[Option, ...]]:
        """Options on ``size`` ranks of calls that run together, at home if the first one is a home: for each way an option of
        each call, without the ways that another one beats."""
        first, device, found = tied[0], self.machine.device, list[tuple[Option, ...]]()
        there = self._layouts(first, size)
        if not there:
            return []
        given = self._settings(first, there)
        offloads = [(False, False)]
        if self.fixed is not None:
            placed = self.fixed.calls[first.name]
            offloads = [(placed.offload, placed.optim_offload)]
        elif first.home and not device.on_host:
            offloads.append((False, True) if first.settings.trained else (True, False))
        for offload, optim_offload in offloads:
            role = self._role(first, offload, optim_offload)
            estimates = [self._estimate(call, given, role) for call in tied]
            held, beaten = np.zeros(len(given)), np.zeros(len(given), dtype=bool)
            if first.home:
                held = memory.fullest(given, partial(memory.held, first.shape, given, role))
            if self.fixed is None:
                if first.home:
                    pinned = memory.fullest(given, partial(memory.held_by_host, first.shape, given, role))
                    beaten |= self.machine.local_size * pinned > self.machine.host_memory
                seconds, active, _ = zip(*estimates, strict=True)
                compared = given.set(ep=1) if first.home else given  # a home takes its best ep, which movable calls must meet
                beaten |= dominated(compared, np.sum(seconds, axis=0), held, np.max(active, axis=0))
            for i in np.flatnonzero(~beaten).tolist():
                one = given.one(i) | {"offload": offload, "optim_offload": optim_offload}
                layout: dict[str, Any] = {name: one[name] for name in ("pp", "tp", "zero", "zero_size", "ep")}
                options = []
                for call, estimate in zip(tied, estimates, strict=True):
                    took, needs, cache = (float(each[i]) for each in estimate)
                    more: dict[str, Any] = {"in_place": call.kind == "infer", "cache": cache, "settings": one}
                    more["expert_parallel_generation"] = _keeps_experts_whole(call)
                    options.append(Option(size, seconds=took, held=float(held[i]), active=needs, **layout, **more))
                found.append(tuple(options))
        return found

    def _role(self, call: ModelCall, offload: bool, optim_offload: bool) -> RoleSettings:
        device = self.machine.device
        known: dict[str, Any] = {"itemsize": device.itemsize, "on_host": device.on_host}
        return replace(call.settings, **known, offload=offload, optim_offload=optim_offload)

    def _layouts(self, call: ModelCall, size: int) -> list[tuple[int, int, int]]:
        slices = self.times.slices(call.shape)
        if not slices:
            raise ValueError(f"cluster.gpu: the profile has no times of {call.role}'s model; profile again")
        if self.fixed is None:
            return layouts(call, size, slices)
        placed = self.fixed.calls[call.name]
        _check_model(call, placed.pp, placed.tp, placed.cp, placed.ep, f"the plan's calls.{call.name}")
        return [(placed.pp, placed.tp, placed.dp)]

    def _settings(self, call: ModelCall, given: Sequence[tuple[int, int, int]]) -> CallSettings:
        """The settings that are tried in these layouts."""
        placed = self.fixed and self.fixed.calls[call.name]
        more: dict[str, Sequence[int]] = {"micro_tokens": (self.budget,), "cp": ((placed or call).cp,)}
        more |= {"ep": (placed.ep,) if placed else call.ep}
        if placed:
            level, in_flight = CHECKPOINTING.index(placed.activation_checkpointing), placed.max_num_seqs or IN_FLIGHT[-1]
            more |= {"zero": (placed.zero,), "zero_size": (placed.zero_size or 0,)}
            more |= {"checkpointing": (level,), "max_num_seqs": (in_flight,)}
            more |= {"sequence_parallel": (int(placed.sequence_parallel),)}
        elif call.kind == "train":
            more |= {"zero": (0, 1, 2, 3), "checkpointing": (0, 1, 2), "sequence_parallel": (0, 1)}
        elif call.kind == "generate":
            rows = max(call.work.rows // min(layout[2] for layout in given), 1)
            most = min(rows, call.generation.max_num_batched_tokens)
            more |= {"max_num_seqs": sorted({min(number, most) for number in IN_FLIGHT})}
        elif call.home:
            more |= {"zero": (0, 3)}
        elif call.settings.trained:
            more |= {"zero": (0, 1, 3)}
        made = call_settings(given, **more)
        if not placed:
            copies = made.dp * made.cp
            can_be = ((made.zero == 0) | (copies > 1)) & ((made.sequence_parallel == 0) | (made.tp > 1))
            most = np.gcd(copies, call.ep[-1])  # experts among as many ranks as can be, or those of a host: others save little
            inside = np.gcd(most, np.maximum(self.machine.local_size // made.tp, 1))
            made = made.take(can_be & ((made.ep == 1) | (made.ep == inside) | (made.ep == most)))
        device = self.machine.device
        can = call.captures and not device.on_host and (call.spec.experts is None or device.groups_experts)
        if call.kind == "generate" and can and not call.generation.enforce_eager:
            return made.set(graphs=made.pp == 1)
        return made

    def _estimate(self, call: ModelCall, given: CallSettings, role: RoleSettings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(seconds, bytes beside what is held, those of them that a cache takes), [n] each."""
        shape, work, none, device = call.shape, call.work, np.zeros(len(given)), self.machine.device
        buffers = memory.communicators(given, role)
        if call.kind == "generate":
            config = replace(call.generation, num_pages=None)
            parts_of = partial(memory.generate, shape, work, given, role, config)
            cache = parts_of(0 * given.pp)[2]
            needs = buffers + memory.fullest(given, lambda stage: {"work": parts_of(stage)[0]["work"]})
            if self.fixed is not None and self.fixed.calls[call.name].gpu_memory_utilization is None:  # the configuration's
                share, most = config.memory_share(device.on_host), min(self.machine.memory)
                room = share * (most - needs) if device.on_host else share * most - needs - self._resident(call, given)
                cache = np.minimum(cache, np.maximum(room, 0))
            return self.times.generate_seconds(shape, work, given, cache), needs + cache, cache + none
        trains = call.kind == "train"
        active = buffers + memory.fullest(given, partial(memory.train if trains else memory.infer, shape, work, given, role))
        seconds = self.times.train_seconds if trains else self.times.infer_seconds
        params = shape.own_params(given)
        back = device.itemsize * params * role.offload
        if trains and role.optim_offload:
            back = back + 2 * role.states * params * work.mini_batches * work.epochs
        return seconds(shape, work, given) + back / device.host_link, active, none

    def _resident(self, call: ModelCall, given: CallSettings) -> Any:
        """Bytes of weights and states on the ranks of a generate call of the fixed plan: the weights that it generates with,
        and what homes hold there. Its own role's weights become those that it generates with."""
        assert self.fixed is not None
        ranks = self.fixed.calls[call.name].rank_range
        found = self.machine.device.itemsize * call.shape.stage_params(given.pp, given.tp)
        for home in (one for one in self.calls if one.home):
            placed = self.fixed.calls[home.name]
            if ranks.overlaps(placed.rank_range):
                there = self._settings(home, [(placed.pp, placed.tp, placed.dp)])
                role = self._role(home, placed.offload or home.role == call.role, placed.optim_offload)
                found = found + memory.fullest(there, partial(memory.held, home.shape, there, role))
        return found


def range_sizes(size: int, local_size: int) -> list[int]:
    """The numbers of ranks that a search may give a call."""
    node = CallNode("", "", frozenset(), tuple(Option(n, 1, 1, 0.0, 0.0, 0.0) for n in range(1, size + 1)), home=True)
    return list(RankRanges(Problem((node,), local_size, (1.0,) * size, {"": 0.0}, 1.0, 1.0)).by_size)


@dataclass(frozen=True)
class PlanResult:
    """A plan and how it was found. ``refusal``: why it does not fit and what would, if it does not. ``warning``: why it may not
    fit."""

    file: PlanFile
    search: SearchResult
    refusal: str | None = None
    warning: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step, as the file has them."""
        return float(self.file.extra["step_seconds"])


def best_plan(
    calls: Sequence[ModelCall],
    machine: Machine,
    times: CallTimes,
    budgets: Sequence[int],
    budget_key: str | None,
    ahead: int,
    name: str = "exact",
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> PlanResult:
    """The best plan that the search ``name`` finds with one of these token budgets of micro-batches. ``budget_key``: the
    algorithm's setting of the budget, if the plan is to set it. Raises ValueError if no plan fits."""
    search = find("plan.search", "rlhf_spmd.planner.search", name, exports="search").search
    started, plans, refused = time.perf_counter(), list[PlanResult](), list[str]()
    for budget in budgets:
        builder = ProblemBuilder(calls, machine, times, budget, ahead)
        problem = builder.problem()
        try:
            found: SearchResult = search(problem, time_limit_s / len(budgets), seed)
        except NoPlanError as error:
            refused.append(str(error))
            continue
        algorithm = {} if budget_key is None else {budget_key: budget}
        plans.append(PlanResult(to_file(builder, problem, found.plan, simulate(problem, found.plan), algorithm), found))
    if not plans:
        raise ValueError(refused[-1])
    best = min(plans, key=lambda one: one.search.seconds)
    bound, optimal = min(one.search.lower_bound for one in plans), all(one.search.optimal for one in plans)
    took = time.perf_counter() - started
    return replace(best, search=replace(best.search, lower_bound=bound, optimal=optimal, search_seconds=took))


def to_file(
    builder: ProblemBuilder, problem: Problem, plan: Plan, schedule: Schedule, algorithm: Mapping[str, Any]
) -> PlanFile:
    """``plan`` with its predictions. ``algorithm``: settings of that section."""
    placed, machine = dict[str, PlacedCall](), builder.machine
    homes = [(plan[home].rank_range, problem.calls[home].options[plan[home].option].held) for home in problem.homes.values()]
    for call, node, choice, (start, end) in zip(builder.calls, problem.calls, plan, schedule.spans, strict=True):
        option, ranks = node.options[choice.option], choice.rank_range
        moved = 0.0 if node.home or node.at_home else problem.move(node, plan[problem.homes[node.role]], choice)[1]
        held = max(sum(amount for at, amount in homes if rank in at.ranks) for rank in _edges(ranks, plan))
        if machine.device.on_host:
            share = option.cache * SPARE / max(min(problem.memory) - held - moved, 1.0)
        else:
            # not less than the default: nothing else of this process needs memory meanwhile
            share = (held + moved + option.active + (SPARE - 1) * option.cache) / min(machine.memory)
            share = max(share, GenerationConfig().memory_share(on_host=False))
        generates, given = call.kind == "generate", option.settings
        configured = builder.fixed is not None and builder.fixed.calls[call.name].gpu_memory_utilization is None
        placed[call.name] = PlacedCall(
            str(ranks),
            option.pp,
            option.tp,
            given["dp"],
            given["cp"],
            given["ep"],
            call.home,
            option.zero,
            option.zero_size or None,
            bool(given["sequence_parallel"]),
            CHECKPOINTING[given["checkpointing"]],
            given["offload"],
            given["optim_offload"],
            max_num_seqs=given["max_num_seqs"] if generates else None,
            gpu_memory_utilization=round(min(max(share, 0.05), 0.95), 3) if generates and not configured else None,
            graphs=generates and bool(given["graphs"]),
            micro_batches=1 if generates else _micro_batches(call.work, given),
            start=round(start, 4),
            seconds=round(end - start, 4),
            memory_gb=round((held + option.active + moved) / GIB, 2),
        )
    extra = {"step_seconds": round(schedule.seconds, 4)}
    return PlanFile(machine.size, machine.local_size, algorithm, placed, extra)


def _micro_batches(work: Workload, given: Mapping[str, int]) -> int:
    """Micro-batches of a mini-batch on each replica."""
    one = CallSettings(*(np.array([given[f.name]]) for f in fields(CallSettings)))
    return int(work.micro_batches(work.rows / work.mini_batches, one)[0][0])


def _edges(ranks: RankRange, plan: Plan) -> list[int]:
    """One rank of every part of ``ranks`` into which the plan's other ranges cut it."""
    starts = {ranks.first, *(edge for choice in plan for edge in (choice.rank_range.first, choice.rank_range.end))}
    return [rank for rank in sorted(starts) if rank in ranks.ranks]
