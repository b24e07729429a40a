"""A plan for people: a table of its calls, a few lines, and its calls beside the measured ones of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile
from rlhf_spmd.planner.planning import PlanResult

TITLES = ("call", "ranks", "pp", "tp", "dp", "zero", "recompute", "micro-batches", "from s", "seconds", "GiB/rank")


def table(planned: PlanResult) -> str:
    """Return the plan as lines: a row for each call, and how good it is."""
    rows = [TITLES, *(_row(name, call) for name, call in planned.file.calls.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    search = planned.search
    proof = "the optimum" if search.optimal else f"at least {search.lower_bound:.4g} s" if search.lower_bound else "no bound"
    lines.append(f"step {planned.seconds:.4g} s ({proof}; searched for {search.search_seconds:.2f} s)")
    lines.append("* the role's weights stay here")
    return "\n".join(lines)


def _row(name: str, call: PlacedCall) -> tuple[str, ...]:
    sharded = f" of {call.zero_size}" if call.zero_size else ""
    offloads = " offload" * call.offload + " optim.offload" * call.optim_offload
    return (
        f"{name}{' *' * call.home}",
        call.ranks,
        str(call.pp),
        f"{call.tp}{' sp' * call.sequence_parallel}",
        str(call.dp) + "".join(f" {axis}{n}" for axis, n in (("cp", call.cp), ("ep", call.ep)) if n > 1),
        f"{call.zero}{sharded}{offloads}",
        call.activation_checkpointing if call.activation_checkpointing != "none" else "-",
        str(call.micro_batches),
        f"{call.start:.3g}",
        f"{call.seconds:.3g}",
        f"{call.memory_gb:.1f}",
    )


@dataclass(frozen=True)
class PlanSummary:
    """A plan for ``machine``, with the numbers that people ask for.

    - cluster: the machine, in words
    - tokens: prompts and responses of a step
    - steps: of the run; None if its length is in epochs
    - configured: the plan of the configuration's own placement and layouts, or why there is none; None if ``planned`` is that plan
    """

    planned: PlanResult
    machine: Machine
    cluster: str
    tokens: float
    steps: int | None
    configured: PlanResult | str | None

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON.

        ``memory_gb``: GiB of the fullest rank in its largest call, of ``room_gb`` that it has. ``hours``: of the entire run.
        """
        fullest = max(self.planned.file.calls.values(), key=lambda call: call.memory_gb / call.room_gb)
        planned = self.planned
        search = planned.search
        configured: dict[str, Any] | None = None
        if isinstance(self.configured, PlanResult) and self.configured.refusal is None:
            configured = {"step_seconds": self.configured.seconds}
        elif self.configured is not None:
            configured = {"refusal": self._refusal()}
        return {
            "calls": {name: asdict(call) | {"ranks": list(call.rank_range.ranks)} for name, call in planned.file.calls.items()},
            "step_seconds": planned.seconds,
            "lower_bound_seconds": search.lower_bound,
            "optimal": search.optimal,
            "search_seconds": search.search_seconds,
            "fits": planned.refusal is None,
            "refusal": planned.refusal,
            "warning": planned.warning,
            "algorithm": dict(planned.file.algorithm),
            "cluster": self.cluster,
            "memory_gb": fullest.memory_gb,
            "room_gb": fullest.room_gb,
            "tokens_per_second": self.tokens / planned.seconds,
            "hours": None if self.steps is None else self.steps * planned.seconds / 3600,
            "configuration": configured,
        }

    def _refusal(self) -> str | None:
        """Return why the configuration as it is does not fit, if it does not."""
        return self.configured.refusal if isinstance(self.configured, PlanResult) else self.configured

    def lines(self) -> list[str]:
        """Return the summary as lines."""
        planned = self.planned
        values = self.to_json()
        used = values["memory_gb"]
        room = values["room_gb"]
        hours = values["hours"]
        fit = f"fits: {used:.1f} of {room:.1f} GiB on the fullest rank, {1 - used / room:.0%} free"
        if planned.refusal or planned.warning:
            fit = f"does not fit: {planned.refusal}" if planned.refusal else f"warning: {planned.warning}"
        lines = [f"cluster: {self.cluster}", fit]
        speed = f"{planned.seconds:.3g} s a step, {values['tokens_per_second']:,.0f} tokens/s"
        lines.append(speed if hours is None else f"{speed}, {_time(hours)} for the run")
        configured = self.configured
        if self._refusal() is not None:
            lines.append(f"the configuration as it is, without this plan, does not fit: {self._refusal()}")
        elif isinstance(configured, PlanResult):
            gain = configured.seconds / planned.seconds
            times = f"{gain:.2f} times " if gain > 1.005 else ""
            lines.append(f"{times}as fast as the configuration as it is ({configured.seconds:.3g} s a step)")
            if configured.warning:
                lines.append(f"which may not fit: {configured.warning}")
        return lines


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"


def comparison(plan: PlanFile, measured: Mapping[str, float]) -> str:
    """Return each call's planned and measured seconds, a line each."""
    lines = []
    for name, call in plan.calls.items():
        seconds = measured.get(name)
        error = f"measured {seconds:.3g} s, {call.seconds / seconds - 1:+.0%}" if seconds else "not measured"
        lines.append(f"{name}: planned {call.seconds:.3g} s, {error}")
    return "\n".join(lines)


def measured_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return call -> seconds of its slowest rank, the median over all steps but the first."""
    slowest: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in _computed(trace):
        step = (event.get("args") or {}).get("step")
        if isinstance(step, int):
            steps = slowest[str(event["name"])]
            steps[step] = max(steps[step], event["dur"] / 1e6)
    return {
        name: median([seconds for step, seconds in steps.items() if step > min(steps)] or steps.values())
        for name, steps in slowest.items()
    }


def read_trace(plan: PlanFile, run: str) -> dict[str, Any]:
    """Return the trace of the run directory ``run``. Raises ValueError if it cannot be read or the run did not follow ``plan``."""
    path = Path(run) / "trace.json"
    try:
        trace: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"plan.measured={run}: {path} cannot be read: {error}") from error
    ranks: dict[str, set[int]] = defaultdict(set)
    for event in _computed(trace):
        ranks[str(event["name"])].add(event["pid"])
    if not any(name in ranks for name in plan.calls):
        raise ValueError(f"plan.measured={run}: the run has none of the plan's calls ({', '.join(plan.calls)})")
    for name, call in plan.calls.items():
        if name in ranks and ranks[name] != set(call.rank_range.ranks):
            where = f"{name} ran on {len(ranks[name])} ranks, not on {call.ranks}"
            raise ValueError(f"plan.measured={run}: {where}; it followed another plan")
    return trace


def _computed(trace: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of the calls that ranks computed."""
    return (event for event in trace.get("traceEvents", ()) if event.get("ph") == "X" and event.get("cat") == "compute")
