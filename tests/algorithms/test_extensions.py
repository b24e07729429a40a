"""A new algorithm, reward and transfer protocol are new files outside the package, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tasks
from outside import reinforce
from outside.rewards import share_of_even_digits
from ranks import run_ranks
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.train import prepare

EVEN, N = "outside.rewards:share_of_even_digits", 4


def overrides(run_dir: Path, steps: int, *more: str) -> list[str]:
    """The shared task, with this algorithm in place of PPO."""
    config = json.loads((tasks.task() / "ppo.json").read_text())
    del config["models"]["critic"], config["models"]["reference"]
    config["algorithm"] = {"name": "outside.reinforce", "ppo_mini_batch_size": 4, "scale": 2.0}
    config |= {"reward": {"function": EVEN}, "sampling": {"n": N}}
    file = run_dir.parent / "reinforce.json"
    file.write_text(json.dumps(config))
    return [str(file), *tasks.settings(run_dir, steps, *more)]


def train(size: int, arguments: list[str]) -> None:
    run_ranks(size, tasks.train_here, arguments[0], arguments[1:])


def test_an_algorithm_with_reward_and_protocol_of_its_own_runs_on_two_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "two"
    train(2, overrides(run_dir, 2, f"run.log_samples={tasks.PROMPTS * N}"))
    run = tasks.read_run(run_dir)
    assert [row["step"] for row in run.metrics] == [1, 2]
    best: list[float] = []
    for number, row in enumerate(run.metrics, 1):
        samples = [s for s in map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines()) if s["step"] == number]
        scores = [sample["score"] for sample in samples]
        assert scores == [reward_of(sample) for sample in samples] and len(scores) == tasks.PROMPTS * N
        assert row["reward/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert row["baseline/seen"] == number * tasks.PROMPTS * N
        best.append(max(scores))
        found = {key: row[key] for key in ("baseline/best", "baseline/best_so_far")}
        assert found == pytest.approx({"baseline/best": best[-1], "baseline/best_so_far": max(best)}, abs=1e-6)
        assert row["actor/grad_norm"] > 0
        lengths = [len(tasks.token_ids(sample["response"])) for sample in samples]
        assert row["response_length/mean"] == sum(lengths) / len(lengths)
        # the protocol: the last rank works on the first part of the rows
        tokens = [len(sample["prompt"]) + length for sample, length in zip(samples, lengths, strict=True)]
        parts = partition_by_tokens(tokens, 2, np.arange(len(samples)) // N).tolist()
        expected = {f"baseline/first_row_of_rank_{1 - part}": samples[parts.index(part)]["row_id"] for part in (0, 1)}
        assert {key: row[key] for key in expected} == expected


def reward_of(sample: dict[str, Any]) -> Any:
    return pytest.approx(share_of_even_digits(sample["prompt"], sample["response"], {}), abs=1e-6)


def test_it_gives_the_same_numbers_on_one_rank_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    torch.set_num_threads(1)
    alone = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    arguments = overrides(one, 2, "models.actor.dtype=float64", "models.reward.dtype=float64")
    tasks.train_here(alone, arguments[0], arguments[1:])
    for steps in (1, 2):
        train(2, overrides(two, steps, "models.actor.dtype=float64", "models.reward.dtype=float64"))
    first, second = tasks.read_run(one), tasks.read_run(two)
    assert first.responses == second.responses
    assert first.state["roles"] == second.state["roles"]
    assert first.state["roles"]["baseline"] == {"seen": 2 * tasks.PROMPTS * N}
    best = [row["baseline/best"] for row in first.metrics]
    assert first.state["roles"]["compute"] == {"best": max(best)}, "the second start goes on from the first one's"
    assert [row["baseline/best_so_far"] for row in second.metrics] == [best[0], max(best)]
    assert tasks.worst_tensor(first, second)[0] < 1e-10


def test_the_algorithm_s_own_keys_are_checked_as_all_others(tmp_path: Path) -> None:
    file, *rest = overrides(tmp_path / "run", 1)
    assert isinstance(prepare(file, rest, 1).config.algorithm, reinforce.Config)
    with pytest.raises(ValueError, match=r"^algorithm.scale=-1.0 must be above 0$"):
        prepare(file, [*rest, "algorithm.scale=-1"], 1)
    with pytest.raises(ValueError, match=r"^unknown key 'algorithm.scael'; did you mean 'algorithm.scale'\?"):
        prepare(file, [*rest, "algorithm.scael=1"], 1)
    with pytest.raises(ValueError, match=r"models.critic: this algorithm has no such role"):
        prepare(file, [*rest, "models.critic.dtype=float32"], 1)
