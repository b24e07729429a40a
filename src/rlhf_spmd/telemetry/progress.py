"""One line on the terminal: step, reward, KL, tokens per second, time left."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

BAR_WIDTH = 20
RECENT_STEPS = 20  # the time left follows the recent pace: the first steps of a run are slower


class ProgressBar:
    """Rank 0 only. Redraws one line in place; silent where ``stream`` is not a terminal."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, start_step: int = 0) -> None:
        self.total_steps = total_steps
        self._stream = sys.stderr if stream is None else stream
        self._visible = self._stream.isatty()
        self._times: deque[tuple[int, float]] = deque([(start_step, time.monotonic())], maxlen=RECENT_STEPS)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step ``step`` is done, with these metrics (names as in metrics.jsonl; those that are missing are not shown)."""
        if not self._visible:
            return
        self._times.append((step, time.monotonic()))
        columns = shutil.get_terminal_size().columns
        self._stream.write("\r\x1b[K" + self.line(step, metrics)[: columns - 1])
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line of its own above the bar; printed also where the bar is silent."""
        self._stream.write(("\r\x1b[K" if self._visible else "") + text + "\n")
        self._stream.flush()

    def line(self, step: int, metrics: Mapping[str, Any]) -> str:
        share = min(1.0, step / self.total_steps) if self.total_steps else 1.0
        full = round(share * BAR_WIDTH)
        parts = [f"step {step}/{self.total_steps} {'█' * full}{'░' * (BAR_WIDTH - full)}"]
        shown = (
            ("reward", "reward/mean", "{:.3f}"),
            ("KL", "actor/kl", "{:.4f}"),
            ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
        )
        for label, name, form in shown:
            value = metrics.get(name)
            if value is not None:
                parts.append(f"{label} {form.format(float(value)) if math.isfinite(value) else value}")
        parts.append(f"{format_seconds(self.seconds_left(step))} left")
        return "  ".join(parts)

    def seconds_left(self, step: int) -> float:
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        pace = (last_time - first_time) / max(1, last_step - first_step)
        return pace * max(0, self.total_steps - step)

    def close(self) -> None:
        """Leaves the last line on the screen. May be called twice."""
        if self._visible:
            self._stream.write("\n")
            self._stream.flush()
        self._visible = False


def format_seconds(seconds: float) -> str:
    """``0:09``, ``12:34``, ``2:03:04``."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"
