"""Rows that share a prompt compute it once: the same bits forward, the same gradients, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_runs import LLAMA, assert_same, build, local_boxes, together
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.kernels import AttentionRule, Ops, choose_ops
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.objective import last_token_value, pack_rows, response_log_probs, response_values
from rlhf_spmd.workers.passes import Packed

CPU = torch.device("cpu")
PROMPTS = [[7, 8, 9, 4, 5], [7, 8, 9, 4, 5], [3], [7, 8, 9, 4, 6], [7, 8, 9, 4, 5], [3], [7, 8]]
RESPONSES = [[1, 2], [3, 4, 5, 6], [1], [], [9], [2, 2, 2], [4, 1]]


def batch_of(prompts: list[list[int]], responses: list[list[int]]) -> Batch:
    index = torch.arange(len(prompts))
    fields = {"prompt_ids": ragged(prompts, torch.int32), "response_ids": ragged(responses, torch.int32)}
    return Batch(index, index, fields)


def alone(micro: Packed) -> Packed:
    """The same rows, with the tokens of each by themselves."""
    assert micro.places is not None
    return Packed(micro.tokens[micro.places], micro.lengths, micro.extra)


def test_prompts_but_their_last_tokens_are_held_once() -> None:
    micro = pack_rows(batch_of(PROMPTS, RESPONSES), CPU)
    assert micro.places is not None
    whole = [token for prompt, response in zip(PROMPTS, RESPONSES, strict=True) for token in prompt + response]
    assert micro.tokens[micro.places].tolist() == whole
    # 7 8 9 4 stands once for four rows (one of which ends with another token), all else as often as there are rows
    assert len(micro.tokens) == len(whole) - 3 * 4
    assert micro.lengths.tolist() == [len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    seen = micro.places.tolist()
    assert [seen.index(token) for token in range(len(micro.tokens))] == sorted(seen.index(t) for t in range(len(micro.tokens)))


def test_little_to_share_is_laid_out() -> None:
    batch = batch_of(PROMPTS, RESPONSES)
    whole = int((batch["prompt_ids"].lengths + batch["response_ids"].lengths).sum())
    assert pack_rows(batch, CPU, 12 / whole - 0.01).places is not None
    micro = pack_rows(batch, CPU, 12 / whole)
    assert micro.places is None
    assert torch.equal(micro.tokens, alone(pack_rows(batch, CPU)).tokens)


@pytest.mark.parametrize("prompts", [[[1, 2], [1, 3, 4], [2]], [[5], [5]], []], ids=str)
def test_where_nothing_is_shared_rows_lie_as_they_are(prompts: list[list[int]]) -> None:
    micro = pack_rows(batch_of(prompts, [[8, 9]] * len(prompts)), CPU)
    assert micro.places is None
    assert micro.tokens.tolist() == [token for prompt in prompts for token in [*prompt, 8, 9]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [AttentionRule(0.4), AttentionRule(0.4, 1.5, 3)], ids=str)
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "as_on_gpus"])
def test_attention_over_shared_tokens(dtype: torch.dtype, rule: AttentionRule, gpu: bool) -> None:
    micro, make = pack_rows(batch_of(PROMPTS, RESPONSES), CPU), torch.Generator().manual_seed(0)
    assert micro.places is not None
    ops, lengths, held = Ops() if gpu else choose_ops(dtype, CPU), micro.lengths.tolist(), len(micro.tokens)
    q, k, v, weight = (torch.randn(held, heads, 8, generator=make).to(dtype).requires_grad_() for heads in (6, 2, 2, 6))
    shared = PackedAttention(lengths, ops=ops, places=micro.places)
    assert shared.positions[micro.places].tolist() == [i for n in lengths for i in range(n)]
    out = shared.attend(0, q, k, v, rule)
    plain = PackedAttention(lengths, ops=ops).attend(0, *(x[micro.places] for x in (q, k, v)), rule)
    assert torch.equal(out[micro.places], plain)
    # a token's output counts once, as in the layers behind; fp64: only the order of sums differs
    firsts = torch.tensor([micro.places.tolist().index(token) for token in range(held)])
    got = torch.autograd.grad((out * weight).sum(), [q, k, v])
    want = torch.autograd.grad((plain[firsts] * weight).sum(), [q, k, v])
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


GROUP = [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
ANSWERS = [[[1, 2], [3], [4, 5, 6, 7]], [[2, 3], [8, 8, 8], [1]]]
LAYOUTS = [
    (Layout(), {}),
    (Layout(), {"activation_checkpointing": "selective"}),
    (Layout(tp=2), {"activation_checkpointing": "full"}),
    (Layout(tp=2, sequence_parallel=True), {}),
    (Layout(pp=2), {}),
    (Layout(dp=2, zero=3), {}),
]


def shared_loss(decoder: Any, hidden: Tensor, micro: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    if not len(micro.lengths):
        return hidden.sum(), {}
    if decoder.head_kind == "value":
        found = torch.cat([response_values(decoder, hidden, micro), last_token_value(decoder, hidden, micro)])
    else:
        found = response_log_probs(decoder, hidden, micro, 0.7)[0]
    return (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum() / 16, {}


def learn(world: Any, path: str, layout: Layout, options: dict[str, Any], head: str, apart: bool) -> Any:
    """Two steps; on two replicas each has one group."""
    engine, groups = build(world, path, layout, head, **options), range(2)
    reports = []
    for _ in range(2):
        packed = []
        for group in groups:
            micro = pack_rows(batch_of([GROUP[group]] * 3, ANSWERS[group]), CPU)
            if layout.dp == 1 or group == engine.mesh.dp_rank:
                packed.append(alone(micro) if apart else micro)
        loss = engine.forward_backward(packed, shared_loss).get("loss")
        report = engine.optimizer_step()
        if loss is not None:
            engine.mesh.dp.all_reduce(loss, "test")
            report["loss"] = float(loss)
        reports.append(report)
    return reports, local_boxes(engine)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "untied"
    write_random_model(path, LLAMA, seed=3)
    return str(path)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_training_learns_the_same(untied: str, layout: Layout, options: dict[str, Any], head: str) -> None:
    """fp64; the order of sums differs."""
    want = together(run_ranks(1, learn, untied, Layout(), {}, head, True))
    assert_same(together(run_ranks(layout.size, learn, untied, layout, options, head, False)), want)


def score(world: Any, path: str, apart: bool) -> Tensor:
    engine = build(world, path, Layout(), optim=None, dtype=torch.float32)
    micro = pack_rows(batch_of([GROUP[0]] * 3, ANSWERS[0]), CPU)

    def head(decoder: Any, hidden: Tensor, micro: Packed) -> Tensor:
        return response_log_probs(decoder, hidden, micro, 0.7)[0]

    (found,) = engine.forward([alone(micro) if apart else micro], head)
    return found


def test_scores_have_the_same_bits(untied: str) -> None:
    """What makes generation's log-probs those of training on CPUs holds for shared prompts, too."""
    (together,), (apart,) = (run_ranks(1, score, untied, apart) for apart in (False, True))
    assert torch.equal(together, apart)
