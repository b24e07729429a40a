"""Checks that a run fits into the memory of its devices and hosts, before anything is built, and says which settings would fit.

``memory_estimate.py`` computes what each rank needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import attrgetter
from typing import Any

from rlhf_spmd.controller import Graph
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.devices import host_bytes, total_bytes
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.device_setup import choose_device
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.planner import memory as model
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.preflight.disk import check_disk
from rlhf_spmd.preflight.memory_estimate import CHECKPOINT_COPY, MemoryReport, StepFacts, measure, step_facts
from rlhf_spmd.preflight.placing import lay_out
from rlhf_spmd.workers.role_plan import RolePlan

Plans = Mapping[str, RolePlan]
BACKGROUND_SAVE = "run.background_save"
Setting = tuple[str | None, str, Any]  # role, or None: of the algorithm; key; value


def check_launch(ready: Any, graph: Graph, launch: Launch) -> tuple[str, str, str | None, str | None]:
    """Checks a run on this rank's device, and on rank 0 also the disk.

    Returns what :func:`decide_checkpointing` chooses, what the fullest rank needs, in words, and the warnings of
    :func:`check_memory` and :func:`check_disk`. Raises ValueError, also if the rank has no device, and CheckpointError.
    """
    facts = step_facts(ready, graph, choose_device(launch))
    room = total_bytes(facts.device, launch.local_size)
    chosen = decide_checkpointing(ready.roles, facts, room, launch.rank)
    plans = with_checkpointing(ready.roles, chosen)
    needs = f"memory: at most {_gib(measure(plans, facts).peaks.max())} GiB of {_gib(room)} on a rank, as estimated"
    # before the disk: a smaller model may fit there, too
    tight = check_memory(plans, facts, room, launch.local_size, launch.rank, host_bytes())
    return chosen, needs, tight, check_disk(ready) if launch.rank == 0 else None


def with_checkpointing(plans: Plans, chosen: str) -> dict[str, RolePlan]:
    """Returns ``plans`` with ``chosen`` in place of ``activation_checkpointing=auto``."""
    auto = {role: plan for role, plan in plans.items() if plan.config.activation_checkpointing == "auto"}
    return {**plans, **{role: _set(plan, "activation_checkpointing", chosen) for role, plan in auto.items()}}


def decide_checkpointing(plans: Plans, step: StepFacts, memory: Sequence[float] | float, rank: int | None = None) -> str:
    """Returns the level for ``activation_checkpointing=auto``: the lowest with which all ranks fit, or ``rank`` if it is given.

    If none fits: the level that needs least memory. Arguments as of :func:`check_memory`.
    """
    if all(plan.config.activation_checkpointing != "auto" for plan in plans.values()):
        return CHECKPOINTING[0]
    needed: dict[str, float] = {}
    for chosen in CHECKPOINTING:
        report = measure(with_checkpointing(plans, chosen), step)
        needed[chosen] = max((float(report.peaks[k]) / least for k, least in report.judged(memory, rank).items()), default=0.0)
        if needed[chosen] <= 1:
            return chosen
    return min(needed, key=lambda chosen: needed[chosen])


def check_memory(
    plans: Plans,
    step: StepFacts,
    memory: Sequence[float] | float,
    local_size: int,
    rank: int | None = None,
    host_memory: float = inf,
) -> str | None:
    """Returns a warning, one line, if ranks need more than their memory by less than the memory model's error; else None.

    ``memory``: bytes of each rank's device, or one number for all. ``rank``: judge only this rank, by its own device.
    ``host_memory``: bytes that the ranks of a host may pin together if their devices are GPUs. Raises ValueError, one line, if
    ranks need more: which rank, what takes most, and the mildest settings with which all ranks would fit.
    """
    report = measure(plans, step)
    pinned = None if report.host is None else _check_host(report.host, host_memory, local_size, rank)
    tight = _check_devices(report, plans, step, memory, local_size, rank)
    return "; ".join(filter(None, (tight, pinned))) or None


def _check_host(report: MemoryReport, memory: float, local_size: int, rank: int | None) -> str | None:
    """As :func:`check_memory`, for what ranks pin in the memory of their hosts."""
    needs = report.by_host(local_size)
    host = int(needs.argmax()) if rank is None else rank // local_size
    if host >= len(needs) or needs[host] <= memory:  # also if no role is there
        return None
    ranks = range(host * local_size, (host + 1) * local_size)
    kinds = [kind for kind, its in enumerate(report.ranks) if any(one in ranks for one in its)]
    fullest = max(kinds, key=lambda kind: float(report.peaks[kind]))
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in report.largest(fullest) if size)
    line = (
        f"host {host}, ranks {ranks[0]} to {ranks[-1]}, would need {_gib(needs[host])} GiB of host memory and has {_gib(memory)}: "
        f"of rank {report.ranks[fullest][0]} {parts}, reserve {_gib(report.reserve)}"
    )
    if needs[host] <= memory * (1 + model.ERROR):
        return f"{line}; that may be too much"
    less = f", or {BACKGROUND_SAVE}=false" * any(name.endswith(CHECKPOINT_COPY) for name in report.held)
    raise ValueError(
        f"{line}; offload less (offload, optim.offload, activation_offload, generation.buffers and kv_cache), raise layout.zero, or "
        f"use more hosts with fewer ranks on each{less}"
    )


def _check_devices(
    report: MemoryReport, plans: Plans, step: StepFacts, memory: Sequence[float] | float, local_size: int, rank: int | None
) -> str | None:
    judged = report.judged(memory, rank)
    if not judged:  # a rank that no role is on
        return None
    kind = max(judged, key=lambda k: float(report.peaks[k]) / judged[k])
    peak, has, ranks = float(report.peaks[kind]), judged[kind], report.ranks[kind]
    if peak <= has:
        return None
    who = f"rank {ranks[0] if rank is None else rank}" + (f" (and {len(ranks) - 1} like it)" if len(ranks) > 1 else "")
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in report.largest(kind))
    needs = f"{who} would need {_gib(peak)} GiB of memory and has {_gib(has)}: {parts}, reserve {_gib(report.reserve)}"
    if peak <= has * (1 + model.ERROR):
        return f"{needs}; that may be too much"
    raise ValueError(f"{needs}; {_remedy(plans, step, memory, local_size)}")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _remedy(plans: Plans, step: StepFacts, memory: Sequence[float] | float, local_size: int) -> str:
    """Returns, in words, the mildest settings with which all ranks fit, or how much is missing with all of them."""
    ladders, shares = _ladders(plans, step, local_size), _usual_shares(plans, step)
    tops, tried = [len(ladder) for ladder in ladders], list[tuple[float, float]]()

    def settings(at: Sequence[int]) -> list[Setting]:
        return [*shares, *(one for ladder, up in zip(ladders, at, strict=True) if up for one in ladder[up - 1])]

    def fits(at: Sequence[int]) -> bool:
        try:
            report = measure(*_changed(plans, step, settings(at)))
        except ValueError:  # no such layout
            return False
        tried.append(max((float(report.peaks[k]) - least, least) for k, least in report.judged(memory, None).items()))
        return tried[-1][0] <= 0

    found = next((at for at in ((0,) * len(tops), *_upwards(tops)) if fits(at)), None)
    if found is None:
        (over, room), size = min(tried), max(ranks[-1] for ranks in measure(plans, step).ranks) + 1
        return (
            f"even with checkpointing, small micro-batches, zero, offload, tp and pp {_gib(over)} GiB per rank are missing: start "
            f"about {ceil(size * (1 + over / (room - step.reserve)))} ranks, or use devices with more memory"
        )
    for number in reversed(range(len(tops))):  # lower what was raised and is not needed
        found = next(at for up in range(found[number] + 1) if fits(at := (*found[:number], up, *found[number + 1 :])))
    words = (f"models.{role}.{key}" if role else key for role, key, _ in settings(found))
    values = (str("null" if value is None else value).lower() for *_, value in settings(found))
    return "it would fit with " + " ".join(map("=".join, zip(words, values, strict=True)))


def _usual_shares(plans: Plans, step: StepFacts) -> list[Setting]:
    """Returns the default ``gpu_memory_utilization`` for roles with a lower one, which leaves memory unused."""
    usual = GenerationConfig().memory_share(on_host=False)
    limits = {role: plan.config.generation for role, plan in plans.items() if plan.generation and not step.on_host}
    low = [role for role, its in limits.items() if its.num_pages is None and its.memory_share(False) < usual]
    return [(role, "generation.gpu_memory_utilization", usual) for role in low]


def _upwards(tops: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields how far each ladder is climbed, in the order of trial: each alone, then each on top of all before it."""
    for beside in (False, True):
        for number, top in enumerate(tops):
            for up in range(1, top + 1):
                yield (*(tops[:number] if beside else [0] * number), up, *[0] * (len(tops) - number - 1))


