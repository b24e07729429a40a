"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), in torch on any device.

A head's state S [K, D] is a memory of values by keys. A token with key k, value v, decay exp(g) and rate b changes it:

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  its output is S^T q

Queries and keys have length one; queries are divided by sqrt(K). Before the rule, a causal convolution over the last few tokens acts on
each channel. What is computed is fp32 at least, as in transformers.

Several tokens are computed in chunks: within a chunk, all corrections are the solution of one triangular system. One token is
computed by the formula above. The two differ in the last bits.

Shape legend: B sequences, S tokens of each, C channels, H key heads, G value heads per key head, K key_dim, D value_dim, N chunks of L.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens, as transformers and flash-linear-attention have it
EPS = 1e-6  # added to the squared length of queries and keys


class DeltaShape(NamedTuple):
    """The heads of one rank.

    - keys, values: number of key heads and of value heads
    - key_dim, value_dim: elements of a head
    - kernel: tokens that the convolution sees
    - fused_slices: number of equal parts of the channels, each with queries, keys and values
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    kernel: int
    fused_slices: int = 1

    @property
    def channels(self) -> int:
        """Return the columns of queries, keys and values of all heads."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


class DeltaStates(NamedTuple):
    """The state after the tokens so far.

    - inputs: [B, kernel - 1, C], the last inputs of the convolution
    - memory: [B, H, G, K, D]
    """

    inputs: Tensor
    memory: Tensor


class MixerWeights(NamedTuple):
    """The parameters of a layer beside its matrices.

    - conv: [C, 1, kernel]
    - decay, decay_bias: [H * G]
    - norm, eps: weight [D] and epsilon of the norm
    """

    conv: Tensor
    decay: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float


class StateRows(NamedTuple):
    """The states of one token of each row in a layer.

    - inputs, memory: [N, kernel - 1, C] and [N, H, G, K, D], the states of all slots
    - slots: int64 [B], the slot of each row; -1: padding, whose output is that of the first row
    - positions: int64 [B]; at 0 the row begins with zeros
    """

    inputs: Tensor
    memory: Tensor
    slots: Tensor
    positions: Tensor


@runtime_checkable
class HasDeltaRuleStep(Protocol):
    """Ops with a kernel for one token of each row."""

    def delta_rule_step(self, product: Tensor, weights: MixerWeights, shape: DeltaShape, states: StateRows) -> Tensor:
        """Return the input of the last matrix [B, H * G, D] from the first product's rows [B, columns]. Updates the states."""


def delta_rule(
    x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape, valid: Tensor | None, states: DeltaStates | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs [B, S, H * G, D] in the dtype of x, the inputs of the convolution with those before them
    [B, kernel - 1 + S, C], and the memory behind the last token.

    ``x``: [B, S, C]; ``decay`` g and ``rate`` b: [B, S, H * G]; ``weight``: [C, 1, kernel], of the convolution. ``valid`` [B, S, 1]
    is False for tokens behind a sequence's end, which leave the memory as it is. ``states`` None: sequences begin.
    """
    before = x.new_zeros(len(x), shape.kernel - 1, x.shape[2]) if states is None else states.inputs
    inputs = torch.cat([before, x], 1)
    q, k, v = _heads(_convolve(inputs, weight), shape)
    wide = q.dtype
    decay, rate = decay.to(wide), rate.to(wide)
    if valid is not None:
        decay, rate = decay * valid, rate * valid
    by_head = (*x.shape[:2], shape.keys, shape.values // shape.keys)
    memory = v.new_zeros(len(x), shape.keys, by_head[3], shape.key_dim, shape.value_dim) if states is None else states.memory
    rule = _one_token if x.shape[1] == 1 else _chunks
    out, memory = rule(q, k, v, decay.view(by_head), rate.view(by_head), memory)
    return out.flatten(2, 3).to(x.dtype), inputs, memory


def _convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the convolution [B, S, C] of ``inputs`` [B, kernel - 1 + S, C], in fp32 at least."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    inputs, weight = inputs.to(wide), weight.to(wide)
    kernel = weight.shape[2]
    num_tokens = inputs.shape[1] - kernel + 1
    total = inputs[:, :num_tokens] * weight[:, 0, 0]
    for tap in range(1, kernel):
        total = total + inputs[:, tap : tap + num_tokens] * weight[:, 0, tap]
    return F.silu(total)


def _heads(x: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [B, S, H, K], of length 1 / sqrt(K) and 1, and v [B, S, H, G, D] of ``x`` [B, S, C]."""
    q, k, v = split_channels(x, shape)
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPS) for each in (q, k))
    return q * shape.key_dim**-0.5, k, v


