"""The machines that a plan is made for: devices, hosts and links; the section ``cluster`` of the configuration. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated

from rlhf_spmd.config.constraints import PositiveFloat, PositiveInt, Range
from rlhf_spmd.config.words import nearest

GIB = 1 << 30
DRIVER_GB = 2.5  # GiB of a GPU that the driver and nccl take


@dataclass(frozen=True)
class Gpu:
    """A device by its data sheet.

    - flops: dense operations per second, in bf16 or another type of ``itemsize``
    - memory: bytes, as the driver reports them
    - bandwidth: bytes/s of its memory
    - link, host_link: bytes/s in one direction, to the other devices of its host and to host memory
    - latency: seconds of a small all-reduce of two devices; each doubling adds as much (NCCL over NVLink: 22 microseconds for eight)
    - itemsize: bytes of a number that ``flops`` count
    - overlap: share of its time in which a device can send while it computes; 0 without streams
    - on_host: it is a CPU, and its memory is the host's
    - groups_experts: one launch multiplies all experts, which a CUDA graph needs (compute capability 9 and 10)
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    host_link: float
    latency: float = 7e-6
    itemsize: int = 2
    overlap: float = 1.0
    on_host: bool = False
    groups_experts: bool = False


GPUS = {
    "a100": Gpu(312e12, 79.2 * GIB, 2.039e12, 300e9, 25e9),
    "a100_40": Gpu(312e12, 39.5 * GIB, 1.555e12, 300e9, 25e9),
    "v100": Gpu(125e12, 31.7 * GIB, 0.9e12, 150e9, 12.5e9),  # in fp16; it has no bf16
    "a10": Gpu(125e12, 22.1 * GIB, 0.6e12, 25e9, 25e9),
    "l40s": Gpu(362e12, 44.5 * GIB, 0.864e12, 25e9, 25e9),
    "h100": Gpu(989e12, 79.2 * GIB, 3.35e12, 450e9, 50e9, groups_experts=True),
    "h200": Gpu(989e12, 139.8 * GIB, 4.8e12, 450e9, 50e9, groups_experts=True),
    "h800": Gpu(989e12, 79.2 * GIB, 3.35e12, 200e9, 50e9, groups_experts=True),
    "b200": Gpu(2250e12, 178.4 * GIB, 8.0e12, 900e9, 50e9, groups_experts=True),
}


