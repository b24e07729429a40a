"""A new algorithm, reward and transfer protocol are new files outside the package, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tasks
from outside import reinforce
from outside.rewards import share_of_even_digits
from ranks import run_ranks
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.train import prepare

N = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shared task, with this algorithm in place of PPO."""
    sections = json.loads((tasks.task() / "ppo.json").read_text())
    sections["models"] = {"actor": {**sections["models"]["actor"], "dtype": "float64"}, "reward": {"dtype": "float64"}}
    sections["algorithm"] = {"name": "outside.reinforce", "ppo_mini_batch_size": 4, "scale": 2.0}
    sections |= {"reward": {"function": "outside.rewards:share_of_even_digits"}, "sampling": {"n": N}}
    file = tmp_path_factory.mktemp("reinforce") / "reinforce.json"
    file.write_text(json.dumps(sections))
    return str(file)


def test_an_algorithm_with_reward_and_protocol_of_its_own(config: str, tmp_path: Path) -> None:
    """On two ranks, which are started again after a step, and on one: the same numbers."""
    all_samples = f"run.log_samples={tasks.PROMPTS * N}"
    one = tasks.train(1, tmp_path / "one", 2, all_samples, config=config)
    for steps in (1, 2):
        run_ranks(2, tasks.train_here, config, tasks.settings(tmp_path / "two", steps, all_samples))
    two = tasks.read_run(tmp_path / "two")
    assert one.responses == two.responses and tasks.worst_tensor(one, two)[0] < 1e-10
    assert one.state["roles"] == two.state["roles"]
    assert one.state["roles"]["baseline"] == {"seen": 2 * tasks.PROMPTS * N}
    best = [row["baseline/best"] for row in one.metrics]
    assert one.state["roles"]["compute"] == {"best": max(best)}, "the second start goes on from the first one's"
    assert [row["baseline/best_so_far"] for row in two.metrics] == [best[0], max(best)]

    logged = [json.loads(line) for line in (tmp_path / "two" / "rollouts.jsonl").read_text().splitlines()]
    for number, row in enumerate(two.metrics, 1):
        samples = [sample for sample in logged if sample["step"] == number]
        scores = [sample["score"] for sample in samples]
        expected = [share_of_even_digits(sample["prompt"], sample["response"], {}) for sample in samples]
        assert len(scores) == tasks.PROMPTS * N and scores == pytest.approx(expected, abs=1e-6)
        assert row["reward/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert row["baseline/best"] == pytest.approx(max(scores), abs=1e-6)
        assert row["baseline/seen"] == number * tasks.PROMPTS * N and row["actor/grad_norm"] > 0
        lengths = [len(tasks.token_ids(sample["response"])) for sample in samples]
        assert row["response_length/mean"] == sum(lengths) / len(lengths)
        # the protocol: the last rank works on the first part of the rows
        tokens = [len(sample["prompt"]) + length for sample, length in zip(samples, lengths, strict=True)]
        parts = partition_by_tokens(tokens, 2, np.arange(len(samples)) // N).tolist()
        first_rows = {f"baseline/first_row_of_rank_{1 - part}": samples[parts.index(part)]["row_id"] for part in (0, 1)}
        assert {key: row[key] for key in first_rows} == first_rows


def test_the_algorithm_s_own_keys_are_checked_as_all_others(config: str, tmp_path: Path) -> None:
    overrides = tasks.settings(tmp_path / "run", 1)
    assert isinstance(prepare(config, overrides, 1).config.algorithm, reinforce.Config)
    for override, message in (
        ("algorithm.scale=-1", r"^algorithm.scale=-1.0 must be above 0$"),
        ("algorithm.scael=1", r"^unknown key 'algorithm.scael'; did you mean 'algorithm.scale'\?"),
        ("models.critic.dtype=float32", r"models.critic: this algorithm has no such role"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(config, [*overrides, override], 1)
