"""Attention over packed sequences by flash attention: torch's own kernels, or those of the package flash-attn if it is installed.

Both read queries, keys and values in place, as views with gaps between tokens, and share keys among the query heads of a group.
Their backward passes are deterministic if ``torch.use_deterministic_algorithms`` asks for it.

Shape legend: T tokens, H KV heads, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rlhf_spmd.kernels.dense_attention import sink_gradients
from rlhf_spmd.kernels.devices import model_device, shared_memory, unavailable
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.layer_args import AttentionRule
from rlhf_spmd.kernels.packing import Packing

DTYPES = (torch.bfloat16, torch.float16)  # no flash kernel computes others
MAX_HEAD_DIM = 256
SMALL_HEAD_DIM = 192  # the most in backward passes of GPUs with less shared memory than an A100


class TorchFlash:
    """Flash attention by torch's operators below ``torch.nn.attention.varlen``, whose own signature changes between versions.

    The operators have no sinks. A sink is one more score per head, whose value is 0. It multiplies an output by sigmoid(l - sink),
    where l is the log-sum-exp of the scores, and makes l logaddexp(l, sink). The backward operator takes output and l.
    ``name``: the attention's name in the log line at the start of a run.
    """

    name = "flash"

    def fits(self, q: Tensor, rule: AttentionRule) -> bool:
        """Return True if there is a kernel for these queries and this rule."""
        return rule.softcap is None and q.shape[-1] % 8 == 0 and _fits(q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Return :meth:`~rlhf_spmd.kernels.Ops.attend_packed` for at least one token."""
        forward, backward = partial(self._forward, packing, rule), partial(self.backward, packing, rule)
        return differentiable(forward, backward, *map(_rows, (q, k, v)), *_sinks(rule))

    def _forward(
        self, packing: Packing, rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        inputs = q, k, v, *_sequences(packing)
        out, log_sums, *_ = torch.ops.aten._flash_attention_forward(*inputs, 0.0, True, False, **_options(rule))
        for sink in sinks:
            column = sink.float()[:, None]
            out = (out * torch.sigmoid(log_sums - column).t()[..., None]).to(q.dtype)
            log_sums = torch.logaddexp(log_sums, column)
        return out, (q, k, v, out, log_sums, *sinks)

    def backward(
        self,
        packing: Packing,
        rule: AttentionRule,
        _: object,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sums: Tensor,
        *sinks: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return gradients of q, k, v and the sinks from the output's. ``log_sums``: fp32 [H * G, T]."""
        state = q.new_empty(2, dtype=torch.uint64)  # dropout's generator, which nothing reads: nothing is dropped
        inputs = _rows(grad), q, k, v, out, log_sums, *_sequences(packing)
        grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(*inputs, 0.0, True, state, state, **_options(rule))
        return *grads, *sink_gradients(sinks, grad, out, log_sums.t())


class FlashAttn(TorchFlash):
    """Functions of the package flash-attn, which also compute softcaps and head dimensions that are no multiple of 8."""

    name = "flash_attn"

    def fits(self, q: Tensor, rule: AttentionRule) -> bool:
        return _fits(q) if rule.sinks is None else super().fits(q, rule)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if rule.sinks is not None:  # its functions' gradients know no sinks
            return super().attend(q, k, v, packing, rule)
        from flash_attn import flash_attn_varlen_func

        options = {"softmax_scale": rule.scale, "causal": True, "window_size": _window(rule), "softcap": rule.softcap or 0.0}
        deterministic = torch.are_deterministic_algorithms_enabled()
        out: Tensor = flash_attn_varlen_func(q, k, v, *_sequences(packing), **options, deterministic=deterministic)
        return out


def choose_packed(dtype: torch.dtype) -> TorchFlash | None:
    """Return the flash attention of this process's models of ``dtype``, or None if none serves."""
    device = model_device()
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    if unavailable("flash_attn", device, dtype) is None:
        return FlashAttn()
    return TorchFlash() if torch.backends.cuda.is_flash_attention_available() else None


def _sequences(packing: Packing) -> tuple[Tensor, Tensor, int, int]:
    bounds, longest = packing.nonempty_bounds
    return bounds, bounds, longest, longest


def _window(rule: AttentionRule) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees; -1: all.

    The second number is 0 although attention is causal anyway: with -1 the kernels may exchange heads and queries of
    sequences of one token.
    """
    return -1 if rule.window is None else rule.window - 1, 0


def _sinks(rule: AttentionRule) -> Sequence[Tensor]:
    return () if rule.sinks is None else (rule.sinks,)


def _options(rule: AttentionRule) -> dict[str, float]:
    left, right = _window(rule)
    return {"scale": rule.scale, "window_size_left": left, "window_size_right": right}


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fits(q: Tensor) -> bool:
    small = torch.is_grad_enabled() and q.is_cuda and shared_memory() < 160 << 10
    return q.dtype in DTYPES and q.shape[-1] <= (SMALL_HEAD_DIM if small else MAX_HEAD_DIM)
