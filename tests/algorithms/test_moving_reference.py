"""A reference that follows the actor: the paper's mixture, in checkpoints, and the same run in another layout and after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tasks
from algorithm_cases import CASES, ROLLOUTS, Case, assert_same_run
from ranks import run_ranks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.load import read_pieces
from rlhf_spmd.train import prepare

CASE = Case("quickstart_grpo", more=(*ROLLOUTS, "algorithm.kl_loss_coef=0.5", "algorithm.sync_ref_model=true"))
EVERY_SECOND = "algorithm.ref_model_sync_steps=2", "algorithm.ref_model_mixup_alpha=0.3"
LAYOUT = (
    "placement.pools={a: [0, 1], b: [1, 2]}",
    "models.actor.pool=a",
    "models.actor.layout.tp=2",
    "models.reference.pool=b",
    "models.reference.layout={dp: 2, zero: 3}",
    "models.reference.offload=true",
)


def overrides(run_dir: Path, *more: str) -> list[str]:
    return tasks.settings(run_dir, 4, *CASE.overrides(), "run.save_freq=1", "run.keep_checkpoints=9", *more)


def train(ranks: int, run_dir: Path, *more: str) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, CASE.file, overrides(run_dir, *EVERY_SECOND, *more))
    return tasks.read_run(run_dir)


def saved(run_dir: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """(role, name) -> tensor, of a run on one rank."""
    directory = run_dir / "checkpoints" / f"step_{step}"
    manifest = read_manifest(directory)
    pieces = [piece for role in manifest.roles for parts in manifest.pieces_of(role, "param").values() for piece in parts]
    return {(piece.role, piece.name): tensor.clone() for piece, tensor in read_pieces(directory, pieces)}


def test_every_second_step_it_is_mixed_with_the_actor(tmp_path: Path) -> None:
    """TR-DPO's soft update: reference <- alpha * policy + (1 - alpha) * reference. The run in another layout is the same. That one goes
    on from a step at which the reference did not move, and is the same bit for bit.
    """
    one = train(1, tmp_path / "one")
    steps = {step: saved(tmp_path / "one", step) for step in (1, 2, 3, 4)}
    names = [name for role, name in steps[1] if role == "reference"]
    assert names and len(names) == sum(role == "actor" for role, _ in steps[1])
    for name in names:
        for before, after in ((1, 2), (3, 4)):
            mixed = 0.3 * steps[after]["actor", name] + 0.7 * steps[before]["reference", name]
            torch.testing.assert_close(steps[after]["reference", name], mixed, atol=1e-15, rtol=1e-15)
            assert not torch.equal(mixed, steps[before]["reference", name])
        assert torch.equal(steps[2]["reference", name], steps[3]["reference", name])

    other = train(3, tmp_path / "other", *LAYOUT)
    assert_same_run(one, other)
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step_4")
    (tmp_path / "other" / "checkpoints" / "latest").write_text("step_3\n")
    tasks.assert_bit_equal(other, train(3, tmp_path / "other", *LAYOUT))


def test_with_alpha_1_it_is_replaced_and_the_next_kl_is_0(tmp_path: Path) -> None:
    """Of actor and critic in one model the reference takes the weights that it has: the value head stays behind."""
    more = ("algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1", "algorithm.ref_model_mixup_alpha=1")
    run = CASES["ppo, one model"].train(tmp_path / "run", *more, ranks=2)
    first, second = (abs(row["actor/kl"]) for row in run.metrics)
    assert first > 1e-3 and second < 1e-12
    weights = {(role, name): tensor for (role, kind, name), tensor in run.weights.items() if kind == "param"}
    assert ("actor", "v_head.weight") in weights and ("reference", "v_head.weight") not in weights
    assert all(torch.equal(weights["actor", name], tensor) for (role, name), tensor in weights.items() if role == "reference")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("algorithm.ref_model_mixup_alpha=0",), "ref_model_mixup_alpha=0.0: must be above 0 and at most 1"),
        (("algorithm.ref_model_sync_steps=5",), "ref_model_sync_steps=5, run.steps=4: the reference would never follow"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(CASE.file, overrides(tmp_path, "algorithm.ref_model_sync_steps=1", *more), 1)
