"""Schedules, AdamW, its moments in 8 bits, and Muon: their packages' own steps, and the same training in every layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from engine_runs import CONFIGS, OPTIM, QWEN3_MOE, STEPS, go, together, worst_update, write_models
from ranks import run_ranks
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.parallel.boxes import Box, ParamShard, whole_shard
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.muon import assign_matrices, muons_of
from rlhf_spmd.workers.optim_config import OptimConfig, learning_rate
from rlhf_spmd.workers.optimizer import Optimizer
from small_models import CONFIGS as FAMILIES

CONFIG = OptimConfig(lr=1e-2, lr_scheduler_type="linear", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6, momentum=0.9)
EIGHT_BIT = {"optim": replace(OPTIM, name="adamw_8bit"), "dtype": torch.float32}
MUON = {"optim": replace(OPTIM, name="muon")}
OPTIONS = {"adamw_8bit": EIGHT_BIT, "muon": MUON}
Tensors = dict[str, Tensor]
SMALL: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (7,), "empty": (0, 4)}
LARGE: dict[str, tuple[int, ...]] = {"blocks": (64, 80), "and_a_rest": (70, 61), "bias": (7,), "no_rows": (0, 4)}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def test_a_skipped_step_moves_the_schedule_alone() -> None:
    """The steps beside it are those of AdamW that never saw it, at the schedule's rates."""
    config = CONFIG
    one, other = drawn(SMALL, 1, torch.float64), drawn(SMALL, 1, torch.float64)
    skipping, plain = Optimizer(config, one, 4), Optimizer(replace(config, lr_scheduler_type="constant"), other, 4)
    for step in range(4):
        if step in (0, 2):
            before = {key: x.clone() for key, x in one.items()}
            assert skipping.skip() == learning_rate(config, step, 4)
            assert all(torch.equal(before[key], x) for key, x in one.items())
            continue
        grads = drawn(SMALL, step + 2, torch.float64)
        rate = skipping.step(one, grads)
        plain.config = replace(plain.config, lr=rate)
        plain.step(other, grads)
        assert rate == learning_rate(config, step, 4) and all(torch.equal(other[key], x) for key, x in one.items())
    assert (skipping.step_count, skipping.skipped, plain.step_count) == (4, 2, 2)


# -- schedules and settings


def test_rates_of_a_warmup_and_after_the_end() -> None:
    constant = OptimConfig(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(constant, step, 10) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    by_ratio = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.2)
    assert learning_rate(by_ratio, 0, 10) == 0.5, "a ratio counts where steps are negative"
    assert learning_rate(replace(by_ratio, lr_warmup_steps=0), 0, 10) == 1.0
    linear = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.1)
    assert [learning_rate(linear, step, 12) for step in (2, 7, 12, 14)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("ours", "theirs", "min_ratio"),
    [
        ("constant", "constant_with_warmup", 0.0),
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine", "cosine_with_min_lr", 0.1),
    ],
)
def test_schedules_are_those_of_transformers(ours: str, theirs: str, min_ratio: float) -> None:
    """Warm-up is a step ahead: theirs begins with a step of rate 0, which would do nothing."""
    from transformers import get_scheduler

    config = OptimConfig(lr=3.0, lr_scheduler_type=ours, lr_warmup_steps_ratio=0.25, min_lr_ratio=min_ratio)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    schedule = get_scheduler(theirs, optimizer, 5, 20, {"min_lr_rate": min_ratio} if min_ratio else None)
    rates = []
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [learning_rate(config, step, 20) for step in range(5)] == pytest.approx(rates[1:6])
    assert [learning_rate(config, step, 20) for step in range(5, 21)] == pytest.approx(rates[5:], abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type=.*allowed: constant"),
        ({"lr": -1.0}, "lr=.*must be"),
        ({"lr": math.nan}, "lr=.*must be"),
        ({"betas": [0.9, 1.0]}, r"betas\[1\]=.*must be"),
        ({"eps": 0.0}, "eps=.*must be"),
        ({"clip_grad": -0.5}, "clip_grad=.*must be"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=.*must be"),
        ({"name": "adam"}, "name='adam' is not known; did you mean 'adamw'\\? allowed: adamw, adamw_8bit, muon$"),
        ({"momentum": 1.0}, r"momentum=1\.0: must be at least 0 and below 1$"),
        ({"head_lr": -1.0}, r"head_lr=-1\.0: must be at least 0$"),
    ],
)
def test_bad_settings_name_key_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^models\.actor\.optim\.{message}"):
        check_section(OptimConfig(**settings), "models.actor.optim")
    check_section(OptimConfig(clip_grad=None), "models.actor.optim")


