"""Training of adapters: the same steps in every layout, the weights beside them untouched, and nothing kept for these."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine_runs import (
    CONFIGS,
    QWEN3_MOE,
    STEADY,
    assert_same,
    build,
    cut,
    local_boxes,
    next_token_loss,
    rows_of,
    single,
    together,
    train,
    whole_tensors,
    write_models,
)
from ranks import run_ranks
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.lora import LoraConfig, adapter_tensor, is_adapter
from rlhf_spmd.models.quantized import rounded
from rlhf_spmd.parallel.boxes import zero_shards
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.rank_shards import rank_shards
from rlhf_spmd.workers.reference import as_training_began
from rlhf_spmd.workers.rollout_engine import merge_adapters

LORA = LoraConfig(rank=3, alpha=6.0)
SOME = LoraConfig(rank=2, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
COLUMNS = LoraConfig(rank=3, dropout=0.5, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
LAYERS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    deep = {name: {**CONFIGS[name], "num_hidden_layers": LAYERS} for name in ("untied", "tied")}
    large = {**deep["untied"], "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    return write_models(tmp_path_factory.mktemp("models"), {**deep, "wide": large, "experts": QWEN3_MOE})


def run(path: str, layout: Layout, head: str, micro: list[int], **options: Any) -> Any:
    return together(run_ranks(layout.size, train, path, layout, micro, head, {"optim": STEADY, **options}))


@pytest.mark.parametrize(
    ("model", "head", "lora", "layout"),
    [
        ("untied", "lm", LORA, Layout(tp=4)),  # KV heads that ranks share
        ("untied", "lm", LORA, Layout(tp=2, sequence_parallel=True)),
        ("untied", "lm", LORA, Layout(pp=2, vpp=2)),
        ("untied", "lm", LORA, Layout(dp=2, zero=2)),
        ("untied", "lm", LORA, Layout(cp=2, dp=2, zero=3, zero_size=2)),
        ("untied", "lm", LORA, Layout(tp=2, dp=2)),
        ("tied", "lm", SOME, Layout(tp=2)),  # ends share a tensor
        ("tied", "lm", SOME, Layout(pp=2, dp=2, zero=3)),
        ("untied", "value", LORA, Layout(tp=2, dp=2, zero=3)),  # a head that is trained whole
        ("untied", "value", LORA, Layout(pp=2, dp=2, zero=1)),
        ("experts", "lm", LORA, Layout(dp=4, ep=2, zero=3)),
        ("experts", "lm", LORA, Layout(tp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_the_same_steps_in_every_layout(
    models: dict[str, str], model: str, head: str, lora: LoraConfig, layout: Layout
) -> None:
    path = models[model]
    reports, weights = single(path, head, STEADY.eps, lora=lora)
    assert_same(run(path, layout, head, [2, 3, 1, 2], lora=lora), (reports, weights), 1e-9)
    base = load_file(Path(path) / "model.safetensors")
    assert all(torch.equal(tensor, base[name].double()) for name, tensor in weights.items() if name in base)
    added = weights.keys() - base.keys()
    assert added == {name for name in weights if ".lora_" in name} | ({"score.weight"} & weights.keys())
    assert all(float(weights[name].abs().max()) > 1e-4 for name in added if ".lora_B" in name), "an adapter was not trained"


@pytest.mark.parametrize(
    ("bits", "layout"),
    [
        (4, Layout(tp=2, sequence_parallel=True)),
        (4, Layout(tp=2, dp=2, zero=3)),
        (8, Layout(pp=2, vpp=2)),
    ],
    ids=str,
)
def test_the_same_steps_beside_fewer_bits(models: dict[str, str], bits: int, layout: Layout) -> None:
    """In float32, bitsandbytes' widest: sums in another order. That other base gives numbers ten times further away and more."""
    path = models["wide"]
    quantized, plain = (
        single(path, "lm", STEADY.eps, lora=lora, dtype=torch.float32) for lora in (replace(LORA, bits=bits), LORA)
    )
    assert_same(run(path, layout, "lm", [2, 3], lora=replace(LORA, bits=bits), dtype=torch.float32), quantized, 2e-5)
    assert not any("_proj.weight" in name and "lora" not in name for name in quantized[1])
    assert abs(plain[0][0]["loss"] / quantized[0][0]["loss"] - 1) > 2e-4


