"""Attention by its definition, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels import AttentionRule


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Packed sequences: q [T, H * G, D], k and v [T, H, D] -> as q, and the log-sum-exps of the scores [H * G, T]."""
    outs, log_sums = [], []
    for queries, keys, values in zip(*(x.double().split(list(lengths)) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        positions = torch.arange(len(queries), device=q.device)
        past = positions[:, None] - positions
        seen = (past >= 0) & (past < (rule.window or len(queries)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None, None].expand(-1, len(queries), 1)], -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(queries)], values))
        log_sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(log_sums, 1)
