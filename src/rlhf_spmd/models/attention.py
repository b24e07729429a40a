"""Causal attention for packed sequences, and the exact routine on which generation builds its paged attention.

Exact (CPU) means: a query's output bits depend on that query, its keys and its values alone, not on what else is in the
batch, how many queries are computed at once or how far keys are padded. The rules that give this, measured with both MKL and
oneDNN matrix products: enough rows in every product (:func:`exact_rows`); key lengths in multiples of KEY_BLOCK; probabilities
times values in blocks of KEY_BLOCK keys, added in order, so that blocks beyond a query's keys add exactly 0.

Shape legend: B sequences, H KV heads, G query heads per KV head, R query rows (S queries * G), L keys, D head_dim, T tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd import kernels
from rlhf_spmd.models.spec import AttentionRule

MIN_ROWS = 4  # MKL multiplies fewer rows with other kernels, with other rounding
ONEDNN_MIN_SIZE = 16**3  # torch gives products of at most so many multiplications to MKL even where oneDNN is chosen
HEAD_ALIGN = 8  # MKL is not exact for p v with 10 columns; none of the multiples of 8 showed that
ATTENTION = ("auto", "torch", "cpp")
KEY_BLOCK = 64
QUERY_BLOCK = 64  # queries whose keys are cut at one length: skips most of the future in long sequences
MAX_SCORES = 1 << 22  # elements of one score matrix on CPU; larger buckets are cut into several


def pad_rows(x: Tensor, rows: int, dim: int = 0) -> Tensor:
    """``x`` with ``dim`` extended to ``rows`` by zeros (itself if it is long enough)."""
    missing = rows - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def exact_rows(numel: int) -> int:
    """Rows from which on x @ w gives each row the same bits whatever their number; ``numel``: elements of w, with its batch."""
    return max(MIN_ROWS, ONEDNN_MIN_SIZE // max(numel, 1) + 1)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _attention_rows(q: Tensor) -> int:
    """Rows that q [B, H, R, D] must have; both products are smallest with one block of keys."""
    return exact_rows(q.shape[0] * q.shape[1] * q.shape[3] * KEY_BLOCK)


def _scores(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """q k^T * scale [B, H, R, L], and its tanh after division by the softcap where there is one: still to be multiplied by it."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores *= rule.scale
    return scores if rule.softcap is None else scores.div_(rule.softcap).tanh_()


def _probabilities(q: Tensor, k: Tensor, allowed: Tensor | None, rule: AttentionRule) -> Tensor:
    """The rule's softmax [B, H, R, L]. ``allowed`` broadcasts to the last columns of the scores."""
    scores = _scores(q, k, rule)
    if rule.softcap is not None:
        scores *= rule.softcap
    if allowed is not None:
        scores[..., scores.shape[-1] - allowed.shape[-1] :].masked_fill_(~allowed, -math.inf)
    return torch.softmax(scores, -1)


def _weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """p v [B, H, R, D], KEY_BLOCK keys at a time in order."""
    dim = v.shape[-1]
    v = F.pad(v, (0, -dim % HEAD_ALIGN)) if dim % HEAD_ALIGN else v
    out = torch.matmul(p[..., :KEY_BLOCK], v[..., :KEY_BLOCK, :])
    for first in range(KEY_BLOCK, p.shape[-1], KEY_BLOCK):
        block = slice(first, first + KEY_BLOCK)
        out += torch.matmul(p[..., block], v[..., block, :])
    return out[..., :dim]


