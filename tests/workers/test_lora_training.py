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
    STEADY,
    STEPS,
    assert_same,
    build,
    cut,
    local_boxes,
    next_token_loss,
    rows_of,
    together,
    train,
    whole_tensors,
)
from ranks import run_ranks
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.lora import LoraConfig, adapter_tensor, is_adapter
from rlhf_spmd.models.quantized import rounded
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.boxes import zero_shards
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.workers.rank_shards import rank_shards
from rlhf_spmd.workers.reference import without_adapters
from rlhf_spmd.workers.rollout_engine import merge_adapters

LORA = LoraConfig(rank=3, alpha=6.0)
SOME = LoraConfig(rank=2, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"])
LAYERS = 4
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp4, shared KV heads": Layout(tp=4),
    "tp2, sequence parallel": Layout(tp=2, sequence_parallel=True),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "dp2 zero1": Layout(dp=2, zero=1),
    "dp2 zero2": Layout(dp=2, zero=2),
    "dp2 zero3": Layout(dp=2, zero=3),
    "tp2 dp2 zero3": Layout(tp=2, dp=2, zero=3),
    "dp4 zero3 zero_size2": Layout(dp=4, zero=3, zero_size=2),
    "tp2 dp2": Layout(tp=2, dp=2),
    "pp2 dp2 zero1": Layout(pp=2, dp=2, zero=1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base: Path = tmp_path_factory.mktemp("models")
    wide = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    for name, more in {"untied": {}, "tied": {}, "wide": wide}.items():
        write_random_model(base / name, {**CONFIGS.get(name, CONFIGS["untied"]), "num_hidden_layers": LAYERS, **more}, seed=3)
    return {name: str(base / name) for name in ("untied", "tied", "wide")}


def run(path: str, layout: Layout, head: str, lora: LoraConfig, batches: list[int], **more: Any) -> Any:
    return together(run_ranks(layout.size, train, path, layout, batches, head, {"optim": STEADY, "lora": lora, **more}))


ALONE: dict[str, Any] = {}


def alone(path: str, head: str, lora: LoraConfig, batches: list[int], **more: Any) -> Any:
    """On one rank, once for all tests."""
    key = repr((path, head, lora, batches, more))
    if key not in ALONE:
        ALONE[key] = run(path, Layout(), head, lora, batches, **more)
    return ALONE[key]


CASES = [
    *(("untied", "lm", LORA, where) for where in LAYOUTS),
    *(("tied", "lm", SOME, where) for where in ("tp2", "pp2 vpp2", "tp2 dp2 zero3")),  # ends share a tensor
    *(("untied", "value", LORA, where) for where in ("tp2", "pp2 dp2 zero1", "dp2 zero3")),  # a head that is trained whole
]


@pytest.mark.parametrize(("model", "head", "lora", "where"), CASES)
def test_the_same_steps_in_every_layout(models: dict[str, str], model: str, head: str, lora: LoraConfig, where: str) -> None:
    layout, path = LAYOUTS[where], models[model]
    one = alone(path, head, lora, [1])
    assert_same(run(path, layout, head, lora, [2, 3, 1, 2]), one)
    base = load_file(Path(path) / "model.safetensors")
    moved = {name for name, tensor in one[1].items() if name not in base or not torch.equal(tensor, base[name].double())}
    trained = {name for name in one[1] if ".lora_" in name} | ({"score.weight"} & one[1].keys())
    assert {name for name in moved if name not in base} == trained
    assert moved.isdisjoint(base), "weights beside the adapters have changed"
    assert all(float(one[1][name].abs().max()) > 1e-4 for name in moved if ".lora_B" in name), "an adapter was not trained"
    assert len({round(report["loss"], 6) for report in one[0]}) == STEPS


FEW_BITS = ["tp2, sequence parallel", "pp2 vpp2", "tp2 dp2", "dp2 zero1", "tp2 dp2 zero3"]


@pytest.mark.parametrize(("bits", "where"), [*((4, where) for where in FEW_BITS), (8, "pp2 vpp2"), (8, "tp2 dp2 zero3")])
def test_the_same_steps_beside_fewer_bits(models: dict[str, str], bits: int, where: str) -> None:
    """In float32, bitsandbytes' widest: sums in another order. That other base gives numbers ten times further away and more."""
    layout, lora, wide, single = LAYOUTS[where], replace(LORA, bits=bits), models["wide"], {"dtype": torch.float32}
    one, unrounded = (alone(wide, "lm", which, [2, 3], **single) for which in (lora, LORA))
    other = run(wide, layout, "lm", lora, [2, 3], **single)
    assert_same(other, one, 2e-5)
    assert not any("_proj.weight" in name and "lora" not in name for name in one[1])
    assert abs(unrounded[0][0]["loss"] / one[0][0]["loss"] - 1) > 2e-4


@pytest.mark.parametrize("where", ["tp2", "tp2 dp2 zero3"])
def test_generation_gets_the_sum_with_what_the_bits_stand_for(models: dict[str, str], where: str) -> None:
    lora = replace(LORA, bits=4)
    results = run_ranks(LAYOUTS[where].size, held, models["wide"], LAYOUTS[where], torch.bfloat16, lora)
    whole = whole_tensors([boxes for _, _, boxes, _ in results])
    merged = whole_tensors([boxes for _, _, _, boxes in results])
    base = load_file(Path(models["wide"]) / "model.safetensors")
    assert len(merged) == 7 * LAYERS
    for name, tensor in merged.items():
        a, b = (whole[adapter_tensor(name, which)].double() for which in "AB")
        near = rounded(base[name].bfloat16(), 4).double()
        torch.testing.assert_close(tensor.double(), near + LORA.scale * b @ a, rtol=4e-3, atol=1e-12)


def held(world: Any, path: str, layout: Layout, dtype: torch.dtype, lora: LoraConfig = LORA) -> Any:
    """What an engine keeps after a step, and whether its merged shards are what a forward pass multiplies by."""
    engine = build(world, path, layout, dtype=dtype, optim=STEADY, lora=lora)
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}
    for step in range(2):
        batches = cut(rows_of(step, engine.spec.vocab_size), layout.dp, engine.mesh.dp_rank, 2)
        engine.forward_backward(batches, next_token_loss)
        engine.optimizer_step()
    assert engine.optimizer is not None
    merged: dict[str, Tensor] = {}
    merge_adapters(engine, merged)
    local, same = engine.local_tensors(), {}
    boxes = []
    for name, tensor in local.items():
        same[name] = torch.equal(tensor, before[name])
    shards = rank_shards(engine.spec, "lm", layout, engine.mesh.pp_rank, engine.mesh.tp_rank)
    for name, tensor in merged.items():
        rows = zero_shards(shards, engine.mesh.dp_shard.rank, engine.mesh.dp_shard.size)
        for box in rows[name].boxes:
            boxes.append((box.name, box.shape, box.global_slices, tensor[box.local_slices]))
    return set(engine.optimizer.state_tensors()), same, local_boxes(engine), boxes


@pytest.mark.parametrize(
    ("where", "dtype"),
    [
        *((where, torch.float64) for where in ("tp2", "dp2 zero1", "dp2 zero3", "dp4 zero3 zero_size2")),
        *((where, torch.bfloat16) for where in ("dp2 zero1", "tp2 dp2 zero3")),
    ],
)
def test_what_is_kept_and_what_generation_gets(models: dict[str, str], where: str, dtype: torch.dtype) -> None:
    results = run_ranks(LAYOUTS[where].size, held, models["untied"], LAYOUTS[where], dtype)
    for states, same, _, _ in results:
        assert states == {name for name in same if is_adapter(name)}
        assert all(unchanged for name, unchanged in same.items() if not is_adapter(name)), "the base has changed"
        assert not all(unchanged for name, unchanged in same.items() if is_adapter(name))
    whole = whole_tensors([boxes for _, _, boxes, _ in results])
    merged = whole_tensors([boxes for _, _, _, boxes in results])
    assert len(merged) == 7 * LAYERS
    for name, tensor in merged.items():
        a, b = (whole[adapter_tensor(name, which)].double() for which in "AB")
        want = whole[name].double() + LORA.scale * b @ a
        torch.testing.assert_close(tensor.double(), want, rtol=4e-3 if dtype == torch.bfloat16 else 1e-12, atol=1e-12)
        assert not torch.equal(tensor, whole[name])


COLUMNS = LoraConfig(rank=3, dropout=0.5, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])


