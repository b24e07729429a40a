"""From the calls of a step to the problem that is searched, and from what a search finds to ``plan.yaml``. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

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
from rlhf_spmd.planner.memory import RankMemory, RoleSettings
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile
from rlhf_spmd.planner.problem import STORAGE, CallNode, Option, Plan, Problem, RankRange, Schedule, simulate
from rlhf_spmd.planner.search import NoPlanError, SearchResult
from rlhf_spmd.planner.search.candidates import best_of, range_sizes
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Workload, call_settings, divisors

MAX_STAGES = 16
IN_FLIGHT = (1, 4, 16, 64, 256, 1024)  # rows in flight that are tried
CACHE_MARGIN = 1.02  # cache that the generator is told to take, as a share of what the plan counts on


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
    replicas of one rank, decode steps can be CUDA graphs. ``home`` and ``shares_home``: as of :class:`CallNode`. ``cp``: as
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
    shares_home: bool = False
    cp: int = 1

    @property
    def expert_ranks(self) -> list[int]:
        """Return the numbers of ranks that are tried to share the experts."""
        return [1] if self.spec.experts is None or self.kind == "generate" else divisors(self.spec.experts.num_experts)

    @property
    def shares_experts(self) -> bool:
        """Return True if the ranks of tp share the experts in generation."""
        return self.kind == "generate" and self.generation.ep > 1

    def check_cut(self, pp: int, tp: int, cp: int, ep: int, where: str) -> None:
        """Raise ValueError if the model cannot be cut so."""
        shared = self.shares_experts
        check_layout(self.spec, where, pp, tp, cp=cp, ep=tp if shared else ep, expert_parallel_generation=shared)


def layouts(call: ModelCall, size: int, slices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (pp, tp, dp) of ``size`` ranks that the model, its rows and cp allow, tp one of ``slices``. Stages have equally many
    layers if any number of stages allows that."""
    if size % call.cp:
        return []
    work, layers = call.work, call.spec.num_hidden_layers
    generates = call.kind == "generate"
    dealt = call.dealt if generates else call.dealt // work.mini_batches
    uneven = all(layers % n for n in range(2, MAX_STAGES + 1))  # nothing divides DeepSeek-V3's 61
    grids = []
    for tp in (n for n in slices if size // call.cp % n == 0):
        for pp in (
            n for n in divisors(size // call.cp // tp) if n <= MAX_STAGES and (layers % n == 0 or (uneven and n <= layers))
        ):
            dp = size // call.cp // tp // pp
            if dp > dealt or (generates and dealt % dp):
                continue
            try:
                call.check_cut(pp, tp, call.cp, 1, "")
                check_quantized(call.spec, call.lora, tp, "")
            except ValueError:
                continue
            grids.append((pp, tp, dp))
    return grids


@dataclass(frozen=True)
class ProblemBuilder:
    """Builds the problem that is searched.

    - budget: tokens of a micro-batch
    - ahead: steps that generation runs ahead of training
    - fixed: a plan, if only its options are wanted
    """

    calls: Sequence[ModelCall]
    machine: Machine
    times: CallTimes
    budget: int
    ahead: int = 0
    fixed: PlanFile | None = None

    def problem(self) -> Problem:
        """Return the problem. Raises ValueError if a call has no layout, or the fixed plan has a layout that cannot be."""
        machine, call_nodes = self.machine, dict[int, CallNode]()
        for index, call in enumerate(self.calls):
            if call.shares_home:
                continue
            tied = [i for i, other in enumerate(self.calls) if call.home and other.shares_home and other.role == call.role]
            together = [index, *tied]
            for i, options in zip(together, self._options([self.calls[i] for i in together]), strict=True):
                tied_call = self.calls[i]
                call_nodes[i] = CallNode(
                    tied_call.name, tied_call.role, tied_call.after, options, tied_call.home, tied_call.shares_home
                )
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
        )

    def _options(self, tied: Sequence[ModelCall]) -> list[tuple[Option, ...]]:
        """Return the options of each of these calls, which run together, at home if the first one is a home. Options of the same
        index belong together. Raises ValueError if there are none."""
        call = tied[0]
        if not self.times.slices(call.shape):
            raise ValueError(f"cluster.gpu: the profile has no times of {call.role}'s model; profile again")
        if self.fixed is not None:
            placed = self.fixed.calls[call.name]
            call.check_cut(placed.pp, placed.tp, placed.cp, placed.ep, f"the plan's calls.{call.name}")
            settings = self._fixed_settings(call)
            return self._described(tied, settings, placed.offload, placed.optim_offload)
        offloads = [(False, False)]
        if call.home and not self.machine.device.on_host:
            offloads.append((False, True) if call.settings.trained else (True, False))
        options: list[list[Option]] = [[] for _ in tied]
        for size in range_sizes(self.machine.size, self.machine.local_size):
            grids = layouts(call, size, self.times.slices(call.shape))
            if not grids:
                continue
            settings = self._searched_settings(call, grids)
            for offload, optim_offload in offloads:
                described = self._described(tied, settings, offload, optim_offload)
                for call_options, new_options in zip(options, described, strict=True):
                    call_options += new_options
        if not options[0]:
            raise ValueError(
                f"no layout of {call.name} on up to {self.machine.size} ranks fits its model and rows: {call.work.rows} rows in "
                f"{call.work.mini_batches} mini-batches, {call.spec.num_hidden_layers} layers, "
                f"{call.spec.num_attention_heads} heads"
            )
        return [tuple(call_options) for call_options in options]

    def _described(
        self, tied: Sequence[ModelCall], settings: CallSettings, offload: bool, optim_offload: bool
    ) -> list[tuple[Option, ...]]:
        """Return the options of each call with these settings. In a search they leave out those that another one beats."""
        call = tied[0]
        role = self._role(call, offload, optim_offload)
        offloads = {"offload": offload, "optim_offload": optim_offload}
        estimates = [self._estimate(other, settings, role) for other in tied]
        resident = np.zeros(len(settings))
        if call.home:
            resident = memory.fullest(call.shape, settings, role, RankMemory.resident)
        indices = list(range(len(settings)))
        if self.fixed is None:
            seconds = np.sum([estimate.seconds for estimate in estimates], axis=0)
            call_bytes = np.max([estimate.call_bytes for estimate in estimates], axis=0)
            ep = settings.ep * (not call.home)  # a home takes its best ep, which movable calls must meet
            layouts_of = np.stack([settings.pp, settings.tp, ep, np.asarray(STORAGE)[settings.zero]], axis=1)
            indices = sorted(
                best_of(np.stack([seconds, resident, call_bytes], axis=1).tolist(), list(map(tuple, layouts_of.tolist())))
            )
            if call.home:
                pinned = memory.fullest(call.shape, settings, role, RankMemory.pinned)
                indices = [i for i in indices if self.machine.local_size * pinned[i] <= self.machine.host_memory]
        options = []
        for other, estimate in zip(tied, estimates, strict=True):
            micro_batches, _ = other.work.micro_batches(other.work.rows / other.work.mini_batches, settings)
            arrays = {**estimate._asdict(), "resident": resident, "micro_batches": micro_batches}
            columns = {name: array.tolist() for name, array in arrays.items()}
            options.append(
                tuple(
                    self._option(
                        other,
                        settings.alternative(i) | offloads,
                        {name: values[i] for name, values in columns.items()},
                    )
                    for i in indices
                )
            )
        return options

    def _option(self, call: ModelCall, setting: Mapping[str, Any], estimate: Mapping[str, float]) -> Option:
        """Return the option of one alternative.

        ``setting``: its :meth:`CallSettings.alternative`, with offloads. ``estimate``: values of ``resident``, of :class:`_Estimate`,
        and ``micro_batches`` of a mini-batch on each replica.
        """
        generates = call.kind == "generate"
        level: Any = CHECKPOINTING[setting["checkpointing"]]
        pp, tp, dp, cp = (setting[axis] for axis in ("pp", "tp", "dp", "cp"))
        placed = PlacedCall(
            ranks="0",
            pp=pp,
            tp=tp,
            dp=dp,
            cp=cp,
            ep=setting["ep"],
            home=call.home,
            zero=setting["zero"],
            zero_size=setting["zero_size"] or None,
            sequence_parallel=bool(setting["sequence_parallel"]),
            activation_checkpointing=level,
            offload=setting["offload"],
            optim_offload=setting["optim_offload"],
            max_num_seqs=setting["max_num_seqs"] if generates else None,
            graphs=generates and bool(setting["graphs"]),
            micro_batches=1 if generates else int(estimate["micro_batches"]),
        )
        return Option(
            size=pp * tp * dp * cp,
            pp=pp,
            tp=tp,
            seconds=estimate["seconds"],
            resident=estimate["resident"],
            call_bytes=estimate["call_bytes"],
            zero=setting["zero"],
            zero_size=setting["zero_size"],
            ep=setting["ep"],
            in_place=call.kind == "infer",
            expert_parallel_generation=call.shares_experts,
            cache=estimate["cache"],
            settings=placed,
        )

    def _role(self, call: ModelCall, offload: bool, optim_offload: bool) -> RoleSettings:
        device = self.machine.device
        return replace(
            call.settings, itemsize=device.itemsize, on_host=device.on_host, offload=offload, optim_offload=optim_offload
        )

    def _fixed_settings(self, call: ModelCall) -> CallSettings:
        """Return the settings that the fixed plan has for a call."""
        assert self.fixed is not None
        placed = self.fixed.calls[call.name]
        settings = call_settings(
            [(placed.pp, placed.tp, placed.dp)],
            micro_tokens=(self.budget,),
            cp=(placed.cp,),
            ep=(placed.ep,),
            zero=(placed.zero,),
            zero_size=(placed.zero_size or 0,),
            checkpointing=(CHECKPOINTING.index(placed.activation_checkpointing),),
            max_num_seqs=(placed.max_num_seqs or IN_FLIGHT[-1],),
            sequence_parallel=(int(placed.sequence_parallel),),
        )
        return self._captured(call, settings)

    def _searched_settings(self, call: ModelCall, grids: Sequence[tuple[int, int, int]]) -> CallSettings:
        """Return the settings that are tried in these layouts."""
        options: dict[str, Sequence[int]] = {"micro_tokens": (self.budget,), "cp": (call.cp,), "ep": call.expert_ranks}
        if call.kind == "train":
            options |= {"zero": (0, 1, 2, 3), "checkpointing": (0, 1, 2), "sequence_parallel": (0, 1)}
        elif call.kind == "generate":
            rows = max(call.work.rows // min(dp for _, _, dp in grids), 1)
            limit = min(rows, call.generation.max_num_batched_tokens)
            options |= {"max_num_seqs": sorted({min(rows_in_flight, limit) for rows_in_flight in IN_FLIGHT})}
        elif call.home:
            options |= {"zero": (0, 3)}
        elif call.settings.trained:
            options |= {"zero": (0, 1, 3)}
        settings = call_settings(grids, **options)
        copies = settings.dp * settings.cp
        is_possible = ((settings.zero == 0) | (copies > 1)) & ((settings.sequence_parallel == 0) | (settings.tp > 1))
        # experts among as many ranks as can be, or those of a host: others save little
        largest = np.gcd(copies, call.expert_ranks[-1])
        inside = np.gcd(largest, np.maximum(self.machine.local_size // settings.tp, 1))
        is_useful = (settings.ep == 1) | (settings.ep == inside) | (settings.ep == largest)
        return self._captured(call, settings.take(is_possible & is_useful))

    def _captured(self, call: ModelCall, settings: CallSettings) -> CallSettings:
        """Return the settings with CUDA graphs where decode steps of a call can be captured."""
        device = self.machine.device
        captures = call.captures and not device.on_host and (call.spec.experts is None or device.groups_experts)
        if call.kind == "generate" and captures and not call.generation.enforce_eager:
            return settings.set(graphs=settings.pp == 1)
        return settings

    def _estimate(self, call: ModelCall, settings: CallSettings, role: RoleSettings) -> _Estimate:
        shape = call.shape
        work = call.work
        device = self.machine.device
        buffers = RankMemory(shape, settings, role, 0).communicators()
        none = np.zeros(len(settings))
        if call.kind == "generate":
            config = replace(call.generation, num_pages=None)
            cache = RankMemory(shape, settings, role, 0 * settings.pp).generate(work, config)[2]
            needs = buffers + memory.fullest(
                shape, settings, role, lambda rank: {"work": rank.generate(work, config)[0]["work"]}
            )
            if self.fixed is not None and self.fixed.calls[call.name].gpu_memory_utilization is None:  # the configuration's
                share, limit = config.memory_share(device.on_host), min(self.machine.memory)
                room = (
                    share * (limit - needs) if device.on_host else share * limit - needs - self._resident_bytes(call, settings)
                )
                cache = np.minimum(cache, np.maximum(room, 0))
            return _Estimate(self.times.generate_seconds(shape, work, settings, cache), needs + cache, cache + none)
        params = shape.rank_params(settings)
        transferred = device.itemsize * params * role.offload
        if call.kind == "train":
            call_bytes = memory.fullest(shape, settings, role, lambda rank: rank.train(work))
            seconds = self.times.train_seconds(shape, work, settings)
            if role.optim_offload:
                transferred = transferred + 2 * role.states * params * work.mini_batches * work.epochs
        else:
            call_bytes = memory.fullest(shape, settings, role, lambda rank: rank.infer(work))
            seconds = self.times.infer_seconds(shape, work, settings)
        return _Estimate(seconds + transferred / device.host_link, buffers + call_bytes, none)

    def _resident_bytes(self, call: ModelCall, settings: CallSettings) -> Any:
        """Return bytes of weights and states on the ranks of a generate call of the fixed plan: the weights that it generates with,
        and what homes hold there. Its own role's weights become those that it generates with."""
        assert self.fixed is not None
        ranks = self.fixed.calls[call.name].rank_range
        resident = self.machine.device.itemsize * call.shape.stage_params(settings.pp, settings.tp)
        for home in (other for other in self.calls if other.home):
            placed = self.fixed.calls[home.name]
            if ranks.overlaps(placed.rank_range):
                role = self._role(home, placed.offload or home.role == call.role, placed.optim_offload)
                resident = resident + memory.fullest(home.shape, self._fixed_settings(home), role, RankMemory.resident)
        return resident


class _Estimate(NamedTuple):
    """Of a call with settings [n]: seconds, bytes beside what is resident, and those of them that a cache takes."""

    seconds: np.ndarray
    call_bytes: np.ndarray
    cache: np.ndarray


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
        """Return the seconds of a step, as the file has them."""
        return self.file.step_seconds


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
    """Return the best plan that the search ``name`` finds with one of these token budgets of micro-batches. ``budget_key``: the
    algorithm's setting of the budget, if the plan is to set it. Raises ValueError if no plan fits."""
    search = find("plan.search", "rlhf_spmd.planner.search", name, exports="search").search
    started = time.perf_counter()
    plans: list[PlanResult] = []
    refusals: list[str] = []
    for budget in budgets:
        builder = ProblemBuilder(calls, machine, times, budget, ahead)
        problem = builder.problem()
        try:
            result: SearchResult = search(problem, time_limit_s / len(budgets), seed)
        except NoPlanError as error:
            refusals.append(str(error))
            continue
        algorithm = {} if budget_key is None else {budget_key: budget}
        plans.append(PlanResult(to_file(builder, problem, result.plan, simulate(problem, result.plan), algorithm), result))
    if not plans:
        raise ValueError(refusals[-1])
    best = min(plans, key=lambda plan: plan.search.seconds)
    bound = min(plan.search.lower_bound for plan in plans)
    optimal = all(plan.search.optimal for plan in plans)
    seconds = time.perf_counter() - started
    return replace(best, search=replace(best.search, lower_bound=bound, optimal=optimal, search_seconds=seconds))


def to_file(
    builder: ProblemBuilder, problem: Problem, plan: Plan, schedule: Schedule, algorithm: Mapping[str, Any]
) -> PlanFile:
    """Return ``plan`` with its predictions. ``algorithm``: settings of that section."""
    placed = {}
    for index, call in enumerate(builder.calls):
        call_node, choice = problem.calls[index], plan[index]
        option = call_node.options[choice.option]
        copied = 0.0  # bytes of a copy of the weights
        if not call_node.home and not call_node.shares_home:
            _, copied = problem.weight_copy_cost(call_node, plan[problem.homes[call_node.role]], choice)
        resident = _most_resident(problem, plan, choice.rank_range)
        configured = builder.fixed is not None and builder.fixed.calls[call.name].gpu_memory_utilization is None
        planned = call.kind == "generate" and not configured
        share = _memory_share(builder.machine, problem, resident + copied, option) if planned else None
        start, end = schedule.spans[index]
        placed[call.name] = replace(
            option.settings,
            ranks=str(choice.rank_range),
            gpu_memory_utilization=share,
            start=round(start, 4),
            seconds=round(end - start, 4),
            memory_gb=round((resident + option.call_bytes + copied) / GIB, 2),
        )
    return PlanFile(builder.machine.size, builder.machine.local_size, algorithm, placed, round(schedule.seconds, 4))


def _most_resident(problem: Problem, plan: Plan, ranks: RankRange) -> float:
    """Return the bytes that homes hold on the fullest of ``ranks``."""
    homes = [
        (plan[home].rank_range, problem.calls[home].options[plan[home].option].resident) for home in problem.homes.values()
    ]
    edges = {ranks.first, *(edge for home, _ in homes for edge in (home.first, home.end))}
    return max(sum(size for home, size in homes if rank in home.ranks) for rank in sorted(edges) if rank in ranks.ranks)


def _memory_share(machine: Machine, problem: Problem, resident: float, option: Option) -> float:
    """Return ``gpu_memory_utilization`` of a generating call beside ``resident`` bytes of weights and states."""
    if machine.device.on_host:
        share = option.cache * CACHE_MARGIN / max(min(problem.memory) - resident, 1.0)
    else:
        # not less than the default: nothing else of this process needs memory meanwhile
        share = (resident + option.call_bytes + (CACHE_MARGIN - 1) * option.cache) / min(machine.memory)
        share = max(share, GenerationConfig().memory_share(on_host=False))
    return round(min(max(share, 0.05), 0.95), 3)
