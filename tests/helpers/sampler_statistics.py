"""Draws of the sampler, and how far they are from given probabilities."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import row_keys, uniform


def draws(n: int, seed: int = 0, step: int = 0) -> torch.Tensor:
    rows = torch.arange(n)
    return uniform(row_keys(seed, torch.tensor(step), rows), torch.zeros_like(rows))


def kept_weights(scores: NDArray[np.float32], s: SamplingConfig) -> NDArray[np.float64]:
    """One row in the terms of ``SamplingConfig``: fp32 weights, all else in float64 and by loops over a sorted list."""
    w = np.exp((scores - scores.max()) / np.float32(s.temperature)).astype(np.float64)
    w[w < s.min_p] = 0.0
    if 0 < s.top_k < len(w):
        w[w < np.sort(w)[-s.top_k]] = 0.0
    if s.top_p < 1.0:
        mass, goal = 0.0, s.top_p * w.sum()
        for token in np.argsort(-w, kind="stable"):
            if mass >= goal:
                w[token] = 0.0
            mass += w[token]
    return w


def chi_square_z(counts: np.ndarray, p: np.ndarray) -> float:
    """Wilson-Hilferty: the chi-square statistic as a standard normal deviate."""
    kept = p > 0
    expected = counts.sum() * p[kept]
    statistic, freedom = ((counts[kept] - expected) ** 2 / expected).sum(), kept.sum() - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
