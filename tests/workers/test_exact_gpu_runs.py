"""``reuse_rollout_log_probs=true`` where a CPU with Triton's interpreter passes for a GPU: whole runs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tasks
from rlhf_spmd.kernels import devices, dispatch
from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.train import prepare
from rlhf_spmd.workers import train_engine
from small_models import CONFIGS
from triton_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="there a run on the GPU itself does it: test_gpu.py")
EXACT = "models.actor.generation.reuse_rollout_log_probs=true"


@pytest.fixture(autouse=True)
def inexact_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products depend on the batch, as cuBLAS's do; other roles have torch's arithmetic, which takes less time than the interpreter."""
    monkeypatch.setattr(devices, "_CPU", replace(devices._CPU, batch_invariant=False))
    monkeypatch.setattr(dispatch, "unavailable", lambda *_: "the interpreter is slow")


def config_of(*roles: str) -> str:
    return tasks.other_task({"name": "grpo", "ppo_mini_batch_size": 4, "use_kl_loss": False}, *roles)


def test_a_run_takes_the_generators_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What updates compare with them, over micro-batches of other rows, is the same to the last bit."""
    chosen = []
    choose = train_engine.choose_ops

    def noted(*arguments: object, **options: object) -> object:
        chosen.append(type(choose(*arguments, **options)))  # type: ignore[arg-type]
        return choose(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(train_engine, "choose_ops", noted)
    more = ["data.train_batch_size=1", "sampling.n=2", "data.max_response_length=3", "algorithm.ppo_mini_batch_size=1"]
    settings = tasks.settings(tmp_path, 1, EXACT, "models.actor.dtype=float32", *more)
    torch.set_num_threads(1)
    world = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 600.0)
    tasks.train_here(world, config_of("actor"), settings)
    done = tasks.read_run(tmp_path)
    assert set(chosen) == {BatchInvariantGpuOps}
    assert done.log_prob_difference() == 0
    assert "timing_s/compute_log_prob" not in done.raw[0]


@pytest.mark.parametrize(
    ("ranks", "change", "why"),
    [
        (1, "models.actor.attention=torch", "models.actor.attention=torch is not exact, auto is"),
        (1, "models.actor.generation.attention=torch", "models.actor.generation.attention=torch is not exact, triton is"),
        (1, "models.actor.dtype=float64", "only the Triton kernels are exact, and it does not compute torch.float64"),
        (1, "models.actor.lora.rank=2", "models.actor.lora.rank=2 is not exact: generation merges the adapters"),
        (2, "models.actor.layout.tp=2", "sums over tp=2 ranks depend on the number of rows"),
    ],
)
def test_what_is_not_exact_is_refused(tmp_path: Path, ranks: int, change: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"generation\.reuse_rollout_log_probs=true: on GPUs .*{why}; leave it out"):
        prepare(config_of("actor"), tasks.settings(tmp_path, 1, EXACT, change), ranks)


def test_it_is_a_choice_that_experts_do_not_have(tmp_path: Path) -> None:
    ready = prepare(config_of("actor"), tasks.settings(tmp_path, 1), 1)
    assert not exact_rollouts(ready.config, ready.roles)
    ready = prepare(config_of("actor"), tasks.settings(tmp_path, 1, EXACT), 1)
    assert exact_rollouts(ready.config, ready.roles)
    mixed = replace(ready.roles["actor"], spec=spec_from_config(CONFIGS["qwen3-moe"], "test"))
    with pytest.raises(ValueError, match="true: on GPUs the products of a mixture of experts depend on the batch"):
        exact_rollouts(ready.config, {**ready.roles, "actor": mixed})
