"""Ranks with several model chunks (interleaved 1F1B): the training of one rank; what lies on them; ZeRO's bytes and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import save_checkpoint
from engine_runs import (
    CONFIGS,
    OPTIM,
    Result,
    assert_same,
    build,
    cut,
    drawn,
    joined,
    local_boxes,
    next_token_loss,
    rows_of,
    score,
    special_batches,
    together,
    train,
)
from ranks import run_ranks
from rlhf_spmd.checkpoint.load import load_checkpoint
from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.schema import check_section
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel import zero
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout

# layers that four, six and eight stages cut unevenly
DEPTH = {"untied": 5, "tied": 6, "qwen3": 9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base: Path = tmp_path_factory.mktemp("models")
    for name, layers in DEPTH.items():
        write_random_model(base / name, {**CONFIGS[name], "num_hidden_layers": layers, "initializer_range": 0.2}, seed=3)
    return {name: str(base / name) for name in DEPTH}


_SINGLE: dict[tuple[str, str], Result] = {}


def single(path: str, head: str = "lm") -> Result:
    """One rank, one micro-batch, computed once."""
    if (path, head) not in _SINGLE:
        _SINGLE[path, head] = together(run_ranks(1, train, path, Layout(), [1], head, {}))
    return _SINGLE[path, head]


# model, layout, micro-batches per replica (of 7 rows: the last ones may be empty), head
CASES: list[tuple[str, Layout, list[int], str]] = [
    ("untied", Layout(pp=2, vpp=2), [4], "lm"),
    ("tied", Layout(pp=2, vpp=2), [3], "lm"),
    ("tied", Layout(pp=2, vpp=3), [9], "lm"),
    ("untied", Layout(pp=2, vpp=2), [1], "lm"),
    ("tied", Layout(pp=2, vpp=2), [5], "value"),
    ("qwen3", Layout(pp=4, vpp=2), [6], "lm"),
    ("tied", Layout(pp=2, tp=2, vpp=3), [3], "lm"),
    ("qwen3", Layout(pp=2, tp=2, vpp=2, sequence_parallel=True), [5], "lm"),
    ("untied", Layout(pp=2, dp=2, vpp=2), [2, 5], "lm"),
    ("tied", Layout(pp=2, dp=2, zero=1, vpp=2), [4, 3], "lm"),
    ("untied", Layout(pp=2, dp=2, zero=2, vpp=2), [1, 4], "lm"),
    ("tied", Layout(pp=2, dp=2, zero=3, vpp=2), [3, 6], "lm"),
]


@pytest.mark.parametrize(("kind", "layout", "micro", "head"), CASES, ids=str)
def test_interleaved_training_is_that_of_one_rank(
    models: dict[str, str], kind: str, layout: Layout, micro: list[int], head: str
) -> None:
    assert_same(together(run_ranks(layout.size, train, models[kind], layout, micro, head, {})), single(models[kind], head))


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=3), Layout(pp=2, dp=2, zero=3, vpp=2)], ids=str)
def test_in_fp32_it_stays_near_fp64(models: dict[str, str], layout: Layout) -> None:
    options = {"dtype": torch.float32, "activation_checkpointing": "full"}
    got = together(run_ranks(layout.size, train, models["tied"], layout, [3, 3], "lm", options))
    for mine, theirs in zip(got[0], single(models["tied"])[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_replicas_without_rows_and_gradients_over_two_calls(models: dict[str, str]) -> None:
    layout = Layout(pp=2, dp=2, zero=3, vpp=2)
    got = joined(run_ranks(layout.size, special_batches, models["tied"], layout))
    assert_same(got, joined(run_ranks(1, special_batches, models["tied"], Layout())))


@pytest.mark.parametrize(
    ("layout", "micro"), [(Layout(pp=2, vpp=2), [3]), (Layout(pp=2, dp=2, zero=3, vpp=3), [1, 5])], ids=str
)
def test_forward_is_that_of_one_rank(models: dict[str, str], layout: Layout, micro: list[int]) -> None:
    want = run_ranks(1, score, models["tied"], Layout(), [1])[0]
    results = run_ranks(layout.size, score, models["tied"], layout, micro)
    for replica in range(layout.dp):
        mine = list(range(len(want)))[replica :: layout.dp]
        order = [row for i in range(micro[replica]) for row in mine[i :: micro[replica]]]
        for row, got in zip(order, results[layout.index(layout.pp - 1, replica, 0, 0)], strict=True):
            # the last of each row is a label of the neighbouring row: compare what belongs to the row
            torch.testing.assert_close(got[:-1], want[row][:-1], rtol=1e-12, atol=1e-12)


def test_random_weights_are_the_same_with_chunks(models: dict[str, str]) -> None:
    want = joined(run_ranks(1, drawn, models["tied"], Layout()))
    got = joined(run_ranks(4, drawn, models["tied"], Layout(pp=2, dp=2, zero=3, vpp=3)))
    assert got[1].keys() == want[1].keys()
    assert all(torch.equal(got[1][name], tensor) for name, tensor in want[1].items())


# -- checkpoints


def train_on(world: Any, path: str, layout: Layout, options: dict[str, Any], steps: range, load: str, save: str) -> Any:
    """Optimizer steps ``steps`` after reading the checkpoint ``load``; then writes one under ``save``. Either may be empty."""
    engine = build(world, path, layout, **options)
    assert engine.optimizer is not None
    state = RoleState(engine.param_shards(), engine.local_tensors(), engine.optimizer.state_tensors())
    if load:
        load_checkpoint(Path(load), "actor", state, engine.mesh.pool)
        engine.optimizer.step_count = steps.start
    reports = []
    for step in steps:
        batches = cut(rows_of(step, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 3)
        engine.forward_backward(batches, next_token_loss)
        reports.append(engine.optimizer_step() | {"loss": 0.0})
    engine.local_tensors()
    saved = str(save_checkpoint(Path(save), steps.stop, {"actor": state}, {}, engine.mesh.pool)) if save else ""
    return reports, local_boxes(engine), saved


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout(pp=2, dp=2, zero=3, vpp=2), Layout(tp=2)),
        (Layout(pp=4), Layout(pp=2, tp=2, vpp=3)),
    ],
    ids=str,
)
def test_a_checkpoint_loads_into_other_chunks(models: dict[str, str], tmp_path: Path, first: Layout, second: Layout) -> None:
    """Two steps in one layout, the third in another one: the run of one rank."""
    saved = run_ranks(first.size, train_on, models["tied"], first, {}, range(2), "", str(tmp_path))[0][2]
    results = run_ranks(second.size, train_on, models["tied"], second, {}, range(2, 3), saved, "")
    reports, weights = together([result[:2] for result in results])
    want = single(models["tied"])
    assert reports[0]["grad_norm"] == pytest.approx(want[0][2]["grad_norm"], rel=1e-10)
    for name, tensor in want[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-10)


# -- optimizer states on the host


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((Layout(), dtype) for dtype in (torch.float32, torch.bfloat16)),
        (Layout(pp=2, vpp=2), torch.float32),
        (Layout(dp=2, zero=3), torch.bfloat16),
    ],
    ids=str,
)
def test_offloaded_optimizer_states_change_no_bit(models: dict[str, str], layout: Layout, dtype: torch.dtype) -> None:
    """On CPUs they are in the same place; tests/workers/test_gpu.py has the case where they are not."""
    runs = []
    for offload in (False, True):
        options = {"dtype": dtype, "optim": replace(OPTIM, offload=offload)}
        runs.append(run_ranks(layout.size, train_on, models["untied"], layout, options, range(2), "", ""))
    for (reports, boxes, _), (other_reports, other_boxes, _) in zip(*runs, strict=True):
        assert reports == other_reports
        assert all(torch.equal(a[3], b[3]) for a, b in zip(boxes, other_boxes, strict=True))


# -- ZeRO: what it sends, and in which precision it sums


def gradients(world: Any, path: str, layout: Layout, num_micro_batches: int) -> Any:
    """The boxes of the summed bf16 model's gradients, and their norm."""
    engine = build(world, path, layout, dtype=torch.bfloat16, optim=replace(OPTIM, lr=0.0))
    batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, num_micro_batches)
    engine.forward_backward(batches, next_token_loss)
    grads = engine._summed_gradients()
    found = [
        (box.name, box.shape, box.global_slices, grads[name][box.local_slices].clone())
        for name, shard in engine.param_shards().items()
        for box in shard.boxes
    ]
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    return [{"loss": 0.0, "grad_norm": engine._gradient_norm(grads)}], found


