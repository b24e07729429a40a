"""Batch-invariant arithmetic on CPUs, in torch.

Batch-invariant means: a row's output bits depend on that row and the weights alone. A query's bits depend on that query, its keys and
its values alone: not on the rest of the batch, how many queries are computed at once, or how far keys are padded.

Three rules give this, measured with matrix products of both MKL and oneDNN:

- Every product has enough rows (``min_rows``).
- Key lengths are multiples of KEY_BLOCK.
- Probabilities times values are computed in blocks of KEY_BLOCK keys and added in order, so blocks beyond a query's keys add exactly 0.

Shape legend: B sequences, H KV heads, G query heads per KV head, R query rows (S queries * G), L keys, D head_dim, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import KEY_BLOCK, QUERY_BLOCK, AttentionRule, Packing, PaddedGroup, pad_rows, round_up, visible

HEAD_ALIGN = 8  # MKL is not exact for p v with 10 columns; none of the multiples of 8 showed that
WIDE_ELEMENTS = 1 << 18  # of a bf16 matrix as fp32 at a time: the copy then lies in the cache, too
MAX_SCORES = 1 << 22  # elements of one score matrix; larger groups of sequences are cut into several


class BatchInvariantOps(Ops):
    chunk_logits, backward_rows, wide_head = 1 << 22, 1 << 10, True  # 16 MiB of logits

    def min_rows(self, numel: int, inner: int) -> int:
        """Return the fewest rows of a batch-invariant product. MKL's kernels for AVX512 cut the sums of fewer rows than ``inner`` / 24
        in two, up to 15 rows (seen on Ice Lake for all of 23 lengths up to 14,336)."""
        return max(super().min_rows(numel, inner), min(inner // 24 + 1, 16))

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        """Return True if a row's bits do not depend on the batch. With several threads they do:
        torch and MKL divide products by their size."""
        needed = {dtype, torch.promote_types(dtype, torch.float32)}  # the logits' too
        return threads == 1 and all(_multiplies_exactly(each, torch.get_float32_matmul_precision()) for each in needed)

    def wide_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product in fp32. The fp32 copy of the weight is made a part at a time: that of a large vocabulary is larger than
        all else that the head needs."""
        x, parts = x.float(), max(weight.numel() // WIDE_ELEMENTS, 1)
        if parts == 1:
            return F.linear(x, weight.float())
        out = x.new_empty(len(x), len(weight))
        # parts of nearly one size: a product with a single column would not be exact
        for columns, part in zip(out.tensor_split(parts, 1), weight.tensor_split(parts), strict=True):
            torch.mm(x, part.float().t(), out=columns)
        return out

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        """A row's bits do not depend on the others."""
        wide = torch.promote_types(out.dtype, torch.float32)
        columns = right.to(wide).t().contiguous()
        product = self.linear(pad_rows(left.to(wide), self.min_rows(columns.numel(), columns.shape[1])), columns)[: len(out)]
        out.copy_(product.mul_(scale).add_(out))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor) -> Tensor:
        """Return the attention of ``q`` [H, B, R, D] over ``k`` and ``v`` [H, B, L, D]: [H, B, R, D]. ``allowed``: [1, B or 1, R, L].

        Keys and values that no row sees must still be finite; a row that sees no key gives NaN. L is padded here to a multiple of
        KEY_BLOCK, R to a few rows: callers that gather pages of such a length pay no copy. With grouped-query attention the G
        query heads of a KV head are rows: q [H, B, S * G, D]. bf16 is computed in fp32.
        """
        rows, missing, wide = q.shape[2], -k.shape[2] % KEY_BLOCK, torch.promote_types(q.dtype, torch.float32)
        if missing:
            allowed, k, v = F.pad(allowed, (0, missing)), F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))
        enough = self._attention_rows(q)
        if rows < enough:
            q, allowed = pad_rows(q, enough, 2), F.pad(allowed, (0, 0, 0, enough - rows), value=True)
        sinks = rule.sinks_of_rows(q.shape[0], q.shape[2], 0)
        p = _probabilities(q.to(wide).contiguous(), k.to(wide).contiguous(), allowed, rule, sinks)
        return _weighted_values(p, v.to(wide).contiguous())[:, :, :rows].to(q.dtype)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Return the attention of all sequences as one autograd node: no slices, pads or copies to undo one by one."""
        wide, parts = torch.promote_types(q.dtype, torch.float32), packing.padded_groups(q.shape[1], MAX_SCORES)
        halves = partial(self._packed, parts, rule, torch.is_grad_enabled()), partial(_packed_backward, parts, rule)
        inputs = q.to(wide), k.to(wide), v.to(wide)
        tensors = inputs if rule.sinks is None else (*inputs, rule.sinks)
        return differentiable(*halves, *tensors).to(q.dtype)

    def _packed(
        self, parts: Sequence[PaddedGroup], rule: AttentionRule, keeps: bool, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        keep: list[Tensor] = []
        for part in parts:
            rows, keys, values = part.queries(q, kv_heads), part.keys(k), part.keys(v)
            mixed = torch.empty_like(rows)
            for block, near, allowed in _causal_blocks(part.num_queries, group_size, rule.window, q.device):
                queries = pad_rows(rows[:, :, block], self._attention_rows(rows), 2).contiguous()
                seen = F.pad(allowed, (0, 0, 0, queries.shape[2] - allowed.shape[0]), value=True)
                sinks = rule.sinks_of_rows(kv_heads, queries.shape[2])
                p = _probabilities(queries, keys[:, :, near].contiguous(), seen, rule, sinks)
                mixed[:, :, block] = _weighted_values(p, values[:, :, near])[:, :, : allowed.shape[0]]
                if keeps:
                    keep.append(p[:, :, : allowed.shape[0]])
            part.scatter_queries(mixed, out)
        return out, (q, k, v, *keep)

    def _attention_rows(self, q: Tensor) -> int:
        """Return the rows that ``q`` [B, H, R, D] must have. Both products are smallest with one block of keys."""
        return self.min_rows(q.shape[0] * q.shape[1] * q.shape[3] * KEY_BLOCK, max(q.shape[3], KEY_BLOCK))


@cache
def _multiplies_exactly(dtype: torch.dtype, precision: str) -> bool:
    """Return True if torch's products on this processor, at its present float32 ``precision``, follow the rules above; tries some.

    MKL's for AVX2 do not, nor do oneDNN's in bf16 where there is AMX: these round 8 rows of 32 by 32 otherwise than 9, and 36 of 2048
    by 517 otherwise than 37."""
    draw, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for inner, columns in ((32, 32), (64, 96), (96, 40), (500, 33), (1024, 256), (2048, 517)):
            x, weight = (torch.randn(rows, inner, generator=draw).to(dtype) for rows in (80, columns))
            ops = (
                Ops() if dtype.itemsize == 2 else BatchInvariantOps()
            )  # of bf16 the kernels in C++ leave products to torch in few rows
            product, least = F.linear(x, weight), ops.min_rows(weight.numel(), inner)
            for rows in range(least, 40):
                for some in (slice(rows), slice(5, 5 + rows)):
                    if not torch.equal(F.linear(x[some].clone(), weight), product[some]):
                        return False
        return True
    finally:
        torch.set_num_threads(threads)


def _scores(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """Return q k^T * scale [B, H, R, L]. With a softcap return the tanh of that over the softcap, still to be multiplied by it."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores *= rule.scale
    return scores if rule.softcap is None else scores.div_(rule.softcap).tanh_()


