"""Roles in a real run: the reward model's scores, overlap of pools, and SFT."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import planner_cases
import ranks
from outside.rewards import share_of_even_digits
from ranks import run_ranks
from rlhf_spmd.rewards.runner import RewardError
from rlhf_spmd.train import prepare
from tasks import VOCABULARY, even_share, read_run, settings, task, token_ids, train_here


def test_a_reward_model_scores_as_transformers_does(tmp_path: Path) -> None:
    """Half the rule's score plus twice the model's, on a model split over tp and pp."""
    model = str(task() / "critic")
    layout = ["models.reward.layout.tp=2", "models.reward.layout.pp=2", "models.actor.layout.dp=4"]
    weights = ["reward.weight=0.5", "reward.model_weight=2.0"]
    overrides = settings(tmp_path, 1, f"reward.model={model}", *layout, *weights)
    run_ranks(4, train_here, str(task() / "ppo.json"), overrides)

    from transformers import AutoModelForSequenceClassification

    reference = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        ids = [VOCABULARY.index(c) for c in sample["prompt"]] + token_ids(sample["response"])
        with torch.no_grad():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected = 0.5 * even_share("", sample["response"], {}) + 2.0 * float(reference.score(hidden))
        assert sample["score"] == pytest.approx(expected, abs=1e-5)
    (metrics,) = read_run(tmp_path).metrics
    assert metrics["reward/mean"] == pytest.approx(sum(sample["score"] for sample in samples) / len(samples), abs=1e-6)


def test_a_reward_model_without_a_head_is_refused(tmp_path: Path) -> None:
    overrides = settings(tmp_path, 1, f"reward.model={task() / 'actor'}")
    with pytest.raises(ValueError, match=r"score\.weight"):
        prepare(str(task() / "ppo.json"), overrides, 1)
    twice = [f"reward.model={task() / 'actor'}", f"models.reward.path={task() / 'critic'}"]
    with pytest.raises(ValueError, match="name different models"):
        prepare(str(task() / "ppo.json"), settings(tmp_path, 1, *twice), 1)


def test_a_head_that_is_the_embedding_has_no_rate_of_its_own(tmp_path: Path) -> None:
    given = planner_cases.overrides(tmp_path, "sft", "qwen2.5_0.5b", "models.actor.optim.head_lr=0.001")
    with pytest.raises(ValueError, match=r"^models\.actor\.optim\.head_lr=0\.001: the model's output matrix is its embedding"):
        prepare(None, given, 1)


def test_short_names_of_dtypes(tmp_path: Path) -> None:
    ready = prepare(str(task() / "ppo.json"), settings(tmp_path, 1, "models.actor.dtype=bf16", "models.critic.dtype=fp32"), 1)
    found = [ready.plans[role].config.torch_dtype(torch.device("cpu")) for role in ("actor", "critic")]
    assert found == [torch.bfloat16, torch.float32]


def spans(run_dir: Path, *names: str) -> list[tuple[int, float, float]]:
    """(rank, start, end) in microseconds of the calls of these names."""
    events: list[dict[str, Any]] = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    return [(e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] in names]


def test_actor_and_critic_work_at_the_same_time_on_pools_of_their_own(tmp_path: Path) -> None:
    pools = ["placement.pools={policy: [0], value: [1]}", "models.actor.pool=policy", "models.reference.pool=policy"]
    pools += ["models.critic.pool=value", "models.reward.pool=value"]
    run_ranks(2, train_here, str(task() / "ppo.json"), settings(tmp_path, 3, *pools))
    actor, critic = spans(tmp_path, "actor.update_actor"), spans(tmp_path, "critic.update_critic")
    assert {rank for rank, *_ in actor} == {0} and {rank for rank, *_ in critic} == {1}
    overlapping = [min(a_end, c_end) - max(a, c) for _, a, a_end in actor for _, c, c_end in critic]
    # each step's two updates may; on a busy machine one can be over before the other has had its turn
    assert any(seconds > 0 for seconds in overlapping), "the two updates of a step must overlap"


def said(world: Any, config: str, overrides: list[str]) -> str:
    """What training writes to standard error on this rank."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        train_here(world, config, overrides)
    return stderr.getvalue()


def test_a_reward_that_fails_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    overrides = settings(tmp_path, 3, "reward.function=outside.rewards:often_fails", "reward.default=-1")
    lines = "".join(run_ranks(2, said, str(task() / "ppo.json"), overrides)).splitlines()
    told = [line for line in lines if "often_fails" in line]
    assert len(told) == 1 and "no opinion" in told[0] and "reward.default=-1.0" in told[0]
    steps = read_run(tmp_path).metrics
    assert [step["reward/min"] for step in steps] == [-1.0] * 3
    for step in steps:
        assert 0 < step["reward/failures"] < 16 and step["reward/mean"] == 1.0 - 2.0 * step["reward/failures"] / 16
        assert (step["reward/extra/mean"], step["reward/extra/failures"]) == (7.0, 99.0)


def ends_with(world: Any, config: str, overrides: list[str]) -> str:
    """What the reward's error says on this rank."""
    with pytest.raises(RewardError) as error:
        train_here(world, config, overrides)
    return str(error.value)


