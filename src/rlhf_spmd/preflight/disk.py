"""Checks before anything is built that the disk has room for what a run will save."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from rlhf_spmd.checkpoint.directory import checkpoints_of, committed
from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.kernels import model_device
from rlhf_spmd.models.lora import is_trained
from rlhf_spmd.models.sharding import plan_whole_model
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers import ModelWorker
from rlhf_spmd.workers.optim_config import accumulation_dtype
from rlhf_spmd.workers.role_plan import RolePlan


def check_disk(run_plan: RunPlan) -> str | None:
    """Return a warning, one line, if the disk of ``run.dir`` has room for a checkpoint but not for all that the run keeps.

    Else return None. A checkpoint is written before the oldest one is deleted. Raises CheckpointError if there is no room for a
    checkpoint, unless all steps are done.
    """
    run = run_plan.config.run
    steps = run_plan.num_steps
    present = committed(Path(run.dir))
    if present and present[0].step >= steps:
        return None
    size = sum(saved_bytes(role_plan, model_device()) for role_plan in run_plan.changing_roles.values())
    num_exports = run.export + bool(run.keep_best) + (steps // run.export_freq if run.export_freq else 0)
    num_saves = 1 + sum(steps // freq for freq in (run.save_freq, run.export_freq) if freq)
    num_kept = num_saves if run.keep_checkpoints is None else run.keep_checkpoints + 1
    total = size * max(num_kept - len(present), 1) + num_exports * exported_bytes(run_plan.exported, model_device())
    directory = checkpoints_of(Path(run.dir)).absolute()
    mounted = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(mounted).free
    where = f"run.dir={run.dir}:"
    room = f"as estimated, and {mounted} has {_words(free)} free"
    if free < size:
        raise CheckpointError(f"{where} a checkpoint needs {_words(size)}, {room}; free space there, or give another run.dir")
    if free < total:
        return f"{where} the checkpoints and exports that the run keeps need {_words(total)}, {room}; the disk may fill up"
    return None


def saved_bytes(role_plan: RolePlan, device: torch.device) -> int:
    """Return the bytes of a role in a checkpoint: its weights, or its adapters and head, and the optimizer's states."""
    if role_plan.spec is None:
        return 0
    config = role_plan.config
    lora = config.lora
    head = _head(role_plan)
    dtype = config.torch_dtype(device)
    wide = accumulation_dtype(dtype) if config.optim.master_weights else dtype
    total = 0
    for name, shard in plan_whole_model(role_plan.spec, head, lora if lora.rank else None).items():
        if lora.rank and not is_trained(name, head, True):
            continue
        itemsize = dtype.itemsize
        if role_plan.trained:
            is_matrix = len(shard.shape) > 1
            num_moments = 1 if config.optim.name == "muon" and is_matrix and ".layers." in f".{name}" else 2
            in_8_bits = config.optim.name == "adamw_8bit" and is_matrix  # saved in float32
            itemsize += num_moments * (4 if in_8_bits else wide.itemsize) + (wide.itemsize if wide != dtype else 0)
        total += itemsize * math.prod(shard.shape)
    return total


def exported_bytes(role_plan: RolePlan, device: torch.device) -> int:
    """Return the bytes of a role's weights in an export."""
    if role_plan.spec is None:
        return 0
    shards = plan_whole_model(role_plan.spec, _head(role_plan)).values()
    return sum(math.prod(shard.shape) for shard in shards) * role_plan.config.torch_dtype(device).itemsize


def _head(role_plan: RolePlan) -> str:
    assert issubclass(role_plan.worker, ModelWorker), "a role with a model"
    return role_plan.worker.head


def _words(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
