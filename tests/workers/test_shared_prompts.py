"""Rows that share a prompt compute it once: the same bits forward, the same gradients, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_runs import LLAMA, QWEN3_MOE, assert_same, build, local_boxes, together, write_models
from generators import skip_unless_exact
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.kernels import AttentionRule, Ops, choose_ops
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import MicroBatch, last_token_value, pack_rows, response_log_probs, response_values

CPU = torch.device("cpu")
PROMPTS = [[7, 8, 9, 4, 5], [7, 8, 9, 4, 5], [3], [7, 8, 9, 4, 6], [7, 8, 9, 4, 5], [3], [7, 8]]
RESPONSES = [[1, 2], [3, 4, 5, 6], [1], [], [9], [2, 2, 2], [4, 1]]


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> Batch:
    index = torch.arange(len(prompts))
    fields = {"prompt_ids": ragged(prompts, torch.int32), "response_ids": ragged(responses, torch.int32)}
    return Batch(index, index, fields)


def alone(micro: MicroBatch) -> MicroBatch:
    """The same rows, with the tokens of each by themselves."""
    assert micro.token_index is not None
    return MicroBatch(micro.tokens[micro.token_index], micro.lengths, micro.fields)


def test_prompts_but_their_last_tokens_are_held_once() -> None:
    micro = pack_rows(batch_of(PROMPTS, RESPONSES), CPU)
    assert micro.token_index is not None
    tokens = [token for prompt, response in zip(PROMPTS, RESPONSES, strict=True) for token in prompt + response]
    assert micro.tokens[micro.token_index].tolist() == tokens
    # 7 8 9 4 stands once for four rows (one of which ends with another token), all else as often as there are rows
    assert len(micro.tokens) == len(tokens) - 3 * 4
    assert micro.lengths.tolist() == [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def test_little_to_share_is_laid_out() -> None:
    batch = batch_of(PROMPTS, RESPONSES)
    tokens = int((batch["prompt_ids"].lengths + batch["response_ids"].lengths).sum())
    assert pack_rows(batch, CPU, 12 / tokens - 0.01).token_index is not None
    micro = pack_rows(batch, CPU, 12 / tokens)
    assert micro.token_index is None
    assert torch.equal(micro.tokens, alone(pack_rows(batch, CPU)).tokens)
    for prompts in ([[1, 2], [1, 3, 4], [2]], [[5], [5]], []):  # nothing is shared
        micro = pack_rows(batch_of(prompts, [[8, 9]] * len(prompts)), CPU)
        assert micro.token_index is None
        assert micro.tokens.tolist() == [token for prompt in prompts for token in [*prompt, 8, 9]]


@pytest.mark.parametrize(
    ("dtype", "gpu", "rule"),
    [
        (torch.float64, False, AttentionRule(0.4)),
        (torch.float32, False, AttentionRule(0.4, 1.5, 3)),
        (torch.bfloat16, False, AttentionRule(0.4)),
        (torch.bfloat16, True, AttentionRule(0.4, 1.5, 3)),
        (torch.float32, True, AttentionRule(0.4)),
    ],
    ids=str,
)
def test_attention_over_shared_tokens(dtype: torch.dtype, gpu: bool, rule: AttentionRule) -> None:
    """``gpu``: with the operations of GPUs, on CPU tensors."""
    micro, generator = pack_rows(batch_of(PROMPTS, RESPONSES), CPU), torch.Generator().manual_seed(0)
    assert micro.token_index is not None
    ops, lengths, held = Ops() if gpu else choose_ops(dtype, CPU), micro.lengths.tolist(), len(micro.tokens)
    q, k, v, weight = (torch.randn(held, heads, 8, generator=generator).to(dtype).requires_grad_() for heads in (6, 2, 2, 6))
    shared = PackedAttention(lengths, ops=ops, token_index=micro.token_index)
    assert shared.positions[micro.token_index].tolist() == [i for n in lengths for i in range(n)]
    out = shared.attend(0, q, k, v, rule)
    plain = PackedAttention(lengths, ops=ops).attend(0, *(x[micro.token_index] for x in (q, k, v)), rule)
    assert torch.equal(out[micro.token_index], plain)
    # a token's output counts once, as in the layers behind; fp64: only the order of sums differs
    firsts = torch.tensor([micro.token_index.tolist().index(token) for token in range(held)])
    gradients = torch.autograd.grad((out * weight).sum(), [q, k, v])
    expected = torch.autograd.grad((plain[firsts] * weight).sum(), [q, k, v])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for actual, wanted in zip(gradients, expected, strict=True):
        assert (actual - wanted).norm() <= tolerance * wanted.norm()


GROUP = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ANSWERS = [[[1, 2], [3], [4, 5, 6, 7]], [[2, 3], [8, 8, 8], [1]]]


def shared_loss(decoder: Any, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    if not len(micro.lengths):
        return hidden.sum(), {}
    if decoder.head_kind == "value":
        outputs = torch.cat([response_values(decoder, hidden, micro), last_token_value(decoder, hidden, micro)])
    else:
        outputs = response_log_probs(decoder, hidden, micro, 0.7)[0]
    return (outputs * torch.linspace(-1, 2, len(outputs), dtype=outputs.dtype)).sum() / 16, {}


def learn(world: Any, path: str, layout: Layout, options: dict[str, Any], head: str, apart: bool) -> Any:
    """Two steps; on two replicas each has one group."""
    engine = build(world, path, layout, head, **options)
    micros = [pack_rows(batch_of([prompt] * 3, answers), CPU) for prompt, answers in zip(GROUP, ANSWERS, strict=True)]
    packed = micros if layout.dp == 1 else [micros[engine.mesh.dp_rank]]
    reports = []
    for _ in range(2):
        loss = engine.forward_backward([alone(micro) for micro in packed] if apart else packed, shared_loss, 1 / 6).get("loss")
        report = engine.optimizer_step()
        if loss is not None:
            engine.mesh.dp.all_reduce(loss, "test")
            report["loss"] = float(loss)
        reports.append(report)
    return reports, local_boxes(engine)


BALANCE = {"router_aux_loss_coef": 0.3}  # rows that share a prompt count it each


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"), {"untied": LLAMA, "experts": QWEN3_MOE})


@pytest.mark.parametrize(
    ("kind", "head", "layout", "options"),
    [
        ("untied", "value", Layout(), {"activation_checkpointing": "selective"}),
        ("untied", "lm", Layout(tp=2), {"activation_checkpointing": "full"}),
        ("untied", "value", Layout(tp=2, sequence_parallel=True), {}),
        ("untied", "lm", Layout(pp=2), {}),
        ("untied", "lm", Layout(dp=2, zero=3), {}),
        ("experts", "lm", Layout(), BALANCE),
        ("experts", "lm", Layout(cp=2), BALANCE),
        ("experts", "lm", Layout(tp=2, sequence_parallel=True), BALANCE),
    ],
    ids=str,
)
def test_training_learns_the_same(
    models: dict[str, str], kind: str, head: str, layout: Layout, options: dict[str, Any]
) -> None:
    """fp64; the order of sums differs."""
    expected = together(run_ranks(1, learn, models[kind], Layout(), options, head, True))
    assert_same(together(run_ranks(layout.size, learn, models[kind], layout, options, head, False)), expected)


def score(world: Any, path: str, apart: bool) -> Tensor:
    engine = build(world, path, Layout(), optim=None, dtype=torch.float32)
    micro = pack_rows(batch_of([GROUP[0]] * 3, ANSWERS[0]), CPU)

    def head(decoder: Any, hidden: Tensor, micro: MicroBatch) -> Tensor:
        return response_log_probs(decoder, hidden, micro, 0.7)[0]

    (log_probs,) = engine.forward([alone(micro) if apart else micro], head)
    return log_probs


def test_scores_have_the_same_bits(models: dict[str, str]) -> None:
    """What makes generation's log-probs those of training on CPUs holds for shared prompts, too."""
    skip_unless_exact(choose_ops(torch.float32, CPU), torch.float32)
    (shared,), (apart,) = (run_ranks(1, score, models["untied"], apart) for apart in (False, True))
    assert torch.equal(shared, apart)
