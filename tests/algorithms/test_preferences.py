"""Preference data in every form, and runs on it: pairs stay whole, the reference is asked once, what was trained is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from algorithm_cases import CASES, CONFIGS
from overrides import micro_batches
from ranks import run_ranks
from rlhf_spmd.algorithms import preferences
from rlhf_spmd.algorithms.preferences import of_pairs
from rlhf_spmd.data.batch import Batch, encode_json
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.preferences import PreferencesConfig, SafetyPreferencesConfig, UnpairedConfig, unusable
from rlhf_spmd.data.sort_digits import write_task
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.objectives.preferences import bradley_terry
from rlhf_spmd.parallel.world import World
from rlhf_spmd.train import prepare
from rlhf_spmd.training.streams import RowStream
from rlhf_spmd.workers.config import BatchLimits
from role_workers import build
from tasks import rows_of, texts_of, tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PKU = {
    "prompt": "p",
    "response_0": "zero",
    "response_1": "one",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
    "better_response_id": 0,
    "safer_response_id": 1,
}
HH = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: a\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", "a", "b"),
        ({"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")]}, [user("p")], "a", "b"),
        ({"prompt": "p", "chosen": assistant("a"), "rejected": assistant("b")}, "p", "a", "b"),
        (
            {"prompt": [user("p")], "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            [user("p")],
            "a",
            "b",
        ),
        ({"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]}, [user("p")], "a", "b"),
        (
            {
                "chosen": [user("p"), assistant("x"), user("q"), assistant("a")],
                "rejected": [user("p"), assistant("x"), user("q"), assistant("a")],
            },
            [user("p"), assistant("x"), user("q")],
            "a",
            "a",
        ),
        ({"chosen": HH + " same start", "rejected": HH + " same end"}, HH, " same start", " same end"),
        (PKU, "p", "zero", "one"),
        # responses may begin as the prompt does
        ({"prompt": "p:", "chosen": "p: a", "rejected": "p: b"}, "p:", "p: a", "p: b"),
        ({"prompt": "2", "chosen": "2 is even.", "rejected": "22 is odd."}, "2", "2 is even.", "22 is odd."),
        ({"prompt": HH, "chosen": HH + " a", "rejected": HH + " b"}, HH, " a", " b"),
        (
            {"prompt": "p", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            [user("p")],
            "a",
            "b",
        ),
    ],
)
def test_forms_of_pairs(row: dict[str, Any], prompt: Any, chosen: str, rejected: str) -> None:
    pair = PreferencesConfig(path="x").pair(Row(row, "x:1"))
    assert [response.prompt for response in pair] == [prompt, prompt]
    assert [response.text for response in pair] == [chosen, rejected]
    assert [response.numbers for response in pair] == [{"chosen": 1.0, "margin": 0.0}, {"chosen": 0.0, "margin": 0.0}]


def test_a_margin_that_is_named_must_be_there() -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "score_gap": 3.0}
    pair = PreferencesConfig(path="x", margin_key="score_gap").pair(Row(row, "x:1"))
    assert [response.numbers["margin"] for response in pair] == [3.0, 3.0]
    with pytest.raises(DataError, match=r"x:1: no key 'score_gapp' \(data\.margin_key=score_gapp\)"):
        PreferencesConfig(path="x", margin_key="score_gapp").pair(Row(row, "x:1"))


def test_pku_s_fields_for_a_cost_model() -> None:
    """The safer response is the chosen one, whichever is better."""
    pair = SafetyPreferencesConfig(path="x").pair(Row(PKU, "x:1"))
    assert [(response.text, response.numbers["safe"]) for response in pair] == [("one", 1.0), ("zero", -1.0)]
    flags = {"prompt": "p", "chosen": "a", "rejected": "b", "safe_chosen": False, "safe_rejected": False}
    assert [r.numbers["safe"] for r in SafetyPreferencesConfig(path="x").pair(Row(flags, "x:1"))] == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("config", "row", "message"),
    [
        (PreferencesConfig, {"prompt": "p", "chosen": "a"}, r"x:1: no key 'rejected' \(data.rejected_key=rejected\)"),
        (
            PreferencesConfig,
            {"prompt": "p", "chosen": "a", "rejected": None},
            r"x:1: 'rejected' \(data.rejected_key=rejected\) must be text or messages, not None",
        ),
        (PreferencesConfig, {"chosen": 3, "rejected": "b"}, r"x:1: 'chosen' \(data.chosen_key=chosen\) must be .* not 3"),
        (
            PreferencesConfig,
            {"prompt": "q", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            r"x:1: a response must be one message of the assistant after the prompt; there are: user, assistant",
        ),
        (
            PreferencesConfig,
            {"prompt": None, "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]},
            r"x:1: a response must be one message of the assistant after the prompt; there are: user, assistant",
        ),
        (PreferencesConfig, {"chosen": "yes, a", "rejected": "yes, b"}, r"x:1: without a prompt two texts must be dialogues"),
        (PreferencesConfig, {"chosen": "a", "rejected": [assistant("b")]}, r"x:1: .* one is text and one is messages"),
        (
            PreferencesConfig,
            {"chosen": [user("p"), assistant("a"), user("q"), assistant("c")], "rejected": [user("p"), assistant("b")]},
            r"x:1: a response must be one message of the assistant after the prompt; there are: assistant, user, assistant",
        ),
        (
            PreferencesConfig,
            {"prompt": "p", "chosen": "a", "rejected": "b", "margin": -1},
            r"'margin' must be .* at least 0, not -1",
        ),
        (PreferencesConfig, {**PKU, "better_response_id": 2}, r"'better_response_id' must be 0 or 1, not 2"),
        (SafetyPreferencesConfig, {"prompt": "p", "chosen": "a", "rejected": "b"}, r"no key 'safe_chosen'"),
        (SafetyPreferencesConfig, {**PKU, "is_response_0_safe": "no"}, r"'is_response_0_safe' must be true or false, not 'no'"),
        (
            SafetyPreferencesConfig,
            {"prompt": "p", "chosen": "a", "rejected": "b", "safe_chosen": False, "safe_rejected": True},
            r"x:1: the chosen response, which is the safer one, is not safe",
        ),
    ],
)
def test_rows_that_are_refused(config: type[PreferencesConfig], row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        config(path="x").pair(Row(row, "x:1"))


def test_pairs_as_a_batch_and_what_is_left_out() -> None:
    """Over-long, empty and equal pairs are counted and the first is named; a group is two rows, the chosen one first."""
    rows = rows_of(
        {"prompt": "abc", "chosen": "d", "rejected": "ef", "margin": 2},
        {"prompt": "abc", "chosen": "same", "rejected": "same"},
        {"prompt": "abc", "chosen": "d", "rejected": " "},
        {"prompt": "abc", "chosen": "d", "rejected": "much2long"},
        {"prompt": "xy", "chosen": "z", "rejected": "0"},
    )
    data = PreferencesConfig(path="x", max_length=8).tokenize(rows, tokenizer())
    assert len(data) == 2 and data.tally.num_overlong == 1
    assert "1 over-long ones dropped" in data.summary()
    assert "1 left out whose two responses are equal, 1 left out whose response is empty (the first is x:2)" in data.summary()
    batch = data.batch([1, 0], [10, 11])
    assert batch.row_ids.tolist() == [20, 21, 22, 23] and batch.group_ids.tolist() == [10, 10, 11, 11]
    assert texts_of(batch["response_ids"].rows()) == ["z<eos>", "0<eos>", "d<eos>", "ef<eos>"]
    assert batch["chosen"].tolist() == [1, 0, 1, 0] and batch["margin"].tolist() == [0, 0, 2, 2]
    parted = {"chosen": HH + " b", "rejected": HH + " c\n\nHuman: d\n\nAssistant: e"}
    assert unusable(PreferencesConfig(path="x").pair(Row(parted, "x:1"))) == "dialogues part before their last turn"
    with pytest.raises(DataError, match=r"x:4: 13 tokens are more than data.max_length=8"):
        PreferencesConfig(path="x", max_length=8, filter_overlong=False).tokenize(rows, tokenizer())
    with pytest.raises(DataError, match=r"none of 2 pairs can be used, 1 left out whose two responses are equal, 1 left"):
        PreferencesConfig(path="x").tokenize(rows[1:3], tokenizer())


def test_margins_and_labels_are_part_of_what_data_are() -> None:
    one, other = (
        PreferencesConfig(path="x").tokenize(rows_of({"prompt": "a", "chosen": "b", "rejected": "c", "margin": m}), tokenizer())
        for m in (0, 1)
    )
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("config", [PreferencesConfig, SafetyPreferencesConfig, UnpairedConfig])
def test_the_quickstart_s_pairs(config: type[DatasetConfig], tmp_path: Path) -> None:
    write_task(tmp_path, 0, num_sft=1, num_train=40, num_val=10)
    data = config(path=str(tmp_path / "pairs.jsonl"), val_path=str(tmp_path / "pairs_val.jsonl"))
    tok = load_tokenizer(tmp_path / "model")
    assert "left out" not in data.tokenize(data.read(), tok).summary()
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    safety = {(row["safe_chosen"], row["safe_rejected"]) for row in rows}
    assert len(rows) == 40 and safety == {(True, True), (True, False), (False, False)}
    for row in rows:
        assert row["safe_chosen"] == (sorted(row["chosen"]) == sorted(row["prompt"][:-1]))


# -- runs


def overrides(name: str, run_dir: Path, steps: int, *more: str) -> list[str]:
    return tasks.settings(run_dir, steps, *CASES[name].overrides(), *more)


def train(ranks: int, name: str, run_dir: Path, steps: int, *more: str) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, str(CONFIGS / f"{CASES[name].config}.yaml"), overrides(name, run_dir, steps, *more))
    return tasks.read_run(run_dir)


def pieces(world: World) -> list[list[tuple[int, float]]]:
    """(group, chosen) of the rows of each micro-batch of an update on 7 pairs."""
    seen: list[list[tuple[int, float]]] = []
    controller, models = build(world, "models.actor.dtype=float64", *micro_batches(tokens=60))
    models.actor.context = replace(models.actor.context, limits=BatchLimits(60))
    data = PreferencesConfig(path=str(tasks.pairs("seven", 7)))
    batch = data.tokenize(data.read(), tokenizer()).batch(range(7), range(7))

    def loss(chosen: Any, rejected: Any) -> Any:
        return bradley_terry(chosen["logps"], rejected["logps"]), {}

    objective = of_pairs(loss, (), "log_probs")

    def watched(fields: Any, rows: Any, totals: Any) -> Any:
        seen.append(list(zip(rows.group_ids.tolist(), fields["chosen"].tolist(), strict=True)))
        return objective.loss(fields, rows, totals)

    rows = controller.source(batch)
    controller.run(lambda: models.actor.update(rows, replace(objective, loss=watched), mini_batch_size=3))
    return seen


def test_a_pair_is_never_cut_apart() -> None:
    """On two replicas, in micro-batches of one or two pairs and three mini-batches."""
    found = [micro for rank in run_ranks(2, pieces) for micro in rank if micro]
    assert len(found) > 5 and sorted(group for micro in found for group, _ in micro) == sorted([*range(7)] * 2)
    for micro in found:
        groups = {group for group, _ in micro}
        assert sorted(micro) == sorted((group, chosen) for group in groups for chosen in (0.0, 1.0))


def test_the_reference_is_asked_once_about_each_row(tmp_path: Path) -> None:
    """20 pairs in batches of 10: two steps with the reference, then none; a resumed run asks again and goes on as the other did."""
    batch = ("data.train_batch_size=10", "run.test_freq=0", "run.save_freq=3")
    whole = train(2, "dpo", tmp_path / "whole", 5, *batch)
    asked = ["timing_s/compute_ref_log_prob" in row for row in whole.raw]
    assert asked == [True, True, False, False, False]
    train(2, "dpo", tmp_path / "parts", 3, *batch)
    resumed = train(2, "dpo", tmp_path / "parts", 5, *batch)
    assert ["timing_s/compute_ref_log_prob" in row for row in resumed.raw] == [True, True, False, True, True]
    difference, where = tasks.worst_metric(whole, resumed, 1e-3)
    assert difference < 1e-12, where
    assert abs(whole.metrics[-1]["rewards/margins"]) > 1e-4


def train_and_count(world: World, config: str, given: list[str], keeps: bool) -> list[int]:
    """How many rows the reference was asked about, in each trace and each run of a step."""
    asked: list[int] = []
    ask = preferences.reference_log_probs

    def counted(models: Any, rows: Any) -> Any:
        asked.append(len(rows))
        return ask(models, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences, "reference_log_probs", counted)
        if not keeps:
            patch.setattr(RowStream, "keep", lambda *_: None)
        tasks.train_here(world, config, given)
    return asked


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_of_a_batch_the_reference_is_asked_about_the_rows_that_are_new(tmp_path: Path, name: str) -> None:
    """20 pairs in batches of 8: in the third step half are known; the numbers are those of a run that asks about all rows."""
    config, num = str(CONFIGS / f"{CASES[name].config}.yaml"), 16 if name == "dpo" else 32
    for run_dir, keeps in (("kept", True), ("all", False)):
        batch = f"data.train_batch_size={num // 2}"
        given = overrides(name, tmp_path / run_dir, 4, batch, "run.test_freq=0", "run.save_freq=4")
        counts = [
            asked[2:] for asked in run_ranks(2, train_and_count, config, given, keeps)
        ]  # before the run two steps are traced
        assert counts[0] == counts[1] and len(counts[0]) == (6 if keeps else 8) and counts[0][:4] == [num] * 4
        if keeps:  # a row that is twice in the batch in which an epoch ends is asked about twice
            assert num // 2 <= counts[0][4] == counts[0][5] < 0.7 * num
    one, other = (tasks.read_run(tmp_path / run_dir) for run_dir in ("kept", "all"))
    difference, where = tasks.worst_metric(one, other, 1e-3)
    assert difference < 1e-10, where
    assert tasks.worst_tensor(one, other)[0] < 1e-9


def test_kto_s_validation_is_of_all_rows_of_a_label_however_they_are_batched(tmp_path: Path) -> None:
    """The first batch of three has desirable rows only, so that the mean over batches is another."""
    labels = [True, True, True, False, False, True, False]
    rows = [{"prompt": f"{i}{i + 1}>", "completion": str(2 * i), "label": label} for i, label in enumerate(labels)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (f"data.val_path={tmp_path / 'val.jsonl'}", "run.test_freq=2")
    whole = train(1, "kto", tmp_path / "whole", 2, *more).metrics[-1]
    parts = train(1, "kto", tmp_path / "parts", 2, *more, "data.val_batch_size=3").metrics[-1]
    for name in ("val/rewards/chosen", "val/rewards/rejected"):
        assert abs(whole[name]) > 1e-4 and parts[name] == pytest.approx(whole[name], rel=1e-9)


def scores_of(world: World, model: str, batch: Batch) -> list[float]:
    controller, models = build(world, f"reward.model={model}", "models.reward.dtype=float64")
    rows = controller.source(
        Batch(batch.row_ids, batch.group_ids, {**batch.fields, "row": encode_json([{"prompt": ""}] * len(batch))})
    )
    call = controller.run(lambda: models.reward.compute_reward(rows))
    return controller.get_field(call, "scores").tolist()


def test_what_was_trained_is_what_is_exported(tmp_path: Path) -> None:
    """transformers and a reward role give the scores from which the last validation came."""
    run = train(1, "reward_model", tmp_path, 3, "run.export=true", "data.val_path=" + str(tasks.pairs("pairs_val", 7)))
    from transformers import AutoModelForSequenceClassification

    export = tmp_path / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float64)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    data = PreferencesConfig(path=str(tasks.pairs("pairs_val", 7)))
    batch = data.tokenize(data.read(), load_tokenizer(export)).batch(range(7), range(7))
    with torch.no_grad():
        ids = [torch.cat(parts)[None] for parts in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)]
        scores = torch.stack([model.score(model.model(row).last_hidden_state[0, -1])[0] for row in ids])
    last = run.metrics[-1]
    assert float((scores[::2] > scores[1::2]).double().mean()) == last["val/accuracy"]
    assert float(bradley_terry(scores[::2], scores[1::2], batch["margin"][::2]).mean()) == pytest.approx(
        last["val/loss"], rel=1e-6
    )
    (found,) = run_ranks(1, scores_of, str(export), batch)
    assert found == pytest.approx(scores.tolist(), rel=1e-5, abs=1e-7) and scores.std() > 1e-4


def test_ties_teach_nothing_and_are_counted(tmp_path: Path) -> None:
    tied = train(2, "online_dpo", tmp_path / "tied", 2, "reward.function=test_preferences:one_half")
    assert [(row["online_dpo/ties"], row["online_dpo/pairs"]) for row in tied.metrics] == [
        (tasks.PROMPTS, 0),
        (tasks.PROMPTS, 0),
    ]
    assert not any("grad_norm" in key for row in tied.metrics for key in row)
    other = train(1, "online_dpo", tmp_path / "other", 1)
    assert other.metrics[0]["online_dpo/pairs"] + other.metrics[0]["online_dpo/ties"] == tasks.PROMPTS
    assert other.metrics[0]["online_dpo/pairs"] > 2 and other.metrics[0]["rewards/margins"] == pytest.approx(0, abs=0.1)


def one_half(response: str) -> float:
    return 0.5


def test_the_multiplier_is_in_checkpoints(tmp_path: Path) -> None:
    whole = train(1, "safe_rlhf", tmp_path / "whole", 3)
    train(1, "safe_rlhf", tmp_path / "parts", 2)
    parts = train(1, "safe_rlhf", tmp_path / "parts", 3)
    values = [row["safe_rlhf/lambda"] for row in parts.metrics]
    assert values == [row["safe_rlhf/lambda"] for row in whole.metrics] and len(set(values)) == 3
    assert parts.state["roles"]["lagrange"] == {"lambda": values[-1]}
    assert {"cost/mean", "cost_critic/vf_loss", "critic/vf_loss", "actor/kl"} <= parts.metrics[0].keys()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("safe_rlhf", ("algorithm.ptx_coeff=0",), r"algorithm.ptx_coeff=0.0: it and the section ptx go together"),
        ("safe_rlhf", ("ptx=null",), r"algorithm.ptx_coeff=0.1: it and the section ptx go together"),
        ("safe_rlhf", ("rewards.cost.model=null",), r"there is no cost: give rewards.cost.function, a reward model as"),
        ("dpo", ("algorithm.max_token_len_per_gpu=30",), r"the longest pair of data has \d+ tokens.*must hold a pair"),
        ("dpo", ("reward.function=exact_match",), r"reward scores responses to prompts, and there are none: leave it out"),
    ],
)
def test_runs_that_cannot_be(name: str, more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(str(CONFIGS / f"{CASES[name].config}.yaml"), overrides(name, tmp_path, 3, *more), 1)