def _input_gradients(
    p: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the probabilities and the gradient of the output. Not under the exactness rules."""
    grad_v = torch.matmul(p.transpose(-1, -2), grad)
    grad_scores = torch.matmul(grad, v.transpose(-1, -2))
    grad_scores *= p
    grad_scores -= p * grad_scores.sum(-1, keepdim=True)
    if rule.softcap is not None:
        grad_scores *= 1 - _scores(q, k, rule).square_()
    grad_scores *= rule.scale
    return torch.matmul(grad_scores, k), torch.matmul(grad_scores.transpose(-1, -2), q), grad_v


def attend_exact(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor | None = None) -> Tensor:
    """Attention of rows q [B, H, R, D] over keys k and values v [B, H, L, D] -> [B, H, R, D], in q's dtype; for generation, without
    gradients.

    ``allowed`` [B or 1, 1, R, L] (bool): which keys a row sees, the rule's window included; None: all of them. A row that sees
    no key gives NaN.
    Keys and values that no row sees must still be finite. L is padded here to a multiple of KEY_BLOCK, R to a few rows:
    callers that gather pages of such a length pay no copy. With grouped-query attention the G query heads of a KV head are
    rows: q [B, H, S * G, D]. bf16 is computed in fp32.
    """
    rows, length, dtype = q.shape[2], k.shape[2], q.dtype
    padded = round_up(length, KEY_BLOCK)
    if padded != length:
        if allowed is None:
            allowed = torch.ones(1, 1, rows, length, dtype=torch.bool, device=q.device)
        allowed = F.pad(allowed, (0, padded - length))
        k, v = F.pad(k, (0, 0, 0, padded - length)), F.pad(v, (0, 0, 0, padded - length))
    enough = _attention_rows(q)
    if rows < enough:
        q = pad_rows(q, enough, 2)
        if allowed is not None:
            allowed = F.pad(allowed, (0, 0, 0, enough - rows), value=True)
    if dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    out = _weighted_values(_probabilities(q.contiguous(), k.contiguous(), allowed, rule), v.contiguous())
    return out[:, :, :rows].to(dtype)


class _Bucket:
    """Sequences of similar length, padded to one: ``index`` [B, S] says which packed row lies where.

    Padded queries point at row 0 of the batch: their outputs are dropped (not ``valid``; ``real`` says where the others lie),
    and being in the future of every real query they are never seen as keys. Computed on the host, which knows the lengths.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.num_sequences, self.num_queries = len(starts), max(lengths)
        offsets = torch.arange(self.num_queries)
        valid = offsets < torch.tensor(lengths)[:, None]
        index = (torch.tensor(starts)[:, None] + offsets).masked_fill(~valid, 0).reshape(-1)
        real = valid.reshape(-1).nonzero()[:, 0]
        self.full = len(real) == len(index)
        self.valid, self.index = valid.to(device), index.to(device)
        self.real, self.target = real.to(device), index[real].to(device)
        self.num_keys = round_up(self.num_queries, KEY_BLOCK)

    def gather(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, S, ...]"""
        return x.index_select(0, self.index).view(self.num_sequences, self.num_queries, *x.shape[1:])

    def scatter(self, x: Tensor, out: Tensor) -> None:
        """[B, S, ...] -> its rows of out [T, ...]"""
        flat = x.reshape(-1, *x.shape[2:])
        out.index_copy_(0, self.target, flat if self.full else flat.index_select(0, self.real))

    def queries(self, x: Tensor, kv_heads: int) -> Tensor:
        """[T, H * G, D] -> rows [B, H, S * G, D], the G heads of one query together."""
        batch = self.gather(x).view(self.num_sequences, self.num_queries, kv_heads, -1, x.shape[-1])
        return batch.transpose(1, 2).reshape(self.num_sequences, kv_heads, -1, x.shape[-1])

    def keys(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [B, H, L, D]"""
        batch = x.new_zeros(self.num_sequences, x.shape[1], self.num_keys, x.shape[2])
        batch[:, :, : self.num_queries] = self.gather(x).transpose(1, 2)
        return batch

    def scatter_queries(self, rows: Tensor, out: Tensor) -> None:
        """Inverse of :meth:`queries` into out [T, H * G, D]."""
        b, h, _, d = rows.shape
        self.scatter(rows.view(b, h, self.num_queries, -1, d).transpose(1, 2).reshape(b, self.num_queries, -1, d), out)

    def scatter_keys(self, keys: Tensor, out: Tensor) -> None:
        self.scatter(keys[:, :, : self.num_queries].transpose(1, 2), out)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor | None) -> Tensor:
    """torch's own attention, for devices other than CPU: q [B, H * G, R, D], k and v [B, H, L, D] -> [B, H * G, R, D].

    ``allowed`` None is causal, else it includes the rule's window. torch's kernels have no softcap: plain products then.
    """
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
    if allowed is None:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)  # bf16 would round scores of 20 by 0.06
    scores = torch.tanh(torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * (rule.scale / rule.softcap)) * rule.softcap
    return torch.matmul(torch.softmax(scores.masked_fill(~allowed, -math.inf), -1).to(v.dtype), v)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which keys (positions [L]) each query (positions [..., R]) sees: [..., R, L]."""
    ahead = queries[..., None] - keys
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def _causal_blocks(
    num_queries: int, group_size: int, window: int | None, device: torch.device
) -> list[tuple[slice, slice, Tensor]]:
    """(query rows, keys, which of the last of those keys they see) per block of QUERY_BLOCK queries."""
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


class _PackedExact(torch.autograd.Function):
    """All buckets of a packed batch in one autograd node: no slices, pads or copies for autograd to undo one by one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, buckets: list[_Bucket], rule: AttentionRule) -> Tensor:
        kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        keep: list[Tensor] = []
        for bucket in buckets:
            rows, keys, values = bucket.queries(q, kv_heads), bucket.keys(k), bucket.keys(v)
            mixed = torch.empty_like(rows)
            for block, near, allowed in _causal_blocks(bucket.num_queries, group_size, rule.window, q.device):
                queries = pad_rows(rows[:, :, block], _attention_rows(rows), 2).contiguous()
                seen = F.pad(allowed, (0, 0, 0, queries.shape[2] - allowed.shape[0]), value=True)
                p = _probabilities(queries, keys[:, :, near].contiguous(), seen, rule)
                mixed[:, :, block] = _weighted_values(p, values[:, :, near])[:, :, : allowed.shape[0]]
                if any(ctx.needs_input_grad):
                    keep.append(p[:, :, : allowed.shape[0]])
            bucket.scatter_queries(mixed, out)
        ctx.save_for_backward(q, k, v, *keep)
        ctx.buckets, ctx.rule = buckets, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *keep = ctx.saved_tensors
        kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        saved = iter(keep)
        for bucket in ctx.buckets:
            rows, keys, values = bucket.queries(q, kv_heads), bucket.keys(k), bucket.keys(v)
            grad_rows = bucket.queries(grad, kv_heads)
            if not bucket.full:
                # padded queries repeat a real token: its gradient must not be counted for them
                dropped = ~bucket.valid[:, None, :, None].expand(-1, -1, -1, group_size).reshape(len(rows), 1, -1, 1)
                grad_rows.masked_fill_(dropped, 0)
            out_rows, out_keys, out_values = torch.empty_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
            for block, near, _ in _causal_blocks(bucket.num_queries, group_size, ctx.rule.window, q.device):
                some = (rows[:, :, block], keys[:, :, near], values[:, :, near], grad_rows[:, :, block])
                parts = _input_gradients(next(saved), *some, ctx.rule)
                out_rows[:, :, block] = parts[0]
                out_keys[:, :, near] += parts[1]
                out_values[:, :, near] += parts[2]
            bucket.scatter_queries(out_rows, grad_q)
            bucket.scatter_keys(out_keys, grad_k)
            bucket.scatter_keys(out_values, grad_v)
        return grad_q, grad_k, grad_v, None, None


