"""Schedules, AdamW over named local tensors, master weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_spmd.config.schema import check_section
from rlhf_spmd.workers.optim_config import OptimConfig, learning_rate
from rlhf_spmd.workers.optimizer import Optimizer

SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (7,), "empty": (0, 4)}


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def test_constant_rate_with_warmup() -> None:
    config = OptimConfig(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_warmup_ratio_counts_where_steps_are_negative() -> None:
    config = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.2)
    assert learning_rate(config, 0, 10) == 0.5
    assert learning_rate(config, 2, 10) == 1.0
    assert learning_rate(replace(config, lr_warmup_steps=0), 0, 10) == 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_ends_at_the_minimum_and_stays(kind: str) -> None:
    config = OptimConfig(lr=1.0, lr_scheduler_type=kind, lr_warmup_steps=2, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 12) for step in range(15)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert all(a > b for a, b in itertools.pairwise(rates[2:13]))
    assert rates[7] == pytest.approx(0.55, abs=1e-12)
    assert rates[12:] == pytest.approx([0.1] * 3)


def test_cosine_is_the_formula() -> None:
    config = OptimConfig(lr=3.0, lr_scheduler_type="cosine")
    for step in range(9):
        assert learning_rate(config, step, 9) == pytest.approx(3.0 * (1 + math.cos(math.pi * step / 9)) / 2, abs=1e-15)


@pytest.mark.parametrize(
    ("ours", "theirs", "least"),
    [
        ("constant", "constant_with_warmup", 0.0),
        ("linear", "linear", 0.0),
        ("cosine", "cosine", 0.0),
        ("cosine", "cosine_with_min_lr", 0.1),
    ],
)
def test_schedules_are_those_of_transformers(ours: str, theirs: str, least: float) -> None:
    """Warm-up is a step ahead: theirs begins with a step of rate 0, which would do nothing."""
    from transformers import get_scheduler

    config = OptimConfig(lr=3.0, lr_scheduler_type=ours, lr_warmup_steps_ratio=0.25, min_lr_ratio=least)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    schedule = get_scheduler(theirs, optimizer, 5, 20, {"min_lr_rate": least} if least else None)
    rates = []
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [learning_rate(config, step, 20) for step in range(5)] == pytest.approx(rates[1:6])
    assert [learning_rate(config, step, 20) for step in range(5, 21)] == pytest.approx(rates[5:], abs=1e-12)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_scheduler_type", "cosinus"),
        ("lr", -1.0),
        ("lr", math.nan),
        ("betas", [0.9]),
        ("betas", [0.9, 1.0]),
        ("eps", 0.0),
        ("clip_grad", -0.5),
        ("min_lr_ratio", 1.5),
    ],
)
def test_bad_settings_name_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"models\.actor\.optim\.{key}(=|\[1\]=).*(must be|allowed: constant)"):
        check_section(replace(OptimConfig(), **{key: value}), "models.actor.optim")
    check_section(OptimConfig(clip_grad=None), "models.actor.optim")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_equal_torch_adamw(dtype: torch.dtype) -> None:
    config = OptimConfig(lr=1e-2, lr_scheduler_type="linear", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    params, reference = tensors(0, dtype), {k: torch.nn.Parameter(v) for k, v in tensors(0, dtype).items()}
    optimizer = Optimizer(config, params, total_steps=4)
    oracle = torch.optim.AdamW(reference.values(), lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False)
    for step in range(4):
        grads = tensors(step + 1, dtype)
        for name, param in reference.items():
            param.grad = grads[name].clone()
        oracle.param_groups[0]["lr"] = learning_rate(config, step, 4)
        oracle.step()
        assert optimizer.step(params, grads) == learning_rate(config, step, 4)
        for name in params:
            torch.testing.assert_close(
                params[name], reference[name].detach(), rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0
            )
    assert optimizer.step_count == 4


def test_a_loaded_optimizer_goes_on_bit_for_bit() -> None:
    config = OptimConfig(lr=1e-2, lr_scheduler_type="cosine")
    params = tensors(0)
    optimizer = Optimizer(config, params, total_steps=6)
    for step in range(3):
        optimizer.step(params, tensors(step))
    copied = {name: value.clone() for name, value in params.items()}
    resumed = Optimizer(config, copied, total_steps=6)
    for name, state in resumed.state_tensors().items():
        for key, tensor in state.items():
            tensor.copy_(optimizer.state_tensors()[name][key])
    resumed.step_count = optimizer.step_count
    for step in range(3, 6):
        assert optimizer.step(params, tensors(step)) == resumed.step(copied, tensors(step))
    assert all(torch.equal(params[name], copied[name]) for name in params)


def test_master_weights_keep_steps_that_bf16_would_lose() -> None:
    config = OptimConfig(lr=1e-4, weight_decay=0.0)
    ones = {"w": torch.ones(8, dtype=torch.bfloat16)}
    optimizer = Optimizer(config, ones, total_steps=100)
    without = {"w": torch.ones(8, dtype=torch.bfloat16)}
    plain = Optimizer(replace(config, master_weights=False), without, total_steps=100)
    for _ in range(50):
        optimizer.step(ones, {"w": torch.ones(8)})
        plain.step(without, {"w": torch.ones(8)})
    assert optimizer.state_tensors()["w"]["master"].dtype == torch.float32
    assert ones["w"].float().mean() == pytest.approx(0.995, abs=0.002)
    assert without["w"].float().mean() == 1.0
    ones["w"].fill_(2.0)
    optimizer.refresh_masters(ones)
    assert optimizer.state_tensors()["w"]["master"].tolist() == [2.0] * 8
