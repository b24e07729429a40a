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
from rlhf_spmd.preflight.data import read_data
from rlhf_spmd.preflight.exactness import decide_exactness
from rlhf_spmd.training.build import build_context, build_data, build_models, run_script
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.objective import ROUTED_EXPERTS
from rlhf_spmd.workers.optim_config import learning_rate, warmup_steps


def trace_step(run_plan: RunPlan) -> RunPlan:
    """Return the plan with the calls of a step. Raises what the algorithm's script raises."""
    return replace(run_plan, graph=trace(run_plan))


def trace_early(run_plan: RunPlan) -> RunPlan:
    """Return the plan with exactness, rows and the calls of a step, for a placement that needs them before their stages."""
    return trace_step(decide_exactness(read_data(run_plan)))


def trace(run_plan: RunPlan) -> Graph:
    """Return the calls of one step.

    It is the last step of the run, by which every role is trained, or the step before if that makes more different calls.

    The trace uses descriptions of the roles and streams of its own, so the run's streams do not move. The step before is traced
    first, because a script may keep rows for the next step. Local: no communication, no weights, no device.
    """
    size = 1 + max(pool.ranks[-1] for role in run_plan.roles.values() for pool in role.pools)
    # a rank in no pool, so every role is only a description
    world = World(Launch(rank=size, size=size + 1), torch.device("cpu"), lone_store(), timeout_s=1.0)
    controller = Controller(world.all)
    models = build_models(run_plan.roles, build_context(run_plan, controller, world))
    data = build_data(run_plan, controller)
    steps = (max(run_plan.num_steps - 1, 1), run_plan.num_steps)
    try:
        graphs = [data.trace(partial(run_script, run_plan, models, data, step)) for step in steps]
    except AttributeError as error:
        refusal = explain_attribute_error(error, run_plan)
        if refusal is None:
            raise
        raise refusal from error
    return max(reversed(graphs), key=lambda graph: len({call.name for call in graph.nodes}))


def explain_attribute_error(error: AttributeError, run_plan: RunPlan) -> ValueError | None:
    """Return the error for a script that asks for a role, a call or a value that does not exist; None for any other error."""
    owner = error.obj
    name = error.name or ""
    if isinstance(owner, SimpleNamespace) and hasattr(owner, "controller"):  # the script's ``models``
        roles = list(run_plan.roles)
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


def check_step(run_plan: RunPlan) -> RunPlan:
    """Check settings against the calls of a step. Return the plan with a warning about each setting that does nothing."""
    _check_staleness(run_plan)
    _check_replays(run_plan)
    _check_updates(run_plan)
    warnings = (*_idle_updates(run_plan), *_idle_chunks(run_plan), *_idle_calls(run_plan))
    return replace(run_plan, warnings=(*run_plan.warnings, *warnings))


def _calls(run_plan: RunPlan, kind: str) -> list[CallRecord]:
    return [call for call in run_plan.graph.nodes if call.spec.kind == kind]


def _check_staleness(run_plan: RunPlan) -> None:
    """Raise ValueError if generation runs ahead, and no trained role generates on ranks where it does not train."""
    config = run_plan.config
    if not config.steps_ahead:
        return
    where = f"rollout.max_staleness={config.rollout.max_staleness}"
    trained = {call.role.name for call in _calls(run_plan, "generate") if run_plan.roles[call.role.name].trained}
    if not trained:
        raise ValueError(f"{where}: {config.algorithm.name} trains no role that generates; leave it out")
    for role in sorted(trained):
        role_plan = run_plan.roles[role]
        shared = sorted(set(role_plan.pool.ranks) & set(role_plan.placement_of("generate_sequences").pool.ranks))
        if shared:
            raise ValueError(
                f"{where} lets models.{role} generate while it trains, but it does both on ranks {shared[:8]}; give "
                f"models.{role}.calls.generate_sequences.pool ranks of its own, or take placement.strategy=separate"
            )


def _check_replays(run_plan: RunPlan) -> None:
    """Raise ValueError if with ``models.<role>.router_replay`` no earlier pass has recorded the experts for an update."""
    for call in _calls(run_plan, "train"):
        role = call.role.name
        mode = run_plan.roles[role].config.router_replay
        if mode != "disabled" and ROUTED_EXPERTS not in call.inputs[0].fields:
            lacking = (
                f"that models.{role} does not generate" if mode == "R3" else "whose old log-probs no forward pass computes"
            )
            name = run_plan.config.algorithm.name
            raise ValueError(f"models.{role}.router_replay={mode}: {name} trains on rows {lacking}; leave it out")


def _check_updates(run_plan: RunPlan) -> None:
    """Raise ValueError for an update of a role that does not learn."""
    for call in _calls(run_plan, "train"):
        if call.role.name not in run_plan.changing_roles:
            learning = ", ".join(role for role, role_plan in run_plan.roles.items() if role_plan.trained)
            name = run_plan.config.algorithm.name
            raise ValueError(f"{name} trains {call.role.name} ({call.site}), which does not learn; {learning} do")


def _idle_updates(run_plan: RunPlan) -> Iterator[str]:
    """Yield warnings about updates that change nothing, and about updates whose metrics are lost."""
    config = run_plan.config
    updates = _calls(run_plan, "train")
    if not updates:
        yield f"{config.algorithm.name} makes no update: nothing is trained"
    for call in updates:
        if call not in run_plan.graph.returned:
            yield f"{call.name} ({call.site}) is not among the calls that step returns: its metrics are not reported"
    for role in dict.fromkeys(call.role.name for call in updates):
        where = f"models.{role}.optim"
        optim = run_plan.roles[role].config.optim
        num_updates = config.algorithm.updates(role, run_plan.num_steps, config.data.train_batch_size)
        warmup = warmup_steps(optim, num_updates)
        if not (optim.lr or optim.head_lr):
            yield f"{where}.lr={optim.lr}: the weights of {role} stay as they are"
        elif warmup > num_updates:
            rate = f"{learning_rate(optim, num_updates - 1, num_updates):.2g}"
            yield f"{where}.lr_warmup_steps={warmup}, and {role} has {num_updates} updates: its learning rate ends at {rate}"


def _idle_chunks(run_plan: RunPlan) -> Iterator[str]:
    """Yield a warning if ``rollout.chunks`` does nothing."""

    def ranks(call: CallRecord) -> set[int]:
        return set(run_plan.roles[call.role.name].placement_of(call.spec.name).pool.ranks)

    generating = set().union(*map(ranks, _calls(run_plan, "generate")))
    streams = any(generating and call.spec.streams and ranks(call).isdisjoint(generating) for call in run_plan.graph.nodes)
    chunks = run_plan.config.rollout.chunks
    if chunks > 1 and not streams:
        yield f"rollout.chunks={chunks} does nothing: no call takes generated rows on ranks that do not generate"


def _idle_calls(run_plan: RunPlan) -> Iterator[str]:
    """Yield warnings about calls that have ranks or a layout of their own and are never made.

    A validation may make any call but updates.
    """
    step_calls = {(call.role.name, call.spec.name) for call in run_plan.graph.nodes}
    for role, role_plan in run_plan.roles.items():
        for method in role_plan.calls:
            may_validate = run_plan.config.run.test_freq and getattr(role_plan.worker, method).spec.kind != "train"
            if (role, method) not in step_calls and not may_validate:
                name = run_plan.config.algorithm.name
                yield f"models.{role}.calls.{method} does nothing: no step of {name} makes this call"
