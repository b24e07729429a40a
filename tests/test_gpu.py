"""The same programs on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import tasks

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
