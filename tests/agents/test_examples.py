"""The agents of ``examples/agents`` with a model that has seen their conversations: each trains a step."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import agent_tasks
import tasks
from places import ROOT
from ranks import run_ranks

EPISODES = 4
needs_openai = pytest.mark.skipif(find_spec("openai") is None, reason="needs the package openai")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks, and a model that has learned one batch of conversations."""
    directory = tmp_path_factory.mktemp("examples")
    agent_tasks.write_tasks(directory, seed=0, num_sft=48, num_train=8)
    files = [f"data.path={directory / 'sft.jsonl'}", f"models.actor.path={directory / 'model'}"]
    settings = [*files, "data.train_batch_size=48", "run.steps=1", f"run.dir={directory / 'sft'}"]
    run_ranks(1, tasks.train_here, str(ROOT / "configs" / "agents_sft.yaml"), settings)
    return directory


def train_a_step(root: Path, run_dir: Path, agent: str, rows: str, steps: int = 1) -> dict[str, float]:
    """The metrics of the last step, of four episodes, none of which failed. ``agent``: the setting that says what runs them."""
    files = [f"data.path={root / f'{rows}.jsonl'}", f"models.actor.path={root / 'sft' / 'export'}", f"run.dir={run_dir}"]
    settings = [*files, agent, "data.train_batch_size=2", "sampling.n=2", f"run.steps={steps}", "run.export=false"]
    run_ranks(1, tasks.train_here, str(ROOT / "configs" / "agents_grpo.yaml"), settings)
    metrics: dict[str, float] = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["agents/episodes"] == EPISODES and metrics["agents/failed"] == metrics["agents/timeouts"] == 0
    assert metrics["rollout/log_prob_diff_max"] < 1e-4
    return metrics


@needs_openai
@pytest.mark.parametrize(("name", "least_turns"), [("tool_user", EPISODES), ("debate", 4 * EPISODES), ("guess", EPISODES)])
def test_each_trains_a_step(root: Path, tmp_path: Path, name: str, least_turns: int) -> None:
    metrics = train_a_step(root, tmp_path, f"agent.run={ROOT / 'examples' / 'agents' / name}.py:run", name)
    assert metrics["agents/turns"] >= least_turns
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert {sample["ending"] for sample in samples} == {"done"}
    if name == "debate":
        assert metrics["agents/new_roots"] == EPISODES, "a conversation for each side"


def write_programs_of_the_page(directory: Path) -> None:
    """Files with the names that the programs of docs/agents.md begin with."""
    for text in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), flags=re.DOTALL):
        (directory / text.split()[1]).write_text(text)


@needs_openai
def test_the_agent_of_the_page_trains_a_step(root: Path, tmp_path: Path) -> None:
    write_programs_of_the_page(tmp_path)
    metrics = train_a_step(root, tmp_path / "run", f"agent.run={tmp_path / 'agent.py'}:run", "tool_user")
    assert metrics["agents/turns"] >= EPISODES


def test_the_program_of_the_page_trains_a_step_and_another_one_of_a_trainer_that_is_started_again(
    root: Path, tmp_path: Path
) -> None:
    write_programs_of_the_page(tmp_path)
    program = subprocess.Popen([sys.executable, tmp_path / "outside.py", tmp_path / "run"])
    try:
        for steps in (1, 2):
            metrics = train_a_step(root, tmp_path / "run", "agent.external=127.0.0.1:0", "tool_user", steps)
            assert (metrics["step"], metrics["agents/turns"], metrics["agents/retries"]) == (steps, EPISODES, 0)
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()


def test_the_tasks_are_what_they_say() -> None:
    rng = random.Random(0)
    for _ in range(50):
        question = agent_tasks.sum_row(rng)
        a, word, b = question["prompt"].split()
        assert int(question["answer"]) == {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[word]
        digits = agent_tasks.digits_row(rng)
        assert digits["answer"] == max(digits["prompt"].replace(" ", "")) and len(digits["prompt"]) == 9
        assert agent_tasks.letter_row(rng)["answer"] in agent_tasks.LETTERS
        for _, conversation in agent_tasks.TASKS.values():
            roles = [message["role"] for message in conversation(rng)["messages"]]
            assert roles[0] == "user" and roles[-1] == "assistant"
