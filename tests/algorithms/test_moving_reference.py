"""A reference that follows the actor: the mixture of the paper, in checkpoints, and the same run after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tasks
import torch
from algorithm_cases import CASES, CONFIGS, ROLLOUTS, Case
from ranks import run_ranks

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.load import read_pieces
from rlhf_spmd.train import prepare

CASE = Case(
    "quickstart_grpo", more=(*ROLLOUTS, "algorithm.kl_loss_coef=0.5", "algorithm.sync_ref_model=true", "run.save_freq=1")
)
CONFIG = str(CONFIGS / f"{CASE.config}.yaml")
LAYOUT = (
    "placement.pools={a: [0, 1], b: [1, 2]}",
    "models.actor.pool=a",
    "models.actor.layout.tp=2",
    "models.reference.pool=b",
    "models.reference.layout={dp: 2, zero: 3}",
    "models.reference.offload=true",
)


def overrides(run_dir: Path, steps: int, *more: str) -> list[str]:
    return tasks.settings(run_dir, steps, *CASE.overrides(), "run.save_freq=1", "run.keep_checkpoints=9", *more)


def train(ranks: int, run_dir: Path, steps: int, *more: str) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, CONFIG, overrides(run_dir, steps, *more))
    return tasks.read_run(run_dir)


def saved(run_dir: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """(role, name) -> tensor, of a run on one rank."""
    directory = run_dir / "checkpoints" / f"step_{step}"
    manifest = read_manifest(directory)
    pieces = [piece for role in manifest.roles for its in manifest.pieces_of(role, "param").values() for piece in its]
    return {(piece.role, piece.name): tensor.clone() for piece, tensor in read_pieces(directory, pieces)}


def test_every_second_step_it_is_mixed_with_the_actor(tmp_path: Path) -> None:
    """TR-DPO's soft update: reference <- alpha * policy + (1 - alpha) * reference; hence the KL of the next step is smaller."""
    more = ("algorithm.ref_model_sync_steps=2", "algorithm.ref_model_mixup_alpha=0.3")
    train(1, tmp_path, 4, *more)
    steps = {step: saved(tmp_path, step) for step in (1, 2, 3, 4)}
    names = [name for role, name in steps[1] if role == "reference"]
    assert names and len(names) == sum(role == "actor" for role, _ in steps[1])
    for name in names:
        for before, after in ((1, 2), (3, 4)):
            mixed = 0.3 * steps[after]["actor", name] + 0.7 * steps[before]["reference", name]
            torch.testing.assert_close(steps[after]["reference", name], mixed, atol=1e-15, rtol=1e-15)
            assert not torch.equal(mixed, steps[before]["reference", name])
        assert torch.equal(steps[2]["reference", name], steps[3]["reference", name])


def test_with_alpha_1_it_is_replaced_and_the_next_kl_is_0(tmp_path: Path) -> None:
    more = (
        "algorithm.ref_model_sync_steps=1",
        "algorithm.ref_model_mixup_alpha=1",
        f"algorithm.ppo_mini_batch_size={tasks.PROMPTS}",
    )
    kl = [row["actor/kl_loss"] for row in train(1, tmp_path, 3, *more).metrics]
    assert kl[0] > 1e-3 and max(kl[1:]) < 1e-20


def test_an_actor_s_value_head_stays_behind(tmp_path: Path) -> None:
    """Of actor and critic in one model the reference takes the weights that it has."""
    given = CASES["ppo, one model"].overrides()
    more = ("algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1", "algorithm.ref_model_mixup_alpha=0.3")
    run = tasks.settings(tmp_path, 2, *given, *more, "run.save_freq=1", "run.keep_checkpoints=9")
    run_ranks(2, tasks.train_here, str(CONFIGS / "quickstart_ppo_shared.yaml"), run)
    one, two = saved(tmp_path, 1), saved(tmp_path, 2)
    assert ("actor", "v_head.weight") in two and ("reference", "v_head.weight") not in two
    for name in [name for role, name in two if role == "reference"]:
        mixed = 0.3 * two["actor", name] + 0.7 * one["reference", name]
        torch.testing.assert_close(two["reference", name], mixed, atol=1e-15, rtol=1e-15)
        assert not torch.equal(mixed, one["reference", name])


@pytest.mark.parametrize("layout", [(1, ()), (3, LAYOUT)], ids=["1 rank", "pools, tensor slices, ZeRO, offload"])
def test_a_run_that_goes_on_is_the_run_that_was_not_ended(tmp_path: Path, layout: tuple[int, tuple[str, ...]]) -> None:
    ranks, more = layout
    whole = train(ranks, tmp_path / "whole", 3, "algorithm.ref_model_sync_steps=1", *more)
    ended = tmp_path / "ended"
    shutil.copytree(tmp_path / "whole", ended)
    for step in (2, 3):
        shutil.rmtree(ended / "checkpoints" / f"step_{step}")
    (ended / "checkpoints" / "latest").write_text("step_1\n")
    again = train(ranks, ended, 3, "algorithm.ref_model_sync_steps=1", *more)
    tasks.assert_bit_equal(whole, again)
    if more:
        one = train(1, tmp_path / "one", 3, "algorithm.ref_model_sync_steps=1")
        assert tasks.worst_tensor(one, whole)[0] < 1e-9 and tasks.worst_metric(one, whole, floor=1e-2)[0] < 1e-10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("algorithm.use_kl_loss=false",), "sync_ref_model=true: grpo has no reference with these settings"),
        (("algorithm.ref_model_mixup_alpha=0",), "ref_model_mixup_alpha=0.0: must be above 0 and at most 1"),
        (("algorithm.ref_model_sync_steps=4",), "ref_model_sync_steps=4: with run.steps=3 the reference would never follow"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(CONFIG, overrides(tmp_path, 3, "algorithm.ref_model_sync_steps=1", *more), 1)
