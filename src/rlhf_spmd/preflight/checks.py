"""Checks of a configuration before a run starts: batch sizes, layouts and settings against each other. Pure, but for devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.config.schema import ConfigError, nearest
from rlhf_spmd.controller import CallRecord, Graph, Reference, Worker
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.prompts import DataConfig, PromptsConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import capabilities, choose_ops, model_device
from rlhf_spmd.kernels.devices import unavailable
from rlhf_spmd.preflight.roles import RolePlan, generating
from rlhf_spmd.workers.objective import ROUTED_EXPERTS
from rlhf_spmd.workers.optim_config import learning_rate, warmup_steps

UNKNOWN_STEPS = sys.maxsize  # of a run whose length is in epochs, until the data are known


def check_duration(config: Any) -> tuple[Any, float | None]:
    """Return the configuration and ``data.epochs``. With epochs, ``run.steps`` is more than any run has until the data are known.

    Raises ConfigError unless exactly one of the two is given.
    """
    steps, epochs = config.run.steps, getattr(config.data, "epochs", None)
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"run.steps={steps} and data.epochs={epochs} both say how long the run is; set run.steps=null, or leave data.epochs out"
        )
    if steps is None and epochs is None:
        raise ConfigError("run.steps=null needs data.epochs, which then says how long the run is")
    return (config if epochs is None else with_steps(config, UNKNOWN_STEPS)), epochs


def with_steps(config: Any, steps: int) -> Any:
    """Return the configuration with ``run.steps`` in place of ``data.epochs``: ``config.yaml`` could not have both."""
    return replace(config, run=replace(config.run, steps=steps), data=replace(config.data, epochs=None))


def in_flight(config: Any) -> int | None:
    """Return ``data.gen_batch_size`` if it keeps more prompts in flight than a step takes, else None."""
    data = config.data
    more = isinstance(data, DataConfig) and data.gen_batch_size is not None and data.gen_batch_size > data.train_batch_size
    return data.gen_batch_size if more else None


def check_batches(config: Any, plans: Mapping[str, RolePlan]) -> None:
    """Check batch sizes against each other and against the layouts. Raises ValueError with both sides and the remedy."""
    algorithm, batch = config.algorithm, config.data.train_batch_size
    mini = algorithm.mini_batch_size or batch
    if batch % min(mini, batch):
        raise ValueError(f"algorithm.ppo_mini_batch_size={mini} must divide data.train_batch_size={batch} (both count prompts)")
    samples = config.sampling.n if isinstance(config.data, PromptsConfig) else 1
    for role, plan in plans.items():
        if plan.trained and algorithm.updates(role, config.run.steps, batch) < 1:
            raise ValueError(
                f"run.steps={config.run.steps} is too few: models.{role} would never be trained (algorithm.critic_warmup?)"
            )
        rows = min(mini, batch) * samples
        if plan.trained and rows < plan.shape.layout.dp:
            what = f"{min(mini, batch)} prompts * sampling.n={samples} = {rows} rows" if samples > 1 else f"{rows} rows"
            raise ValueError(
                f"a mini-batch has {what}, fewer than models.{role}.layout.dp={plan.shape.layout.dp}; use a larger "
                f"{'algorithm.ppo_mini_batch_size' if mini < batch else 'data.train_batch_size'}, or a smaller dp"
            )
    if isinstance(config.data, DataConfig):
        _check_generation(config, plans)


def _check_generation(config: Any, plans: Mapping[str, RolePlan]) -> None:
    """Check a step's prompts against the replicas that generate. Raises ValueError."""
    prompts, least = config.data.train_batch_size, config.algorithm.min_samples
    if config.sampling.greedy:
        raise ValueError("sampling.temperature=0: training needs samples; use a temperature above 0")
    if config.sampling.top_k == 1:
        raise ValueError("sampling.top_k=1: training needs samples; use more, or 0 for no limit")
    if in_flight(config) is not None and not config.algorithm.rows_in_flight:
        raise ValueError(
            f"data.gen_batch_size={config.data.gen_batch_size}: {config.algorithm.name} takes no prompts in flight; leave it out"
        )
    if config.sampling.n < least:
        raise ValueError(
            f"sampling.n={config.sampling.n}: {config.algorithm.name} compares the responses to a prompt; use at least {least}"
        )
    for role, plan in generating(plans).items():
        generation, kv_cache = plan.generation, plan.config.generation.kv_cache
        assert generation is not None and plan.spec is not None
        if kv_cache != "free" and in_flight(config) is None:
            raise ValueError(
                f"models.{role}.generation.kv_cache={kv_cache}: all responses end in their step and no pages are left to keep; set "
                f"data.gen_batch_size above data.train_batch_size={prompts}, or leave it out"
            )
        if in_flight(config) is not None and (every := plan.config.generation.rebalance_steps):
            raise ValueError(
                f"models.{role}.generation.rebalance_steps={every}: with data.gen_batch_size rows stay on their replica; leave it out"
            )
        if prompts % generation.dp:
            raise ValueError(
                f"rollout has {prompts} prompts in groups of sampling.n={config.sampling.n}; {generation.dp} generation replicas "
                f"would split a group: use a data.train_batch_size divisible by {generation.dp}"
            )
        if (in_flight(config) or prompts) % generation.dp:
            raise ValueError(
                f"data.gen_batch_size={config.data.gen_batch_size} prompts in flight must be divisible by the {generation.dp} "
                f"generation replicas"
            )


