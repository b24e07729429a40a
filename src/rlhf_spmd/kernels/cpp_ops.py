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
from rlhf_spmd.kernels.layer_args import AttentionRule, LayerKernelArgs, LayerOptions, LayerParts
from rlhf_spmd.kernels.ops import UNCHANGED, LogitTransform, Ops
from rlhf_spmd.kernels.packing import Packing, pad_rows


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
_ATTENTION = "ipl pl pl lll"  # half; q, k and v, each with its stride; KV heads, group, head_dim
# the C functions -> a letter of _TYPES for each argument, in the order of the function's definition in the .cpp file; behind it the
# arguments' names, in the same groups
_SIGNATURES = {
    "linear_kinds": "",
    "linear_forward": "ipl lp ll ppi",  # kind x x_stride, rows weight, n k, bias out threads
    "attend_packed": _ATTENTION + "pl fflp ppi",  # bounds sequences, scale softcap window sinks, out log_sums threads
    "attend_packed_backward": _ATTENTION + "pl ffl ppp ppp i",  # as above, out grad log_sums, grad_q grad_k grad_v, threads
    "attend_paged": _ATTENTION + "plpp lll fflp pi",  # items num_items table cache, page sizes, as above, out threads
    "rms_norm": "ip llll pif plp",  # half x, outer stride inner n, weight unit_offset eps, out out_stride scales
    "rotate": "ip lllll pp ip l",  # half x, tokens stride heads dim pairs, cos sin, interleaved out, out_stride
    "rms_norm_backward": "ipp ll pi ppp",  # half x scales, rows n, weight unit_offset, grad out grad_weight
    "gated_linear": "ip lli p",  # half gate_up, rows n gelu, out
    "gated_linear_backward": "ipp lli pi",  # half gate_up grad, rows n gelu, out threads
    "logit_statistics": "p llp li pi",  # logits, rows n labels, first entropy, out threads
    "logit_gradients": "p llp lpp i",  # logits, rows n labels, first log_z grads, threads
    "argmax": "p lll pi",  # logits, rows n stride, out threads
    "draw": "p lll f ppi",  # logits, rows n stride, temperature, uniforms out threads
    "block_forward": "b",  # block
}
_LANES = 16  # fp32 elements of the widest vectors


