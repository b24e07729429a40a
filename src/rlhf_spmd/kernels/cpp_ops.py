"""The arithmetic of models on CPUs by C++ kernels, bound with ctypes.

Where the kernels do not serve (bfloat16 products on a processor with AMX, an entropy's gradient), torch computes
(:mod:`batch_invariant`).

Shape legend: T tokens or rows, H KV heads, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

import ctypes
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
from rlhf_spmd.kernels.packing import AttentionRule, LayerKernelArgs, LayerOptions, LayerParts, Packing, pad_rows


class _Pointer:
    """A pointer to a tensor's elements; None is a null pointer."""

    @staticmethod
    def from_param(value: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if value is None else value.data_ptr())


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return fields of a ctypes.Structure, all of the type ``kind``. ``names``: separated by blanks."""
    return [(name, kind) for name in names.split()]


class _Block(ctypes.Structure):
    """The struct Block of block.cpp, with its fields in its order. A field that is not set is 0 or a null pointer."""

    _fields_ = (
        *_fields(ctypes.c_int64, "half rows tokens hidden heads kv_heads dim inner unit_offset gelu window threads"),
        *_fields(ctypes.c_int64, "interleaved norms_over_all_heads pairs"),
        *_fields(ctypes.c_void_p, "x cos sin qkv mixed out"),
        *_fields(ctypes.c_void_p, "input_norm w_qkv q_norm k_norm w_out attention_norm post_norm w_gate_up w_down mlp_norm"),
        *_fields(ctypes.c_void_p, "b_qkv b_gate_up items"),
        *_fields(ctypes.c_int64, "num_items"),
        *_fields(ctypes.c_void_p, "page_table cache"),
        *_fields(ctypes.c_int64, "num_pages page_size page_elements"),
        *_fields(ctypes.c_double, "eps scale softcap residual"),
    )


_TYPES = {
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "p": _Pointer,
    "b": ctypes.POINTER(_Block),
}
_ATTENTION = "ipl pl pl lll"  # half; q, k and v with their strides; KV heads, group, head_dim
# the C functions -> a letter of _TYPES for each argument, in the order of the function's definition in the .cpp file
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
    "block_forward": "b",
}
_LANES = 16  # of the widest vectors


class CppOps(BatchInvariantOps):
    """All tensors are fp32 or bf16 on the CPU, the last dim contiguous. A row's bits depend on that row and the weights alone."""

    name, joins_layers, keeps_logits = "cpp", True, True

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, letters in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[letter] for letter in letters.replace(" ", "")]
            function.restype = ctypes.c_int if name == "linear_kinds" else None
        self._c = library
        kinds = library.linear_kinds() & (1 if has_amx() else 7)
        self._products = {dtype for bit, dtype in ((1, torch.float32), (2, torch.bfloat16)) if kinds & bit}
        self._widens = kinds & 6 == 2  # the processor has no products of bf16: torch's are several times slower than of fp32

    def min_rows(self, numel: int, inner: int) -> int:
        """Return the fewest rows of a batch-invariant product. The C++ kernel needs no padding, and the bf16 products that torch
        computes are oneDNN's."""
        return Ops.min_rows(self, numel, inner) if torch.float32 in self._products else super().min_rows(numel, inner)

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        return dtype in self._products or super().is_batch_invariant(dtype, threads)

    @staticmethod
    def page_elements(page_size: int, head_dim: int) -> int:
        """Return the elements of a page of one head. The slots of keys and the dims of values are rounded up to whole vectors."""
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
        """Return ``x`` [T, k] times the transpose of ``weight`` [n, k], plus ``bias``: [T, n]; in fp32 if ``wide``."""
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
        """Return the causal attention within sequences [T, H * G, D], and the scores' log-sum-exp fp32 [T, H * G]. ``q``:
        [T, H * G, D]; ``k`` and ``v``: [T, H, D]; ``bounds``: int64 [sequences + 1]."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        sequences, threads = len(bounds) - 1, torch.get_num_threads()
        self._c.attend_packed(*_qkv_args(q, k, v), bounds, sequences, *_score_args(rule), _sinks(rule), out, lse, threads)
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
        """Return the gradients of q, k, v and sinks from :meth:`packed`'s inputs and outputs and the gradient of its first output."""
        q, k, v, grad = _heads(q), _heads(k), _heads(v), grad.contiguous()
        grads = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
        sequences, threads = len(bounds) - 1, torch.get_num_threads()
        inputs = *_qkv_args(q, k, v), bounds, sequences, *_score_args(rule), out, grad, lse
        self._c.attend_packed_backward(*inputs, *grads, threads)
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
        """Return the attention of ``q`` [T, H * G, D] over the rows' pages, in the same shape. Writes ``k`` and ``v`` [T, H, D] into
        ``cache`` [2, H, pages, page_elements] before.

        ``items`` int64 [rows, 4]: first token of the step, its position, number of tokens, where the row's pages begin in
        ``table`` (int32).
        """
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_pages, page_elements = cache.shape[2:]
        pages = table, cache, num_pages, page_size, page_elements
        threads = torch.get_num_threads()
        self._c.attend_paged(*_qkv_args(q, k, v), items, len(items), *pages, *_score_args(rule), _sinks(rule), out, threads)
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x`` [T, n] or [T, heads, n], in the same shape, and the scales fp32 [..., 1]."""
        x = _heads(x)
        n, inner = x.shape[-1], 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        sizes = len(x), x.stride(0), inner, n
        self._c.rms_norm(x.dtype == torch.bfloat16, x, *sizes, weight, unit_offset, eps, out, inner * n, scales)
        return out, scales

    def norm_backward(
        self, unit_offset: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, grad = x.contiguous(), grad.contiguous()
        out, grad_weight = torch.empty_like(x), torch.empty(x.shape[-1], dtype=torch.float32)
        half, sizes = x.dtype == torch.bfloat16, (scale.numel(), x.shape[-1])
        self._c.rms_norm_backward(half, x, scale, *sizes, weight, unit_offset, grad, out, grad_weight)
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
        scale, softcap, window = _score_args(rule)
        settings: dict[str, Any] = {
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "inner": options.inner,
            "unit_offset": shape.unit_offset,
            "gelu": options.gelu,
            "window": window,
            "interleaved": shape.interleaved,
            "norms_over_all_heads": options.norms_over_all_heads,
            "eps": shape.eps,
            "scale": scale,
            "softcap": softcap,
            "residual": options.residual,
        }

        def run(x: Tensor, cos: Tensor, sin: Tensor, attention: Any, num_tokens: int) -> Tensor | None:
            kernel_args: Callable[[int], LayerKernelArgs] | None = getattr(attention, "layer_kernel_args", None)
            if kernel_args is None:
                return None
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
            out = torch.empty_like(x)
            rows, hidden = x.shape
            qkv_size, mixed_size = rows * (heads + 2 * kv_heads) * dim, rows * heads * dim
            space = attention.space
            if space is None or space.numel() < qkv_size + mixed_size or space.dtype != x.dtype:
                space = attention.space = x.new_empty(qkv_size + mixed_size)
            weights = LayerParts(*(None if part is None else part.weight.contiguous() for part in parts))
            tensors = {
                "x": x,
                "cos": cos,
                "sin": sin,
                "out": out,
                "qkv": space,
                "mixed": space[qkv_size:],
                "input_norm": weights.input_norm,
                "w_qkv": weights.qkv,
                "q_norm": weights.q_norm,
                "k_norm": weights.k_norm,
                "w_out": weights.out,
                "attention_norm": weights.attention_norm,
                "post_norm": weights.post_norm,
                "w_gate_up": weights.gate_up,
                "w_down": weights.down,
                "mlp_norm": weights.mlp_norm,
                "b_qkv": None if parts.qkv.bias is None else parts.qkv.bias.float(),
                "b_gate_up": None if parts.gate_up.bias is None else parts.gate_up.bias.float(),
            }
            block = _Block(
                half=x.dtype == torch.bfloat16,
                rows=rows,
                tokens=num_tokens,
                hidden=hidden,
                threads=torch.get_num_threads(),
                pairs=cos.shape[-1],
                **settings,
                **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
                **kernel_args(index)._asdict(),
            )
            self._c.block_forward(block)
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
    """Return the sinks of ``rule`` in fp32; None without sinks."""
    return None if rule.sinks is None else rule.sinks.detach().float().contiguous()


def _with_adjacent_columns(logits: Tensor) -> Tensor:
    """Return ``logits`` [rows, n] with their columns side by side. A part of a wider matrix is not copied."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _heads(x: Tensor) -> Tensor:
    """Return ``x`` [T, heads, D] with its heads side by side, or ``x`` [T, D]; a copy only where they lie apart."""
    return x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) else x.contiguous()


def _qkv_args(q: Tensor, k: Tensor, v: Tensor) -> tuple[int | Tensor, ...]:
    """Return the arguments ``_ATTENTION`` of a C function, for q [T, H * G, D], k and v [T, H, D]."""
    kv_heads, dim = k.shape[1:]
    half = q.dtype == torch.bfloat16
    return half, q, q.stride(0), k, k.stride(0), v, v.stride(0), kv_heads, q.shape[1] // kv_heads, dim


def _score_args(rule: AttentionRule) -> tuple[float, float, int]:
    """Return scale, softcap and window of ``rule`` for a C function: 0 for no softcap, and for no window."""
    return rule.scale, rule.softcap or 0.0, rule.window or 0
