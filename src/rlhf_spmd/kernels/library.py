"""The arithmetic of a model on CPUs by kernels in C++, bound with ctypes.

Where the kernels do not serve (a product without AVX512, an entropy's gradient), the exact arithmetic of torch does.

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

from rlhf_spmd.kernels.exact import ExactOps
from rlhf_spmd.kernels.gradients import Node
from rlhf_spmd.kernels.packing import AttentionRule, Context, Packing

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_LETTERS = {"i": _INT, "l": _LONG, "f": _FLOAT, "p": _POINTER}
_ATTENTION = "ipl pl pl lll"  # half; q, k and v with their strides; KV heads, group, head_dim
_SIGNATURES = {
    "linear_kinds": "",
    "linear_forward": "ipl lp ll ppi",
    "attend_packed": _ATTENTION + "pl ffl ppi",
    "attend_packed_backward": _ATTENTION + "pl ffl ppp ppp i",
    "attend_paged": _ATTENTION + "plpp lll ffl pi",
    "rms_norm": "ip llll pif plp",
    "rotate": "ip llll ppp l",
    "rms_norm_backward": "ipp ll pi ppp",
    "gated_linear": "ip lli p",
    "gated_linear_backward": "ipp lli pi",
    "logit_statistics": "p llp li pi",
    "logit_gradients": "p llp lpp i",
    "argmax": "p ll pi",
    "draw": "p ll f ppi",
    "block_forward": "p",
}
_BLOCK = struct.Struct("12q 3q 3q 10q 2q 7q 3d")  # Block of block.cpp
_LANES = 16


class Kernels(ExactOps):
    """All tensors are fp32 or bf16 on the CPU, the last dim contiguous. A row's bits depend on that row and the weights alone."""

    name, joins_layers, keeps_logits = "cpp", True, True

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, letters in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_LETTERS[letter] for letter in letters.replace(" ", "")]
            function.restype = _INT if name == "linear_kinds" else None
        self._c = library
        kinds = library.linear_kinds() & (1 if torch.cpu._is_amx_tile_supported() else 3)
        self._products = {dtype for bit, dtype in ((1, torch.float32), (2, torch.bfloat16)) if kinds & bit}

    def exact_in_threads(self, dtype: torch.dtype) -> bool:
        return dtype in self._products

    @staticmethod
    def page_elements(page_size: int, head_dim: int) -> int:
        """The keys' slots and the values' dims are rounded up to vectors: no other arithmetic needs more."""
        return max(-(-page_size // _LANES) * _LANES * head_dim, page_size * (-(-head_dim // _LANES) * _LANES))

    def multiplies(self, x: Tensor, weight: Tensor) -> bool:
        """Whether :meth:`product` has a product for these: AVX512 for fp32, AVX512_BF16 for bf16, and no AMX, which beats it."""
        return x.dtype in self._products and x.dtype == weight.dtype and (x.dtype == torch.float32 or x.shape[-1] % 2 == 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
        if not self.multiplies(x, weight):
            return super().linear(x, weight, bias)
        if not torch.is_grad_enabled():
            return self.product(x, weight, bias)

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
            return x.new_empty(len(x), len(weight)) if recomputed else self.product(x, weight, bias), (x, weight)

        return Node.apply(forward, _product_backward, x, weight, bias)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.product(hidden, weight, wide=True) if self.multiplies(hidden, weight) else super().logits(hidden, weight)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        """x [..., k], weight [n, k] -> [..., n]; ``wide``: in fp32."""
        n, k = weight.shape
        assert x.shape[-1] == k, f"{list(x.shape)} times the transpose of {list(weight.shape)}"
        rows, weight = x.reshape(-1, k), weight.contiguous()
        rows = rows if rows.stride(1) == 1 and rows.stride(0) % 2 == 0 else rows.contiguous()
        half = x.dtype == torch.bfloat16
        out = torch.empty(rows.shape[0], n, dtype=torch.float32 if wide else x.dtype)
        if bias is not None:
            bias = bias.float()
        self._c.linear_forward(
            (2 if wide else 1) if half else 0,
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            weight.data_ptr(),
            n,
            k,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if not torch.is_grad_enabled():
            return self.packed(q, k, v, packing.bounds, rule)[0]

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out, log_sums = self.packed(q, k, v, packing.bounds, rule)
            return out, (q, k, v, packing.bounds, out, log_sums)

        return Node.apply(forward, partial(self.packed_backward, rule), q, k, v)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """Causal attention within sequences: q [T, H * G, D], k and v [T, H, D], bounds int64 [sequences + 1] ->
        [T, H * G, D] and the scores' log-sum-exp fp32 [T, H * G]."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        self._c.attend_packed(
            *_shapes(q, k, v),
            bounds.data_ptr(),
            len(bounds) - 1,
            *_numbers(rule),
            out.data_ptr(),
            lse.data_ptr(),
            torch.get_num_threads(),
        )
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from :meth:`packed`'s inputs and outputs and the gradient of its first output."""
        q, k, v, grad = _heads(q), _heads(k), _heads(v), grad.contiguous()
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        self._c.attend_packed_backward(
            *_shapes(q, k, v),
            bounds.data_ptr(),
            len(bounds) - 1,
            *_numbers(rule),
            out.data_ptr(),
            grad.data_ptr(),
            lse.data_ptr(),
            grad_q.data_ptr(),
            grad_k.data_ptr(),
            grad_v.data_ptr(),
            torch.get_num_threads(),
        )
        return grad_q, grad_k, grad_v

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
        self._c.attend_paged(
            *_shapes(q, k, v),
            items.data_ptr(),
            len(items),
            table.data_ptr(),
            cache.data_ptr(),
            cache.shape[2],
            page_size,
            cache.shape[3],
            *_numbers(rule),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        """x [T, n] or [T, heads, n] -> the same shape, and the scales fp32 [..., 1]."""
        n = x.shape[-1]
        x = x if x.dim() == 2 and x.stride(1) == 1 else _heads(x.view(-1, 1, n) if x.dim() == 2 else x)
        inner = 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        half = x.dtype == torch.bfloat16
        results = out.data_ptr(), inner * n, scales.data_ptr()
        self._c.rms_norm(half, x.data_ptr(), x.shape[0], x.stride(0), inner, n, weight.data_ptr(), plus_one, eps, *results)
        return out, scales

    def norm_backward(
        self, plus_one: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, grad = x.contiguous(), grad.contiguous()
        out, grad_weight = torch.empty_like(x), torch.empty(x.shape[-1], dtype=torch.float32)
        sizes = scale.numel(), x.shape[-1], weight.data_ptr(), plus_one
        results = grad.data_ptr(), out.data_ptr(), grad_weight.data_ptr()
        self._c.rms_norm_backward(x.dtype == torch.bfloat16, x.data_ptr(), scale.data_ptr(), *sizes, *results)
        return out, grad_weight.to(weight.dtype)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = _heads(x)
        tokens, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        half = x.dtype == torch.bfloat16
        cos, sin = cos.contiguous(), sin.contiguous()
        tables = cos.data_ptr(), sin.data_ptr()
        self._c.rotate(half, x.data_ptr(), tokens, x.stride(0), heads, dim // 2, *tables, out.data_ptr(), heads * dim)
        return out

    def gate(self, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, n, dtype=gate_up.dtype)
        self._c.gated_linear(gate_up.dtype == torch.bfloat16, gate_up.data_ptr(), rows, n, gelu, out.data_ptr())
        return out

    def gate_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        gate_up, grad = gate_up.contiguous(), grad.contiguous()
        out, half = torch.empty_like(gate_up), grad.dtype == torch.bfloat16
        settings = gelu, out.data_ptr(), torch.get_num_threads()
        self._c.gated_linear_backward(half, gate_up.data_ptr(), grad.data_ptr(), *grad.shape, *settings)
        return (out,)

    def layer(
        self, parts: Sequence[Any], sizes: Sequence[int], options: tuple[float, bool, bool], rule: AttentionRule, index: int
    ) -> Callable[..., Tensor | None] | None:
        biased = any(part.bias is not None for part in (parts[4], parts[8]))
        if biased or sizes[3] % 2 or not self.multiplies(parts[0].weight, parts[8].weight):
            return None
        heads, kv_heads, dim, _ = sizes

        def whole(x: Tensor, cos: Tensor, sin: Tensor, attention: Any, num_tokens: int) -> Tensor | None:
            context: Callable[[int], Context] | None = getattr(attention, "kernel_context", None)
            if context is None:
                return None
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
            weights = [None if part is None else part.weight.contiguous() for part in parts]
            biases = [None if part.bias is None else part.bias.float() for part in (parts[1], parts[7])]
            rows, hidden = x.shape
            out = torch.empty_like(x)
            size, space = rows * (2 * heads + 2 * kv_heads) * dim, attention.space  # of q, k and v, and the attention's output
            if space is None or space.numel() < size or space.dtype != x.dtype:
                space = attention.space = x.new_empty(size)
            at, half = space.data_ptr(), x.dtype == torch.bfloat16
            head = half, rows, num_tokens, hidden, *sizes, *options[1:], rule.window or 0, torch.get_num_threads()
            inputs = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
            outputs = at, at + rows * (heads + 2 * kv_heads) * dim * x.itemsize, out.data_ptr()
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*weights, *biases)]
            numbers = options[0], *_numbers(rule)[:2]
            self._c.block_forward(_BLOCK.pack(*head, *inputs, *outputs, *pointers, *context(index), *numbers))
            return out

        return whole

    def logit_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
        assert logits.is_contiguous() and logits.dtype == torch.float32, "logit statistics are of contiguous fp32 logits"
        labels = labels.contiguous()
        out = torch.empty(4, logits.shape[0], dtype=torch.float32)
        settings = first, entropy, out.data_ptr(), torch.get_num_threads()
        self._c.logit_statistics(logits.data_ptr(), *logits.shape, labels.data_ptr(), *settings)
        return out

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        if entropy is not None:
            return super().logit_gradients(logits, labels, first, log_z, grads, entropy)
        assert logits.is_contiguous() and logits.dtype == torch.float32, "gradients are of contiguous fp32 logits"
        labels, log_z, grads = labels.contiguous(), log_z.contiguous(), grads.contiguous()
        numbers = log_z.data_ptr(), grads.data_ptr(), torch.get_num_threads()
        self._c.logit_gradients(logits.data_ptr(), *logits.shape, labels.data_ptr(), first, *numbers)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = logits.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._c.argmax(logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads())
        return out

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor | None:
        if logits.dtype != torch.float32:
            return None
        assert uniforms.dtype == torch.float64, f"draws are by fp64 numbers, not by {uniforms.dtype}"
        logits, uniforms = logits.contiguous(), uniforms.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        pointers = uniforms.data_ptr(), out.data_ptr()
        self._c.draw(logits.data_ptr(), *logits.shape, temperature, *pointers, torch.get_num_threads())
        return out


def _heads(x: Tensor) -> Tensor:
    """x [T, heads, D] with its heads side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    kv_heads, dim = k.shape[1:]
    half = q.dtype == torch.bfloat16
    sizes = (kv_heads, q.shape[1] // kv_heads, dim)
    return half, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), *sizes


def _numbers(rule: AttentionRule) -> tuple[float, float, int]:
    return rule.scale, rule.softcap or 0.0, rule.window or 0


def _product_backward(
    needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad_x = torch.mm(grad, weight) if needed[0] else None
    return grad_x, torch.mm(grad.t(), x) if needed[1] else None, grad.sum(0) if needed[2] else None