def check_staleness(config: Any, plans: Mapping[str, RolePlan], graph: Callable[[], Graph]) -> None:
    """Raises ValueError where ``placement.max_staleness`` lacks trained roles that generate on ranks where they do not train.

    ``graph`` traces a step.
    """
    ahead, where = config.placement.max_staleness, "placement.max_staleness"
    if not ahead:
        return
    roles = dict.fromkeys(call.role.name for call in graph().nodes if call.spec.kind == "generate")
    trained = {role: plans[role] for role in roles if plans[role].trained}
    if not trained:
        raise ValueError(f"{where}={ahead}: {config.algorithm.name} trains no role that generates; leave it out")
    for role, plan in trained.items():
        shared = sorted(set(plan.pool.ranks) & set(plan.at("generate_sequences").pool.ranks))
        if shared:
            raise ValueError(
                f"{where}={ahead} lets models.{role} generate while it trains, but it does both on ranks {shared[:8]}; give "
                f"models.{role}.calls.generate_sequences.pool ranks of its own, or take placement.strategy=separate"
            )


def check_replays(config: Any, plans: Mapping[str, RolePlan], graph: Callable[[], Graph]) -> None:
    """Raises ValueError where ``models.<role>.router_replay`` lacks passes whose experts updates could take. ``graph`` traces
    a step."""
    for role, plan in plans.items():
        if plan.config.router_replay == "disabled":
            continue
        mode = plan.config.router_replay
        where = f"models.{role}.router_replay={mode}"
        if config.algorithm.bypasses_log_probs and mode == "R2":
            raise ValueError(f"{where}: with bypass_mode no forward pass computes the old log-probs; take R3, or leave it out")
        updates = [call for call in graph().nodes if call.spec.kind == "train" and call.role.name == role]
        if any(ROUTED_EXPERTS not in call.inputs[0].fields for call in updates):
            lacking = (
                f"that models.{role} does not generate" if mode == "R3" else "whose old log-probs no forward pass computes"
            )
            raise ValueError(f"{where}: {config.algorithm.name} trains on rows {lacking}; leave it out")


def check_idle(config: Any, algorithm: AlgorithmConfig) -> None:
    """Raises ValueError for sampling settings that the algorithm never uses."""
    kinds = [section.config for section in algorithm.streams.values() if issubclass(section.config, PromptsConfig)]
    trains = any(issubclass(kind, DatasetConfig) for kind in kinds)
    for name, draws, when in (("sampling", trains, "in training"), ("val_sampling", bool(kinds), "in validation")):
        section, usual = getattr(config, name), SamplingConfig()
        keys = [f.name for f in fields(section) if getattr(section, f.name) != getattr(usual, f.name)]
        if keys and not draws:
            raise ValueError(
                f"{name}.{keys[0]}={getattr(section, keys[0])}: {algorithm.name} draws no samples {when}; leave {name} out"
            )


def idle_stream(config: Any, plans: Mapping[str, RolePlan], graph: Graph) -> list[str]:
    """Return a warning if ``placement.rollout_chunks`` does nothing: no call takes generated rows on ranks that do not generate."""

    def ranks(call: CallRecord) -> set[int]:
        plan = plans.get(call.role.name)
        return set() if plan is None else set(plan.at(call.spec.name).pool.ranks)

    makers = set().union(*(ranks(call) for call in graph.nodes if call.spec.kind == "generate"))
    streams = any(makers and call.spec.streams and ranks(call).isdisjoint(makers) for call in graph.nodes)
    chunks = config.placement.rollout_chunks
    text = f"placement.rollout_chunks={chunks} does nothing: no call takes generated rows on ranks that do not generate"
    return [text] if chunks > 1 and not streams else []


