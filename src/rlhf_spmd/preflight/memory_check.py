"""Checks before anything is built that a run fits into the memory of its devices and hosts. Names settings that would fit.

``memory_estimate.py`` adds up what each rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import attrgetter
from typing import Any

from rlhf_spmd.config.rules import as_setting
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.kernels.devices import host_bytes, total_bytes
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.parallel.device_setup import choose_device
from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.memory import MEMORY_MODEL_ERROR
from rlhf_spmd.preflight.disk import check_disk
from rlhf_spmd.preflight.memory_estimate import MemoryReport, estimate_memory, step_facts
from rlhf_spmd.preflight.placing import role_in_layout
from rlhf_spmd.preflight.role_memory import CHECKPOINT_COPY, StepFacts
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans, generating_roles

BACKGROUND_SAVE = "run.background_save"
DeviceBytes = Sequence[float] | float  # memory of the device of each rank, or one number for all
# settings that save memory: (role, key) -> value; the role is None for settings outside of ``models``
Remedy = dict[tuple[str | None, str], Any]


def check_fit(run_plan: RunPlan) -> RunPlan:
    """Return the plan with its activation checkpointing, its memory in words, and warnings.

    Raises ValueError if the run does not fit this rank's device or the rank has no device. Raises CheckpointError if it does not
    fit the disk. A plan without ``launch`` is not checked.
    """
    launch = run_plan.launch
    if launch is None:
        return run_plan
    facts = step_facts(run_plan, run_plan.graph, choose_device(launch))
    device_bytes = total_bytes(facts.device, launch.local_size)
    level = decide_checkpointing(run_plan.roles, facts, device_bytes, launch.rank)
    role_plans = with_checkpointing(run_plan.roles, level)
    peak = estimate_memory(role_plans, facts).peaks.max()
    memory = f"memory: at most {_gib(peak)} GiB of {_gib(device_bytes)} on a rank, as estimated"
    # before the disk: a smaller model may fit there, too
    memory_warning = check_memory(role_plans, facts, device_bytes, launch.local_size, launch.rank, host_bytes())
    disk_warning = check_disk(run_plan) if launch.rank == 0 else None
    warnings = (*run_plan.warnings, *filter(None, (memory_warning, disk_warning)))
    return replace(run_plan, checkpointing=level, memory=memory, warnings=warnings)


def with_checkpointing(role_plans: RolePlans, level: str) -> dict[str, RolePlan]:
    """Return ``role_plans`` with ``level`` in place of ``activation_checkpointing=auto``."""
    auto = {role: role_plan for role, role_plan in role_plans.items() if role_plan.config.activation_checkpointing == "auto"}
    return {
        **role_plans,
        **{role: _with_setting(role_plan, "activation_checkpointing", level) for role, role_plan in auto.items()},
    }


def decide_checkpointing(role_plans: RolePlans, step: StepFacts, device_bytes: DeviceBytes, rank: int | None = None) -> str:
    """Return the level for ``activation_checkpointing=auto``: the lowest with which all ranks fit.

    With ``rank`` only that rank has to fit. If no level fits, return the one that needs least memory.
    """
    if all(role_plan.config.activation_checkpointing != "auto" for role_plan in role_plans.values()):
        return CHECKPOINTING[0]
    fullness: dict[str, float] = {}  # needed share of the memory on the fullest rank
    for level in CHECKPOINTING:
        report = estimate_memory(with_checkpointing(role_plans, level), step)
        limits = report.memory_of_kinds(device_bytes, rank)
        fullness[level] = max((float(report.peaks[kind]) / limit for kind, limit in limits.items()), default=0.0)
        if fullness[level] <= 1:
            return level
    return min(fullness, key=lambda level: fullness[level])


def check_memory(
    role_plans: RolePlans,
    step: StepFacts,
    device_bytes: DeviceBytes,
    local_size: int,
    rank: int | None = None,
    host_memory: float = inf,
) -> str | None:
    """Return a warning, one line, if ranks need more than their memory by less than the memory model's error; else None.

    - rank: check only this rank, by its own device
    - host_memory: bytes that the ranks of a host with GPUs may pin together

    Raises ValueError, one line, if ranks need more. It names the rank, what takes most, and the mildest settings with which all
    ranks would fit.
    """
    report = estimate_memory(role_plans, step)
    on_host = None if report.host is None else _check_host(report.host, host_memory, local_size, rank)
    on_device = _check_devices(report, role_plans, step, device_bytes, local_size, rank)
    return "; ".join(filter(None, (on_device, on_host))) or None


def _check_host(report: MemoryReport, memory: float, local_size: int, rank: int | None) -> str | None:
    """Return the result of :func:`check_memory` for host memory that ranks pin. ``memory``: bytes of a host."""
    needs = report.by_host(local_size)
    host = int(needs.argmax()) if rank is None else rank // local_size
    if host >= len(needs):  # no role is there
        return None
    ranks = range(host * local_size, (host + 1) * local_size)
    kinds = [kind for kind, members in enumerate(report.ranks) if any(member in ranks for member in members)]
    fullest = max(kinds, key=lambda kind: float(report.peaks[kind]))
    need = f"host {host}, ranks {ranks[0]} to {ranks[-1]}, would need {_gib(needs[host])} GiB of host memory"
    line = f"{need} and has {_gib(memory)}: of rank {report.ranks[fullest][0]} {_parts(report, fullest)}"
    return _verdict(float(needs[host]), memory, line, lambda: _host_remedy(report))


def _host_remedy(report: MemoryReport) -> str:
    background_save_remedy = f", or {BACKGROUND_SAVE}=false" * any(name.endswith(CHECKPOINT_COPY) for name in report.resident)
    return (
        "offload less (offload, optim.offload, activation_offload, generation.buffers and kv_cache), raise layout.zero, or use more "
        f"hosts with fewer ranks on each{background_save_remedy}"
    )


def _check_devices(
    report: MemoryReport, role_plans: RolePlans, step: StepFacts, device_bytes: DeviceBytes, local_size: int, rank: int | None
) -> str | None:
    """Return the result of :func:`check_memory` for the devices."""
    limits = report.memory_of_kinds(device_bytes, rank)
    if not limits:  # a rank that no role is on
        return None
    kind = max(limits, key=lambda k: float(report.peaks[k]) / limits[k])
    peak = float(report.peaks[kind])
    ranks = report.ranks[kind]
    who = f"rank {ranks[0] if rank is None else rank}" + (f" (and {len(ranks) - 1} like it)" if len(ranks) > 1 else "")
    line = f"{who} would need {_gib(peak)} GiB of memory and has {_gib(limits[kind])}: {_parts(report, kind)}"
    return _verdict(peak, limits[kind], line, lambda: _remedy(role_plans, step, device_bytes, local_size))


def _verdict(needed: float, limit: float, line: str, remedy: Callable[[], str]) -> str | None:
    """Return None if the needed bytes fit, or a warning if they exceed the limit by less than the memory model's error.

    Raises ValueError if they exceed it by more.
    """
    if needed <= limit:
        return None
    if needed <= limit * (1 + MEMORY_MODEL_ERROR):
        return f"{line}; that may be too much"
    raise ValueError(f"{line}; {remedy()}")


def _parts(report: MemoryReport, kind: int) -> str:
    """Return the largest parts of the memory that a kind of ranks needs, in words."""
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in report.largest(kind) if size)
    return f"{parts}, reserve {_gib(report.reserve)}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _remedy(role_plans: RolePlans, step: StepFacts, device_bytes: DeviceBytes, local_size: int) -> str:
    """Return, in words, the mildest settings with which all ranks fit, or the bytes that are missing with all of them.

    Each remedy of the ranked list is tried alone, then with all before it. From those, remedies that are not needed are left out.
    """
    default_shares = _default_shares(role_plans, step)
    remedies = _remedies(role_plans, step, local_size)
    excesses: list[tuple[float, float]] = []  # of each trial: bytes that the fullest rank lacks, bytes that it has

    def joined(chosen: Sequence[Remedy]) -> Remedy:
        return {key: value for remedy in (default_shares, *chosen) for key, value in remedy.items()}

    def fits(chosen: Sequence[Remedy]) -> bool:
        try:
            report = estimate_memory(*_with_settings(role_plans, step, joined(chosen)))
        except ValueError:  # an impossible layout
            return False
        limits = report.memory_of_kinds(device_bytes)
        excesses.append(max((float(report.peaks[kind]) - limit, limit) for kind, limit in limits.items()))
        return excesses[-1][0] <= 0

    trials = [[], *([remedy] for remedy in remedies), *(remedies[:count] for count in range(2, len(remedies) + 1))]
    chosen = next((trial for trial in trials if fits(trial)), None)
    if chosen is None:
        excess, limit = min(excesses)
        size = max(ranks[-1] for ranks in estimate_memory(role_plans, step).ranks) + 1
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


def _default_shares(role_plans: RolePlans, step: StepFacts) -> Remedy:
    """Return the default ``gpu_memory_utilization`` for roles with a lower one, which would leave memory unused.

    Pages that stay while training runs leave it to training.
    """
    default_share = GenerationConfig().memory_share(on_host=False)
    generating = {} if step.on_host else generating_roles(role_plans)
    configs = {role: role_plan.config.generation for role, role_plan in generating.items()}
    low = [
        role
        for role, config in configs.items()
        if config.num_pages is None and config.memory_share(False) < default_share and config.kv_cache != "keep"
    ]
    return {(role, "generation.gpu_memory_utilization"): default_share for role in low}


def _remedies(role_plans: RolePlans, step: StepFacts, local_size: int) -> list[Remedy]:
    """Return remedies, the mildest first. A later value of a setting replaces an earlier one."""
    models = {role: role_plan for role, role_plan in role_plans.items() if role_plan.spec is not None}
    trained = [role for role, role_plan in models.items() if role_plan.trained]
    frozen = [role for role in models if role not in trained]
    split = [role for role in models if models[role].shape.layout.copies > 1]
    generating = [role for role in models if models[role].shape.generation is not None]  # on their own ranks

    def raised(roles: Sequence[str], key: str, value: Any) -> Remedy:
        """Return the setting for those of ``roles`` that have less than ``value``."""
        scale = ["auto", *CHECKPOINTING].index if isinstance(value, str) else int
        low = [role for role in roles if scale(attrgetter(key)(models[role].config)) < scale(value)]
        fixed = [role for role in low if key in ("layout.tp", "layout.pp") and models[role].config.layout.dp is not None]
        return {**{(role, "layout.dp"): None for role in fixed}, **{(role, key): value for role in low}}

    budget = step.limits.max_tokens
    longest = ceil(step.longest)
    budgets = [budget >> n for n in range(1, 12) if budget >> n > longest] + [longest] * (longest < budget)
    all_ranks: Remedy = {(role, "layout.zero_size"): None for role in split if models[role].config.layout.zero_size}
    states = raised(trained, "optim.offload", True)
    powers = [2**n for n in range(1, 11)]
    largest = max(len(role_plan.pool.ranks) for role_plan in models.values())
    remedies: list[Remedy] = [{(None, BACKGROUND_SAVE): False}] if step.copied and step.on_host else []
    pages = "free" if step.on_host else "offload"  # pages that do not stay on the device
    keeping = [role for role, role_plan in generating_roles(models).items() if role_plan.config.generation.kv_cache != "free"]
    remedies += [{(role, "generation.kv_cache"): pages for role in keeping}]
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


def _with_setting(role_plan: RolePlan, key: str, value: Any) -> RolePlan:
    section, _, name = key.rpartition(".")
    changed = {section: replace(getattr(role_plan.config, section), **{name: value})} if section else {name: value}
    return replace(role_plan, config=replace(role_plan.config, **changed))


def _with_settings(role_plans: RolePlans, step: StepFacts, settings: Remedy) -> tuple[dict[str, RolePlan], StepFacts]:
    """Return ``role_plans`` and ``step`` with these settings. Raises ValueError for impossible layouts."""
    changed = dict(role_plans)
    for (role, key), value in settings.items():
        if key == BACKGROUND_SAVE:
            step = replace(step, copied=frozenset())
        elif role is None:
            step = replace(step, limits=replace(step.limits, max_tokens=value))
        else:
            changed[role] = _with_setting(changed[role], key, value)
    for role in {role for role, key in settings if role and key.startswith("layout.")}:
        changed[role] = role_in_layout(role, changed[role], changed[role].config.layout)
    return changed, step
