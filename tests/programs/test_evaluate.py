"""``rlhf_spmd.evaluate``: its files against numbers counted from its own rows, on one rank and two; sets, mistakes, checkpoints."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tasks
from generate_runs import model, read_output, write_rows
from ranks import run_ranks
from rlhf_spmd import evaluate as program
from rlhf_spmd import generate
from rlhf_spmd.inference import output_files
from rlhf_spmd.inference.output_files import Journal
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.telemetry.summary import summarize
from tasks import train_alone as train

__all__ = ["model"]  # a fixture

K = 4


ROWS = [
    {"prompt": letters, "id": f"p{i}", "answer": None if i % 2 else str(i), "data_source": "odd" if i % 2 else "even"}
    for i, letters in enumerate(["abc", "ab", "cd ef", "x", "1+1=", "hello", "b" * 70])
]


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    sampling = [f"sampling.n={K}", "sampling.max_response_length=6", "sampling.seed=3"]
    return [f"model.path={model}", f"out={out}", "reward.function=reward_functions:even_length", *sampling, *more]


def evaluate_on_rank(world: World, argv: list[str]) -> None:
    program.evaluate(program.prepare(None, argv, world.launch), world)


def test_results_are_those_of_the_rows_in_every_layout(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_rows(tmp_path / "first.jsonl", ROWS), write_rows(tmp_path / "second.jsonl", ROWS[:3])
    long_set = [f"sets.long.{key}" for key in (f"path={second}", "reward.function=reward_functions:length", "sampling.n=1")]
    argv = [f"data.path=[{first},{second}]", *long_set]
    program.main(arguments(model, tmp_path / "alone", *argv))
    printed = capsys.readouterr()
    results = json.loads((tmp_path / "alone" / "results.json").read_text())
    rows = read_output(tmp_path / "alone" / "rows.jsonl")

    assert [(row["set"], row["id"]) for row in rows] == [
        *(("long", f"p{i}") for i in range(3)),
        *(("first", f"p{i}") for i in range(7) for _ in range(K)),
        *(("second", f"p{i}") for i in range(3) for _ in range(K)),
    ]
    assert rows[3]["prompt"] == "abc" and rows[3]["answer"] == "0"
    assert {"response", "score", "finish_reason", "length"} <= set(rows[0])
    for name, source in (("first", None), ("first/odd", "odd"), ("first/even", "even")):
        scores = [row["score"] for row in rows if row["set"] == "first" and source in (None, row["data_source"])]
        table = np.array(scores).reshape(-1, K)
        assert results[f"{name}/n"] == len(table)
        assert results[f"{name}/mean@{K}"] == results[f"{name}/pass@1"] == pytest.approx(table.mean())
        assert results[f"{name}/pass@{K}"] == pytest.approx((table.max(1) == 1).mean())
        low, high = results[f"{name}/ci95"]
        assert 0 <= low < table.mean() < high <= 1
    odd = [row["extracted"] for row in rows if row["set"] == "first" and row["data_source"] == "odd"]
    groups = [odd[start : start + K] for start in range(0, len(odd), K)]
    majority = [max(texts, key=lambda text, texts=texts: (Counter(texts)[text], -texts.index(text))) for texts in groups]
    assert results[f"first/odd/maj@{K}"] == pytest.approx(np.mean([bool(text) and len(text) % 2 == 0 for text in majority]))
    assert results["first/odd/num_no_answer"] == odd.count(None)
    assert "extracted" not in rows[0] and not {"long/maj@1", "long/num_no_answer"} & set(results), "its reward reads no answers"
    for row in rows:
        size = len(row.get("response") or "")
        if "error" not in row:
            assert row["score"] == (size / 10 if row["set"] == "long" else float(size % 2 == 0))
    unanswered = [row for row in rows if row["id"] == "p6"]
    assert len(unanswered) == K and results["first/num_unanswered"] == 1 and "1 prompt not answered" in printed.err
    for row in unanswered:
        assert "the prompt has 70 tokens, the model's context 64" in row["error"] and row["score"] == 0
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[0][:3] == ["set", "n", "mean@1"] and [line[0] for line in lines[1:4]] == ["long", "long/even", "long/odd"]

    run_ranks(2, evaluate_on_rank, arguments(model, tmp_path / "two", *argv))
    for file in ("rows.jsonl", "results.json"):
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["results.json", "rows.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.function=null"], "set 'in' has nothing to be scored by: give reward.function"),
        (["reward.function=gsm9k"], "gsm9k.*did you mean 'gsm8k'"),
        (["reward.model=/some/where"], r"reward\.model=/some/where: here responses are scored by a function"),
        (["reward.judge.template='{response}'"], r"reward\.judge=.*: here responses are scored by a function; leave it out"),
        (["sets.in.path=IN"], r"is the set 'in', and so is sets\.in; give one of them another name"),
        (["data.path=[IN,IN]"], "is given twice"),
        (["data.path=[]"], r"data\.path or sets\.<name>\.path must be given"),
        (["data.path={a: 2}"], r"data\.path must be a file or a list of files"),
        (
            ["rewards.a.function=math"],
            r"^unknown key 'rewards'; here: reward.function; responses that are only scored have one",
        ),
        (["sets.b.path=IN", "sets.b.sampling.temprature=1"], r"^unknown key 'sets\.b\.sampling\.temprature'; did you mean"),
        (["out=IN"], "cannot write"),
        (["reward.weight=0.5"], r"^set 'in' has reward\.weight=0\.5: here a reward stands alone and has no weight"),
    ],
)
def test_mistakes_are_named(model: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    rows = write_rows(tmp_path / "in.jsonl", ROWS[:2])
    more = [f"data.path={rows}", *(override.replace("IN", str(rows)) for override in overrides)]
    with pytest.raises(ValueError, match=message):
        program.prepare(None, arguments(model, tmp_path / "out", *more), Launch())


def test_a_run_stands_for_its_newest_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its export, and a checkpoint that has none, give the same responses; an export that is older than a checkpoint is not taken."""
    prompts = f"data.path={tasks.task() / 'train.jsonl'}"

    def responses(path: str, name: str) -> str:
        more = [prompts, "reward.function=reward_functions:length", "model.dtype=float64"]
        program.main(arguments(tmp_path / path, tmp_path / "out" / name, *more))
        return (tmp_path / "out" / name / "rows.jsonl").read_text()

    train(tmp_path / "run", 1, "run.export=true")
    first = responses("run", "run")
    assert first == responses("run/export", "export") == responses("run/checkpoints/step_1", "checkpoint")
    train(tmp_path / "run", 2, "run.export=false")  # the run goes on, and its export stays that of step 1
    capsys.readouterr()
    assert first != responses("run", "newest") == responses("run/checkpoints/step_2", "last")
    assert f"the weights of step_2, from {tmp_path}/run/checkpoints/step_2" in capsys.readouterr().err
    assert f"{tmp_path}/run/export (of step_1, not of the one below)" in summarize(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"is a checkpoint, and .*config\.yaml does not name models\.actor\.path"):
        program.prepare(None, arguments(tmp_path / "run/checkpoints/step_1", tmp_path / "new", prompts), Launch())


