"""Responses that were cut teach nothing where that is asked: losses, gradients and means are those without their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tasks
from flat_config import flat_config
from overrides import FP64, layout
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import clipped_value
from rlhf_spmd.data.batch import Batch, Ragged, ragged
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.losses import LOSS_AGG_MODES
from rlhf_spmd.parallel.launch import Launch, connect_store
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.objective import LEARNT, MASK, joint, keep_learnt_tokens
from role_workers import batch_of, build

LENGTHS = [(3, 5), (7, 2), (2, 9), (6, 6)]
STOPPED = [True, False, True, False]
KEPT = [0, 2]
MASKED = flat_config(PPOConfig, mask_truncated_completions=True)


def rows(stopped: list[bool]) -> Batch:
    batch = batch_of(LENGTHS, group_size=2)
    generator, lengths = torch.Generator().manual_seed(1), batch["response_ids"].lengths

    def drawn(shift: float) -> Ragged:
        return Ragged(torch.randn(int(lengths.sum()), generator=generator) * 0.3 + shift, lengths)

    fields = {
        "old_log_probs": drawn(-3.0),
        "advantages": drawn(0.0),
        "ref_log_prob": drawn(-3.0),
        "stopped": torch.tensor(stopped),
    }
    return batch.union(batch.with_fields(**fields))


def updated(batch: Batch, agg: str, masks: bool, groups: int | None = None) -> dict[str, float]:
    """The report of the actor of the small task, of optimizer steps with so many groups; None: of one step."""
    world = World(Launch(), torch.device("cpu"), connect_store(Launch()), 60.0)
    controller, models = build(world)
    config = flat_config(PolicyConfig, mask_truncated_completions=masks, loss_agg_mode=agg, use_kl_loss=True, entropy_coeff=0.1)
    source = controller.source(batch)
    objective = clipped_policy(config, SamplingConfig(max_response_length=9))
    report = controller.run(lambda: models.actor.update(source, objective, mini_batch_size=groups))
    statistics: dict[str, float] = controller.get(report)[0][0]
    return statistics


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
def test_the_update_is_that_without_the_rows_that_were_cut(agg: str) -> None:
    """Modes that divide by rows count all of a mini-batch, as TRL and verl do."""
    share = 1.0 if agg == "token-mean" else len(KEPT) / len(LENGTHS)
    masked, without = updated(rows(STOPPED), agg, True), updated(rows(STOPPED).take(KEPT), agg, False)
    assert updated(rows(STOPPED), agg, False)["actor/grad_norm"] != pytest.approx(without["actor/grad_norm"], rel=1e-3)
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss"):
        assert masked[name] == pytest.approx(share * without[name], rel=1e-5), name
    assert masked["actor/entropy"] == pytest.approx(without["actor/entropy"], rel=1e-5), "a mean over the tokens that count"


def test_a_step_of_cut_rows_alone_changes_nothing_and_dilutes_no_mean() -> None:
    """Entropy of weights that hardly change, as a mean over two steps of which one has nothing to learn."""
    nothing = updated(rows([False] * 4), "token-mean", True)
    assert nothing == {"actor/grad_norm": 0.0, "actor/lr": nothing["actor/lr"], "actor/skipped_updates": 1.0}
    half = updated(rows([True, True, False, False]), "token-mean", True, groups=1)
    alone = updated(rows([True] * 4).take([0, 1]), "token-mean", False)
    assert half["actor/entropy"] == pytest.approx(alone["actor/entropy"], rel=1e-2)


def test_the_mask_of_an_environment_stays() -> None:
    batch = batch_of([(1, 2), (1, 3)])
    mask = ragged([[True, False], [False, True, True]], torch.bool)
    for stopped, expected in (([True, True], mask.values.tolist()), ([True, False], [True, False, False, False, False])):
        masked = batch.union(batch.with_fields(**{MASK: mask, "stopped": torch.tensor(stopped)}))
        assert keep_learnt_tokens(masked, "stopped")[MASK].values.tolist() == expected


def test_tokens_of_old_weights_are_not_learned() -> None:
    """Beside rows that are not learned, and beside tokens of an environment. Rows with no old token stay as they are."""
    batch = batch_of([(1, 2), (1, 3)])
    recent = ragged([[False, True], [True, True, True]], torch.bool)
    mask = ragged([[True, True], [False, True, True]], torch.bool)
    stopped = torch.tensor([True, False])
    for fields, learn_if, expected in (
        ({LEARNT: recent}, None, [0, 1, 1, 1, 1]),
        ({LEARNT: recent, MASK: mask}, None, [0, 1, 0, 1, 1]),
        ({LEARNT: recent, MASK: mask, "stopped": stopped}, "stopped", [0, 1, 0, 0, 0]),
    ):
        learned = keep_learnt_tokens(batch.union(batch.with_fields(**fields)), learn_if)
        assert learned[MASK].values.int().tolist() == expected
    young = batch.union(batch.with_fields(**{LEARNT: ragged([[True, True], [True] * 3], torch.bool)}))
    assert keep_learnt_tokens(young, None) is young


def test_the_critic_learns_from_the_same_rows() -> None:
    both = joint(clipped_policy(MASKED, SamplingConfig()), clipped_value(MASKED))
    assert both.learn_if == "stopped" and "stopped" in both.row_inputs and "stopped" not in both.inputs
    assert clipped_value(PPOConfig()).learn_if is None


def test_ranks_learn_the_same_of_rows_that_were_not_cut(tmp_path: Path) -> None:
    """A replica may have cut rows alone in a mini-batch: it must neither wait nor count for less.
    Metrics are means of terms of size one that cancel, hence the floor."""
    masked = ("algorithm.mask_truncated_completions=true", "data.train_batch_size=4", "algorithm.ppo_mini_batch_size=2", *FP64)
    replicas = [setting for role in ("actor", "critic") for setting in layout(role, dp=4)]
    slices = [setting for role in ("actor", "critic") for setting in layout(role, pp=2, tp=2)]
    reference = tasks.train(1, tmp_path / "one", 2, *masked)
    assert all(0 < row["response_length/clip_ratio"] < 1 for row in reference.raw), "some are cut, some not"
    for name, settings in (("replicas", replicas), ("slices", slices)):
        run = tasks.train(4, tmp_path / name, 2, *masked, *settings)
        assert run.responses == reference.responses
        difference, where = tasks.worst_tensor(reference, run)
        assert difference < 1e-9, where
        difference, where = tasks.worst_metric(reference, run, floor=1e-2)
        assert difference < 1e-10, where
