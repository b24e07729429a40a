"""KTO's rows: each with a partner for the baseline, of either label; and what rows share."""

from __future__ import annotations

from typing import Any

import pytest
import tasks
from tasks import rows_of, texts_of, tokenizer

from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.preferences import PreferencesConfig, UnpairedConfig


def test_kto_s_rows_and_their_mismatched_partners() -> None:
    rows = rows_of(
        {"prompt": "a", "completion": "1", "label": True},
        {"prompt": "a", "completion": "2", "label": False},
        {"prompt": "b", "chosen": "3", "rejected": "4"},
    )
    batch = UnpairedConfig(path="x", append_eos=False).tokenize(rows, tokenizer()).batch(range(4), range(4))
    prompts, texts = (
        ["".join(tasks.VOCABULARY[i] for i in ids) for ids in batch[f"{name}_ids"].rows()] for name in ("prompt", "response")
    )
    assert prompts == list("aaaabbbb")
    assert texts == list("13243142")  # each with the next completion of its label to another prompt
    assert batch["desirable"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    with pytest.raises(DataError, match=r"'x' has one prompt only"):
        UnpairedConfig(path="x").tokenize(rows[:2], tokenizer())
    with pytest.raises(DataError, match=r"x:1: 'label' must be true or false, not 'good'"):
        UnpairedConfig(path="x").tokenize(rows_of({"prompt": "a", "completion": "1", "label": "good"}), tokenizer())


@pytest.mark.parametrize("form", ["pairs", "single", "blocks", "one undesirable prompt"])
def test_both_kinds_enter_kto_s_baseline_as_often_as_they_are_in_the_data(form: str) -> None:
    """Whatever the order of the rows; a label of one prompt only has the next completion of all."""
    prompts = list("abcdefghij")
    single = [{"prompt": p, "completion": kind + p, "label": kind == "1"} for p in prompts for kind in "10"]
    rows = {
        "pairs": [{"prompt": p, "chosen": "1" + p, "rejected": "0" + p} for p in prompts],
        "single": single,
        "blocks": sorted(single, key=lambda row: row["label"]),
        "one undesirable prompt": [row for row in single if row["label"] or row["prompt"] == "c"],
    }[form]
    data = UnpairedConfig(path="x", append_eos=False).tokenize(rows_of(*rows), tokenizer())
    batch = data.batch(range(len(data)), range(len(data)))
    texts, asked = texts_of(batch["response_ids"].rows()), texts_of(batch["prompt_ids"].rows())
    assert all(text[1] != prompt for text, prompt in zip(texts[1::2], asked[1::2], strict=True))
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
        {"prompt": "f", "completion": "\n\nHuman: x", "label": False},
        {"prompt": "g", "completion": "8", "label": False},
        {"prompt": "h", "completion": "901234567", "label": False},
    )
    data = UnpairedConfig(path="x", append_eos=False, max_length=7).tokenize(rows, tokenizer())
    assert len(data) == 4 - 1 and data.tally.num_overlong == 1
    batch = data.batch(range(3), range(3))
    assert texts_of(batch["response_ids"].rows()) == ["1", "2345", "234567", "1", "8", "901234"]
    assert "2 left out" not in data.summary() and "1 left out whose response is empty" in data.summary()


@pytest.mark.parametrize("label", [True, False])
def test_kto_with_one_kind_only_is_refused(label: bool) -> None:
    rows = rows_of(*({"prompt": p, "completion": "1", "label": label} for p in "abc"))
    with pytest.raises(DataError, match=rf"all responses are {'' if label else 'un'}desirable; KTO needs"):
        UnpairedConfig(path="x").tokenize(rows, tokenizer())


@pytest.mark.parametrize("config", [PreferencesConfig, UnpairedConfig])
def test_what_rows_share_is_tokenised_once(config: type[PreferencesConfig]) -> None:
    """Each prompt by itself, and each prompt with each of its responses."""
    whole, seen = tokenizer(), []

    class Counting:
        eos_token_id, name_or_path, decode = whole.eos_token_id, "counting", whole.decode

        def __call__(self, texts: list[str] | str, **more: Any) -> Any:
            seen.extend(texts if isinstance(texts, list) else ())
            return whole(texts, **more)

    rows = rows_of(*({"prompt": p, "chosen": p + "1", "rejected": p + "2"} for p in ("ab", "cd", "ab")))
    for row in rows:
        row.values["chosen"] = row.values["chosen"][::-1]
    config(path="x").tokenize(rows, Counting())
    assert {"ab", "cd", "ab1ba", "abab2", "cd1dc", "cdcd2"} <= {*seen} and len(seen) == len({*seen})
