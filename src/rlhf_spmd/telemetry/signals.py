"""Signs in a run's metrics that it learns nothing or goes astray: one table of rules.

The recorder prints what :class:`Signals` finds while the run goes on; summary and report read it again from metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_spmd.telemetry.run_dir import finite_number

TOLERANCE = 1e-3  # of a loss, as a share of its size
NEAR_ZERO_NATS = 0.01
FAR_NATS = 1.0  # from the reference, per token

Values = tuple[float, ...]  # of a rule's metrics in one step


class SignalRule(NamedTuple):
    """What ``steps`` consecutive steps must have in common.

    - keys: metrics that it reads, where ``{role}`` is each role that has them; steps without them do not count
    - holds: returns True if a step continues the streak that ``first`` began
    - text: for people; ``{role}``, ``{steps}``, ``{0}``, ``{1}``, ... are replaced, the numbers by the metrics of the last step
    - restarts_when: for rules about a run's first steps only: returns True for a step from which these are counted anew; None:
      the rule applies to any steps
    - unless: steps with any of these metrics do not count
    """

    keys: tuple[str, ...]
    steps: int
    holds: Callable[[Values, Values], bool]
    text: str
    restarts_when: Callable[[Values, Values], bool] | None = None
    unless: tuple[str, ...] = ()


def _same_loss(first: Values, now: Values) -> bool:
    """Return True if the loss has not changed. A policy's loss may be 0 whatever it learns, but then it has gradients."""
    return abs(now[0] - first[0]) <= TOLERANCE * abs(first[0]) and (first[0] != 0 or now[2] == 0)


SIGNAL_RULES = (
    SignalRule(
        ("{role}/loss", "{role}/lr", "{role}/grad_norm"),
        50,
        _same_loss,
        "{role}/loss stays at {0:.4g} for {steps} steps: almost nothing is learnt at models.{role}.optim.lr, now {1:.2g}; raise it, "
        "or look at the data",
        restarts_when=lambda first, now: now[1] > first[1],  # a warm-up; in later steps a loss may have come to its end
    ),
    SignalRule(
        ("reward/min", "reward/max"),
        10,
        lambda first, now: now[0] == now[1] == first[0],
        "every response of {steps} steps scored {0:.4g}: the reward tells none from another and teaches nothing; look at scores and "
        "extracted answers in rollouts.jsonl, reward/failures, reward/no_answer, reward.function",
        unless=("reward/total_mean", "group/equal_fraction"),  # another reward may tell them apart; the next rule says it
    ),
    SignalRule(
        ("group/equal_fraction", "group/right_fraction", "group/wrong_fraction"),
        10,
        lambda first, now: now[0] == 1,
        "all responses of each prompt scored alike for {steps} steps (group/equal_fraction 1; last right {1:.2g}, wrong {2:.2g}): "
        "their scores teach nothing; look at the difficulty of the data, sampling.temperature, sampling.n",
    ),
    SignalRule(
        ("response_length/clip_ratio", "response_length/min", "response_length/max"),
        10,
        lambda first, now: now[0] == 1,
        "every response of {steps} steps was cut at its limit (response_length/clip_ratio 1, longest {2:.0f}): none was ended by the "
        "model; look at data.max_response_length, the model's end tokens, and rollouts.jsonl",
    ),
    SignalRule(
        ("actor/entropy",),
        10,
        lambda first, now: abs(now[0]) < NEAR_ZERO_NATS,
        f"actor/entropy is {{0:.2g}} nats after {{steps}} steps below {NEAR_ZERO_NATS}: samples of a prompt hardly differ, so "
        "little is explored; look at models.actor.optim.lr, algorithm.entropy_coeff, sampling.temperature",
    ),
    SignalRule(
        ("actor/kl",),
        10,
        lambda first, now: now[0] > FAR_NATS,
        f"actor/kl is {{0:.3g}} nats per token after {{steps}} steps above {FAR_NATS:g}: the policy has left its reference; "
        "look at samples, models.actor.optim.lr, algorithm.kl_ctrl.kl_coef or algorithm.kl_loss_coef",
    ),
)


@dataclass
class _Streak:
    """Steps in a row for which a rule holds. ``is_over``: the rule has matched, or no longer applies."""

    first: Values
    count: int = 0
    is_over: bool = False


class Signals:
    """Finds each rule's first case in the metrics of a run's steps, which are added in order."""

    def __init__(self) -> None:
        self._streaks: dict[tuple[SignalRule, str], _Streak] = {}

    def add(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the texts of the rules that this step completes."""
        texts = []
        for rule in SIGNAL_RULES:
            if any(name in metrics for name in rule.unless):
                continue
            stem = rule.keys[0].removeprefix("{role}")
            roles = [name.removesuffix(stem) for name in metrics if name.endswith(stem)] if stem != rule.keys[0] else [""]
            for role in roles:
                values = [finite_number(metrics.get(key.format(role=role))) for key in rule.keys]
                now = tuple(value for value in values if value is not None)
                if len(now) == len(values) and self._completes(rule, role, now):
                    texts.append(rule.text.format(*now, role=role, steps=rule.steps))
        return texts

    def _completes(self, rule: SignalRule, role: str, now: Values) -> bool:
        """Add a step to the rule's streak, and return True if that is the last of ``rule.steps``."""
        key = rule, role
        streak = self._streaks.get(key)
        if streak is not None and streak.is_over:
            return False
        if streak is None or (rule.restarts_when is not None and rule.restarts_when(streak.first, now)):
            streak = self._streaks[key] = _Streak(now)
        if not rule.holds(streak.first, now):
            streak = self._streaks[key] = _Streak(now, is_over=rule.restarts_when is not None)
        streak.count += rule.holds(streak.first, now)
        streak.is_over = streak.is_over or streak.count == rule.steps
        return streak.count == rule.steps


def read_signals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what :class:`Signals` finds in the lines of metrics.jsonl, each with its step."""
    signals = Signals()
    return [f"step {row['step']}: {text}" for row in rows for text in signals.add(row)]
