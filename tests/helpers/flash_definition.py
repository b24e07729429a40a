"""What torch's flash operators compute, from their arguments alone, on CPUs, which have no kernel for them: in fp64, with the demands
that the CUDA kernels make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Row = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of a sequence


@dataclass
class Calls:
    """Arguments of the calls that were made."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: int = 0


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence: q [T, H * G, D], k and v [T, H, D] -> as q, the probabilities [H * G, T, T], and the logarithms of the scores' sums
    [H * G, T]. A query at i sees the keys from i - left to i + right; -1 is no bound."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None]
    seen = ((ahead <= right) | (right < 0)) & ((ahead >= -left) | (left < 0))
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    p = scores.softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v), p, scores.logsumexp(-1)


def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float) -> Row:
    """Of one sequence's queries, keys and values, from that of its output."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    of_p = torch.einsum("ihd,jhd->hij", grad, wide_v)
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
    of_k, of_v = torch.einsum("hij,ihd->jhd", of_scores, q), torch.einsum("hij,ihd->jhd", p, grad)
    of_k, of_v = (x.unflatten(1, (heads, group)).sum(2) for x in (of_k, of_v))
    return torch.einsum("hij,jhd->ihd", of_scores, wide_k), of_k, of_v


def _checked(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> list[Row]:
    """The sequences in fp64."""
    for x in (q, k, v):
        assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1 and x.dim() == 3
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds[0] == 0 and bounds[-1] == len(q) == len(k)
    lengths = bounds.diff().tolist()
    assert min(lengths) > 0 and max(lengths) == longest
    wide_q, wide_k, wide_v = (x.double().split(lengths) for x in (q, k, v))
    return list(zip(wide_q, wide_k, wide_v, strict=True))


@contextmanager
def flash_on_cpus() -> Iterator[Calls]:
    calls = Calls()

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, keys: Tensor, longest: int, longest_keys: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert torch.equal(bounds, keys) and longest == longest_keys and dropout == 0.0 and not debug
        options = {"scale": scale, "left": window_size_left, "right": window_size_right, "causal": causal}
        calls.forward.append({"bounds": bounds.tolist(), "longest": longest, **options})
        rows = _checked(q, k, v, bounds, longest)
        outs, _, sums = zip(
            *(attend(*row, scale, window_size_left, 0 if causal else window_size_right) for row in rows), strict=True
        )
        state = torch.zeros(2, dtype=torch.uint64)
        return torch.cat(outs).to(q.dtype), torch.cat(sums, 1).float(), state, state.clone(), q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor, keys: Tensor, longest: int,
        longest_keys: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert grad.shape == out.shape == q.shape and grad.dtype == q.dtype and grad.stride(-1) == 1
        assert torch.equal(bounds, keys) and longest == longest_keys and dropout == 0.0 and state.dtype == torch.uint64
        calls.backward += 1
        grads = []
        rows, lengths = _checked(q, k, v, bounds, longest), bounds.diff().tolist()
        noted = zip(rows, grad.double().split(lengths), out.split(lengths), sums.split(lengths, 1), strict=True)
        for row, of_out, row_out, row_sums in noted:
            again, p, again_sums = attend(*row, scale, window_size_left, 0 if causal else window_size_right)
            torch.testing.assert_close(row_sums, again_sums.float())
            torch.testing.assert_close(row_out, again.to(out.dtype), atol=2e-2, rtol=2e-2)  # of any kernel: p may be rounded
            grads.append(gradients(of_out, *row, p, scale))
        return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*grads, strict=True))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()
