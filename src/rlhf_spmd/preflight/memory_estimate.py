"""Adds up the memory that each rank of a run needs, from the roles' plans and the calls of a step. Pure.

``planner/memory.py`` has the terms of one role on one rank, ``role_memory.py`` those of one role on all ranks.
:func:`estimate_memory` adds them up over all roles that a rank has, between calls and during each call. ``memory_check.py``
compares the sums with the devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlhf_spmd.controller import MICRO_DP, THREE_D, Graph, RankSpeeds, ResourcePool
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.parallel.layout import Grid
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.memory import total
from rlhf_spmd.preflight.role_memory import Parts, Place, Places, RoleMemory, StepFacts
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.role_plan import RolePlans

# host memory of a rank on a GPU: libraries of CUDA, nccl and gloo; an estimate, measured on no machine
HOST_MEMORY_OF_GPU_LIBRARIES = 2 * GIB


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that ranks need. Ranks with the same stages of the same models, and as many rows, are one kind.

    - ranks: the ranks of each kind, ascending
    - resident: ``role part`` -> bytes [kinds] between calls
    - call_bytes: ``role.method`` -> part -> bytes [kinds] that the call needs in addition to ``resident``
    - reserve: bytes that stay free on a device
    - memory_limits: ``role.method`` -> share of a GPU's memory that its calls may use; methods without a limit are left out
    - host: bytes that ranks on GPUs pin in the memory of their hosts
    """

    ranks: tuple[np.ndarray, ...]
    resident: Mapping[str, np.ndarray]
    call_bytes: Mapping[str, Mapping[str, np.ndarray]]
    reserve: float
    memory_limits: Mapping[str, float] = field(default_factory=dict)
    host: MemoryReport | None = None

    @cached_property
    def peaks(self) -> np.ndarray:
        """Peak bytes [kinds], with the reserve."""
        resident = np.asarray(total(self.resident) + np.zeros(len(self.ranks)))
        return np.max([self.reserve + resident, *(self._during(name) for name in self.call_bytes)], 0)

    def _during(self, call: str) -> np.ndarray:
        """Return bytes [kinds] that a device must have so that the call fits into the share that it may use."""
        call_bytes = np.asarray(total(self.call_bytes[call]))
        used = total(self.resident) + call_bytes
        return np.maximum(self.reserve + used, np.where(call_bytes > 0, used / self.memory_limits.get(call, 1.0), 0.0))

    def by_host(self, local_size: int) -> np.ndarray:
        """Return bytes [hosts]: the sum of the peaks of the ranks of a host."""
        ranks = np.concatenate(self.ranks)
        needs = np.zeros(-(-(ranks.max() + 1) // local_size) * local_size)
        needs[ranks] = np.repeat(self.peaks, [len(kind) for kind in self.ranks])
        return needs.reshape(-1, local_size).sum(1)

    def memory_of_kinds(self, device_bytes: Sequence[float] | float, rank: int | None = None) -> dict[int, float]:
        """Return the smallest memory of the devices of each kind of ranks; with ``rank`` only of that rank's kind."""
        size = 1 + max(ranks[-1] for ranks in self.ranks)
        by_rank = np.broadcast_to(np.asarray(device_bytes, dtype=float)[:size] if np.ndim(device_bytes) else device_bytes, size)
        return {k: float(by_rank[ranks].min()) for k, ranks in enumerate(self.ranks) if rank is None or rank in ranks}

    def largest(self, kind: int, count: int = 4) -> list[tuple[str, float]]:
        """Return the ``count`` largest parts at the peak of a kind of ranks: (part, bytes)."""
        parts = [(name, size[kind]) for name, size in self.resident.items()]
        call = max(self.call_bytes, key=lambda name: self._during(name)[kind], default=None)
        if call is not None:
            parts += [(f"{call} {name}", size[kind]) for name, size in self.call_bytes[call].items()]
            left = self._during(call)[kind] - self.reserve - sum(size for _, size in parts)
            parts += [(f"{call} left free by gpu_memory_utilization", left)] * bool(call in self.memory_limits and left > 0)
        return sorted(parts, key=lambda part: -part[1])[:count]


def estimate_memory(role_plans: RolePlans, step: StepFacts) -> MemoryReport:
    """Return the memory that each rank needs, with the largest micro-batches that the settings allow."""
    models = {role: role_plan for role, role_plan in role_plans.items() if role_plan.spec is not None}
    places: dict[Place, tuple[ResourcePool, Grid]] = {}
    for role, role_plan in models.items():
        places[Place(role)] = role_plan.pool, role_plan.shape.layout
        places[Place(role, generates=True)] = role_plan.pool, role_plan.shape.generating
        places |= {Place(role, method): (call.pool, call.shape.layout) for method, call in role_plan.calls.items()}
    kinds, stages, row_shares = _rank_kinds(places, step.speeds)
    memories = {role: RoleMemory(role, role_plan, step, places, stages, row_shares) for role, role_plan in models.items()}
    resident = {name: size for memory in memories.values() for name, size in memory.resident().items()}
    call_bytes: dict[str, Parts] = {}
    for role, memory in memories.items():
        for call in step.graph.nodes:
            name = f"{role}.{call.spec.name}"
            if call.role.name == role and name not in call_bytes and (parts := memory.call_bytes(call)):
                call_bytes[name] = parts
    _add_prefetched(memories, kinds, step, call_bytes)
    _add_kept_pages(memories, resident, step, call_bytes)
    limits = {
        f"{role}.{method}": share for role, memory in memories.items() for method, share in memory.memory_limits().items()
    }
    host = None if step.on_host else _pinned(memories, kinds, step)
    return MemoryReport(kinds, resident, call_bytes, step.reserve, limits, host)


def _pinned(memories: Mapping[str, RoleMemory], kinds: tuple[np.ndarray, ...], step: StepFacts) -> MemoryReport | None:
    """Return the host memory that ranks on GPUs pin; None if they pin nothing."""
    resident = {name: size for memory in memories.values() for name, size in memory.pinned().items()}
    call_bytes: dict[str, Parts] = {}  # all calls use one arena
    for call in step.graph.nodes:
        if call.role.name in memories and (parts := memories[call.role.name].pinned_by(call)):
            call_bytes[f"{call.role.name}.{call.spec.name}"] = parts
    is_pinned = any(size.any() for parts in (resident, *call_bytes.values()) for size in parts.values())
    return MemoryReport(kinds, resident, call_bytes, HOST_MEMORY_OF_GPU_LIBRARIES) if is_pinned else None


def _add_prefetched(
    memories: Mapping[str, RoleMemory], kinds: Sequence[np.ndarray], step: StepFacts, call_bytes: Mapping[str, Parts]
) -> None:
    """Add to each call the weights of the next call's role, if they are loaded while it computes."""
    prefetched = {role: memory.weights() for role, memory in memories.items() if memory.config.prefetch}
    for kind, ranks in enumerate(kinds if prefetched else ()):
        calls = [call for call in step.graph.nodes if ranks[0] in call.members.part_of]
        for call, following in pairwise(calls):
            role = following.role.name
            parts = call_bytes.get(f"{call.role.name}.{call.spec.name}")
            if role in prefetched and role != call.role.name and parts is not None:
                parts.setdefault(f"beside {role} weights", np.zeros(len(kinds)))[kind] = prefetched[role][kind]


def _add_kept_pages(
    memories: Mapping[str, RoleMemory], resident: Parts, step: StepFacts, call_bytes: Mapping[str, Parts]
) -> None:
    """Add to each call the pages of rows that go on in the next step, if they stay on the device.

    The generator's cache grows with the memory of the device, up to that of all rows in flight. Counted is the cache on a device
    that has just enough for both cache and call. A larger device has a larger cache, and still more memory for the call.
    """
    resident_bytes = total(resident)
    nodes = {(node.role.name, node.spec.name): node for node in step.graph.nodes if node.role.name in memories}
    for (role, method), keeping in nodes.items():
        if not memories[role].keeps_pages(keeping):
            continue
        name = f"{role}.{method}"
        generating = call_bytes[name]
        share = memories[role].config.generation.memory_share(step.on_host)
        weights = generating.get("weights", 0.0) + generating.get("merged weights", 0.0)
        for other, parts in call_bytes.items():
            if other == name:
                continue
            needed = total(parts)
            if step.on_host:  # the cache is this share of what is free beside the weights
                cache = share * (needed - weights)
            else:  # all that generation has on the device is this share of it
                cache = share * (step.reserve + resident_bytes + needed) - resident_bytes - weights - generating["work"]
            cache = np.maximum(cache / max(1 - share, 1e-9), generating["cache"])
            pages = np.minimum(cache, memories[role].largest_cache(keeping))
            parts["pages between steps"] = parts.get("pages between steps", 0.0) + pages


def _rank_kinds(
    places: Places, speeds: RankSpeeds
) -> tuple[tuple[np.ndarray, ...], dict[Place, np.ndarray], dict[Place, np.ndarray]]:
    """Group ranks with the same stages of the same models, and with as many rows.

    Return the ranks of each kind, and for each place two numbers of each kind: its stage, -1 outside of the place, and the rows of
    its replica as a multiple of the mean.
    """
    size = 1 + max((pool.ranks[-1] for pool, _ in places.values()), default=0)
    stages = np.full((len(places), size), -1)
    shares = np.ones((len(places), size))
    for index, (place, (pool, grid)) in enumerate(places.items()):
        ranks = np.asarray(pool.ranks)[grid.ranks]  # [pp, dp, cp, tp]
        stages[index, ranks] = np.arange(len(ranks))[:, None, None, None]
        generates = place.generates or place.method == "generate_sequences"
        rank_speeds = speeds.of(MICRO_DP if generates else THREE_D)
        if rank_speeds:
            slowest = np.asarray(rank_speeds)[ranks].min(axis=(0, 2, 3))
            shares[index, ranks] = (slowest / slowest.mean())[None, :, None, None]
    _, firsts, kind_of = np.unique(np.concatenate([stages, shares]), axis=1, return_index=True, return_inverse=True)
    kinds = tuple(np.flatnonzero(kind_of.reshape(-1) == kind) for kind in range(len(firsts)))
    return kinds, dict(zip(places, stages[:, firsts], strict=True)), dict(zip(places, shares[:, firsts], strict=True))


def step_facts(run_plan: RunPlan, graph: Graph, device: torch.device) -> StepFacts:
    """Return the facts of a step of a checked run whose calls are ``graph``.

    Generated responses count with the longest length that is allowed, responses of a file with their own lengths.
    """
    config = run_plan.config
    prompts = [section.max_prompt_length for section in run_plan.streams.values() if isinstance(section, PromptsConfig)]
    prompt = float(max(prompts, default=0))
    responses: tuple[float, ...] = (float(run_plan.sampling().max_response_length or 0),)
    lengths = [data.lengths.double() for data in run_plan.training.values() if not isinstance(data, PromptDataset)]
    longest = max((float(rows.max()) for rows in lengths), default=0.0)
    mean = max((float(rows.mean()) for rows in lengths), default=0.0)
    if longest > prompt + responses[0]:
        prompt, responses = 0.0, (2 * mean - longest, longest)  # quantiles whose mean is that of the rows
    return facts_of(config, graph, prompt, responses, device, run_plan.roles)


def facts_of(
    config: Any, graph: Graph, prompt: float, responses: tuple[float, ...], device: torch.device, role_plans: RolePlans
) -> StepFacts:
    """Return the facts of a step with rows of these lengths. ``prompt``, ``responses``: as of :class:`StepFacts`."""
    changing = [role for role in role_plans if role_plans[role].trained or role in config.algorithm.roles_without_optimizer]
    copied = frozenset(changing if config.run.save_freq and config.run.background_save else ())
    speeds = RankSpeeds(config.placement.speeds, config.placement.generation_speeds)
    limits, versions = config.algorithm.limits, config.weight_versions
    rows_per_episode = config.agent.max_rows if config.agent.is_on else 1
    return StepFacts(graph, prompt, responses, limits, device, versions, copied, speeds, rows_per_episode)
