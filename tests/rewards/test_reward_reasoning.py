"""``reward.strip_reasoning``: functions, reward models and graders see what follows the closing tag, in training and in evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_reward_tokenizer import scorer

from generate_runs import arguments, read_output, write_rows
from generate_runs import model as model  # a fixture
from ranks import run_ranks
from reward_models import write_reward_model
from rlhf_spmd import evaluate
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.train import prepare, read_config
from tasks import MAX_RESPONSE, read_run, settings, task, token_ids, train_here

STRIP = ["reward.strip_reasoning=true", "reward.reasoning_tags=[a,e]"]  # a character is a token of these models
LENGTH = "reward.function=reward_functions:length"


def answer_of(prompt: str, response: str) -> str | None:
    """What follows the last closing tag; None where the last tag opens."""
    if (end := response.rfind("e")) >= 0:
        return response[end + 1 :] if "a" not in response[end + 1 :] else None
    return None if "a" in response or prompt.endswith("a") else response


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def prompts(directory: Path) -> str:
    """Half of them end with the opening tag."""
    rows = [{"prompt": f"{i}xa" if i % 2 else f"{i}x", "answer": "1", "data_source": "abc"[i % 3]} for i in range(20)]
    return f"data.path={write_rows(directory / 'prompts.jsonl', rows)}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_sees_the_answer(tmp_path: Path, ranks: int) -> None:
    """The samples show the whole response, and another reward sees it; what counts is what this reward scores."""
    run, other = tmp_path / "run", "rewards.whole.function=reward_functions:length"
    chosen = "reward.data_sources=[a,b]"
    overrides = settings(run, 2, prompts(tmp_path), LENGTH, *STRIP, chosen, other, "sampling.n=2")
    run_ranks(ranks, train_here, str(task() / "ppo.json"), overrides)
    samples = samples_of(run)
    answers = [answer_of(sample["prompt"], sample["response"]) for sample in samples]
    assert {answer is None for answer in answers} == {True, False} and len(samples) == 32
    for sample, answer in zip(samples, answers, strict=True):
        if int(sample["prompt"].partition("x")[0]) % 3 < 2:
            assert sample["score"] == pytest.approx(len(answer or "") / 10)
        assert len(token_ids(sample["response"])) <= MAX_RESPONSE
    steps = read_run(run).metrics
    for number, metrics in enumerate(steps):
        its = [sample for sample in samples[16 * number : 16 * number + 16] if int(sample["prompt"].partition("x")[0]) % 3 < 2]
        unclosed = sum(answer_of(sample["prompt"], sample["response"]) is None for sample in its)
        assert metrics["reward/unclosed_reasoning"] == unclosed and "whole/unclosed_reasoning" not in metrics
    assert sum(metrics["reward/unclosed_reasoning"] for metrics in steps) > 0


@pytest.mark.parametrize("by_group", ["false", "true"])
def test_completion_ids_stay_whole(tmp_path: Path, by_group: str) -> None:
    """A penalty of length counts thoughts too, whether a call begins before all rows have ended or not."""
    own = tmp_path / "own.py"
    own.write_text(
        "def score(completions, completion_ids):\n    return [len(c) + len(i) / 64 for c, i in zip(completions, completion_ids)]"
    )
    given = [f"reward.function={own}:score", f"reward.by_group={by_group}", *STRIP]
    run_ranks(1, train_here, str(task() / "ppo.json"), settings(tmp_path / "run", 1, prompts(tmp_path), *given))
    for sample in samples_of(tmp_path / "run"):
        answer = answer_of(sample["prompt"], sample["response"]) or ""
        assert sample["score"] == pytest.approx(len(answer) + sample["length"] / 64)


def test_a_reward_model_reads_the_answer(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "model")
    run = tmp_path / "run"
    given = ["reward.function=null", f"reward.model={model}", *STRIP, "data.apply_chat_template=true"]
    given.append("data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'")
    run_ranks(1, train_here, str(task() / "ppo.json"), settings(run, 1, prompts(tmp_path), *given))
    score = scorer(model)
    for sample in samples_of(run):
        answer = answer_of(sample["prompt"], sample["response"]) or ""
        assert sample["score"] == pytest.approx(score(f"<s>[u]{sample['prompt']}[a]{answer}</s>"), abs=1e-5)
    assert read_run(run).metrics[0]["reward/unclosed_reasoning"] > 0


def test_evaluate_scores_the_answer(model: Path, tmp_path: Path) -> None:
    """So does the vote for maj@k; a set may say otherwise."""
    rows = [{"prompt": "abc" + "a" * (i % 2), "answer": "x"} for i in range(6)]
    path = write_rows(tmp_path / "set.jsonl", rows)
    given = [LENGTH, *STRIP, "sampling.n=4", "sampling.max_response_length=12", "generation.page_size=8"]
    given += [
        f"sets.whole.path={path}",
        "sets.whole.reward.strip_reasoning=false",
        "sets.whole.reward.reasoning_tags=[<think>,</think>]",
    ]
    evaluate.main(arguments(model, path, tmp_path / "out", *given))
    written = read_output(tmp_path / "out" / "rows.jsonl")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    whole, stripped = written[:24], written[24:]
    assert [row["response"] for row in stripped] == [row["response"] for row in whole]
    answers = [answer_of(row["prompt"], row["response"]) for row in stripped]
    assert [row["stripped"] for row in stripped] == answers and not any("stripped" in row for row in whole)
    assert [row["score"] for row in stripped] == pytest.approx([len(answer or "") / 10 for answer in answers])
    assert [row["score"] for row in whole] == pytest.approx([len(row["response"]) / 10 for row in whole])
    assert results["set/num_unclosed_reasoning"] == answers.count(None) > 0
    assert "whole/num_unclosed_reasoning" not in results


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["reward.strip_reasoning=true", "reward.reasoning_tags=[a]"], "must be two different texts"),
        (["reward.strip_reasoning=true", "reward.reasoning_tags=[a, a]"], "must be two different texts"),
        (["reward.reasoning_tags=[a, b]"], r"reward\.reasoning_tags.*strip_reasoning"),
        (["reward.strip_reasoning=true", "reward.function=format"], "leaves no tags for the function 'format'"),
        (
            ["reward.strip_reasoning=true", "reward.retokenize=false", "reward.model=x"],
            "with strip_reasoning a model reads text",
        ),
    ],
)
def test_what_cannot_be_stripped_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(str(task() / "ppo.json"), given)


def test_a_reward_models_template_has_variables_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{{ '</s>' if ends else 'q' }}"
    model = write_reward_model(tmp_path / "model", template=template)
    run = tmp_path / "run"
    given = ["reward.function=null", f"reward.model={model}", "reward.chat_template_kwargs={ends: true}"]
    given += ["data.apply_chat_template=true", "data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"]
    overrides = settings(run, 1, *given)
    run_ranks(1, train_here, str(task() / "ppo.json"), overrides)
    score = scorer(model)
    for sample in samples_of(run):
        assert sample["score"] == pytest.approx(score(f"[u]{sample['prompt']}[a]{sample['response']}</s>"), abs=1e-5)
    with pytest.raises(ValueError, match=r"reward\.chat_template_kwargs\.tools is no variable"):
        prepare(str(task() / "ppo.json"), [*overrides, "reward.chat_template_kwargs={tools: 1}"], 1)


def test_the_vote_of_a_validation_reads_the_answer(tmp_path: Path) -> None:
    """The scores are the same, since they count all tokens; the answers that are voted for are not."""
    path, own, runs = tmp_path / "val.jsonl", tmp_path / "own.py", []
    write_rows(path, [{"prompt": f"{i}x", "answer": "1"} for i in range(6)])
    own.write_text("def score(completion_ids):\n    return [sum(ids) / 64 for ids in completion_ids]")
    given = [
        f"reward.function={own}:score",
        f"data.val_path={path}",
        "run.test_freq=1",
        "val_sampling.n=4",
        "run.log_samples=2",
    ]
    for name, more in (("whole", []), ("answer", STRIP)):
        run_ranks(1, train_here, str(task() / "ppo.json"), settings(tmp_path / name, 1, *given, *more))
        runs.append(read_run(tmp_path / name).metrics[0])
    whole, answer = runs
    assert whole["val/reward_mean"] == answer["val/reward_mean"]
    assert whole["val/maj@4"] != answer["val/maj@4"]