def idle_calls(config: Any, plans: Mapping[str, RolePlan], graph: Graph) -> list[str]:
    """Return warnings about calls that have ranks or a layout of their own and are never made. A validation may make any call but
    updates.
    """
    made = {(call.role.name, call.spec.name) for call in graph.nodes}
    idle = [(role, plan, method) for role, plan in plans.items() for method in plan.calls if (role, method) not in made]
    text = "models.{}.calls.{} does nothing: no step of {} makes this call"
    return [
        text.format(role, method, config.algorithm.name)
        for role, plan, method in idle
        if not config.run.test_freq or getattr(plan.worker, method).spec.kind == "train"
    ]


def absent(error: AttributeError, plans: Mapping[str, RolePlan]) -> ValueError | None:
    """Return the error for a script that asks for a role, a call or a value that does not exist; None for any other error."""
    what, name = error.obj, error.name or ""
    if isinstance(what, SimpleNamespace) and hasattr(what, "controller"):  # the script's ``models``
        text = f"there is no role {name!r}{nearest(name, list(plans)) or ';'} this run has: {', '.join(plans)}"
    elif isinstance(what, Worker):
        calls = sorted(call for call in dir(type(what)) if hasattr(getattr(type(what), call), "spec"))
        text = f"{what.name} has no call {name!r}{nearest(name, calls) or ';'} it has: {', '.join(calls)}"
    elif isinstance(what, Reference):
        text = (
            f"a reference has no {name!r}: it stands for rows that are still to be computed; calls of roles read their fields, "
        )
        text += "such as models.compute.apply(rows, function, reads), and models.controller.get_field"
    else:
        return None
    refused = ValueError(text)
    for note in getattr(error, "__notes__", ()):
        refused.add_note(note)
    return refused


def idle_updates(config: Any, plans: Mapping[str, RolePlan], graph: Graph) -> list[str]:
    """Return warnings about updates that change nothing, and about updates whose metrics are lost.

    Raises ValueError for an update of a role that does not learn.
    """
    updates_made = [call for call in graph.nodes if call.spec.kind == "train"]
    learns = {role for role, plan in plans.items() if plan.trained or role in config.algorithm.moved}
    frozen = next((call for call in updates_made if call.role.name not in learns), None)
    if frozen is not None:
        learn = ", ".join(role for role, plan in plans.items() if plan.trained)
        raise ValueError(f"{config.algorithm.name} trains {frozen.role.name} ({frozen.site}), which does not learn; {learn} do")
    trained = dict.fromkeys(call.role.name for call in updates_made)
    found = [] if trained else [f"{config.algorithm.name} makes no update: nothing is trained"]
    lost = "{} ({}) is not among the calls that step returns: its metrics are not reported"
    found += [lost.format(call.name, call.site) for call in updates_made if call not in graph.returned]
    for role in trained:
        optim, where = plans[role].config.optim, f"models.{role}.optim"
        updates = config.algorithm.updates(role, config.run.steps, config.data.train_batch_size)
        warmup = warmup_steps(optim, updates)
        if not (optim.lr or optim.head_lr):
            found.append(f"{where}.lr={optim.lr}: the weights of {role} stay as they are")
        elif warmup > updates:
            rate = f"{learning_rate(optim, updates - 1, updates):.2g}"
            found.append(
                f"{where}.lr_warmup_steps={warmup}, and {role} has {updates} updates: its learning rate ends at {rate}"
            )
    return found


