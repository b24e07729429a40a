"""The flash kernels of a GPU against float64, in all that training gives them. Skipped where there is no GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from attention_definition import attend
from rlhf_spmd.kernels import AttentionRule, Packing
from rlhf_spmd.kernels.flash_attention import DTYPES, TorchFlash, choose_packed
from rlhf_spmd.kernels.gpu_ops import GpuOps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
RULES = [AttentionRule(0.1), AttentionRule(0.1, window=1), AttentionRule(0.1, window=100), AttentionRule(0.1, 20.0, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[5, 0, 300, 1, 0, 129], [1, 1, 0, 1], [513]], ids=str)
@pytest.mark.parametrize(("kv", "group", "dim"), [(2, 4, 128), (1, 7, 64), (2, 1, 256), (2, 2, 80)])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("chosen", [True, False], ids=["as chosen", "torch"])
def test_outputs_and_gradients_equal_float64(
    chosen: bool, rule: AttentionRule, kv: int, group: int, dim: int, lengths: list[int], dtype: torch.dtype
) -> None:
    packed = choose_packed(dtype) if chosen else TorchFlash()
    assert packed is not None
    heads, generator = [kv * group, kv, kv], torch.Generator().manual_seed(dim)
    qkv = torch.randn(sum(lengths), sum(heads), dim, generator=generator).to("cuda", dtype).requires_grad_()
    weight = torch.randn(sum(lengths), heads[0], dim, generator=generator).to(dtype)
    q, k, v = qkv.split(heads, 1)
    if not packed.fits(q, rule):
        pytest.skip(f"{packed.name} has no kernel for it")
    out = GpuOps(packed).attend_packed(q, k, v, Packing(lengths, qkv.device), rule)
    (grad,) = torch.autograd.grad(out, qkv, weight.cuda())
    wide = qkv.detach().cpu().double().requires_grad_()
    wanted, _ = attend(*wide.split(heads, 1), lengths, rule)
    (of_all,) = torch.autograd.grad(wanted, wide, weight.double())
    for got, want in ((out, wanted), (grad, of_all)):
        assert (got.cpu().double() - want).norm() < 8 * torch.finfo(dtype).eps * want.norm()


def test_no_kernel_but_flash_attention_s_runs() -> None:
    """No rectangles, gathers or sums by index: what a layer's attention launches, forward and backward."""
    packed, lengths = choose_packed(torch.bfloat16), [700, 300, 41]
    qkv: Any = torch.randn(sum(lengths), 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = qkv.split([16, 8, 8], 1)
    ops, packing = GpuOps(packed), Packing(lengths, qkv.device)
    ops.attend_packed(q, k, v, packing, RULES[0]).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.attend_packed(q, k, v, packing, RULES[0]).sum().backward()
    kernels = Counter(event.name[:80] for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    assert kernels.total() <= 16, kernels
