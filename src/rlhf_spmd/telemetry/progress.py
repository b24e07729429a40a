"""What a person sees of a run while it goes on: a bar on a terminal, otherwise one line per step. And which samples."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

LOWEST = re.compile(r".*(loss|perplexity|kl)")  # metrics for which lower is better
ACTIVITIES = {  # first word of a call's method -> what the bar shows
    "generate": "generating",
    "compute": "scoring",
    "evaluate": "scoring",
    "update": "updating",
    "save": "saving",
    "export": "exporting",
}
TO_LEFT_EDGE = "\r\x1b[K"  # clears the terminal's line


def on_own_line(text: str, stream: TextIO) -> str:
    """Return ``text`` for standard error, whose line may hold a bar; the process with the bar draws it again."""
    return TO_LEFT_EDGE + text if stream.isatty() else text


def say(text: str) -> None:
    """Prints a line for people on standard error, from any process of a run."""
    print(on_own_line(text, sys.stderr), file=sys.stderr, flush=True)


class Progress:
    """Rank 0 only; on standard error unless ``stream`` is given."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, start_step: int = 0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._start, self._began = total_steps, start_step, time.monotonic()
        visible = self._stream.isatty()
        self._bar = tqdm(
            total=total_steps, initial=start_step, file=self._stream, disable=not visible, unit="step", dynamic_ncols=True
        )

    def phase(self, name: str) -> None:
        """Shows in the bar that a call such as ``actor.generate_sequences`` begins; short calls are not shown."""
        activity = ACTIVITIES.get(name.rpartition(".")[2].partition("_")[0])
        if activity is not None and not self._bar.disable and self._bar.desc != f"{activity}: ":
            self._bar.set_description(activity)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that step ``step`` is done, with its metrics (named as in metrics.jsonl; missing ones are not shown).

        Metrics of a validation get their own line; step 0 has no others.
        """
        values = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if values:
            self.say(f"validation after step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        if step and not self._bar.disable:
            self._bar.set_postfix_str(", ".join(shown(metrics)), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step:
            elapsed = time.monotonic() - self._began
            left = elapsed / max(step - self._start, 1) * (self._total - step)
            seconds = [f"{metrics['timing_s/step']:.2f} s/step"] if "timing_s/step" in metrics else []
            times = [f"{tqdm.format_interval(elapsed)} elapsed", f"{tqdm.format_interval(left)} left"]
            self.say("  ".join([f"step {step}/{self._total}", *shown(metrics), *seconds, *times]))

    def close(self) -> None:
        """Leaves the last state of the bar on the screen. May be called twice."""
        self._bar.close()

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()


def reward_of(names: Container[str]) -> str:
    """Return the metric of the trained reward: the total if there are several rewards."""
    return "reward/total_mean" if "reward/total_mean" in names else "reward/mean"


def shown(metrics: Mapping[str, Any]) -> list[str]:
    """Return a step's reward (else its loss), KL and speed as text; missing ones are left out."""
    losses = [name for name in metrics if name.endswith("/loss") and not name.startswith("val/")]
    reward = reward_of(metrics)
    forms = {reward: "reward {:.3f}"} if reward in metrics else dict.fromkeys(losses[:1], "loss {:.4f}")
    forms |= {"actor/kl": "KL {:.4f}", "perf/tokens_per_s": "{:,.0f} tokens/s"}
    return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]


def pick_samples(groups: Iterable[Hashable], limit: int) -> list[int]:
    """Return at most ``limit`` row positions, ascending: every group's first row precedes any group's second.

    ``groups``: what each row answers.
    """
    seen: Counter[Hashable] = Counter()
    order = []
    for position, group in enumerate(groups):
        order.append((seen[group], position))
        seen[group] += 1
    return sorted(position for _, position in sorted(order)[:limit])


def equal_runs(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Return value, begin and end of each maximal run of equal values."""
    ends = [index for index in range(1, len(mask)) if mask[index] != mask[index - 1]]
    return [(mask[begin], begin, end) for begin, end in zip([0, *ends], [*ends, len(mask)], strict=True) if end > begin]