@pytest.mark.parametrize("stop", ["[]", "[a,b,c,d]"])
def test_generate_keeps_the_best(model: Path, tmp_path: Path, stop: str) -> None:
    """The reward sees the stop string, what is kept ends before it."""
    chat = [{"role": "user", "content": "abd"}]
    prompts = write_rows(tmp_path / "in.jsonl", [*ROWS[:3], {"prompt": chat, "id": "chat"}])
    settings = [f"model.path={model}", f"data.path={prompts}", f"sampling.n={K}", "sampling.seed=1", f"sampling.stop={stop}"]
    settings += ["sampling.max_response_length=40", "reward.function=reward_functions:length"]
    files = {}
    for keep in ("all", "2", "pairs"):
        generate.main([*settings, f"out={tmp_path / keep}.jsonl", f"keep={keep}"])
        files[keep] = read_output(tmp_path / f"{keep}.jsonl")
    lengths = {round(10 * row["score"]) - len(row["text"]) for row in files["all"]}
    assert lengths == ({0} if stop == "[]" else {0, 1})
    groups = [files["all"][start : start + K] for start in range(0, 4 * K, K)]
    best = [sorted(((row["score"], row["text"]) for row in group), reverse=True)[:2] for group in groups]
    assert [row["score"] for row in files["2"]] == [score for pair in best for score, _ in pair]
    assert {(row["score"], row["response"]) for row in files["2"]} <= {(row["score"], row["text"]) for row in files["all"]}
    assert files["2"][-1]["prompt"] == chat and set(files["2"][0]) == {"id", "prompt", "answer", "response", "score"}
    spread = [group for group in groups if len({row["score"] for row in group}) > 1]
    for pair, group in zip(files["pairs"], spread, strict=True):
        scores = [row["score"] for row in group]
        for kind, index in (("chosen", np.argmax(scores)), ("rejected", np.argmin(scores))):
            assert (pair[kind], pair[f"{kind}_score"]) == (group[index]["text"], scores[index])


