"""Calls in answers: whole, and in a response that grows by a token at a time, in each family's form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from places import SHARED
from rlhf_spmd.agents.answer_calls import AnswerCalls, ForcedCalls, text_parameters
from rlhf_spmd.data.tokenizer import added_places, decode, encode, load_tokenizer
from rlhf_spmd.environments.tool_calls import FORMATS

ARGUMENTS = {"n": 2, "s": "1"}
OBJECT = json.dumps({"name": "f", "arguments": ARGUMENTS})
LLAMA = OBJECT.replace("arguments", "parameters")
J = json.dumps(ARGUMENTS)
TAGGED = "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n"
CODER = "<function=f>\n<parameter=n>\n2\n</parameter>\n<parameter=s>\n1\n</parameter>\n</function>"
TURNS = {  # format -> content, then two calls
    "hermes": f"Hm <b>.\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>{OBJECT}</tool_call>\n",
    "llama3_json": f"Hm <b>.<|python_tag|>{LLAMA}; {LLAMA}",
    "mistral": f"Hm <b>.[TOOL_CALLS]f[ARGS]{J}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{J}",
    "glm45": f"Hm <b>.\n<tool_call>f\n{TAGGED}</tool_call>\n<tool_call>f\n{TAGGED}</tool_call>",
    "qwen3_coder": f"Hm <b>.\n\n<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n{CODER}\n</tool_call>",
    "deepseek_v31": "Hm <b>.<|tool▁calls▁begin|>"
    f"<|tool▁call▁begin|>f<|tool▁sep|>{J}<|tool▁call▁end|>"
    f"<|tool▁call▁begin|>function<|tool▁sep|>f\n```json\n{J}\n```<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", "\uff5c"),
    "openai": f"<|channel|>final<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    f"<|constrain|>json<|message|>{J}<|call|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{J}",
}
SPECIAL = re.compile(r"<\|\w+\|>|<\uff5c[^\uff5c]+\uff5c>|\[[A-Z_]+\]")
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}]


def tokenizer_of(texts: list[str], special: list[str]) -> Any:
    """A token for each character of ``texts``, and special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted({"a", *"".join(texts)})
    inner = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer


def reader(tokenizer: Any, name: str, **more: Any) -> AnswerCalls:
    settings: dict[str, Any] = {"parallel": True, "prompt": "", "thoughts": None, "hides_special": True, **more}
    return AnswerCalls(tokenizer, name, text_parameters(TOOLS), **settings)


def split(calls: AnswerCalls, ids: list[int], ended: bool = True) -> tuple[str, list[Any]]:
    return calls.split(ids, decode(calls.tokenizer, [ids], skip_special_tokens=False)[0], ended)


def split_as_it_grows(calls: AnswerCalls, ids: list[int]) -> tuple[str, list[Any]]:
    """What a stream sends together; nothing that was sent is changed, and no call is sent late."""
    content, sent = "", list[Any]()
    for length in range(1, len(ids) + 1):
        shown, found = split(calls, ids[:length], ended=length == len(ids))
        assert shown.startswith(content) and found[: len(sent)] == sent
        content, sent = shown, found
    return content, sent


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_has_its_calls_and_its_content_apart(name: str, has_tokens: bool) -> None:
    """Also if marks are special tokens, which the content does not show."""
    text = TURNS[name]
    tokenizer = tokenizer_of([text], SPECIAL.findall(text) if has_tokens else [])
    calls, ids = reader(tokenizer, name), encode(tokenizer, text)
    content, found = split(calls, ids)
    hidden = "finalHm <b>.assistant" if name == "openai" else "Hm <b>."
    if name == "openai" and not has_tokens:
        hidden = text[: text.index("<|start|>")]
    assert content == hidden.removesuffix("assistant")
    functions = [call["function"] for call in found]
    assert [(function["name"], json.loads(function["arguments"])) for function in functions] == [("f", ARGUMENTS)] * 2
    assert len({call["id"] for call in found}) == 2 and {len(call["id"]) for call in found} == {9}
    assert split_as_it_grows(calls, ids) == (content, found)
    assert split(reader(tokenizer, name, parallel=False), ids) == (content, found[:1])
    early = [split(calls, ids[:length], ended=False) for length in range(len(ids))]
    assert any(len(found) == 1 for _, found in early)  # the first call does not wait for the second
    assert all(mark not in shown for shown, _ in early for mark in ("<t", "[", "<\uff5c", "{"))


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("  It is <3.\n", "  It is <3.\n", 0),
        ("<tool_call>oh</tool_call> \n", "<tool_call>oh</tool_call> \n", 0),
        (f"<tool_call>oh\n<tool_call>{OBJECT}</tool_call>", "<tool_call>oh", 1),
        (f"a <tool_call>{OBJECT}</tool_call> b\n<tool_call>{OBJECT}</tool_call>\n", "a b", 2),
        (f"<think><tool_call>{OBJECT}</tool_call></think>\nb", f"<think><tool_call>{OBJECT}</tool_call></think>\nb", 0),
        (f"<tool_call>{OBJECT}", "", 1),
        (f"<tool_call>{OBJECT[:-1]}", f"<tool_call>{OBJECT[:-1]}", 0),
    ],
)
def test_what_is_no_call_stays_in_the_content(text: str, content: str, num_calls: int) -> None:
    tokenizer = tokenizer_of([text], [])
    for result in (
        split(reader(tokenizer, "hermes"), encode(tokenizer, text)),
        split_as_it_grows(reader(tokenizer, "hermes"), encode(tokenizer, text)),
    ):
        assert (result[0], len(result[1])) == (content, num_calls)


