"""GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio that is clipped is that of the whole response, by its geometric mean."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.algorithms.base import validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig
from rlhf_spmd.algorithms.grpo import step


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "gspo"
    loss_mode: str = "gspo"
    loss_agg_mode: str = "seq-mean-token-mean"
    clip_ratio_low: float | None = 3e-4
    clip_ratio_high: float | None = 4e-4