def after_two_steps(world: Any, path: str, layout: Layout, dtype: torch.dtype, lora: LoraConfig) -> Any:
    """The names of optimizer states, whether each tensor stayed as it was, all boxes, and those of what generation gets."""
    engine = build(world, path, layout, dtype=dtype, optim=STEADY, lora=lora)
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}
    for step in range(2):
        batches = cut(rows_of(step, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 2)
        engine.forward_backward(batches, next_token_loss)
        engine.optimizer_step()
    assert engine.optimizer is not None
    merged: dict[str, Tensor] = {}
    merge_adapters(engine, merged)
    unchanged = {name: torch.equal(tensor, before[name]) for name, tensor in engine.local_tensors().items()}
    shards = rank_shards(engine.spec, "lm", layout, engine.mesh.pp_rank, engine.mesh.tp_rank)
    rows = zero_shards(shards, engine.mesh.dp_shard.rank, engine.mesh.dp_shard.size)
    boxes = [
        (box.name, box.shape, box.global_slices, tensor[box.local_slices])
        for name, tensor in merged.items()
        for box in rows[name].boxes
    ]
    return set(engine.optimizer.state_tensors()), unchanged, local_boxes(engine), boxes


@pytest.mark.parametrize(
    ("model", "layout", "dtype", "bits"),
    [
        ("untied", Layout(dp=4, zero=3, zero_size=2), torch.float64, None),
        ("untied", Layout(dp=2, zero=1), torch.bfloat16, None),
        ("untied", Layout(tp=2, dp=2, zero=3), torch.bfloat16, None),
        ("wide", Layout(tp=2, dp=2, zero=3), torch.bfloat16, 4),
    ],
    ids=str,
)
def test_what_is_kept_and_what_generation_gets(
    models: dict[str, str], model: str, layout: Layout, dtype: torch.dtype, bits: int | None
) -> None:
    """Generation's matrices are the base, or what its bits stand for, plus the adapters' product."""
    results = run_ranks(layout.size, after_two_steps, models[model], layout, dtype, replace(LORA, bits=bits))
    for states, unchanged, _, _ in results:
        assert states == {name for name in unchanged if is_adapter(name)}
        assert all(same for name, same in unchanged.items() if not is_adapter(name)), "the base has changed"
        assert not all(same for name, same in unchanged.items() if is_adapter(name))
    weights = whole_tensors([boxes for _, _, boxes, _ in results])
    merged = whole_tensors([boxes for _, _, _, boxes in results])
    base = load_file(Path(models[model]) / "model.safetensors")
    assert len(merged) == 7 * LAYERS
    for name, tensor in merged.items():
        a, b = (weights[adapter_tensor(name, which)].double() for which in "AB")
        matrix = rounded(base[name].bfloat16(), bits) if bits else base[name].to(dtype)
        expected = matrix.double() + LORA.scale * b @ a
        torch.testing.assert_close(tensor.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 1e-12, atol=1e-12)
        assert not torch.equal(tensor, matrix)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_tp_ranks_that_read_the_same_drop_the_same(models: dict[str, str], layout: Layout) -> None:
    """So a run does not depend on tp, and ranks that share a KV head compute the same one."""
    path = models["untied"]
    dropped, plain = (run(path, Layout(), "lm", [2], lora=lora) for lora in (COLUMNS, replace(COLUMNS, dropout=0.0)))
    assert_same(run(path, layout, "lm", [2], lora=COLUMNS), dropped)
    assert plain[0][-1]["loss"] != dropped[0][-1]["loss"], "dropout does nothing"


def losses_with_dropout(world: Any, path: str, layout: Layout) -> Any:
    """Losses of the same rows: two calls for one optimizer step, two for the next, and those of an engine that goes on after the first
    step. And whether the process's own generator stayed as it was."""

    def build_engine() -> Any:
        engine = build(world, path, layout, optim=replace(STEADY, lr=0.0), lora=replace(LORA, dropout=0.5))
        generator = torch.Generator().manual_seed(1)
        for name, tensor in engine.trained_tensors().items():
            if name.endswith(".b"):
                tensor.normal_(std=0.5, generator=generator)
        return engine

    def losses(engine: Any) -> list[float]:
        batches = cut(rows_of(0, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 2)
        values = [float(engine.forward_backward(batches, next_token_loss)["loss"]) for _ in range(2)]
        engine.optimizer_step()
        return values

    torch.manual_seed(4)
    before = torch.get_rng_state()
    first, resumed = build_engine(), build_engine()
    both = losses(first) + losses(first)
    resumed.optimizer.step_count = 1
    return both, losses(resumed), torch.equal(before, torch.get_rng_state())


def test_each_call_drops_others_and_a_resumed_run_the_same(models: dict[str, str]) -> None:
    for both, resumed, untouched in run_ranks(2, losses_with_dropout, models["untied"], Layout(tp=2)):
        assert len(set(both)) == 4 and both[2:] == resumed
        assert untouched, "the process's own generator was drawn from"


def fail_without_adapters(world: Any, path: str) -> bool:
    engine = build(world, path, Layout(), optim=STEADY, lora=LORA)
    with contextlib.suppress(FloatingPointError), as_training_began(engine):
        raise FloatingPointError
    return all(part.enabled for part in engine.chunks[0].modules() if isinstance(part, Adapter))


def test_adapters_are_back_after_a_failure(models: dict[str, str]) -> None:
    assert run_ranks(1, fail_without_adapters, models["untied"]) == [True]