def whole(results: Sequence[Any]) -> tuple[float, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for _, boxes in results:
        for name, shape, slices, part in boxes:
            tensors.setdefault(name, torch.full(shape, torch.nan))[slices] = part
    return results[0][0][0]["grad_norm"], tensors


@pytest.mark.parametrize(("zero", "vpp"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_bf16_gradients_are_summed_in_fp32_over_micro_batches_and_ranks(models: dict[str, str], zero: int, vpp: int) -> None:
    """ZeRO's gradients are those of plain replicas up to the order of sums: bf16 would differ by 4e-3."""
    plain = Layout(pp=2, dp=2, vpp=vpp)
    norm, want = whole(run_ranks(4, gradients, models["untied"], plain, 3))
    got_norm, got = whole(run_ranks(4, gradients, models["untied"], replace(plain, zero=zero), 3))
    assert got_norm == pytest.approx(norm, rel=1e-6)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()), msg=name)
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name}: bf16 holds these gradients exactly"


def gradients_in_pieces(world: Any, path: str, layout: Layout, num_micro_batches: int) -> Any:
    whole, zero.STAGED = zero.STAGED, 37
    try:
        return gradients(world, path, layout, num_micro_batches)
    finally:
        zero.STAGED = whole


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_moves_large_parameters_in_pieces_with_the_same_bits(models: dict[str, str], stage: int) -> None:
    layout = Layout(dp=2, zero=stage)
    results = [run_ranks(2, function, models["untied"], layout, 3) for function in (gradients, gradients_in_pieces)]
    (norm, want), (other, got) = map(whole, results)
    assert norm == other and want.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())


