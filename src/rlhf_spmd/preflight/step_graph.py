"""The calls of a step, traced before any rank exists, and what they say about the settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import CallRecord, Controller, Graph, Reference, Worker
from rlhf_spmd.parallel.launch import Launch, lone_store
from rlhf_spmd.parallel.world import World
from rlhf_spmd.training.build import build_context, build_data, build_models, run_script
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.objective import ROUTED_EXPERTS
from rlhf_spmd.workers.optim_config import learning_rate, warmup_steps


def trace_step(plan: RunPlan) -> RunPlan:
    """Return the plan with the calls of a step. Raises what the algorithm's script raises."""
    return replace(plan, graph=trace(plan))


def trace(plan: RunPlan) -> Graph:
    """Return the calls of one step: the last step of the run, by which every role is trained, or the step before if that makes more
    different calls.

    The trace uses descriptions of the roles and streams of its own, so the run's streams do not move. The step before is traced
    first, because a script may keep rows for the next step. Local: no communication, no weights, no device.
    """
    size = 1 + max(pool.ranks[-1] for role in plan.roles.values() for pool in role.pools)
    # a rank in no pool, so every role is only a description
    world = World(Launch(rank=size, size=size + 1), torch.device("cpu"), lone_store(), timeout_s=1.0)
    controller = Controller(world.all)
    models, data = build_models(plan.roles, build_context(plan, controller, world)), build_data(plan, controller)
    steps = (max(plan.num_steps - 1, 1), plan.num_steps)
    try:
        graphs = [data.trace(partial(run_script, plan, models, data, step)) for step in steps]
    except AttributeError as error:
        refusal = explain_attribute_error(error, plan)
        if refusal is None:
            raise
        raise refusal from error
    return max(reversed(graphs), key=lambda graph: len({call.name for call in graph.nodes}))


def explain_attribute_error(error: AttributeError, plan: RunPlan) -> ValueError | None:
    """Return the error for a script that asks for a role, a call or a value that does not exist; None for any other error."""
    owner, name = error.obj, error.name or ""
    if isinstance(owner, SimpleNamespace) and hasattr(owner, "controller"):  # the script's ``models``
        roles = list(plan.roles)
        text = f"there is no role {name!r}{nearest(name, roles) or ';'} this run has: {', '.join(roles)}"
    elif isinstance(owner, Worker):
        calls = sorted(call for call in dir(type(owner)) if hasattr(getattr(type(owner), call), "spec"))
        text = f"{owner.name} has no call {name!r}{nearest(name, calls) or ';'} it has: {', '.join(calls)}"
    elif isinstance(owner, Reference):
        text = (
            f"a reference has no {name!r}: it stands for rows that are still to be computed; calls of roles read their fields, "
            "such as models.compute.apply(rows, function, reads), and models.controller.get_field"
        )
    else:
        return None
    refusal = ValueError(text)
    for note in getattr(error, "__notes__", ()):
        refusal.add_note(note)
    return refusal


def check_step(plan: RunPlan) -> RunPlan:
    """Check settings against the calls of a step. Returns the plan with a warning about each setting that does nothing."""
    _check_staleness(plan)
    _check_replays(plan)
    _check_updates(plan)
    warnings = (*_idle_updates(plan), *_idle_chunks(plan), *_idle_calls(plan))
    return replace(plan, warnings=(*plan.warnings, *warnings))


def _calls(plan: RunPlan, kind: str) -> list[CallRecord]:
    return [call for call in plan.graph.nodes if call.spec.kind == kind]


