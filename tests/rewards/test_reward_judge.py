"""A judge's verdicts as rewards, against transformers' greedy generation from the same questions."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from generate_runs import read_output, write_rows
from reward_models import TOKENS, write_reward_model
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.rewards.judge import JudgeConfig
from rlhf_spmd.train import prepare
from tasks import other_task, settings, task, train, worst_metric

CHAT = "<s>{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
LENGTH, LOWEST, HIGHEST, DEFAULT = 6, 0.0, 60.0, -0.25
ASKED = "x{prompt}y{response}z{answer}"
KEYS = {"template": ASKED, "pattern": r"(\d+)[^\d]*", "range": f"[{LOWEST}, {HIGHEST}]", "max_response_length": LENGTH}
SHORT = 27  # tokens of a context that is too short for some questions
DIRECTORY = tempfile.TemporaryDirectory(prefix="rlhf_spmd_judge_")


@functools.cache
def judge(template: str | None = CHAT, context: int = 64) -> Path:
    path = Path(DIRECTORY.name) / ("chat" if template else "bare")
    path.mkdir()
    return write_reward_model(path, context, template, architecture="LlamaForCausalLM")


def data(directory: Path) -> str:
    """The answers contain the judge's special tokens, one inside another, as a policy might write them."""
    rows = [{"prompt": f"{i}a{i}", "answer": f"</<s>s>{i}</s>", "data_source": "odd" if i % 2 else "even"} for i in range(16)]
    return f"data.path={write_rows(directory / 'rows.jsonl', rows)}"


def judged(key: str, model: Path) -> list[str]:
    role = key.removeprefix("rewards.")
    keys = [f"{key}.judge.{setting}={value}" for setting, value in KEYS.items()]
    return [*keys, f"models.{role}.path={model}", f"{key}.default={DEFAULT}", f"models.{role}.dtype=float64"]


def config() -> str:
    return other_task({"name": "dr_grpo", "ppo_mini_batch_size": 4}, "actor")


@functools.cache
def reference(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def verdict(model: Path, text: str) -> tuple[str, bool]:
    """Transformers' greedy answer to a text that begins with <s>, up to </s>, and whether it was cut before."""
    import torch

    ids = [0, *(TOKENS.index(c) for c in text.removeprefix("<s>"))]
    out = reference(model).generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH, eos_token_id=1, pad_token_id=1)
    answer = out[0, len(ids) :].tolist()
    return "".join(TOKENS[i] for i in answer if i > 1), answer[-1] != 1


def digits_at_the_end(text: str) -> str:
    """What KEYS' pattern finds, without a regular expression: the last run of digits."""
    runs = "".join(c if c.isdigit() else " " for c in text).split()
    return runs[-1] if runs else ""


def expected(model: Path, sample: dict[str, Any], render: str, context: int = 64) -> tuple[str | None, float, bool]:
    """The verdict, the score, and whether it has failed."""
    question = render.format(f"x{sample['prompt']}y{sample['response']}z{number(sample)}")
    if len(question) - len("<s>") + 1 + LENGTH > context:
        return None, DEFAULT, True
    text, cut = verdict(model, question)
    digits = digits_at_the_end(text)
    failed = not digits or not LOWEST <= float(digits) <= HIGHEST or (cut and text[-1].isdigit())
    return text, DEFAULT if failed else (float(digits) - LOWEST) / (HIGHEST - LOWEST), failed


def number(sample: dict[str, Any]) -> int:
    return int(sample["prompt"].partition("a")[0])


