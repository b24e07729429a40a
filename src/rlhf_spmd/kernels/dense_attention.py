"""Attention by torch's own kernels, or by plain products where these lack something; queries and keys of latent attention.

Shape legend: B sequences, H KV heads, G query heads per KV head, R query rows, L keys, D head_dim. In latent attention (MLA) T tokens,
H query heads, N dims of a head that are not rotated, E those that are, C elements of the short vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.layer_args import AttentionRule

HEAD_DIMS = 8  # torch's fused kernels take multiples of it


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Return torch's attention [B, H * G, R, D]. ``q``: [B, H * G, R, D]; ``k`` and ``v``: [B, H, L, D].

    ``allowed`` None is causal, else it includes the rule's window. ``sinks``: the rule's, as they broadcast to the scores. torch's
    kernels have no sinks, so a key with the value 0 stands for them. They have no softcap: plain products then.
    """
    if rule.softcap is None and sinks is not None:
        return _attend_with_sinks(q, k, v, rule, allowed, sinks)
    if rule.softcap is None:
        grouped = q.shape[1] != k.shape[1]
        if grouped and (allowed is not None or q.dtype == torch.float32):
            # Of torch's kernels only flash attention groups heads, and it takes no mask and no float32: without copies of the
            # heads everything else falls back to products that keep [B, H * G, R, L].
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=rule.scale, enable_gqa=grouped
        )
    assert sinks is None, "no model has both sinks and a softcap"
    if allowed is None:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)  # bf16 would round scores of 20 by 0.06
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2))
    scores = torch.tanh(scores * (rule.scale / rule.softcap)) * rule.softcap
    return torch.matmul(torch.softmax(scores.masked_fill(~allowed, -math.inf), -1).to(v.dtype), v)


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor | None, sinks: Tensor) -> Tensor:
    """Return :func:`attend_dense` with one more dim and one more key, the first: their product is the sink. Dims are a multiple of
    ``HEAD_DIMS`` then, which torch's fused kernels ask for. Half precision rounds a sink like a query."""
    dim = q.shape[-1]
    extra_dims = HEAD_DIMS - dim % HEAD_DIMS
    sink_dim = (sinks / rule.scale).to(q.dtype).expand(*q.shape[:-1], 1)
    q = torch.cat([q, sink_dim, q.new_zeros(*q.shape[:-1], extra_dims - 1)], -1)
    k, v = F.pad(k, (0, extra_dims, 1, 0)), F.pad(v, (0, extra_dims, 1, 0))
    k[..., 0, dim] = 1
    plain = AttentionRule(rule.scale)
    if allowed is None:  # one more query, which nobody reads, keeps causal attention square
        return attend_dense(F.pad(q, (0, 0, 1, 0)), k, v, plain, None)[..., 1:, :dim]
    return attend_dense(q, k, v, plain, F.pad(allowed, (1, 0), value=True))[..., :dim]


def sink_gradients(sinks: Sequence[Tensor], grad: Tensor, out: Tensor, log_sums: Tensor) -> list[Tensor]:
    """Return the gradients of the ``sinks`` [heads], of which there are one or none, from the output [T, heads, D], its gradient
    and the scores' log-sum-exps [T, heads], sinks included."""
    projection = (grad.float() * out.float()).sum(-1)
    return [-(torch.exp(sink.float() - log_sums) * projection).sum(0).to(sink.dtype) for sink in sinks]


class LatentKeys(NamedTuple):
    """What keys of latent attention in generation, and their queries, are made with. A token has one key for all heads, which the
    cache holds.

    - weight, eps: [C], the weight of the short vector's norm, and its epsilon
    - to_keys: [H, N, C], the matrices that would make each head's keys of the short vector; queries are multiplied by them instead
    - cos, sin, interleaved: tables [T, 1, E / 2] and order of pairs, as for ``Ops.rotate``
    """

    weight: Tensor
    eps: float
    to_keys: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


def latent_heads(ops: Any, q: Tensor, short: Tensor, keys: LatentKeys) -> tuple[Tensor, Tensor]:
    """Return queries [T, H, C + E] and keys [T, C + E], without gradients.

    ``q``: [T, H, N + E]; ``short`` [T, C + E]: the short vector and the elements that are rotated. ``ops`` norm and rotate."""
    rank, nope = keys.weight.shape[0], keys.to_keys.shape[1]
    rotation = keys.cos, keys.sin, keys.interleaved
    absorbed = torch.bmm(q[..., :nope].transpose(0, 1), keys.to_keys).transpose(0, 1)
    q = torch.cat([absorbed, ops.rotate(q[..., nope:], *rotation)], 2)
    normed = ops.rms_norm(short[:, :rank], keys.weight, keys.eps)
    return q, torch.cat([normed, ops.rotate(short[:, None, rank:], *rotation)[:, 0]], 1)