def check_validation(config: Any, algorithm: AlgorithmConfig, can_validate: bool) -> None:
    """Check ``run.test_freq`` against the validation data. Raises ValueError."""
    freq = config.run.test_freq
    sections = {section.key: getattr(config, section.key) for section in algorithm.streams.values()}
    paths = [f"{key}.{'val_path' if isinstance(data, DatasetConfig) else 'path'}" for key, data in sections.items()]
    if freq and not can_validate:
        raise ValueError(f"run.test_freq={freq}, but algorithm {algorithm.name!r} has no validation; set it to 0")
    if freq and not any(data is not None and getattr(data, "val_path", True) for data in sections.values()):
        raise ValueError(f"run.test_freq={freq} needs {' or '.join(paths)}")
    for section in algorithm.streams.values():
        if section.only_validates and sections[section.key] is not None and not freq:
            raise ValueError(
                f"{section.key}.path is given, but run.test_freq=0 never validates; set it above 0 or leave {section.key} out"
            )
    prompts = any(isinstance(data, PromptsConfig) for data in sections.values())
    if algorithm.goal is not None and not (freq and prompts):
        raise ValueError("algorithm.stop_at_reward needs val_prompts.path, a reward and run.test_freq above 0")


def exact_rollouts(config: Any, plans: Mapping[str, RolePlan]) -> bool:
    """Return True if generation's log-probs equal those of a training forward bit for bit, so that no such forward is needed.

    Raises ValueError where ``models.<role>.generation.reuse_rollout_log_probs=true`` demands it and a setting prevents it.
    """
    found = [_exact(role, plan, config) for role, plan in generating(plans).items()]
    return bool(found) and all(found)


def _exact(role: str, plan: RolePlan, config: Any) -> bool:
    """As :func:`exact_rollouts`, of one role."""
    generation, settings = plan.generation, plan.config.generation
    assert generation is not None
    if settings.reuse_rollout_log_probs is False:
        return False
    against, device, dtype = None, model_device(), plan.config.torch_dtype(model_device())
    if not capabilities(device).batch_invariant and settings.reuse_rollout_log_probs is None:
        return False  # its kernels are slower there: on by choice only
    if not capabilities(device).batch_invariant and (why := _against_on_gpus(role, plan, device, dtype)):
        against = why
    elif plan.config.router_replay == "R2":
        against = f"models.{role}.router_replay=R2 takes the experts of a forward pass of its own"
    elif plan.spec is not None and plan.spec.delta is not None:
        against = f"linear attention ({plan.spec.family}) computes one token by other sums than many"
    elif dtype.itemsize == 8:
        against = "in float64 generation's products are other ones than training's"
    elif plan.spec is not None and plan.spec.latent is not None:
        against = "latent attention has other products in generation than in training"
    elif generation.tp != plan.shape.layout.tp:
        against = f"generation has tp={generation.tp} and training tp={plan.shape.layout.tp}, and they add in another order"
    elif generation.expert_parallel_generation:
        against = f"models.{role}.generation.ep={settings.ep} adds the results of experts in another order than training"
    elif capabilities(device).batch_invariant and settings.attention not in ("auto", plan.config.attention):
        against = f"models.{role}.generation.attention={settings.attention} is not models.{role}.attention"
    elif not choose_ops(dtype, device, plan.config.attention, batch_invariant_gpu=True).is_batch_invariant(
        dtype, config.run.threads
    ):
        against = (
            f"with run.threads={config.run.threads} torch's products are not exact on this processor, and it computes some"
        )
    elif config.placement.max_staleness:
        against = f"with placement.max_staleness={config.placement.max_staleness} tokens come from weights of earlier steps"
    elif in_flight(config) is not None:
        against = f"with data.gen_batch_size={config.data.gen_batch_size} tokens may come from weights of earlier steps"
    if settings.reuse_rollout_log_probs and against:
        raise ValueError(f"models.{role}.generation.reuse_rollout_log_probs=true, but {against}; leave it out")
    return against is None


def _against_on_gpus(role: str, plan: RolePlan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the exact kernels of GPUs cannot serve, or None."""
    settings, spec = plan.config.generation, plan.spec
    assert spec is not None, "a role that generates has a model"
    if why := unavailable("triton", device, dtype):
        return f"on GPUs only the Triton kernels are exact, and {why}"
    if plan.config.attention != "auto":
        return f"on GPUs models.{role}.attention={plan.config.attention} is not exact, auto is"
    if settings.attention not in ("auto", "triton"):
        return f"on GPUs models.{role}.generation.attention={settings.attention} is not exact, triton is"
    if plan.shape.layout.tp > 1:
        return f"on GPUs sums over tp={plan.shape.layout.tp} ranks depend on the number of rows"
    if spec.experts is not None:
        return "on GPUs the products of a mixture of experts depend on the batch"
    if plan.config.lora.rank:
        return f"on GPUs models.{role}.lora.rank={plan.config.lora.rank} is not exact: generation merges the adapters"
    return None
