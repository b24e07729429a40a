"""REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262): rewards minus their group's mean, whitened over the batch."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "reinforce_plus_plus_baseline"
    adv_estimator: str = "reinforce_plus_plus_baseline"
    use_kl_loss: bool = True
    kl_loss_type: str = "k2"
