"""PPO with more prompts in flight than a step takes: rows cross steps, replicas stay in step, a resumed run is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tasks
from ranks import run_ranks
from rlhf_spmd.train import prepare
from test_ppo_layouts import layout

STEPS = 6
IN_FLIGHT = 16  # prompts; a step takes half of them
PARTIAL = (
    f"data.gen_batch_size={IN_FLIGHT}",
    "models.actor.generation.max_num_seqs=8",
    "sampling.logit_bias={0: 2.0}",  # the end of the text is likelier: responses of many lengths
    "run.save_freq=3",
    "run.keep_checkpoints=3",
)


def train(ranks: int, run_dir: Path, *more: str, steps: int = STEPS) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, steps, *PARTIAL, *more))
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


def test_every_token_knows_the_weights_that_drew_it(directory: Path, uninterrupted: tasks.Run) -> None:
    rows = [json.loads(line) for line in (directory / "dp2" / "rollouts.jsonl").read_text().splitlines()]
    spanning = [row for row in rows if "version_min" in row]
    assert spanning and len(spanning) < len(rows)
    assert all(1 <= row["version_min"] < row["version_max"] <= row["step"] for row in spanning)
    assert any(row["version_max"] == row["step"] for row in spanning)
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
    state = json.loads((checkpoint / "manifest.json").read_text())["state"]["data"]["prompts"]
    assert len(state["in_flight"]) == IN_FLIGHT - tasks.PROMPTS and {home for _, home, _ in state["in_flight"]} == {0, 1}
    resumed = train(2, directory / "resumed", f"run.resume={checkpoint}")
    later: dict[str, Any] = {"metrics": uninterrupted.metrics[3:]}
    later["responses"] = {key: ids for key, ids in uninterrupted.responses.items() if key[0] > 3}
    tasks.assert_bit_equal(resumed, tasks.Run(**{**vars(uninterrupted), **later}))


def test_other_replicas_take_the_rows_of_a_checkpoint(directory: Path, uninterrupted: tasks.Run) -> None:
    checkpoint = directory / "dp2" / "checkpoints" / "step_3"
    resumed = train(1, directory / "one", f"run.resume={checkpoint}")
    check(resumed, first=4)
    first = {row for step, row in uninterrupted.responses if step <= 3}
    assert first.isdisjoint(row for _, row in resumed.responses)


def test_mistakes_are_named(directory: Path) -> None:
    config = str(tasks.task() / "ppo.json")
    with pytest.raises(ValueError, match=r"data\.gen_batch_size=4 is less than data\.train_batch_size=8"):
        prepare(config, tasks.settings(directory / "x", 1, "data.gen_batch_size=4"), 1)
    with pytest.raises(ValueError, match=r"kv_cache=keep: all responses end in their step"):
        prepare(config, tasks.settings(directory / "x", 1, "models.actor.generation.kv_cache=keep"), 1)
    with pytest.raises(ValueError, match=r"data\.gen_batch_size=9 prompts in flight must be divisible by the 2 generation"):
        prepare(config, tasks.settings(directory / "x", 1, "data.gen_batch_size=9"), 2)
