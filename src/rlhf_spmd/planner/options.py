"""The options of the calls of a step: all that a search may choose from, or those of a fixed plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.planner import memory
from rlhf_spmd.planner.device_times import DeviceTimes
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.memory import RankMemory, RoleSettings
from rlhf_spmd.planner.model_call import ModelCall, layouts
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile
from rlhf_spmd.planner.problem import SHARDING_OF_ZERO, Extent, Option, RankRange, device_runs, extent_of, num_ranks
from rlhf_spmd.planner.search.candidates import range_extents, undominated
from rlhf_spmd.planner.shapes import CallSettings, Numbers, Workload, call_settings

IN_FLIGHT = tuple(1 << n for n in range(11))  # rows in flight that are tried


class _Estimate(NamedTuple):
    """Predictions for a call with settings [n]; bytes are those of the fullest rank, or of that of each kind of device.

    - resident: bytes during the entire step, if the call is a home
    - call_bytes: bytes [kinds, n] in addition while the call runs
    - cache: the part of ``call_bytes`` that a KV cache takes
    """

    seconds: np.ndarray
    resident: np.ndarray
    call_bytes: np.ndarray
    cache: np.ndarray


@dataclass(frozen=True)
class OptionBuilder:
    """Builds the options of *tied calls*: a role's home and the calls that share it, or a single movable call.

    Tied calls have the same ranks and settings, so their options of the same index belong together. ``budget``: tokens of a
    micro-batch.
    """

    machine: Machine
    times: DeviceTimes
    budget: int

    def searched_options(self, tied_calls: Sequence[ModelCall]) -> list[list[Option]]:
        """Return the options of each call that a search may choose from. Raises ValueError if there are none."""
        call = tied_calls[0]
        tp_sizes = self._tp_sizes(call)
        offloads = [(False, False)]
        if call.home and not self.machine.device.on_host:
            offloads.append((False, True) if call.settings.trained else (True, False))
        options: list[list[Option]] = [[] for _ in tied_calls]
        for extent in range_extents(self.machine.local_size, self._device_runs):
            grids = layouts(call, num_ranks(extent), tp_sizes)
            if not grids:
                continue
            settings = self._searched_settings(call, grids)
            for offload, optim_offload in offloads:
                role = self._role_settings(call, offload, optim_offload)
                estimates = [self._estimate_call(tied_call, settings, role, extent) for tied_call in tied_calls]
                indices = self._useful_alternatives(call, settings, role, estimates)
                for call_options, tied_call, estimate in zip(options, tied_calls, estimates, strict=True):
                    call_options += self._build_options(tied_call, settings, role, estimate, indices, extent)
        if not options[0]:
            raise ValueError(
                f"no layout of {call.name} on up to {self.machine.size} ranks fits its model and rows: {call.work.rows} rows in "
                f"{call.work.mini_batches} mini-batches, {call.spec.num_hidden_layers} layers, "
                f"{call.spec.num_attention_heads} heads"
            )
        return options

    def fixed_options(self, tied_calls: Sequence[ModelCall], calls: Sequence[ModelCall], plan: PlanFile) -> list[list[Option]]:
        """Return the one option of each call that ``plan`` has. ``calls``: all calls of the step.

        Raises ValueError if the plan has a layout that cannot be.
        """
        call = tied_calls[0]
        self._tp_sizes(call)
        placed = plan.calls[call.name]
        call.check_cut(placed.pp, placed.tp, placed.cp, placed.ep, f"the plan's calls.{call.name}")
        settings = self._fixed_settings(call, placed)
        role = self._role_settings(call, placed.offload, placed.optim_offload)
        extent = extent_of(self._device_runs, placed.rank_range)
        options = []
        for tied_call in tied_calls:
            weights_and_states = None
            if tied_call.kind == "generate" and plan.calls[tied_call.name].gpu_memory_utilization is None:
                weights_and_states = self._weights_and_states(tied_call, settings, calls, plan)
            estimate = self._estimate_call(tied_call, settings, role, extent, weights_and_states)
            options.append(self._build_options(tied_call, settings, role, estimate, [0], extent))
        return options

    @cached_property
    def _device_runs(self) -> list[tuple[RankRange, int]]:
        """Return :func:`device_runs` of all ranks."""
        return device_runs(self.machine.kinds, self.machine.size)

    def _tp_sizes(self, call: ModelCall) -> list[int]:
        """Return the tensor-parallel sizes for which there are times. Raises ValueError if there are none."""
        tp_sizes = self.times.tp_sizes(call.shape)
        if not tp_sizes:
            raise ValueError(f"cluster.gpu: the profile has no times of {call.role}'s model; profile again")
        return tp_sizes

    def _useful_alternatives(
        self, call: ModelCall, settings: CallSettings, role: RoleSettings, estimates: Sequence[_Estimate]
    ) -> list[int]:
        """Return the indices of settings that no others of the same layout beat, and whose offloaded bytes a host can hold."""
        seconds = np.sum([estimate.seconds for estimate in estimates], axis=0)
        call_bytes = np.max([estimate.call_bytes for estimate in estimates], axis=0)
        ep = settings.ep * (not call.home)  # a home takes its best ep, which movable calls must meet
        sharding = np.asarray(SHARDING_OF_ZERO)[settings.zero]
        kinds = np.stack([settings.pp, settings.tp, ep, sharding], axis=1).tolist()
        rows = np.stack([seconds, estimates[0].resident, *call_bytes], axis=1).tolist()
        indices = sorted(undominated(rows, list(map(tuple, kinds))))
        if not call.home:
            return indices
        pinned = memory.fullest(call.shape, settings, role, RankMemory.pinned)
        return [i for i in indices if self.machine.local_size * pinned[i] <= self.machine.host_memory]

    def _role_settings(self, call: ModelCall, offload: bool, optim_offload: bool) -> RoleSettings:
        device = self.machine.device
        return replace(
            call.settings, itemsize=device.itemsize, on_host=device.on_host, offload=offload, optim_offload=optim_offload
        )

    def _fixed_settings(self, call: ModelCall, placed: PlacedCall) -> CallSettings:
        """Return the settings that a fixed plan has for a call."""
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
        return self._with_graphs(call, settings)

    def _searched_settings(self, call: ModelCall, grids: Sequence[tuple[int, int, int]]) -> CallSettings:
        """Return the settings that are tried in these layouts."""
        options: dict[str, Sequence[int]] = {"micro_tokens": (self.budget,), "cp": (call.cp,), "ep": call.expert_ranks}
        if call.kind == "train":
            options |= {"zero": (0, 1, 2, 3), "checkpointing": (0, 1, 2), "sequence_parallel": (0, 1)}
        elif call.kind == "generate":
            rows = max((call.work.in_flight or call.work.rows) // min(dp for _, _, dp in grids), 1)
            limit = min(rows, call.generation.max_num_batched_tokens)
            options |= {"max_num_seqs": sorted({min(rows_in_flight, limit) for rows_in_flight in IN_FLIGHT})}
        elif call.home:
            options |= {"zero": (0, 3)}
        elif call.settings.trained:
            options |= {"zero": (0, 1, 3)}
        settings = call_settings(grids, **options)
        copies = settings.dp * settings.cp
        is_possible = ((settings.zero == 0) | (copies > 1)) & ((settings.sequence_parallel == 0) | (settings.tp > 1))
        # experts among all copies' ranks that can share them, or those of a host: other numbers save little
        largest = np.gcd(copies, call.expert_ranks[-1])
        inside = np.gcd(largest, np.maximum(self.machine.local_size // settings.tp, 1))
        is_useful = (settings.ep == 1) | (settings.ep == inside) | (settings.ep == largest)
        return self._with_graphs(call, settings.take(is_possible & is_useful))

    def _with_graphs(self, call: ModelCall, settings: CallSettings) -> CallSettings:
        """Return the settings with CUDA graphs where decode steps of a call can be captured."""
        if call.has_graphs_on(self.machine.device):
            return settings.set(graphs=settings.pp == 1)
        return settings

    def _estimate_call(
        self,
        call: ModelCall,
        settings: CallSettings,
        role: RoleSettings,
        extent: Extent,
        weights_and_states: Numbers | None = None,
    ) -> _Estimate:
        """Return the predictions for a call on ranks of ``extent``.

        ``weights_and_states``: their bytes on the call's ranks, if the KV cache takes what the configured
        ``gpu_memory_utilization`` leaves beside them; None: the cache has all rows in flight.
        """
        shape = call.shape
        works = self.times.works(call, settings, extent)
        device = self.machine.device
        buffers = RankMemory(shape, settings, role, 0).communicators()
        resident = _resident_bytes(call, settings, role)
        zeros = np.zeros(len(settings))
        if call.kind == "generate":
            config = replace(call.generation, num_pages=None)
            caches: dict[int, Numbers] = {}
            call_bytes = []
            for kind, work in works.items():
                cache = RankMemory(shape, settings, role, 0 * settings.pp).generate(work, config).all_rows_bytes
                parts = partial(_generation_work, work, config)
                other_bytes = buffers + memory.fullest(shape, settings, role, parts)
                if weights_and_states is not None:
                    memory_share = config.memory_share(device.on_host)
                    limit = self._memory_of_kind[kind]
                    on_gpu = memory_share * limit - other_bytes - weights_and_states
                    cache = np.minimum(cache, np.maximum(memory_share * (limit - other_bytes) if device.on_host else on_gpu, 0))
                caches[kind] = cache
                call_bytes.append(other_bytes + cache)
            seconds = self.times.seconds(call, settings, extent, caches)
            largest_cache = np.maximum.reduce([cache + zeros for cache in caches.values()])
            return _Estimate(seconds, resident, np.array(call_bytes), largest_cache)
        params = shape.rank_params(settings)
        transferred = device.itemsize * params * role.offload
        seconds = self.times.seconds(call, settings, extent, {})
        method = RankMemory.train if call.kind == "train" else RankMemory.infer
        call_bytes = [buffers + memory.fullest(shape, settings, role, partial(method, work=work)) for work in works.values()]
        if call.kind == "train" and role.optim_offload:
            steps = call.work.mini_batches * call.work.epochs
            transferred = transferred + 2 * role.optimizer_bytes_per_param * params * steps
        return _Estimate(seconds + transferred / device.host_link, resident, np.array(call_bytes), zeros)

    @cached_property
    def _memory_of_kind(self) -> dict[int, float]:
        """Return the bytes of each kind's devices."""
        return {kind: self.machine.memory[run.first] for run, kind in self._device_runs}

    def _weights_and_states(
        self, call: ModelCall, settings: CallSettings, calls: Sequence[ModelCall], plan: PlanFile
    ) -> np.ndarray:
        """Return bytes of weights and states on the ranks of a generating call.

        They are the weights that it generates with, and what homes hold there. Its own role's weights become those that it
        generates with.
        """
        ranks = plan.calls[call.name].rank_range
        total = self.machine.device.itemsize * call.shape.stage_params(settings.pp, settings.tp)
        for home in (other for other in calls if other.home):
            placed = plan.calls[home.name]
            if ranks.overlaps(placed.rank_range):
                role = self._role_settings(home, placed.offload or home.role == call.role, placed.optim_offload)
                total = total + _resident_bytes(home, self._fixed_settings(home, placed), role)
        return np.asarray(total)

    def _build_options(
        self,
        call: ModelCall,
        settings: CallSettings,
        role: RoleSettings,
        estimate: _Estimate,
        indices: Sequence[int],
        extent: Extent,
    ) -> list[Option]:
        """Return the options of a call on ranks of ``extent`` with the settings at ``indices``."""
        generates = call.kind == "generate"
        micro_batches, _ = call.work.micro_batches(call.work.rows / call.work.mini_batches, settings)
        options = []
        for index in indices:
            setting = settings.alternative(index)
            level: Any = CHECKPOINTING[setting["checkpointing"]]
            grid = {axis: setting[axis] for axis in ("pp", "tp", "dp", "cp", "ep")}
            placed = PlacedCall(
                ranks="0",  # undecided
                **grid,
                home=call.home,
                zero=setting["zero"],
                zero_size=setting["zero_size"] or None,
                sequence_parallel=bool(setting["sequence_parallel"]),
                activation_checkpointing=level,
                offload=role.offload,
                optim_offload=role.optim_offload,
                max_num_seqs=setting["max_num_seqs"] if generates else None,
                graphs=generates and bool(setting["graphs"]),
                micro_batches=1 if generates else int(micro_batches[index]),
            )
            options.append(
                Option(
                    size=placed.pp * placed.tp * placed.dp * placed.cp,
                    pp=placed.pp,
                    tp=placed.tp,
                    seconds=float(estimate.seconds[index]),
                    resident=float(estimate.resident[index]),
                    call_bytes=tuple(estimate.call_bytes[:, index].tolist()),
                    zero=placed.zero,
                    zero_size=setting["zero_size"],
                    ep=placed.ep,
                    in_place=call.kind == "infer",
                    expert_parallel_generation=call.shares_experts,
                    cache=float(estimate.cache[index]),
                    copies=call.versions,
                    devices=extent if self.machine.kinds else (),
                    settings=placed,
                )
            )
        return options


def _generation_work(work: Workload, config: GenerationConfig, rank: RankMemory) -> memory.Parts:
    """Return the bytes of a generating call on a rank without the cache."""
    return {"work": rank.generate(work, config).parts["work"]}


def _resident_bytes(call: ModelCall, settings: CallSettings, role: RoleSettings) -> np.ndarray:
    """Return bytes [n] on the fullest rank of a home; 0 if the call is none."""
    return memory.fullest(call.shape, settings, role, RankMemory.resident) if call.home else np.zeros(len(settings))
