"""Queries and keys of latent attention (MLA) in generation, in torch. A token has one key for all heads, which the cache holds.

Shape legend: T tokens, H query heads, N dims of a head that are not rotated, E those that are, C elements of the short vector.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LatentKeys(NamedTuple):
    """How keys come about, and queries that fit them.

    - weight [C], eps: of the norm of the short vector
    - to_keys [H, N, C]: the matrices that would make each head's keys from it; queries are multiplied by them instead
    - cos, sin [T, 1, E / 2], interleaved: as for ``Ops.rotate``
    """

    weight: Tensor
    eps: float
    to_keys: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


def latent_heads(ops: Any, q: Tensor, made: Tensor, keys: LatentKeys) -> tuple[Tensor, Tensor]:
    """Queries [T, H, N + E] and ``made`` [T, C + E], the short vector and what is rotated -> queries [T, H, C + E] and keys [T, C + E].
    Without gradients; ``ops`` norm and rotate."""
    (rank, nope), turns = (keys.weight.shape[0], keys.to_keys.shape[1]), (keys.cos, keys.sin, keys.interleaved)
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), keys.to_keys).transpose(0, 1)
    q = torch.cat([absorbed, ops.rotate(q[..., nope:], *turns)], 2)
    normed = ops.rms_norm(made[:, :rank], keys.weight, keys.eps)
    return q, torch.cat([normed, ops.rotate(made[:, None, rank:], *turns)[:, 0]], 1)
