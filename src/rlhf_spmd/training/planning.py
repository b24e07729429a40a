"""From a configuration to the problem that is searched, and from what the search finds to ``plan.yaml``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlhf_spmd.config.registry import find
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.machine import GIB, Machine
from rlhf_spmd.planner.memory import RoleSettings
from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.plan_file import PlanFile, PlannedCall, span_of
from rlhf_spmd.planner.problem import Call, Option, Plan, Problem, RankRange
from rlhf_spmd.planner.search import Found, NoPlanError
from rlhf_spmd.planner.shape import CHECKPOINTING, Choices, ModelShape, Workload, choices
from rlhf_spmd.planner.simulate import Schedule, simulate
from rlhf_spmd.training.memory import HOST_RESERVE, role_settings
from rlhf_spmd.training.planned_calls import PlannedNode, layouts
from rlhf_spmd.workers.config import BatchLimits

BUDGETS = (2.0, 1.0, 0.5, 0.25)  # of the configuration's token budget, those that are tried
FLYING = (1, 4, 16, 64, 256, 1024)  # rows in flight that are tried
ROWS_OF = (0, 1, 1, 3)  # how weights lie under ZeRO 0 to 3, see ``Option.zero``
SPARE = 1.02  # of the cache that a plan counts on, in what the generator is told to take


class Times(Protocol):
    """Seconds [n] of calls: by formulas or from a profile. ``slices``: the tp that there are times for. ``captured``: whether steps
    that a CUDA graph can be made of are taken to be one."""

    def captured(self, config: GenerationConfig) -> bool: ...
    def slices(self, shape: ModelShape) -> list[int]: ...

    def infer_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray: ...
    def train_seconds(self, shape: ModelShape, work: Workload, choices: Choices) -> np.ndarray: ...
    def generate_seconds(self, shape: ModelShape, work: Workload, choices: Choices, kv_bytes: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class Candidate:
    """What an option stands for: the layout and the rest of :class:`Choices`; of the bytes that it needs beside what is held those of a
    cache."""

    chosen: Mapping[str, int]
    cache: float
    offload: bool
    optim_offload: bool


@dataclass(frozen=True)
class Planning:
    """What options are made from. ``budget``: tokens of a micro-batch. ``fixed``: a plan, whose options alone are made."""

    nodes: Sequence[PlannedNode]
    machine: Machine
    times: Times
    budget: int
    ahead: int = 0
    fixed: PlanFile | None = None

    def problem(self) -> Problem:
        """Raises ValueError where a call has no layout, and for layouts of a fixed plan that cannot be."""
        machine, calls = self.machine, dict[int, Call]()
        every = mesh_sizes(machine.size, machine.local_size) if self.fixed is None else []
        for number, node in enumerate(self.nodes):
            if node.linked:
                continue
            tied = [i for i, other in enumerate(self.nodes) if node.home and other.linked and other.role == node.role]
            together = [number, *tied]
            nodes = [self.nodes[i] for i in together]
            sizes = every if self.fixed is None else [self.fixed.calls[node.name].mesh.count]
            found = [options for size in sizes for options in self._options(nodes, size)]
            if not found:
                raise ValueError(
                    f"no layout of {node.name} on up to {machine.size} ranks fits its model and rows: {node.work.rows} rows in "
                    f"{node.work.mini_batches} mini-batches, {node.spec.num_hidden_layers} layers, "
                    f"{node.spec.num_attention_heads} heads"
                )
            for i, one, options in zip(together, nodes, zip(*found, strict=True), strict=True):
                calls[i] = Call(one.name, one.role, one.after, options, home=one.home, at_home=one.linked)
        return Problem(
            tuple(calls[i] for i in range(len(self.nodes))),
            machine.local_size,
            tuple(amount - (HOST_RESERVE if machine.device.on_host else memory.RESERVE) for amount in machine.memory),
            {node.role: node.shape.params * machine.device.itemsize for node in self.nodes},
            machine.device.link,
            machine.network,
            self.ahead,
            frozenset(i for i, node in enumerate(self.nodes) if node.kind == "generate" and node.trained),
        )

    def _options(self, tied: Sequence[PlannedNode], size: int) -> list[tuple[Option, ...]]:
        """Ways to run calls that run together on ``size`` ranks, at home if the first one's role is, as an option of each call: those
        that no other way beats."""
        first, device, found = tied[0], self.machine.device, list[tuple[Option, ...]]()
        slices = self.times.slices(first.shape)
        if not slices:
            raise ValueError(
                f"cluster.gpu: the profile has no times of {first.role}'s model; profile again with this configuration"
            )
        given = layouts(first, size, slices)
        if self.fixed is not None:
            planned = self.fixed.calls[first.name]
            check_layout(first.spec, planned.pp, planned.tp, f"the plan's calls.{first.name}")
            given = [(planned.pp, planned.tp, planned.dp)]
        if not given:
            return []
        chosen = self._choices(first, given)
        offloads = [(False, False)]
        if self.fixed is not None:
            offloads = [(planned.offload, planned.optim_offload)]
        elif first.home and not device.on_host:
            offloads.append((False, True) if first.trained else (True, False))
        for offload, optim_offload in offloads:
            role = role_settings(first.plan, device.itemsize, device.on_host, offload=offload, optim_offload=optim_offload)
            estimates = [self._estimate(node, chosen, role) for node in tied]
            held = np.zeros(len(chosen))
            if first.home:
                held, _ = memory.fullest(chosen, partial(_held, first.shape, chosen, role))
            beaten = np.zeros(len(chosen), dtype=bool)
            if self.fixed is None and first.home:
                beaten |= self.machine.local_size * self._pinned(first, chosen, role) > self.machine.host_memory
            if self.fixed is None:
                seconds, active, _ = zip(*estimates, strict=True)
                beaten |= dominated(chosen, np.sum(seconds, axis=0), held, np.max(active, axis=0))
            for i in np.flatnonzero(~beaten).tolist():
                one, options = chosen.one(i), []
                for node, estimate in zip(tied, estimates, strict=True):
                    took, needs, cache = (float(each[i]) for each in estimate)
                    way, rows = Candidate(one, cache, offload, optim_offload), (ROWS_OF[one["zero"]], one["zero_size"])
                    options.append(
                        Option(size, one["pp"], one["tp"], took, float(held[i]), needs, way, *rows, node.kind == "infer")
                    )
                found.append(tuple(options))
        return found

    def _pinned(self, node: PlannedNode, chosen: Choices, role: RoleSettings) -> np.ndarray:
        """Host memory of a rank for what the role offloads."""

        def parts(stage: Any) -> tuple[memory.Parts, memory.Parts]:
            return memory.held_by_host(node.shape, chosen, role, stage), NOTHING

        return np.asarray(memory.fullest(chosen, parts)[0])

    def _choices(self, node: PlannedNode, given: Sequence[tuple[int, int, int]]) -> Choices:
        more: dict[str, Sequence[int]] = {"micro_tokens": (self.budget,)}
        planned = self.fixed and self.fixed.calls[node.name]
        if planned:
            level, flying = CHECKPOINTING.index(planned.activation_checkpointing), planned.max_num_seqs or FLYING[-1]
            more |= {"zero": (planned.zero,), "zero_size": (planned.zero_size or 0,)}
            more |= {"checkpointing": (level,), "max_num_seqs": (flying,)}
            more |= {"sequence_parallel": (int(planned.sequence_parallel),)}
        elif node.kind == "train":
            more |= {"zero": (0, 1, 2, 3), "checkpointing": (0, 1, 2), "sequence_parallel": (0, 1)}
        elif node.kind == "generate":
            rows = max(node.work.rows // min(layout[2] for layout in given), 1)
            most = min(rows, node.plan.config.generation.max_num_batched_tokens)
            more |= {"max_num_seqs": sorted({min(flying, most) for flying in FLYING})}
        elif node.home:
            more |= {"zero": (0, 3)}
        elif node.trained:
            more |= {"zero": (0, 1, 3)}
        made = choices(given, **more)
        if not planned:
            made = made.take(((made.zero == 0) | (made.dp > 1)) & ((made.sequence_parallel == 0) | (made.tp > 1)))
        if node.kind == "generate" and node.captures and self.times.captured(node.plan.config.generation):
            return made.set(graphs=(made.tp == 1) & (made.pp == 1))
        return made

    def _estimate(self, node: PlannedNode, given: Choices, role: RoleSettings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, bytes beside what is held, and of them those of a cache; [n] each."""
        shape, work, none, device = node.shape, node.work, np.zeros(len(given)), self.machine.device
        params = shape.stage_params(given.pp, given.tp) / given.dp_shard
        if node.kind == "generate":
            config = replace(node.plan.config.generation, num_pages=None)

            def needs_of(stage: Any) -> tuple[memory.Parts, memory.Parts]:
                return NOTHING, {"work": memory.generate(shape, work, given, role, config, stage)[0]["work"]}

            cache = memory.generate(shape, work, given, role, config, 0 * given.pp)[2]
            _, needs = memory.fullest(given, needs_of)
            if self.fixed is not None and self.fixed.calls[node.name].gpu_memory_utilization is None:  # the configuration's own
                share, most = config.memory_share(device.on_host), min(self.machine.memory)
                room = share * (most - needs) if device.on_host else share * most - needs - self._resident(node, given)
                cache = np.minimum(cache, np.maximum(room, 0))
            return self.times.generate_seconds(shape, work, given, cache), needs + cache, cache + none
        needs = memory.train if node.kind == "train" else memory.infer
        _, active = memory.fullest(given, lambda stage: (NOTHING, needs(shape, work, given, role, stage)))
        seconds = self.times.train_seconds if node.kind == "train" else self.times.infer_seconds
        back = device.itemsize * params * role.offload
        if node.kind == "train" and role.optim_offload:
            back = back + 2 * role.states * params * work.mini_batches * work.epochs
        return seconds(shape, work, given) + back / device.host_link, active, none

    def _resident(self, node: PlannedNode, given: Choices) -> Any:
        """Bytes of weights and states on the ranks of a generate call of the plan that is given: those that it generates with, and what
        other homes hold there, whose own weights become the call's."""
        assert self.fixed is not None
        device, mesh = self.machine.device, self.fixed.calls[node.name].mesh
        found = device.itemsize * node.shape.stage_params(given.pp, given.tp)
        for home in (one for one in self.nodes if one.home):
            planned = self.fixed.calls[home.name]
            if set(mesh.ranks) & set(planned.mesh.ranks):
                chosen = self._choices(home, [(planned.pp, planned.tp, planned.dp)])
                options = {"offload": planned.offload or home.role == node.role, "optim_offload": planned.optim_offload}
                role = role_settings(home.plan, device.itemsize, device.on_host, **options)
                found = found + memory.fullest(chosen, partial(_held, home.shape, chosen, role))[0]
        return found