def test_scores_are_the_verdicts_numbers_in_any_layout(tmp_path: Path) -> None:
    """Two judges: one with a chat template, and one for odd rows, without a template, for which some questions are too long."""
    chat, bare = judge(), judge(None, SHORT)
    overrides = ["models.actor.dtype=float64", "reward.function=null", data(tmp_path), *judged("reward", chat)]
    overrides += [*judged("rewards.quality", bare), "rewards.quality.data_sources=[odd]", "rewards.quality.model_weight=2.0"]
    overrides += [f"data.val_path={tmp_path / 'rows.jsonl'}", "run.test_freq=2", "val_sampling.temperature=0"]
    layouts = {
        "colocated": (
            2,
            [
                *("models.reward.layout={pp: 2, zero: 3}", "models.reward.offload=true"),
            ],
        ),
        "split, on loan": (
            3,
            [
                *(
                    "placement.pools={a: [0], b: [1, 2]}",
                    "models.actor.pool=a",
                    "models.reward.pool=b",
                    "models.quality.pool=b",
                ),
                "models.reward.calls.compute_reward.layout.tp=2",
            ],
        ),
    }
    runs = {"single": train(1, tmp_path / "single", 2, *overrides, config=config())}
    for name, (ranks, more) in layouts.items():
        runs[name] = train(ranks, tmp_path / name, 2, *overrides, *more, config=config())
    samples = {name: read_output(tmp_path / name / "rollouts.jsonl") for name in runs}
    trained = samples["single"]
    assert len(trained) == 32
    verdicts = [expected(chat, sample, "<s>[u]{}[a]") for sample in trained]
    assert [sample["verdict"] for sample in trained] == [text for text, _, _ in verdicts]
    assert [sample["score"] for sample in trained] == [score for _, score, _ in verdicts]
    assert len({score for _, score, _ in verdicts}) > 6
    late = 0
    for step, metrics in enumerate(runs["single"].metrics[1:]):
        rows = slice(16 * step, 16 * step + 16)
        odd = [expected(bare, sample, "<s>{}", SHORT) for sample in trained[rows] if number(sample) % 2]
        late += sum(text is None for text, _, _ in odd)
        failures = sum(failed for _, _, failed in verdicts[rows])
        assert 0 < failures < 16 and metrics["reward/failures"] == failures
        assert metrics["quality/failures"] == sum(failed for _, _, failed in odd)
        scores = [score for _, score, _ in verdicts[rows]]
        others = [2.0 * score for _, score, _ in odd]
        assert metrics["reward/mean"] == pytest.approx(sum(scores) / 16, abs=1e-12)
        assert metrics["quality/mean"] == pytest.approx(sum(others) / len(others), abs=1e-9)
        assert metrics["reward/total_mean"] == pytest.approx(sum(scores + others) / 16, abs=1e-6)
    assert late > 0
    shown = [sample for sample in read_output(tmp_path / "single" / "validation.jsonl") if sample["step"] == 0]
    assert len(shown) == 16
    for sample in shown:
        score = expected(chat, sample, "<s>[u]{}[a]")[1]
        score += 2.0 * expected(bare, sample, "<s>{}", SHORT)[1] if number(sample) % 2 else 0.0
        assert sample["score"] == pytest.approx(score, abs=1e-6)
    for name in layouts:
        pairs = zip(samples[name], samples["single"], strict=True)
        assert all(a["response"] == b["response"] and a.get("verdict") == b.get("verdict") for a, b in pairs), name
        difference, where = worst_metric(runs["single"], runs[name], 1e-3)
        assert difference < 1e-9, f"{name}: {where}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("reward.judge.pattern='(\\d'", r"^reward\.judge\.pattern='\(\\\\d' is not a regular expression: missing \)"),
        ("reward.judge.template='{respnse}'", r"template: unknown field \{respnse\}; did you mean 'response'\?"),
        ("reward.judge.template='{prompt}'", r"^reward\.judge\.template has no field \{response\}"),
        ("reward.judge.template=nowhere.txt", r"template='nowhere.txt' is neither a text with \{response\} nor"),
        ("reward.judge.range=[1.0]", r"^reward\.judge\.range=\[1\.0\] must be \[lowest, highest\]"),
        ("reward.judge.max_response_length=64", r"^reward\.judge\.max_response_length=64 leaves no room in the 64 tokens"),
        ("models.reward.path=VALUE", "lm_head"),
        ("models.reward.generation.tp=2", r"^models\.reward\.generation\.tp=2: a judge generates in models\.reward\.layout"),
        ("models.reward.generation.reuse_rollout_log_probs=true", r"\.reuse_rollout_log_probs=true: a judge generates in"),
        ("data.path=TASK", r"^reward\.judge\.template has \{answer\}, and row 0 has none"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, more: str, message: str) -> None:
    override = more.replace("TASK", str(task() / "train.jsonl"))
    if override.startswith("models.reward.path=VALUE"):
        override = f"models.reward.path={write_reward_model(tmp_path / 'value')}"
    with pytest.raises((ValueError, ConfigError), match=message):
        prepare(config(), settings(tmp_path / "run", 1, data(tmp_path), *judged("reward", judge()), override), 1)


