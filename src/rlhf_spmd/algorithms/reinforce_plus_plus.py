"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted rewards to come, KL on every token, whitened over the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.objectives.kl import KLControlConfig


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "reinforce_plus_plus"
    adv_estimator: str = "reinforce_plus_plus"
    use_kl_in_reward: bool = True
    kl_ctrl: KLControlConfig = field(default_factory=lambda: KLControlConfig(kl_coef=0.01))
    min_samples: ClassVar[int] = 1
