"""What torch's flash operators compute, from their arguments alone, on CPUs, which have no kernel for them: in fp64, with the demands
that the CUDA kernels make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_definition import attend
from rlhf_spmd.kernels import AttentionRule


@dataclass
class Calls:
    """Arguments of the calls that were made."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: int = 0


def _check(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> list[int]:
    """Returns the lengths of the sequences."""
    for x in (q, k, v):
        assert x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1 and x.dim() == 3
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds[0] == 0 and bounds[-1] == len(q) == len(k)
    lengths = bounds.diff().tolist()
    assert min(lengths) > 0 and max(lengths) == longest
    return lengths


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, share: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence's queries, keys and values, from that of its output. An operator's own code has no autograd. ``share`` [T, Hq]:
    of the probabilities, where the sums count more than the scores."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    one_hot = torch.eye(len(q)).double()[:, None].expand(-1, heads, -1)
    p = (attend(q, k, one_hot, [len(q)], rule)[0] * share[..., None]).transpose(0, 1)
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    of_p = torch.einsum("ihd,jhd->hij", grad, wide_v)
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * rule.scale
    of_k, of_v = torch.einsum("hij,ihd->jhd", of_scores, q), torch.einsum("hij,ihd->jhd", p, grad)
    of_k, of_v = (x.unflatten(1, (heads, group)).sum(2) for x in (of_k, of_v))
    return torch.einsum("hij,jhd->ihd", of_scores, wide_k), of_k, of_v


@contextmanager
def flash_on_cpus() -> Iterator[Calls]:
    calls = Calls()

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, keys: Tensor, longest: int, longest_keys: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert torch.equal(bounds, keys) and longest == longest_keys and dropout == 0.0 and not debug
        assert causal and window_size_right in (-1, 0)
        calls.forward.append({"bounds": bounds.tolist(), "longest": longest, "scale": scale, "left": window_size_left})
        # a query at i sees the keys from i - left; -1 is no bound
        out, log_sums = attend(
            q, k, v, _check(q, k, v, bounds, longest), AttentionRule(scale, window=window_size_left + 1 or None)
        )
        state = torch.zeros(2, dtype=torch.uint64)
        return out.to(q.dtype), log_sums.float(), state, state.clone(), q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor, keys: Tensor, longest: int,
        longest_keys: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert grad.shape == out.shape == q.shape and grad.dtype == q.dtype and grad.stride(-1) == 1
        assert torch.equal(bounds, keys) and longest == longest_keys and dropout == 0.0 and state.dtype == torch.uint64
        calls.backward += 1
        lengths, rule = _check(q, k, v, bounds, longest), AttentionRule(scale, window=window_size_left + 1 or None)
        again, log_sums = attend(q, k, v, lengths, rule)
        share = (log_sums - sums.double()).exp().t()
        assert share.max() < 1 + 1e-5
        again = again * share[..., None]
        torch.testing.assert_close(out, again.to(out.dtype), atol=2e-2, rtol=2e-2)  # any kernel may round the probabilities
        rows = zip(*(x.double().split(lengths) for x in (grad, q, k, v, share)), strict=True)
        grads = zip(*(_gradients(*row, rule) for row in rows), strict=True)
        return tuple(torch.cat(parts).to(q.dtype) for parts in grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()
