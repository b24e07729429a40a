"""ZeRO over a part of dp (HSDP): the numbers of one rank, gathers inside a shard group, and what crosses it counted in bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_runs import (
    OPTIM,
    assert_same,
    build,
    check_half_precision,
    cut,
    go,
    half_precision,
    joined,
    next_token_loss,
    rows_of,
    single,
    special_batches,
    together,
    train,
    worst_update,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.manifest import PARAM
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("models"))


HYBRID = [Layout(dp=4, zero=stage, zero_size=2) for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("untied", HYBRID[0]), ("tied", HYBRID[1]), ("untied", HYBRID[2]), ("tied", HYBRID[2])),
        ("tied", Layout(dp=4, zero=3, zero_size=1)),
    ],
    ids=str,
)
def test_training_is_that_of_one_rank(models: dict[str, str], kind: str, layout: Layout) -> None:
    got = together(run_ranks(4, train, models[kind], layout, [2, 3, 1, 2], "lm", {}))
    assert_same(got, single(models[kind], "lm"))


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=4, zero=3, zero_size=2), Layout(pp=2, dp=4, zero=2, zero_size=2)], ids=str)
def test_beside_tensor_slices_and_stages(models: dict[str, str], layout: Layout) -> None:
    got = together(run_ranks(8, train, models["tied"], layout, [2, 1, 2, 1], "lm", {}))
    assert_same(got, single(models["tied"], "lm"))


@pytest.mark.parametrize("layout", HYBRID, ids=str)
def test_replicas_without_rows_and_gradients_over_two_calls(models: dict[str, str], layout: Layout) -> None:
    results = run_ranks(4, special_batches, models["tied"], layout)
    assert_same(joined(results), joined(run_ranks(1, special_batches, models["tied"], Layout())))


@pytest.mark.parametrize("layout", [HYBRID[0], HYBRID[2]], ids=str)
def test_bf16_with_fp32_masters_follows_fp64(models: dict[str, str], layout: Layout) -> None:
    check_half_precision(run_ranks(4, half_precision, models["untied"], layout), models["untied"])


def counted(world: Any, path: str, layout: Layout, micro_batches: int) -> tuple[Counter[tuple[str, str]], int, bool]:
    """Bytes that this rank gives to each operation of a group of ranks in one step; of its shards; and whether they equal those of
    the same place in the first shard group."""
    engine = build(world, path, layout)
    moved: Counter[tuple[str, str]] = Counter()
    ranks = {group.name: str(list(group.ranks)) for group in (engine.mesh.dp, engine.mesh.dp_shard, engine.mesh.dp_replicate)}
    RECORDER.entries.clear()
    RECORDER.entries = type(RECORDER.entries)(maxlen=10_000)
    engine.forward_backward(
        cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, micro_batches), next_token_loss
    )
    engine.optimizer_step()
    for _, operation, name, size, _ in RECORDER.entries:
        if name in ranks and operation != "connect":
            moved[operation, ranks[name]] += size
    flat = torch.cat([tensor.reshape(-1) for tensor in engine.local_tensors().values()])
    copies = engine.mesh.dp_replicate.all_gather(flat, "test")
    return moved, flat.nbytes, all(torch.equal(copy, flat) for copy in copies)


@pytest.mark.parametrize("layout", HYBRID, ids=str)
def test_only_sums_of_shards_leave_a_shard_group(models: dict[str, str], layout: Layout) -> None:
    """Once per step, however many micro-batches; and the copies stay equal to the bit."""
    results = run_ranks(4, counted, models["untied"], layout, 3)
    for rank, (moved, shards, equal) in enumerate(results):
        inside, across = str([rank // 2 * 2, rank // 2 * 2 + 1]), str([rank % 2, rank % 2 + 2])
        operations = {"all_gather:zero_parameters": inside, "reduce_scatter:zero_gradients": inside}
        assert moved.keys() == {*operations.items(), ("all_reduce:gradients", across)}
        assert moved["all_reduce:gradients", across] == shards and equal
        first = results[0][1]  # the first rank of a group has the longest shards, and the others send as much
        assert moved["all_gather:zero_parameters", inside] == first * {1: 1, 2: 1, 3: 2 * 3}[layout.zero]
        assert moved["reduce_scatter:zero_gradients", inside] == 2 * first * {1: 1, 2: 3, 3: 3}[layout.zero]


@pytest.mark.parametrize(
    ("first", "then", "optim"),
    [
        (HYBRID[2], Layout(dp=2, zero=3), "adamw"),
        (Layout(dp=2, zero=3), HYBRID[0], "adamw"),
        (HYBRID[1], Layout(tp=2), "adamw"),
        (HYBRID[2], Layout(tp=2), "muon"),
        (Layout(dp=2, zero=3), HYBRID[1], "muon"),
    ],
    ids=["with to without", "without to with", "with to tp2", "muon, with to tp2", "muon, without to with"],
)
def test_a_checkpoint_goes_on_with_and_without(
    models: dict[str, str], tmp_path: Path, first: Layout, then: Layout, optim: str
) -> None:
    """Written once, however many copies there are."""
    options, path = {"optim": replace(OPTIM, name=optim)}, models["untied"]
    results = run_ranks(first.size, go, path, first, options, range(2), "", str(tmp_path))
    saved = tmp_path / "checkpoints" / "step_2"
    pieces = read_manifest(saved).pieces_of("actor", PARAM)
    weights = together(results)[1]
    assert {name: sum(math.prod(piece.size) for piece in its) for name, its in pieces.items()} == {
        name: tensor.numel() for name, tensor in weights.items()
    }
    got = run_ranks(then.size, go, path, then, options, range(2, 3), str(saved), "")
    want = run_ranks(1, go, path, Layout(), options, range(3), "", "")
    if optim == "adamw":
        assert_same(joined(got), (joined(want)[0][2:], joined(want)[1]))
    else:  # bfloat16 rounds its matrices
        difference, where = worst_update(joined(got)[1], joined(want)[1], path, torch.float32)
        assert difference < 0.02, where


def test_layouts_say_which_ranks_hold_what() -> None:
    layout = Layout(pp=2, tp=2, dp=8, zero=3, zero_size=4)
    assert str(layout) == "pp(2) * tp(2) * dp(8) zero(3) zero_size(4)" and (layout.dp_shard, layout.dp_replicate) == (4, 2)
    assert layout.shard_group(11) == [9, 11, 13, 15] and layout.replicate_group(11) == [3, 11]
    whole = resolve_layout(LayoutConfig(zero=2, zero_size=4), 4, "models.actor.layout")
    assert whole == Layout(dp=4, zero=2), "all of dp is what null means"
    assert Layout(dp=4).dp_shard == Layout(dp=4, zero=3, zero_size=1).dp_shard == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LayoutConfig(zero=3, zero_size=3), "zero_size=3: must divide dp * cp = 8; allowed: 1, 2, 4, 8, or null: all of them"),
        (
            LayoutConfig(zero=1, zero_size=16),
            "zero_size=16: must divide dp * cp = 8; allowed: 1, 2, 4, 8, or null: all of them",
        ),
        (
            LayoutConfig(zero_size=4),
            "zero_size=4 needs models.actor.layout.zero 1, 2 or 3, and that is 0",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(config: LayoutConfig, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^models\.actor\.layout\.{re.escape(message)}$"):
        resolve_layout(config, 8, "models.actor.layout")
