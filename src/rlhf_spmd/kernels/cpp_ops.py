"""The arithmetic of models on CPUs by C++ kernels, bound with ctypes.

Where the kernels do not serve (bfloat16 products on a processor with AMX, an entropy's gradient), torch computes
(:mod:`batch_invariant`).

Shape legend: T tokens or rows, H KV heads, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.dense_attention import sink_gradients
from rlhf_spmd.kernels.devices import has_amx
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.ops import UNCHANGED, LogitTransform, Ops
from rlhf_spmd.kernels.packing import AttentionRule, Context, LayerOptions, LayerParts, Packing, pad_rows


class _Pointer:
    """A pointer to a tensor's elements; None is a null pointer."""

    @staticmethod
    def from_param(value: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if value is None else value.data_ptr())


_LETTERS = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": _Pointer, "s": ctypes.c_char_p}
_ATTENTION = "ipl pl pl lll"  # half; q, k and v with their strides; KV heads, group, head_dim
_SIGNATURES = {
    "linear_kinds": "",
    "linear_forward": "ipl lp ll ppi",
    "attend_packed": _ATTENTION + "pl fflp ppi",
    "attend_packed_backward": _ATTENTION + "pl ffl ppp ppp i",
    "attend_paged": _ATTENTION + "plpp lll fflp pi",
    "rms_norm": "ip llll pif plp",
    "rotate": "ip lllll pp ip l",
    "rms_norm_backward": "ipp ll pi ppp",
    "gated_linear": "ip lli p",
    "gated_linear_backward": "ipp lli pi",
    "logit_statistics": "p llp li pi",
    "logit_gradients": "p llp lpp i",
    "argmax": "p lll pi",
    "draw": "p lll f ppi",
    "block_forward": "s",
}
_BLOCK = struct.Struct("15q 3q 3q 10q 2q 7q 4d")  # Block of block.cpp
_LANES = 16  # of the widest vectors


