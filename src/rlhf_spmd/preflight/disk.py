"""Whether the disk has room for what a run will save, before anything is built."""

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


def check_disk(plan: RunPlan) -> str | None:
    """Return a warning, one line, if the disk of ``run.dir`` has room for a checkpoint but not for all that the run keeps; else None.

    A checkpoint is written before the oldest one is deleted. Raises CheckpointError if there is no room for one, unless all steps
    are done.
    """
    run, steps = plan.config.run, plan.num_steps
    present = committed(Path(run.dir))
    if present and present[0].step >= steps:
        return None
    size = sum(saved_bytes(role, model_device()) for role in plan.changing_roles.values())
    exports = run.export + bool(run.keep_best) + (steps // run.export_freq if run.export_freq else 0)
    saves = 1 + sum(steps // freq for freq in (run.save_freq, run.export_freq) if freq)
    kept = size * max((saves if run.keep_checkpoints is None else run.keep_checkpoints + 1) - len(present), 1)
    kept += exports * exported_bytes(plan.exported, model_device())
    directory = checkpoints_of(Path(run.dir)).absolute()
    mounted = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(mounted).free
    where = f"run.dir={run.dir}: {{}} {{}}, as estimated, and {mounted} has {_words(free)} free"
    if free < size:
        raise CheckpointError(f"{where.format('a checkpoint needs', _words(size))}; free space there, or give another run.dir")
    if free < kept:
        return f"{where.format('the checkpoints and exports that the run keeps need', _words(kept))}; the disk may fill up"
    return None


def saved_bytes(plan: RolePlan, device: torch.device) -> int:
    """Return the bytes of a role in a checkpoint: its weights, or its adapters and head, and the optimizer's states."""
    if plan.spec is None:
        return 0
    config, lora, head = plan.config, plan.config.lora, _head(plan)
    dtype = config.torch_dtype(device)
    wide = accumulation_dtype(dtype) if config.optim.master_weights else dtype
    total = 0
    for name, shard in plan_whole_model(plan.spec, head, lora if lora.rank else None).items():
        if lora.rank and not is_trained(name, head, True):
            continue
        each = dtype.itemsize
        if plan.trained:
            is_matrix = len(shard.shape) > 1
            moments = 1 if config.optim.name == "muon" and is_matrix and ".layers." in f".{name}" else 2
            in_8_bits = config.optim.name == "adamw_8bit" and is_matrix  # and saved in float32
            each += moments * (4 if in_8_bits else wide.itemsize) + (wide.itemsize if wide != dtype else 0)
        total += each * math.prod(shard.shape)
    return total


def exported_bytes(plan: RolePlan, device: torch.device) -> int:
    """Return the bytes of a role's weights in an export."""
    if plan.spec is None:
        return 0
    shards = plan_whole_model(plan.spec, _head(plan)).values()
    return sum(math.prod(shard.shape) for shard in shards) * plan.config.torch_dtype(device).itemsize


def _head(plan: RolePlan) -> str:
    assert issubclass(plan.worker, ModelWorker), "a role with a model"
    return plan.worker.head


def _words(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
