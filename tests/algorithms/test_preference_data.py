"""Preference data in every form: pairs, pairs with safety, and KTO's rows, each with a partner for the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.preferences import PreferencesConfig, SafetyPreferencesConfig, UnpairedConfig, unusable
from rlhf_spmd.data.tokenizer import load_tokenizer
from sort_digits import write_task
from tasks import rows_of, texts_of, tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASKED = [user("p"), assistant("x"), user("q")]
ANSWERED = {"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]}
HH = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: a\n\nAssistant:"
TEXTS = {"prompt": "p", "chosen": "a", "rejected": "b"}
PKU = {
    **{"prompt": "p", "response_0": "zero", "response_1": "one", "is_response_0_safe": False, "is_response_1_safe": True},
    **{"better_response_id": 0, "safer_response_id": 1},
}


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        (TEXTS, "p", "a", "b"),
        ({"prompt": "p", "chosen": assistant("a"), "rejected": assistant("b")}, "p", "a", "b"),
        ({"prompt": [user("p")], **ANSWERED}, [user("p")], "a", "b"),
        ({"prompt": "p", **ANSWERED}, [user("p")], "a", "b"),
        (ANSWERED, [user("p")], "a", "b"),
        ({"chosen": [*ASKED, assistant("a")], "rejected": [*ASKED, assistant("a")]}, ASKED, "a", "a"),
        ({"chosen": HH + " same start", "rejected": HH + " same end"}, HH, " same start", " same end"),
        ({"prompt": HH, "chosen": HH + " a", "rejected": HH + " b"}, HH, " a", " b"),
        (PKU, "p", "zero", "one"),
        # responses may begin as the prompt does
        ({"prompt": "2", "chosen": "2 is even.", "rejected": "22 is odd."}, "2", "2 is even.", "22 is odd."),
    ],
)
def test_forms_of_pairs(row: dict[str, Any], prompt: Any, chosen: str, rejected: str) -> None:
    pair = PreferencesConfig(path="x").pair(Row(row, "x:1"))
    assert [response.prompt for response in pair] == [prompt, prompt]
    assert [response.answer for response in pair] == [chosen, rejected]
    assert [response.numbers for response in pair] == [{"chosen": 1.0, "margin": 0.0}, {"chosen": 0.0, "margin": 0.0}]


def test_pku_s_fields_for_a_cost_model() -> None:
    """The safer response is the chosen one, whichever is better."""
    pair = SafetyPreferencesConfig(path="x").pair(Row(PKU, "x:1"))
    assert [(response.answer, response.numbers["safe"]) for response in pair] == [("one", 1.0), ("zero", -1.0)]
    flags = {**TEXTS, "safe_chosen": False, "safe_rejected": False}
    assert [r.numbers["safe"] for r in SafetyPreferencesConfig(path="x").pair(Row(flags, "x:1"))] == [-1.0, -1.0]


NOT_ONE_MESSAGE = r"x:1: a response must be one message of the assistant after the prompt; there are: "


@pytest.mark.parametrize(
    ("config", "row", "message"),
    [
        (PreferencesConfig, {"prompt": "p", "chosen": "a"}, r"x:1: no key 'rejected' \(data.rejected_key=rejected\)"),
        (PreferencesConfig, {**TEXTS, "rejected": None}, r"x:1: 'rejected' .* must be text or messages, not None"),
        (PreferencesConfig, {"prompt": "q", **ANSWERED}, NOT_ONE_MESSAGE + "user, assistant"),
        (PreferencesConfig, {"chosen": "yes, a", "rejected": "yes, b"}, r"x:1: without a prompt two texts must be dialogues"),
        (PreferencesConfig, {"chosen": "a", "rejected": [assistant("b")]}, r"x:1: .* one is text and one is messages"),
        (PreferencesConfig, {**ANSWERED, "chosen": [*ASKED, assistant("c")]}, NOT_ONE_MESSAGE + "assistant, user, assistant"),
        (PreferencesConfig, {**TEXTS, "margin": -1}, r"'margin' must be .* at least 0, not -1"),
        (PreferencesConfig, {**PKU, "better_response_id": 2}, r"'better_response_id' must be 0 or 1, not 2"),
        (SafetyPreferencesConfig, TEXTS, r"no key 'safe_chosen'"),
        (SafetyPreferencesConfig, {**PKU, "is_response_0_safe": "no"}, r"'is_response_0_safe' must be true or false, not 'no'"),
        (
            SafetyPreferencesConfig,
            {**TEXTS, "safe_chosen": False, "safe_rejected": True},
            r"which is the safer one, is not safe",
        ),
    ],
)
def test_rows_that_are_refused(config: type[PreferencesConfig], row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        config(path="x").pair(Row(row, "x:1"))


def test_a_margin_is_part_of_what_data_are_and_must_be_there_if_named() -> None:
    row = {**TEXTS, "score_gap": 3.0}
    pair = PreferencesConfig(path="x", margin_key="score_gap").pair(Row(row, "x:1"))
    assert [response.numbers["margin"] for response in pair] == [3.0, 3.0]
    with pytest.raises(DataError, match=r"x:1: no key 'score_gapp' \(data\.margin_key=score_gapp\)"):
        PreferencesConfig(path="x", margin_key="score_gapp").pair(Row(row, "x:1"))
    small, large = (
        PreferencesConfig(path="x").encode_all(rows_of({**TEXTS, "margin": margin}), tokenizer()) for margin in (0, 1)
    )
    assert small.fingerprint != large.fingerprint


def test_pairs_as_a_batch_and_what_is_left_out() -> None:
    """Over-long, empty and equal pairs are counted and the first is named; a group is two rows, the chosen one first."""
    rows = rows_of(
        {"prompt": "abc", "chosen": "d", "rejected": "ef", "margin": 2},
        {"prompt": "abc", "chosen": "same", "rejected": "same"},
        {"prompt": "abc", "chosen": "d", "rejected": " "},
        {"prompt": "abc", "chosen": "d", "rejected": "much2long"},
        {"prompt": "xy", "chosen": "z", "rejected": "0"},
    )
    data = PreferencesConfig(path="x", max_length=8).encode_all(rows, tokenizer())
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
        PreferencesConfig(path="x", max_length=8, filter_overlong=False).encode_all(rows, tokenizer())
    with pytest.raises(DataError, match=r"none of 2 pairs can be used, 1 left out whose two responses are equal, 1 left"):
        PreferencesConfig(path="x").encode_all(rows[1:3], tokenizer())


def test_the_quickstart_s_pairs(tmp_path: Path) -> None:
    write_task(tmp_path, 0, num_sft=1, num_train=40, num_val=10)
    files = {f"{key}path": str(tmp_path / f"pairs{suffix}.jsonl") for key, suffix in (("", ""), ("val_", "_val"))}
    for config in (PreferencesConfig, SafetyPreferencesConfig, UnpairedConfig):
        data = config(**files)
        assert "left out" not in data.encode_all(data.read(), load_tokenizer(tmp_path / "model")).summary()
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert {(row["safe_chosen"], row["safe_rejected"]) for row in rows} == {(True, True), (True, False), (False, False)}
    assert all(row["safe_chosen"] == (sorted(row["chosen"]) == sorted(row["prompt"][:-1])) for row in rows)


# -- KTO's rows


def test_kto_s_rows_and_their_mismatched_partners() -> None:
    rows = rows_of(
        {"prompt": "a", "completion": "1", "label": True},
        {"prompt": "a", "completion": "2", "label": False},
        {"prompt": "b", "chosen": "3", "rejected": "4"},
    )
    batch = UnpairedConfig(path="x", append_eos=False).encode_all(rows, tokenizer()).batch(range(4), range(4))
    assert texts_of(batch["prompt_ids"].rows()) == list("aaaabbbb")
    assert texts_of(batch["response_ids"].rows()) == list("13243142")  # each with the next of its label to another prompt
    assert batch["desirable"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


PROMPTS = "abcdefghij"
SINGLE = [{"prompt": p, "completion": kind + p, "label": kind == "1"} for p in PROMPTS for kind in "10"]
FORMS = {
    "pairs": [{"prompt": p, "chosen": "1" + p, "rejected": "0" + p} for p in PROMPTS],
    "blocks": sorted(SINGLE, key=lambda row: bool(row["label"])),
    "one undesirable prompt": [row for row in SINGLE if row["label"] or row["prompt"] == "c"],
}


@pytest.mark.parametrize("form", FORMS)
def test_both_kinds_enter_kto_s_baseline_as_often_as_they_are_in_the_data(form: str) -> None:
    """Whatever the order of the rows; a label of one prompt only has the next completion of all."""
    data = UnpairedConfig(path="x", append_eos=False).encode_all(rows_of(*FORMS[form]), tokenizer())
    batch = data.batch(range(len(data)), range(len(data)))
    texts, prompts = texts_of(batch["response_ids"].rows()), texts_of(batch["prompt_ids"].rows())
    assert all(text[1] != prompt for text, prompt in zip(texts[1::2], prompts[1::2], strict=True))
    if form == "one undesirable prompt":
        assert texts[texts.index("0c") + 1] == "1d"
    else:
        assert [text[0] for text in texts[1::2]] == [text[0] for text in texts[::2]]


def test_a_kto_row_that_fits_stays_whatever_its_partner() -> None:
    """The completions of other prompts that are too long are cut, and those that cannot be used are not taken."""
    rows = rows_of(
        {"prompt": "abc", "completion": "1", "label": True},
        {"prompt": "d", "completion": "234567", "label": True},
        {"prompt": "e", "completion": " ", "label": True},
        {"prompt": "\n\nHuman: f\n\nAssistant:", "completion": "\n\nHuman: x", "label": False},
        {"prompt": "g", "completion": "8", "label": False},
        {"prompt": "h", "completion": "901234567", "label": False},
    )
    data = UnpairedConfig(path="x", append_eos=False, max_length=7).encode_all(rows, tokenizer())
    assert len(data) == 4 - 1 and data.tally.num_overlong == 1
    batch = data.batch(range(3), range(3))
    assert texts_of(batch["response_ids"].rows()) == ["1", "2345", "234567", "1", "8", "901234"]
    assert "2 left out" not in data.summary() and "1 left out whose response is empty" in data.summary()


@pytest.mark.parametrize(
    ("prompts", "labels", "message"),
    [
        ("abc", [True] * 3, r"all responses are desirable; KTO needs"),
        ("abc", [False] * 3, r"all responses are undesirable; KTO needs"),
        ("aa", [True, False], r"'x' has one prompt only"),
        ("a", ["good"], r"x:1: 'label' must be true or false, not 'good'"),
    ],
)
def test_rows_that_are_refused_for_kto(prompts: str, labels: list[Any], message: str) -> None:
    rows = rows_of(*({"prompt": p, "completion": "1", "label": label} for p, label in zip(prompts, labels, strict=True)))
    with pytest.raises(DataError, match=message):
        UnpairedConfig(path="x").encode_all(rows, tokenizer())