class CppOps(BatchInvariantOps):
    """All tensors are fp32 or bf16 on the CPU, the last dim contiguous. A row's bits depend on that row and the weights alone."""

    name, joins_layers, keeps_logits = "cpp", True, True

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, letters in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_LETTERS[letter] for letter in letters.replace(" ", "")]
            function.restype = ctypes.c_int if name == "linear_kinds" else None
        self._c = library
        kinds = library.linear_kinds() & (1 if has_amx() else 7)
        self._products = {dtype for bit, dtype in ((1, torch.float32), (2, torch.bfloat16)) if kinds & bit}
        self._widens = kinds & 6 == 2  # the processor has no products of bf16: torch's are several times slower than of fp32

    def min_rows(self, numel: int, inner: int) -> int:
        """Our own products need none, and those of bf16 that torch computes are oneDNN's."""
        return Ops.min_rows(self, numel, inner) if torch.float32 in self._products else super().min_rows(numel, inner)

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        return dtype in self._products or super().is_batch_invariant(dtype, threads)

    @staticmethod
    def page_elements(page_size: int, head_dim: int) -> int:
        """The keys' slots and the values' dims are rounded up to vectors: no other arithmetic needs more."""
        return max(-(-page_size // _LANES) * _LANES * head_dim, page_size * (-(-head_dim // _LANES) * _LANES))

    def multiplies(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if :meth:`product` has a product for these: for bf16 only where there is no AMX, which beats it."""
        return x.dtype in self._products and x.dtype == weight.dtype and (x.dtype == torch.float32 or x.shape[-1] % 2 == 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
        if not self.multiplies(x, weight):
            return super().linear(x, weight, bias)
        return self._linear_by(self.product, x, weight, bias, recomputed)

    def gradient_product(self, left: Tensor, right: Tensor) -> Tensor:
        if self._widens and left.dtype == torch.bfloat16:
            return torch.mm(left.float(), right.float()).to(left.dtype)
        return torch.mm(left, right)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.multiplies(hidden, weight):
            return self.product(hidden, weight, wide=True)
        enough = super().min_rows(weight.numel(), weight.shape[1])  # torch computes them in fp32
        return super().logits(pad_rows(hidden, enough), weight)[: len(hidden)]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        """x [T, k], weight [n, k] -> [T, n]; ``wide``: in fp32."""
        assert x.shape[1] == weight.shape[1], f"{list(x.shape)} times the transpose of {list(weight.shape)}"
        x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
        kind = (2 if wide else 1) if x.dtype == torch.bfloat16 else 0
        out = torch.empty(len(x), len(weight), dtype=torch.float32 if wide else x.dtype)
        bias, threads = None if bias is None else bias.float(), torch.get_num_threads()
        self._c.linear_forward(kind, x, x.stride(0), len(x), weight.contiguous(), *weight.shape, bias, out, threads)
        return out

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:

        def forward(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out, log_sums = self.packed(q, k, v, packing.bounds, rule)
            return out, (q, k, v, packing.bounds, out, log_sums, *sinks)

        return differentiable(
            forward, partial(self.packed_backward, rule), q, k, v, *(() if rule.sinks is None else (rule.sinks,))
        )

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """Causal attention within sequences: q [T, H * G, D], k and v [T, H, D], bounds int64 [sequences + 1] ->
        [T, H * G, D] and the scores' log-sum-exp fp32 [T, H * G]."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        places = bounds, len(bounds) - 1
        self._c.attend_packed(*_shapes(q, k, v), *places, *_numbers(rule), _sinks(rule), out, lse, torch.get_num_threads())
        return out, lse

    def packed_backward(
        self,
        rule: AttentionRule,
        _: object,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        out: Tensor,
        lse: Tensor,
        *sinks: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and sinks from :meth:`packed`'s inputs and outputs and the gradient of its first output."""
        q, k, v, grad = _heads(q), _heads(k), _heads(v), grad.contiguous()
        grads = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
        inputs = *_shapes(q, k, v), bounds, len(bounds) - 1, *_numbers(rule), out, grad, lse
        self._c.attend_packed_backward(*inputs, *grads, torch.get_num_threads())
        return *grads, *sink_gradients(sinks, grad, out, lse)

    def attend_paged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        items: Tensor,
        table: Tensor,
        cache: Tensor,
        page_size: int,
        rule: AttentionRule,
    ) -> Tensor:
        """Writes k and v [T, H, D] into ``cache`` [2, H, pages, page_elements] and attends: q [T, H * G, D] -> the same shape.

        ``items`` int64 [rows, 4]: first token of the step, its position, number of tokens, where the row's pages begin in
        ``table`` (int32).
        """
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        places = items, len(items), table, cache, cache.shape[2], page_size, cache.shape[3]
        self._c.attend_paged(*_shapes(q, k, v), *places, *_numbers(rule), _sinks(rule), out, torch.get_num_threads())
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        """x [T, n] or [T, heads, n] -> the same shape, and the scales fp32 [..., 1]."""
        x = _heads(x)
        n, inner = x.shape[-1], 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        sizes = len(x), x.stride(0), inner, n
        self._c.rms_norm(x.dtype == torch.bfloat16, x, *sizes, weight, plus_one, eps, out, inner * n, scales)
        return out, scales

    def norm_backward(
        self, plus_one: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, grad = x.contiguous(), grad.contiguous()
        out, grad_weight = torch.empty_like(x), torch.empty(x.shape[-1], dtype=torch.float32)
        half, sizes = x.dtype == torch.bfloat16, (scale.numel(), x.shape[-1])
        self._c.rms_norm_backward(half, x, scale, *sizes, weight, plus_one, grad, out, grad_weight)
        return out, grad_weight.to(weight.dtype)

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        x = _heads(x)
        tokens, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes, tables = (tokens, x.stride(0), heads, dim, cos.shape[-1]), (cos.contiguous(), sin.contiguous())
        self._c.rotate(x.dtype == torch.bfloat16, x, *sizes, *tables, interleaved, out, heads * dim)
        return out

    def gate(self, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, n, dtype=gate_up.dtype)
        self._c.gated_linear(gate_up.dtype == torch.bfloat16, gate_up, rows, n, gelu, out)
        return out

    def gate_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        gate_up, grad = gate_up.contiguous(), grad.contiguous()
        out, half = torch.empty_like(gate_up), grad.dtype == torch.bfloat16
        self._c.gated_linear_backward(half, gate_up, grad, *grad.shape, gelu, out, torch.get_num_threads())
        return (out,)

    def layer(
        self, parts: LayerParts, options: LayerOptions, rule: AttentionRule, index: int
    ) -> Callable[..., Tensor | None] | None:
        biased = parts.out.bias is not None or parts.down.bias is not None
        if biased or options.inner % 2 or not self.multiplies(parts.qkv.weight, parts.down.weight):
            return None
        shape = options.heads
        heads, kv_heads, dim = shape.queries, shape.keys, shape.dim

        def run(x: Tensor, cos: Tensor, sin: Tensor, attention: Any, num_tokens: int) -> Tensor | None:
            context: Callable[[int], Context] | None = getattr(attention, "kernel_context", None)
            if context is None:
                return None
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
            weights = [None if part is None else part.weight.contiguous() for part in parts]
            biases = [None if part.bias is None else part.bias.float() for part in (parts.qkv, parts.gate_up)]
            rows, hidden = x.shape
            out = torch.empty_like(x)
            size, space = rows * (2 * heads + 2 * kv_heads) * dim, attention.space  # of q, k and v, and the attention's output
            if space is None or space.numel() < size or space.dtype != x.dtype:
                space = attention.space = x.new_empty(size)
            sizes = rows, num_tokens, hidden, heads, kv_heads, dim, options.inner
            switches = shape.plus_one, options.gelu, rule.window or 0, torch.get_num_threads()
            rotation = shape.interleaved, options.whole_norms, cos.shape[-1]
            inputs = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
            qkv = space.data_ptr()
            outputs = qkv, qkv + rows * (heads + 2 * kv_heads) * dim * x.itemsize, out.data_ptr()
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*weights, *biases)]
            numbers = shape.eps, *_numbers(rule)[:2], options.residual
            self._c.block_forward(
                _BLOCK.pack(
                    x.dtype == torch.bfloat16,
                    *sizes,
                    *switches,
                    *rotation,
                    *inputs,
                    *outputs,
                    *pointers,
                    *context(index),
                    *numbers,
                )
            )
            return out

        return run

    def logit_statistics(
        self, logits: Tensor, labels: Tensor, first: int, entropy: bool, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        assert logits.is_contiguous() and logits.dtype == torch.float32, "logit statistics are of contiguous fp32 logits"
        out, threads = torch.empty(4, logits.shape[0], dtype=torch.float32), torch.get_num_threads()
        self._c.logit_statistics(logits, *logits.shape, labels.contiguous(), first, entropy, out, threads)
        return out

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        if entropy is not None:
            return super().logit_gradients(logits, labels, first, log_z, grads, entropy)
        assert logits.is_contiguous() and logits.dtype == torch.float32, "gradients are of contiguous fp32 logits"
        numbers = log_z.contiguous(), grads.contiguous(), torch.get_num_threads()
        self._c.logit_gradients(logits, *logits.shape, labels.contiguous(), first, *numbers)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = _with_adjacent_columns(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._c.argmax(logits, *logits.shape, logits.stride(0), out, torch.get_num_threads())
        return out

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor | None:
        if logits.dtype != torch.float32:
            return None
        assert uniforms.dtype == torch.float64, f"draws are by fp64 numbers, not by {uniforms.dtype}"
        logits, uniforms = _with_adjacent_columns(logits), uniforms.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._c.draw(logits, *logits.shape, logits.stride(0), temperature, uniforms, out, torch.get_num_threads())
        return out


def _sinks(rule: AttentionRule) -> Tensor | None:
    return None if rule.sinks is None else rule.sinks.detach().float().contiguous()


def _with_adjacent_columns(logits: Tensor) -> Tensor:
    """Return logits [rows, n] whose columns lie side by side, as those of a wider matrix do: no copy of these."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _heads(x: Tensor) -> Tensor:
    """x [T, heads, D] with its heads side by side, or [T, D]."""
    return x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) else x.contiguous()


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int | Tensor, ...]:
    kv_heads, dim = k.shape[1:]
    half = q.dtype == torch.bfloat16
    return half, q, q.stride(0), k, k.stride(0), v, v.stride(0), kv_heads, q.shape[1] // kv_heads, dim


def _numbers(rule: AttentionRule) -> tuple[float, float, int]:
    return rule.scale, rule.softcap or 0.0, rule.window or 0