@pytest.mark.parametrize("where", ["tp2", "tp4, shared KV heads", "tp2, sequence parallel"])
def test_tp_ranks_that_read_the_same_drop_the_same(models: dict[str, str], where: str) -> None:
    """So a run does not depend on tp, and ranks that share a KV head compute the same one."""
    one = alone(models["untied"], "lm", COLUMNS, [2])
    assert_same(run(models["untied"], LAYOUTS[where], "lm", COLUMNS, [2]), one)
    kept = alone(models["untied"], "lm", replace(COLUMNS, dropout=0.0), [2])
    assert kept[0][-1]["loss"] != one[0][-1]["loss"], "dropout does nothing"


def dropped(world: Any, path: str, layout: Layout) -> Any:
    """Losses of the same rows: two calls for one optimizer step, two for the next, and one that goes on after the first step."""

    def engine() -> Any:
        made = build(world, path, layout, optim=replace(STEADY, lr=0.0), lora=replace(LORA, dropout=0.5))
        generator = torch.Generator().manual_seed(1)
        for name, tensor in made.trained_tensors().items():
            if name.endswith(".b"):
                tensor.normal_(std=0.5, generator=generator)
        return made

    def losses(one: Any) -> list[float]:
        batches = cut(rows_of(0, one.spec.vocab_size), layout.dp, one.mesh.dp_rank, 2)
        found = [float(one.forward_backward(batches, next_token_loss)["loss"]) for _ in range(2)]
        one.optimizer_step()
        return found

    torch.manual_seed(4)
    before = torch.get_rng_state()
    first, again = engine(), engine()
    both = losses(first) + losses(first)
    again.optimizer.step_count = 1
    return both, losses(again), torch.equal(before, torch.get_rng_state())


def test_each_call_drops_others_and_a_resumed_run_the_same(models: dict[str, str]) -> None:
    layout = Layout(tp=2)
    for both, again, untouched in run_ranks(layout.size, dropped, models["untied"], layout):
        assert len(set(both)) == 4 and both[2:] == again
        assert untouched, "the process's own generator was drawn from"


def test_adapters_are_back_after_a_failure(models: dict[str, str]) -> None:
    assert run_ranks(1, fail_without, models["untied"]) == [True]


def fail_without(world: Any, path: str) -> bool:
    engine = build(world, path, Layout(), optim=STEADY, lora=LORA)
    with contextlib.suppress(FloatingPointError), without_adapters(engine):
        raise FloatingPointError
    return all(part.enabled for part in engine.chunks[0].modules() if isinstance(part, Adapter))
