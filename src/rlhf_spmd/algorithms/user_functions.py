"""The user's own estimators and policy losses: resolved by name, called with arguments by name, their results checked."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.config.registry import noting_user_line, resolve_function, split_name
from rlhf_spmd.objectives.losses import log_ratios

ESTIMATOR_ARGUMENTS = ("rewards", "group_ids", "lengths", "config")
LOSS_ARGUMENTS = ("log_prob", "old_log_prob", "advantages", "lengths", "config")
STATISTICS = ("clipped", "dual_clipped")  # statistics that a loss may return, beside those with a / in their name

# (config, rewards of rows [rows], their group ids, their lengths) -> [rows] or [tokens]
Estimator = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
# (config, log_prob, old_log_prob, advantages [tokens], lengths [rows]) -> the loss and statistics, [tokens] each
PolicyLoss = Callable[[Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


def is_user_function(name: str) -> bool:
    """Return True if ``name`` is that of a module or a file, and none of a table."""
    return "." in name or ":" in name


def user_estimator(where: str, name: str) -> Estimator:
    """Return the function ``name``, else the ``estimate`` of the module or file. Raises ValueError for one that does not exist or takes
    other arguments.

    When it is called, its result raises ValueError unless it is a tensor [rows] or [tokens], and FloatingPointError where a row
    that has a reward has nan or inf.
    """
    called = _resolved(where, name, "estimate", ESTIMATOR_ARGUMENTS)

    def estimate(config: Any, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
        if not len(rewards):
            return torch.zeros_like(rewards)
        returned = called({"rewards": rewards.clone(), "group_ids": group_ids, "lengths": lengths, "config": config})
        tokens = int(lengths.sum())
        expected = f"a tensor of an advantage for each row [{len(rewards)}] or for each response token [{tokens}]"
        advantages = _tensor(f"{where} {name!r}", returned, (len(rewards), tokens), expected).detach().to(rewards)
        row_of = torch.arange(len(rewards)) if len(advantages) == len(rewards) else torch.repeat_interleave(lengths)
        not_finite = (~advantages.isfinite() & ~rewards.isnan()[row_of]).nonzero()
        if len(not_finite):
            row = int(row_of[not_finite[0]])
            raise FloatingPointError(
                f"{where} {name!r} returned {float(advantages[not_finite[0]])} for a row of group {int(group_ids[row])}, whose reward "
                f"is {float(rewards[row]):g}; advantages must be finite"
            )
        return advantages

    return estimate


def user_loss(where: str, name: str) -> PolicyLoss:
    """Return the function ``name``, else the ``loss`` of the module or file. Raises ValueError for one that does not exist or takes
    other arguments.

    When it is called, its result raises ValueError unless it is a tensor [tokens] with gradients, alone or with a dict of statistics
    [tokens]; and FloatingPointError if it is not finite and its arguments are.
    """
    called = _resolved(where, name, "loss", LOSS_ARGUMENTS)
    label = f"{where} {name!r}"

    def loss(config: Any, new: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        arguments = {"log_prob": new, "old_log_prob": old, "advantages": advantages, "lengths": lengths, "config": config}
        returned = called(arguments)
        per_token, stats = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        per_token = _tensor(label, per_token, (len(new),), f"the loss of each response token, a tensor [{len(new)}]")
        if len(new) and new.requires_grad and not per_token.requires_grad:
            raise ValueError(
                f"{label} returned a loss without gradients; compute it from log_prob, without detach() or no_grad()"
            )
        if not bool(per_token.isfinite().all()) and all(bool(x.isfinite().all()) for x in (new, old, advantages)):
            raise FloatingPointError(f"{label} returned a loss that is not finite, and its arguments are")
        if not isinstance(stats, Mapping):
            raise ValueError(
                f"{label} returned {type(stats).__name__} beside its loss; it must be a dict of statistics by name"
            )
        for key, value in stats.items():
            if key not in STATISTICS and "/" not in str(key):
                raise ValueError(
                    f"{label} returned the statistic {key!r}; allowed: {', '.join(STATISTICS)}, and names with a /, as my/share"
                )
            _tensor(f"{label}, statistic {key!r},", value, (len(new),), f"a tensor [{len(new)}], a number for each token")
        return per_token, {"ppo_kl": -log_ratios(new, old, advantages).detach(), **stats}

    return loss


def _resolved(where: str, name: str, exports: str, allowed: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function, to be called with those of the values ``allowed`` that it takes."""
    module, inner = split_name(name)
    function = resolve_function(f"{module}:{inner or exports}", where)
    takes = f"{where} {name!r} takes"
    if not inspect.isroutine(function):
        raise ValueError(f"{where} {name!r} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    parameters_by_name = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for parameter in parameters_by_name.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{takes} {parameter.name} by position alone; its arguments are given by name")
        if parameter.default is parameter.empty and parameter.name not in allowed:
            raise ValueError(
                f"{takes} {parameter.name!r}, for which there is no value; its arguments may be {', '.join(allowed)}"
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    home = sys.modules[function.__module__]

    def call(values: Mapping[str, Any]) -> Any:
        with noting_user_line(where, name, home):
            return function(**{key: value for key, value in values.items() if takes_all or key in parameters_by_name})

    return call


def _tensor(label: str, value: Any, lengths: tuple[int, ...], expected: str) -> Tensor:
    """Return ``value`` if it is a tensor of one dimension and one of these lengths. Raises ValueError."""
    if isinstance(value, Tensor) and value.dim() == 1 and len(value) in lengths:
        return value
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"{label} returned {what}; it must return {expected}")
