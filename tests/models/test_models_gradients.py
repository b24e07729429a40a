"""Gradients in fp64: against plain torch for the attention, against one rank for tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from rlhf_spmd.kernels import AttentionRule, Ops, Packing
from rlhf_spmd.kernels.dense_attention import attend_dense
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs, values
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.data_parallel import partial_boxes, sum_partial
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS

LENGTHS = [1, 70, 5, 2, 33]
TOLERANCE = 1e-10


def build(config: dict[str, Any], head: str, tp: Group, stage: int = 0, pp: int = 1) -> Decoder:
    decoder = Decoder(spec_from_config(config, "test"), head, stage, pp, tp, torch.float64, "cpu")
    init_random(decoder, 3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return decoder


def make_batch(vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, labels, and weights of the log-probs and entropies in the loss."""
    generator = torch.Generator().manual_seed(4)
    ids, labels = torch.randint(0, vocab_size, (2, sum(LENGTHS)), generator=generator)
    a, b = torch.randn(2, sum(LENGTHS), generator=generator, dtype=torch.float64)
    return ids, labels, a, b


def loss_of(decoder: Decoder, head: str, attention: PackedAttention, x: Tensor) -> Tensor:
    _, labels, a, b = make_batch(decoder.spec.vocab_size)
    if head == "value":
        return (decoder(x, attention, values) * a).sum()

    def last(d: Decoder, hidden: Tensor) -> Tensor:
        log_probs, entropy = token_log_probs(d, hidden, labels, 0.8, entropy=True, chunk_rows=32)
        return (log_probs * a).sum() + (entropy * b).sum()

    return decoder(x, attention, last)


def global_gradients(config: dict[str, Any], head: str, tp: Group, checkpointing: bool, pp: int) -> dict[str, Any]:
    """Loss and this rank's part of the gradients as {tensor name: [(slices, values)]}."""
    stages = [build(config, head, tp, stage, pp) for stage in range(pp)]
    attention = PackedAttention(LENGTHS)
    x: Tensor = make_batch(config["vocab_size"])[0]
    for decoder in stages[:-1]:
        x = decoder(x, attention)
    for decoder in stages:
        decoder.keep_activations("full" if checkpointing else "none")
    loss = loss_of(stages[-1], head, attention, x)
    loss.backward()
    found: dict[str, Any] = {"loss": loss.item()}
    for decoder in stages:
        grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
        assert len(grads) == len(decoder.shards), "a parameter has no gradient"
        others = [plan_params(decoder.spec, head, decoder.stage, pp, r, tp.size) for r in range(tp.size) if r != tp.rank]
        sum_partial(grads, partial_boxes(decoder.shards, others), tp)
        for name, grad in grads.items():
            for box in decoder.shards[name].boxes:
                part = (box.start, grad[box.local_slices].numpy())
                found.setdefault(box.name, []).append((decoder.stage, *part))
    return found


def _gradients_rank(world: World, *args: Any) -> dict[str, Any]:
    config, head, checkpointing, pp = args
    return global_gradients(config, head, world.all, checkpointing, pp)


def assemble(results: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Every rank's part equals the same part of the single rank's gradient; tied ends are summed over stages first."""
    for name, parts in whole.items():
        if name == "loss":
            assert all(abs(r["loss"] - parts) < TOLERANCE * max(1, abs(parts)) for r in results)
            continue
        ((_, _, expected),) = parts
        scale = max(abs(expected).max(), 1)
        for result in results:
            totals: dict[Any, Any] = {}
            for _, start, values_ in result[name]:
                totals[start] = totals.get(start, 0) + values_
            for start, got in totals.items():
                piece = expected[tuple(slice(s, s + n) for s, n in zip(start, got.shape, strict=True))]
                assert abs(piece - got).max() < TOLERANCE * scale, name


@pytest.mark.parametrize(
    ("name", "head", "tp", "pp"),
    [
        ("llama-tied-bias", "lm", 2, 2),
        ("qwen3-tied", "lm", 4, 1),  # two KV heads are shared by two ranks each
        ("llama3", "value", 2, 1),
        pytest.param("llama-tied-bias", "lm", 4, 1, marks=pytest.mark.long),
        pytest.param("qwen2", "lm", 2, 2, marks=pytest.mark.long),
        pytest.param("qwen3-tied", "lm", 2, 2, marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_gradients(name: str, head: str, tp: int, pp: int) -> None:
    config = {**CONFIGS[name], "num_hidden_layers": 2}
    whole = global_gradients(config, head, solo(), False, 1)
    assemble(run_ranks(tp, _gradients_rank, config, head, head == "lm", pp), whole)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """One sequence: q [T, H * G, D], k and v [T, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    past = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (past >= 0) & (past < (rule.window or len(q)))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


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
    rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    plain = torch.cat([plain_attention(*row, rule) for row in rows])
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