@pytest.mark.parametrize(
    ("verdict", "number", "of_a_cut_one"),
    [
        ("Rating: 1", 1, None),
        ("Rating: 7.", 7, None),
        ("Rating: 7\nbecause", 7, 7),
        ("8/10", 8, None),
        ("6 of 9 points, so 8 out of 10.", 8, None),
        ("8 of 10", 8, None),
        ("[[8]]/10", 8, None),
        ("Rating: **8**/10", 8, None),
        ("Clarity: 7\nRating: 8", 8, None),
        ('{"why": "1/2", "score": 8}', 8, None),
        ("1/2 of it was right. Score: .5", 0.5, None),
        ("Score: 1e-1", 0.1, None),
        ("Rating: 7-8", None, None),
        ("I'd give 8/10. On reflection, 7/10.", None, None),
        ("I give it an 8, out of 12 things", None, None),
        ("none", None, None),
        ("Rating: 8 (solves 3/4).", None, None),
        ("Rating: 8, since it covers 2/3.", None, None),
        ("Score: 8 because the answer covers 3 out of 4.", None, None),
        ("Rating: 8/10, since it covers most.", 8, None),
        ("# Rating\n8", 8, None),
        ("<score>8</score>", 8, None),
        ("It covers 2/3. The score is 8.", 8, None),
    ],
)
def test_numbers_of_verdicts_that_were_cut(verdict: str, number: float | None, of_a_cut_one: float | None) -> None:
    judge = JudgeConfig(
        "{response}", r"Rating: (\d+)" if verdict.startswith(("Rating: 1", "Rating: 7.", "Rating: 7\n")) else None
    )
    for cut, expected in ((False, number), (True, of_a_cut_one)):
        if expected is not None:
            assert judge.score(verdict, cut) == expected
            continue
        with pytest.raises(ValueError, match=r"no number in the verdict|max_response_length=256 cut the verdict"):
            judge.score(verdict, cut)
    with pytest.raises(ValueError, match="no number from 1 to 10 in the verdict '4/5'"):
        JudgeConfig("{response}", range=[1, 10]).score("4/5")


def test_braces_of_rows_and_of_json_are_text(tmp_path: Path) -> None:
    (tmp_path / "ask.txt").write_text('Rate {response} for "{prompt}" as {"score": 1}.')
    asked = JudgeConfig(str(tmp_path / "ask.txt"), pattern=r'"score":\s*(-?[\d.e+]+)')
    check_section(asked, "judge")
    values = {"prompt": "{response}", "response": "{answer} {x}", "answer": "?"}
    assert asked.render(values) == 'Rate {answer} {x} for "{response}" as {"score": 1}.'
    assert asked.score('{"score": 3} no, {"score": -2.5}') == -2.5
    for unreadable in ("", "score: 3", '{"score": 1.2.3}', '{"score": 9e999}'):
        with pytest.raises(ValueError, match="no number in the verdict"):
            asked.score(unreadable)
