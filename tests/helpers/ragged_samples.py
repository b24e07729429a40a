"""Ragged rows with values and rewards, and a plain GAE."""

import torch

LENGTHS = [5, 1, 9, 3, 3, 12, 1, 7]


def sample(seed, count, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * spread


def rows_of(x, lengths):
    """Nested lists of floats: what the naive re-derivations work on."""
    out, start = [], 0
    for n in lengths:
        out.append([float(v) for v in x[start : start + n]])
        start += n
    return out


def flat(rows):
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


def naive_gae(rewards, values, gamma, lam):
    """Equation 16 as it is written: a sum over all later TD errors, quadratic in the length."""
    out = []
    for r, v in zip(rewards, values, strict=True):
        deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        out.append([sum((gamma * lam) ** k * deltas[t + k] for k in range(len(v) - t)) for t in range(len(v))])
    return out