def _probabilities(q: Tensor, k: Tensor, allowed: Tensor, rule: AttentionRule, sinks: Tensor | None) -> Tensor:
    """Return the rule's softmax [B, H, R, L]. ``allowed`` broadcasts to the last columns of the scores, ``sinks`` to one more."""
    scores = _scores(q, k, rule)
    if rule.softcap is not None:
        scores *= rule.softcap
    scores[..., scores.shape[-1] - allowed.shape[-1] :].masked_fill_(~allowed, -math.inf)
    if sinks is None:
        return torch.softmax(scores, -1)
    # in front, so that a key's place in the sums does not depend on how many follow
    scores = torch.cat([sinks.to(scores.dtype).expand(*scores.shape[:-1], 1), scores], -1)
    return torch.softmax(scores, -1)[..., 1:].contiguous()


def _weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """Return p v [B, H, R, D], computed for KEY_BLOCK keys at a time, in order."""
    dim = v.shape[-1]
    v = F.pad(v, (0, -dim % HEAD_ALIGN)) if dim % HEAD_ALIGN else v
    out = torch.matmul(p[..., :KEY_BLOCK], v[..., :KEY_BLOCK, :])
    for first in range(KEY_BLOCK, p.shape[-1], KEY_BLOCK):
        block = slice(first, first + KEY_BLOCK)
        out += torch.matmul(p[..., block], v[..., block, :])
    return out[..., :dim]


