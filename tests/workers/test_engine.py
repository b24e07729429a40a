"""The training engine: the same losses, norms and weights in every layout, and those of transformers with torch's AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_runs import (
    COUNT,
    LENGTHS,
    LLAMA,
    OPTIM,
    STEADY,
    STEPS,
    assert_same,
    build,
    check_half_precision,
    check_single_precision,
    cut,
    drawn,
    half_precision,
    joined,
    next_token_loss,
    rows_of,
    score,
    single,
    special_batches,
    together,
    train,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.optim_config import learning_rate
from rlhf_spmd.workers.passes import Packed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


# (p, t, d, zero), then micro-batches per replica
LAYOUTS = [
    ((1, 1, 1, 0), [3]),
    ((1, 2, 1, 0), [2]),
    ((2, 1, 1, 0), [4]),
    ((3, 1, 1, 0), [2]),
    ((2, 2, 1, 0), [3]),
    ((1, 1, 2, 0), [2, 3]),
    ((1, 1, 2, 1), [3, 3]),
    ((1, 1, 2, 2), [1, 3]),
    ((1, 1, 2, 3), [2, 5]),
    ((1, 2, 2, 3), [2, 2]),
    ((2, 1, 2, 1), [4, 3]),
    ((2, 1, 2, 2), [1, 4]),
    ((2, 1, 2, 3), [3, 6]),
]


@pytest.mark.parametrize(("shape", "micro"), LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_training_is_the_same_in_every_layout(
    models: dict[str, str], kind: str, shape: tuple[int, int, int, int], micro: list[int]
) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    assert_same(together(run_ranks(layout.size, train, models[kind], layout, micro, "lm", {})), single(models[kind], "lm"))


@pytest.mark.parametrize("shape", [(2, 1, 1, 0), (1, 2, 2, 3), (1, 1, 2, 1)], ids=str)
def test_a_value_model_too(models: dict[str, str], shape: tuple[int, int, int, int]) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    got = together(run_ranks(layout.size, train, models["tied"], layout, [3, 2], "value", {}))
    assert_same(got, single(models["tied"], "value"))
    assert "score.weight" in got[1] and got[1]["score.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("shared_kv", (1, 2, 1, 0)),
        ("shared_kv", (1, 2, 2, 3)),
        ("shared_kv", (1, 4, 1, 0)),
        ("qwen3", (1, 2, 2, 2)),
        ("qwen3", (2, 2, 1, 0)),
        ("qwen2", (1, 2, 2, 1)),
    ],
    ids=str,
)
def test_shared_kv_heads_and_other_families(models: dict[str, str], kind: str, shape: tuple[int, int, int, int]) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    assert_same(together(run_ranks(layout.size, train, models[kind], layout, [2, 2], "lm", {})), single(models[kind], "lm"))


@pytest.mark.parametrize("shape", [(1, 1, 1, 0), (2, 1, 2, 3), (1, 2, 2, 1)], ids=str)
def test_activation_checkpointing_changes_nothing(models: dict[str, str], shape: tuple[int, int, int, int]) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    options = {"activation_checkpointing": "full"}
    got = together(run_ranks(layout.size, train, models["untied"], layout, [3, 3], "lm", options))
    assert_same(got, single(models["untied"], "lm"))


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_one_rank_equals_transformers_and_torch_adamw(models: dict[str, str], kind: str) -> None:
    """transformers computes norms in fp32 even in an fp64 model."""
    from transformers import AutoModelForCausalLM

    reports, weights = together(run_ranks(1, train, models[kind], Layout(), [2], "lm", {"optim": STEADY}))
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float64, attn_implementation="eager")
    oracle = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1, eps=1e-3)
    for step, report in enumerate(reports):
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows_of(step, LLAMA["vocab_size"]):
            log_probs = model(row[None]).logits[0].log_softmax(-1)
            loss = loss - log_probs[:-1].gather(1, row[1:, None]).sum() / COUNT
        oracle.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        oracle.param_groups[0]["lr"] = learning_rate(OPTIM, step, STEPS + 2)
        oracle.step()
        assert report["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert report["grad_norm"] > 0.5, "clipping must have something to do"
    for name, tensor in model.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("shape", "micro"), [((2, 1, 1, 0), [3]), ((2, 1, 2, 3), [1, 5]), ((1, 2, 2, 1), [2, 2])], ids=str)
def test_forward_is_the_same_in_every_layout(
    models: dict[str, str], shape: tuple[int, int, int, int], micro: list[int]
) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    want = run_ranks(1, score, models["tied"], Layout(), [1])[0]
    results = run_ranks(layout.size, score, models["tied"], layout, micro)
    for index, result in enumerate(results):
        stage, replica, _, _ = layout.coordinate(index)
        if stage == pp - 1:
            mine = list(range(len(LENGTHS)))[replica::dp]
            order = [row for i in range(micro[replica]) for row in mine[i :: micro[replica]]]
            for row, got in zip(order, result, strict=True):
                # the last of each row is a label of the neighbouring row: compare what belongs to the row
                torch.testing.assert_close(got[:-1], want[row][:-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 2, 0), (1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 2, 3), (2, 1, 2, 3)], ids=str)
def test_replicas_without_rows_and_gradients_over_two_calls(models: dict[str, str], shape: tuple[int, int, int, int]) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    results = run_ranks(layout.size, special_batches, models["tied"], layout)
    want = run_ranks(1, special_batches, models["tied"], Layout())
    assert_same(joined(results), joined(want))


def poisoned(world: Any, path: str, layout: Layout) -> tuple[str, bool]:
    engine = build(world, path, layout)
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}

    def loss(decoder: Decoder, hidden: Tensor, batch: Packed) -> tuple[Tensor, dict[str, Tensor]]:
        value, stats = next_token_loss(decoder, hidden, batch)
        return (value * torch.nan if engine.mesh.dp_rank == 1 else value), stats

    engine.forward_backward(cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 2), loss)
    try:
        engine.optimizer_step()
    except FloatingPointError as error:
        same = all(torch.equal(before[name], tensor) for name, tensor in engine.local_tensors().items())
        return str(error), same
    return "", False


@pytest.mark.parametrize("zero", [0, 3])
def test_non_finite_gradients_stop_all_ranks_before_the_step(models: dict[str, str], zero: int) -> None:
    results = run_ranks(4, poisoned, models["untied"], Layout(pp=2, dp=2, zero=zero))
    assert results == [("gradient norm is nan at optimizer step 0", True)] * 4


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 0), (1, 1, 2, 0), (1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 2, 3), (2, 1, 1, 0), (1, 2, 1, 0), (2, 1, 2, 3)],
    ids=str,
)
def test_bf16_with_fp32_masters_follows_fp64(models: dict[str, str], shape: tuple[int, int, int, int]) -> None:
    """Losses to 2%, norms to 5%, what the steps have added to each tensor (its fp32 masters) to 15% of its 2-norm."""
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    check_half_precision(run_ranks(layout.size, half_precision, models["untied"], layout), models["untied"])


@pytest.mark.parametrize("shape", [(2, 1, 1, 0), (1, 2, 1, 0), (1, 1, 2, 3)], ids=str)
def test_fp32_stays_near_fp64(models: dict[str, str], shape: tuple[int, int, int, int]) -> None:
    pp, tp, dp, zero = shape
    layout = Layout(pp=pp, tp=tp, dp=dp, zero=zero)
    options = {"dtype": torch.float32, "optim": STEADY}
    check_single_precision(run_ranks(layout.size, train, models["tied"], layout, [2, 2], "lm", options), models["tied"])


def test_random_weights_are_the_same_in_every_layout(models: dict[str, str]) -> None:
    want = joined(run_ranks(1, drawn, models["tied"], Layout()))
    got = joined(run_ranks(4, drawn, models["tied"], Layout(pp=2, dp=2, zero=3)))
    assert all(torch.equal(got[1][name], tensor) for name, tensor in want[1].items())
