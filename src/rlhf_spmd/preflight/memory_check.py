"""Checks that a run fits into the memory of its devices and hosts, before anything is built, and says which settings would fit.

``memory_estimate.py`` adds up what each rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import attrgetter
from typing import Any, NamedTuple

from rlhf_spmd.config.rules import as_setting
from rlhf_spmd.controller import Graph
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.devices import host_bytes, total_bytes
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.device_setup import choose_device
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.memory import MEMORY_MODEL_ERROR
from rlhf_spmd.preflight.disk import check_disk
from rlhf_spmd.preflight.memory_estimate import CHECKPOINT_COPY, MemoryReport, StepFacts, measure, step_facts
from rlhf_spmd.preflight.placing import lay_out
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.role_plan import RolePlan

Plans = Mapping[str, RolePlan]
BACKGROUND_SAVE = "run.background_save"
DeviceBytes = Sequence[float] | float  # memory of each rank's device, or one number for all
Remedy = dict[tuple[str | None, str], Any]  # settings that save memory: (role, or None: of the algorithm; key) -> value


class FitReport(NamedTuple):
    """How a run fits its devices.

    - checkpointing: what :func:`decide_checkpointing` returns
    - memory: what the fullest rank needs, in words
    - warnings: of :func:`check_memory` and :func:`check_disk`
    """

    checkpointing: str
    memory: str
    warnings: tuple[str, ...]


def check_launch(run: RunPlan, graph: Graph, launch: Launch) -> FitReport:
    """Check ``run`` on this rank's device, and on rank 0 the disk. Return how it fits.

    Raises ValueError, also if the rank has no device, and CheckpointError.
    """
    facts = step_facts(run, graph, choose_device(launch))
    device_bytes = total_bytes(facts.device, launch.local_size)
    level = decide_checkpointing(run.roles, facts, device_bytes, launch.rank)
    plans = with_checkpointing(run.roles, level)
    needs = f"memory: at most {_gib(measure(plans, facts).peaks.max())} GiB of {_gib(device_bytes)} on a rank, as estimated"
    # before the disk: a smaller model may fit there, too
    memory_warning = check_memory(plans, facts, device_bytes, launch.local_size, launch.rank, host_bytes())
    disk_warning = check_disk(run) if launch.rank == 0 else None
    return FitReport(level, needs, tuple(warning for warning in (memory_warning, disk_warning) if warning))


def with_checkpointing(plans: Plans, level: str) -> dict[str, RolePlan]:
    """Return ``plans`` with ``level`` in place of ``activation_checkpointing=auto``."""
    auto = {role: plan for role, plan in plans.items() if plan.config.activation_checkpointing == "auto"}
    return {**plans, **{role: _set(plan, "activation_checkpointing", level) for role, plan in auto.items()}}


def decide_checkpointing(plans: Plans, step: StepFacts, device_bytes: DeviceBytes, rank: int | None = None) -> str:
    """Return the level for ``activation_checkpointing=auto``: the lowest with which all ranks fit, or ``rank`` if it is given.

    If none fits: the level that needs least memory.
    """
    if all(plan.config.activation_checkpointing != "auto" for plan in plans.values()):
        return CHECKPOINTING[0]
    needed: dict[str, float] = {}
    for level in CHECKPOINTING:
        report = measure(with_checkpointing(plans, level), step)
        limits = report.memory_of_kinds(device_bytes, rank)
        needed[level] = max((float(report.peaks[kind]) / limit for kind, limit in limits.items()), default=0.0)
        if needed[level] <= 1:
            return level
    return min(needed, key=lambda level: needed[level])


def check_memory(
    plans: Plans,
    step: StepFacts,
    device_bytes: DeviceBytes,
    local_size: int,
    rank: int | None = None,
    host_memory: float = inf,
) -> str | None:
    """Return a warning, one line, if ranks need more than their memory by less than the memory model's error; else None.

    ``rank``: judge only this rank, by its own device. ``host_memory``: bytes that the ranks of a host may pin together if their
    devices are GPUs. Raises ValueError, one line, if ranks need more: which rank, what takes most, and the mildest settings with
    which all ranks would fit.
    """
    report = measure(plans, step)
    on_host = None if report.host is None else _check_host(report.host, host_memory, local_size, rank)
    on_device = _check_devices(report, plans, step, device_bytes, local_size, rank)
    return "; ".join(filter(None, (on_device, on_host))) or None


def _check_host(report: MemoryReport, memory: float, local_size: int, rank: int | None) -> str | None:
    """Return :func:`check_memory` of what ranks pin in the ``memory`` of their hosts."""
    needs = report.by_host(local_size)
    host = int(needs.argmax()) if rank is None else rank // local_size
    if host >= len(needs):  # no role is there
        return None
    ranks = range(host * local_size, (host + 1) * local_size)
    kinds = [kind for kind, members in enumerate(report.ranks) if any(member in ranks for member in members)]
    fullest = max(kinds, key=lambda kind: float(report.peaks[kind]))
    who = f"host {host}, ranks {ranks[0]} to {ranks[-1]},"
    line = (
        f"{who} would need {_gib(needs[host])} GiB of host memory and has {_gib(memory)}: of rank {report.ranks[fullest][0]} "
    )
    return _verdict(float(needs[host]), memory, line + _parts(report, fullest), lambda: _host_remedy(report))


def _host_remedy(report: MemoryReport) -> str:
    background_save_remedy = f", or {BACKGROUND_SAVE}=false" * any(name.endswith(CHECKPOINT_COPY) for name in report.resident)
    return (
        "offload less (offload, optim.offload, activation_offload, generation.buffers and kv_cache), raise layout.zero, or use more "
        f"hosts with fewer ranks on each{background_save_remedy}"
    )


def _check_devices(
    report: MemoryReport, plans: Plans, step: StepFacts, device_bytes: DeviceBytes, local_size: int, rank: int | None
) -> str | None:
    """Return :func:`check_memory` of the devices."""
    limits = report.memory_of_kinds(device_bytes, rank)
    if not limits:  # a rank that no role is on
        return None
    kind = max(limits, key=lambda k: float(report.peaks[k]) / limits[k])
    peak, ranks = float(report.peaks[kind]), report.ranks[kind]
    who = f"rank {ranks[0] if rank is None else rank}" + (f" (and {len(ranks) - 1} like it)" if len(ranks) > 1 else "")
    line = f"{who} would need {_gib(peak)} GiB of memory and has {_gib(limits[kind])}: {_parts(report, kind)}"
    return _verdict(peak, limits[kind], line, lambda: _remedy(plans, step, device_bytes, local_size))


def _verdict(needed: float, limit: float, line: str, remedy: Callable[[], str]) -> str | None:
    """Return None if what is needed fits, or a warning if it exceeds the limit by less than the model's error. Raises ValueError if it
    exceeds it by more."""
    if needed <= limit:
        return None
    if needed <= limit * (1 + MEMORY_MODEL_ERROR):
        return f"{line}; that may be too much"
    raise ValueError(f"{line}; {remedy()}")


def _parts(report: MemoryReport, kind: int) -> str:
    """Return the largest parts of what a kind of ranks needs, in words."""
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in report.largest(kind) if size)
    return f"{parts}, reserve {_gib(report.reserve)}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _remedy(plans: Plans, step: StepFacts, device_bytes: DeviceBytes, local_size: int) -> str:
    """Return, in words, the mildest settings with which all ranks fit, or how much is missing with all of them.

    Each remedy of the ranked list is tried alone, then with all before it. From those, what is not needed is left out.
    """
    always, remedies = _default_shares(plans, step), _remedies(plans, step, local_size)
    excesses: list[tuple[float, float]] = []  # of each trial: bytes too many on the fullest rank, which has so many

    def joined(chosen: Sequence[Remedy]) -> Remedy:
        return {key: value for remedy in (always, *chosen) for key, value in remedy.items()}

    def fits(chosen: Sequence[Remedy]) -> bool:
        try:
            report = measure(*_changed(plans, step, joined(chosen)))
        except ValueError:  # no such layout
            return False
        limits = report.memory_of_kinds(device_bytes)
        excesses.append(max((float(report.peaks[kind]) - limit, limit) for kind, limit in limits.items()))
        return excesses[-1][0] <= 0

    trials = [[], *([remedy] for remedy in remedies), *(remedies[:count] for count in range(2, len(remedies) + 1))]
    chosen = next((trial for trial in trials if fits(trial)), None)
    if chosen is None:
        excess, limit = min(excesses)
        size = max(ranks[-1] for ranks in measure(plans, step).ranks) + 1
        return (
            f"even with checkpointing, small micro-batches, zero, offload, tp and pp {_gib(excess)} GiB per rank are missing: start "
            f"about {ceil(size * (1 + excess / (limit - step.reserve)))} ranks, or use devices with more memory"
        )
    for remedy in chosen[::-1]:
        rest = [other for other in chosen if other is not remedy]
        if fits(rest):
            chosen = rest
    settings = [
        f"models.{role}.{key}={as_setting(value)}" if role else f"{key}={as_setting(value)}"
        for (role, key), value in joined(chosen).items()
    ]
    return "it would fit with " + " ".join(settings)


def _default_shares(plans: Plans, step: StepFacts) -> Remedy:
    """Return the default ``gpu_memory_utilization`` for roles with a lower one, which leaves memory unused."""
    default_share = GenerationConfig().memory_share(on_host=False)
    limits = {role: plan.config.generation for role, plan in plans.items() if plan.generation and not step.on_host}
    low = [role for role, limit in limits.items() if limit.num_pages is None and limit.memory_share(False) < default_share]
    return {(role, "generation.gpu_memory_utilization"): default_share for role in low}


def _remedies(plans: Plans, step: StepFacts, local_size: int) -> list[Remedy]:
    """Return changes that save memory, the mildest first. A later value of a setting replaces an earlier one."""
    models = {role: plan for role, plan in plans.items() if plan.spec is not None}
    trained = [role for role, plan in models.items() if plan.trained]
    frozen = [role for role in models if role not in trained]
    split = [role for role in models if models[role].shape.layout.copies > 1]
    generating = [role for role in models if models[role].shape.generation is not None]  # on their own ranks

    def raised(roles: Sequence[str], key: str, value: Any) -> Remedy:
        """Return the setting for those of ``roles`` that are below ``value``."""
        scale = ["auto", *CHECKPOINTING].index if isinstance(value, str) else int
        low = [role for role in roles if scale(attrgetter(key)(models[role].config)) < scale(value)]
        fixed = [role for role in low if key in ("layout.tp", "layout.pp") and models[role].config.layout.dp is not None]
        return {**{(role, "layout.dp"): None for role in fixed}, **{(role, key): value for role in low}}

    budget, longest = step.limits.max_tokens, ceil(step.longest)
    budgets = [budget >> n for n in range(1, 12) if budget >> n > longest] + [longest] * (longest < budget)
    all_ranks: Remedy = {(role, "layout.zero_size"): None for role in split if models[role].config.layout.zero_size}
    states = raised(trained, "optim.offload", True)
    powers = [2**n for n in range(1, 11)]
    largest = max(len(plan.pool.ranks) for plan in models.values())
    remedies: list[Remedy] = [{(None, BACKGROUND_SAVE): False}] if step.copied and step.on_host else []
    remedies += [raised(trained, "activation_checkpointing", level) for level in CHECKPOINTING[1:]]
    remedies += [{(None, step.limits.where): tokens} for tokens in budgets if step.limits.rows is None]
    remedies += [raised([role for role in split if role in trained], "layout.zero", stage) for stage in (1, 2, 3)]
    remedies += [all_ranks, raised(split, "layout.zero", 3) | all_ranks]
    if not step.on_host:
        remedies += [{**states, **raised(roles, "offload", True)} for roles in ([], frozen, list(models))]
    remedies += [
        {**raised(list(models), "layout.tp", n), **raised(generating, "generation.tp", n)} for n in powers if n <= local_size
    ]
    remedies += [raised(list(models), "layout.pp", n) for n in powers if n <= largest]
    return [remedy for remedy in remedies if remedy]


def _set(plan: RolePlan, key: str, value: Any) -> RolePlan:
    section, _, name = key.rpartition(".")
    changed = {section: replace(getattr(plan.config, section), **{name: value})} if section else {name: value}
    return replace(plan, config=replace(plan.config, **changed))


def _changed(plans: Plans, step: StepFacts, settings: Remedy) -> tuple[dict[str, RolePlan], StepFacts]:
    """Return ``plans`` and ``step`` with these settings. Raises ValueError for impossible layouts."""
    changed = dict(plans)
    for (role, key), value in settings.items():
        if key == BACKGROUND_SAVE:
            step = replace(step, copied=frozenset())
        elif role is None:
            step = replace(step, limits=replace(step.limits, max_tokens=value))
        else:
            changed[role] = _set(changed[role], key, value)
    for role in {role for role, key in settings if role and key.startswith("layout.")}:
        changed[role] = lay_out(role, changed[role], changed[role].config.layout)
    return changed, step
