"""The lines that a run begins with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlhf_spmd.config.words import counted
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.kernels import capabilities, choose_ops, model_device
from rlhf_spmd.parallel.launch import Launch, lone_store
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans

UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}


def run_banner(run_plan: RunPlan, world: World) -> str:
    """Return what is trained, where every role and call runs, the memory, and warnings."""
    config = run_plan.config
    device = world.device
    trained = " and ".join(_with_size(role, role_plan) for role, role_plan in run_plan.roles.items() if role_plan.trained)
    rows = ", ".join(data.summary() for data in run_plan.training.values())
    attention = ", generation ".join(dict.fromkeys(_attention(run_plan, device))) + _linear_attention(run_plan, device)
    threads = ""
    if capabilities(device).batch_invariant:
        threads = f", {counted(config.run.threads, 'thread')}{' each' * (world.size > 1)}"
    lines = [
        f"{config.run.name}: {config.algorithm.name} trains {trained} on {rows}",
        f"{counted(world.size, 'rank')} on {device.type}{threads}, attention {attention}",
        *_placements(run_plan.roles),
    ]
    if run_plan.memory:
        level = f", activation_checkpointing auto: {run_plan.checkpointing}" if run_plan.checkpointing != "none" else ""
        lines.append(f"{run_plan.memory}{level}")
    return "\n  ".join([*lines, *(f"warning: {line}" for line in _warnings(run_plan))])


def dry_run_text(run_plan: RunPlan, launch: Launch) -> str:
    """Return :func:`run_banner` for a run that is not started."""
    world = World(launch, model_device(), lone_store(), 0.0)
    products = f"\n  matrix products of float32: precision {torch.get_float32_matmul_precision()}"
    return run_banner(run_plan, world) + products * capabilities(world.device).batch_invariant


def _placements(role_plans: RolePlans) -> Iterator[str]:
    """Yield a line for each role, and one for each of its methods that run elsewhere."""
    for role, role_plan in role_plans.items():
        line = f"{role:<10} pool {role_plan.pool}, {role_plan.shape.layout}"
        if (grid := role_plan.shape.generation) is not None:
            copies = f"dp({grid.dp})" if grid.consecutive else f"micro_dp({grid.micro_dp}) * dp({grid.train.copies})"
            line += f", generation pp({grid.pp}) * tp({grid.tp}) * {copies}"
        yield line
        for method, call_plan in role_plan.calls.items():
            delta = ", delta" if role_plan.config.calls[method].delta else ""
            yield f"  {method} on pool {call_plan.pool}, {call_plan.shape.layout}{delta}"


def _with_size(role: str, role_plan: RolePlan) -> str:
    """Return ``actor (1.6M parameters)``."""
    if role_plan.spec is None or not issubclass(role_plan.worker, ModelWorker):
        return role
    lora = role_plan.config.lora
    size = shape_of(role_plan.spec, role_plan.worker.head).params
    unit = next((unit for unit in ("T", "B", "M") if size >= UNITS[unit]), "k")
    adapters = f", of which adapters of rank {lora.rank} learn" if lora.rank and role_plan.trained else ""
    return f"{role} ({size / UNITS[unit]:.3g}{unit} parameters{adapters})"


def _attention(run_plan: RunPlan, device: torch.device) -> Iterator[str]:
    """Yield the name of training's attention, then of generation's if the exported model generates."""
    where = f"models.{run_plan.config.algorithm.exported}"
    config = run_plan.exported.config
    dtype = config.torch_dtype(device)
    exact = config.generation.reuse_rollout_log_probs is True
    attention = choose_ops(dtype, device, config.attention, f"{where}.attention", exact).name
    yield attention
    if run_plan.exported.generation is not None:
        key = f"{where}.generation.attention"
        yield choose_backend(config.generation.attention, attention, dtype, device, key)


def _linear_attention(run_plan: RunPlan, device: torch.device) -> str:
    """Return what computes the linear attention of training and prefill, if the exported model has any."""
    config = run_plan.exported.config
    spec = run_plan.exported.spec
    if spec is None or spec.delta_rule is None:
        return ""
    kernels = choose_ops(config.torch_dtype(device), device, config.attention).packed_delta
    return f", linear attention {'torch' if kernels is None else kernels.name}"


def _warnings(run_plan: RunPlan) -> Iterator[str]:
    yield from run_plan.warnings
    config = run_plan.config
    prompts = [row for data in run_plan.training.values() if isinstance(data, PromptDataset) for row in data.examples()]
    for name, reward in run_plan.rewards.items():
        if reward.misses_answers(reward_key(name), prompts):
            yield f"no row has an answer (data.answer_key), and {reward_key(name)}.function={reward.function} reads one"
    policy = getattr(config.algorithm, "policy", None)
    correction = policy and policy.rollout_correction
    if config.steps_ahead and not (correction and (correction.bypass_mode or correction.active)):
        advice = "set algorithm.rollout_correction.bypass_mode=true, or rollout_is" if correction else "this algorithm cannot"
        yield f"rollout.max_staleness={config.rollout.max_staleness} and nothing corrects for older weights: {advice}"
    for data in (*run_plan.training.values(), *run_plan.validation.values()):
        yield from data.warnings()
    for key in dict.fromkeys(stream.key for stream in config.algorithm.streams.values()):
        if isinstance(section := getattr(config, key), EncodingConfig):
            yield from section.warnings(key, run_plan.tokenizer)
