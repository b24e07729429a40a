"""``models.<role>.offload``: between a role's calls its weights are in host memory only, and no bit of a run changes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tasks
from overrides import layout
from ranks import run_ranks
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridWeights, Storages
from rlhf_spmd.workers import RoleConfig
from role_workers import build

ROLES = ("actor", "critic", "reference", "reward")
SHARDED = (  # on 2 ranks
    *(part for role in ROLES for part in layout(role, dp=2, zero=3)),
    *(f"models.{role}.dtype=bfloat16" for role in ROLES),
    "models.actor.optim.offload=true",
)
BUFFERS_STAY = (*(part for role in ROLES for part in layout(role, tp=2)), "models.actor.generation.buffers=keep")  # on 2 ranks
ELSEWHERE = (  # values and log-probs, on 4 ranks
    *layout("actor", pp=2, tp=2),
    *layout("generation", tp=2),
    *layout("critic", tp=2, dp=2, zero=1),
    "models.critic.calls.compute_values.layout.pp=2",
    "models.reference.calls.compute_ref_log_prob.layout.tp=4",
)


def settings_of(overrides: tuple[str, ...], offload: bool) -> tuple[str, ...]:
    flag = str(offload).lower()
    keeps = offload and overrides is BUFFERS_STAY  # generation parameters that are kept are on the device
    watched = () if keeps else ("algorithm.name=outside.at_rest", f"algorithm.offload={flag}")
    offloads = (f"models.{role}.offload={flag}" for role in ROLES)
    return (*overrides, *offloads, *watched, f"reward.model={tasks.task() / 'critic'}", "data.train_batch_size=4")


def assert_rests(plain: tasks.Run, resting: tasks.Run) -> None:
    tasks.assert_bit_equal(plain, resting)
    assert all(row["timing_s/reload"] > 0 for row in resting.raw) and not any("timing_s/reload" in row for row in plain.raw)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(4, ELSEWHERE), pytest.param(2, BUFFERS_STAY, marks=pytest.mark.long)],
    ids=["elsewhere", "buffers stay"],
)
def test_the_same_bits_and_nothing_on_the_device_between_calls(tmp_path: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    assert_rests(*(tasks.train(ranks, tmp_path / str(flag), 2, *settings_of(overrides, flag)) for flag in (False, True)))


def test_sharded_roles_rest_in_a_resumed_run_too(tmp_path: Path) -> None:
    plain = tasks.train(2, tmp_path / "plain", 2, *settings_of(SHARDED, False))
    settings = settings_of(SHARDED, True)
    overrides = tasks.settings(tmp_path / "resting", 2, *settings, "run.save_freq=1")
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), overrides)
    resting = tasks.read_run(tmp_path / "resting")
    assert_rests(plain, resting)
    resume = f"run.resume={tmp_path / 'resting' / 'checkpoints' / 'step_1'}"
    resumed = tasks.train(2, tmp_path / "resumed", 2, *settings, resume)
    assert resumed.metrics == resting.metrics[1:] and resumed.state == resting.state
    assert all((tensor == resumed.weights[key]).all() for key, tensor in resting.weights.items())


def while_generating(world: World) -> tuple[int, int]:
    """Training storages of a resting actor, and those that are there when generation ends."""
    controller, models = build(world, "models.actor.offload=true", *layout("actor", tp=2), *layout("generation", tp=1))
    kept: list[Any] = []
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
    sizes, prefetch = [], Storages.prefetch

    def noted_prefetch(storages: Storages) -> None:
        sizes.append(storages.nbytes)
        prefetch(storages)

    monkeypatch.setattr(Storages, "prefetch", noted_prefetch)
    everything = [f"models.{role}.{key}=true" for role in ROLES for key in ("offload", "prefetch")]
    model = f"reward.model={tasks.task() / 'critic'}"
    tasks.train_alone(tmp_path / "ahead", 1, *everything, model)
    tasks.train_alone(tmp_path / "plain", 1, model)
    tasks.assert_bit_equal(tasks.read_run(tmp_path / "plain"), tasks.read_run(tmp_path / "ahead"))
    assert len(sizes) >= 5, "values, scores, reference, critic, actor"
    assert not any(sizes), "what comes back was there"
    with pytest.raises(ValueError, match=r"models\.actor\.prefetch=true does nothing without models\.actor\.offload"):
        check_tree(RoleConfig(prefetch=True), "models.actor")
