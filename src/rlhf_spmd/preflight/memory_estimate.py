"""Estimates the memory that each rank of a run needs, from the roles' plans and the calls of a step. Pure.

Formulas for one role on one rank are in ``planner/memory.py``. :func:`measure` applies them to all roles that a rank has, between calls
and during each call. ``memory_check.py`` compares the result with the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rlhf_spmd.controller import Graph, ResourcePool
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.layout import Grid, Layout
from rlhf_spmd.planner import memory as model
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.shapes import CallSettings, Workload, adapter_numel, call_settings, quantized_numel, shape_of
from rlhf_spmd.workers import JudgeWorker, ModelWorker
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.role_plan import RolePlan

# host memory of a rank on a GPU: libraries of CUDA, nccl and gloo; an estimate, measured on no machine
BESIDE_GPU = 2 * GIB
CHECKPOINT_COPY = "checkpoint copy"  # a part of what a rank holds


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step before it runs.

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

    def work(self, call: Any) -> Workload:
        return Workload(max(call.num_rows, 1), self.prompt, self.responses, max(call.num_mini_batches, 1), max(call.epochs, 1))

    @property
    def longest(self) -> float:
        return self.prompt + self.responses[-1]

    @property
    def micro_tokens(self) -> int:
        """The most tokens of a micro-batch on a rank."""
        return int(self.limits.max_tokens if self.limits.rows is None else self.limits.rows * self.longest)

    @property
    def on_host(self) -> bool:
        return not capabilities(self.device).streams

    @property
    def reserve(self) -> float:
        return model.HOST_RESERVE if self.on_host else model.RESERVE


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that ranks need. Ranks with the same stages of the same models are one kind.

    - ranks: the ranks of each kind, ascending
    - held: ``role part`` -> bytes [kinds] between calls
    - active: ``role.method`` -> its parts, bytes [kinds] each, needed in addition to ``held`` while it runs
    - shares: ``role.method`` -> the share of the memory that it may use, if it is limited
    - host: what ranks on GPUs pin in the memory of their hosts
    """

    ranks: tuple[np.ndarray, ...]
    held: Mapping[str, np.ndarray]
    active: Mapping[str, Mapping[str, np.ndarray]]
    reserve: float
    shares: Mapping[str, float] = field(default_factory=dict)
    host: MemoryReport | None = None

    @cached_property
    def peaks(self) -> np.ndarray:
        """Peak bytes [kinds], with the reserve."""
        held = np.asarray(model.total(self.held) + np.zeros(len(self.ranks)))
        return np.max([self.reserve + held, *(self._during(name) for name in self.active)], 0)

    def _during(self, call: str) -> np.ndarray:
        """Returns bytes [kinds] that a device must have so that the call has room in its share of it."""
        active = np.asarray(model.total(self.active[call]))
        taken = model.total(self.held) + active
        return np.maximum(self.reserve + taken, np.where(active > 0, taken / self.shares.get(call, 1.0), 0.0))

    def by_host(self, local_size: int) -> np.ndarray:
        """Returns bytes [hosts]: the sums of their ranks' peaks."""
        ranks = np.concatenate(self.ranks)
        needs = np.zeros(-(-(ranks.max() + 1) // local_size) * local_size)
        needs[ranks] = np.repeat(self.peaks, [len(kind) for kind in self.ranks])
        return needs.reshape(-1, local_size).sum(1)

    def judged(self, memory: Sequence[float] | float, rank: int | None) -> dict[int, float]:
        """Returns, by kind, the smallest memory of its ranks' devices; with ``rank`` only for that rank's kind."""
        size = 1 + max(ranks[-1] for ranks in self.ranks)
        there = np.broadcast_to(np.asarray(memory, dtype=float)[:size] if np.ndim(memory) else np.asarray(memory), size)
        return {k: float(there[ranks].min()) for k, ranks in enumerate(self.ranks) if rank is None or rank in ranks}

    def largest(self, kind: int, most: int = 4) -> list[tuple[str, float]]:
        """Returns the largest parts at the peak of a kind of ranks: (words, bytes)."""
        found = [(name, each[kind]) for name, each in self.held.items()]
        call = max(self.active, key=lambda name: self._during(name)[kind], default=None)
        if call is not None:
            found += [(f"{call} {name}", each[kind]) for name, each in self.active[call].items()]
            left = self._during(call)[kind] - self.reserve - sum(size for _, size in found)
            found += [(f"{call} left free by gpu_memory_utilization", left)] * bool(call in self.shares and left > 0)
        return sorted(found, key=lambda part: -part[1])[:most]


def role_settings(plan: RolePlan, **more: Any) -> model.RoleSettings:
    """Returns a role's settings on which memory depends. ``more``: settings that follow from device and layout."""
    config, spec = plan.config, plan.spec
    assert spec is not None
    return model.RoleSettings(
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
    """Returns what every rank needs, with the largest micro-batches that the settings allow."""
    models = {role: plan for role, plan in plans.items() if plan.spec is not None}
    grids: dict[str, tuple[ResourcePool, Grid]] = {}  # of roles, of generation on their ranks, of methods elsewhere
    for role, plan in models.items():
        grids[role] = plan.pool, plan.shape.layout
        grids[f"{role} generates"] = plan.pool, plan.shape.generating
        grids |= {f"{role}.{method}": (call.pool, call.shape.layout) for method, call in plan.calls.items()}
    kinds, stages = _kinds(grids)
    held: dict[str, np.ndarray] = {}
    active: dict[str, dict[str, np.ndarray]] = {}
    memories = {role: _RoleMemory(role, plan, step, stages) for role, plan in models.items()}
    for role, one in memories.items():
        held |= one.held()
        for call in step.graph.nodes:
            name = f"{role}.{call.spec.name}"
            if call.role.name == role and name not in active and (parts := one.active(call)):
                active[name] = parts
    _add_prefetched(memories, kinds, step, active)
    shares = {f"{role}.{method}": share for role, one in memories.items() for method, share in one.shares().items()}
    host = None if step.on_host else _on_hosts(memories, kinds, step)
    return MemoryReport(kinds, held, active, step.reserve, shares, host)


def _on_hosts(memories: Mapping[str, _RoleMemory], kinds: tuple[np.ndarray, ...], step: StepFacts) -> MemoryReport | None:
    """Returns what ranks on GPUs pin in host memory; None if nothing is pinned."""
    held = {name: each for one in memories.values() for name, each in one.held_by_host().items()}
    active: dict[str, dict[str, np.ndarray]] = {}  # in one arena, which all calls share
    for call in step.graph.nodes:
        if call.role.name in memories and (parts := memories[call.role.name].saved_by_host(call)):
            active[f"{call.role.name}.{call.spec.name}"] = parts
    pinned = any(each.any() for parts in (held, *active.values()) for each in parts.values())
    return MemoryReport(kinds, held, active, BESIDE_GPU) if pinned else None


def _add_prefetched(
    memories: Mapping[str, _RoleMemory],
    kinds: Sequence[np.ndarray],
    step: StepFacts,
    active: Mapping[str, dict[str, np.ndarray]],
) -> None:
    """Adds to each call the weights of the next call's role, if they are loaded while it computes."""
    early = {role: one.weights() for role, one in memories.items() if one.config.prefetch}
    for kind, ranks in enumerate(kinds if early else ()):
        own = [call for call in step.graph.nodes if ranks[0] in call.members.part_of]
        for call, following in pairwise(own):
            role, parts = following.role.name, active.get(f"{call.role.name}.{call.spec.name}")
            if role in early and role != call.role.name and parts is not None:
                parts.setdefault(f"beside {role} weights", np.zeros(len(kinds)))[kind] = early[role][kind]


def _kinds(grids: Mapping[str, tuple[ResourcePool, Grid]]) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Groups ranks with the same stages of the same models. Returns the ranks of each kind, and for each grid the stage of each
    kind, -1 if the grid does not contain it."""
    size = 1 + max((pool.ranks[-1] for pool, _ in grids.values()), default=0)
    table = np.full((len(grids), size), -1)
    for row, (pool, grid) in zip(table, grids.values(), strict=True):
        row[np.asarray(pool.ranks)[grid.ranks]] = np.arange(grid.ranks.shape[0])[:, None, None, None]
    _, firsts, kind_of = np.unique(table, axis=1, return_index=True, return_inverse=True)
    kinds = tuple(np.flatnonzero(kind_of.reshape(-1) == kind) for kind in range(len(firsts)))
    return kinds, dict(zip(grids, table[:, firsts], strict=True))


class _RoleMemory:
    """Memory of one role on all kinds of ranks. ``replica``: settings of a copy of its weights for a method with its own pool."""

    def __init__(self, role: str, plan: RolePlan, step: StepFacts, stages: Mapping[str, np.ndarray]) -> None:
        assert plan.spec is not None and issubclass(plan.worker, ModelWorker)
        self.role, self.plan, self.step, self.stages = role, plan, step, stages
        self.shape, self.config, on_host = shape_of(plan.spec, plan.worker.head), plan.config, step.on_host
        self.settings = role_settings(
            plan,
            itemsize=self.config.torch_dtype(step.device).itemsize,
            on_host=on_host,
            vpp=plan.shape.layout.vpp,
            chunk=BatchInvariantOps.chunk_logits if on_host else GPU_CHUNK_LOGITS,
            entropy=on_host,  # only CPUs copy the logits to make entropies
        )
        self.replica = replace(self.settings, trained=False, offload=False)

    def _call_settings(self, grid: Grid) -> CallSettings:
        layout = grid if isinstance(grid, Layout) else Layout(grid.pp, grid.tp, grid.ranks.shape[1])
        generation, level = self.config.generation, self.config.activation_checkpointing
        return call_settings(
            [(layout.pp, layout.tp, layout.dp)] * len(self.stages[self.role]),
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

    def _at(self, grid: str) -> tuple[np.ndarray, Callable[[Mapping[str, Any]], dict[str, np.ndarray]]]:
        """Returns stages [kinds] of a grid, and a function that sets bytes to 0 on ranks outside it."""
        found = self.stages[grid]
        return np.maximum(found, 0), lambda parts: {name: np.where(found >= 0, each, 0.0) for name, each in parts.items()}

    def held(self) -> dict[str, np.ndarray]:
        layout = self.plan.shape.layout
        stage, inside = self._at(self.role)
        found = model.held(self.shape, self._call_settings(layout), self.settings, stage)
        if self.config.generation.buffers == "keep" and self.plan.shape.generation is not None:
            found["buffers"] = self._generation_weights()
        if self.step.on_host and self.role in self.step.copied:
            found[CHECKPOINT_COPY] = model.checkpoint_copy(self.shape, self._call_settings(layout), self.settings, stage)
        found = {f"{self.role} {name}": each for name, each in inside(found).items()}
        for method, call in self.plan.calls.items():
            delta = self.config.calls[method].delta
            keeps_older = self.step.ahead and self.settings.trained and method == "generate_sequences"
            copies = (1 + self.step.ahead + self.step.validates if keeps_older else 0) + int(delta)
            if copies:
                there, only = self._at(f"{self.role}.{method}")
                copied = model.held(self.shape, self._call_settings(call.shape.layout), self.replica, there)
                found |= only({f"{self.role}.{method} weights": copies * copied["weights"]})
            if delta:
                sent = model.held(self.shape, self._call_settings(layout), self.replica, stage)
                found |= inside({f"{self.role} as sent to {method}": sent["weights"]})
        return found

    def held_by_host(self) -> dict[str, np.ndarray]:
        """Returns bytes in host memory that the role holds between calls."""
        layout, generation = self.plan.shape.layout, self.config.generation
        stage, inside = self._at(self.role)
        found = model.held_by_host(self.shape, self._call_settings(layout), self.settings, stage)
        if generation.buffers == "offload" and getattr(self.plan.shape.generating, "consecutive", False):
            beside = model.held(self.shape, self._call_settings(layout), self.replica, stage)["weights"]
            found["training shards while generating"] = beside
        if self.role in self.step.copied:
            found[CHECKPOINT_COPY] = model.checkpoint_copy(self.shape, self._call_settings(layout), self.settings, stage)
        return {f"{self.role} {name}": each for name, each in inside(found).items()}

    def saved_by_host(self, call: Any) -> dict[str, np.ndarray]:
        """Returns bytes in host memory that one of the role's calls uses."""
        work, layout = self.step.work(call), self.plan.shape.layout
        stage, inside = self._at(self.role)
        if call.spec.kind == "train" and self.settings.trained:
            return inside(model.saved_by_host(self.shape, work, self._call_settings(layout), self.settings, stage))
        if call.spec.kind == "generate" and self.config.generation.kv_cache == "offload":
            return {"pages": self.active(call)["cache"]}
        return {}

    def shares(self) -> dict[str, float]:
        """Returns, by method, the share of a GPU's memory that it may use, for methods with such a limit."""
        generation, nodes = self.config.generation, self.step.graph.nodes
        calls = {call.spec.name for call in nodes if call.role.name == self.role and call.spec.kind == "generate"}
        limited = generation.num_pages is None and not self.settings.on_host
        return dict.fromkeys(calls, generation.memory_share(False)) if limited else {}

    def weights(self) -> np.ndarray:
        """Bytes of the role's weights on the device while it computes."""
        stage, inside = self._at(self.role)
        return inside(
            {"": model.held(self.shape, self._call_settings(self.plan.shape.layout), self.replica, stage)["weights"]}
        )[""]

    def _generation_weights(self) -> Any:
        layout, generation = self.plan.shape.layout, self.plan.shape.generating
        beside = bool(getattr(generation, "consecutive", False))
        stages = self._at(self.role)[0], self._at(f"{self.role} generates")[0]
        grids = self._call_settings(layout), self._call_settings(generation)
        return model.weights_for_generation(self.shape, *grids, self.settings, self.config.generation, beside, stages)

    def active(self, call: Any) -> dict[str, np.ndarray]:
        """Bytes beside what is held while a call runs; {} if it does not use the model."""
        method, kind, work = call.spec.name, call.spec.kind, self.step.work(call)
        elsewhere = self.plan.calls.get(method)
        layout, settings = (elsewhere or self.plan).shape.layout, self.settings if elsewhere is None else self.replica
        name = self.role if elsewhere is None else f"{self.role}.{method}"
        stage, inside = self._at(name)
        given = self._call_settings(layout)
        beside = {"communicators": model.communicators(given, settings)}
        if elsewhere is not None and f"{name} weights" not in self.held():  # otherwise they stay there
            beside["weights"] = model.held(self.shape, given, settings, stage)["weights"]
        if kind == "train":
            return inside(beside | model.train(self.shape, work, given, settings, stage)) if settings.trained else {}
        if kind == "generate" or issubclass(self.plan.worker, JudgeWorker):
            if elsewhere is None:
                stage, given = self._at(f"{self.role} generates")[0], self._call_settings(self.plan.shape.generating)
                beside = {"communicators": model.communicators(given, settings)}
                beside |= {"weights": self._generation_weights()} if self.config.generation.buffers != "keep" else {}
            elif settings.adapters:
                beside["merged weights"] = model.held(self.shape, given, settings, stage)["weights"]
            return inside(beside | model.generate(self.shape, work, given, settings, self.config.generation, stage)[0])
        return inside(beside | model.infer(self.shape, work, given, settings, stage)) if kind == "infer" else {}


def step_facts(ready: Any, graph: Graph, device: torch.device) -> StepFacts:
    """Returns what is known of a step of a checked run (``ready``, a ``RunPlan``), whose calls are ``graph``.

    Generated responses count with their longest length, given ones with their own.
    """
    config = ready.config
    prompts = [section.max_prompt_length for section in ready.streams.values() if isinstance(section, PromptsConfig)]
    prompt = float(max(prompts, default=0))
    responses: tuple[float, ...] = (float(ready.sampling().max_response_length or 0),)
    given = [data.lengths.double() for data in ready.training.values() if not isinstance(data, PromptDataset)]
    longest, mean = (max((float(measure(lengths)) for lengths in given), default=0.0) for measure in (torch.max, torch.mean))
    if longest > prompt + responses[0]:
        prompt, responses = 0.0, (2 * mean - longest, longest)  # quantiles whose mean is that of the rows
    ahead, validates = config.placement.max_staleness, config.run.test_freq > 0
    return StepFacts(
        graph, prompt, responses, config.algorithm.limits, device, ahead, validates, copied_roles(config, ready.roles)
    )


def copied_roles(config: Any, plans: Mapping[str, RolePlan]) -> frozenset[str]:
    """Returns the roles that are saved in the background."""
    saved = (role for role, plan in plans.items() if plan.trained or role in config.algorithm.moved)
    return frozenset(saved if config.run.save_freq and config.run.background_save else ())
