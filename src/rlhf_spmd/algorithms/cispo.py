"""CISPO (MiniMax 2025, arXiv 2506.13585): the ratio is a clipped weight without a gradient, so every token teaches."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.grpo import step
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.schema import inline


@dataclass(frozen=True)
class Config(grpo.Config):
    name: str = "cispo"
    policy: PolicyLossConfig = inline(PolicyLossConfig, loss_mode="cispo", clip_ratio_low=1.0)
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False)
