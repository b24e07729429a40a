"""What a plan comes to, for people: whether it fits, how fast it is, how long the run takes, and what it gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.training.planning import Planned

GIB = 2**30


@dataclass(frozen=True)
class PlanSummary:
    """``memory_gb``: GiB of the fullest rank in its largest call, of ``room_gb``. ``tokens_per_second``: prompts and responses of all
    ranks together. ``hours``: of all steps; None where the run's length is in epochs. ``as_it_is``: seconds of a step of the
    configuration's own placement and layouts, or why they cannot be; None where they are what was judged."""

    memory_gb: float
    room_gb: float
    step_seconds: float
    tokens_per_second: float
    hours: float | None
    as_it_is: float | str | None
    refusal: str | None

    def lines(self) -> list[str]:
        free = 1 - self.memory_gb / self.room_gb
        room = f"{self.memory_gb:.1f} of {self.room_gb:.1f} GiB on the fullest rank"
        said = [f"fits: {room}, {free:.0%} free" if self.refusal is None else f"does not fit: {self.refusal}"]
        speed = f"{self.step_seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s"
        said.append(speed if self.hours is None else f"{speed}, {_time(self.hours)} for the run")
        if isinstance(self.as_it_is, str):
            said.append(f"the configuration as it is cannot run so: {self.as_it_is}")
        elif self.as_it_is is not None:
            gain = self.as_it_is / self.step_seconds
            than = f"the configuration as it is ({self.as_it_is:.3g} s a step)"
            said.append(f"{gain:.2f} times as fast as {than}" if gain > 1.005 else f"as fast as {than}")
        return said

    def to_json(self) -> dict[str, Any]:
        as_it_is = {"step_seconds": self.as_it_is} if isinstance(self.as_it_is, float) else {"refusal": self.as_it_is}
        return {
            "memory_gb": self.memory_gb,
            "room_gb": self.room_gb,
            "tokens_per_second": self.tokens_per_second,
            "hours": self.hours,
            "configuration": None if self.as_it_is is None else as_it_is,
        }


def summarise(
    planned: Planned, machine: Machine, tokens: float, steps: int | None, as_it_is: Planned | str | None
) -> PlanSummary:
    """``tokens``: of a step. ``as_it_is``: the configuration's own plan, or why there is none."""
    seconds = float(planned.file.told["step_seconds"])
    if isinstance(as_it_is, Planned):
        own: float | str | None = as_it_is.verdict or float(as_it_is.file.told["step_seconds"])
    else:
        own = as_it_is
    return PlanSummary(
        memory_gb=max(call.memory_gb for call in planned.file.calls.values()),
        room_gb=min(machine.memory) / GIB,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        hours=None if steps is None else steps * seconds / 3600,
        as_it_is=own,
        refusal=planned.verdict,
    )


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
