"""Arguments of attention and of whole layers: the rule of the scores, the shape of the heads, parameters, addresses.

Shape legend: H KV heads, G query heads per KV head, D head_dim, T tokens, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns scores into probabilities.

    - scale, softcap: softmax(softcap * tanh(q k^T * scale / softcap)); without softcap, softmax(q k^T * scale)
    - window: a query at position i sees keys j with i - window < j <= i; without window, all j <= i
    - sinks: [query heads], one more score of each head, as of a key whose value is 0. A parameter; rules are compared without it
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = field(default=None, compare=False, repr=False)

    def sinks_of_rows(self, kv_heads: int, rows: int, heads_dim: int = 1) -> Tensor | None:
        """Return the sinks [1, kv_heads, rows, 1], or [kv_heads, 1, rows, 1] with ``heads_dim`` 0; None without sinks. In the rows the
        G query heads of a KV head lie beside each other."""
        if self.sinks is None:
            return None
        heads = self.sinks.view(kv_heads, -1)
        return heads.repeat(1, -(-rows // heads.shape[1]))[:, :rows, None].unsqueeze(1 - heads_dim)


Norms = tuple[Tensor | None, Tensor | None]  # weights [D] of the norms of queries and keys


@dataclass(frozen=True)
class HeadShape:
    """How a token's row of the qkv product is divided into heads.

    - queries, keys: number of query heads and of key heads; there are as many value heads as key heads
    - dim: elements of a head
    - fused_slices: number of equal parts of the row, each with queries, keys and values
    - eps, unit_offset: options of the norms of queries and keys
    - interleaved: neighbours are rotated together, not a dim of the first half and one of the second
    """

    queries: int
    keys: int
    dim: int
    fused_slices: int = 1
    eps: float = 1e-6
    unit_offset: bool = False
    interleaved: bool = False


class PageTarget(NamedTuple):
    """Where a step's keys and values of a layer go.

    ``pages`` [2, H, N, page_size * D]; ``cache_slots`` int64 [T]: page * page_size + offset of each token.
    """

    pages: Tensor
    cache_slots: Tensor


class LayerParts(NamedTuple):
    """The parameters of a layer, each with a weight and a bias; None for a norm that the layer does not have."""

    input_norm: Any | None
    qkv: Any
    q_norm: Any | None
    k_norm: Any | None
    out: Any
    attention_norm: Any | None
    post_norm: Any | None
    gate_up: Any
    down: Any
    mlp_norm: Any | None


@dataclass(frozen=True)
class LayerOptions:
    """What layers differ in.

    - heads: the heads on one rank; their eps, unit_offset and interleaved hold for all norms and rotations of the layer
    - inner: columns of the MLP
    - gelu: the MLP's activation is gelu, not silu
    - norms_over_all_heads: q and k have one norm over all heads, not one per head
    - residual: the factor of what is added to the rows
    """

    heads: HeadShape
    inner: int
    gelu: bool
    norms_over_all_heads: bool = False
    residual: float = 1.0


class LayerKernelArgs(NamedTuple):
    """Where the attention's inputs are, for the C++ kernel of a whole layer: addresses and sizes. All but the first two are 0 without
    a cache.

    - items: address of the rows' items, see :meth:`CppOps.attend_paged`, or without a cache of the bounds of the sequences
    - num_items: number of rows, or of sequences
    - page_table: address of the page table
    - cache: address of the layer's pages
    - num_pages, page_size, page_elements: pages of the cache, tokens of a page, and elements of a page of one head
    """

    items: int
    num_items: int
    page_table: int = 0
    cache: int = 0
    num_pages: int = 0
    page_size: int = 0
    page_elements: int = 0
