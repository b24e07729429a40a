"""``models.<role>.offload``: between a role's calls its weights are in host memory only, and no bit of a run changes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tasks
from overrides import layout
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridWeights, Storages
from rlhf_spmd.workers import RoleConfig
from role_workers import build

ROLES = ("actor", "critic", "reference", "reward")
# name -> ranks and overrides
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 rank": (1, ()),
    "ZeRO-3, optimizer states there too, bf16": (
        2,
        (
            *(part for role in ROLES for part in layout(role, dp=2, zero=3)),
            *(f"models.{role}.dtype=bfloat16" for role in ROLES),
            "models.actor.optim.offload=true",
        ),
    ),
    "tp2 -> tp1, in buffers that stay": (
        2,
        (*(part for role in ROLES for part in layout(role, tp=2)), "models.actor.generation.buffers=keep"),
    ),
    "pp2 tp2 -> pp1 tp2; values and log-probs elsewhere": (
        4,
        (
            *layout("actor", pp=2, tp=2),
            *layout("generation", tp=2),
            *layout("critic", tp=2, dp=2, zero=1),
            "models.critic.calls.compute_values.layout.pp=2",
            "models.reference.calls.compute_ref_log_prob.layout.tp=4",
        ),
    ),
}


def train(run_dir: Path, name: str, offload: bool, *more: str) -> tasks.Run:
    ranks, overrides = CASES[name]
    every = [f"models.{role}.offload={str(offload).lower()}" for role in ROLES]
    keeps = offload and "buffers=keep" not in " ".join(overrides)  # generation parameters that are kept are on the device
    watched = ["algorithm.name=outside.at_rest", f"algorithm.offload={str(offload).lower()}"] if keeps or not offload else []
    overrides = (*overrides, *every, *watched, f"reward.model={tasks.task() / 'critic'}", "run.save_freq=1", *more)
    run_ranks(ranks, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, 2, *overrides))
    return tasks.read_run(run_dir)


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_and_nothing_on_the_device_between_calls(tmp_path: Path, name: str) -> None:
    """Without ``offload``, with it, and with it from a checkpoint on."""
    plain, resting = train(tmp_path / "plain", name, False), train(tmp_path / "resting", name, True)
    tasks.assert_bit_equal(plain, resting)
    assert all(row["timing_s/reload"] > 0 for row in resting.raw) and not any("timing_s/reload" in row for row in plain.raw)
    resumed = train(tmp_path / "resumed", name, True, f"run.resume={tmp_path / 'resting' / 'checkpoints' / 'step_1'}")
    assert resumed.metrics == resting.metrics[1:] and resumed.state == resting.state
    assert all((tensor == resumed.weights[key]).all() for key, tensor in resting.weights.items())


def while_generating(world: World) -> tuple[int, int]:
    """Training storages of a resting actor, and those that are there when generation ends."""
    controller, models = build(world, "models.actor.offload=true", *layout("actor", tp=2), *layout("generation", tp=1))
    kept: list[int] = []
    came: list[Any] = []
    release, back = Storages.release, HybridWeights.to_training

    def note(storages: Storages) -> None:
        came.extend(tensor.untyped_storage()._weak_ref() for tensor in models.actor.engine.local_tensors().values())
        release(storages)

    def look(weights: HybridWeights) -> None:
        kept.extend(ref for ref in came if not torch.UntypedStorage._expired(ref))
        back(weights)

    prompts = Batch(torch.arange(2), torch.arange(2), {"prompt_ids": ragged([torch.tensor([3, 4])] * 2, torch.int64)})
    sampling = SamplingConfig(max_response_length=4)
    with mock.patch.object(Storages, "release", note), mock.patch.object(HybridWeights, "to_training", look):
        controller.run(lambda batch: models.actor.generate_sequences(batch, sampling, 1), controller.source(prompts))
    return len(came), len(kept)


def test_a_training_shard_that_came_back_does_not_stay_beside_generations() -> None:
    for came, kept in run_ranks(2, while_generating):
        assert came > 0 and kept == 0


def test_weights_that_come_back_ahead_of_their_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the traced script foresees: while the call before computes. The same bits."""
    begun, back = [], Storages.prefetch

    def prefetch(storages: Storages) -> None:
        begun.append(storages.nbytes)
        back(storages)

    monkeypatch.setattr(Storages, "prefetch", prefetch)
    everything = [f"models.{role}.{key}=true" for role in ROLES for key in ("offload", "prefetch")]
    more = f"reward.model={tasks.task() / 'critic'}", "run.save_freq=1"
    tasks.train_alone(tmp_path / "ahead", 2, *everything, *more)
    tasks.train_alone(tmp_path / "plain", 2, *more)
    tasks.assert_bit_equal(tasks.read_run(tmp_path / "plain"), tasks.read_run(tmp_path / "ahead"))
    assert begun == [0] * len(begun) and len(begun) >= 2 * 5, (
        "values, scores, reference, critic, actor in each step: none was there"
    )


def test_nothing_to_bring_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"models.actor.prefetch=true .* models.actor.offload is false"):
        RoleConfig(prefetch=True).check("models.actor")
