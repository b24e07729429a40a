"""What a person sees of a run while it goes on: a bar on a terminal, otherwise one line per step."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Container, Mapping
from typing import Any, TextIO

from tqdm import tqdm

LOWER_IS_BETTER = re.compile(r".*(loss|perplexity|kl)")  # names of metrics
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
    """Print a line for people on standard error, from any process of a run."""
    print(on_own_line(text, sys.stderr), file=sys.stderr, flush=True)


class Progress:
    """The progress of a run, on rank 0 only; on standard error unless ``stream`` is given."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, start_step: int = 0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total_steps = total_steps
        self._start_step = start_step
        self._start_s = time.monotonic()
        disable = not self._stream.isatty()
        self._bar = tqdm(
            total=total_steps, initial=start_step, file=self._stream, disable=disable, unit="step", dynamic_ncols=True
        )

    def phase(self, name: str) -> None:
        """Show in the bar that a call such as ``actor.generate_sequences`` begins; short calls are not shown."""
        activity = ACTIVITIES.get(name.rpartition(".")[2].partition("_")[0])
        if activity is not None and not self._bar.disable and self._bar.desc != f"{activity}: ":
            self._bar.set_description(activity)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that ``step`` is done, with its metrics (named as in metrics.jsonl; missing ones are not shown).

        Metrics of a validation get their own line; step 0 has no others.
        """
        values = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if values:
            self.say(f"validation after step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        if step and not self._bar.disable:
            self._bar.set_postfix_str(", ".join(shown(metrics)), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step:
            elapsed = time.monotonic() - self._start_s
            left = elapsed / max(step - self._start_step, 1) * (self._total_steps - step)
            seconds = [f"{metrics['timing_s/step']:.2f} s/step"] if "timing_s/step" in metrics else []
            times = [f"{tqdm.format_interval(elapsed)} elapsed", f"{tqdm.format_interval(left)} left"]
            self.say("  ".join([f"step {step}/{self._total_steps}", *shown(metrics), *seconds, *times]))

    def close(self) -> None:
        """Leave the last state of the bar on the screen. May be called twice."""
        self._bar.close()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
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
