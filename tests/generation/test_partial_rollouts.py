"""PPO with more prompts in flight than a step takes: rows cross steps, replicas stay in step, a resumed run is the same run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tasks
from overrides import IN_FLIGHT, PARTIAL, layout
from ranks import run_ranks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.load import read_pieces
from rlhf_spmd.checkpoint.manifest import PARAM, CheckpointError
from rlhf_spmd.data.batch import unpack
from rlhf_spmd.generation.sequence import Completion, Request, SequenceState
from rlhf_spmd.train import prepare
from rlhf_spmd.training.resume import ROWS_IN_FLIGHT
from rlhf_spmd.workers.partial_rollouts import PartialRollouts

STEPS = 6
FP64 = ("models.actor.dtype=float64", "models.actor.optim.eps=1e-3")


def train(ranks: int, run_dir: Path, *more: str, steps: int = STEPS, config: str = "") -> tasks.Run:
    config = config or str(tasks.task() / "ppo.json")
    run_ranks(ranks, tasks.train_here, config, tasks.settings(run_dir, steps, *PARTIAL, *more))
    return tasks.read_run(run_dir)


def check(run: tasks.Run, first: int = 1, steps: int = STEPS) -> None:
    """Every step trained on whole groups, none of them twice, the oldest ones soon."""
    seen: set[int] = set()
    for number in range(first, steps + 1):
        rows = {row for step, row in run.responses if step == number}
        assert len(rows) == tasks.PROMPTS * tasks.SAMPLES and not rows & seen
        assert {row ^ 1 for row in rows} == rows  # both samples of each prompt
        assert max(rows) < tasks.SAMPLES * (IN_FLIGHT + tasks.PROMPTS * (number - 1))
        seen |= rows
    assert max(float(row["rollout/stale_fraction"]) for row in run.raw) > 0.05


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partial")


@pytest.fixture(scope="module")
def uninterrupted(directory: Path) -> tasks.Run:
    return train(2, directory / "dp2")


def test_rows_cross_steps_and_each_is_trained_on_once(uninterrupted: tasks.Run) -> None:
    check(uninterrupted)
    assert uninterrupted.raw[0]["rollout/stale_fraction"] == 0.0
    assert uninterrupted.log_prob_difference() > 1e-4  # tokens of older weights
    assert uninterrupted.raw[-1]["data/epoch"] == pytest.approx((IN_FLIGHT + (STEPS - 1) * tasks.PROMPTS) / tasks.NUM_TRAIN)


def test_a_slower_replica_gives_fewer_groups(directory: Path) -> None:
    run = train(2, directory / "unequal", "placement.speeds=[1.0,0.4]")
    check(run)
    state = read_manifest(directory / "unequal/checkpoints/step_3").state["data"]["prompts"]
    assert [home for _, home, _ in state["in_flight"]].count(1) == 3 and state["speeds"] == [1.0, 0.4]


def test_every_token_knows_the_weights_that_drew_it(directory: Path, uninterrupted: tasks.Run) -> None:
    rows = [json.loads(line) for line in (directory / "dp2" / "rollouts.jsonl").read_text().splitlines()]
    spanning = [row for row in rows if len(row["versions"]) > 1]
    assert spanning and len(spanning) < len(rows)
    assert all(1 <= row["versions"][0][0] < row["versions"][-1][0] <= row["step"] for row in spanning)
    assert any(row["versions"][-1][0] == row["step"] for row in spanning)
    old = {row["step"] for row in spanning}
    assert all(metrics["rollout/stale_fraction"] > 0 for metrics in uninterrupted.raw if metrics["step"] in old)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ()),
        (2, (*layout("actor", tp=2), *layout("generation", tp=2))),
        (2, (*layout("actor", pp=2), *layout("generation", pp=2), "models.actor.generation.num_pages=3")),
        (2, (*layout("actor", pp=2), *layout("generation", pp=2), "models.actor.generation.kv_cache=offload")),
    ],
    ids=["1 rank", "tp2", "pp2 under preemption", "pp2 with pages that wait"],
)
def test_log_probs_belong_to_their_tokens_in_every_layout(directory: Path, ranks: int, more: tuple[str, ...]) -> None:
    """While the weights stay, what earlier steps drew has the log-probs of a forward pass now."""
    frozen = ("models.actor.optim.lr=0", "models.actor.optim.weight_decay=0", "models.actor.optim.min_lr_ratio=1")
    run = train(ranks, directory / f"frozen{len(list(directory.iterdir()))}", *frozen, *more, steps=4)
    check(run, steps=4)
    assert run.log_prob_difference() < 1e-5


def test_a_resumed_run_is_the_run_that_was_never_ended(directory: Path, uninterrupted: tasks.Run) -> None:
    checkpoint = directory / "dp2" / "checkpoints" / "step_3"
    state = read_manifest(checkpoint).state["data"]["prompts"]
    assert len(state["in_flight"]) == IN_FLIGHT - tasks.PROMPTS and {home for _, home, _ in state["in_flight"]} == {0, 1}
    resumed = train(2, directory / "resumed", f"run.resume={checkpoint}")
    later = {key: ids for key, ids in uninterrupted.responses.items() if key[0] > 3}
    tasks.assert_bit_equal(resumed, replace(uninterrupted, metrics=uninterrupted.metrics[3:], responses=later))


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_replicas_take_the_rows_of_a_checkpoint(directory: Path, uninterrupted: tasks.Run, ranks: int) -> None:
    """As far as they had come: what was drawn stays drawn, whoever goes on with it."""
    checkpoint = directory / "dp2" / "checkpoints" / "step_3"
    resumed = train(ranks, directory / f"on_{ranks}", f"run.resume={checkpoint}")
    check(resumed, first=4)
    first = {row for step, row in uninterrupted.responses if step <= 3}
    assert first.isdisjoint(row for _, row in resumed.responses)
    drawn = {row: ids for _, row, ids in drawn_rows(checkpoint)}
    going_on = {row: ids for (_, row), ids in resumed.responses.items() if row in drawn}
    assert len(going_on) > len(drawn) / 2 and any(drawn[row] for row in going_on)
    assert all(ids[: len(drawn[row])] == drawn[row] for row, ids in going_on.items())


def drawn_rows(checkpoint: Path) -> list[tuple[str, int, list[int]]]:
    """Of the rows in flight that a checkpoint holds: replica, row id, tokens so far."""
    pieces = read_manifest(checkpoint).pieces_of(ROWS_IN_FLIGHT, PARAM)
    found = []
    for replica, its in pieces.items():
        ((_, data),) = read_pieces(checkpoint, its)
        rows = unpack(data)
        tokens = [ids.tolist() for ids in rows["token_ids"].rows()]
        found += [(replica, row, ids) for row, ids in zip(rows.row_ids.tolist(), tokens, strict=True)]
    return found


def test_rows_in_flight_are_saved_by_those_who_hold_them(directory: Path, uninterrupted: tasks.Run) -> None:
    """Whole groups, each on one replica; no token is in the manifest, which every rank reads."""
    checkpoint = directory / "dp2" / "checkpoints" / "step_3"
    rows = drawn_rows(checkpoint)
    assert {name for name, *_ in rows} == {"actor.0", "actor.1"} and len(rows) == tasks.SAMPLES * (IN_FLIGHT - tasks.PROMPTS)
    assert len({row for _, row, _ in rows}) == len(rows) == len({(name, row ^ 1) for name, row, _ in rows})
    files = {file for role, _, file in read_manifest(checkpoint).lines if role == ROWS_IN_FLIGHT}
    assert len(files) == 2, files


def test_a_replica_goes_on_with_its_own_rows_only() -> None:
    """Of what all replicas had in flight."""
    before = PartialRollouts(SimpleNamespace(kept=[], records_experts=False))  # type: ignore[arg-type]
    requests = [Request(row, row // 2, [1, 2], 5) for row in range(8)]
    before.generator.kept = [SequenceState(request, 3) for request in requests[:6]]
    before.ended = {row: Completion(row, [4, 0], *torch.zeros(2, 2), "stop", torch.tensor([2, 3])) for row in (6, 7)}
    after = PartialRollouts(SimpleNamespace(kept=[], records_experts=False))  # type: ignore[arg-type]
    after.saved = before.state()
    assert after.saved.row_ids.tolist() == list(range(8))
    mine = [*requests[2:4], *requests[6:], Request(8, 4, [1], 5)]
    assert [request.row_id for request in after._restore(mine, 0)] == [8]
    assert [row.request.row_id for row in after.generator.kept] == [2, 3] and list(after.ended) == [6, 7]
    assert after.ended[7].token_ids == [4, 0] and after.saved is None
    recording = PartialRollouts(SimpleNamespace(kept=[], records_experts=True))  # type: ignore[arg-type]
    recording.saved = before.state()
    with pytest.raises(CheckpointError, match=r"row 6 in flight without its experts; resume with the router_replay"):
        recording._restore(mine, 0)


def test_rows_of_groups_of_another_size_are_refused(directory: Path, uninterrupted: tasks.Run, tmp_path: Path) -> None:
    """Row ids count all rows of a run: with another ``n`` they would be those of other prompts."""
    resume = f"run.resume={directory / 'dp2' / 'checkpoints' / 'step_3'}"
    with pytest.raises(
        AssertionError, match=r"CheckpointError: .* in flight with sampling\.n=2 responses each, and it is 1 now"
    ):
        train(2, tmp_path / "other", resume, "sampling.n=1")


def test_rows_that_nobody_has_asked_for_yet_are_saved_again() -> None:
    """By each replica, which was given those of all; whoever takes them back gets each once."""
    held, other = (PartialRollouts(SimpleNamespace(kept=[], records_experts=False)) for _ in range(2))  # type: ignore[arg-type]
    held.generator.kept = [SequenceState(Request(row, row // 2, [1, 2], 5), 3) for row in range(6)]
    other.take_back([held.state().take(np.arange(0, 2)), held.state().take(np.arange(2, 6))])
    assert other.state().row_ids.tolist() == list(range(6))
    again = PartialRollouts(SimpleNamespace(kept=[], records_experts=False))  # type: ignore[arg-type]
    again.take_back([other.state(), other.state()])
    assert again.state().row_ids.tolist() == list(range(6)) and again.state()["step"].tolist() == [3] * 6


@pytest.mark.parametrize("resume", ["auto", "force", "path"])
def test_prompts_that_changed_are_not_attached_to_tokens_of_others(
    directory: Path, uninterrupted: tasks.Run, resume: str, tmp_path: Path
) -> None:
    """``run.resume=force`` goes on with other data, but the answers in flight are not answers to its prompts."""
    lines = (tasks.task() / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines[1:] + lines[:1]))
    shutil.copytree(directory / "dp2", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_6")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_3")
    more = (f"data.path={tmp_path / 'train.jsonl'}",)
    if resume == "path":
        resume = str(tmp_path / "run" / "checkpoints" / "step_3")
    words = (
        "is of another experiment"
        if resume == "auto"
        else r"CheckpointError: .* 8 prompts in flight, and \d of them read otherwise"
    )
    with pytest.raises(AssertionError, match=words):
        train(2, tmp_path / "run", *more, f"run.resume={resume}")


def test_rows_that_have_come_further_than_they_may_are_refused(
    directory: Path, uninterrupted: tasks.Run, tmp_path: Path
) -> None:
    resume = f"run.resume={directory / 'dp2' / 'checkpoints' / 'step_3'}"
    longest = max(len(ids) for *_, ids in drawn_rows(directory / "dp2" / "checkpoints" / "step_3"))
    words = (
        rf"CheckpointError: the checkpoint has row \d+ in flight with \d+ tokens, and max_response_length is {longest - 1} now"
    )
    with pytest.raises(AssertionError, match=words):
        train(2, tmp_path / "shorter", resume, f"data.max_response_length={longest - 1}")


def test_a_second_generation_in_the_step_leaves_the_rows_in_flight_alone(
    directory: Path, uninterrupted: tasks.Run, tmp_path: Path
) -> None:
    """Greedy answers to the prompts whose samples have ended, as baselines; in another layout the same numbers."""
    config = tasks.other_task({"name": "outside.greedy_while_in_flight", "ppo_mini_batch_size": 4}, "actor")
    train_it = partial(train, steps=4, config=config)
    one = train_it(1, tmp_path / "one", *FP64)
    check(one, steps=4)
    assert all(row["baseline/greedy_mean"] != row["baseline/sampled_mean"] for row in one.metrics)
    other = train_it(2, tmp_path / "tp2", *FP64, *layout("actor", tp=2), *layout("generation", tp=2))
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    assert difference < 1e-9, where
    check(train_it(2, tmp_path / "dp2"), steps=4)


def test_mistakes_are_named(directory: Path) -> None:
    config = str(tasks.task() / "ppo.json")
    with pytest.raises(ValueError, match=r"data\.gen_batch_size=4 is less than data\.train_batch_size=8"):
        prepare(config, tasks.settings(directory / "x", 1, "data.gen_batch_size=4"), 1)
    with pytest.raises(ValueError, match=r"kv_cache=keep: all responses end in their step"):
        prepare(config, tasks.settings(directory / "x", 1, "models.actor.generation.kv_cache=keep"), 1)
    with pytest.raises(ValueError, match=r"rebalance_steps=4: with data\.gen_batch_size rows stay on their replica"):
        prepare(config, tasks.settings(directory / "x", 1, *PARTIAL, "models.actor.generation.rebalance_steps=4"), 1)
    with pytest.raises(ValueError, match=r"data\.gen_batch_size=9 prompts in flight must be divisible by the 2 generation"):
        prepare(config, tasks.settings(directory / "x", 1, "data.gen_batch_size=9"), 2)
