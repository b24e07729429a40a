"""Adds up the memory that each rank of a run needs, from the roles' plans and the calls of a step. Pure.

``planner/memory.py`` has the terms of one role on one rank. :func:`measure` adds them up over all roles that a rank has, between calls
and during each call. ``memory_check.py`` compares the sums with the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlhf_spmd.controller import CallRecord, Graph, ResourcePool
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.layout import Grid, Layout
from rlhf_spmd.planner import memory as role_memory
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.memory import RoleSettings
from rlhf_spmd.planner.shapes import Workload, adapter_numel, call_settings, quantized_numel, shape_of
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers import JudgeWorker, ModelWorker
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.role_plan import RolePlan

# host memory of a rank on a GPU: libraries of CUDA, nccl and gloo; an estimate, measured on no machine
BESIDE_GPU = 2 * GIB
CHECKPOINT_COPY = "checkpoint copy"  # a part of what a rank holds


@dataclass(frozen=True)
class StepFacts:
    """Facts of a step that are known before it runs.

    - graph: its calls
    - prompt, responses: lengths of rows, as in :class:`Workload`
    - device: the models' device
    - ahead: steps that generation is ahead of training
    - validates: validation needs the newest weights beside older ones
    - copied: roles of which ranks hold a copy in host memory while it is saved
    """

    graph: Graph
    prompt: float
    responses: tuple[float, ...]
    limits: BatchLimits
    device: torch.device
    ahead: int = 0
    validates: bool = False
    copied: frozenset[str] = frozenset()

    def work(self, call: CallRecord) -> Workload:
        """Return the rows of a call."""
        return Workload(max(call.num_rows, 1), self.prompt, self.responses, max(call.num_mini_batches, 1), max(call.epochs, 1))

    @property
    def longest(self) -> float:
        return self.prompt + self.responses[-1]

    @property
    def micro_tokens(self) -> int:
        """Return the largest number of tokens of a micro-batch on a rank."""
        return int(self.limits.max_tokens if self.limits.rows is None else self.limits.rows * self.longest)

    @property
    def on_host(self) -> bool:
        return not capabilities(self.device).streams

    @property
    def reserve(self) -> float:
        return role_memory.HOST_RESERVE if self.on_host else role_memory.RESERVE


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that ranks need. Ranks with the same stages of the same models are one kind.

    - ranks: the ranks of each kind, ascending
    - resident: ``role part`` -> bytes [kinds] between calls
    - call_bytes: ``role.method`` -> its parts, bytes [kinds] each, needed in addition to ``resident`` while it runs
    - shares: ``role.method`` -> the share of the memory that it may use, if it is limited
    - host: what ranks on GPUs pin in the memory of their hosts
    """

    ranks: tuple[np.ndarray, ...]
    resident: Mapping[str, np.ndarray]
    call_bytes: Mapping[str, Mapping[str, np.ndarray]]
    reserve: float
    shares: Mapping[str, float] = field(default_factory=dict)
    host: MemoryReport | None = None

    @cached_property
    def peaks(self) -> np.ndarray:
        """Peak bytes [kinds], with the reserve."""
        resident = np.asarray(role_memory.total(self.resident) + np.zeros(len(self.ranks)))
        return np.max([self.reserve + resident, *(self._during(name) for name in self.call_bytes)], 0)

    def _during(self, call: str) -> np.ndarray:
        """Return bytes [kinds] that a device must have so that the call has room in its share of it."""
        call_bytes = np.asarray(role_memory.total(self.call_bytes[call]))
        used = role_memory.total(self.resident) + call_bytes
        return np.maximum(self.reserve + used, np.where(call_bytes > 0, used / self.shares.get(call, 1.0), 0.0))

    def by_host(self, local_size: int) -> np.ndarray:
        """Return bytes [hosts]: the sums of their ranks' peaks."""
        ranks = np.concatenate(self.ranks)
        needs = np.zeros(-(-(ranks.max() + 1) // local_size) * local_size)
        needs[ranks] = np.repeat(self.peaks, [len(kind) for kind in self.ranks])
        return needs.reshape(-1, local_size).sum(1)

    def memory_of_kinds(self, device_bytes: Sequence[float] | float, rank: int | None = None) -> dict[int, float]:
        """Return, by kind, the smallest memory of its ranks' devices; with ``rank`` only for that rank's kind."""
        size = 1 + max(ranks[-1] for ranks in self.ranks)
        by_rank = np.broadcast_to(np.asarray(device_bytes, dtype=float)[:size] if np.ndim(device_bytes) else device_bytes, size)
        return {k: float(by_rank[ranks].min()) for k, ranks in enumerate(self.ranks) if rank is None or rank in ranks}

    def largest(self, kind: int, count: int = 4) -> list[tuple[str, float]]:
        """Return the ``count`` largest parts at the peak of a kind of ranks: (words, bytes)."""
        parts = [(name, size[kind]) for name, size in self.resident.items()]
        call = max(self.call_bytes, key=lambda name: self._during(name)[kind], default=None)
        if call is not None:
            parts += [(f"{call} {name}", size[kind]) for name, size in self.call_bytes[call].items()]
            left = self._during(call)[kind] - self.reserve - sum(size for _, size in parts)
            parts += [(f"{call} left free by gpu_memory_utilization", left)] * bool(call in self.shares and left > 0)
        return sorted(parts, key=lambda part: -part[1])[:count]


def role_settings(plan: RolePlan, **more: Any) -> RoleSettings:
    """Return a role's settings on which memory depends. ``more``: settings that follow from device and layout."""
    config, spec = plan.config, plan.spec
    assert spec is not None
    return RoleSettings(
        trained=plan.trained,
        master_weights=config.optim.master_weights,
        optim_offload=config.optim.offload,
        offload=config.offload,
        activation_offload=config.activation_offload,
        optim=config.optim.name,
        adapters=adapter_numel(spec, config.lora),
        keeps_start=plan.trained and config.lora.path is not None,
        quantized=quantized_numel(spec, config.lora),
        bits=config.lora.bits or 0,
        **more,
    )


def measure(plans: Mapping[str, RolePlan], step: StepFacts) -> MemoryReport:
    """Return the memory that every rank needs, with the largest micro-batches that the settings allow."""
    models = {role: plan for role, plan in plans.items() if plan.spec is not None}
    places: dict[str, tuple[ResourcePool, Grid]] = {}  # of roles, of generation on their ranks, of methods elsewhere
    for role, plan in models.items():
        places[role] = plan.pool, plan.shape.layout
        places[f"{role} generates"] = plan.pool, plan.shape.generating
        places |= {f"{role}.{method}": (call.pool, call.shape.layout) for method, call in plan.calls.items()}
    kinds, stages = _kinds(places)
    memories = {role: _RoleMemory(role, plan, step, places, stages) for role, plan in models.items()}
    resident = {name: size for memory in memories.values() for name, size in memory.resident().items()}
    call_bytes: dict[str, dict[str, np.ndarray]] = {}
    for role, memory in memories.items():
        for call in step.graph.nodes:
            name = f"{role}.{call.spec.name}"
            if call.role.name == role and name not in call_bytes and (parts := memory.call_bytes(call)):
                call_bytes[name] = parts
    _add_prefetched(memories, kinds, step, call_bytes)
    shares = {f"{role}.{method}": share for role, memory in memories.items() for method, share in memory.shares().items()}
    host = None if step.on_host else _pinned(memories, kinds, step)
    return MemoryReport(kinds, resident, call_bytes, step.reserve, shares, host)


def _pinned(memories: Mapping[str, _RoleMemory], kinds: tuple[np.ndarray, ...], step: StepFacts) -> MemoryReport | None:
    """Return the host memory that ranks on GPUs pin; None if nothing is pinned."""
    resident = {name: size for memory in memories.values() for name, size in memory.pinned().items()}
    call_bytes: dict[str, dict[str, np.ndarray]] = {}  # in one arena, which all calls share
    for call in step.graph.nodes:
        if call.role.name in memories and (parts := memories[call.role.name].pinned_by(call)):
            call_bytes[f"{call.role.name}.{call.spec.name}"] = parts
    is_pinned = any(size.any() for parts in (resident, *call_bytes.values()) for size in parts.values())
    return MemoryReport(kinds, resident, call_bytes, BESIDE_GPU) if is_pinned else None


def _add_prefetched(
    memories: Mapping[str, _RoleMemory],
    kinds: Sequence[np.ndarray],
    step: StepFacts,
    call_bytes: Mapping[str, dict[str, np.ndarray]],
) -> None:
    """Add to each call the weights of the next call's role, if they are loaded while it computes."""
    early = {role: memory.weights() for role, memory in memories.items() if memory.config.prefetch}
    for kind, ranks in enumerate(kinds if early else ()):
        calls = [call for call in step.graph.nodes if ranks[0] in call.members.part_of]
        for call, following in pairwise(calls):
            role, parts = following.role.name, call_bytes.get(f"{call.role.name}.{call.spec.name}")
            if role in early and role != call.role.name and parts is not None:
                parts.setdefault(f"beside {role} weights", np.zeros(len(kinds)))[kind] = early[role][kind]


def _kinds(places: Mapping[str, tuple[ResourcePool, Grid]]) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Group ranks with the same stages of the same models. Return the ranks of each kind, and for each place the stage of each
    kind, -1 outside of it."""
    size = 1 + max((pool.ranks[-1] for pool, _ in places.values()), default=0)
    table = np.full((len(places), size), -1)
    for row, (pool, grid) in zip(table, places.values(), strict=True):
        row[np.asarray(pool.ranks)[grid.ranks]] = np.arange(grid.ranks.shape[0])[:, None, None, None]
    _, firsts, kind_of = np.unique(table, axis=1, return_index=True, return_inverse=True)
    kinds = tuple(np.flatnonzero(kind_of.reshape(-1) == kind) for kind in range(len(firsts)))
    return kinds, dict(zip(places, table[:, firsts], strict=True))


class _RoleMemory:
    """Memory of one role on all kinds of ranks, at each *place*: its own ranks, generation on them, a method's other ranks."""

    def __init__(
        self,
        role: str,
        plan: RolePlan,
        step: StepFacts,
        places: Mapping[str, tuple[ResourcePool, Grid]],
        stages: Mapping[str, np.ndarray],
    ) -> None:
        assert plan.spec is not None and issubclass(plan.worker, ModelWorker)
        self.role, self.plan = role, plan
        self.step, self.config = step, plan.config
        self.places, self.stages = places, stages
        self.shape = shape_of(plan.spec, plan.worker.head)
        self.settings = role_settings(
            plan,
            itemsize=self.config.torch_dtype(step.device).itemsize,
            on_host=step.on_host,
            vpp=plan.shape.layout.vpp,
            chunk=BatchInvariantOps.chunk_logits if step.on_host else GPU_CHUNK_LOGITS,
            entropy=step.on_host,  # only CPUs copy the logits to make entropies
        )
        self.replica = replace(self.settings, trained=False, offload=False)  # of its weights, on a method's other ranks

    def _memory_in(self, place: str, settings: RoleSettings | None = None) -> role_memory.RankMemory:
        """Return the memory model of each kind of ranks at a place. ``settings``: by default the role's."""
        grid = self.places[place][1]
        layout = grid if isinstance(grid, Layout) else Layout(grid.pp, grid.tp, grid.ranks.shape[1])
        generation, level = self.config.generation, self.config.activation_checkpointing
        call = call_settings(
            [(layout.pp, layout.tp, layout.dp)] * len(self.stages[place]),
            zero=(layout.zero if layout.dp_shard > 1 else 0,),
            zero_size=(layout.zero_size or 0,),
            micro_tokens=(self.step.micro_tokens,),
            checkpointing=(CHECKPOINTING.index("none" if level == "auto" else level),),  # auto: undecided
            sequence_parallel=(int(layout.sequence_parallel),),
            max_num_seqs=(generation.max_num_seqs,),
            graphs=(int(generation.captures(self.step.device, layout.pp)),),
            cp=(layout.cp,),
            ep=(layout.ep,),
        )
        return role_memory.RankMemory(self.shape, call, settings or self.settings, np.maximum(self.stages[place], 0))

    def _inside(self, place: str, parts: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return ``parts`` with 0 bytes on ranks outside a place."""
        return {name: np.where(self.stages[place] >= 0, size, 0.0) for name, size in parts.items()}

    def resident(self) -> dict[str, np.ndarray]:
        """Return bytes that the role holds between calls."""
        home = self._memory_in(self.role)
        parts = home.resident()
        if self.config.generation.buffers == "keep" and self.plan.shape.generation is not None:
            parts["buffers"] = self._generation_weights()
        if self.step.on_host and self.role in self.step.copied:
            parts[CHECKPOINT_COPY] = home.checkpoint_copy()
        named = {f"{self.role} {name}": size for name, size in self._inside(self.role, parts).items()}
        for method in self.plan.calls:
            place = f"{self.role}.{method}"
            if copies := self._copies(method):
                weights = self._memory_in(place, self.replica).resident()["weights"]
                named |= self._inside(place, {f"{place} weights": copies * weights})
            if self.config.calls[method].delta:
                named |= self._inside(self.role, {f"{self.role} as sent to {method}": self._resident_weights()})
        return named

    def _copies(self, method: str) -> int:
        """Return how many copies of the weights a method's other ranks hold between calls."""
        keeps_older = self.step.ahead and self.settings.trained and method == "generate_sequences"
        return (1 + self.step.ahead + self.step.validates if keeps_older else 0) + int(self.config.calls[method].delta)

    def pinned(self) -> dict[str, np.ndarray]:
        """Return bytes in host memory that the role holds between calls."""
        home = self._memory_in(self.role)
        parts = home.pinned()
        if self.config.generation.buffers == "offload" and getattr(self.plan.shape.generating, "consecutive", False):
            parts["training shards while generating"] = self._resident_weights()
        if self.role in self.step.copied:
            parts[CHECKPOINT_COPY] = home.checkpoint_copy()
        return {f"{self.role} {name}": size for name, size in self._inside(self.role, parts).items()}

    def pinned_by(self, call: CallRecord) -> dict[str, np.ndarray]:
        """Return bytes in host memory that one of the role's calls uses."""
        if call.spec.kind == "train" and self.settings.trained:
            return self._inside(self.role, self._memory_in(self.role).pinned_activations(self.step.work(call)))
        if call.spec.kind == "generate" and self.config.generation.kv_cache == "offload":
            return {"pages": self.call_bytes(call)["cache"]}
        return {}

    def shares(self) -> dict[str, float]:
        """Return, by method, the share of a GPU's memory that it may use, for methods with such a limit."""
        generation, nodes = self.config.generation, self.step.graph.nodes
        calls = {call.spec.name for call in nodes if call.role.name == self.role and call.spec.kind == "generate"}
        limited = generation.num_pages is None and not self.settings.on_host
        return dict.fromkeys(calls, generation.memory_share(False)) if limited else {}

    def weights(self) -> np.ndarray:
        """Return bytes of the role's weights on the device while it computes."""
        return self._inside(self.role, {"weights": self._resident_weights()})["weights"]

    def _resident_weights(self) -> Any:
        return self._memory_in(self.role, self.replica).resident()["weights"]

    def _generation_weights(self) -> Any:
        beside = bool(getattr(self.plan.shape.generation, "consecutive", False))
        generation_memory = self._memory_in(f"{self.role} generates")
        return role_memory.weights_for_generation(self._memory_in(self.role), generation_memory, self.config.generation, beside)

    def call_bytes(self, call: CallRecord) -> dict[str, np.ndarray]:
        """Return bytes beside what is resident while a call runs; {} if it does not use the model."""
        method = call.spec.name
        kind = call.spec.kind
        work = self.step.work(call)
        elsewhere = method in self.plan.calls
        place = f"{self.role}.{method}" if elsewhere else self.role
        rank = self._memory_in(place, self.replica if elsewhere else self.settings)
        parts = {"communicators": rank.communicators()}
        if elsewhere and not self._copies(method):  # otherwise they stay there
            parts["weights"] = rank.resident()["weights"]
        if kind == "train":
            return self._inside(place, parts | rank.train(work)) if rank.role.trained else {}
        if kind == "generate" or issubclass(self.plan.worker, JudgeWorker):
            if not elsewhere:
                rank = self._memory_in(f"{self.role} generates")
                parts = {"communicators": rank.communicators()}
                if self.config.generation.buffers != "keep":
                    parts["weights"] = self._generation_weights()
            elif rank.role.adapters:
                parts["merged weights"] = rank.resident()["weights"]
            return self._inside(place, parts | rank.generate(work, self.config.generation).parts)
        return self._inside(place, parts | rank.infer(work)) if kind == "infer" else {}


def step_facts(run: RunPlan, graph: Graph, device: torch.device) -> StepFacts:
    """Return the facts of a step of a checked run ``run``, whose calls are ``graph``.

    Generated responses count with their longest length, those of a file with their own.
    """
    config = run.config
    prompts = [section.max_prompt_length for section in run.streams.values() if isinstance(section, PromptsConfig)]
    prompt = float(max(prompts, default=0))
    responses: tuple[float, ...] = (float(run.sampling().max_response_length or 0),)
    lengths = [data.lengths.double() for data in run.training.values() if not isinstance(data, PromptDataset)]
    longest = max((float(rows.max()) for rows in lengths), default=0.0)
    mean = max((float(rows.mean()) for rows in lengths), default=0.0)
    if longest > prompt + responses[0]:
        prompt, responses = 0.0, (2 * mean - longest, longest)  # quantiles whose mean is that of the rows
    return facts_of(config, graph, prompt, responses, device, run.roles)


def facts_of(
    config: Any, graph: Graph, prompt: float, responses: tuple[float, ...], device: torch.device, plans: Mapping[str, RolePlan]
) -> StepFacts:
    """Return the facts of a step with rows of these lengths. Roles are saved in the background if the configuration says so."""
    saved = [role for role, plan in plans.items() if plan.trained or role in config.algorithm.roles_without_optimizer]
    copied = frozenset(saved if config.run.save_freq and config.run.background_save else ())
    limits, validates = config.algorithm.limits, config.run.test_freq > 0
    return StepFacts(graph, prompt, responses, limits, device, config.placement.max_staleness, validates, copied)
