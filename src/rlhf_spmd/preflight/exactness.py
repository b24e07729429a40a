"""Decides whether generation's log-probs equal those of a training forward bit for bit, so that no such forward is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from rlhf_spmd.kernels import capabilities, choose_ops, model_device
from rlhf_spmd.kernels.devices import unavailable
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans, generating_roles


def decide_exactness(run_plan: RunPlan) -> RunPlan:
    """Return the plan with ``exact_rollouts``. Raises ValueError as :func:`exact_rollouts`."""
    return replace(run_plan, exact_rollouts=exact_rollouts(run_plan.config, run_plan.roles))


def exact_rollouts(config: TrainConfig, role_plans: RolePlans) -> bool:
    """Return True if all roles that generate have exact log-probs.

    Raises ValueError if ``models.<role>.generation.reuse_rollout_log_probs=true`` demands it and a setting prevents it.
    """
    exact = [_is_exact(role, role_plan, config) for role, role_plan in generating_roles(role_plans).items()]
    return bool(exact) and all(exact)


def _is_exact(role: str, role_plan: RolePlan, config: TrainConfig) -> bool:
    demanded = role_plan.config.generation.reuse_rollout_log_probs
    device = model_device()
    # the exact kernels of GPUs are slower, so they are used only on demand
    if demanded is False or (demanded is None and not capabilities(device).batch_invariant):
        return False
    obstacle = next(_obstacles(role, role_plan, config, device), None)
    if demanded and obstacle:
        raise ValueError(f"models.{role}.generation.reuse_rollout_log_probs=true: {obstacle}; leave it out")
    return obstacle is None


def _obstacles(role: str, role_plan: RolePlan, config: TrainConfig, device: torch.device) -> Iterator[str]:
    """Yield reasons why the log-probs are not exact."""
    generation = role_plan.generation
    settings = role_plan.config.generation
    spec = role_plan.spec
    assert generation is not None and spec is not None, "a role that generates has a model"
    dtype = role_plan.config.torch_dtype(device)
    on_cpus = capabilities(device).batch_invariant
    if not on_cpus:
        yield from _obstacles_on_gpus(role, role_plan, device, dtype)
    if role_plan.config.router_replay == "R2":
        yield f"models.{role}.router_replay=R2 takes the experts of a forward pass of its own"
    if spec.delta_rule is not None:
        yield f"linear attention ({spec.family}) computes one token by other sums than many"
    if dtype.itemsize == 8:
        yield "in float64 generation's products are other ones than training's"
    if spec.latent is not None:
        yield "latent attention has other products in generation than in training"
    if generation.tp != role_plan.shape.layout.tp:
        yield f"generation has tp={generation.tp} and training tp={role_plan.shape.layout.tp}, and they add in another order"
    if generation.expert_parallel_generation:
        yield f"models.{role}.generation.ep={settings.ep} adds the results of experts in another order than training"
    if on_cpus and settings.attention not in ("auto", role_plan.config.attention):
        yield f"models.{role}.generation.attention={settings.attention} is not models.{role}.attention"
    ops = choose_ops(dtype, device, role_plan.config.attention, batch_invariant_gpu=True)
    if not ops.is_batch_invariant(dtype, config.run.threads):
        yield f"with run.threads={config.run.threads} torch's products are not exact on this processor, and it computes some"
    if config.steps_ahead:
        yield f"with rollout.max_staleness={config.rollout.max_staleness} tokens come from weights of earlier steps"
    if config.prompts_in_flight is not None:
        yield f"with rollout.in_flight={config.prompts_in_flight} tokens may come from weights of earlier steps"


def _obstacles_on_gpus(role: str, role_plan: RolePlan, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield reasons why the exact kernels of GPUs cannot be used."""
    settings = role_plan.config.generation
    spec = role_plan.spec
    assert spec is not None, "a role that generates has a model"
    if reason := unavailable("triton", device, dtype):
        yield f"on GPUs only the Triton kernels are exact, and {reason}"
    if role_plan.config.attention != "auto":
        yield f"on GPUs models.{role}.attention={role_plan.config.attention} is not exact, auto is"
    if settings.attention not in ("auto", "triton"):
        yield f"on GPUs models.{role}.generation.attention={settings.attention} is not exact, triton is"
    if role_plan.shape.layout.tp > 1:
        yield f"on GPUs sums over tp={role_plan.shape.layout.tp} ranks depend on the number of rows"
    if spec.experts is not None:
        yield "on GPUs the products of a mixture of experts depend on the batch"
    if role_plan.config.lora.rank:
        yield f"on GPUs models.{role}.lora.rank={role_plan.config.lora.rank} is not exact: generation merges the adapters"
