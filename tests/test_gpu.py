"""The same programs on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import tasks
from rlhf_spmd.workers.optimizer import OptimConfig, Optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_ppo_runs_on_a_gpu(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Three steps with nccl; generation and training agree within what the kernels differ by."""
    overrides = [f"models.{role}.dtype={dtype}" for role in ("actor", "critic", "reference")]
    process = tasks.start_torchrun(tmp_path, tasks.settings(tmp_path, 3, *overrides), *tasks.one_node(1))
    assert tasks.finish(process, tmp_path) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert row["rollout/log_prob_diff_max"] < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_states_on_the_host_change_no_bit(dtype: torch.dtype) -> None:
    """They lie in pinned host memory, come to the device bucket by bucket, and give the same steps."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (300, 70), "b": (2000, 3000), "c": (7,), "d": (4000, 4000)}  # two buckets
    runs = []
    for offload in (False, True):
        generator.manual_seed(1)
        params = {name: torch.randn(shape, generator=generator).to("cuda", dtype) for name, shape in shapes.items()}
        optimizer = Optimizer(OptimConfig(lr=1e-2, offload=offload), params, 3)
        for _ in range(3):
            grads = {name: torch.randn(shape, generator=generator).cuda() for name, shape in shapes.items()}
            optimizer.step(params, grads)
        runs.append((params, optimizer.state_tensors()))
    (params, states), (others, on_host) = runs
    for name, param in params.items():
        assert torch.equal(param, others[name])
        for key, state in on_host[name].items():
            assert state.is_pinned() and torch.equal(state, states[name][key].cpu()), f"{key} of {name}"
