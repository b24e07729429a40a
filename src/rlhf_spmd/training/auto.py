"""``placement.strategy=auto``: a run plans itself for the ranks that it was started on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlhf_spmd.kernels import capabilities, model_device
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.planner.costs import Formulas
from rlhf_spmd.planner.machine import GPUS, ClusterConfig, Gpu, Machine
from rlhf_spmd.planner.plan_file import PlanFile
from rlhf_spmd.planner.profile import Measured, read_profile
from rlhf_spmd.planner.shape import Workload
from rlhf_spmd.training.checked_plan import checked_plan
from rlhf_spmd.training.memory import StepFacts
from rlhf_spmd.training.planned_calls import planned_nodes
from rlhf_spmd.training.roles import RolePlan


def plan_run(
    config: Any, described: Mapping[str, RolePlan], step: StepFacts, work: Workload, size: int, local_size: int
) -> PlanFile:
    """The best plan for ``size`` ranks, the same on every rank. Raises ValueError where none fits, or none is proved to be the best: a
    search that runs out of time may end elsewhere on each rank."""
    where, measured = "placement.strategy='auto'", None
    if config.placement.profile is not None:
        measured = read_profile(config.placement.profile, "placement.profile")
        measured.check_ranks(size, "placement.profile")
    elif not capabilities(model_device()).streams:
        raise ValueError(
            f"{where}: of CPUs only measured times are known; give placement.profile, a file that `rlhf-spmd plan "
            "profile` writes"
        )
    device = measured.device if measured else known_gpu(torch.cuda.get_device_name(), where)
    memory = device.memory if device.on_host else total_bytes(model_device(), local_size)  # the same on all ranks
    machine = Machine(size, local_size, device, (memory,) * size, ClusterConfig().network_gb_s * 1e9)
    times = Measured(measured, machine) if measured else Formulas(machine)
    nodes = planned_nodes(step.graph, described, work)
    return checked_plan(config, nodes, described, step, machine, times, proved=True).file


def known_gpu(name: str, where: str) -> Gpu:
    """The device of the table that the driver calls ``name``. Raises ValueError."""
    words = name.lower().replace("-", " ").split()
    if any(word in words for word in ("mig", "grid", "pcie", "nvl")):
        raise ValueError(f"{where}: the GPU {name!r} is another form of one in the table; profile it, give placement.profile")
    found = [kind for kind in GPUS if kind.split("_")[0] in words]
    if not found:
        raise ValueError(
            f"{where}: the GPU {name!r} is not in the table ({', '.join(GPUS)}); profile it and give placement.profile"
        )
    small = [kind for kind in found if "_" in kind and kind.split("_")[1] + "gb" in name.lower()]
    return GPUS[(small or found)[0]]