def _input_gradients(
    p: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and the output times its gradient, summed over D, [B, H, R, 1].

    ``p``: the probabilities; ``grad``: the gradient of the output. Bits may depend on the batch here."""
    grad_v = torch.matmul(p.transpose(-1, -2), grad)
    grad_scores = torch.matmul(grad, v.transpose(-1, -2))
    grad_scores *= p
    along = grad_scores.sum(-1, keepdim=True)
    grad_scores -= p * along
    if rule.softcap is not None:
        grad_scores *= 1 - _scores(q, k, rule).square_()
    grad_scores *= rule.scale
    return torch.matmul(grad_scores, k), torch.matmul(grad_scores.transpose(-1, -2), q), grad_v, along


def _causal_blocks(
    num_queries: int, group_size: int, window: int | None, device: torch.device
) -> list[tuple[slice, slice, Tensor]]:
    """Return (query rows, keys, mask of the last of these keys) for each block of QUERY_BLOCK queries."""
    blocks = []
    for first in range(0, num_queries, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, num_queries)
        num_keys = round_up(last, KEY_BLOCK)
        rows = slice(first * group_size, last * group_size)
        query = torch.arange(first, last, device=device).repeat_interleave(group_size)
        oldest = 0 if window is None else max(first - window + 1, 0) // KEY_BLOCK * KEY_BLOCK
        masked = torch.arange(first if window is None else oldest, num_keys, device=device)
        blocks.append((rows, slice(oldest, num_keys), visible(query, masked, window)))
    return blocks


def _packed_backward(
    parts: Sequence[PaddedGroup], rule: AttentionRule, _: object, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *keep: Tensor
) -> tuple[Tensor, ...]:
    kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_sinks, saved = q.new_zeros(kv_heads, group_size), iter(keep)
    for part in parts:
        rows, keys, values = part.queries(q, kv_heads), part.keys(k), part.keys(v)
        grad_rows = part.queries(grad, kv_heads)
        if not part.full:
            # padded queries repeat a real token: its gradient must not be counted for them
            dropped = ~part.valid[:, None, :, None].expand(-1, -1, -1, group_size).reshape(len(rows), 1, -1, 1)
            grad_rows.masked_fill_(dropped, 0)
        out_rows, out_keys, out_values = torch.empty_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
        for block, near, _ in _causal_blocks(part.num_queries, group_size, rule.window, q.device):
            some = (rows[:, :, block], keys[:, :, near], values[:, :, near], grad_rows[:, :, block])
            p = next(saved)
            *grads, along = _input_gradients(p, *some, rule)
            if rule.sinks is not None:
                to_sinks = (p.sum(-1, keepdim=True) - 1) * along
                grad_sinks += to_sinks.view(len(rows), kv_heads, -1, group_size).sum((0, 2))
            out_rows[:, :, block] = grads[0]
            out_keys[:, :, near] += grads[1]
            out_values[:, :, near] += grads[2]
        part.scatter_queries(out_rows, grad_q)
        part.scatter_keys(out_keys, grad_k)
        part.scatter_keys(out_values, grad_v)
    return grad_q, grad_k, grad_v, *(() if rule.sinks is None else (grad_sinks.flatten().to(rule.sinks.dtype),))
