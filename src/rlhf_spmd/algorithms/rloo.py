"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline of a response is the mean of the others; KL is in the reward."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.objectives.kl import KLControlConfig


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "rloo"
    adv_estimator: str = "rloo"
    use_kl_in_reward: bool = True
    kl_ctrl: KLControlConfig = field(default_factory=lambda: KLControlConfig(kl_coef=0.05))
    loss_agg_mode: str = "seq-mean-token-sum"
