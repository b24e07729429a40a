"""What ranks of an engine send to each other, in bytes, and in which precision they sum it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine_runs import (
    CONFIGS,
    LENGTHS,
    LLAMA,
    OPTIM,
    QWEN3_MOE,
    boxes_of,
    build,
    cut,
    next_token_loss,
    rows_of,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.models.experts import COUNTS, LABEL
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.parallel import zero
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout

EXPERTS = {**QWEN3_MOE, "num_experts_per_tok": QWEN3_MOE["num_experts"]}  # each token takes all


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    deep = {**CONFIGS["untied"], "num_hidden_layers": 5, "initializer_range": 0.2}
    return write_models(tmp_path_factory.mktemp("models"), {"untied": LLAMA, "5 layers": deep, "experts": EXPERTS})


# -- bytes


def sent_in_passes(world: Any, path: str, layout: Layout, labels: Sequence[str]) -> tuple[int, list[list[int]]]:
    """The fewest rows of a product, and bytes that this rank sends under each label in a forward pass, and in one with its backward
    pass."""
    engine = build(world, path, layout)
    batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 1)
    sent = []
    for run in (
        lambda: engine.forward(batches, lambda *_: None),
        lambda: engine.forward_backward(batches, next_token_loss),
    ):
        before = [RECORDER.sent[label] for label in labels]
        run()
        sent.append([RECORDER.sent[label] - count for label, count in zip(labels, before, strict=True)])
    return engine.chunks[0].min_rows, sent


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(cp=2, tp=2)], ids=str)
def test_bytes_of_shared_tokens_are_those_of_the_formula(models: dict[str, str], layout: Layout) -> None:
    """2 (Hq + Hkv') D numbers a token and layer each way, (c - 1) / c of them to other ranks."""
    cp, dim = layout.cp, LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    heads, kv = LLAMA["num_attention_heads"] // layout.tp, max(LLAMA["num_key_value_heads"] // layout.tp, cp)
    tokens = math.ceil(sum(LENGTHS) / cp)
    forward = LLAMA["num_hidden_layers"] * tokens * 2 * (heads + kv) * dim * 8 * (cp - 1) // cp
    for _, sent in run_ranks(layout.size, sent_in_passes, models["untied"], layout, ["context_parallel"]):
        assert sent == [[forward], [2 * forward]]


@pytest.mark.parametrize("layout", [Layout(cp=4, ep=4), Layout(tp=2, dp=2, ep=2), Layout(dp=4, ep=2)], ids=str)
def test_bytes_of_shared_experts_are_those_of_the_formula(models: dict[str, str], layout: Layout) -> None:
    """2 * per_token * hidden numbers a token and layer each way, (ep - 1) / ep of them to other ranks, where a token takes all experts;
    and E integers."""
    spec = spec_from_config(EXPERTS, "config")
    ep, layers = layout.ep, spec.num_hidden_layers
    parts = [sum(LENGTHS[rank :: layout.dp]) for rank in range(layout.dp)]
    results = run_ranks(layout.size, sent_in_passes, models["experts"], layout, [LABEL, COUNTS])
    for index, (min_rows, (forward, both)) in enumerate(results):
        at, group = layout.coordinate(index), [layout.coordinate(rank) for rank in layout.ep_group(index)]
        tokens = {member: max(-(-parts[member.dp] // layout.cp), min_rows) for member in group}
        leaving = tokens[at] * (ep - 1)  # rows for the experts of others, of one expert each
        returning = sum(
            number for member, number in tokens.items() if member != at
        )  # results for others' tokens, of one expert here
        rows = layers * (leaving + returning) * (4 // ep) * spec.hidden_size * 8
        numbers = layers * 4 * 8 * (ep - 1) // ep
        assert forward == [rows, numbers]
        assert both == [2 * rows, numbers]


def zero_bytes(world: Any, path: str, layout: Layout, micro_batches: int) -> tuple[Counter[tuple[str, str]], int, bool]:
    """Bytes that this rank gives to each operation of a group of ranks in one step; of its shards; and whether they equal those of
    the same place in the first shard group."""
    engine = build(world, path, layout)
    moved: Counter[tuple[str, str]] = Counter()
    ranks = {group.name: str(list(group.ranks)) for group in (engine.mesh.dp, engine.mesh.dp_shard, engine.mesh.dp_replicate)}
    RECORDER.entries = type(RECORDER.entries)(maxlen=10_000)
    batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, micro_batches)
    engine.forward_backward(batches, next_token_loss)
    engine.optimizer_step()
    for _, operation, name, size, _ in RECORDER.entries:
        if name in ranks and operation != "connect":
            moved[operation, ranks[name]] += size
    flat = torch.cat([tensor.reshape(-1) for tensor in engine.local_tensors().values()])
    copies = engine.mesh.dp_replicate.all_gather(flat, "test")
    return moved, flat.nbytes, all(torch.equal(copy, flat) for copy in copies)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_sums_of_shards_leave_a_shard_group(models: dict[str, str], stage: int) -> None:
    """Once per step, however many micro-batches; and the copies stay equal to the bit. ZeRO-3 gathers in the forward and the backward
    pass of each micro-batch, ZeRO-1 sums once."""
    results = run_ranks(4, zero_bytes, models["untied"], Layout(dp=4, zero=stage, zero_size=2), 3)
    longest = results[0][1]  # the first rank of a group has the longest shards, and the others send as much
    for rank, (moved, shards, equal) in enumerate(results):
        inside, across = str([rank // 2 * 2, rank // 2 * 2 + 1]), str([rank % 2, rank % 2 + 2])
        operations = {"all_gather:zero_parameters": inside, "reduce_scatter:zero_gradients": inside}
        assert moved.keys() == {*operations.items(), ("all_reduce:gradients", across)}
        assert moved["all_reduce:gradients", across] == shards and equal
        assert moved["all_gather:zero_parameters", inside] == longest * {1: 1, 2: 1, 3: 2 * 3}[stage]
        assert moved["reduce_scatter:zero_gradients", inside] == 2 * longest * {1: 1, 2: 3, 3: 3}[stage]


# -- the precision of sums


def gradients(world: Any, path: str, layout: Layout, staged: int) -> Any:
    """The norm and the boxes of a bf16 model's summed gradients. ``staged``: elements that ZeRO moves at a time."""
    engine = build(world, path, layout, dtype=torch.bfloat16, optim=replace(OPTIM, lr=0.0))
    batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 3)
    with mock.patch.object(zero, "STAGED", staged):
        engine.forward_backward(batches, next_token_loss)
        sums = engine._summed_gradients()
    assert {grad.dtype for grad in sums.values()} == {torch.float32}
    return engine._gradient_norm(sums), boxes_of(engine, sums)


def summed_gradients(path: str, layout: Layout, staged: int = zero.STAGED) -> tuple[float, dict[str, Tensor]]:
    results = run_ranks(layout.size, gradients, path, layout, staged)
    tensors: dict[str, Tensor] = {}
    for _, boxes in results:
        for name, shape, slices, part in boxes:
            tensors.setdefault(name, torch.full(shape, torch.nan))[slices] = part
    return results[0][0], tensors


@pytest.mark.parametrize(("stage", "vpp"), [(1, 1), (2, 2), (3, 2)])
def test_bf16_gradients_are_summed_in_fp32_over_micro_batches_and_ranks(models: dict[str, str], stage: int, vpp: int) -> None:
    """ZeRO's gradients are those of plain replicas up to the order of sums: bf16 would differ by 4e-3."""
    plain = Layout(pp=2, dp=2, vpp=vpp)
    norm, expected = summed_gradients(models["5 layers"], plain)
    zero_norm, tensors = summed_gradients(models["5 layers"], replace(plain, zero=stage))
    assert zero_norm == pytest.approx(norm, rel=1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max()), msg=name)
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name}: bf16 holds these gradients exactly"


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_moves_large_parameters_in_pieces_with_the_same_bits(models: dict[str, str], stage: int) -> None:
    norm, expected = summed_gradients(models["untied"], Layout(dp=2, zero=stage))
    norm_of_pieces, tensors = summed_gradients(models["untied"], Layout(dp=2, zero=stage), staged=37)
    assert norm == norm_of_pieces
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items())
