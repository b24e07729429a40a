"""Context parallelism: the ranks of a group share the tokens of the same sequences (Ulysses: Jacobs et al. 2023).

Rank r of c holds the tokens r, r + c, r + 2c, ... of a micro-batch, so all ranks have equally many tokens of each response. All
operations but the attention are of single tokens and stay as they are. Around the attention, all-to-alls give each rank all tokens of
1 / c of the heads, and then its own tokens of all heads. So attention is exact and causally balanced. A layer sends
2 * (Hq + Hkv') * D numbers a token in its forward pass, of which the part (c - 1) / c leaves the rank. Hkv' is Hkv, or c if that is
more: then KV heads are copied. The backward pass sends as much.

What the last stage computes for a token is summed into its place on every rank, so losses see whole rows and are the same on all ranks
of the group. Each rank's gradient is that of its own tokens; the engine sums over the copies of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_spmd.kernels import AttentionRule, differentiable, on_device
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.models.attention import Attention
from rlhf_spmd.models.tensor_parallel import reduce_from_tp
from rlhf_spmd.parallel.collectives import Group

LABEL = "context_parallel"  # under which the all-to-alls are counted


def rows_of(num_tokens: int, cp: Group) -> int:
    """Return the number of tokens of each rank, of ``num_tokens`` in all. On some ranks one of them is padding."""
    return -(-num_tokens // cp.size)


def own_tokens(x: Tensor, cp: Group) -> Tensor:
    """Return this rank's tokens [rows_of(T), ...] of ``x`` [T, ...]; padding is 0."""
    if cp.size == 1:
        return x
    rows = rows_of(len(x), cp)
    return pad_rows(x, rows * cp.size).unflatten(0, (rows, cp.size))[:, cp.rank].contiguous()


class SharedTokens:
    """Attention over all tokens of ``inner``, for a decoder that runs on the tokens of this rank.

    ``positions``: the positions of this rank's tokens; padding has 0.
    """

    def __init__(self, inner: Attention, cp: Group) -> None:
        self._inner = inner
        self._cp = cp
        self._num_tokens = len(inner.positions)
        self.positions = own_tokens(inner.positions, cp)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention [T', Hq, D] of this rank's T' tokens: ``q`` [T', Hq, D], ``k`` and ``v`` [T', Hkv, D].

        Collective over cp: every rank of it must call, and run its backward, in program order.
        """
        cp = self._cp.size
        copies = max(cp // k.shape[1], 1)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        heads = [x.shape[1] // cp for x in (q, k, v)]
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.chunk(cp)[self._cp.rank])
        sent = torch.cat([x.unflatten(1, (cp, -1)) for x in (q, k, v)], 2)  # [T', cp, hq + 2 hkv, D]
        tokens = self._exchange(sent).flatten(0, 1)[: self._num_tokens]  # [T, hq + 2 hkv, D]
        q_whole, k_whole, v_whole = tokens.split(heads, 1)
        mixed = self._inner.attend(layer_index, q_whole, k_whole, v_whole, rule)
        rows = pad_rows(mixed, len(q) * cp).unflatten(0, (len(q), cp))  # [T', cp, hq, D]
        return self._exchange(rows).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """Return all tokens' rows [T', cp, ...] for this rank's heads, from ``x`` [T', cp, ...], this rank's tokens for all heads;
        or the way back."""
        swapped = differentiable(lambda x: (self._to_all(x), ()), lambda _, grad: (self._to_all(grad),), x.transpose(0, 1))
        return swapped.transpose(0, 1)

    def _to_all(self, x: Tensor) -> Tensor:
        return self._cp.all_to_all(x.contiguous(), LABEL)


def share_tokens(attention: Attention, cp: Group) -> Attention:
    """Return ``attention`` for a decoder that runs on this rank's tokens; without cp ``attention`` itself."""
    return attention if cp.size == 1 else SharedTokens(attention, cp)


def at_tokens(
    hidden: Tensor, positions: Tensor, cp: Group, compute: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """Return ``compute(hidden [N, hidden], index [N])`` for the tokens at ``positions`` int64 [N], on the CPU: numbers [N] each.

    ``hidden``: of this rank's tokens. ``index`` says which of the N ``compute`` gets here; without cp all, on the device. Every rank of
    cp returns the numbers of all tokens, with gradients for its own.
    Collective over cp: every rank of it must call, in program order.
    """
    index = torch.arange(len(positions))
    if cp.size > 1:
        index = (positions % cp.size == cp.rank).nonzero()[:, 0]
    rows = on_device(positions[index] // cp.size, hidden.device)
    index = on_device(index, hidden.device)
    outputs = compute(hidden[rows], index)
    if cp.size == 1:
        return list(outputs)
    placed = [part.new_zeros(len(positions)).index_copy(0, index, part) for part in outputs]
    return [reduce_from_tp(part, cp, "cp_outputs") for part in placed]
