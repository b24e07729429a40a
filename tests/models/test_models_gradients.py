"""Gradients of the attention against its definition, and of small operations by gradcheck."""

from __future__ import annotations

import pytest
import torch

from attention_definition import attend
from rlhf_spmd.kernels import AttentionRule, Ops, Packing
from rlhf_spmd.kernels.dense_attention import attend_dense
from rlhf_spmd.models.attention import PackedAttention

TOLERANCE = 1e-10


@pytest.mark.parametrize(
    "rule",
    [AttentionRule(8**-0.5), AttentionRule(0.3, softcap=2.0), AttentionRule(0.5, window=7), AttentionRule(0.4, 1.5, 65)],
    ids=str,
)
def test_packed_attention_against_plain_torch(rule: AttentionRule) -> None:
    heads, kv_heads, dim = 6, 2, 8
    lengths = [3, 130, 1, 65, 64, 0, 40, 41]
    make = torch.Generator().manual_seed(0)
    q, k, v, weight = (
        torch.randn(sum(lengths), h, dim, dtype=torch.float64, generator=make, requires_grad=i < 3)
        for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    )
    out = PackedAttention(lengths).attend(0, q, k, v, rule)
    got = torch.autograd.grad((out * weight).sum(), [q, k, v])
    plain, _ = attend(q, k, v, lengths, rule)
    want = torch.autograd.grad((plain * weight).sum(), [q, k, v])
    assert (plain - out).abs().max() < TOLERANCE
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() < TOLERANCE
    sdpa = Ops().attend_packed(q, k, v, Packing(lengths, torch.device("cpu")), rule)  # what runs on GPUs
    assert (plain - sdpa).abs().max() < TOLERANCE
    for x, y in zip(torch.autograd.grad((sdpa * weight).sum(), [q, k, v]), want, strict=True):
        assert (x - y).abs().max() < TOLERANCE


def test_capped_attention_of_gpus_keeps_scores_in_fp32() -> None:
    """Only inputs, probabilities and the result are rounded to bf16, each by 2^-9 at most; scores are up to 40, of which bf16 would
    lose 0.1."""
    rule = AttentionRule(1.0, softcap=50.0)
    make = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(1, 4, 70, 64, generator=make).bfloat16() for _ in range(4))
    rough = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    outs = [attend_dense(*inputs, rule, None) for inputs in (rough, exact)]
    assert (outs[0] - outs[1]).norm() < 4e-3 * outs[1].norm()
    grads = [torch.autograd.grad(out, x, weight.to(out.dtype)) for out, x in zip(outs, (rough, exact), strict=True)]
    for got, want in zip(*grads, strict=True):
        assert (got - want).norm() < 8e-3 * want.norm()


def test_elementwise_pieces_gradcheck() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(5, 1, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: Ops().rms_norm(a, b, 1e-5), (x, weight))
    for pairs, interleaved in ((4, False), (4, True), (3, False), (3, True), (0, False)):
        tables = angle[..., :pairs].cos(), angle[..., :pairs].sin()
        assert torch.autograd.gradcheck(lambda a, t=tables, i=interleaved: Ops().rotate(a, *t, i), (x,))
    assert torch.autograd.gradcheck(
        lambda a: Ops().gated(a, False), (torch.randn(5, 8, dtype=torch.float64, requires_grad=True),)
    )
    q, k, v = (torch.randn(8, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    packed = PackedAttention([3, 5])
    for rule in (AttentionRule(0.5), AttentionRule(0.7, softcap=1.3), AttentionRule(0.7, window=3)):
        assert torch.autograd.gradcheck(lambda *args, rule=rule: packed.attend(0, *args, rule), (q, k, v))
