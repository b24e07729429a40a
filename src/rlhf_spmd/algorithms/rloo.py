"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the baseline of a response is the mean of the others; KL is in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.schema import inline
from rlhf_spmd.objectives.kl import KLControlConfig


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "rloo"
    policy: PolicyLossConfig = inline(PolicyLossConfig, loss_agg_mode="seq-mean-token-sum")
    kl: KLConfig = inline(KLConfig, kl_ctrl=KLControlConfig(kl_coef=0.05))
    advantage: GroupAdvantageConfig = inline(GroupAdvantageConfig, adv_estimator="rloo")
