"""Rewards of several kinds side by side in training runs: functions, reward models with a tokenizer of their own, answers after
reasoning, and rows that no reward scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from generate_runs import arguments, read_output, write_rows
from generate_runs import model as model  # a fixture
from reward_models import TEMPLATE, TOKENS, write_reward_model
from rlhf_spmd import evaluate
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.data.files import DataError
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.train import prepare, read_config
from tasks import MAX_RESPONSE, other_task, settings, task, token_ids, train, train_alone, worst_metric

STRIP = ("strip_reasoning=true", "reasoning_tags=[a,e]")  # a character is a token of these models
CHAT = ("data.apply_chat_template=true", "data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'")
SWITCHED = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{{ '</s>' if ends else 'q' }}"
FILE = """
import asyncio

async def digits(response, per_digit=1.0):
    await asyncio.sleep(0.01)
    return per_digit * sum(c.isdigit() for c in response)

class Shares:
    '''Of a prompt's responses each gets its share of their length: groups must come complete and alone.'''

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, prompts, completions):
        assert len(set(prompts)) == 1 and len(completions) == 2
        total = sum(map(len, completions)) or 1
        return [self.scale * len(c) / total for c in completions]

def thoughts(completions, completion_ids):
    return [len(c) + len(ids) / 64 for c, ids in zip(completions, completion_ids)]

def token_sum(completions, completion_ids):
    return [{"score": sum(ids) / 64, "pred": c or None} for c, ids in zip(completions, completion_ids)]

def some(prompts, completions):
    return [len(c) / 10 if int(p[0], 36) % 2 else None for p, c in zip(prompts, completions)]

def none(completions):
    return [None] * len(completions)

calls = 0

def dies(response):
    '''The server is gone after a step and a quarter.'''
    global calls
    calls += 1
    if calls > 20:
        raise ConnectionError("the server is gone")
    return len(response) / 10
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FILE)
    return path


def actor_only() -> Path:
    return Path(other_task({"name": "dr_grpo", "ppo_mini_batch_size": 4}, "actor"))


def prompts(directory: Path, messages: bool = False) -> str:
    """Half of the prompts end with the opening tag, the others are chat messages if ``messages``."""
    texts: list[Any] = [f"{i}xa" if i % 2 else f"{i}x" for i in range(20)]
    if messages:
        texts[::2] = [[{"role": "user", "content": text}] for text in texts[::2]]
    rows = [{"prompt": text, "answer": "1", "data_source": "abc"[i % 3]} for i, text in enumerate(texts)]
    return f"data.path={write_rows(directory / 'prompts.jsonl', rows)}"


def keys(name: str, *overrides: str) -> list[str]:
    """Settings of a reward."""
    return [f"{'reward' if name == 'reward' else f'rewards.{name}'}.{override}" for override in overrides]