def test_calls_without_a_mark_and_json_that_is_none() -> None:
    for text, content, num_calls in (
        (f"\n{LLAMA}", "", 1),
        (f"{LLAMA}; {LLAMA[:-1]}", f"; {LLAMA[:-1]}", 1),
        ('{"name": "Ada"}', '{"name": "Ada"}', 0),
    ):
        tokenizer = tokenizer_of([text], [])
        calls, ids = reader(tokenizer, "llama3_json"), encode(tokenizer, text)
        shown, found = split_as_it_grows(calls, ids)
        assert (shown, len(found)) == (content, num_calls)
        assert all(split(calls, ids[:length], ended=False)[0] == "" for length in range(len(ids)))


def test_calls_inside_separated_reasoning_are_none() -> None:
    text = f"<reason><tool_call>{OBJECT}</tool_call></reason>"
    tokenizer = tokenizer_of([text], [])
    ids = encode(tokenizer, text)
    assert len(split(reader(tokenizer, "hermes"), ids)[1]) == 1
    assert split(reader(tokenizer, "hermes", thoughts=("<reason>", "</reason>")), ids) == (text, [])
    inside = encode(tokenizer, text.removeprefix("<reason>"))
    opened = reader(tokenizer, "hermes", thoughts=("<reason>", "</reason>"), prompt="<|assistant|><reason>\n")
    assert split(opened, inside)[1] == []


def test_special_tokens_are_hidden_and_spelled_ones_are_text() -> None:
    tokenizer = tokenizer_of(["<|x|>abf[TOOL_CALLS]", J], ["<|x|>", "[TOOL_CALLS]"])
    special, mark = tokenizer.convert_tokens_to_ids(["<|x|>", "[TOOL_CALLS]"])
    spell = lambda text: [tokenizer.convert_tokens_to_ids(character) for character in text]  # noqa: E731
    ids = [special, *spell("a<|x|>[TOOL_CALLS]"), special, mark, *spell(f"f{J}"), special]
    places = added_places(tokenizer, ids)
    text = decode(tokenizer, [ids], skip_special_tokens=False)[0]
    assert [text[begin:end] for _, begin, end in places] == ["<|x|>", "<|x|>", "[TOOL_CALLS]", "<|x|>"]
    content, found = split(reader(tokenizer, "mistral"), ids)
    assert content == "a<|x|>[TOOL_CALLS]" and len(found) == 1
    assert split(reader(tokenizer, "mistral", hides_special=False), ids)[0] == "<|x|>a<|x|>[TOOL_CALLS]<|x|><|x|>"


def test_half_a_character_in_an_argument_is_escaped() -> None:
    text = '<tool_call>{"name": "f\\ud800", "arguments": {"s": "\\ud800", "t": "\u00e9"}}'
    tokenizer = tokenizer_of([text], [])
    ((call,),) = [split(reader(tokenizer, "hermes"), encode(tokenizer, text))[1]]
    json.dumps(call, ensure_ascii=False).encode()
    assert call["function"]["name"] == "f?" and json.loads(call["function"]["arguments"])["s"] == "\ud800"


@pytest.mark.parametrize("name", ["qwen2style-1024", "dolma2"])
def test_a_real_tokenizer_whose_tokens_cross_the_marks(name: str) -> None:
    if not (path := SHARED / "tokenizers" / name).is_dir():
        pytest.skip(f"{path} is absent")
    tokenizer = load_tokenizer(path)
    text = f"Gr\u00fc\u00dfe \u4e2d\u6587:\n{TURNS['hermes']}"
    calls, ids = reader(tokenizer, "hermes"), encode(tokenizer, text)
    content, found = split(calls, [*ids, tokenizer.eos_token_id])
    assert content == "Gr\u00fc\u00dfe \u4e2d\u6587:\nHm <b>." and len(found) == 2
    sent = ""
    for length in range(len(ids)):
        text = decode(tokenizer, [ids[:length]], skip_special_tokens=False)[0].rstrip("\ufffd")
        shown, _ = calls.split(ids[:length], text, ended=False)
        assert shown.startswith(sent) and content.startswith(shown)
        sent = shown
    assert sent == content


def test_forced_calls_come_one_by_one() -> None:
    """A text in an argument with the marks of JSON ends no call; what was cut off stays text if there is no call before it."""
    parameters = [{"s": 'a}, {"\\"', "n": 1}, {}]
    text = json.dumps([{"name": "f", "parameters": each} for each in parameters])
    reader = ForcedCalls("prompt")
    calls: list[Any] = []
    for length in range(len(text) + 1):
        content, grown = reader.split([], text[:length], ended=False)
        assert content == "" and grown[: len(calls)] == calls
        calls = grown
    assert [json.loads(call["function"]["arguments"]) for call in calls] == parameters
    assert calls[0]["id"] != calls[1]["id"] and reader.split([], text, ended=True) == ("", calls)
    assert reader.split([], text[:-5], ended=True) == ("", calls[:1])
    assert reader.split([], text[:20], ended=True) == (text[:20], [])
