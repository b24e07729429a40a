"""Rows whose environment fails begin again: with other draws, the same ones in any layout, and without a trace in other rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_environments import PARROT, SAMPLING, SMALL, Parrot, environments, nested, one_step, outcome, requests

import tasks
from generators import Generator, alone, assert_recorded, load, read_eos_ids, training_log_probs
from ranks import run_ranks
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.runner import EnvironmentRunner
from rlhf_spmd.generation import GenerationConfig
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS

FAILING = {0: ["reset"], 3: ["step 1"], 4: ["step 2", "step 1"], 5: ["last"], 8: ["observation"], 9: ["step 1"] * 3}
ATTEMPTS = 3


class Shaky(Parrot):
    """Fails in as many attempts of a row as its column ``failures`` has entries, each where the entry says."""

    begun: ClassVar[Counter[int]] = Counter()

    def reset(self, row: Mapping[str, Any]) -> str | None:
        attempt, self.failure = self.begun[row["row"]], ""
        self.begun[row["row"]] += 1
        if attempt < len(row["failures"]):
            self.failure = row["failures"][attempt]
        if self.failure == "reset":
            raise ConnectionError("reset")
        return super().reset(row)

    def step(self, text: str) -> tuple[Any, float, bool]:
        observation, reward, done = super().step(text)
        if self.failure == f"step {self.heard}" or (self.failure == "last" and done):
            raise ConnectionError(self.failure)
        return (nested(10**5) if self.failure == "observation" else observation), reward, done


def shaky(attempts: int, **settings: Any) -> Any:
    """Environments that fail in some rows. No tokenizer reads the observation of row 8."""
    Shaky.begun.clear()
    found = environments(cls="test_attempts:Shaky", attempts=attempts, **settings)
    rows = {row: {**values, "row": row, "failures": FAILING.get(row, [])} for row, values in found.rows.items()}
    return replace(found, rows=rows)


def generate(world: World, path: str, layout: Layout, config: GenerationConfig, attempts: int, sleep_s: float = 0.0) -> Any:
    """What each row went through, why it failed, and how often it began again."""
    mesh = build_mesh(world, range(world.size), layout) if world.size > 1 else alone()[1]
    found = shaky(attempts, args={"sleep_s": sleep_s})
    generator = Generator(load(path, mesh), mesh, config, read_eos_ids(path), decoding(found.tokenizer))
    completions = generator.generate(requests()[0], SAMPLING, 1, 2, environments=found)
    # nan is not equal to itself
    return [
        (*outcome(replace(done, reward=None if done.failure else done.reward)), done.failure, done.retries)
        for done in completions
    ]


@pytest.fixture(scope="module")
def path() -> str:
    return str(tasks.task() / "actor")


@pytest.fixture(scope="module")
def reference(path: str) -> list[Any]:
    """Rows one by one, environments at once."""
    return list(generate(alone()[0], path, Layout(), replace(SMALL, max_num_seqs=1), ATTEMPTS))


def test_rows_begin_again_and_others_do_not_notice(path: str, reference: list[Any]) -> None:
    plain = generate(alone()[0], path, Layout(), SMALL, 1)
    assert {row: done[-1] for row, done in enumerate(reference) if done[-1]} == {0: 1, 3: 1, 4: 2, 5: 1, 8: 1, 9: 2}
    for row, (before, after) in enumerate(zip(plain, reference, strict=True)):
        assert before[-1] == 0 and (before[-2] is not None) == (row in FAILING)
        assert (after[-2] is not None) == (row == 9), "row 9 has failed in its last attempt, too"
        if row in FAILING:
            assert after[0][:8] != before[0][:8], "other draws"
            assert len(after[0]) == len(after[1])
        else:
            assert after == before
    assert "failed in step(): ConnectionError: step 1" in reference[9][-2]


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, page_size=2, num_pages=24, max_num_seqs=24),
        replace(SMALL, steps_per_sync=4),
        replace(SMALL, enable_prefix_caching=False),
    ],
    ids=["preemption", "several tokens per look", "no shared pages"],
)
def test_draws_of_an_attempt_do_not_depend_on_timing_and_pages(
    path: str, reference: list[Any], config: GenerationConfig
) -> None:
    assert generate(alone()[0], path, Layout(), config, ATTEMPTS, 0.01) == reference


class Late(Shaky):
    """Fails when all other rows have ended."""

    def step(self, text: str) -> tuple[Any, float, bool]:
        try:
            return super().step(text)
        except ConnectionError:
            time.sleep(0.5)
            raise


def test_a_row_begins_again_when_all_others_have_ended(path: str) -> None:
    found = shaky(ATTEMPTS, max_turns=1)
    late = replace(found.configs["environment"], cls="test_attempts:Late")
    rows = {row: {**values, "failures": ["step 1"] * (row == 7)} for row, values in found.rows.items()}
    found = replace(found, configs={"environment": late}, rows=rows)
    generator = Generator(load(path, alone()[1]), alone()[1], SMALL, read_eos_ids(path), decoding(found.tokenizer))
    completions = generator.generate(requests()[0], SAMPLING, 1, 2, environments=found)
    assert {(done.row_id, done.retries) for done in completions if done.retries} == {(7, 1)}
    assert not any(done.failure for done in completions)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["tp", "pp"])
def test_draws_of_an_attempt_do_not_depend_on_the_layout(path: str, reference: list[Any], layout: Layout) -> None:
    first, second = run_ranks(2, generate, path, layout, SMALL, ATTEMPTS, 0.01)
    assert first == second == reference


def test_log_probs_are_those_of_the_last_attempt(path: str) -> None:
    found = shaky(ATTEMPTS)
    generator = Generator(load(path, alone()[1]), alone()[1], SMALL, read_eos_ids(path), decoding(found.tokenizer))
    made, _ = requests()
    completions = generator.generate(made, SAMPLING, 1, 2, environments=found)
    for completion, log_probs in zip(completions, training_log_probs(generator.decoder, made, completions, 1.0), strict=True):
        mask = torch.tensor(completion.mask)
        assert torch.equal(completion.log_probs[mask], log_probs[mask]) and not completion.log_probs[~mask].any()


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-5"])
def test_experts_and_states_are_those_of_the_last_attempt(tmp_path: Path, name: str) -> None:
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS}
    write_random_model(tmp_path, {**CONFIGS[name], **sizes}, seed=7)
    mesh, found, made = alone()[1], shaky(ATTEMPTS, args={"sleep_s": 0.01}), requests()[0]
    decoder = load(str(tmp_path), mesh, torch.float64)
    generator = Generator(decoder, mesh, SMALL, {tasks.EOS}, decoding(found.tokenizer), records_experts=name == "qwen3-moe")
    completions = generator.generate(made, SAMPLING, 1, 2, environments=found)
    assert sum(completion.retries for completion in completions) >= 5
    if name == "qwen3-moe":
        assert_recorded(decoder, made, completions)
    for completion, log_probs in zip(completions, training_log_probs(decoder, made, completions, 1.0), strict=True):
        mask = torch.tensor(completion.mask)
        assert (completion.log_probs[mask] - log_probs[mask]).abs().max() < 1e-10


class Slow:
    """Its first object's reset takes a second, the others' none."""

    number: ClassVar[int] = 0

    def __init__(self) -> None:
        self.number = Slow.number
        Slow.number += 1

    def reset(self, row: Mapping[str, Any]) -> str | None:
        time.sleep(1.0 if self.number == 0 else 0.0)
        return f"reset {self.number}"

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(1.5)  # until the first reset has returned
        return f"step {self.number}", 0.0, False


def test_a_call_that_returns_late_does_not_answer_for_the_next_attempt() -> None:
    config = EnvironmentConfig("test_attempts:Slow", timeout_s=0.4)
    runner = EnvironmentRunner({"slow": config}, {0: "slow"}, {0: {}})
    runner.reset(0)
    (late,) = runner.answers(wait=True)
    assert late.failure is not None and "has not returned within" in late.failure
    runner.reset(0)
    assert [answer.observation for answer in runner.answers(wait=True)] == ["reset 1"]
    object.__setattr__(config, "timeout_s", 30.0)
    runner.step(0, "")
    assert [answer.observation for answer in runner.answers(wait=True)] == ["step 1"], "not what the first reset says"
    runner.close()


class Early(Parrot):
    """The first three objects fail."""

    number: ClassVar[int] = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        Early.number += 1
        if Early.number <= 3:
            raise ConnectionError("early")
        return super().step(text)


def early_step(world: World, settings: tuple[str, ...]) -> Any:
    Early.number = 0
    return one_step(world, settings)[1]


@pytest.mark.parametrize(("attempts", "failures", "retries"), [(1, 3, 0), (4, 0, 3)])
def test_a_step_counts_what_began_again_and_what_is_left_out(attempts: int, failures: int, retries: int) -> None:
    settings = *PARROT, "environment.cls=test_attempts:Early", f"environment.attempts={attempts}"
    (metrics,) = run_ranks(1, early_step, settings)
    assert (metrics["rollout/environment_failures"], metrics["rollout/environment_retries"]) == (failures, retries)
    assert metrics["reward/unscored"] == failures