@dataclass(frozen=True)
class HostsConfig:
    """``cluster.groups``: hosts of one kind. A key that is null has the cluster's value.

    - nodes: hosts
    - gpus_per_node: ranks of a host
    - gpu: as `cluster.gpu`
    """

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """``cluster``: what a plan is made for.

    - nodes: hosts
    - gpus_per_node: ranks of a host
    - gpu: `a100`, `a100_40`, `v100` (fp16, it has no bf16), `a10`, `l40s`, `h100`, `h200`, `h800`, `b200`, or a file that
      `plan profile` wrote
    - network_gb_s: gigabytes per second between hosts, for each device, in one direction
    - memory_gb: GiB of a device that are to be used; null: what the table or the profile says
    - host_memory_gb: GiB of a host's own memory that offloading may fill, for all ranks of the host; null: no limit
    - groups: hosts of several kinds, in order of their ranks, each `{nodes, gpus_per_node, gpu}`, instead of `cluster.nodes`
      and `cluster.gpu`; the other keys are those of all groups ([Unequal devices](planner.md#unequal-devices))
    """

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 8
    gpu: str = "h100"
    network_gb_s: PositiveFloat = 50.0
    memory_gb: Annotated[float, Range(above=DRIVER_GB)] | None = None
    host_memory_gb: PositiveFloat | None = None
    groups: list[HostsConfig] = field(default_factory=list)

    @property
    def hosts(self) -> list[tuple[int, int, str]]:
        """Return (number of hosts, devices of each, kind) of every group."""
        groups = self.groups or [HostsConfig(self.nodes)]
        return [(group.nodes, group.gpus_per_node or self.gpus_per_node, group.gpu or self.gpu) for group in groups]

    def check(self, where: str) -> None:
        kinds = {kind for _, _, kind in self.hosts}
        for name in kinds:
            if name not in GPUS and not is_file(name):
                available = f"{', '.join(GPUS)}, or a file that `rlhf-spmd plan profile` wrote"
                key = f"{where}.groups: gpu" if self.groups else f"{where}.gpu"
                raise ValueError(
                    f"{key}={name!r} is not known{nearest(name.lower(), list(GPUS)) or ';'} available: {available}"
                )
        if len(set(map(is_file, kinds))) > 1:
            raise ValueError(
                f"{where}.groups: measured times of one kind and formulas for another cannot be compared; profile all kinds, or none"
            )
        if len({devices for _, devices, _ in self.hosts}) > 1:
            raise ValueError(
                f"{where}.groups: all hosts need equally many devices, and groups have "
                f"{' and '.join(str(devices) for _, devices, _ in self.hosts)}; give all the same gpus_per_node"
            )

    @property
    def device_names(self) -> list[str]:
        """Return the names of all kinds of devices, in order of their ranks."""
        return list(dict.fromkeys(name for _, _, name in self.hosts))

    def machine(self, measured: Mapping[str, Gpu] = MappingProxyType({})) -> Machine:
        """Return the cluster as the planner sees it. ``measured``: name of a profile -> its device."""
        names = self.device_names
        devices = tuple(measured[name] if name in measured else GPUS[name] for name in names)
        limit = math.inf if self.memory_gb is None else self.memory_gb * GIB
        kinds: list[int] = []
        for hosts, num_devices, name in self.hosts:
            kinds += [names.index(name)] * hosts * num_devices
        memory = tuple(min(limit, devices[kind].memory) for kind in kinds)
        host_memory = math.inf if self.host_memory_gb is None else self.host_memory_gb * GIB
        local_size = self.hosts[0][1]
        machine = Machine(len(kinds), local_size, slowest_of(devices), memory, self.network_gb_s * 1e9, host_memory)
        return replace(machine, devices=devices, kinds=tuple(kinds)) if len(devices) > 1 else machine

    def text(self, machine: Machine) -> str:
        """Return hosts, devices and links of ``machine``, which :meth:`machine` returned, in words."""
        hosts = " and ".join(f"{hosts} host{'s' * (hosts > 1)} of {devices} {kind}" for hosts, devices, kind in self.hosts)
        memory = " or ".join(f"{amount / GIB:.1f}" for amount in sorted(set(machine.memory)))
        between = f", {machine.network / 1e9:g} GB/s between hosts" if machine.size > machine.local_size else ""
        return f"{hosts}, {memory} GiB each, {machine.device.link / 1e9:g} GB/s in a host{between}"


def slowest_of(devices: Sequence[Gpu]) -> Gpu:
    """Return a device with the slowest rates of these, and with what all of them can do."""
    rates = {name: min(getattr(device, name) for device in devices) for name in ("flops", "bandwidth", "link", "host_link")}
    return replace(devices[0], **rates, groups_experts=all(device.groups_experts for device in devices))


def is_file(name: str) -> bool:
    """Return True if ``cluster.gpu`` names a file, not a device of :data:`GPUS`."""
    return "/" in name or "." in name


@dataclass(frozen=True)
class Machine:
    """The ranks of a cluster and what they have.

    - size, local_size: number of all ranks, and of those on each host
    - device: of all ranks; if there are several kinds, one with the slowest rate of each sort
    - memory: bytes of each rank's device
    - network: bytes/s of a rank to other hosts
    - host_memory: bytes of a host beside its devices
    - devices: the kinds of devices, if there are several
    - kinds: the index in ``devices`` of each rank's device; empty if all are equal
    """

    size: int
    local_size: int
    device: Gpu
    memory: tuple[float, ...]
    network: float
    host_memory: float = math.inf
    devices: tuple[Gpu, ...] = ()
    kinds: tuple[int, ...] = ()

    def with_kind(self, kind: int) -> Machine:
        """Return the machine if all ranks had devices of this kind."""
        return replace(self, device=self.devices[kind], devices=(), kinds=()) if self.devices else self
