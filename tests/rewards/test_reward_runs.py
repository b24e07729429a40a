"""Rewards of several kinds side by side in a training run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from generate_runs import read_output
from ranks import run_ranks
from rlhf_spmd.rewards.results import RewardError
from tasks import MAX_RESPONSE, read_run, settings, task, token_ids, train_alone, train_here, worst_metric

FILE = """
import asyncio

async def digits(response, per_digit=1.0):
    await asyncio.sleep(0.01)
    return per_digit * sum(c.isdigit() for c in response)

class Shares:
    '''Of a prompt's responses each gets its share of their length: groups must come whole and alone.'''

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, prompts, completions):
        assert len(set(prompts)) == 1 and len(completions) == 2
        total = sum(map(len, completions)) or 1
        return [self.scale * len(c) / total for c in completions]

def some(prompts, completions):
    return [len(c) / 10 if int(p[0], 36) % 2 else None for p, c in zip(prompts, completions)]

def none(completions):
    return [None] * len(completions)

calls = 0

def dies(response):
    '''Of three steps and a half: the server is gone.'''
    global calls
    calls += 1
    if calls > 36:
        raise ConnectionError("the server is gone")
    return len(response) / 10
"""


def test_a_file_s_functions_and_built_in_rewards_add_up(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    names = [
        f"reward.function={tmp_path}/mine.py:digits",
        "reward.kwargs={per_digit: 0.5}",
        "reward.num_workers=2",
        f"rewards.shares.function={tmp_path}/mine.py:Shares",
        "rewards.shares.kwargs={scale: 10.0}",
        "rewards.shares.by_group=true",
        "rewards.long.function=length:overlong",
        f"rewards.long.kwargs={{max_length: {MAX_RESPONSE}, buffer: 4}}",
        "rewards.long.weight=2.0",
        "rewards.form.function=format",
        "rewards.form.kwargs={pattern: '[a-z]*'}",
    ]
    run_ranks(2, train_here, str(task() / "ppo.json"), settings(tmp_path / "run", 1, *names))
    samples = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    digits = [0.5 * sum(c.isdigit() for c in s["response"]) for s in samples]
    lengths = [len(token_ids(s["response"])) for s in samples]
    overlong = [-2.0 * min(max(n - (MAX_RESPONSE - 4), 0) / 4, 1.0) for n in lengths]
    form = [float(s["response"].isalpha() or not s["response"]) for s in samples]
    (metrics,) = read_run(tmp_path / "run").metrics
    for name, values in (("reward", digits), ("long", overlong), ("form", form)):
        assert metrics[f"{name}/mean"] == pytest.approx(sum(values) / 16, abs=1e-6), name
        assert metrics[f"{name}/failures"] == metrics[f"{name}/timeouts"] == 0
    assert metrics["shares/mean"] == pytest.approx(5.0) and metrics["shares/failures"] == 0
    assert metrics["reward/total_mean"] == pytest.approx((sum(digits) + sum(overlong) + sum(form)) / 16 + 5.0, abs=1e-5)
    clipped = sum(n == MAX_RESPONSE for n in lengths)
    assert metrics["response_length/clip_ratio"] == clipped / 16


def test_rows_that_no_reward_scores_are_told_and_left_out_on_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    names = [f"reward.function={tmp_path}/mine.py:some", "run.test_freq=1", f"data.val_path={task()}/train.jsonl"]
    train_alone(tmp_path / "one", 2, *names)
    run_ranks(2, train_here, str(task() / "ppo.json"), settings(tmp_path / "two", 2, *names))
    one = read_run(tmp_path / "one")
    assert worst_metric(one, read_run(tmp_path / "two"), 1e-3)[0] < 1e-3
    samples = [json.loads(line) for line in (tmp_path / "one" / "rollouts.jsonl").read_text().splitlines()]
    for metrics in one.metrics[1:]:
        scores = [row["score"] for row in samples if row["step"] == metrics["step"]]
        scored = [score for score in scores if score is not None]
        assert metrics["reward/unscored"] == 16 - len(scored) and 0 < len(scored) < 16
        assert metrics["reward/mean"] == pytest.approx(sum(scored) / len(scored))


def test_rows_of_a_reward_that_dies_are_left_out_and_a_second_step_of_them_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(
        RewardError, match=r"failed in 16 of 16 calls of this step, as of the step before; .*the server is gone"
    ):
        train_alone(tmp_path / "run", 6, f"reward.function={tmp_path}/mine.py:dies")
    metrics = read_output(tmp_path / "run" / "metrics.jsonl")
    assert [step["reward/failures"] for step in metrics] == [0, 0, 12, 16]
    scores = [row["score"] for row in read_output(tmp_path / "run" / "rollouts.jsonl") if row["step"] == 3]
    known = [score for score in scores if score is not None]
    assert len(known) == 4 and metrics[2]["reward/mean"] == pytest.approx(sum(known) / 4)
    assert "reward/mean" not in metrics[3] and metrics[3]["critic/advantages/max"] == metrics[3]["critic/advantages/min"] == 0


@pytest.mark.parametrize("more", [(), ("run.test_freq=1", "data.val_path={task}/train.jsonl")], ids=["a step", "validation"])
def test_a_reward_that_scores_nothing_ends_the_run(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(RewardError, match=r"^reward.function '.*none' returned None for all of the first \d+ rows$"):
        train_alone(tmp_path / "run", 1, f"reward.function={tmp_path}/mine.py:none", *(x.format(task=task()) for x in more))


def test_rewards_that_are_not_added_up_have_to_score_each(tmp_path: Path) -> None:
    """As safe_rlhf's cost, without which the policy would be constrained by nothing."""
    (tmp_path / "mine.py").write_text(FILE)
    config = json.loads((task() / "ppo.json").read_text())
    config["models"] = {"actor": config["models"]["actor"]}
    config["algorithm"] = {"name": "outside.two_rewards", "ppo_mini_batch_size": 4}
    (tmp_path / "two.json").write_text(json.dumps(config))
    both = [f"{key}.function={tmp_path}/mine.py:digits" for key in ("reward", "rewards.cost")]
    for key in ("reward", "rewards.cost"):
        own = f"{key}.function={tmp_path}/mine.py:none"
        with pytest.raises(RewardError, match=rf"^{key}.function '.*none' returned None for all of the first \d+ rows"):
            train_alone(tmp_path / key, 1, *both, own, config=tmp_path / "two.json")
