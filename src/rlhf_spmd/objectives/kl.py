"""Per-token estimates of KL(policy || reference), and how their coefficient moves.

The estimators and their names k1, k2, k3 are Schulman's ("Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html);
the longer names beside them are verl's. The adaptive coefficient is that of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2),
in the form that TRL and verl use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveFloat, PositiveInt
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.objectives.losses import LOG_RATIO_LIMIT

KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]

LOW_VAR_LIMIT = 10.0  # bound of low_var_kl's estimate, so that one token cannot swamp a batch
ERROR_LIMIT = 0.2  # bound of the relative error of the KL against its target, in a step of the adaptive coefficient


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Return an estimate of the KL divergence per token, from the log-probs of the tokens that were sampled.

    ``log_prob`` and ``ref_log_prob``: [T], nats, of the policy (it takes gradients) and of the reference. Returns [T], nats.

    ==================== ==================================================================================================
    ``kl``, ``k1``       log_prob - ref_log_prob: unbiased, high variance, may be negative
    ``abs``              its absolute value
    ``mse``, ``k2``      half its square: biased, low variance
    ``low_var_kl``,      exp(d) - d - 1 with d = ref_log_prob - log_prob: unbiased, never negative. As in verl, d is clamped to
    ``k3``               [-20, 20] and the result to [-10, 10]; beyond either bound the gradient is zero
    ==================== ==================================================================================================

    A final ``+`` (``k3+``) keeps the value and takes the gradient of k2, which is the one whose expectation is the gradient of
    the KL divergence (verl's straight-through form; it matters where KL is a loss).
    """
    assert kind in get_args(KLKind), f"kl estimate {kind!r}"
    if kind.endswith("+"):
        value = kl_penalty(log_prob, ref_log_prob, kind[:-1]).detach()
        gradient = 0.5 * (log_prob - ref_log_prob).square()
        return value + (gradient - gradient.detach())
    difference = log_prob - ref_log_prob
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    return low_var_kl(-difference).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)


def low_var_kl(log_ratio: Tensor) -> Tensor:
    """Return exp(d) - d - 1 [T], nats, with d = ``log_ratio`` clamped to [-20, 20]; its own size is not bounded."""
    d = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(d) - d  # keeps the digits that exp(d) - 1 loses near d = 0, where almost every token lies


def token_divergence(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return an unbiased estimate of the divergence of a student from a teacher at each of the student's tokens [T], and the advantage
    [T] whose policy gradient is its gradient.

    ``log_ratio``: [T] nats, log q - log p of the student q and the teacher p; clamped to [-20, 20] where it is exponentiated. ``beta``:
    that of GKD (arXiv 2306.13649, eq. 1), with the limits as TRL has them. A divergence is E_q[f(u)] with u = p / q; its gradient is
    E_q[(f(u) - u f'(u)) grad log q], up to a constant, which no expectation sees:

    ============ =============================== ==================================== ============================
    ``beta``     divergence                      f(u)                                 advantage, u f'(u) - f(u)
    ============ =============================== ==================================== ============================
    1            KL(q || p)                      -log u                               log u
    0            KL(p || q)                      u log u                              u - 1
    between      beta KL(p || m) +               beta u log(u / m) - (1 - beta)       (1 - beta) log m
                 (1 - beta) KL(q || m),          log m, with m / q for m
                 m = beta p + (1 - beta) q
    ============ =============================== ==================================== ============================
    """
    if beta == 1:
        return log_ratio, -log_ratio
    u = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if beta == 0:
        return u.exp() * u, torch.expm1(u)
    mixture = torch.log1p(beta * torch.expm1(u))
    return beta * u.exp() * (u - mixture) - (1 - beta) * mixture, (1 - beta) * mixture


@dataclass(frozen=True)
class KLControlConfig:
    """``kl_ctrl``: how the coefficient of the KL penalty in the reward is chosen.

    - type: `fixed`, or `adaptive`: steers `actor/kl_per_row` towards `target_kl`
    - kl_coef: the coefficient, or where it starts
    - target_kl: nats per token; adaptive only
    - horizon: responses over which the adaptive coefficient moves
    """

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    target_kl: PositiveFloat = 0.1
    horizon: PositiveInt = 10000
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"type=adaptive": ("target_kl", "horizon")}

    rules: ClassVar[Rules] = (
        Rule(
            ("kl_coef", "type"),
            lambda s: s.type == "adaptive" and s.kl_coef == 0,
            "a coefficient of 0 stays 0",
            "start above 0, or set type=fixed",
        ),
    )

    @property
    def moves(self) -> bool:
        return self.type == "adaptive"

    def moved(self, coefficient: float, current_kl: float, num_rows: int) -> float:
        """Return the next step's coefficient: coefficient * (1 + e * num_rows / horizon), e = clip(current_kl / target_kl - 1,
        -0.2, 0.2) (Ziegler et al. 2019); the same coefficient where it is fixed.

        Call once per step, with replicated numbers, so that every rank holds the same coefficient. ``current_kl``: the step's
        mean KL, with verl's meaning of ``target_kl`` the mean over rows of each row's mean per token (:func:`losses.aggregate` in mode
        ``seq-mean-token-mean``), in nats. ``num_rows``: of the global batch. Raises FloatingPointError for a KL that is not finite.
        """
        if not math.isfinite(current_kl):
            raise FloatingPointError(f"the actor's mean KL to the reference is {current_kl}; lower models.actor.optim.lr")
        if not self.moves:
            return coefficient
        error = min(max(current_kl / self.target_kl - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
        # With more than 5 * horizon rows in a step the factor would reach zero or below and the coefficient never recover.
        return coefficient * max(1.0 + error * num_rows / self.horizon, 1e-3)
