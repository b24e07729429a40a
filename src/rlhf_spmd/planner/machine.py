"""The machines that a plan is made for: devices, hosts, links. ``cluster`` of the configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.config.schema import nearest

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A device as its maker's data sheet has it. ``flops``: dense, bf16, per second. ``memory``: bytes, as the driver reports them.
    Bytes/s, in one direction: ``bandwidth`` of its memory, ``link`` to the other devices of its host, ``host_link`` to host memory.
    ``latency``: seconds of a small all-reduce of two devices (each doubling adds as much; NCCL over NVLink: 22 microseconds of eight).
    ``itemsize``: bytes of a number in the arithmetic that ``flops`` are of. ``overlap``: share of its time in which a device can send
    beside computing; 0 without streams."""

    flops: float
    memory: float
    bandwidth: float
    link: float
    host_link: float
    latency: float = 7e-6
    itemsize: int = 2
    overlap: float = 1.0


GPUS = {
    "a100": Gpu(312e12, 79.2 * GIB, 2.039e12, 300e9, 25e9),
    "a100_40": Gpu(312e12, 39.5 * GIB, 1.555e12, 300e9, 25e9),
    "a10": Gpu(125e12, 22.1 * GIB, 0.6e12, 25e9, 25e9),
    "l40s": Gpu(362e12, 44.5 * GIB, 0.864e12, 25e9, 25e9),
    "h100": Gpu(989e12, 79.2 * GIB, 3.35e12, 450e9, 50e9),
    "h200": Gpu(989e12, 139.8 * GIB, 4.8e12, 450e9, 50e9),
    "h800": Gpu(989e12, 79.2 * GIB, 3.35e12, 200e9, 50e9),
    "b200": Gpu(2250e12, 178.4 * GIB, 8.0e12, 900e9, 50e9),
}


@dataclass(frozen=True)
class HostsConfig:
    """``cluster.groups``: hosts of one kind; what is null is the cluster's."""

    nodes: int = 1
    gpus_per_node: int | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """``cluster``: what a plan is made for. ``gpu``: a name of the table, or a file that ``plan profile`` wrote. ``network_gb_s``:
    gigabytes per second between hosts, per device, in one direction. ``memory_gb``: of a device, in GiB; null: the device's.
    ``groups``: hosts of several kinds, in order of their ranks; then ``nodes`` is not read."""

    nodes: int = 1
    gpus_per_node: int = 8
    gpu: str = "h100"
    network_gb_s: float = 50.0
    memory_gb: float | None = None
    groups: list[HostsConfig] = field(default_factory=list)

    def check(self, where: str) -> None:
        check_bounds(self, where, "nodes", "gpus_per_node", least=1)
        for name in {self.gpu, *(group.gpu or self.gpu for group in self.groups)}:
            if name not in GPUS and "/" not in name and "." not in name:
                raise ValueError(
                    f"{where}.gpu={name!r} is not known{nearest(name, list(GPUS)) or ';'} available: {', '.join(GPUS)}, or a file "
                    "that `python -m rlhf_spmd.plan profile` wrote"
                )
        for key in ("network_gb_s", "memory_gb"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{where}.{key}={value}: must be above 0")


@dataclass(frozen=True)
class Machine:
    """``size`` ranks, ``local_size`` on each host. ``device``: of the slowest kind, which all are taken for. ``memory``: bytes of each
    rank's device. ``network``: bytes/s of a rank to other hosts."""

    size: int
    local_size: int
    device: Gpu
    memory: tuple[float, ...]
    network: float
