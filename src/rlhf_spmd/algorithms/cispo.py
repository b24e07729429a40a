"""CISPO (MiniMax 2025, arXiv 2506.13585): the ratio is a clipped weight without a gradient, so every token teaches."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "cispo"
    loss_mode: str = "cispo"
    clip_ratio_low: float | None = 1.0
