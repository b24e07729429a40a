"""Memory of one role on all ranks, by the place of its weights and by call. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller import CallRecord, Graph, RankSpeeds, ResourcePool
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.layout import Grid, Layout
from rlhf_spmd.planner.memory import HOST_RESERVE, RESERVE, RankMemory, RoleSettings, weights_for_generation
from rlhf_spmd.planner.shapes import Workload, adapter_numel, call_settings, quantized_numel, shape_of
from rlhf_spmd.workers import JudgeWorker, ModelWorker
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.role_plan import RolePlan

CHECKPOINT_COPY = "checkpoint copy"  # the name of a part
Parts = dict[str, np.ndarray]  # part -> bytes [kinds of ranks]


class Place(NamedTuple):
    """A place of a role's weights: its own ranks, these ranks in the layout of generation, or the other ranks of a method."""

    role: str
    method: str = ""
    generates: bool = False


Places = Mapping[Place, tuple[ResourcePool, Grid]]  # place -> ranks


@dataclass(frozen=True)
class StepFacts:
    """Facts of a step that are known before it runs.

    - graph: the calls of the step
    - prompt: tokens of the longest prompt
    - responses: response lengths at equally likely quantiles, ascending
    - limits: the sizes of micro-batches
    - device: the device of the models
    - versions: of the weights that generation ahead of training keeps; 0: it is not ahead
    - copied: roles of which ranks hold a copy in host memory while a checkpoint is written
    - speeds: of the ranks, by which rows are dealt
    - rows_per_episode: row ids of an episode of agents, which is generated as one row
    """

    graph: Graph
    prompt: float
    responses: tuple[float, ...]
    limits: BatchLimits
    device: torch.device
    versions: int = 0
    copied: frozenset[str] = frozenset()
    speeds: RankSpeeds = field(default_factory=RankSpeeds)
    rows_per_episode: int = 1

    def workload(self, call: CallRecord, row_share: np.ndarray) -> Workload:
        """Return the number and the lengths of a call's rows. ``row_share``: of a replica, as a multiple of the mean."""
        num_rows = call.num_rows // (self.rows_per_episode if call.spec.kind == "generate" else 1)
        rows = Workload(max(num_rows, 1), self.prompt, self.responses, max(call.num_mini_batches, 1), max(call.epochs, 1))
        return replace(rows, row_share=row_share)

    @property
    def longest(self) -> float:
        """Return the tokens of the longest row."""
        return self.prompt + self.responses[-1]

    @property
    def micro_tokens(self) -> int:
        """Return the largest number of tokens of a micro-batch on a rank."""
        return int(self.limits.max_tokens if self.limits.rows is None else self.limits.rows * self.longest)

    @property
    def on_host(self) -> bool:
        """Return True if the models are in the memory of the host."""
        return not capabilities(self.device).streams

    @property
    def reserve(self) -> float:
        """Return bytes that stay free on a device."""
        return HOST_RESERVE if self.on_host else RESERVE


def role_settings(role_plan: RolePlan, **layout_settings: Any) -> RoleSettings:
    """Return the settings of a role on which its memory depends. ``layout_settings``: those that follow from device and layout."""
    config = role_plan.config
    spec = role_plan.spec
    assert spec is not None, "a role with a model"
    return RoleSettings(
        trained=role_plan.trained,
        master_weights=config.optim.master_weights,
        optim_offload=config.optim.offload,
        offload=config.offload,
        activation_offload=config.activation_offload,
        optim=config.optim.name,
        adapters=adapter_numel(spec, config.lora),
        keeps_start=role_plan.trained and config.lora.path is not None,
        quantized=quantized_numel(spec, config.lora),
        bits=config.lora.bits or 0,
        **layout_settings,
    )


