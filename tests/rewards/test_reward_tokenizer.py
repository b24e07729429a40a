"""Reward models with a tokenizer, a vocabulary and a chat template of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from reward_models import TEMPLATE, TOKENS, write_reward_model
from tasks import MAX_RESPONSE, VOCABULARY, read_run, settings, task, token_ids, train_here

from rlhf_spmd.data.files import DataError
from rlhf_spmd.train import prepare

CHAT = "data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"


def scorer(model: Path) -> Callable[[str], float]:
    """Transformers' score of a text, in which <s> and </s> are tokens."""
    from transformers import AutoModelForSequenceClassification

    reference = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)

    def score(text: str) -> float:
        marks = text.replace("</s>", "\1").replace("<s>", "\0")
        ids = [{"\0": 0, "\1": 1}.get(c, TOKENS.index(c) if c in TOKENS else -1) for c in marks]
        with torch.no_grad():
            return float(reference.score(reference.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    return score


def chat_data(directory: Path) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"a{i}"}], "data_source": "odd" if i % 2 else "even"} for i in range(20)]
    (directory / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={directory / 'chat.jsonl'}"


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(found) == 16
    return found


def check(samples: list[dict[str, Any]], score: Callable[[str], float], render: Callable[[str, str], str]) -> None:
    for sample in samples:
        expected = score(render(sample["prompt"], sample["response"]))
        assert sample["score"] == pytest.approx(expected, abs=1e-5)
    assert len({round(sample["score"], 4) for sample in samples}) > 8


@pytest.mark.parametrize("layout", [["models.reward.layout.tp=2", "models.reward.layout.pp=2", "models.actor.layout.dp=4"], []])
def test_messages_go_through_the_reward_models_template(tmp_path: Path, layout: list[str]) -> None:
    model = write_reward_model(tmp_path / "model")
    run = tmp_path / "run"
    overrides = settings(run, 1, "reward.function=null", f"reward.model={model}", chat_data(tmp_path), CHAT, *layout)
    run_ranks(4 if layout else 1, train_here, str(task() / "ppo.json"), overrides)
    samples = samples_of(run)
    check(samples, scorer(model), lambda prompt, response: f"<s>[u]{prompt}[a]{response}</s>")
    (metrics,) = read_run(run).metrics
    assert metrics["reward/failures"] == 0
    for source, remainder in (("odd", 1), ("even", 0)):
        of_source = [s["score"] for s in samples if int(s["prompt"][1:]) % 2 == remainder]
        assert metrics[f"reward/{source}/mean"] == pytest.approx(sum(of_source) / len(of_source), abs=1e-6)
    prompts = [len(s["prompt"]) for s in samples]
    assert (metrics["prompt_length/min"], metrics["prompt_length/max"]) == (min(prompts), max(prompts))
    assert metrics["prompt_length/mean"] == sum(prompts) / 16 and metrics["prompt_length/clip_ratio"] == 0
    clipped = sum(len(token_ids(s["response"])) == MAX_RESPONSE for s in samples)
    assert metrics["response_length/clip_ratio"] == clipped / 16


def test_texts_are_joined_or_made_a_users_message(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "model")
    score = scorer(model)
    base = ["reward.function=null", f"reward.model={model}"]
    run_ranks(1, train_here, str(task() / "ppo.json"), settings(tmp_path / "text", 1, *base))

    def joined(prompt: str, response: str) -> str:
        return f"<s>{prompt}{response}" + "</s>" * (len(response) < MAX_RESPONSE)

    check(samples_of(tmp_path / "text"), score, joined)
    # as the actor is asked, unless the reward says otherwise
    asked = ["data.apply_chat_template=true", CHAT]
    run_ranks(1, train_here, str(task() / "ppo.json"), settings(tmp_path / "asked", 1, *base, *asked))
    check(samples_of(tmp_path / "asked"), score, lambda prompt, response: f"<s>[u]{prompt}[a]{response}</s>")


def test_rows_beyond_the_reward_models_context_get_the_default(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "model", context=20)
    base = ["reward.function=null", f"reward.model={model}", "reward.default=-3"]
    run_ranks(1, train_here, str(task() / "ppo.json"), settings(tmp_path / "run", 1, *base))
    samples = samples_of(tmp_path / "run")
    lengths = [1 + len(s["prompt"]) + len(token_ids(s["response"])) for s in samples]
    late = [s["score"] for s, length in zip(samples, lengths, strict=True) if length > 20]
    (metrics,) = read_run(tmp_path / "run").metrics
    assert 0 < len(late) < 16 and set(late) == {-3.0}
    assert metrics["reward/failures"] == len(late)
    assert all(s["score"] != -3.0 for s, length in zip(samples, lengths, strict=True) if length <= 20)


def test_what_the_reward_model_cannot_read_is_refused_before_the_run(tmp_path: Path) -> None:
    bare = write_reward_model(tmp_path / "bare", template=None)
    config = str(task() / "ppo.json")
    chat = [chat_data(tmp_path), CHAT]
    line = (
        rf"\Areward.model, row 0: the prompt needs a chat template, and tokenizer '{bare}' has none; "
        "put chat_template.jinja beside it, set reward.chat_template"
    )
    with pytest.raises(DataError, match=line):
        prepare(config, settings(tmp_path, 1, "reward.function=null", f"reward.model={bare}", *chat), 1)
    given = f"reward.chat_template='{TEMPLATE}'"
    prepare(config, settings(tmp_path, 1, "reward.function=null", f"reward.model={bare}", given, *chat), 1)
    with pytest.raises(ValueError, match=rf"models.reward.path='{bare}' has a vocabulary of {len(TOKENS)}, that of actor has "):
        prepare(config, settings(tmp_path, 1, f"reward.model={bare}", "reward.retokenize=false"), 1)
    same = task() / "critic"
    assert len(VOCABULARY) != len(TOKENS)
    prepare(config, settings(tmp_path, 1, f"reward.model={same}"), 1)