def answer_of(prompt: str, response: str) -> str | None:
    """What follows the last closing tag; None where the last tag opens."""
    if (end := response.rfind("e")) >= 0:
        return response[end + 1 :] if "a" not in response[end + 1 :] else None
    return None if "a" in response or prompt.endswith("a") else response


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def test_functions_of_a_file_and_built_in_rewards_add_up(tmp_path: Path, functions: Path) -> None:
    """With ``strip_reasoning`` a reward sees the answer, but all token ids; the samples show the whole response."""
    strips = [f"function={functions}:thoughts", *STRIP]
    overrides = [
        *keys("reward", *strips),
        *keys("early", *strips, "by_group=true", "data_sources=[a,b]"),  # it begins before all rows have ended
        *keys("number", f"function={functions}:digits", "kwargs={per_digit: 0.5}", "num_workers=2"),
        *keys("shares", f"function={functions}:Shares", "kwargs={scale: 10.0}", "by_group=true"),
        *keys("long", "function=length:overlong", f"kwargs={{max_length: {MAX_RESPONSE}, buffer: 4}}", "weight=2.0"),
        *keys("form", "function=format", "kwargs={pattern: '[a-z]*'}"),
    ]
    run = train(2, tmp_path / "run", 1, prompts(tmp_path), *overrides, config=actor_only())
    samples = read_output(tmp_path / "run" / "rollouts.jsonl")
    assert len(samples) == 16 and {sample["answer"] for sample in samples} == {"1"}
    answers = [answer_of(s["prompt"], s["response"]) for s in samples]
    assert {answer is None for answer in answers} == {True, False}
    lengths = [len(token_ids(s["response"])) for s in samples]
    scores = [len(answer or "") + length / 64 for answer, length in zip(answers, lengths, strict=True)]
    assert [s["score"] for s in samples] == pytest.approx(scores)
    chosen = [i for i, s in enumerate(samples) if int(s["prompt"].partition("x")[0]) % 3 < 2]
    expected = {
        "reward": mean(scores),
        "early": mean(scores[i] for i in chosen),
        "number": mean(0.5 * sum(c.isdigit() for c in s["response"]) for s in samples),
        "shares": 5.0,
        "long": mean(-2.0 * min(max(length - (MAX_RESPONSE - 4), 0) / 4, 1.0) for length in lengths),
        "form": mean(float(s["response"].isalpha() or not s["response"]) for s in samples),
    }
    (metrics,) = run.metrics
    for name, value in expected.items():
        assert metrics[f"{name}/mean"] == pytest.approx(value, abs=1e-6), name
        assert metrics[f"{name}/failures"] == metrics[f"{name}/timeouts"] == 0
    total = sum(value * (len(chosen) / 16 if name == "early" else 1) for name, value in expected.items())
    assert metrics["reward/total_mean"] == pytest.approx(total, abs=1e-5)
    assert metrics["response_length/clip_ratio"] == lengths.count(MAX_RESPONSE) / 16
    assert metrics["reward/unclosed_reasoning"] == answers.count(None)
    assert metrics["early/unclosed_reasoning"] == sum(answers[i] is None for i in chosen)
    assert "form/unclosed_reasoning" not in metrics
    sizes = [len(s["prompt"]) for s in samples]
    names = ("min", "max", "mean", "clip_ratio")
    assert [metrics[f"prompt_length/{name}"] for name in names] == [min(sizes), max(sizes), mean(sizes), 0]