class RoleMemory:
    """Memory of one role on all kinds of ranks.

    - places: the ranks of each place
    - stages: the pipeline stage of each kind of ranks at each place; -1 outside of the place
    - row_shares: the rows of each kind's replica at each place, as a multiple of the mean
    """

    def __init__(
        self,
        role: str,
        role_plan: RolePlan,
        step: StepFacts,
        places: Places,
        stages: Mapping[Place, np.ndarray],
        row_shares: Mapping[Place, np.ndarray],
    ) -> None:
        assert role_plan.spec is not None and issubclass(role_plan.worker, ModelWorker)
        self.role = role
        self.role_plan = role_plan
        self.config = role_plan.config
        self.step = step
        self.places = places
        self.stages = stages
        self.row_shares = row_shares
        self.home = Place(role)
        self.shape = shape_of(role_plan.spec, role_plan.worker.head)
        self.settings = role_settings(
            role_plan,
            itemsize=self.config.torch_dtype(step.device).itemsize,
            on_host=step.on_host,
            vpp=role_plan.shape.layout.vpp,
            chunk=BatchInvariantOps.chunk_logits if step.on_host else GPU_CHUNK_LOGITS,
            entropy=step.on_host,  # only CPUs copy the logits to make entropies
        )
        # the settings of a copy of the weights on the other ranks of a method
        self.replica_settings = replace(self.settings, trained=False, offload=False)

    def _memory_in(self, place: Place, settings: RoleSettings | None = None) -> RankMemory:
        """Return the memory model of each kind of ranks at a place. ``settings``: by default those of the role."""
        grid = self.places[place][1]
        layout = grid if isinstance(grid, Layout) else Layout(grid.pp, grid.tp, grid.ranks.shape[1])
        generation = self.config.generation
        level = self.config.activation_checkpointing
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
        return RankMemory(self.shape, call, settings or self.settings, np.maximum(self.stages[place], 0))

    def _inside(self, place: Place, parts: Mapping[str, Any]) -> Parts:
        """Return ``parts`` with 0 bytes on ranks outside a place."""
        return {name: np.where(self.stages[place] >= 0, size, 0.0) for name, size in parts.items()}

    def resident(self) -> Parts:
        """Return bytes that the role holds on the device between calls."""
        home = self._memory_in(self.home)
        parts = home.resident()
        if self.config.generation.buffers == "keep" and self.role_plan.shape.generation is not None:
            parts["buffers"] = self._generation_weights()
        if self.step.on_host and self.role in self.step.copied:
            parts[CHECKPOINT_COPY] = home.checkpoint_copy()
        named_parts = {f"{self.role} {name}": size for name, size in self._inside(self.home, parts).items()}
        for method in self.role_plan.calls:
            if copies := self._num_copies(method):
                place = Place(self.role, method)
                weights = self._memory_in(place, self.replica_settings).resident()["weights"]
                named_parts |= self._inside(place, {f"{self.role}.{method} weights": copies * weights})
            if self.config.calls[method].delta:
                named_parts |= self._inside(self.home, {f"{self.role} as sent to {method}": self._resident_weights()})
        return named_parts

    def _num_copies(self, method: str) -> int:
        """Return the number of copies of the weights that the other ranks of a method hold between calls."""
        keeps_older = self.settings.trained and method == "generate_sequences"
        return self.step.versions * keeps_older + int(self.config.calls[method].delta)

    def pinned(self) -> Parts:
        """Return bytes in host memory that the role holds between calls."""
        home = self._memory_in(self.home)
        parts = home.pinned()
        if self.config.generation.buffers == "offload" and getattr(self.role_plan.shape.generating, "consecutive", False):
            parts["training shards while generating"] = self._resident_weights()
        if self.role in self.step.copied:
            parts[CHECKPOINT_COPY] = home.checkpoint_copy()
        return {f"{self.role} {name}": size for name, size in self._inside(self.home, parts).items()}

    def pinned_by(self, call: CallRecord) -> Parts:
        """Return bytes in host memory that one of the role's calls uses."""
        if call.spec.kind == "train" and self.settings.trained:
            return self._inside(self.home, self._memory_in(self.home).pinned_activations(self._workload(call)))
        if call.spec.kind == "generate" and self.config.generation.kv_cache == "offload":
            return {"pages": self.call_bytes(call)["cache"]}
        return {}

    def memory_limits(self) -> dict[str, float]:
        """Return the share of a GPU's memory that calls of a method may use, by method. Methods without a limit are left out."""
        generation = self.config.generation
        if generation.num_pages is not None or self.settings.on_host:
            return {}
        calls = [call for call in self.step.graph.nodes if call.role.name == self.role and call.spec.kind == "generate"]
        return {call.spec.name: generation.memory_share(False) for call in calls}

    def weights(self) -> np.ndarray:
        """Return bytes of the role's weights on the device while it computes."""
        return self._inside(self.home, {"weights": self._resident_weights()})["weights"]

    def _resident_weights(self) -> Any:
        return self._memory_in(self.home, self.replica_settings).resident()["weights"]

    def _generation_weights(self) -> Any:
        keeps_training_shard = bool(getattr(self.role_plan.shape.generation, "consecutive", False))
        generating = self._memory_in(Place(self.role, generates=True))
        return weights_for_generation(self._memory_in(self.home), generating, self.config.generation, keeps_training_shard)

    def _place(self, call: CallRecord) -> Place:
        """Return the place whose layout a call has."""
        elsewhere = call.spec.name in self.role_plan.calls
        return Place(self.role, call.spec.name) if elsewhere else Place(self.role, generates=call.spec.kind == "generate")

    def _workload(self, call: CallRecord) -> Workload:
        """Return the rows of a call on each kind of ranks."""
        return self.step.workload(call, self.row_shares[self._place(call)])

    def keeps_pages(self, call: CallRecord) -> bool:
        """Return True if pages of a call stay on the device until the next step. On CPUs they do with ``offload``, too."""
        staying = ("keep", "offload") if self.step.on_host else ("keep",)
        return call.spec.kind == "generate" and self.config.generation.kv_cache in staying

    def largest_cache(self, call: CallRecord) -> np.ndarray:
        """Return bytes of a generating call's cache if there is memory for all rows in flight."""
        place = self._place(call)
        needed = self._memory_in(place).generate(self._workload(call), self.config.generation)
        return self._inside(place, {"cache": needed.all_rows_bytes})["cache"]

    def call_bytes(self, call: CallRecord) -> Parts:
        """Return bytes that a call needs in addition to what is resident; {} if it does not use the model."""
        method = call.spec.name
        kind = call.spec.kind
        workload = self._workload(call)
        elsewhere = method in self.role_plan.calls
        place = Place(self.role, method) if elsewhere else self.home
        rank = self._memory_in(place, self.replica_settings if elsewhere else self.settings)
        parts = {"communicators": rank.communicators()}
        if elsewhere and not self._num_copies(method):  # copies stay there between calls
            parts["weights"] = rank.resident()["weights"]
        if kind == "train":
            return self._inside(place, parts | rank.train(workload)) if rank.role.trained else {}
        if kind == "generate" or issubclass(self.role_plan.worker, JudgeWorker):
            if not elsewhere:
                rank = self._memory_in(Place(self.role, generates=True))
                parts = {"communicators": rank.communicators()}
                if self.config.generation.buffers != "keep":
                    parts["weights"] = self._generation_weights()
            elif rank.role.adapters:
                parts["merged weights"] = rank.resident()["weights"]
            return self._inside(place, parts | rank.generate(workload, self.config.generation).parts)
        return self._inside(place, parts | rank.infer(workload)) if kind == "infer" else {}