def count_bytes(world: Any, path: str, layout: Layout, num_micro_batches: int) -> Any:
    """Bytes received under ZeRO's two labels in one step, and per layer and for the rest the bytes of the padded parameters."""
    engine = build(world, path, layout, dtype=torch.float32)
    before = RECORDER.received.copy()
    batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, num_micro_batches)
    engine.forward_backward(batches, next_token_loss)
    engine.optimizer_step()
    counted = {label: RECORDER.received[label] - before[label] for label in ("zero_parameters", "zero_gradients")}
    layers = rest = 0
    for name, param in engine.parameters().items():
        rows = -(-param.shape[0] // layout.dp) * layout.dp
        size = rows * param[0].numel() * 4
        layers, rest = (layers + size, rest) if "layers." in name else (layers, rest + size)
    return counted, layers, rest


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=2), Layout(dp=2, zero=3)], ids=str)
def test_bytes_of_zero_are_counted(models: dict[str, str], layout: Layout) -> None:
    """Each gather and each reduction moves (d - 1) / d of what it is about. ZeRO-3 gathers in the forward and the backward pass."""
    m = 3
    for counted, layers, rest in run_ranks(2, count_bytes, models["untied"], layout, m):
        gathers = m * (2 * layers + rest * 2) if layout.zero == 3 else layers + rest
        reductions = layers + rest if layout.zero == 1 else m * (layers + rest)
        assert counted == {"zero_parameters": gathers // 2, "zero_gradients": reductions // 2}


def test_impossible_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"models\.actor\.layout: vpp=2 .* pp=1; set vpp=1 or pp"):
        resolve_layout(LayoutConfig(vpp=2), 1, "models.actor.layout")
    with pytest.raises(ValueError, match="vpp=0: must be at least 1"):
        check_section(LayoutConfig(pp=2, vpp=0), "models.actor.layout")
