"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted rewards to come, KL on every token, whitened over the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.config.schema import inline
from rlhf_spmd.objectives.kl import KLControlConfig


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "reinforce_plus_plus"
    kl: KLConfig = inline(KLConfig, kl_ctrl=KLControlConfig(kl_coef=0.01))
    advantage: GroupAdvantageConfig = inline(GroupAdvantageConfig, adv_estimator="reinforce_plus_plus")
    min_samples: ClassVar[int] = 1
