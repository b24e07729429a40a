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
from rlhf_spmd.kernels.layer_args import AttentionRule
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import KEY_BLOCK, QUERY_BLOCK, Packing, PaddedGroup, pad_rows, round_up, visible_keys

HEAD_ALIGN = 8  # MKL is not exact for probabilities times 10 columns of values; none of the multiples of 8 showed that
WIDE_ELEMENTS = 1 << 18  # elements of a bf16 matrix that are copied to fp32 at a time: the copy then lies in the cache, too
MAX_SCORES = 1 << 22  # elements of one score matrix; larger groups of sequences are cut into several


class BatchInvariantOps(Ops):
    """Ops on CPUs, of any dtype, whose bits do not depend on the batch if one thread computes them."""

    chunk_logits = 1 << 22  # 16 MiB
    backward_rows = 1 << 10
    wide_head = True

    def min_rows(self, numel: int, inner: int) -> int:
        """Return the fewest rows of a batch-invariant product. MKL's kernels for AVX512 cut the sums of fewer rows than ``inner`` / 24
        in two, up to 15 rows (seen on Ice Lake for all of 23 lengths up to 14,336)."""
        return max(super().min_rows(numel, inner), min(inner // 24 + 1, 16))

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        """Return True if a row's bits do not depend on the batch. With several threads they do:
        torch and MKL divide products by their size."""
        dtypes = {dtype, torch.promote_types(dtype, torch.float32)}  # the logits' too
        return threads == 1 and all(_multiplies_exactly(each, torch.get_float32_matmul_precision()) for each in dtypes)

    def wide_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product in fp32. The fp32 copy of the weight is made a part at a time: that of a large vocabulary is larger than
        all else that the head needs."""
        x = x.float()
        parts = max(weight.numel() // WIDE_ELEMENTS, 1)
        if parts == 1:
            return F.linear(x, weight.float())
        out = x.new_empty(len(x), len(weight))
        # parts of nearly one size: a product with a single column would not be exact
        for columns, part in zip(out.tensor_split(parts, 1), weight.tensor_split(parts), strict=True):
            torch.mm(x, part.float().t(), out=columns)
        return out

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        """Add the product as :meth:`ProductOps.add_product` does. A row's bits do not depend on the other rows."""
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
        rows = q.shape[2]
        wide = torch.promote_types(q.dtype, torch.float32)
        if missing := -k.shape[2] % KEY_BLOCK:
            allowed = F.pad(allowed, (0, missing))
            k, v = F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))
        min_rows = self._attention_rows(q)
        if rows < min_rows:
            q = pad_rows(q, min_rows, 2)
            allowed = F.pad(allowed, (0, 0, 0, min_rows - rows), value=True)
        sinks = rule.sinks_of_rows(q.shape[0], q.shape[2], 0)
        probabilities = _probabilities(q.to(wide).contiguous(), k.to(wide).contiguous(), allowed, rule, sinks)
        return _weighted_values(probabilities, v.to(wide).contiguous())[:, :, :rows].to(q.dtype)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Return the attention of all sequences as one autograd node: no slices, pads or copies to undo one by one."""
        wide = torch.promote_types(q.dtype, torch.float32)
        groups = packing.padded_groups(q.shape[1], MAX_SCORES)
        forward = partial(self._packed, groups, rule, torch.is_grad_enabled())
        sinks = () if rule.sinks is None else (rule.sinks,)
        backward = partial(_packed_backward, groups, rule)
        return differentiable(forward, backward, q.to(wide), k.to(wide), v.to(wide), *sinks).to(q.dtype)

    def _packed(
        self, groups: Sequence[PaddedGroup], rule: AttentionRule, saves: bool, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        kv_heads = k.shape[1]
        group_size = q.shape[1] // kv_heads
        out = torch.empty_like(q)
        saved: list[Tensor] = []
        for group in groups:
            rows, keys, values = group.queries(q, kv_heads), group.keys(k), group.keys(v)
            mixed = torch.empty_like(rows)
            for block, key_range, allowed in _causal_blocks(group.num_queries, group_size, rule.window, q.device):
                queries = pad_rows(rows[:, :, block], self._attention_rows(rows), 2).contiguous()
                mask = F.pad(allowed, (0, 0, 0, queries.shape[2] - allowed.shape[0]), value=True)
                sinks = rule.sinks_of_rows(kv_heads, queries.shape[2])
                probabilities = _probabilities(queries, keys[:, :, key_range].contiguous(), mask, rule, sinks)
                mixed[:, :, block] = _weighted_values(probabilities, values[:, :, key_range])[:, :, : allowed.shape[0]]
                if saves:
                    saved.append(probabilities[:, :, : allowed.shape[0]])
            group.scatter_queries(mixed, out)
        return out, (q, k, v, *saved)

    def _attention_rows(self, q: Tensor) -> int:
        """Return the rows that ``q`` [B, H, R, D] must have. Both products are smallest with one block of keys."""
        return self.min_rows(q.shape[0] * q.shape[1] * q.shape[3] * KEY_BLOCK, max(q.shape[3], KEY_BLOCK))


@cache
def _multiplies_exactly(dtype: torch.dtype, precision: str) -> bool:
    """Return True if torch's products on this processor, at its present float32 ``precision``, follow the rules above; tries some.

    MKL's for AVX2 do not, nor do oneDNN's in bf16 where there is AMX: these round 8 rows of 32 by 32 otherwise than 9, and 36 of 2048
    by 517 otherwise than 37."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for inner, columns in ((32, 32), (64, 96), (96, 40), (500, 33), (1024, 256), (2048, 517)):
            x, weight = (torch.randn(rows, inner, generator=generator).to(dtype) for rows in (80, columns))
            # the C++ kernels leave products of bf16 with few rows to torch
            ops = Ops() if dtype.itemsize == 2 else BatchInvariantOps()
            product = F.linear(x, weight)
            for num_rows in range(ops.min_rows(weight.numel(), inner), 40):
                for rows in (slice(num_rows), slice(5, 5 + num_rows)):
                    if not torch.equal(F.linear(x[rows].clone(), weight), product[rows]):
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


