"""Attention of a forward pass, which knows its tokens; causal attention for packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhf_spmd.kernels import AttentionRule, Ops, Packing, PageTarget, choose_ops, differentiable, on_device


class Attention(Protocol):
    """What a forward pass needs to know about its tokens.

    Where the kernel of a whole layer can take over ``attend``, an attention also has ``layer_kernel_args(layer_index)``, see
    :meth:`~rlhf_spmd.kernels.Ops.fused_layer`, and ``space``, the kernel's memory from one layer to the next: large blocks that are
    allocated anew cost a page fault per 4 KB.
    """

    positions: Tensor  # [T]

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention [T, Hq, D] of rotated ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D]. ``layer_index`` counts from 0
        within the stage."""


@runtime_checkable
class WritesPages(Protocol):
    """An attention whose keys and values can be written by the operation that makes them, see ``Ops.heads_to_pages``."""

    def page_target(self, layer_index: int) -> PageTarget:
        """Return where the layer's keys and values go."""

    def attend_written(self, layer_index: int, q: Tensor, rule: AttentionRule) -> Tensor:
        """Return :meth:`Attention.attend` of ``q`` after keys and values were written."""


@runtime_checkable
class HasCache(Protocol):
    """An attention of generation, which keeps keys and values in pages for later steps."""

    cache: Any


class MixedHeadAttention:
    """An attention of generation for models with ``ModelSpec.global_heads``: layers with these have pages, and so a context, of their
    own."""

    def __init__(self, full: Attention, global_heads: Attention) -> None:
        self.full = full
        self.global_heads = global_heads
        self.positions = full.positions

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return self.full.attend(layer_index, q, k, v, rule)


class PackedAttention:
    """Causal attention within each of several packed sequences (training and scoring).

    ``lengths``: tokens per sequence, in the order in which they are packed. ``positions`` [T] count from 0 in each.
    Sequences are sorted and padded to a common length only inside the attention, among sequences of similar length.
    ``ops``: what computes it; None: the best for the queries.

    ``token_index`` int64 [sum(lengths)] on the CPU: sequences that begin with the same tokens have these once; it says which of the T
    tokens lies at each place of the sequences, in the order in which they first do. Only attention lays the sequences out whole.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
        token_index: Tensor | None = None,
    ) -> None:
        assert all(n >= 0 for n in lengths), f"negative sequence length in {lengths}"
        self.packing = Packing([int(n) for n in lengths], torch.device(device))
        self._ops = ops
        positions = torch.cat([torch.arange(n) for n in self.packing.lengths] or [torch.arange(0)])
        self.copies = None if token_index is None else Copies(token_index, self.packing.device)
        positions = on_device(positions, self.packing.device)
        self.positions = positions if self.copies is None else positions[self.copies.firsts]
        self.space: Tensor | None = None
        joins = (ops is None or ops.joins_layers) and token_index is None
        self.layer_kernel_args = self.packing.layer_kernel_args if joins else None

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention [T, H * G, D] of ``q`` [T, H * G, D], ``k`` and ``v`` [T, H, D]. ``layer_index`` is not used: nothing is
        kept between layers."""
        assert len(q) == len(self.positions), f"{len(q)} tokens for sequences of {len(self.positions)} in all"
        ops = self._ops or choose_ops(q.dtype, q.device)
        if self.copies is None:
            return ops.attend_packed(q, k, v, self.packing, rule)
        # a token sees the same in each sequence that begins with it: the first one's output and query stand for all
        q, k, v = self.copies.spread(q, only_first=True), self.copies.spread(k), self.copies.spread(v)
        return self.copies.first(ops.attend_packed(q, k, v, self.packing, rule))


class Copies:
    """Where each of U tokens lies in sequences of T positions.

    ``token_index`` int64 [T]: the token at each position. Tokens are numbered in the order of their first positions.

    Gradients of copies are summed in their order and in fp32, so that equal runs have equal bits on GPUs too.
    """

    def __init__(self, token_index: Tensor, device: torch.device) -> None:
        order = torch.argsort(token_index, stable=True)
        counts = torch.bincount(token_index)
        starts = counts.cumsum(0) - counts
        self.token_index = on_device(token_index, device)
        self.firsts = on_device(order[starts], device)
        self._several: list[tuple[Tensor, Tensor]] = []  # tokens of equally many copies [S], and where these are [copies, S]
        for number in counts[counts > 1].unique().tolist():
            tokens = (counts == number).nonzero()[:, 0]
            positions = order[starts[tokens] + torch.arange(number)[:, None]]
            self._several.append((on_device(tokens, device), on_device(positions, device)))

    def spread(self, x: Tensor, only_first: bool = False) -> Tensor:
        """Return ``x`` [U, ...] laid out in the sequences, [T, ...]. ``only_first``: copies other than the first have no gradient."""

        def backward(_: object, grad: Tensor) -> tuple[Tensor]:
            return (grad.index_select(0, self.firsts) if only_first else self.sum(grad),)

        return differentiable(lambda x: (x.index_select(0, self.token_index), ()), backward, x)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums [U, ...] of ``x`` [T, ...] over the copies of each token, without a gradient."""
        total = x.index_select(0, self.firsts)
        for tokens, positions in self._several:
            copies = x.index_select(0, positions.flatten()).view(*positions.shape, *x.shape[1:])
            summed = copies.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
            total.index_copy_(0, tokens, summed.to(x.dtype))
        return total

    def first(self, x: Tensor) -> Tensor:
        """Return the rows [U, ...] of ``x`` [T, ...] at the first copies."""

        def backward(_: object, grad: Tensor) -> tuple[Tensor]:
            return (grad.new_zeros(len(self.token_index), *grad.shape[1:]).index_copy_(0, self.firsts, grad),)

        return differentiable(lambda x: (x.index_select(0, self.firsts), ()), backward, x)
