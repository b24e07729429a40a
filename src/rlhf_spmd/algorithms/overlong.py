"""DAPO's penalty for responses near the length limit (Yu et al. 2025, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveInt


@dataclass(frozen=True)
class OverlongConfig:
    """``overlong_buffer``.

    - enable: responses near the limit lose score
    - len: tokens before the limit in which they lose it; null: a fifth of `max_response_length`
    - penalty_factor: the loss of a response of full length
    """

    enable: bool = True
    len: PositiveInt | None = None
    penalty_factor: NonNegativeFloat = 1.0
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"enable": ("len", "penalty_factor")}


def overlong_penalty(config: OverlongConfig, lengths: Tensor, limit: int) -> Tensor:
    """Return min(0, (limit - len - length) / len) * penalty_factor for responses of these ``lengths``, float64 [rows]."""
    room = config.len or max(limit // 5, 1)
    return ((limit - room - lengths) / room).clamp(max=0.0) * config.penalty_factor * config.enable
