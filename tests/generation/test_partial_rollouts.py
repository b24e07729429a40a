"""PPO with more prompts in flight than a step takes: rows cross steps, replicas stay in step, a resumed run is the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
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
from rlhf_spmd.training.checkpoints import ROWS_IN_FLIGHT
from rlhf_spmd.workers.partial_rollouts import PartialRollouts

STEPS, SAVED_STEP = 6, 3
FP64 = ("models.actor.dtype=float64", "models.actor.optim.eps=1e-3")


def check(run: tasks.Run, first: int = 1) -> None:
    """Every step trained on whole groups, none of them twice, the oldest ones soon."""
    seen: set[int] = set()
    for number in range(first, first + len(run.raw)):
        rows = {row for step, row in run.responses if step == number}
        assert len(rows) == tasks.PROMPTS * tasks.SAMPLES and not rows & seen
        assert {row ^ 1 for row in rows} == rows  # both samples of each prompt
        assert max(rows) < tasks.SAMPLES * (IN_FLIGHT + tasks.PROMPTS * (number - 1))
        seen |= rows
    assert max(float(row["rollout/stale_fraction"]) for row in run.raw) > 0.05


def train(ranks: int, run_dir: Path, steps: int, *more: str, config: str = "") -> tasks.Run:
    return tasks.train(ranks, run_dir, steps, *PARTIAL, *more, config=config or None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partial") / "dp2"


@pytest.fixture(scope="module")
def uninterrupted(directory: Path) -> tasks.Run:
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(directory, STEPS, *PARTIAL))
    return tasks.read_run(directory)


@pytest.fixture(scope="module")
def checkpoint(directory: Path, uninterrupted: tasks.Run) -> Path:
    return directory / "checkpoints" / f"step_{SAVED_STEP}"


def test_rows_cross_steps_and_each_is_trained_on_once(directory: Path, uninterrupted: tasks.Run) -> None:
    """Every token knows the weights that drew it."""
    check(uninterrupted)
    assert uninterrupted.raw[0]["rollout/stale_fraction"] == 0.0
    assert uninterrupted.log_prob_difference() > 1e-4  # tokens of older weights
    assert uninterrupted.raw[-1]["data/epoch"] == pytest.approx((IN_FLIGHT + (STEPS - 1) * tasks.PROMPTS) / tasks.NUM_TRAIN)
    rows = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    spanning = [row for row in rows if len(row["versions"]) > 1]
    assert spanning and len(spanning) < len(rows)
    assert all(1 <= row["versions"][0][0] < row["versions"][-1][0] <= row["step"] for row in spanning)
    assert any(row["versions"][-1][0] == row["step"] for row in spanning)
    old = {row["step"] for row in spanning}
    assert all(metrics["rollout/stale_fraction"] > 0 for metrics in uninterrupted.raw if metrics["step"] in old)


def test_tokens_older_than_the_bound_are_not_learned(tmp_path: Path) -> None:
    """What a run does until the first of them, it does without the bound; then it learns from the other tokens alone."""
    long = ("models.actor.generation.max_num_seqs=32", "data.max_response_length=40", "run.log_samples=100")
    bounded = train(1, tmp_path / "bounded", 5, *long, "rollout.max_staleness=1")
    unbounded = train(1, tmp_path / "unbounded", 5, *long)
    masked: dict[int, list[int]] = {}
    for line in (tmp_path / "bounded" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        counts = masked.setdefault(row["step"], [0, 0])
        counts[0] += sum(number for version, number in row["versions"] if version < row["step"] - 1)
        counts[1] += sum(number for _, number in row["versions"])
    fractions = {metrics["step"]: metrics["rollout/masked_fraction"] for metrics in bounded.raw}
    assert fractions == {step: pytest.approx(old / number) for step, (old, number) in masked.items()}
    first = min(step for step, fraction in fractions.items() if fraction)
    for with_bound, without in zip(bounded.raw, unbounded.raw, strict=True):
        is_equal = all(with_bound[f"{role}/grad_norm"] == without[f"{role}/grad_norm"] for role in ("actor", "critic"))
        assert is_equal == (with_bound["step"] < first)
    assert "rollout/masked_fraction" not in unbounded.raw[0]


def test_a_slower_replica_gives_fewer_groups(tmp_path: Path) -> None:
    run = train(2, tmp_path, 3, "placement.speeds=[1.0,0.4]")
    check(run)
    state = run.state["data"]["prompts"]
    assert [home for _, home, _ in state["in_flight"]].count(1) == 3 and state["speeds"] == [1.0, 0.4]


@pytest.mark.parametrize(
    "more",
    [
        (*layout("actor", tp=2), *layout("generation", tp=2), "models.actor.generation.num_pages=3"),
        (*layout("actor", pp=2), *layout("generation", pp=2), "models.actor.generation.kv_cache=offload"),
    ],
    ids=["tp2 under preemption", "pp2 with pages that wait"],
)
def test_log_probs_belong_to_their_tokens_in_every_layout(more: tuple[str, ...], tmp_path: Path) -> None:
    """While the weights stay, what earlier steps drew has the log-probs of a forward pass now."""
    frozen = ("models.actor.optim.lr=0", "models.actor.optim.weight_decay=0", "models.actor.optim.min_lr_ratio=1")
    run = train(2, tmp_path, 3, *frozen, *more)
    check(run)
    assert run.log_prob_difference() < 1e-5


def test_a_resumed_run_is_the_run_that_was_never_ended(tmp_path: Path, checkpoint: Path, uninterrupted: tasks.Run) -> None:
    state = read_manifest(checkpoint).state["data"]["prompts"]
    assert len(state["in_flight"]) == IN_FLIGHT - tasks.PROMPTS and {home for _, home, _ in state["in_flight"]} == {0, 1}
    resumed = train(2, tmp_path, STEPS, f"run.resume={checkpoint}")
    later = {key: ids for key, ids in uninterrupted.responses.items() if key[0] > SAVED_STEP}
    tasks.assert_bit_equal(resumed, replace(uninterrupted, metrics=uninterrupted.metrics[SAVED_STEP:], responses=later))


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_other_replicas_take_the_rows_of_a_checkpoint(
    tmp_path: Path, checkpoint: Path, uninterrupted: tasks.Run, ranks: int
) -> None:
    """As far as they had come: what was drawn stays drawn, whoever goes on with it."""
    resumed = train(ranks, tmp_path, 5, f"run.resume={checkpoint}")
    check(resumed, first=SAVED_STEP + 1)
    trained = {row for step, row in uninterrupted.responses if step <= SAVED_STEP}
    assert trained.isdisjoint(row for _, row in resumed.responses)
    drawn = {row: ids for _, row, ids in drawn_rows(checkpoint)}
    continued = {row: ids for (_, row), ids in resumed.responses.items() if row in drawn}
    assert len(continued) > len(drawn) / 2 and any(drawn[row] for row in continued)
    assert all(ids[: len(drawn[row])] == drawn[row] for row, ids in continued.items())


def drawn_rows(checkpoint: Path) -> list[tuple[str, int, list[int]]]:
    """Of the rows in flight that a checkpoint holds: replica, row id, tokens so far."""
    drawn = []
    for replica, pieces in read_manifest(checkpoint).pieces_of(ROWS_IN_FLIGHT, PARAM).items():
        ((_, data),) = read_pieces(checkpoint, pieces)
        rows = unpack(data)
        tokens = [ids.tolist() for ids in rows["token_ids"].rows()]
        drawn += [(replica, row, ids) for row, ids in zip(rows.row_ids.tolist(), tokens, strict=True)]
    return drawn


def test_rows_in_flight_are_saved_by_those_who_hold_them(checkpoint: Path) -> None:
    """Whole groups, each on one replica; no token is in the manifest, which every rank reads."""
    rows = drawn_rows(checkpoint)
    assert {name for name, *_ in rows} == {"actor.0", "actor.1"} and len(rows) == tasks.SAMPLES * (IN_FLIGHT - tasks.PROMPTS)
    assert len({row for _, row, _ in rows}) == len(rows) == len({(name, row ^ 1) for name, row, _ in rows})
    files = {file for role, _, file in read_manifest(checkpoint).lines if role == ROWS_IN_FLIGHT}
    assert len(files) == 2, files


def rollouts(requests: Sequence[Request] = (), records_experts: bool = False) -> PartialRollouts:
    generator = SimpleNamespace(kept=[SequenceState(request, 3) for request in requests], records_experts=records_experts)
    return PartialRollouts(generator)  # type: ignore[arg-type]


def test_a_replica_goes_on_with_its_rows_only() -> None:
    """Of what all replicas had in flight."""
    requests = [Request(row, row // 2, [1, 2], 5) for row in range(8)]
    before, after, recording = rollouts(requests[:6]), rollouts(), rollouts(records_experts=True)
    before.ended = {row: Completion(row, [4, 0], *torch.zeros(2, 2), "stop", torch.tensor([2, 3])) for row in (6, 7)}
    after.saved = recording.saved = before.state()
    assert after.saved.row_ids.tolist() == list(range(8))
    asked = [*requests[2:4], *requests[6:], Request(8, 4, [1], 5)]
    assert [request.row_id for request in after._restore(asked, 0)] == [8]
    assert [row.request.row_id for row in after.generator.kept] == [2, 3] and list(after.ended) == [6, 7]
    assert after.ended[7].token_ids == [4, 0] and after.saved is None
    with pytest.raises(CheckpointError, match=r"row 6 in flight without its experts; resume with the router_replay"):
        recording._restore(asked, 0)


def test_rows_that_nobody_has_asked_for_yet_are_saved_again() -> None:
    """By each replica, which was given those of all; whoever takes them back gets each once."""
    first, second, third = rollouts([Request(row, row // 2, [1, 2], 5) for row in range(6)]), rollouts(), rollouts()
    second.restore([first.state().take(np.arange(0, 2)), first.state().take(np.arange(2, 6))])
    third.restore([second.state(), second.state()])
    for part in (second, third):
        assert part.state().row_ids.tolist() == list(range(6)) and part.state()["step"].tolist() == [3] * 6


def test_checkpoints_whose_rows_cannot_go_on_are_refused(tmp_path: Path, directory: Path, checkpoint: Path) -> None:
    """Row ids count all rows of a run: with another ``n`` they would be those of other prompts. ``run.resume=force`` goes on with other
    data, but the answers in flight are not answers to its prompts."""
    lines = (tasks.task() / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines[1:] + lines[:1]))
    shutil.copytree(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS}")
    (tmp_path / "run" / "checkpoints" / "latest").write_text(f"step_{SAVED_STEP}")
    limit = max(len(ids) for *_, ids in drawn_rows(checkpoint)) - 1
    for run_dir, resume, override, message in (
        ("n", checkpoint, "sampling.n=1", r"in flight with sampling\.n=2 responses each, and it is 1 now"),
        ("run", "force", f"data.path={tmp_path / 'train.jsonl'}", r"8 prompts in flight, and \d of them read otherwise"),
        ("length", checkpoint, f"data.max_response_length={limit}", rf"row \d+ in flight with \d+ tokens, .* is {limit} now"),
    ):
        with pytest.raises(CheckpointError, match=message):
            tasks.train_alone(tmp_path / run_dir, STEPS, *PARTIAL, f"run.resume={resume}", override)


def test_a_second_generation_in_the_step_leaves_the_rows_in_flight_alone(tmp_path: Path) -> None:
    """Greedy answers to the prompts whose samples have ended, as baselines; in another layout the same numbers."""
    config = tasks.other_task({"name": "outside.greedy_while_in_flight", "ppo_mini_batch_size": 4}, "actor")
    single = train(1, tmp_path / "single", 3, *FP64, config=config)
    check(single)
    assert all(row["baseline/greedy_mean"] != row["baseline/sampled_mean"] for row in single.metrics)
    split = train(2, tmp_path / "split", 3, *FP64, *layout("actor", tp=2), *layout("generation", tp=2), config=config)
    assert split.responses == single.responses
    difference, where = tasks.worst_metric(single, split, floor=1e-2)
    assert difference < 1e-9, where


def test_fewer_prompts_in_flight_than_a_step_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.in_flight=4, data\.train_batch_size=8: the first counts the prompts"):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, "rollout.in_flight=4"), 1)