def test_a_reward_that_fails_in_every_call_of_the_first_step_ends_the_run(tmp_path: Path) -> None:
    """On every rank with the error, which only the first of a replica's tp ranks has seen."""
    overrides = settings(tmp_path, 2, "reward.function=outside.rewards:always_fails", "models.reward.layout.tp=2")
    found = run_ranks(2, ends_with, str(task() / "ppo.json"), overrides)
    ranks.close_pool(2)  # its ranks ended inside a step
    line = "reward.function 'outside.rewards:always_fails' failed in 16 of 16 calls of the first step; first error: row 0: TypeError: "
    line += "'good', a str, is not a number: a score is a float, an int or a bool, or None where there is none"
    assert found == [line] * 2


def test_two_named_rewards_side_by_side(tmp_path: Path) -> None:
    """Each with its own rows, weight and metrics; means are over rows, of which the replicas have unequal numbers."""
    config = json.loads((task() / "ppo.json").read_text())
    del config["models"]["critic"], config["models"]["reference"]
    config["algorithm"] = {"name": "outside.two_rewards", "ppo_mini_batch_size": 4}
    prompts = [{"prompt": str(i) * 3, "data_source": "odd" if i in (2, 5, 6) else "even"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config["data"]["path"] = str(tmp_path / "data.jsonl")
    (tmp_path / "config.json").write_text(json.dumps(config))
    file, run_dir = str(tmp_path / "config.json"), tmp_path / "run"
    overrides = settings(run_dir, 1, "rewards.cost.weight=-2", "rewards.cost.data_sources=[odd]")
    with pytest.raises(ValueError, match=r"there is no cost: give rewards.cost.function, a reward model as rewards.cost.model"):
        prepare(file, overrides, 2)
    with pytest.raises(ValueError, match=r"^rewards.cots: this algorithm has no such reward; did you mean 'cost'\?"):
        prepare(file, [*overrides, "rewards.cots.function=gsm8k"], 2)
    run_ranks(2, train_here, file, [*overrides, "rewards.cost.function=outside.rewards:priced"])

    samples = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 16, "the texts are reported once"
    scores = [even_share("", sample["response"], {}) for sample in samples]
    assert [sample["score"] for sample in samples] == pytest.approx(scores, abs=1e-6)
    odd = [sample["response"] for sample in samples if sample["prompt"][0] in "256"]
    shares = [-2 * share_of_even_digits("", response, {}) for response in odd]
    (metrics,) = read_run(run_dir).metrics
    expected = {"reward/mean": sum(scores) / 16, "cost/mean": sum(shares) / 6, "cost/max": max(shares), "cost/min": min(shares)}
    expected |= {
        "reward/failures": 0,
        "cost/failures": 0,
        "cost/extra/length": sum(map(len, odd)) / 6,
    }
    expected["response_length/mean"] = sum(len(token_ids(sample["response"])) for sample in samples) / 16
    assert {key: metrics.get(key) for key in expected} == pytest.approx(expected, abs=1e-6)


def sft_here(world: Any, overrides: list[str]) -> None:
    from rlhf_spmd.process.board import Board
    from rlhf_spmd.process.program import ProgramContext
    from rlhf_spmd.telemetry.run_dir import create_run_dir
    from rlhf_spmd.train import prepare, train

    prepared = prepare(None, overrides, world.size, "sft")
    create_run_dir(prepared.config.run.dir)
    train(ProgramContext(world, Board(world.launch, world.store), prepared))


def said_by_sft(world: Any, overrides: list[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        sft_here(world, overrides)
    return said.getvalue()


def test_sft_learns_the_same_on_every_layout(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 10}{i % 7}", "response": f"{i % 7}{i % 10}"} for i in range(64)]
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [f"data.path={data}", f"data.val_path={data}", "data.train_batch_size=16", "run.steps=6", "run.test_freq=3"]
    common += [f"models.actor.path={task() / 'actor'}", "models.actor.dtype=float64", "models.actor.optim.lr=3e-3"]
    layouts = {1: [], 2: ["models.actor.layout.tp=2"], 4: ["models.actor.layout.pp=2", "models.actor.layout.zero=1"]}
    found = {}
    for size, layout in layouts.items():
        run_dir = tmp_path / f"ranks_{size}"
        run_ranks(size, sft_here, [*common, *layout, f"run.dir={run_dir}"])
        found[size] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert (run_dir / "export" / "model.safetensors").exists()
    first, last = found[1][0]["val/loss"], found[1][-1]["val/loss"]
    assert last < 0.6 * first
    for size in (2, 4):
        for one, other in zip(found[1], found[size], strict=True):
            for key in {"val/loss", "actor/loss", "actor/grad_norm"} & one.keys():
                assert other[key] == pytest.approx(one[key], rel=1e-10), (size, one["step"], key)


def test_sft_that_reached_its_goal_says_so_and_stays_ended(tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i % 10}", "response": f"{i % 7}"}) + "\n" for i in range(16)))
    overrides = [
        f"data.path={data}",
        "data.train_batch_size=8",
        f"models.actor.path={task() / 'actor'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    overrides += ["run.steps=9", "run.test_freq=2", "algorithm.stop_at_reward=-1", "reward.function=tasks:even_share"]
    overrides += [
        f"val_prompts.path={task() / 'train.jsonl'}",
        "val_prompts.max_response_length=4",
        "val_prompts.max_prompt_length=12",
    ]
    said = ""
    for _ in range(2):
        said += run_ranks(1, said_by_sft, overrides)[0]
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]
    assert said.count(f"target reached: val/reward_mean {rows[2]['val/reward_mean']:.4g} >= -1 at step 2\n") == 1
    assert "nothing to do: its goal was reached in step 2" in said