def _weighted_values(probabilities: Tensor, v: Tensor) -> Tensor:
    """Return ``probabilities`` times ``v`` [B, H, R, D], computed for KEY_BLOCK keys at a time, in order."""
    dim = v.shape[-1]
    v = F.pad(v, (0, -dim % HEAD_ALIGN)) if dim % HEAD_ALIGN else v
    out = torch.matmul(probabilities[..., :KEY_BLOCK], v[..., :KEY_BLOCK, :])
    for first in range(KEY_BLOCK, probabilities.shape[-1], KEY_BLOCK):
        block = slice(first, first + KEY_BLOCK)
        out += torch.matmul(probabilities[..., block], v[..., block, :])
    return out[..., :dim]


def _input_gradients(
    probabilities: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and the output times its gradient, summed over D, [B, H, R, 1].

    ``grad``: the gradient of the output. Bits may depend on the batch here."""
    grad_v = torch.matmul(probabilities.transpose(-1, -2), grad)
    grad_scores = torch.matmul(grad, v.transpose(-1, -2))
    grad_scores *= probabilities
    projection = grad_scores.sum(-1, keepdim=True)
    grad_scores -= probabilities * projection
    if rule.softcap is not None:
        grad_scores *= 1 - _scores(q, k, rule).square_()
    grad_scores *= rule.scale
    return torch.matmul(grad_scores, k), torch.matmul(grad_scores.transpose(-1, -2), q), grad_v, projection


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
        blocks.append((rows, slice(oldest, num_keys), visible_keys(query, masked, window)))
    return blocks


def _packed_backward(
    groups: Sequence[PaddedGroup], rule: AttentionRule, _: object, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor
) -> tuple[Tensor, ...]:
    kv_heads = k.shape[1]
    group_size = q.shape[1] // kv_heads
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_sinks = q.new_zeros(kv_heads, group_size)
    probabilities_of_blocks = iter(saved)
    for group in groups:
        rows, keys, values = group.queries(q, kv_heads), group.keys(k), group.keys(v)
        grad_rows = group.queries(grad, kv_heads)
        if not group.has_no_padding:
            # padded queries repeat a real token: its gradient must not be counted for them
            dropped = ~group.valid[:, None, :, None].expand(-1, -1, -1, group_size).reshape(len(rows), 1, -1, 1)
            grad_rows.masked_fill_(dropped, 0)
        row_grads, key_grads, value_grads = torch.empty_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
        for block, key_range, _ in _causal_blocks(group.num_queries, group_size, rule.window, q.device):
            probabilities = next(probabilities_of_blocks)
            inputs = rows[:, :, block], keys[:, :, key_range], values[:, :, key_range], grad_rows[:, :, block]
            *grads, projection = _input_gradients(probabilities, *inputs, rule)
            if rule.sinks is not None:
                block_grads = (probabilities.sum(-1, keepdim=True) - 1) * projection
                grad_sinks += block_grads.view(len(rows), kv_heads, -1, group_size).sum((0, 2))
            row_grads[:, :, block] = grads[0]
            key_grads[:, :, key_range] += grads[1]
            value_grads[:, :, key_range] += grads[2]
        group.scatter_queries(row_grads, grad_q)
        group.scatter_keys(key_grads, grad_k)
        group.scatter_keys(value_grads, grad_v)
    return grad_q, grad_k, grad_v, *(() if rule.sinks is None else (grad_sinks.flatten().to(rule.sinks.dtype),))
