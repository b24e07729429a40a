"""A judge's verdicts as rewards, against transformers' greedy generation from the same questions."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks
from reward_models import TOKENS, write_reward_model
from rlhf_spmd.config.schema import ConfigError, check_section
from rlhf_spmd.rewards.config import JudgeConfig
from rlhf_spmd.train import prepare
from tasks import other_task, read_run, settings, task, train_here, worst_metric

CHAT = "<s>{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
LENGTH, LOWEST, HIGHEST, DEFAULT = 6, 0.0, 60.0, -0.25
ASKED = "x{prompt}y{response}z{answer}"
KEYS = {
    "template": ASKED,
    "pattern": r"(\d+)[^\d]*",
    "range": f"[{LOWEST}, {HIGHEST}]",
    "max_response_length": LENGTH,
}
DIRECTORY = tempfile.TemporaryDirectory(prefix="rlhf_spmd_judge_")


@functools.cache
def judge(template: str | None = CHAT) -> Path:
    path = Path(DIRECTORY.name) / ("chat" if template else "bare")
    path.mkdir()
    return write_reward_model(path, template=template, architecture="LlamaForCausalLM")


def data(directory: Path) -> str:
    """The answers contain the judge's special tokens, one inside another, as a policy might write them."""
    rows = [{"prompt": f"{i}a{i}", "answer": f"</<s>s>{i}</s>", "data_source": "odd" if i % 2 else "even"} for i in range(16)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={directory / 'rows.jsonl'}"


def overrides(run: Path, name: str, *more: str, model: Path | None = None, steps: int = 2) -> list[str]:
    key = "reward" if name == "reward" else f"rewards.{name}"
    given = [f"{key}.judge.{setting}={value}" for setting, value in KEYS.items()]
    given += [f"models.{name}.path={model or judge()}", f"{key}.default={DEFAULT}", f"models.{name}.dtype=float64"]
    return settings(run, steps, "models.actor.dtype=float64", "sampling.n=2", data(run.parent), *given, *more)


def config() -> str:
    return other_task({"name": "dr_grpo", "ppo_mini_batch_size": 4}, "actor")


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


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
    made = out[0, len(ids) :].tolist()
    return "".join(TOKENS[i] for i in made if i > 1), made[-1] != 1


def digits_at_the_end(text: str) -> str:
    """What KEYS' pattern finds, without a regular expression: the last run of digits."""
    runs = "".join(c if c.isdigit() else " " for c in text).split()
    return runs[-1] if runs else ""


def expected(model: Path, sample: dict[str, Any], render: str) -> tuple[str, float, bool]:
    """The verdict, the score, and whether it has failed."""
    number = sample["prompt"].partition("a")[0]
    said, cut = verdict(model, render.format(f"x{sample['prompt']}y{sample['response']}z{number}"))
    found = digits_at_the_end(said)
    failed = not found or not LOWEST <= float(found) <= HIGHEST or (cut and said[-1].isdigit())
    return said, DEFAULT if failed else (float(found) - LOWEST) / (HIGHEST - LOWEST), failed


def test_scores_are_the_verdicts_numbers_in_any_layout(tmp_path: Path) -> None:
    runs = {
        "one": (1, []),
        "colocated": (
            4,
            [f"models.reward.{key}" for key in ("layout={pp: 2, zero: 3}", "offload=true", "generation.rebalance_steps=1")],
        ),
        "split, on loan": (
            4,
            [
                "placement.pools={a: [0, 1], b: [2, 3]}",
                *("models.actor.pool=a", "models.reward.pool=b", "models.actor.layout.tp=2"),
                "models.reward.calls.compute_reward.layout.tp=2",
            ],
        ),
    }
    for name, (ranks, more) in runs.items():
        run_ranks(ranks, train_here, config(), overrides(tmp_path / name, "reward", "reward.function=null", *more))
    samples = samples_of(tmp_path / "one")
    assert len(samples) == 32
    found = [expected(judge(), sample, "<s>[u]{}[a]") for sample in samples]
    assert [sample["verdict"] for sample in samples] == [said for said, _, _ in found]
    assert [sample["score"] for sample in samples] == [score for _, score, _ in found]
    assert len({score for _, score, _ in found}) > 6
    one = read_run(tmp_path / "one")
    for step, metrics in enumerate(one.metrics):
        its = found[16 * step : 16 * step + 16]
        failures = sum(failed for _, _, failed in its)
        assert 0 < failures < 16 and metrics["reward/failures"] == failures
        assert metrics["reward/mean"] == pytest.approx(sum(score for _, score, _ in its) / 16, abs=1e-12)
    for name in list(runs)[1:]:
        other = samples_of(tmp_path / name)
        assert [(s["response"], s["verdict"], s["score"]) for s in other] == [
            (s["response"], s["verdict"], s["score"]) for s in samples
        ], name
        difference, where = worst_metric(one, read_run(tmp_path / name), 1e-3)
        assert difference < 1e-9, f"{name}: {where}"


def test_a_judge_adds_to_other_rewards_for_its_sources_and_validates(tmp_path: Path) -> None:
    model = judge(template=None)
    more = ["reward.function=tasks:always_one", "rewards.quality.data_sources=[odd]", "rewards.quality.model_weight=2.0"]
    more += [f"data.val_path={tmp_path / 'rows.jsonl'}", "run.test_freq=1", "val_sampling.temperature=0"]
    run_ranks(2, train_here, config(), overrides(tmp_path / "run", "quality", *more, model=model, steps=1))
    before, metrics = read_run(tmp_path / "run").metrics
    samples = [sample for sample in samples_of(tmp_path / "run") if "set" not in sample]
    odd = [expected(model, s, "<s>{}") for s in samples if int(s["prompt"].partition("a")[0]) % 2]
    total = sum(2.0 * score for _, score, _ in odd)
    assert 0 < len(odd) < 16 and {sample["score"] for sample in samples} == {1.0}
    assert metrics["quality/mean"] == pytest.approx(total / len(odd), abs=1e-9)
    assert metrics["quality/failures"] == sum(failed for _, _, failed in odd)
    assert metrics["reward/total_mean"] == pytest.approx(1.0 + total / 16, abs=1e-6)
    judged = before["val/quality/odd/mean"]
    assert judged != 0 and before["val/reward_mean"] == pytest.approx(1.0 + judged * 8 / 16, abs=1e-6)


def test_questions_that_do_not_fit_have_failed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_reward_model(model, context=33, template=CHAT, architecture="LlamaForCausalLM")
    run_ranks(1, train_here, config(), overrides(tmp_path / "run", "reward", "reward.function=null", model=model, steps=1))
    samples = samples_of(tmp_path / "run")
    lengths = [10 + len(s["prompt"]) + len(s["response"]) + len(s["prompt"].partition("a")[0]) + LENGTH for s in samples]
    late = [s for s, length in zip(samples, lengths, strict=True) if length > 33]
    assert 0 < len(late) < 16
    assert all(s["score"] == DEFAULT and s["verdict"] is None for s in late)
    assert all(s["verdict"] is not None for s, length in zip(samples, lengths, strict=True) if length <= 33)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("reward.judge.pattern='(\\d'", r"^reward\.judge\.pattern='\(\\\\d' is not a regular expression: missing \)"),
        (
            "reward.judge.template='{respnse}'",
            r"^reward\.judge\.template: unknown field \{respnse\}; did you mean 'response'\?",
        ),
        ("reward.judge.template='{prompt}'", r"^reward\.judge\.template has no field \{response\}"),
        (
            "reward.judge.template=nowhere.txt",
            r"^reward\.judge\.template='nowhere.txt' is neither a text with \{response\} nor",
        ),
        ("reward.judge.range=[1.0]", r"^reward\.judge\.range=\[1\.0\] must be \[lowest, highest\]"),
        ("reward.judge.max_response_length=0", r"^reward\.judge\.max_response_length=0: must be at least 1"),
        ("reward.judge.max_response_length=64", r"^reward\.judge\.max_response_length=64 leaves no room in the 64 tokens"),
        ("reward.judge.temperature=-1", r"^reward\.judge\.temperature=-1\.0: must be at least 0"),
        ("reward.retokenize=false", r"^reward\.retokenize=false: a judge reads text"),
        ("models.reward.path=null", r"^reward\.judge needs a model that generates: give reward\.model or models\.reward\.path"),
        ("models.reward.generation.tp=2", r"^models\.reward\.generation\.tp=2: a judge generates in models\.reward\.layout"),
        ("models.reward.generation.reuse_rollout_log_probs=true", r"\.reuse_rollout_log_probs=True: a judge generates in"),
        ("data.path=TASK", r"^reward\.judge\.template has \{answer\}, and row 0 has none"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, more: str, message: str) -> None:
    given = overrides(tmp_path / "run", "reward", more.replace("TASK", str(task() / "train.jsonl")))
    with pytest.raises((ValueError, ConfigError), match=message):
        prepare(config(), given, 1)


def test_a_value_models_directory_is_no_judge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lm_head"):
        prepare(config(), overrides(tmp_path / "run", "reward", model=write_reward_model(tmp_path / "value")), 1)


@pytest.mark.parametrize(
    ("verdict", "number", "of_a_cut_one"),
    [
        ("Rating: 1", 1, None),
        ("Rating: 7.", 7, None),
        ("Rating: 7\nbecause", 7, 7),
        ("8/10", 8, None),
        ("6 of 9 points, so 8 out of 10 here", 8, None),
        ("none", None, None),
    ],
)
def test_numbers_of_verdicts_that_were_cut(verdict: str, number: float | None, of_a_cut_one: float | None) -> None:
    judge = JudgeConfig("{response}", r"Rating: (\d+)") if "Rating" in verdict else JudgeConfig("{response}")
    for cut, expected in ((False, number), (True, of_a_cut_one)):
        if expected is not None:
            assert judge.score(verdict, cut) == expected
            continue
        with pytest.raises(ValueError, match=r"no number in the verdict|max_response_length=256 cut the verdict"):
            judge.score(verdict, cut)


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
