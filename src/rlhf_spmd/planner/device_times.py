"""Seconds of calls on ranks of one or of several kinds of devices. Pure.

Rows are dealt to replicas in proportion to ``placement.speeds``, as ``controller/rows.py`` does. A replica is as fast as its slowest
rank. So a call takes as long as the slowest of its replicas, each with its share of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def works(self, call: ModelCall, settings: CallSettings, extent: Extent) -> dict[int, Workload]:
        """Return kind -> the rows of its replicas with most rows, for the kinds of ``extent``, ascending."""
        if len(extent) == 1:
            return {extent[0][0]: call.work}
        shares = row_shares(settings, extent, self.speeds.of(call))
        largest = np.maximum.reduce([*shares.values()])
        return {kind: replace(call.work, row_share=share, largest_share=largest) for kind, share in shares.items()}

    def seconds(self, call: ModelCall, settings: CallSettings, extent: Extent, kv_bytes: Mapping[int, Numbers]) -> np.ndarray:
        """Return seconds [n] of a call on ranks of ``extent``.

        ``kv_bytes``: for keys and values on a rank of each kind, if the call generates.
        """
        works = self.works(call, settings, extent)
        return np.maximum.reduce(
            [_seconds(self.times[kind], call, work, settings, kv_bytes.get(kind, 0.0)) for kind, work in works.items()]
        )


def _seconds(times: CallTimes, call: ModelCall, work: Workload, settings: CallSettings, kv_bytes: Numbers) -> np.ndarray:
    if call.kind == "generate":
        return times.generate_seconds(call.shape, work, settings, kv_bytes)
    return (times.train_seconds if call.kind == "train" else times.infer_seconds)(call.shape, work, settings)


def row_shares(settings: CallSettings, extent: Extent, speeds: Sequence[float]) -> dict[int, np.ndarray]:
    """Return for each kind of an extent, ascending, the most rows of a replica that has ranks of this kind, as a multiple of the mean
    [n].

    A replica's stages lie one behind the other on the ranks, as ``parallel/layout.py`` has them.
    """
    kind_of_rank = np.repeat([kind for kind, _ in extent], [count for _, count in extent])
    kinds = sorted({kind for kind, _ in extent})
    shares = np.zeros((len(kinds), len(settings)))
    grids = np.stack([settings.pp, settings.dp, settings.tp * settings.cp], axis=1)
    distinct, index_of = np.unique(grids, axis=0, return_inverse=True)
    for index, (pp, dp, ranks) in enumerate(distinct):
        replicas = kind_of_rank.reshape(pp, dp, ranks)
        has_kind = np.stack([(replicas == kind).any(axis=(0, 2)) for kind in kinds])  # [kinds, dp]
        slowest = np.where(has_kind, np.array([speeds[kind] for kind in kinds])[:, None], np.inf).min(axis=0)
        share = slowest * dp / slowest.sum()
        shares[:, index_of.reshape(-1) == index] = np.where(has_kind, share, 0.0).max(axis=1)[:, None]
    return dict(zip(kinds, shares, strict=True))


def measured_speeds(calls: Sequence[ModelCall], machine: Machine, times: Sequence[CallTimes], budget: int) -> KindSpeeds:
    """Return the speeds of the kinds of devices in these calls.

    In a layout a kind's speed is the fewest seconds of all kinds over its own, on one host with the host's part of the rows. A
    call's speeds are the means over its layouts without stages; those of a sort of calls are the means over its calls, each
    weighted with its seconds. ``budget``: tokens of a micro-batch.
    """
    if len(times) == 1:
        return KindSpeeds()
    device_times = DeviceTimes(times)
    totals = {"compute": np.zeros(len(times)), "generation": np.zeros(len(times))}  # speeds * seconds
    for call in calls:
        grids = layouts(call, machine.local_size, device_times.tp_sizes(call.shape))
        grids = [grid for grid in grids if grid[0] == 1] or grids
        if not grids:
            continue
        settings = call_settings(grids, micro_tokens=(budget,), cp=(call.cp,))
        if call.has_graphs_on(machine.device):
            settings = settings.set(graphs=settings.pp == 1)
        work = call.work.on_part_of(machine.local_size / machine.size)
        seconds = np.array([_seconds(kind_times, call, work, settings, np.inf) for kind_times in times])
        fastest = seconds.min(axis=0)
        totals["generation" if call.kind == "generate" else "compute"] += (fastest / seconds).mean(axis=1) * fastest.min()
    speeds = {sort: np.round(total / total.max(), 4) if total.any() else np.ones(len(times)) for sort, total in totals.items()}
    return KindSpeeds(tuple(speeds["compute"].tolist()), tuple(speeds["generation"].tolist()))