def _check_staleness(plan: RunPlan) -> None:
    """Raise ValueError where ``placement.max_staleness`` lacks trained roles that generate on ranks where they do not train."""
    ahead, where = plan.config.placement.max_staleness, "placement.max_staleness"
    if not ahead:
        return
    trained = {call.role.name for call in _calls(plan, "generate") if plan.roles[call.role.name].trained}
    if not trained:
        raise ValueError(f"{where}={ahead}: {plan.config.algorithm.name} trains no role that generates; leave it out")
    for role in sorted(trained):
        placed = plan.roles[role]
        shared = sorted(set(placed.pool.ranks) & set(placed.placement_of("generate_sequences").pool.ranks))
        if shared:
            raise ValueError(
                f"{where}={ahead} lets models.{role} generate while it trains, but it does both on ranks {shared[:8]}; give "
                f"models.{role}.calls.generate_sequences.pool ranks of its own, or take placement.strategy=separate"
            )


def _check_replays(plan: RunPlan) -> None:
    """Raise ValueError where ``models.<role>.router_replay`` lacks passes whose experts updates could take."""
    for call in _calls(plan, "train"):
        role = call.role.name
        mode = plan.roles[role].config.router_replay
        if mode != "disabled" and ROUTED_EXPERTS not in call.inputs[0].fields:
            lacking = (
                f"that models.{role} does not generate" if mode == "R3" else "whose old log-probs no forward pass computes"
            )
            name = plan.config.algorithm.name
            raise ValueError(f"models.{role}.router_replay={mode}: {name} trains on rows {lacking}; leave it out")


def _check_updates(plan: RunPlan) -> None:
    """Raise ValueError for an update of a role that does not learn."""
    for call in _calls(plan, "train"):
        if call.role.name not in plan.changing_roles:
            learning = ", ".join(role for role, placed in plan.roles.items() if placed.trained)
            name = plan.config.algorithm.name
            raise ValueError(f"{name} trains {call.role.name} ({call.site}), which does not learn; {learning} do")


def _idle_updates(plan: RunPlan) -> Iterator[str]:
    """Yield warnings about updates that change nothing, and about updates whose metrics are lost."""
    config, updates = plan.config, _calls(plan, "train")
    if not updates:
        yield f"{config.algorithm.name} makes no update: nothing is trained"
    for call in updates:
        if call not in plan.graph.returned:
            yield f"{call.name} ({call.site}) is not among the calls that step returns: its metrics are not reported"
    for role in dict.fromkeys(call.role.name for call in updates):
        optim, where = plan.roles[role].config.optim, f"models.{role}.optim"
        num_updates = config.algorithm.updates(role, plan.num_steps, config.data.train_batch_size)
        warmup = warmup_steps(optim, num_updates)
        if not (optim.lr or optim.head_lr):
            yield f"{where}.lr={optim.lr}: the weights of {role} stay as they are"
        elif warmup > num_updates:
            rate = f"{learning_rate(optim, num_updates - 1, num_updates):.2g}"
            yield f"{where}.lr_warmup_steps={warmup}, and {role} has {num_updates} updates: its learning rate ends at {rate}"


def _idle_chunks(plan: RunPlan) -> Iterator[str]:
    """Yield a warning if ``placement.rollout_chunks`` does nothing."""

    def ranks(call: CallRecord) -> set[int]:
        return set(plan.roles[call.role.name].placement_of(call.spec.name).pool.ranks)

    generating = set().union(*map(ranks, _calls(plan, "generate")))
    streams = any(generating and call.spec.streams and ranks(call).isdisjoint(generating) for call in plan.graph.nodes)
    chunks = plan.config.placement.rollout_chunks
    if chunks > 1 and not streams:
        yield f"placement.rollout_chunks={chunks} does nothing: no call takes generated rows on ranks that do not generate"


def _idle_calls(plan: RunPlan) -> Iterator[str]:
    """Yield warnings about calls that have ranks or a layout of their own and are never made. A validation may make any call but
    updates.
    """
    step_calls = {(call.role.name, call.spec.name) for call in plan.graph.nodes}
    for role, placed in plan.roles.items():
        for method in placed.calls:
            may_validate = plan.config.run.test_freq and getattr(placed.worker, method).spec.kind != "train"
            if (role, method) not in step_calls and not may_validate:
                name = plan.config.algorithm.name
                yield f"models.{role}.calls.{method} does nothing: no step of {name} makes this call"
