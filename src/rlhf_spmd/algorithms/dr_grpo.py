"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without what favours long wrong answers and easy or hard prompts."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.schema import inline


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "dr_grpo"
    policy: PolicyLossConfig = inline(PolicyLossConfig, loss_agg_mode="seq-mean-token-sum-norm")
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False)
    advantage: GroupAdvantageConfig = inline(GroupAdvantageConfig, norm_adv_by_std_in_grpo=False)