class _PackedKernel(torch.autograd.Function):
    """The C++ kernel: nothing of the size of the scores is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, found: kernels.Kernels, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, rule: AttentionRule
    ) -> Tensor:
        out, log_sums = found.attend_packed(q, k, v, bounds, rule.scale, rule.softcap, rule.window)
        ctx.save_for_backward(q, k, v, bounds, out, log_sums)
        ctx.found, ctx.rule = found, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        q, k, v, bounds, out, log_sums = ctx.saved_tensors
        rule = ctx.rule
        grads = ctx.found.attend_packed_backward(q, k, v, bounds, rule.scale, rule.softcap, rule.window, out, log_sums, grad)
        return None, *grads, None, None


def choose_attention(wanted: str, dtype: torch.dtype, device: torch.device, where: str) -> str:
    """What ``wanted``, one of ATTENTION, comes to: cpp or torch. Raises ValueError if cpp is wanted where it cannot be."""
    if wanted not in ATTENTION:
        raise ValueError(f"{where}={wanted!r} is not known; allowed: {', '.join(ATTENTION)}")
    if wanted == "torch":
        return wanted
    found = kernels.ready(torch.empty(0, dtype=dtype, device=device)) is not None
    if wanted == "cpp" and not found:
        raise ValueError(
            f"{where}=cpp: the C++ kernels compute float32 and bfloat16 on the CPU where a C++ compiler is installed, here "
            f"{dtype} on {device.type}; set it to auto or torch"
        )
    return "cpp" if found else "torch"


def exact_in_threads(wanted: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether bits do not depend on the batch with several threads either: where attention (``wanted``, one of ATTENTION) and
    products are those of the C++ kernels. torch and MKL divide products among threads by their size."""
    x = torch.empty(0, dtype=dtype, device=device)
    found = kernels.ready(x)
    return wanted != "torch" and found is not None and found.multiplies(x, x)


