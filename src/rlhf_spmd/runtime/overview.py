"""What is about to run, in the lines that a run begins with."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.kernels import can, choose_ops
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.placement import PlacementConfig


def describe(ready: Any, world: World) -> str:
    """``ready``: the checked run (``Prepared`` of the training program)."""
    config, rows = ready.config, ", ".join(data.summary() for data in ready.training.values())
    placement, exported = config.placement, config.algorithm.exported
    lines = [f"{config.run.name}: {config.algorithm.name} on {world.size} rank(s), {rows}"]
    lines += [f"  warning: {line}" for line in ready.warnings]
    if ready.checkpointing != "none":
        lines.append(f"  activation_checkpointing auto: {ready.checkpointing}, so that activations fit into memory")
    prompts = [data for data in ready.training.values() if isinstance(data, PromptDataset)]
    rules = any(reward.function for reward in ready.rewards.values())
    if prompts and rules and all(row["answer"] is None for data in prompts for row in data.examples()):
        lines.append("  warning: no row has an answer (data.answer_key), so a reward that looks for one finds none")
    correction = getattr(config.algorithm, "rollout_correction", None)
    if placement.max_staleness and not (correction and (correction.bypass_mode or correction.active)):
        advice = "set algorithm.rollout_correction.bypass_mode=true, or rollout_is" if correction else "this algorithm cannot"
        stale = f"placement.max_staleness={placement.max_staleness}"
        lines.append(f"  warning: {stale} and nothing corrects for older weights: {advice}")
    lines += [line for data in (*ready.training.values(), *ready.validation.values()) for line in data.tally.warnings()]
    plan, device = ready.plans[exported], world.device
    dtype = plan.config.torch_dtype(device)
    attention = choose_ops(dtype, device, plan.config.attention, f"models.{exported}.attention").name
    line = f"  device {device.type}, attention {attention}"
    if plan.generation is not None:
        where = f"models.{exported}.generation.attention"
        line += f", of generation {choose_backend(plan.config.generation.attention, attention, dtype, device, where)}"
    on_cpu = f", float32 products '{torch.get_float32_matmul_precision()}', {config.run.threads} thread(s) per rank"
    lines.append(line + (on_cpu if can(device).exact else ""))
    lines += [f"  {ready.memory}"] if ready.memory else []
    usual = PlacementConfig()
    set_here = [f.name for f in fields(placement) if f.name != "pools" and getattr(placement, f.name) != getattr(usual, f.name)]
    if set_here:
        lines.append("  placement " + ", ".join(f"{name} {getattr(placement, name)}" for name in set_here))
    for role, plan in ready.plans.items():
        where = f"  {role:<10} pool {plan.pool}, {plan.shape.layout}"
        if plan.shape.generation is not None:
            g = plan.shape.generation
            where += f", generation pp({g.pp}) * tp({g.tp}) * micro_dp({g.micro_dp}) * dp({g.train.dp})"
        lines.append(where)
        for method, call in plan.calls.items():
            lines.append(
                f"    {method} on pool {call.pool}, {call.shape.layout}{', delta' if plan.config.calls[method].delta else ''}"
            )
    return "\n".join(lines)


def start_facts(world: World) -> dict[str, str]:
    """Of this start of a run: date, host, ranks, device, versions, commit of this code where it is in a git tree, command line."""
    launch, device = world.launch, world.device
    argv, hosts = sys.orig_argv, -(-launch.size // launch.local_size)
    program = argv[argv.index("-m") :] if "-m" in argv else sys.argv
    torchrun = ["torchrun", *(["--nnodes", str(hosts)] if hosts > 1 else []), "--nproc-per-node", str(launch.local_size)]
    return {
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "host": socket.gethostname() + (f" and {hosts - 1} more" if hosts > 1 else ""),
        "ranks": str(launch.size),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}",
        "versions": ", ".join(
            ["python " + platform.python_version(), *(f"{n} {version(n)}" for n in ("torch", "transformers"))]
        ),
        "commit": _commit(),
        "command": shlex.join(torchrun + program),
        "working directory": str(Path.cwd()),
    }


def _commit() -> str:
    here = Path(__file__)
    found = ""
    for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--exclude", "*"]):
        try:
            ended = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, check=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        found = ended.stdout.strip()
    return found
