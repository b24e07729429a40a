"""Seconds of calls on ranks of one or of several kinds of devices. Pure.

Rows are dealt to replicas in proportion to ``placement.speeds``, as ``controller/rows.py`` does. A replica is as fast as its slowest
rank. So a call takes as long as the slowest of its replicas, each with its share of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.model_call import ModelCall, layouts
from rlhf_spmd.planner.problem import Extent
from rlhf_spmd.planner.shapes import CallSettings, ModelShape, Numbers, Workload, call_settings


class CallTimes(Protocol):
    """Seconds [n] of calls, by formulas or from a profile. ``tp_sizes``: the tensor-parallel sizes for which there are times."""

    def tp_sizes(self, shape: ModelShape) -> list[int]: ...
    def infer_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray: ...
    def train_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings) -> np.ndarray: ...
    def generate_seconds(self, shape: ModelShape, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray: ...


@dataclass(frozen=True)
class KindSpeeds:
    """Speeds of the kinds of devices, 1 for the fastest: in calls that train or infer, and in those that generate."""

    compute: tuple[float, ...] = (1.0,)
    generation: tuple[float, ...] = (1.0,)

    def of(self, call: ModelCall) -> tuple[float, ...]:
        """Return the speeds by which a call's rows are dealt."""
        return self.generation if call.kind == "generate" else self.compute


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of calls on ranks of any extent. ``times``: of each kind of device, if all ranks had it."""

    times: Sequence[CallTimes]
    speeds: KindSpeeds = KindSpeeds()

    def tp_sizes(self, shape: ModelShape) -> list[int]:
        """Return the tensor-parallel sizes for which there are times of all kinds."""
        return sorted(set.intersection(*(set(times.tp_sizes(shape)) for times in self.times)))

    def largest_share(self, call: ModelCall, settings: CallSettings, extent: Extent) -> Numbers:
        """Return the rows of the fastest replica as a multiple of the mean, [n]."""
        if len(extent) == 1:
            return 1.0
        shares = (
            np.where(is_slowest, share, 0.0) for _, share, is_slowest in row_shares(settings, extent, self.speeds.of(call))
        )
        return np.maximum.reduce(list(shares))

    def seconds(self, call: ModelCall, settings: CallSettings, extent: Extent, kv_bytes: Numbers) -> np.ndarray:
        """Return seconds [n] of a call on ranks of ``extent``. ``kv_bytes``: for keys and values on each rank, if it generates."""
        if len(extent) == 1:
            return _seconds(self.times[extent[0][0]], call, call.work, settings, kv_bytes)
        slowest = np.zeros(len(settings))
        for kind, share, is_slowest in row_shares(settings, extent, self.speeds.of(call)):
            work = replace(call.work, row_share=share)
            seconds = _seconds(self.times[kind], call, work, settings, kv_bytes)
            slowest = np.maximum(slowest, np.where(is_slowest, seconds, 0.0))
        return slowest


def _seconds(times: CallTimes, call: ModelCall, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
    if call.kind == "generate":
        return times.generate_seconds(call.shape, work, settings, kv_bytes)
    return (times.train_seconds if call.kind == "train" else times.infer_seconds)(call.shape, work, settings)


def row_shares(settings: CallSettings, extent: Extent, speeds: Sequence[float]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield for each kind of an extent: the kind; the rows of a replica whose slowest rank is of this kind, as a multiple of the mean
    [n]; and True where there are such replicas [n].

    A replica's stages lie one behind the other on the ranks, as ``parallel/layout.py`` has them.
    """
    kind_of_rank = np.repeat([kind for kind, _ in extent], [count for _, count in extent])
    kinds = sorted({kind for kind, _ in extent}, key=lambda kind: speeds[kind])
    kind_speeds = np.array([speeds[kind] for kind in kinds])
    order = np.empty(max(kinds) + 1, dtype=np.int64)  # of the kinds by their speed
    order[kinds] = np.arange(len(kinds))
    total_speed = np.empty(len(settings))
    has_kind = np.zeros((len(kinds), len(settings)), dtype=bool)
    grids = np.stack([settings.pp, settings.dp, settings.tp * settings.cp], axis=1)
    distinct, index_of = np.unique(grids, axis=0, return_inverse=True)
    for index, (pp, dp, ranks) in enumerate(distinct):
        slowest = order[kind_of_rank].reshape(pp, dp, ranks).min(axis=(0, 2))
        num_replicas = np.bincount(slowest, minlength=len(kinds))
        same_grid = index_of.reshape(-1) == index
        total_speed[same_grid] = num_replicas @ kind_speeds / dp
        has_kind[:, same_grid] = num_replicas[:, None] > 0
    for index, kind in enumerate(kinds):
        yield kind, kind_speeds[index] / total_speed, has_kind[index]


def measured_speeds(calls: Sequence[ModelCall], machine: Machine, times: Sequence[CallTimes], budget: int) -> KindSpeeds:
    """Return the speeds of the kinds of devices in these calls.

    A kind's speed is the inverse of its seconds for all calls of a sort, each in its fastest layout on a host with the host's part
    of the rows. ``budget``: tokens of a micro-batch.
    """
    if len(times) == 1:
        return KindSpeeds()
    device_times = DeviceTimes(times)
    totals = {True: np.zeros(len(times)), False: np.zeros(len(times))}  # by whether the calls generate
    for call in calls:
        grids = layouts(call, machine.local_size, device_times.tp_sizes(call.shape))
        if not grids:
            continue
        settings = call_settings(grids, micro_tokens=(budget,), cp=(call.cp,))
        work = replace(call.work, rows=max(call.work.rows * machine.local_size // machine.size, call.work.group))
        seconds = [_seconds(kind_times, call, work, settings, np.inf).min() for kind_times in times]
        totals[call.kind == "generate"] += seconds
    generation, compute = (
        np.round(total.min() / total, 4) if total.all() else np.ones(len(times)) for total in totals.values()
    )
    return KindSpeeds(tuple(compute.tolist()), tuple(generation.tolist()))
