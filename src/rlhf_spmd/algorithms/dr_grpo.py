"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without what favours long wrong answers and easy or hard prompts."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "dr_grpo"
    norm_adv_by_std_in_grpo: bool = False
    loss_agg_mode: str = "seq-mean-token-sum-norm"