def scorer(path: Path) -> Callable[[str], float]:
    """Transformers' score of a text, in which <s> and </s> are tokens."""
    import torch
    from transformers import AutoModelForSequenceClassification

    reference = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)

    def score(text: str) -> float:
        marks = text.replace("</s>", "\1").replace("<s>", "\0")
        ids = [{"\0": 0, "\1": 1}.get(c, TOKENS.index(c) if c in TOKENS else -1) for c in marks]
        with torch.no_grad():
            return float(reference.score(reference.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    return score


def test_reward_models_read_text_through_their_own_tokenizers_and_templates(tmp_path: Path) -> None:
    """Five models, in several layouts. A row that a model cannot read gets the default."""
    paths = {"chat": write_reward_model(tmp_path / "chat"), "bare": write_reward_model(tmp_path / "bare", template=None)}
    paths["short"] = write_reward_model(tmp_path / "short", context=23)
    overrides = [
        *("reward.function=null", f"reward.model={paths['chat']}", "models.reward.layout.tp=2"),
        *keys("answer", f"model={paths['chat']}", *STRIP),
        *keys("ends", f"model={paths['bare']}", f"chat_template={json.dumps(SWITCHED)}", "chat_template_kwargs={ends: true}"),
        *keys("joined", f"model={paths['bare']}", "apply_chat_template=false"),
        *keys("short", f"model={paths['short']}", "default=-3"),
        "models.joined.layout.pp=2",
    ]
    run = train(2, tmp_path / "run", 1, prompts(tmp_path, messages=True), *CHAT, *overrides, config=actor_only())
    samples = read_output(tmp_path / "run" / "rollouts.jsonl")
    score = scorer(paths["chat"])
    texts = {
        "reward": [f"<s>[u]{s['prompt']}[a]{s['response']}</s>" for s in samples],
        "answer": [f"<s>[u]{s['prompt']}[a]{answer_of(s['prompt'], s['response']) or ''}</s>" for s in samples],
        "ends": [f"[u]{s['prompt']}[a]{s['response']}</s>" for s in samples],
        "joined": [f"<s>{s['prompt']}{s['response']}{'</s>' * (len(s['response']) < MAX_RESPONSE)}" for s in samples],
    }
    scores = {name: [score(text) for text in lines] for name, lines in texts.items()}
    lengths = [len(text) - len("<s></s>") + 2 for text in texts["reward"]]
    scores["short"] = [-3.0 if length > 23 else value for length, value in zip(lengths, scores["reward"], strict=True)]
    assert [s["score"] for s in samples] == pytest.approx(scores["reward"], abs=1e-5)
    assert len({round(value, 4) for value in scores["reward"]}) > 8
    (metrics,) = run.metrics
    for name, values in scores.items():
        assert metrics[f"{name}/mean"] == pytest.approx(mean(values), abs=1e-5), name
    for remainder, source in enumerate("abc"):
        its = [s["score"] for s in samples if int(s["prompt"].partition("x")[0]) % 3 == remainder]
        assert metrics[f"reward/{source}/mean"] == pytest.approx(mean(its), abs=1e-6)
    assert metrics["reward/failures"] == 0 < metrics["short/failures"] == scores["short"].count(-3.0) < 16
    assert metrics["answer/unclosed_reasoning"] == sum(answer_of(s["prompt"], s["response"]) is None for s in samples) > 0


def test_what_a_reward_model_cannot_read_is_refused_before_the_run(tmp_path: Path) -> None:
    bare = write_reward_model(tmp_path / "bare", template=None)

    def prepare_run(*more: str) -> None:
        prepare(str(task() / "ppo.json"), settings(tmp_path, 1, "reward.function=null", f"reward.model={bare}", *more), 1)

    asks = (prompts(tmp_path, messages=True), *CHAT)
    line = rf"\Areward.model, row 0: the prompt needs a chat template, and tokenizer '{bare}' has none; put chat_template.jinja"
    with pytest.raises(DataError, match=line):
        prepare_run(*asks)
    prepare_run(*asks, f"reward.chat_template='{TEMPLATE}'")
    with pytest.raises(ValueError, match=rf"models.reward.path='{bare}' has a vocabulary of {len(TOKENS)}, that of actor has "):
        prepare_run("reward.retokenize=false")
    with pytest.raises(ValueError, match=r"reward\.chat_template_kwargs\.tools is no variable"):
        prepare_run(*asks, f"reward.chat_template='{TEMPLATE}'", "reward.chat_template_kwargs={tools: 1}")
    prepare_run(f"reward.model={task() / 'critic'}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (keys("reward", "strip_reasoning=true", "reasoning_tags=[a]"), "two different texts are needed"),
        (keys("reward", "strip_reasoning=true", "reasoning_tags=[a, a]"), "two different texts are needed"),
        (keys("reward", "reasoning_tags=[a, b]"), r"reward\.reasoning_tags.*strip_reasoning"),
    ],
)
def test_what_cannot_be_stripped_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(str(task() / "ppo.json"), overrides)


def test_evaluate_scores_the_answer(model: Path, tmp_path: Path) -> None:
    """One set of two does not strip."""
    path = write_rows(tmp_path / "set.jsonl", [{"prompt": "abc" + "a" * (i % 2), "answer": "x"} for i in range(6)])
    overrides = [*keys("reward", "function=reward_functions:length", *STRIP), "sampling.n=4", "generation.page_size=8"]
    overrides += [f"sets.whole.path={path}", "sets.whole.reward.strip_reasoning=false", "sampling.max_response_length=12"]
    overrides.append("sets.whole.reward.reasoning_tags=[<think>,</think>]")
    evaluate.main(arguments(model, path, tmp_path / "out", *overrides))
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


def test_the_vote_of_a_validation_reads_the_answer(tmp_path: Path, functions: Path) -> None:
    """The scores are the same, since they count all tokens; the answers that are voted for are not."""
    path = write_rows(tmp_path / "val.jsonl", [{"prompt": f"{i}x", "answer": "1"} for i in range(6)])
    overrides = [f"reward.function={functions}:token_sum", f"data.val_path={path}", "run.test_freq=1", "val_sampling.n=4"]
    votes = []
    for name, more in (("whole", []), ("answer", keys("reward", *STRIP))):
        train_alone(tmp_path / name, 1, *overrides, *more, config=actor_only())
        first = read_output(tmp_path / name / "metrics.jsonl")[0]
        votes.append((first["val/reward_mean"], first["val/maj@4"]))
    assert votes[0][0] == votes[1][0] and votes[0][1] != votes[1][1]


def test_rows_that_no_reward_scores_are_left_out_on_any_number_of_ranks(tmp_path: Path, functions: Path) -> None:
    overrides = [f"reward.function={functions}:some", "run.test_freq=1", f"data.val_path={task()}/train.jsonl"]
    single, double = (train(ranks, tmp_path / str(ranks), 1, *overrides) for ranks in (1, 2))
    assert worst_metric(single, double, 1e-3)[0] < 1e-3  # float32
    scores = [row["score"] for row in read_output(tmp_path / "1" / "rollouts.jsonl") if row["step"] == 1]
    known = [score for score in scores if score is not None]
    assert single.metrics[-1]["reward/unscored"] == 16 - len(known) and 0 < len(known) < 16
    assert single.metrics[-1]["reward/mean"] == pytest.approx(mean(known))


def test_rows_of_a_reward_that_dies_are_left_out_and_a_second_step_of_them_ends_the_run(
    tmp_path: Path, functions: Path
) -> None:
    message = r"failed in 16 of 16 calls of this step, as of the step before; .*the server is gone"
    with pytest.raises(RewardError, match=message):
        train_alone(tmp_path / "run", 5, f"reward.function={functions}:dies")
    metrics = read_output(tmp_path / "run" / "metrics.jsonl")
    assert [step["reward/failures"] for step in metrics] == [0, 12, 16]
    scores = [row["score"] for row in read_output(tmp_path / "run" / "rollouts.jsonl") if row["step"] == 2]
    known = [score for score in scores if score is not None]
    assert len(known) == 4 and metrics[1]["reward/mean"] == pytest.approx(mean(known))
    assert "reward/mean" not in metrics[2] and metrics[2]["critic/advantages/max"] == metrics[2]["critic/advantages/min"] == 0


@pytest.mark.parametrize("more", [[], ["run.test_freq=1", "data.val_path={task}/train.jsonl"]], ids=["a step", "validation"])
def test_a_reward_that_scores_nothing_ends_the_run(tmp_path: Path, functions: Path, more: list[str]) -> None:
    overrides = [f"reward.function={functions}:none", *(override.format(task=task()) for override in more)]
    with pytest.raises(RewardError, match=r"^reward.function '.*none' returned None for all of the first \d+ rows$"):
        train_alone(tmp_path / "run", 1, *overrides, config=actor_only())


def test_rewards_that_are_not_added_up_have_to_score_each(tmp_path: Path, functions: Path) -> None:
    """As safe_rlhf's cost, without which the policy would be constrained by nothing."""
    config = Path(other_task({"name": "outside.two_rewards", "ppo_mini_batch_size": 4}, "actor"))
    overrides = [f"reward.function={functions}:digits", f"rewards.cost.function={functions}:none"]
    with pytest.raises(RewardError, match=r"^rewards.cost.function '.*none' returned None for all of the first \d+ rows"):
        train_alone(tmp_path / "run", 1, *overrides, config=config)
