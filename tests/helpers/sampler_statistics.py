"""Draws of the sampler, and how far they are from given probabilities."""

from __future__ import annotations

import numpy as np
import torch

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import row_keys, uniform


def draws(n: int, seed: int = 0, step: int = 0) -> torch.Tensor:
    rows = torch.arange(n)
    return uniform(row_keys(seed, torch.tensor(step), rows), torch.zeros_like(rows))


def exact_probabilities(logits: np.ndarray, s: SamplingConfig) -> np.ndarray:
    """Plain fp64, one row, in loops: temperature, min_p, top_k, top_p."""
    p = np.exp(logits.astype(np.float64) / s.temperature)
    p /= p.sum()
    p[p < s.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if s.top_k > 0:
        p[order[s.top_k :]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= s.top_p:
            p[token] = 0.0
        mass += p[token]
    return p / p.sum()


def chi_square_z(counts: np.ndarray, p: np.ndarray) -> float:
    """Wilson-Hilferty: the chi-square statistic as a standard normal deviate."""
    kept = p > 0
    expected = counts.sum() * p[kept]
    statistic, freedom = ((counts[kept] - expected) ** 2 / expected).sum(), kept.sum() - 1
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
