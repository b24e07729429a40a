"""What a plan comes to, for people: a few lines, and its calls beside the measured ones of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.planner.machine import GIB, Machine
from rlhf_spmd.planner.plan_file import PlanFile
from rlhf_spmd.planner.planning import PlanResult


def _computed(trace: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of the calls that ranks computed."""
    return (event for event in trace.get("traceEvents", ()) if event.get("ph") == "X" and event.get("cat") == "compute")


def measured_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Call -> seconds of its slowest rank, the median over all steps but the first."""
    slowest: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in _computed(trace):
        step = (event.get("args") or {}).get("step")
        if isinstance(step, int):
            of_call = slowest[str(event["name"])]
            of_call[step] = max(of_call[step], event["dur"] / 1e6)
    return {
        name: median([seconds for step, seconds in steps.items() if step > min(steps)] or steps.values())
        for name, steps in slowest.items()
    }


def read_trace(plan: PlanFile, run: str) -> dict[str, Any]:
    """The trace of the run directory ``run``. Raises ValueError if it cannot be read or the run did not follow ``plan``."""
    path = Path(run) / "trace.json"
    try:
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"plan.measured={run}: {path} cannot be read: {error}") from error
    ran: dict[str, set[int]] = defaultdict(set)
    for event in _computed(found):
        ran[str(event["name"])].add(event["pid"])
    if not any(name in ran for name in plan.calls):
        raise ValueError(f"plan.measured={run}: the run has none of the plan's calls ({', '.join(plan.calls)})")
    for name, call in plan.calls.items():
        if name in ran and ran[name] != set(call.rank_range.ranks):
            where = f"{name} ran on {len(ran[name])} ranks, not on {call.ranks}"
            raise ValueError(f"plan.measured={run}: {where}; it followed another plan")
    return found


def compare(plan: PlanFile, measured: Mapping[str, float]) -> list[tuple[str, float, float | None, float | None]]:
    """(call, planned seconds, measured seconds, error as a share of the measured seconds) for each call."""
    found = [(name, call.seconds, measured.get(name)) for name, call in plan.calls.items()]
    return [(name, planned, seconds, planned / seconds - 1 if seconds else None) for name, planned, seconds in found]


@dataclass(frozen=True)
class PlanSummary:
    """What a plan for ``machine`` comes to.

    ``cluster``: in words. ``tokens``: prompts and responses of a step. ``steps``: of the run; None if its length is in epochs.
    ``own``: the plan of the configuration's own placement and layouts, or why there is none; None if that is what is judged.
    """

    planned: PlanResult
    machine: Machine
    cluster: str
    tokens: float
    steps: int | None
    own: PlanResult | str | None

    def to_json(self) -> dict[str, Any]:
        """``memory_gb``: GiB of the fullest rank in its largest call, of ``room_gb``. ``hours``: of the whole run."""
        seconds = self.planned.seconds
        own = self.own if isinstance(self.own, str | None) else self.own.refusal or self.own.seconds
        return {
            "cluster": self.cluster,
            "memory_gb": max(call.memory_gb for call in self.planned.file.calls.values()),
            "room_gb": min(self.machine.memory) / GIB,
            "tokens_per_second": self.tokens / seconds,
            "hours": None if self.steps is None else self.steps * seconds / 3600,
            "configuration": None if own is None else {"refusal" if isinstance(own, str) else "step_seconds": own},
        }

    def lines(self) -> list[str]:
        found, planned = self.to_json(), self.planned
        used, room, hours, own = (found[key] for key in ("memory_gb", "room_gb", "hours", "configuration"))
        fit = f"fits: {used:.1f} of {room:.1f} GiB on the fullest rank, {1 - used / room:.0%} free"
        if planned.refusal or planned.warning:
            fit = f"does not fit: {planned.refusal}" if planned.refusal else f"warning: {planned.warning}"
        lines = [f"cluster: {self.cluster}", fit]
        speed = f"{planned.seconds:.3g} s a step, {found['tokens_per_second']:,.0f} tokens/s"
        lines.append(speed if hours is None else f"{speed}, {_time(hours)} for the run")
        if own and "refusal" in own:
            lines.append(f"the configuration as it is, without this plan, does not fit: {own['refusal']}")
        elif own:
            gain, than = (
                own["step_seconds"] / planned.seconds,
                f"the configuration as it is ({own['step_seconds']:.3g} s a step)",
            )
            lines.append(f"{gain:.2f} times as fast as {than}" if gain > 1.005 else f"as fast as {than}")
            if isinstance(self.own, PlanResult) and self.own.warning:
                lines.append(f"which may not fit: {self.own.warning}")
        return lines


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