def _ladders(plans: Plans, step: StepFacts, local_size: int) -> list[list[list[Setting]]]:
    """Returns ladders of changes that save memory, in the order of trial. Each ladder is a list of rungs, the mildest first."""
    models = {role: plan for role, plan in plans.items() if plan.spec is not None}
    trained = [role for role, plan in models.items() if plan.trained]
    others = [role for role in models if role not in trained]

    def rung(roles: Sequence[str], key: str, value: Any) -> list[Setting]:
        """Returns the setting for those of ``roles`` that are below ``value``."""
        scale = ["auto", *CHECKPOINTING].index if isinstance(value, str) else int
        found = [role for role in roles if scale(attrgetter(key)(models[role].config)) < scale(value)]
        freed = [role for role in found if key in ("layout.tp", "layout.pp") and models[role].config.layout.dp is not None]
        return [*((role, "layout.dp", None) for role in freed), *((role, key, value) for role in found)]

    budget, longest = step.limits.max_tokens, ceil(step.longest)
    budgets = [budget >> n for n in range(1, 12) if budget >> n > longest] + [longest] * (longest < budget)
    split = [role for role in models if models[role].shape.layout.copies > 1]
    zero = [rung([role for role in split if role in trained], "layout.zero", stage) for stage in (1, 2, 3)]
    wide: list[Setting] = [(role, "layout.zero_size", None) for role in split if models[role].config.layout.zero_size]
    states, powers = rung(trained, "optim.offload", True), [2**n for n in range(1, 11)]
    largest = max(len(plan.pool.ranks) for plan in models.values())
    here = [role for role in models if models[role].shape.generation is not None]  # generate on their own ranks
    return [
        [[(None, BACKGROUND_SAVE, False)]] if step.copied and step.on_host else [],
        [rung(trained, "activation_checkpointing", level) for level in CHECKPOINTING[1:]],
        [[(None, step.limits.where, tokens)] for tokens in budgets] if step.limits.rows is None else [],
        [*zero, *([wide] if wide else []), [*rung(split, "layout.zero", 3), *wide]],
        [[*states, *rung(roles, "offload", True)] for roles in ([], others, list(models))] if not step.on_host else [],
        [[*rung(list(models), "layout.tp", n), *rung(here, "generation.tp", n)] for n in powers if n <= local_size],
        [rung(list(models), "layout.pp", n) for n in powers if n <= largest],
    ]


def _set(plan: RolePlan, key: str, value: Any) -> RolePlan:
    section, _, name = key.rpartition(".")
    changed = {section: replace(getattr(plan.config, section), **{name: value})} if section else {name: value}
    return replace(plan, config=replace(plan.config, **changed))


def _changed(plans: Plans, step: StepFacts, settings: Sequence[Setting]) -> tuple[dict[str, RolePlan], StepFacts]:
    """Returns ``plans`` and ``step`` with these settings. Raises ValueError for impossible layouts."""
    found = dict(plans)
    for role, key, value in settings:
        if key == BACKGROUND_SAVE:
            step = replace(step, copied=frozenset())
        elif role is None:
            step = replace(step, limits=replace(step.limits, max_tokens=value))
        else:
            found[role] = _set(found[role], key, value)
    for role in {role for role, key, _ in settings if role and key.startswith("layout.")}:
        found[role] = lay_out(role, found[role], found[role].config.layout)
    return found, step
