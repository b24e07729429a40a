"""REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262): rewards minus their group's mean, whitened over the batch."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.config.schema import inline


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "reinforce_plus_plus_baseline"
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False, use_kl_loss=True, kl_loss_type="k2")
    advantage: GroupAdvantageConfig = inline(GroupAdvantageConfig, adv_estimator="reinforce_plus_plus_baseline")
