"""What a person sees of a run while it goes on: on a terminal a bar, which says what is being done; else one line per step."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

LOWEST = re.compile(r".*(loss|perplexity|kl)")  # metrics that are best where they are lowest
ACTIVITIES = {  # by the first word of a call's method
    "generate": "generating",
    "compute": "scoring",
    "evaluate": "scoring",
    "update": "updating",
    "save": "saving",
    "export": "exporting",
}
TO_LEFT_EDGE = "\r\x1b[K"  # of a terminal's line, which is then empty


def on_own_line(text: str) -> str:
    """``text`` for standard error, where a bar may stand on the line; the process that draws it draws it again."""
    return TO_LEFT_EDGE + text if sys.stderr.isatty() else text


def say(text: str) -> None:
    """A line for people on standard error, from any process of a run."""
    print(on_own_line(text), file=sys.stderr, flush=True)


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
        """A call such as ``actor.generate_sequences`` begins. The bar names what it does; a short call between is not shown."""
        activity = ACTIVITIES.get(name.rpartition(".")[2].partition("_")[0])
        if activity is not None and not self._bar.disable and self._bar.desc != f"{activity}: ":
            self._bar.set_description(activity)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step ``step`` is done, with these metrics (names as in metrics.jsonl; those that are missing are not shown).

        Metrics of a validation get a line of their own; step 0 has no others.
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
        """A line of its own, above the bar if there is one."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()


def reward_of(names: Container[str]) -> str:
    """The metric of what is trained on: the sum of the rewards where there are several."""
    return "reward/total_mean" if "reward/total_mean" in names else "reward/mean"


def shown(metrics: Mapping[str, Any]) -> list[str]:
    """Of a step the reward, or the loss where there is none, KL and speed, as text; what it has not is left out."""
    losses = [name for name in metrics if name.endswith("/loss") and not name.startswith("val/")]
    reward = reward_of(metrics)
    forms = {reward: "reward {:.3f}"} if reward in metrics else dict.fromkeys(losses[:1], "loss {:.4f}")
    forms |= {"actor/kl": "KL {:.4f}", "perf/tokens_per_s": "{:,.0f} tokens/s"}
    return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]


def pick_samples(groups: Iterable[Hashable], most: int) -> list[int]:
    """Positions of ``most`` rows at most, ascending: the first row of every group goes before a second one of any.

    ``groups``: of each row, what it answers.
    """
    seen: Counter[Hashable] = Counter()
    order = []
    for at, group in enumerate(groups):
        order.append((seen[group], at))
        seen[group] += 1
    return sorted(at for _, at in sorted(order)[:most])


def equal_runs(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Value, begin and end of each longest run of equal values."""
    ends = [at for at in range(1, len(mask)) if mask[at] != mask[at - 1]]
    return [(mask[begin], begin, end) for begin, end in zip([0, *ends], [*ends, len(mask)], strict=True) if end > begin]
