"""Packed flash attention: what torch's operators are told, in place of whose CUDA kernels their definition computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_definition import attend
from flash_definition import Calls, flash_on_cpus
from rlhf_spmd.kernels import AttentionRule, Ops, Packing, flash_attention
from rlhf_spmd.kernels.flash_attention import FlashAttn, TorchFlash, choose_packed
from triton_device import DEVICE

pytest.importorskip("triton")
from rlhf_spmd.kernels.gpu_ops import GpuOps

CPU = torch.device("cpu")
RULES = [AttentionRule(0.25), AttentionRule(0.3, window=1), AttentionRule(0.1, window=7), AttentionRule(0.2, window=1000)]
CASES = [[5, 0, 70, 1, 0, 33], [64], [1], [1, 1, 0, 1], [0, 0, 3]]
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="stands in for kernels that a GPU has")


@pytest.fixture
def calls() -> Iterator[Calls]:
    with flash_on_cpus() as made:
        yield made


def draw(lengths: list[int], dtype: torch.dtype, heads: int = 4, kv: int = 2, dim: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(len(lengths))
    return torch.randn(sum(lengths), heads + 2 * kv, dim, generator=generator).to(dtype)


def parts_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split([4, 2, 2], 1)
    return q, k, v


@pytest.mark.parametrize("dtype", flash_attention.DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_outputs_and_gradients_equal_float64(calls: Calls, lengths: list[int], rule: AttentionRule, dtype: torch.dtype) -> None:
    """Queries, keys and values are slices of one tensor."""
    qkv = draw(lengths, dtype).requires_grad_()
    weight = torch.randn(len(qkv), 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = GpuOps(TorchFlash()).attend_packed(*parts_of(qkv), Packing(lengths, CPU), rule)
    assert out.dtype == dtype and len(calls.forward) == 1
    (grad,) = torch.autograd.grad(out, qkv, weight)
    wide = qkv.detach().double().requires_grad_()
    want, _ = attend(*parts_of(wide), lengths, rule)
    (wanted,) = torch.autograd.grad(want, wide, weight.double())
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(grad.double(), wanted, atol=2 * tolerance, rtol=tolerance)
    assert calls.backward == 1


@pytest.mark.parametrize("packed", [TorchFlash(), FlashAttn()], ids=lambda packed: packed.name)
def test_sinks(calls: Calls, packed: TorchFlash | FlashAttn) -> None:
    """Those of gpt-oss: an output and gradients of queries, keys, values and sinks as in float64."""
    lengths, sinks = [5, 0, 70, 1], torch.tensor([-2.0, 0.0, 1.5, 4.0], requires_grad=True)
    qkv, weight = draw(lengths, torch.bfloat16).requires_grad_(), torch.randn(76, 4, 16).bfloat16()
    results = []
    for dtype, ops in ((torch.bfloat16, GpuOps(packed)), (torch.float64, Ops())):
        inputs = [x.detach().to(dtype if x is qkv else sinks.dtype).requires_grad_() for x in (qkv, sinks)]
        rule = AttentionRule(0.3, window=7, sinks=inputs[1])
        out = ops.attend_packed(*parts_of(inputs[0]), Packing(lengths, CPU), rule)
        results.append([out, *torch.autograd.grad(out, inputs, weight.to(dtype))])
    assert len(calls.forward) == calls.backward == 1
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want.double(), atol=6e-2, rtol=4e-2)


def test_bounds_are_made_once_for_a_packing(calls: Calls) -> None:
    packing, qkv = Packing([3, 0, 2, 0], CPU), draw([3, 2], torch.bfloat16)
    for _ in range(2):
        GpuOps(TorchFlash()).attend_packed(*parts_of(qkv), packing, AttentionRule(0.5, window=2))
    assert packing.nonempty_bounds[0] is packing.nonempty_bounds[0]
    assert calls.forward == [{"bounds": [0, 3, 5], "longest": 3, "scale": 0.5, "left": 1}] * 2


@pytest.mark.parametrize(
    ("dtype", "dim", "rule"),
    [
        (torch.float32, 16, RULES[0]),
        (torch.bfloat16, 12, RULES[0]),
        (torch.bfloat16, 264, RULES[0]),
        (torch.bfloat16, 16, replace(RULES[2], softcap=5.0)),
    ],
    ids=str,
)
def test_what_has_no_kernel_takes_the_plain_path(calls: Calls, dtype: torch.dtype, dim: int, rule: AttentionRule) -> None:
    lengths = [5, 0, 9]
    parts, packing = parts_of(draw(lengths, dtype, dim=dim)), Packing(lengths, CPU)
    found, plain = (ops.attend_packed(*parts, packing, rule) for ops in (GpuOps(TorchFlash()), Ops()))
    assert torch.equal(found, plain)
    none = parts_of(draw([0, 0], torch.bfloat16))
    assert GpuOps(TorchFlash()).attend_packed(*none, Packing([0, 0], CPU), RULES[0]).shape == (0, 4, 16)
    assert not calls.forward


def test_flash_attn_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's function in place of torch's, by its documented arguments, softcap and window included."""
    told: dict[str, Any] = {}

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        told.update(locals())
        return q.clone()

    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k, v = parts_of(draw([3, 0, 2], torch.bfloat16, dim=12))
    ops = GpuOps(FlashAttn())
    ops.attend_packed(q, k, v, Packing([3, 0, 2], CPU), AttentionRule(0.3, 20.0, 5))
    assert ops.name == "flash_attn" and told["q"] is q and told["k"] is k and told["v"] is v
    assert told["cu_seqlens_q"].tolist() == told["cu_seqlens_k"].tolist() == [0, 3, 5]
    assert (told["max_seqlen_q"], told["max_seqlen_k"], told["causal"], told["dropout_p"]) == (3, 3, True, 0.0)
    assert (told["softmax_scale"], told["window_size"], told["softcap"], told["deterministic"]) == (0.3, (4, 0), 20.0, False)
    ops.attend_packed(q, k, v, Packing([3, 0, 2], CPU), AttentionRule(0.3))
    assert (told["window_size"], told["softcap"]) == ((-1, 0), 0.0)


def test_it_is_chosen_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_packed(torch.bfloat16) is None and GpuOps().name == "torch"
    monkeypatch.setattr(flash_attention, "model_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for package, name in ((None, "flash_attn"), ("it is not installed", "flash")):
        monkeypatch.setattr(flash_attention, "unavailable", lambda *_, why=package: why)
        packed = choose_packed(torch.bfloat16)
        assert packed is not None and packed.name == GpuOps(packed).name == name
        assert choose_packed(torch.float32) is None
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert choose_packed(torch.float16) is None


@pytest.mark.parametrize("dtype", flash_attention.DTYPES, ids=str)
def test_shapes_and_strides_on_meta(dtype: torch.dtype) -> None:
    device = torch.device("meta")
    qkv = torch.empty(10, 8, 16, dtype=dtype, device=device, requires_grad=True)
    out = GpuOps(TorchFlash()).attend_packed(*parts_of(qkv), Packing([3, 7], device), RULES[2])
    assert out.shape == (10, 4, 16) and out.dtype == dtype and out.is_contiguous()
    (grad,) = torch.autograd.grad(out, qkv, torch.empty_like(out))
    assert grad.shape == qkv.shape and grad.dtype == dtype