class CppOps(BatchInvariantOps):
    """Ops in C++. All tensors are fp32 or bf16 on the CPU, the last dim contiguous. A row's bits depend on that row and the weights
    alone."""

    name = "cpp"
    joins_layers = True
    keeps_logits = True

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
        """Return :meth:`Ops.linear` by ``linear_forward`` (dense.cpp), if it multiplies these."""
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
        min_rows = super().min_rows(weight.numel(), weight.shape[1])  # torch computes them in fp32
        return super().logits(pad_rows(hidden, min_rows), weight)[: len(hidden)]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        """Return ``x`` [T, k] times the transpose of ``weight`` [n, k], plus ``bias``: [T, n]; in fp32 if ``wide``."""
        assert x.shape[1] == weight.shape[1], f"{list(x.shape)} times the transpose of {list(weight.shape)}"
        x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
        kind = (2 if wide else 1) if x.dtype == torch.bfloat16 else 0
        out = torch.empty(len(x), len(weight), dtype=torch.float32 if wide else x.dtype)
        bias = None if bias is None else bias.float()
        factors = kind, x, x.stride(0), len(x), weight.contiguous(), *weight.shape
        self._c.linear_forward(*factors, bias, out, torch.get_num_threads())
        return out

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Return :meth:`Ops.attend_packed` by ``attend_packed`` and ``attend_packed_backward`` (attention.cpp)."""

        def forward(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out, log_sums = self.packed(q, k, v, packing.bounds, rule)
            return out, (q, k, v, packing.bounds, out, log_sums, *sinks)

        sinks = () if rule.sinks is None else (rule.sinks,)
        return differentiable(forward, partial(self.packed_backward, rule), q, k, v, *sinks)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """Return the causal attention within sequences [T, H * G, D], and the scores' log-sum-exp fp32 [T, H * G]. ``q``:
        [T, H * G, D]; ``k`` and ``v``: [T, H, D]; ``bounds``: int64 [sequences + 1]."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        log_sums = torch.empty(q.shape[:2], dtype=torch.float32)
        inputs = *_qkv_args(q, k, v), bounds, len(bounds) - 1, *_score_args(rule), _sinks(rule)
        self._c.attend_packed(*inputs, out, log_sums, torch.get_num_threads())
        return out, log_sums

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
        log_sums: Tensor,
        *sinks: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and sinks from :meth:`packed`'s inputs and outputs and the gradient of its first output."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        grad = grad.contiguous()
        grads = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        inputs = *_qkv_args(q, k, v), bounds, len(bounds) - 1, *_score_args(rule), out, grad, log_sums
        self._c.attend_packed_backward(*inputs, *grads, torch.get_num_threads())
        return *grads, *sink_gradients(sinks, grad, out, log_sums)

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, items: Tensor, table: Tensor, cache: Tensor, page_size: int, rule: AttentionRule
    ) -> Tensor:
        """Return the attention of ``q`` [T, H * G, D] over the rows' pages, in the same shape. Writes ``k`` and ``v`` [T, H, D] into
        ``cache`` [2, H, pages, page_elements] before.

        ``items`` int64 [rows, 4]: first token of the step, its position, number of tokens, where the row's pages begin in
        ``table`` (int32).
        """
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_pages, page_elements = cache.shape[2:]
        pages = items, len(items), table, cache, num_pages, page_size, page_elements
        self._c.attend_paged(*_qkv_args(q, k, v), *pages, *_score_args(rule), _sinks(rule), out, torch.get_num_threads())
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x`` [T, n] or [T, heads, n], in the same shape, and the scales fp32 [..., 1]."""
        x = _heads(x)
        n = x.shape[-1]
        inner = 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        sizes = len(x), x.stride(0), inner, n
        self._c.rms_norm(x.dtype == torch.bfloat16, x, *sizes, weight, unit_offset, eps, out, inner * n, scales)
        return out, scales

    def norm_backward(
        self, unit_offset: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`Ops.norm_backward` by ``rms_norm_backward`` (elementwise.cpp)."""
        x, grad = x.contiguous(), grad.contiguous()
        out = torch.empty_like(x)
        grad_weight = torch.empty(x.shape[-1], dtype=torch.float32)
        inputs = x.dtype == torch.bfloat16, x, scale, scale.numel(), x.shape[-1], weight, unit_offset, grad
        self._c.rms_norm_backward(*inputs, out, grad_weight)
        return out, grad_weight.to(weight.dtype)

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """Return :meth:`Ops.apply_rotary` by ``rotate`` (elementwise.cpp)."""
        x = _heads(x)
        tokens, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = tokens, x.stride(0), heads, dim, cos.shape[-1]
        tables = cos.contiguous(), sin.contiguous()
        self._c.rotate(x.dtype == torch.bfloat16, x, *sizes, *tables, interleaved, out, heads * dim)
        return out

    def gated_activation_forward(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """Return :meth:`Ops.gated_activation_forward` by ``gated_linear`` (elementwise.cpp)."""
        gate_up = gate_up.contiguous()
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
        self._c.gated_linear(gate_up.dtype == torch.bfloat16, gate_up, *out.shape, gelu, out)
        return out

    def gated_activation_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        """Return :meth:`Ops.gated_activation_backward` by ``gated_linear_backward`` (elementwise.cpp)."""
        gate_up, grad = gate_up.contiguous(), grad.contiguous()
        out = torch.empty_like(gate_up)
        inputs = grad.dtype == torch.bfloat16, gate_up, grad, *grad.shape, gelu
        self._c.gated_linear_backward(*inputs, out, torch.get_num_threads())
        return (out,)

    def fused_layer(
        self, parts: LayerParts, options: LayerOptions, rule: AttentionRule, layer_index: int
    ) -> Callable[..., Tensor | None] | None:
        """Return a function that calls ``block_forward`` (block.cpp)."""
        has_biases = parts.out.bias is not None or parts.down.bias is not None
        if has_biases or options.inner % 2 or not self.multiplies(parts.qkv.weight, parts.down.weight):
            return None
        settings = _layer_settings(options, rule)
        mixed_columns = options.heads.queries * options.heads.dim
        qkv_columns = mixed_columns + 2 * options.heads.keys * options.heads.dim

        def run(x: Tensor, cos: Tensor, sin: Tensor, attention: Any, num_tokens: int) -> Tensor | None:
            kernel_args: Callable[[int], LayerKernelArgs] | None = getattr(attention, "layer_kernel_args", None)
            if kernel_args is None:
                return None
            x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
            out = torch.empty_like(x)
            rows, hidden = x.shape
            size = rows * (qkv_columns + mixed_columns)
            space = attention.space
            if space is None or space.numel() < size or space.dtype != x.dtype:
                space = attention.space = x.new_empty(size)
            tensors = {"x": x, "cos": cos, "sin": sin, "out": out, "qkv": space, "mixed": space[rows * qkv_columns :]}
            tensors |= _layer_tensors(parts)
            block = _Block(
                half=x.dtype == torch.bfloat16,
                rows=rows,
                tokens=num_tokens,
                hidden=hidden,
                threads=torch.get_num_threads(),
                pairs=cos.shape[-1],
                **settings,
                **{name: tensor.data_ptr() for name, tensor in tensors.items()},
                **kernel_args(layer_index)._asdict(),
            )
            self._c.block_forward(block)
            return out

        return run

    def logit_statistics(
        self, logits: Tensor, labels: Tensor, first: int, entropy: bool, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        """Return :meth:`Ops.logit_statistics` by ``logit_statistics`` (elementwise.cpp)."""
        assert logits.is_contiguous() and logits.dtype == torch.float32, "logit statistics are of contiguous fp32 logits"
        out = torch.empty(4, logits.shape[0], dtype=torch.float32)
        self._c.logit_statistics(logits, *logits.shape, labels.contiguous(), first, entropy, out, torch.get_num_threads())
        return out

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return :meth:`Ops.logit_gradients` by ``logit_gradients`` (elementwise.cpp), with an entropy's gradient by torch."""
        if entropy is not None:
            return super().logit_gradients(logits, labels, first, log_z, grads, entropy)
        assert logits.is_contiguous() and logits.dtype == torch.float32, "gradients are of contiguous fp32 logits"
        numbers = log_z.contiguous(), grads.contiguous(), torch.get_num_threads()
        self._c.logit_gradients(logits, *logits.shape, labels.contiguous(), first, *numbers)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        """Return :meth:`Ops.argmax` by ``argmax`` (elementwise.cpp)."""
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = _with_adjacent_columns(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._c.argmax(logits, *logits.shape, logits.stride(0), out, torch.get_num_threads())
        return out

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor | None:
        """Return :meth:`Ops.draw` by ``draw`` (elementwise.cpp); None for other logits than fp32."""
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


def _layer_settings(options: LayerOptions, rule: AttentionRule) -> dict[str, Any]:
    """Return the fields of :class:`_Block` that are the same in each pass."""
    shape = options.heads
    scale, softcap, window = _score_args(rule)
    return {
        "heads": shape.queries,
        "kv_heads": shape.keys,
        "dim": shape.dim,
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


def _layer_tensors(parts: LayerParts) -> dict[str, Tensor]:
    """Return the parameters of a layer by the fields of :class:`_Block`: matrices begin with ``w_``, biases with ``b_``."""
    matrices = "qkv", "out", "gate_up", "down"
    present = {name: part for name, part in parts._asdict().items() if part is not None}
    tensors = {f"w_{name}" if name in matrices else name: part.weight.contiguous() for name, part in present.items()}
    biases = {"b_qkv": parts.qkv.bias, "b_gate_up": parts.gate_up.bias}
    return tensors | {name: bias.float() for name, bias in biases.items() if bias is not None}
