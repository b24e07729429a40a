"""Multi-head latent attention of a layer on one tensor-parallel rank, see :class:`~rlhf_spmd.models.layer_kinds.Latent`.

Training and scoring make keys and values of all heads from each token's short vector, and attend as other models do. Values are
filled up with zeros to the size of keys, which the kernels take.

Generation keeps one entry for each token, the same on all tp ranks: the normed vector and the rotated part of the key. Queries are
multiplied by the matrix that would have made the keys, and what the attention returns by the one that would have made the values.
So a head's keys are the entries, and so are its values up to ``kv_rank``. A score is then the sum of other products than in training,
so log-probs differ in the last bits.

Shape legend: R rows of all tokens and padding, T tokens, H heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import AttentionRule, Ops
from rlhf_spmd.kernels.dense_attention import LatentKeys, latent_heads
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.models.attention import Attention, HasCache, WritesPages
from rlhf_spmd.models.layer_kinds import Latent
from rlhf_spmd.models.layers import Linear, RMSNorm
from rlhf_spmd.models.rope import Rope
from rlhf_spmd.models.tensor_parallel import copy_to_tp
from rlhf_spmd.parallel.collectives import Group

EPS = 1e-6  # epsilon of the norms, whatever rms_norm_eps is


class LatentAttention(nn.Module):
    """Latent attention, from the normed hidden state to the heads' outputs. ``linear`` and ``norm`` build a parameter's holder.

    Every rank has q_a, kv_a and the norms whole, and uses them for its own heads: their gradients are sums over tp.
    """

    def __init__(
        self,
        ops: Ops,
        sizes: Latent,
        heads: int,
        interleaved: bool,
        tp: Group,
        linear: Callable[[str], Linear],
        norm: Callable[[int, float], RMSNorm],
    ) -> None:
        super().__init__()
        self.ops = ops
        self.sizes = sizes
        self.heads = heads
        self.interleaved = interleaved
        self.tp = tp
        self.q_a = None if sizes.q_rank is None else linear("latent.q_a")
        self.q_a_norm = None if sizes.q_rank is None else norm(sizes.q_rank, EPS)
        self.q_b = linear("latent.q_b")
        self.kv_a = linear("latent.kv_a")
        self.kv_a_norm = norm(sizes.kv_rank, EPS)
        self.kv_b = linear("latent.kv_b")

    def enter(self, x: Tensor, recomputed: bool) -> tuple[Tensor, Tensor]:
        """Return the short vectors of ``x`` [R, hidden]: that of the queries, or without one the queries, and that of keys and values
        [R, cached_elements]."""
        q = self.q_b.product(self.ops, x, recomputed) if self.q_a is None else self._product_of_whole(self.q_a, x, recomputed)
        return q, self._product_of_whole(self.kv_a, x, recomputed)

    def attend(
        self, products: tuple[Tensor, ...], rope: Rope, attention: Attention, num_tokens: int, index: int, rule: AttentionRule
    ) -> Tensor:
        """Return the attention [num_tokens, H, value_dim]. ``products``: the result of :meth:`enter` for R rows; those from
        ``num_tokens`` on are padding."""
        sizes, ops = self.sizes, self.ops
        q, short = products
        if self.q_a_norm is not None:
            q = self.q_b.product(ops, self._normed(q, self.q_a_norm), False)
        q = q.view(len(q), self.heads, -1)
        if isinstance(attention, HasCache):
            return self._attend_entries(q, short, rope, attention, num_tokens, index, rule)
        compressed, k_rotated = short.split([sizes.kv_rank, sizes.rope_dim], 1)
        q_plain, q_rotated = q.split([sizes.nope_dim, sizes.rope_dim], 2)
        q_rotated, k_rotated = (ops.rotate(x, rope.cos, rope.sin, self.interleaved) for x in (q_rotated, k_rotated[:, None]))
        compressed = self._normed(compressed, self.kv_a_norm)
        expanded = self.kv_b.product(ops, compressed, False).view(len(q), self.heads, -1)
        k_plain, v = expanded.split([sizes.nope_dim, sizes.value_dim], 2)
        heads = torch.cat([q_plain, q_rotated], 2), torch.cat([k_plain, k_rotated.expand(-1, self.heads, -1)], 2), v
        q, k, v = (pad_rows(x, sizes.padded_head_dim, 2)[:num_tokens] for x in heads)
        return attention.attend(index, q, k, v, rule)[..., : sizes.value_dim]

    def _attend_entries(
        self, q: Tensor, short: Tensor, rope: Rope, attention: Attention, num_tokens: int, index: int, rule: AttentionRule
    ) -> Tensor:
        """Return :meth:`attend` in generation: [num_tokens, H, value_dim]. ``q``: [R, H, nope_dim + rope_dim]; ``short``: [R,
        cached_elements]."""
        assert self.kv_b.lora is None, "generation merges adapters into weights"
        sizes = self.sizes
        matrices = self.kv_b.weight.view(self.heads, -1, sizes.kv_rank)
        to_keys, to_values = matrices.split([sizes.nope_dim, sizes.value_dim], 1)
        keys = LatentKeys(self.kv_a_norm.weight, self.kv_a_norm.eps, to_keys, rope.cos, rope.sin, self.interleaved)
        if isinstance(attention, WritesPages):
            q = self.ops.latent_to_pages(q, short, keys, attention.page_target(index))
            mixed = attention.attend_written(index, q[:num_tokens], rule)
        else:
            q, entries = (x[:num_tokens] for x in latent_heads(self.ops, q, short, keys))
            mixed = attention.attend(index, q, entries[:, None], entries[:, None], rule)[..., : sizes.kv_rank]
        out = mixed.new_empty(num_tokens, self.heads, sizes.value_dim)
        torch.bmm(mixed.transpose(0, 1), to_values.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def _product_of_whole(self, linear: Linear, x: Tensor, recomputed: bool) -> Tensor:
        """Return the product with a matrix that is replicated on tp. An adapter's gradient is summed later."""
        if linear.lora is not None:
            return linear.product(self.ops, x, recomputed, linear.bias)
        weight, bias = (None if part is None else copy_to_tp(part, self.tp) for part in (linear.weight, linear.bias))
        assert weight is not None
        return self.ops.linear(x, weight, bias, recomputed)

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.ops.rms_norm(x, copy_to_tp(norm.weight, self.tp), norm.eps)