class PackedAttention:
    """Causal attention within each of several packed sequences (training and scoring).

    ``lengths``: tokens per sequence, in the order in which they are packed. ``positions`` [T] count from 0 in each.
    Sequences are sorted and padded to a common length only inside the attention, among sequences of similar length.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", backend: str = "auto") -> None:
        self.lengths = [int(n) for n in lengths]
        assert all(n >= 0 for n in self.lengths), f"negative sequence length in {self.lengths}"
        self.device = torch.device(device)
        self.num_tokens = sum(self.lengths)
        self.positions = torch.cat([torch.arange(n) for n in self.lengths] or [torch.arange(0)]).to(self.device)
        self._kernels = backend != "torch"
        self._bounds = torch.tensor([0, *itertools.accumulate(self.lengths)])
        self._buckets: dict[int, list[_Bucket]] = {}

        self.kernel_context = self._context if self._kernels else None

    def _context(self, layer_index: int) -> kernels.Context:
        return self._bounds.data_ptr(), len(self._bounds) - 1, 0, 0, 0, 0, 0

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Nothing is kept between layers: ``layer_index`` is not used."""
        assert q.shape[0] == self.num_tokens, f"{q.shape[0]} tokens for sequences of {self.num_tokens} in all"
        found = kernels.ready(q) if self._kernels else None
        if found is not None:
            if torch.is_grad_enabled():
                return _PackedKernel.apply(found, q, k, v, self._bounds, rule)
            return found.attend_packed(q, k, v, self._bounds, rule.scale, rule.softcap, rule.window)[0]
        buckets = self._bucket(q.shape[1])
        if q.device.type != "cpu":
            return self._attend_sdpa(q, k, v, buckets, rule)
        if q.dtype in (torch.bfloat16, torch.float16):
            return _PackedExact.apply(q.float(), k.float(), v.float(), buckets, rule).to(q.dtype)
        return _PackedExact.apply(q, k, v, buckets, rule)

    def _bucket(self, num_heads: int) -> list[_Bucket]:
        if num_heads not in self._buckets:
            starts = [0]
            for n in self.lengths:
                starts.append(starts[-1] + n)
            order = sorted((i for i, n in enumerate(self.lengths) if n), key=lambda i: self.lengths[i])
            groups: list[list[int]] = []
            for i in order:
                shortest = self.lengths[groups[-1][0]] if groups else 0
                similar = bool(groups) and self.lengths[i] <= shortest + max(KEY_BLOCK // 2, shortest // 8)
                scores = num_heads * min(QUERY_BLOCK, self.lengths[i]) * round_up(self.lengths[i], KEY_BLOCK)
                fits = self.device.type != "cpu" or (len(groups[-1] if groups else []) + 1) * scores <= MAX_SCORES
                if similar and fits:
                    groups[-1].append(i)
                else:
                    groups.append([i])
            self._buckets[num_heads] = [
                _Bucket([starts[i] for i in group], [self.lengths[i] for i in group], self.device) for group in groups
            ]
        return self._buckets[num_heads]

    def _attend_sdpa(self, q: Tensor, k: Tensor, v: Tensor, buckets: list[_Bucket], rule: AttentionRule) -> Tensor:
        out = torch.zeros_like(q)
        for bucket in buckets:
            queries, keys, values = (bucket.gather(x).transpose(1, 2) for x in (q, k, v))
            at = torch.arange(bucket.num_queries, device=q.device)
            reached = rule.window is not None and bucket.num_queries > rule.window
            allowed = visible(at, at, rule.window) if reached else None
            mixed = attend_dense(queries, keys, values, rule, allowed).transpose(1, 2)
            flat = mixed.reshape(-1, *q.shape[1:])
            out = out.index_copy(0, bucket.target, flat if bucket.full else flat.index_select(0, bucket.real))
        return out
