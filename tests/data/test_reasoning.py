"""What follows reasoning in a response: for rewards from token ids, for clients from a text that grows."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_spmd.data.reasoning import split_reasoning, strip_reasoning

TAGS = ["<think>", "</think>"]


def tokenizer_of(*, special: bool) -> Any:
    """A token for each character, and for each tag of some other models; these are special, so that text does not show them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<unk>": 0, **{chr(c): c - 9 for c in range(10, 127)}}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in (*TAGS, "[THINK]", "[/THINK]")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


CASES = [
    ("A:", "<think>so</think>\n\n7", "7"),
    ("A:<think>\n", "so</think> 7", " 7"),  # the generation prompt opened it
    ("A:<think>\n\n</think>\n\n", "7", "7"),  # and closed it: enable_thinking=false
    ("A:", "7", "7"),
    ("use <think> tags. A:", "7", "7"),
    ("A:<think>\n", "so 7", None),
    ("A:", "<think>so 7", None),
    ("A:", "<think>so</think>6<think>no</think>7", "7"),
    ("A:", "<think>so</think>6<think>no", None),
    ("A:<think>", "", None),
    ("A:<think>", "</think>", ""),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("prompt", "response", "answer"), CASES)
def test_what_follows_the_reasoning(special: bool, prompt: str, response: str, answer: str | None) -> None:
    tokenizer = tokenizer_of(special=special)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response)]
    assert strip_reasoning(tokenizer, *ids, TAGS) == answer


def test_other_tags() -> None:
    tokenizer, tags = tokenizer_of(special=True), ["[THINK]", "[/THINK]"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("A:", "[THINK]<think>[/THINK]7")]
    assert strip_reasoning(tokenizer, *ids, tags) == "7"


SPLIT = [
    (False, "<think>so</think>\n\n7", ("so", "\n\n7")),
    (False, "\n<think>so</think>7", ("so", "7")),
    (True, "so</think>7", ("so", "7")),
    (True, "<think>so</think>7", ("so", "7")),  # as some models begin it again
    (False, "so</think>7", ("", "so</think>7")),
    (False, "<the answer> 7", ("", "<the answer> 7")),
    (False, "<think", ("", "<think")),
    (True, "so </thin", ("so </thin", "")),
    (False, "<think>a<</think>b</think>c", ("a<", "b</think>c")),
    (False, "", ("", "")),
]


@pytest.mark.parametrize(("begun", "text", "parts"), SPLIT)
def test_a_text_that_grows_is_split_alike(begun: bool, text: str, parts: tuple[str, str]) -> None:
    """What a client has been sent is never taken back, and the last part brings the rest."""
    assert split_reasoning(text, begun, TAGS, ended=True) == parts
    before = ("", "")
    for end in range(len(text) + 1):
        now = split_reasoning(text[:end], begun, TAGS, ended=False)
        assert all(new.startswith(old) and whole.startswith(new) for new, old, whole in zip(now, before, parts, strict=True))
        before = now