NOTHING: memory.Parts = {"nothing": 0.0}


def _held(shape: ModelShape, given: Choices, role: RoleSettings, stage: Any) -> tuple[memory.Parts, memory.Parts]:
    return memory.held(shape, given, role, stage), NOTHING


def mesh_sizes(size: int, local_size: int) -> list[int]:
    """Of all meshes that a search may try."""
    call = Call("", "", frozenset(), tuple(Option(n, 1, 1, 0.0, 0.0, 0.0) for n in range(1, size + 1)), home=True)
    every = Problem((call,), local_size, (1.0,) * size, {"": 0.0}, 1.0, 1.0)
    return [count for count, meshes in RankRanges(every).of.items() if meshes]


def dominated(given: Choices, seconds: np.ndarray, held: np.ndarray, active: np.ndarray) -> np.ndarray:
    """bool [n]: whether another one in the same layout is as good in all three."""
    beaten = np.ones(len(given), dtype=bool)
    layout = (given.pp * (1 + given.tp.max()) + given.tp) * 4 + np.asarray(ROWS_OF)[given.zero]
    for one in np.unique(layout):
        at = np.flatnonzero(layout == one)
        kept: list[int] = []
        for i in at[np.lexsort((active[at], held[at], seconds[at]))].tolist():
            if not any(held[j] <= held[i] and active[j] <= active[i] for j in kept):
                kept.append(i)
        beaten[kept] = False
    return beaten


