"""GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio that is clipped is the geometric mean over the whole response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.schema import inline


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "gspo"
    policy: PolicyLossConfig = inline(
        PolicyLossConfig, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4
    )
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False)
    takes_agents: ClassVar[bool] = False  # the loss is one of rows, and an episode may have several
