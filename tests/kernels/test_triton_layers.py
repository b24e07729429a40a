"""The Triton kernels of a layer against float64, forward and backward, and against themselves, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import HeadShape, Ops, PageTarget, triton_layers, triton_qkv
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.layer_args import Norms
from tiers import pairwise
from triton_device import DEVICE

OPS, PLAIN = GpuOps(), Ops()
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale
    return x.to(DEVICE, dtype).requires_grad_()


def assert_like_float64(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
    """Results and gradients against torch's in float64, each within some roundings of the largest element of a row: of 2 ** -8 in
    bf16, where a gradient has gone through three roundings."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    results, exact_results = function(OPS, *inputs), function(PLAIN, *wide)
    grads = [draw(*x.shape, dtype=x.dtype, seed=9) for x in results]
    gradients = torch.autograd.grad(results, inputs, grads)
    exact_gradients = torch.autograd.grad(exact_results, wide, [grad.double() for grad in grads])
    unit = 2e-6 if inputs[0].dtype == torch.float32 else 2**-7
    for ours, theirs in zip((*results, *gradients), (*exact_results, *exact_gradients), strict=True):
        assert ours.dtype == inputs[0].dtype and ours.shape == theirs.shape
        error = ((ours.double() - theirs).abs() / theirs.abs().amax(-1, keepdim=True).clamp(min=1e-3)).max().item()
        assert error < 2 * unit, f"off by {error / unit:.2f} units"


ROWS = [(1, 64), (67, 64), (33, 80), (3, 1800), (2, 16384)]


