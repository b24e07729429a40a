"""The kernels as functions of tensors, bound with ctypes. Callers guarantee what the asserts say; nothing is differentiable.

Shape legend: T tokens or rows, H KV heads, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import struct
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from rlhf_spmd.kernels.build import build

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
Context = tuple[int, int, int, int, int, int, int]  # items or bounds, how many, table, cache, pages, page size, page elements
_log = logging.getLogger(__name__)


_LANES = 16


def page_elements(page_size: int, head_dim: int) -> int:
    """Elements of one page of one head, keys or values: the keys' slots and the values' dims are rounded up to vectors."""
    return max(-(-page_size // _LANES) * _LANES * head_dim, page_size * (-(-head_dim // _LANES) * _LANES))


class Kernels:
    """All tensors are fp32 or bf16 on the CPU, the last dim contiguous."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        for name, letters in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_LETTERS[letter] for letter in letters.replace(" ", "")]
            function.restype = _INT if name == "linear_kinds" else None
        self._c = library
        kinds = library.linear_kinds() & (1 if torch.cpu._is_amx_tile_supported() else 3)
        self._products = {dtype for bit, dtype in ((1, torch.float32), (2, torch.bfloat16)) if kinds & bit}

    def multiplies(self, x: Tensor, weight: Tensor) -> bool:
        """Whether :meth:`linear` has a product for these: AVX512 for fp32, AVX512_BF16 for bf16, and no AMX, which beats it."""
        return x.dtype in self._products and x.dtype == weight.dtype and (x.dtype == torch.float32 or x.shape[-1] % 2 == 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
        """x [..., k], weight [n, k] -> [..., n]; ``wide``: in fp32. A row's bits depend on that row and the weight alone."""
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

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, softcap: float | None, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Causal attention within sequences: q [T, H * G, D], k and v [T, H, D], bounds int64 [sequences + 1] ->
        [T, H * G, D] and the scores' log-sum-exp fp32 [T, H * G]."""
        q, k, v = _heads(q), _heads(k), _heads(v)
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        self._c.attend_packed(
            *_shapes(q, k, v),
            bounds.data_ptr(),
            len(bounds) - 1,
            scale,
            softcap or 0.0,
            window or 0,
            out.data_ptr(),
            lse.data_ptr(),
            torch.get_num_threads(),
        )
        return out, lse

    def attend_packed_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from :meth:`attend_packed`'s inputs and outputs and the gradient of its first output."""
        q, k, v, grad = _heads(q), _heads(k), _heads(v), grad.contiguous()
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        self._c.attend_packed_backward(
            *_shapes(q, k, v),
            bounds.data_ptr(),
            len(bounds) - 1,
            scale,
            softcap or 0.0,
            window or 0,
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
        scale: float,
        softcap: float | None,
        window: int | None,
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
            scale,
            softcap or 0.0,
            window or 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        """x [T, n] or [T, heads, n] -> the same shape, and the factors 1 / sqrt(mean(x^2) + eps) fp32 [..., 1]."""
        n = x.shape[-1]
        x = x if x.dim() == 2 and x.stride(1) == 1 else _heads(x.view(-1, 1, n) if x.dim() == 2 else x)
        inner = 1 if x.dim() == 2 else x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype)
        scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        half = x.dtype == torch.bfloat16
        results = out.data_ptr(), inner * n, scales.data_ptr()
        self._c.rms_norm(half, x.data_ptr(), x.shape[0], x.stride(0), inner, n, weight.data_ptr(), plus_one, eps, *results)
        return out, scales

    def rms_norm_backward(
        self, x: Tensor, scales: Tensor, weight: Tensor, plus_one: bool, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight (fp32) from :meth:`rms_norm`'s input and factors and the gradient of its result."""
        x, grad = x.contiguous(), grad.contiguous()
        out, grad_weight = torch.empty_like(x), torch.empty(x.shape[-1], dtype=torch.float32)
        sizes = scales.numel(), x.shape[-1], weight.data_ptr(), plus_one
        results = grad.data_ptr(), out.data_ptr(), grad_weight.data_ptr()
        self._c.rms_norm_backward(x.dtype == torch.bfloat16, x.data_ptr(), scales.data_ptr(), *sizes, *results)
        return out, grad_weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, D], half-split; cos and sin [T, 1, D / 2] in x's dtype."""
        x = _heads(x)
        tokens, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        half = x.dtype == torch.bfloat16
        cos, sin = cos.contiguous(), sin.contiguous()
        tables = cos.data_ptr(), sin.data_ptr()
        self._c.rotate(half, x.data_ptr(), tokens, x.stride(0), heads, dim // 2, *tables, out.data_ptr(), heads * dim)
        return out

    def gated_linear(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """[T, 2n] = [gate; up] -> silu(gate) * up, or gelu(gate) * up, [T, n]."""
        gate_up = gate_up.contiguous()
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, n, dtype=gate_up.dtype)
        self._c.gated_linear(gate_up.dtype == torch.bfloat16, gate_up.data_ptr(), rows, n, gelu, out.data_ptr())
        return out

    def gated_linear_backward(self, gate_up: Tensor, grad: Tensor, gelu: bool) -> Tensor:
        """The gradient of [gate; up] from that of :meth:`gated_linear`'s result."""
        gate_up, grad = gate_up.contiguous(), grad.contiguous()
        out, half = torch.empty_like(gate_up), grad.dtype == torch.bfloat16
        settings = gelu, out.data_ptr(), torch.get_num_threads()
        self._c.gated_linear_backward(half, gate_up.data_ptr(), grad.data_ptr(), *grad.shape, *settings)
        return out

    def block(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_tokens: int,
        sizes: tuple[int, int, int, int],
        options: tuple[float, bool, bool],
        rule: tuple[float, float | None, int | None],
        weights: Sequence[Tensor | None],
        biases: Sequence[Tensor | None],
        context: Context,
    ) -> Tensor:
        """A whole layer: x [R, hidden] -> the same, the rows from ``num_tokens`` on being padding. ``sizes``: query heads, KV heads,
        head_dim, inner; ``options``: eps, plus_one, gelu; ``rule``: scale, softcap, window of the attention; ``weights``: norm, qkv,
        norms of q and k, out, norm, norm, gate_up, down, norm; ``biases``: of qkv and gate_up; ``context``: of the attention."""
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        weights = [None if weight is None else weight.contiguous() for weight in weights]
        biases = [None if bias is None else bias.float() for bias in biases]
        rows, hidden = x.shape
        heads, kv_heads, dim, _ = sizes
        out = torch.empty_like(x)
        space = x.new_empty(rows * (2 * heads + 2 * kv_heads) * dim)  # q, k and v, and the attention's output
        at = space.data_ptr()
        head = x.dtype == torch.bfloat16, rows, num_tokens, hidden, *sizes, *options[1:], rule[2] or 0, torch.get_num_threads()
        inputs = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        outputs = at, at + rows * (heads + 2 * kv_heads) * dim * x.itemsize, out.data_ptr()
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*weights, *biases)]
        self._c.block_forward(_BLOCK.pack(*head, *inputs, *outputs, *pointers, *context, options[0], rule[0], rule[1] or 0.0))
        return out

    def logit_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
        """fp32 logits [T, n] of the vocabulary from ``first`` on -> [4, T]: largest, sum of exp(l - largest), the label's logit
        (0 where it lies elsewhere), and with ``entropy`` the sum of exp(l - largest) * (l - largest), else 0."""
        assert logits.is_contiguous() and logits.dtype == torch.float32, "logit statistics are of contiguous fp32 logits"
        labels = labels.contiguous()
        out = torch.empty(4, logits.shape[0], dtype=torch.float32)
        settings = first, entropy, out.data_ptr(), torch.get_num_threads()
        self._c.logit_statistics(logits.data_ptr(), *logits.shape, labels.data_ptr(), *settings)
        return out

    def logit_gradients(self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor) -> None:
        """Overwrites fp32 logits [T, n] of the vocabulary from ``first`` on with the gradients of log-probs of ``labels`` times
        ``grads`` [T], where ``log_z`` [T] are the log-sum-exps over the whole vocabulary."""
        assert logits.is_contiguous() and logits.dtype == torch.float32, "gradients are of contiguous fp32 logits"
        labels, log_z, grads = labels.contiguous(), log_z.contiguous(), grads.contiguous()
        numbers = log_z.data_ptr(), grads.data_ptr(), torch.get_num_threads()
        self._c.logit_gradients(logits.data_ptr(), *logits.shape, labels.data_ptr(), first, *numbers)

    def argmax(self, logits: Tensor) -> Tensor:
        """Where the largest of fp32 logits [T, n] is, the first of equal ones: int64 [T]."""
        assert logits.dtype == torch.float32, "the largest is sought among fp32 logits"
        logits = logits.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self._c.argmax(logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads())
        return out

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
        """Token ids int64 [T] from fp32 logits [T, n]: the first whose cumulative probability exceeds ``uniforms`` fp64 [T]."""
        assert logits.dtype == torch.float32 and uniforms.dtype == torch.float64, "draws are from fp32 logits by fp64 numbers"
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


@cache
def _load() -> Kernels | None:
    try:
        return Kernels(str(build()))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.warning("C++ kernels do not build here, torch computes instead: %s", error)
        return None


_suspended = False


def ready(x: Tensor) -> Kernels | None:
    """The kernels if they can compute with ``x``; builds them at first use."""
    if _suspended or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    return _load()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """No kernels in here, as on a machine without a compiler: for comparisons. Generation and training must both be inside."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before