def test_keeping_of_responses_without_a_score(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", ROWS[:4])
    settings = [f"model.path={model}", f"data.path={prompts}", f"out={tmp_path / 'out.jsonl'}", f"sampling.n={K}"]
    settings += ["sampling.max_response_length=2", "reward.function=reward_functions:nothing"]
    generate.main([*settings, "keep=best"])
    assert "keep=best: 4 of the 4 responses that are kept score 0 or less" in capsys.readouterr().err


def test_a_job_of_several_sets_that_was_killed_reads_its_journal_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made again."""
    paths = [write_rows(tmp_path / f"{size}.jsonl", ROWS[:size]) for size in (3, 2)]
    argv = arguments(model, tmp_path / "out", f"data.path=[{paths[0]},{paths[1]}]")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: None)
        program.main(argv)
    rows, lines = (tmp_path / "out" / "rows.jsonl").read_bytes(), list[str]()
    capsys.readouterr()
    monkeypatch.setattr(Journal, "append", lambda *_: pytest.fail("a row was made again"))
    counted = SimpleNamespace(loads=lambda line: lines.append(line) or json.loads(line), dumps=json.dumps)
    monkeypatch.setattr(output_files, "json", counted)
    program.main(argv)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows and len(lines) == 5 * K
    assert f"{5 * K} of them were there from an earlier start" in capsys.readouterr().err


def test_results_of_another_job_are_not_replaced(model: Path, tmp_path: Path) -> None:
    """Other settings, or other code of the reward; the same job again gives the same files."""
    rows, out, reward = write_rows(tmp_path / "in.jsonl", ROWS[:3]), tmp_path / "out", tmp_path / "own.py"
    reward.write_text("def score(response): return 1.0 * len(response)\n")
    argv = arguments(model, out, f"data.path={rows}", f"reward.function={reward}:score")
    program.main(argv)
    before = (out / "results.json").read_bytes()
    program.main(argv)
    assert (out / "results.json").read_bytes() == before
    refused = r"out=.*out: its results\.json is that of a job with another model, other prompts or other settings; remove it"
    for other in ("sampling.n=2", "pass_score=3"):
        with pytest.raises(ValueError, match=refused):
            program.prepare(None, [*argv, other], Launch())
    reward.write_text("def score(response): return 2.0 * len(response)\n")
    with pytest.raises(ValueError, match=refused):
        program.prepare(None, argv, Launch())
    (out / "results.json").unlink()
    assert program.prepare(None, argv, Launch()).journal.job != json.loads(before)["job"]


def test_the_first_rows_of_each_set_can_do(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_rows(tmp_path / f"{name}.jsonl", ROWS)
    paths = [f"data.path=[{tmp_path}/one.jsonl]", f"sets.few.path={tmp_path}/two.jsonl", "sets.few.max_samples=2"]
    sets = program.prepare(None, arguments(model, tmp_path / "out", *paths, "data.max_samples=3"), Launch()).sets
    assert {prompts.name: [row["id"] for row in prompts.rows] for prompts in sets} == {
        "one": ["p0", "p1", "p2"],
        "few": ["p0", "p1"],
    }


def test_a_reward_that_fails_names_the_set(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("def score(response): raise KeyError('x')\n")
    rows = write_rows(tmp_path / "in.jsonl", ROWS[:3])
    with pytest.raises(SystemExit):
        program.main(arguments(model, tmp_path / "out", f"data.path={rows}", f"reward.function={tmp_path / 'own.py'}:score"))
    assert re.search(r"failed in (\d+) of \1 calls of the set 'in' so far; first error:", capsys.readouterr().err)


def test_training_validates_by_the_same_measures(tmp_path: Path) -> None:
    """Two sets: their measures, and the responses to the same prompts at every validation, the same on two ranks."""
    for name, word in (("short", "ab"), ("long", "abcdef")):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{word}{i}", "id": i, "answer": "7"} for i in range(3)])
    paths = f"data.val_path={{short: {tmp_path}/short.jsonl, other: {tmp_path}/long.jsonl}}"
    more = [paths, "run.test_freq=1", "val_sampling.n=4", "run.log_samples=2", "run.seed=5"]
    more.append("reward.function=reward_functions:even_length")
    train(tmp_path / "alone", 2, *more)
    metrics = read_output(tmp_path / "alone" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics:
        assert row["val/reward_mean"] == pytest.approx((row["val/short/mean@4"] + row["val/other/mean@4"]) / 2, abs=1e-6)
        assert {"val/short/pass@2", "val/other/pass@4", "val/other/maj@4"} <= set(row) and "val/short/pass@1" not in row
    samples = read_output(tmp_path / "alone" / "validation.jsonl")
    prompts = [("short", "ab0"), ("short", "ab1"), ("other", "abcdef0"), ("other", "abcdef1")]
    assert [(row["step"], row["set"], row["prompt"]) for row in samples] == [(step, *p) for step in range(3) for p in prompts]
    assert samples[0]["response"] != samples[8]["response"] and {"answer", "score", "row_id", "length"} <= set(samples[0])
    for row in (*samples, *read_output(tmp_path / "alone" / "rollouts.jsonl")):
        assert row["finish_reason"] == ("stop" if len(row["response"]) < row["length"] else "length")
        assert row["extracted"] == (row["response"] or None) and row.get("answer") == ("7" if "set" in row else None)
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(tmp_path / "two", 2, *more))
    others = read_output(tmp_path / "two" / "validation.jsonl")
    assert [row["response"] for row in others] == [row["response"] for row in samples]
    assert [start["ranks"] for start in read_output(tmp_path / "two" / "starts.jsonl")] == ["2"]
    for row, other in zip(metrics, read_output(tmp_path / "two" / "metrics.jsonl"), strict=True):
        values = {key: value for key, value in row.items() if key.startswith("val/")}
        assert {key: other[key] for key in values} == pytest.approx(values, abs=1e-9)


def test_prompts_that_the_reward_is_not_for_count_nowhere(model: Path, tmp_path: Path) -> None:
    """Also one that is too long to be answered, and while a run trains, on whose rows the reward says nothing here."""
    rows = write_rows(tmp_path / "in.jsonl", ROWS)
    reward = ["reward.function=tasks:always_one", "reward.data_sources=[odd]"]
    program.main(arguments(model, tmp_path / "out", f"data.path={rows}", *reward))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    counts = {key: results[f"in/{key}"] for key in ("n", f"mean@{K}", "num_unscored", "num_unanswered")}
    assert counts == {"n": 3, f"mean@{K}": 1.0, "num_unscored": 4, "num_unanswered": 1}
    assert results["in/even/n"] == 0 and f"in/even/mean@{K}" not in results

    write_rows(tmp_path / "in.jsonl", ROWS[:6])
    train(tmp_path / "run", 1, f"data.val_path={rows}", "run.test_freq=1", *reward)
    for metrics in read_output(tmp_path / "run" / "metrics.jsonl"):
        assert metrics["val/reward_mean"] == 1.0
    assert metrics["reward/unscored"] == 16 and "reward/mean" not in metrics and metrics["critic/advantages/max"] == 0.0
    none = write_rows(tmp_path / "none.jsonl", [{"prompt": "abc", "data_source": "odd"}])
    val = f"{tasks.task()}/train.jsonl"
    with pytest.raises(RewardError, match=r"^no reward scores any of the 20 responses to validation prompts$"):
        train(tmp_path / "other", 1, f"data.path=[{none},{val}]", f"data.val_path={val}", "run.test_freq=1", *reward)


def test_a_run_is_as_long_as_its_epochs(tmp_path: Path) -> None:
    """20 prompts, 8 a step: 2 epochs are 5 steps; the configuration that is written says so."""
    train(tmp_path / "run", 2, "run.steps=null", "data.epochs=2")
    assert [row["step"] for row in read_output(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert "steps: 5\n" in (tmp_path / "run" / "config.yaml").read_text()
