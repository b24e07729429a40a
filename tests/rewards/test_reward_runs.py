"""Rewards of several kinds side by side in a training run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ranks import run_ranks
from tasks import MAX_RESPONSE, read_run, settings, task, token_ids, train_here

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
