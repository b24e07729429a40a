"""The lines that a run begins with."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.config.schema import counted
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.kernels import capabilities, choose_ops, model_device
from rlhf_spmd.parallel.launch import Launch, lone_store
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.preflight.roles import RolePlan
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.workers.model_worker import ModelWorker

UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


def describe(ready: Any, world: World) -> str:
    """Return what is trained on which ranks, the layouts, the memory, and warnings. ``ready``: the :class:`TrainJob`."""
    config, device = ready.config, world.device
    trained = " and ".join(_with_size(role, plan) for role, plan in ready.plans.items() if plan.trained)
    rows = ", ".join(data.summary() for data in ready.training.values())
    names = ", generation ".join(dict.fromkeys(_attention(ready, device))) + _linear_attention(ready, device)
    threads = (
        f", {counted(config.run.threads, 'thread')}{' each' * (world.size > 1)}" if capabilities(device).batch_invariant else ""
    )
    lines = [
        f"{config.run.name}: {config.algorithm.name} trains {trained} on {rows}",
        f"{counted(world.size, 'rank')} on {device.type}{threads}, attention {names}",
        f"layout: {'; '.join(_layouts(ready.plans, world.size))}",
    ]
    recomputed = f", activation_checkpointing auto: {ready.checkpointing}" if ready.checkpointing != "none" else ""
    lines += [f"{ready.memory}{recomputed}"] if ready.memory else []
    return "\n  ".join([*lines, *(f"warning: {line}" for line in _warnings(ready))])


def describe_roles(ready: Any, launch: Launch) -> str:
    """Return :func:`describe` and the place of every role and call, for a run that is not started."""
    world = World(launch, model_device(), lone_store(), 0.0)
    placement, usual = ready.config.placement, PlacementConfig()
    products = f"matrix products of float32: precision {torch.get_float32_matmul_precision()}"
    lines = [describe(ready, world), *([f"  {products}"] if capabilities(world.device).batch_invariant else [])]
    set_here = [f.name for f in fields(placement) if f.name != "pools" and getattr(placement, f.name) != getattr(usual, f.name)]
    if set_here:
        lines.append("  placement " + ", ".join(f"{name} {getattr(placement, name)}" for name in set_here))
    for role, plan in ready.plans.items():
        where = f"  {role:<10} pool {plan.pool}, {plan.shape.layout}"
        if plan.shape.generation is not None:
            g = plan.shape.generation
            copies = f"dp({g.dp})" if g.consecutive else f"micro_dp({g.micro_dp}) * dp({g.train.copies})"
            where += f", generation pp({g.pp}) * tp({g.tp}) * {copies}"
        lines.append(where)
        for method, call in plan.calls.items():
            delta = ", delta" if plan.config.calls[method].delta else ""
            lines.append(f"    {method} on pool {call.pool}, {call.shape.layout}{delta}")
    return "\n".join(lines)


def _with_size(role: str, plan: RolePlan) -> str:
    """Return ``actor (1.6M parameters)``."""
    if plan.spec is None or not issubclass(plan.worker, ModelWorker):
        return role
    size = shape_of(plan.spec, plan.worker.head).params
    unit = next((unit for unit in ("T", "B", "M") if size >= UNITS[unit]), "k")
    adapters = f", of which adapters of rank {plan.config.lora.rank} learn" if plan.config.lora.rank and plan.trained else ""
    return f"{role} ({size / UNITS[unit]:.3g}{unit} parameters{adapters})"


def _layouts(plans: Mapping[str, RolePlan], size: int) -> Iterator[str]:
    """Yield a text for each layout and the roles that share it: its axes above 1, and its ranks unless it has all."""
    alike: dict[str, list[str]] = {}
    for role, plan in plans.items():
        if plan.spec is None:
            continue
        layout, generation = plan.shape.layout, plan.shape.generation
        how = _axes(layout, layout.dp, layout.cp, layout.ep)
        if generation is not None and (generation.pp, generation.tp, generation.expert_parallel_generation) != (
            layout.pp,
            layout.tp,
            False,
        ):
            how += ", generation " + _axes(
                generation, generation.dp, ep=generation.tp if generation.expert_parallel_generation else 1
            )
        if len(plan.pool.ranks) < size:
            how += f" on ranks {str(plan.pool).partition('[')[2].rstrip(']')}"
        alike.setdefault(how, []).append(role)
    for how, names in alike.items():
        yield f"{', '.join(names)} {how}"


def _axes(split: Layout | GenerationLayout, dp: int, cp: int = 1, ep: int = 1) -> str:
    axes = [f"{name}({n})" for name, n in (("pp", split.pp), ("tp", split.tp), ("dp", dp), ("cp", cp)) if n > 1]
    experts = f" ep({ep})" if ep > 1 else ""
    zero = f" zero({split.zero})" if isinstance(split, Layout) and split.zero else ""
    size = f" zero_size({split.zero_size})" if isinstance(split, Layout) and split.zero_size else ""
    return (" * ".join(axes) or "whole on one rank") + experts + zero + size


def _attention(ready: Any, device: torch.device) -> Iterator[str]:
    """Yield the name of training's attention, then of generation's if the exported model generates."""
    exported = ready.config.algorithm.exported
    plan = ready.plans[exported]
    dtype = plan.config.torch_dtype(device)
    wanted, exact = plan.config.attention, plan.config.generation.reuse_rollout_log_probs is True
    attention = choose_ops(dtype, device, wanted, f"models.{exported}.attention", exact).name
    yield attention
    if plan.generation is not None:
        where = f"models.{exported}.generation.attention"
        yield choose_backend(plan.config.generation.attention, attention, dtype, device, where)


def _linear_attention(ready: Any, device: torch.device) -> str:
    """Return what computes the linear attention of training and prefill, if the exported model has any."""
    plan = ready.plans[ready.config.algorithm.exported]
    if plan.spec is None or plan.spec.delta is None:
        return ""
    kernels = choose_ops(plan.config.torch_dtype(device), device, plan.config.attention).packed_delta
    return f", linear attention {'torch' if kernels is None else kernels.name}"


def _warnings(ready: Any) -> Iterator[str]:
    yield from ready.warnings
    config, placement = ready.config, ready.config.placement
    prompts = [row for data in ready.training.values() if isinstance(data, PromptDataset) for row in data.examples()]
    for name, reward in ready.rewards.items():
        if reward.misses_answers(reward_key(name), prompts):
            yield f"no row has an answer (data.answer_key), and {reward_key(name)}.function={reward.function} reads one"
    policy = getattr(config.algorithm, "policy", None)
    correction = policy and policy.rollout_correction
    if placement.max_staleness and not (correction and (correction.bypass_mode or correction.active)):
        advice = "set algorithm.rollout_correction.bypass_mode=true, or rollout_is" if correction else "this algorithm cannot"
        yield f"placement.max_staleness={placement.max_staleness} and nothing corrects for older weights: {advice}"
    for data in (*ready.training.values(), *ready.validation.values()):
        yield from data.warnings()
    for key in dict.fromkeys(stream.key for stream in config.algorithm.streams.values()):
        if isinstance(section := getattr(config, key), EncodingConfig):
            yield from section.warnings(key, ready.tokenizer)


def start_facts(world: World) -> dict[str, str]:
    """Return facts of this start: date, host, ranks, device, versions, command line, and the commit if the code is in a git tree."""
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