@pytest.mark.parametrize("case", pairwise({"shape": ROWS, "unit_offset": [False, True], "dtype": DTYPES}), ids=str)
def test_norms_equal_float64(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, unit_offset, dtype = case.values()
    monkeypatch.setattr(triton_layers, "PROGRAMS", 2)  # so that programs of the backward pass have several rows
    x, y, weight = draw(*shape, dtype=dtype, scale=3), draw(*shape, dtype=dtype, seed=1), draw(shape[1], dtype=dtype)
    assert_like_float64(lambda ops, x, y, w: ops.add_norm(x, y, w, EPS, unit_offset), x, y, weight)
    assert_like_float64(lambda ops, x, w: [ops.rms_norm(x, w, EPS, unit_offset)], x, weight)


WIDTHS = [(1, 48), (7, 96), (3, 2200)]


@pytest.mark.parametrize("case", pairwise({"shape": WIDTHS, "gelu": [False, True], "dtype": DTYPES}), ids=str)
def test_gates_equal_float64(case: dict[str, Any]) -> None:
    shape, gelu, dtype = case.values()
    assert_like_float64(lambda ops, x: [ops.gated_activation(x, gelu)], draw(*shape, dtype=dtype, scale=3))
    extremes = torch.tensor([[-200.0, -1e4, 200.0, 1e4, 1.0, 2.0, 3.0, 4.0]], device=DEVICE, dtype=dtype)
    torch.testing.assert_close(OPS.gated_activation_forward(extremes, gelu), PLAIN.gated_activation_forward(extremes, gelu))


SHAPES = [
    HeadShape(4, 2, 64, 1, EPS),
    HeadShape(3, 1, 80, 1, EPS, True),
    HeadShape(4, 2, 128, 2, EPS),
    HeadShape(8, 4, 12, 4, EPS, True),
    HeadShape(16, 8, 128, 1, EPS),
]
TURNED = {  # pairs of heads that are rotated in part, or not
    HeadShape(4, 2, 64, 1, EPS, interleaved=True): 16,
    HeadShape(4, 2, 24, 2, EPS, True): 9,
    HeadShape(2, 1, 16, 1, EPS, interleaved=True): 8,
    HeadShape(3, 1, 48, 1, EPS): 0,
}
SHAPES += TURNED


def head_inputs(shape: HeadShape, tokens: int, dtype: torch.dtype, with_norms: bool) -> list[Tensor]:
    """qkv, and the weights of two norms if they are wanted."""
    qkv = draw(tokens, (shape.queries + 2 * shape.keys) * shape.dim, dtype=dtype, scale=2)
    return [qkv, *(draw(shape.dim, dtype=dtype, seed=seed) for seed in (1, 2) if with_norms)]


def tables(tokens: int, shape: HeadShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pairs = TURNED.get(shape, shape.dim // 2)
    angles = torch.arange(tokens).float()[:, None, None] * torch.rand(pairs, generator=torch.Generator().manual_seed(3))
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


HEADS = {"shape": SHAPES, "with_norms": [False, True], "dtype": DTYPES}


@pytest.mark.parametrize("case", pairwise(HEADS), ids=str)
def test_heads_equal_float64(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape, with_norms, dtype = case.values()
    monkeypatch.setattr(triton_qkv, "PROGRAMS", 3)
    tokens = 7
    cos, sin = tables(tokens, shape, dtype)

    def heads(ops: Ops, qkv: Tensor, *norms: Tensor) -> Sequence[Tensor]:
        return ops.split_heads(qkv, pair(norms), *(table.to(qkv.dtype) for table in (cos, sin)), shape)

    assert_like_float64(heads, *head_inputs(shape, tokens, dtype, with_norms))


def pair(norms: Sequence[Tensor]) -> Norms:
    return (norms[0], norms[1]) if norms else (None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_sums_the_roundings_are_those_of_torch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        (qkv,), (cos, sin) = head_inputs(shape, 9, dtype, False), tables(9, shape, dtype)
        results = []
        for ops in (OPS, PLAIN):
            out = ops.split_heads(qkv, (None, None), cos, sin, shape)
            results.append([*out, *torch.autograd.grad(out, qkv, [torch.sin(x.detach()) for x in out])])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("case", pairwise(HEADS), ids=str)
@pytest.mark.parametrize("ops", [OPS, PLAIN], ids=["triton", "torch"])
def test_keys_and_values_go_to_their_pages(ops: Ops, case: dict[str, Any]) -> None:
    """As heads gives them, those of the first tokens, and nothing else is touched."""
    shape, with_norms, dtype = case.values()
    tokens, slots = 5, torch.tensor([17, 3, 40], device=DEVICE)
    (qkv, *norms), (cos, sin) = head_inputs(shape, tokens, dtype, with_norms), tables(tokens, shape, dtype)
    with torch.no_grad():
        q, k, v = ops.split_heads(qkv, pair(norms), cos, sin, shape)
        pages = torch.full((2, shape.keys, 6, 8 * shape.dim), 7.0, dtype=dtype, device=DEVICE)
        found = ops.heads_to_pages(qkv, pair(norms), cos, sin, shape, PageTarget(pages, slots))
    expected = torch.full((2, shape.keys, 48, shape.dim), 7.0, dtype=dtype, device=DEVICE)
    expected[0, :, slots], expected[1, :, slots] = k[:3].transpose(0, 1), v[:3].transpose(0, 1)
    assert torch.equal(found, q) and torch.equal(pages.view_as(expected), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    shape, rows = SHAPES[0], 70
    (qkv, *norms), (cos, sin) = head_inputs(shape, rows, dtype, True), tables(rows, shape, dtype)
    short, long = draw(rows, 96, dtype=dtype), draw(rows, 2500, dtype=dtype)
    weights = draw(96, dtype=dtype), draw(2500, dtype=dtype)

    def all_of(some: slice) -> list[Tensor]:
        added = [y for x, w in zip((short, long), weights, strict=True) for y in OPS.add_norm(x[some], x[some] * 2, w, EPS)]
        gated = [OPS.gated_activation(long[some], gelu) for gelu in (False, True)]
        return [*added, *gated, *OPS.split_heads(qkv[some], pair(norms), cos[some], sin[some], shape)]

    with torch.no_grad():
        whole = all_of(slice(None))
        for some in (slice(0, 1), slice(41, 42), slice(5, 70), slice(66, 69)):
            assert all(torch.equal(part, x[some]) for part, x in zip(all_of(some), whole, strict=True))


def test_no_rows_and_gaps_are_taken() -> None:
    """An expert without tokens; gradients that are views, as the attention gives them."""
    weight = draw(32)
    empty = draw(0, 32)
    total, out = OPS.add_norm(empty, empty, weight, EPS)
    (grad,) = torch.autograd.grad(out.sum() + OPS.gated_activation(total, False).sum(), weight)
    assert out.shape == (0, 32) and not grad.any()
    shape = SHAPES[0]
    (qkv, *norms), (cos, sin) = head_inputs(shape, 4, torch.float32, True), tables(4, shape, torch.float32)
    results = []
    for gaps in (False, True):
        q, k, v = OPS.split_heads(qkv, pair(norms), cos, sin, shape)
        grads = [draw(x.shape[1], 4, 128).transpose(0, 1)[..., :64] for x in (q, k, v)]
        grads = grads if gaps else [grad.contiguous() for grad in grads]
        results.append(torch.autograd.grad((q, k, v), [qkv, *norms], grads))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