def split_channels(x: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [B, S, H, K], and v [B, S, H, G, D] of ``x`` [B, S, C]."""
    batch, length = x.shape[:2]
    widths = [shape.keys * shape.key_dim, shape.keys * shape.key_dim, shape.values * shape.value_dim]
    parts = x.view(batch, length, shape.fused_slices, -1).split([width // shape.fused_slices for width in widths], 3)
    q, k = (part.reshape(batch, length, shape.keys, shape.key_dim) for part in parts[:2])
    return q, k, parts[2].reshape(batch, length, shape.keys, -1, shape.value_dim)


def _one_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and memory for S = 1, see :func:`_chunks`."""
    memory = memory * decay[:, 0, :, :, None, None].exp()
    key = k[:, 0, :, None, :, None]  # [B, H, 1, K, 1]
    query = q[:, 0, :, None, None, :]  # [B, H, 1, 1, K]
    recalled = key.transpose(3, 4) @ memory
    memory = memory + key * ((v[:, 0, :, :, None] - recalled) * rate[:, 0, :, :, None, None])
    return (query @ memory).transpose(2, 3).transpose(1, 2), memory


def _chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, S, H, G, D] and the memory behind the last token.

    ``q`` and ``k``: [B, S, H, K]; ``v``: [B, S, H, G, D]; ``decay`` and ``rate``: [B, S, H, G]; ``memory``: [B, H, G, K, D]."""
    length = q.shape[1]
    size = min(CHUNK, length)
    missing = -length % size

    def cut(x: Tensor) -> Tensor:
        """Return ``x`` [B, S, heads..., n] as [B, heads..., N, L, n]."""
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, missing)).unflatten(1, (-1, size))
        return x.movedim((1, 2), (-3, -2))

    q, k = cut(q)[:, :, None], cut(k)[:, :, None]  # the value heads of a key head share them
    v, rate = cut(v), cut(rate[..., None])  # [B, H, G, N, L, .]
    sums = cut(decay[..., None]).cumsum(-2)
    is_future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # decay from the column's token to the row's
    pair_decay = (sums - sums.transpose(-1, -2)).masked_fill(is_future, -torch.inf).exp()
    system = (k @ k.transpose(-1, -2)) * pair_decay * rate  # whose diagonal is taken to be one
    right_sides = torch.cat([v * rate, k * (rate * sums.exp())], -1)
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.transpose(-1, -2)) * pair_decay
    last = sums[..., -1:, :]
    queries = q * sums.exp()
    writes = (k * (last - sums).exp()).transpose(-1, -2)
    heads = memory.shape[:3]
    memory = memory.flatten(0, 2)
    # unbound at once: each index into all chunks would have a gradient of all chunks
    parts = (x.flatten(0, 2).unbind(1) for x in (values, reads, queries, scores, writes, last.exp()))
    outs = []
    for value, read, query, score, write, memory_decay in zip(*parts, strict=True):
        change = torch.baddbmm(value, read, memory, alpha=-1)
        outs.append(torch.baddbmm(score @ change, query, memory))
        memory = torch.baddbmm(memory * memory_decay, write, change)
    out = torch.stack(outs, 1).flatten(1, 2)[:, :length].unflatten(0, heads)  # [B, H, G, S, D]
    return out.permute(0, 3, 1, 2, 4), memory.unflatten(0, heads)