def test_what_eight_bits_need(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimConfig(name="adamw_8bit", lr=1e-6)
    monkeypatch.setattr("rlhf_spmd.workers.optim_config.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"adamw_8bit needs the library: pip install bitsandbytes$"):
        check_section(config, "models.actor.optim")


# -- steps


ADAMW: dict[str, Any] = {"lr": 1.0, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
STEPS_ALONE = 4


def take_steps(
    ours: Optimizer, params: Tensors, theirs: Tensors, others: list[Any], local: Callable[[Tensors], Tensors]
) -> None:
    """Steps of ours and of ``others``, which have ``theirs``. ``local``: tensors as ours has them."""
    shapes = {name: tuple(param.shape) for name, param in theirs.items()}
    dtype = next(iter(theirs.values())).dtype
    for step in range(STEPS_ALONE):
        grads, rate = drawn(shapes, step + 1, dtype), learning_rate(CONFIG, step, STEPS_ALONE)
        for name, param in theirs.items():
            param.grad = grads[name].clone()
        for other in others:
            other.param_groups[0]["lr"] = rate
            other.step()
        assert ours.step(params, local(grads)) == rate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_equal_torch_adamw(dtype: torch.dtype) -> None:
    params, theirs = drawn(SMALL, 0, dtype), {name: Parameter(value) for name, value in drawn(SMALL, 0, dtype).items()}
    adamw = torch.optim.AdamW(theirs.values(), **ADAMW, foreach=False)
    take_steps(Optimizer(CONFIG, params, STEPS_ALONE), params, theirs, [adamw], dict)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for name in params:
        torch.testing.assert_close(params[name], theirs[name].detach(), rtol=10 * tolerance, atol=tolerance)


def test_master_weights_keep_steps_that_bf16_would_lose() -> None:
    config = OptimConfig(lr=1e-4, weight_decay=0.0)
    weights = {}
    for masters in (True, False):
        params = {"w": torch.ones(8, dtype=torch.bfloat16)}
        optimizer = Optimizer(replace(config, master_weights=masters), params, total_steps=100)
        for _ in range(50):
            optimizer.step(params, {"w": torch.ones(8)})
        weights[masters] = params["w"].float().mean()
        if masters:
            assert optimizer.state_tensors()["w"]["master"].dtype == torch.float32
            params["w"].fill_(2.0)
            optimizer.refresh_masters(params)
            assert optimizer.state_tensors()["w"]["master"].tolist() == [2.0] * 8
    assert weights[True] == pytest.approx(0.995, abs=0.002) and weights[False] == 1.0


def test_eight_bit_steps_are_those_of_bitsandbytes() -> None:
    """Its class quantizes what has at least 4,096 elements; biases are kept in full here, too."""
    optim = pytest.importorskip("bitsandbytes").optim
    params = drawn(LARGE, 0)
    theirs = {name: Parameter(value) for name, value in drawn(LARGE, 0).items()}
    optimizer = Optimizer(replace(CONFIG, name="adamw_8bit"), params, STEPS_ALONE)
    oracle = optim.AdamW8bit([param for param in theirs.values() if param.numel()], **ADAMW)
    take_steps(optimizer, params, theirs, [oracle], dict)
    for name, param in theirs.items():
        if param.dim() > 1 and param.numel():
            assert torch.equal(params[name], param.detach()), name
            assert oracle.state[param]["state1"].dtype == torch.uint8, "the oracle quantizes it"
        torch.testing.assert_close(params[name], param.detach(), rtol=1e-5, atol=1e-6)
    held = sum(x.nbytes for state in optimizer._states.values() for x in state.values())
    assert held < 2.1 * sum(x.numel() for x in params.values())


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", torch.float64), ("adamw_8bit", torch.float32), ("adamw_8bit", torch.bfloat16)]
)
def test_a_loaded_optimizer_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """From states of the dtype in which checkpoints have them."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = replace(CONFIG, name=name)
    params = drawn(LARGE, 0, dtype)
    optimizer = Optimizer(config, params, total_steps=6)
    for step in range(3):
        optimizer.step(params, drawn(LARGE, step + 1))
    copies = {key: value.clone() for key, value in params.items()}
    resumed = Optimizer(config, copies, total_steps=6)
    saved, loaded = optimizer.state_tensors(), resumed.state_tensors()
    assert saved["blocks"]["exp_avg"].dtype == (torch.float64 if name == "adamw" else torch.float32)
    for key, state in loaded.items():
        for kind, tensor in state.items():
            tensor.copy_(saved[key][kind])
    resumed.take_states(loaded)
    resumed.step_count = 3
    for step in range(3, 6):
        assert optimizer.step(params, drawn(LARGE, step + 1)) == resumed.step(copies, drawn(LARGE, step + 1))
    assert all(torch.equal(params[key], copies[key]) for key in params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_muon_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    """Of each Hugging Face tensor by itself: q and k lie in one parameter."""
    shapes = {"q": (12, 8), "k": (4, 8), "down": (8, 20), "norm": (8,), "embed": (30, 8)}
    first = drawn(shapes, 0, dtype)
    fused = ParamShard((16, 8), (Box("q", (12, 8), (0, 0), (12, 8), (0, 0)), Box("k", (4, 8), (0, 0), (4, 8), (12, 0))))
    others = {"layers.0.down.weight": "down", "layers.0.norm.weight": "norm", "embed.weight": "embed"}
    shards = {"layers.0.qk.weight": fused, **{name: whole_shard(tensor, shapes[tensor]) for name, tensor in others.items()}}

    def local(tensors: Tensors) -> Tensors:
        qk = torch.cat([tensors["q"], tensors["k"]])
        return {"layers.0.qk.weight": qk, **{name: tensors[tensor].clone() for name, tensor in others.items()}}

    world = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    muon = muons_of(build_mesh(world, [0], Layout()), lambda tp: shards)[0]
    assert muon.sizes == {"layers.0.qk.weight": 128, "layers.0.down.weight": 160}
    params = local(first)
    optimizer = Optimizer(replace(CONFIG, name="muon"), params, 4, muons=[muon])
    oracle = {name: Parameter(value.clone()) for name, value in first.items()}
    matrices, rest = [oracle[name] for name in ("q", "k", "down")], [oracle[name] for name in ("norm", "embed")]
    torch_muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    take_steps(optimizer, params, oracle, [torch_muon, torch.optim.AdamW(rest, **ADAMW)], local)
    want = local({name: param.detach() for name, param in oracle.items()})
    for name, param in params.items():
        torch.testing.assert_close(param, want[name], rtol=1e-5, atol=1e-6)
    assert optimizer.state_tensors()["layers.0.down.weight"].keys() == {"momentum_buffer"}


@pytest.mark.parametrize("ranks", [1, 8, 64, 1024])
def test_all_ranks_orthogonalize_at_the_same_time(ranks: int) -> None:
    """80 layers of a 70B model: nobody has more than its share and one matrix."""
    sides = {"q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192), "o": (8192, 8192)}
    sides |= {"gate": (28672, 8192), "up": (28672, 8192), "down": (8192, 28672)}
    shapes = {f"{layer}.{name}": shape for layer in range(80) for name, shape in sides.items()}
    owners, loads = assign_matrices(shapes, ranks), [0] * ranks
    assert list(owners) == list(shapes)
    for tensor, (rows, columns) in shapes.items():
        loads[owners[tensor]] += rows * columns * min(rows, columns)
    assert max(loads) <= sum(loads) / ranks + 28672 * 8192 * 8192


# -- on ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    latent = {**FAMILIES["deepseek-v3"], "initializer_range": 0.3}
    deep = {**CONFIGS["tied"], "num_hidden_layers": 5}
    return write_models(tmp_path_factory.mktemp("models"), {**CONFIGS, "deep": deep, "latent": latent, "experts": QWEN3_MOE})


def run(layout: Layout, path: str, options: dict[str, Any], steps: range = range(STEPS), load: str = "", save: str = "") -> Any:
    return together(run_ranks(layout.size, go, path, layout, options, steps, load, save))[1]


@functools.cache
def on_one_rank(path: str, name: str) -> Tensors:
    weights: dict[str, Tensor] = run(Layout(), path, OPTIONS[name])
    return weights


# what steps have added to a tensor, against one rank: bfloat16 rounds Muon's matrices, 8 bits round off a moment
BOUNDS = {"adamw_8bit": 0.1, "muon": 0.02}


def assert_near(result: Tensors, expected: Tensors, path: str, bound: float) -> None:
    difference, where = worst_update(
        {key: x.double() for key, x in result.items()}, {key: x.double() for key, x in expected.items()}, path, torch.float32
    )
    assert difference < bound, where


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [
        ("adamw_8bit", "shared_kv", Layout(tp=2)),
        ("adamw_8bit", "shared_kv", Layout(dp=2, zero=3)),
        ("adamw_8bit", "shared_kv", Layout(dp=4, zero=3, zero_size=2)),
        ("adamw_8bit", "deep", Layout(pp=2, vpp=2, dp=2, zero=1)),
        ("muon", "shared_kv", Layout(dp=2)),
        ("muon", "shared_kv", Layout(tp=2, dp=2, zero=1)),
        ("muon", "shared_kv", Layout(cp=2, dp=2, zero=3, zero_size=2)),
        ("muon", "tied", Layout(pp=2, dp=2, zero=2)),
        ("muon", "deep", Layout(pp=2, vpp=2)),
        ("muon", "experts", Layout(dp=4, ep=2, zero=3)),
        ("muon", "experts", Layout(tp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_training_is_the_same_in_every_layout(models: dict[str, str], name: str, kind: str, layout: Layout) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    assert_near(run(layout, models[kind], OPTIONS[name]), on_one_rank(models[kind], name), models[kind], BOUNDS[name])


@pytest.mark.parametrize(
    ("name", "kind", "first", "second"),
    [
        ("adamw_8bit", "latent", Layout(dp=2, ep=2, zero=3), Layout(pp=2)),
        ("muon", "untied", Layout(dp=4, zero=3, zero_size=2), Layout(tp=2)),
        ("muon", "experts", Layout(dp=2, ep=2), Layout(tp=2)),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_in_its_layout_and_in_another(
    models: dict[str, str], tmp_path: Path, name: str, kind: str, first: Layout, second: Layout
) -> None:
    """A step, and another one: in the same layout the bits of a run that was not ended."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    path, options = models[kind], OPTIONS[name]
    want = run(first, path, options)
    run(first, path, options, range(STEPS - 1), save=str(tmp_path))
    saved = str(tmp_path / "checkpoints" / f"step_{STEPS - 1}")
    rest = range(STEPS - 1, STEPS)
    got = run(first, path, options, rest, load=saved)
    assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
    assert_near(run(second, path, options, rest, load=saved), want, path, BOUNDS[name])


def test_a_head_learns_at_its_own_rate(models: dict[str, str]) -> None:
    layout = Layout(pp=2)
    still = run(layout, models["untied"], {"optim": replace(OPTIM, head_lr=0.0)})
    same = run(layout, models["untied"], {"optim": replace(OPTIM, head_lr=OPTIM.lr)})
    usual = run(layout, models["untied"], {})
    assert all(torch.equal(same[name], tensor) for name, tensor in usual.items())
    zeros, _ = worst_update(still, still | {"lm_head.weight": usual["lm_head.weight"]}, models["untied"], torch.float32)
    assert zeros == 1.0, "the head's update is missing, and nothing else is off"