@dataclass(frozen=True)
class Planned:
    """What was found. ``verdict``: why it does not fit, and what would."""

    file: PlanFile
    found: Found
    verdict: str | None = None


def best_plan(
    nodes: Sequence[PlannedNode],
    machine: Machine,
    times: Times,
    limits: BatchLimits,
    ahead: int,
    name: str = "exact",
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> Planned:
    """By the search of this name, with the best of several token budgets. Raises ValueError where no plan fits."""
    longest = max(node.work.longest for node in nodes)
    budgets = [round(limits.max_tokens * share) for share in BUDGETS] if limits.rows is None else []
    budgets = [one for one in budgets if one >= longest] or [
        limits.max_tokens if limits.rows is None else round(limits.rows * longest)
    ]
    search = find("plan.search", "rlhf_spmd.planner.search", name, exports="search").search
    started, plans, refused = time.perf_counter(), list[Planned](), list[str]()
    for budget in budgets:
        made = Planning(nodes, machine, times, budget, ahead)
        problem = made.problem()
        try:
            found: Found = search(problem, time_limit_s / len(budgets), seed)
        except NoPlanError as error:
            refused.append(str(error))
            continue
        algorithm = {limits.where.removeprefix("algorithm."): budget} if limits.rows is None else {}
        plans.append(Planned(to_file(made, problem, found.plan, simulate(problem, found.plan), algorithm), found))
    if not plans:
        raise ValueError(refused[-1])
    best = min(plans, key=lambda one: one.found.seconds)
    bound, optimal = min(one.found.lower_bound for one in plans), all(one.found.optimal for one in plans)
    took = time.perf_counter() - started
    return replace(best, found=replace(best.found, lower_bound=bound, optimal=optimal, search_seconds=took))


def to_file(planning: Planning, problem: Problem, plan: Plan, schedule: Schedule, algorithm: Mapping[str, Any]) -> PlanFile:
    """``algorithm``: what is to be set there."""
    calls = {}
    homes = [(plan[place].mesh, problem.calls[place].options[plan[place].option].held) for place in problem.homes.values()]
    for number, (node, call, choice) in enumerate(zip(planning.nodes, problem.calls, plan, strict=True)):
        start, end = schedule.spans[number]
        option = call.options[choice.option]
        way: Candidate = option.choice
        moved = 0.0
        if not (call.home or call.at_home):
            moved = problem.move(call, plan[problem.homes[call.role]], choice)[1]
        held = max(sum(amount for mesh, amount in homes if rank in mesh.ranks) for rank in _edges(choice.mesh, plan))
        if planning.machine.device.on_host:
            share = way.cache * SPARE / max(min(problem.memory) - held - moved, 1.0)
        else:
            # no less than usual: nothing else of this process needs memory meanwhile
            share = (held + moved + option.active + (SPARE - 1) * way.cache) / min(planning.machine.memory)
            share = max(share, GenerationConfig().memory_share(on_host=False))
        generates, chosen = node.kind == "generate", way.chosen
        calls[call.name] = PlannedCall(
            span_of(choice.mesh.ranks),
            chosen["pp"],
            chosen["tp"],
            chosen["dp"],
            call.home,
            chosen["zero"],
            chosen["zero_size"] or None,
            bool(chosen["sequence_parallel"]),
            CHECKPOINTING[chosen["checkpointing"]],
            way.offload,
            way.optim_offload,
            max_num_seqs=chosen["max_num_seqs"] if generates else None,
            gpu_memory_utilization=round(min(max(share, 0.05), 0.95), 3) if generates else None,
            graphs=generates and bool(chosen["graphs"]),
            micro_batches=1 if generates else _micro_batches(node.work, chosen),
            start=round(start, 4),
            seconds=round(end - start, 4),
            memory_gb=round((held + option.active + moved) / GIB, 2),
        )
    machine = planning.machine
    told = {"step_seconds": round(schedule.seconds, 4)}
    return PlanFile(machine.size, machine.local_size, algorithm, calls, told)


def _micro_batches(work: Workload, chosen: Mapping[str, int]) -> int:
    """Of a mini-batch, on each replica."""
    one = Choices(*(np.array([chosen[f.name]]) for f in fields(Choices)))
    return int(work.micro_batches(work.rows / work.mini_batches, one)[0][0])


def _edges(mesh: RankRange, plan: Plan) -> list[int]:
    """One rank of every part of ``mesh`` that other meshes cut it into."""
    starts = {mesh.first, *(edge for choice in plan for edge in (choice.mesh.first, choice.mesh.end))}
    return [rank for rank in sorted(starts) if rank in mesh.ranks]
