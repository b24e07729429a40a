"""OpenAI's requests and answers, without a model: what a request asks for, and what an answer says of tokens."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest

from rlhf_spmd.agents.http import read_body
from rlhf_spmd.data.messages import check_messages
from rlhf_spmd.data.tokenizer import byte_alphabet, token_bytes
from rlhf_spmd.inference.openai_forms import (
    Dialect,
    TextDelta,
    TextOffsets,
    choice_of,
    prompts_of,
    read_request,
    with_sampling_fields,
)
from rlhf_spmd.inference.sampling_params import Logprob
from rlhf_spmd.inference.structured_outputs import StructuredOutputsParams


def tokenizer_of(pieces: list[str], decoder: Any = None) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_the_bytes_of_a_token_are_those_of_the_vocabulary() -> None:
    """Of byte-level vocabularies and of SentencePiece's; None where the vocabulary does not tell them."""
    from tokenizers import decoders, pre_tokenizers

    assert byte_alphabet().keys() == set(pre_tokenizers.ByteLevel.alphabet())
    characters = {byte: character for character, byte in byte_alphabet().items()}
    words = " \u00e9".encode(), "x\u20ac".encode()[:2]
    tokenizer = tokenizer_of(["".join(characters[byte] for byte in word) for word in words], decoders.ByteLevel())
    texts = [tokenizer.decode([token]) for token in (0, 1)]
    assert texts == [" \u00e9", "x\ufffd"]
    assert [token_bytes(tokenizer, token, text) for token, text in enumerate(texts)] == [[*word] for word in words]
    tokenizer = tokenizer_of(["<0xE2>", "\u4e2d\ufffd"])
    assert [token_bytes(tokenizer, token, "\ufffd") for token in (0, 1)] == [[0xE2], None]


def test_offsets_are_those_of_characters_however_the_tokens_come() -> None:
    pieces = [b"a", "\u20ac".encode()[:1], "\u20ac".encode()[1:], b" bc", b"", b"d"]

    def decode(ids: Any) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    offsets = TextOffsets(decode).add(range(6))
    assert offsets == [0, 1, 1, 2, 5, 5]
    for cut in range(6):
        in_parts = TextOffsets(decode, 7)  # after a text
        assert [*in_parts.add(range(cut)), *in_parts.add(range(cut, 6))] == [7 + offset for offset in offsets]
    assert TextOffsets(decode).add([2] * 9) == [0, 0, 0, 0, 8, 8, 8, 8, 16]  # never a character: a mark for each byte


def test_log_probs_in_openai_s_form() -> None:
    entry = {5: Logprob(-2.0, None, "x"), 6: Logprob(-0.5, 1, "y"), 7: Logprob(-inf, 2, "z")}
    delta = TextDelta("ax", [{4: Logprob(nan, None, "a")}, entry], [0, 1], "length")
    choice = choice_of(3, delta, "completion", lambda token, text: [*text.encode()])
    log_probs = {
        "tokens": ["a", "x"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"x": -2.0, "y": -0.5, "z": -9999.0}],
        "text_offset": [0, 1],
    }
    assert choice == {"index": 3, "text": "ax", "finish_reason": "length", "stop_reason": None, "logprobs": log_probs}
    # two tokens with one text: a client sees that 5 was not the likeliest
    same_text = {5: Logprob(-2.0, None, "y"), 6: Logprob(-0.5, 1, "y")}
    assert choice_of(0, TextDelta("y", [same_text], [0]), "completion", lambda *_: None)["logprobs"]["top_logprobs"] == [
        {"y": -0.5}
    ]
    (content,) = choice_of(0, TextDelta("x", [entry]), "chat", lambda token, text: [token], "later")["logprobs"]["content"]
    best = [{"token": "y", "logprob": -0.5, "bytes": [6]}, {"token": "z", "logprob": -9999.0, "bytes": [7]}]
    assert content == {"token": "x", "logprob": -2.0, "bytes": [5], "top_logprobs": best}


TOOL = '{"type": "function", "function": {"name": "f"}}'


@pytest.mark.parametrize(
    ("dialect", "raw", "message"),
    [
        ("chat", '{"tools": [{}]}', "tools[0] must be {'type': 'function'"),
        ("chat", '{"tool_choice": "required"}', "tool_choice='required': tools has none"),
        (
            "chat",
            '{"tool_choice": "any", "tools": []}',
            "tool_choice='any' is not known; allowed: 'auto', 'none', 'required', {'type'",
        ),
        ("chat", '{"reasoning_effort": 3}', "reasoning_effort=3 must be text or null"),
        ("completion", '{"reasoning_effort": "low"}', "reasoning_effort is for /v1/chat/completions"),
        ("completion", '{"top_logprobs": 1}', "unknown key 'top_logprobs'"),
        ("chat", '{"response_format": {"type": "xml"}}', "response_format.type='xml' is not known; allowed: text, json_object"),
        (
            "chat",
            '{"response_format": {"type": "json_schema"}}',
            "response_format.type=json_schema: json_schema is for type json",
        ),
        (
            "chat",
            '{"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}',
            "'response_format.json_schema.schema' (a mapping, each value any value) must be given",
        ),
        ("completion", '{"guided_regex": "a", "guided_json": {}}', "guided_json, guided_regex: a response follows one of them"),
        ("completion", '{"guided_choice": "a"}', "structured_outputs.choice='a' must be a list, each entry text"),
        (
            "chat",
            '{"tool_choice": {"type": "function", "function": {"name": "f"}}}',
            "tool_choice={'type': 'function', 'function': {'name': 'f'}}: tools has none",
        ),
        (
            "chat",
            f'{{"tools": [{TOOL}], "tool_choice": {{"type": "function", "function": {{"name": "g"}}}}}}',
            "tool_choice={'type': 'function', 'function': {'name': 'g'}}: tools has no such function",
        ),
        (
            "chat",
            f'{{"tools": [{TOOL}], "tool_choice": "required", "guided_regex": "a"}}',
            "guided_regex, tool_choice: a response follows one of them",
        ),
        ("completion", f'{{"tools": [{TOOL}]}}', "tools are for /v1/chat/completions"),
        ("chat", '{"priority": 1}', "priority is not supported yet"),
        ("generate", '{"token_ids": [1], "prompt": "a"}', "unknown key 'prompt'"),
        (
            "generate",
            '{"token_ids": [1], "sampling_params": {"max_token": 1}}',
            "unknown key 'sampling_params.max_token'; did you",
        ),
        ("generate", '{"token_ids": [1], "sampling_params": {"stream": true}}', "unknown key 'sampling_params.stream'"),
        ("generate", '{"token_ids": [1], "sampling_params": [1]}', "sampling_params must be an object"),
        ("generate", '{"token_ids": "abc"}', "token_ids must be a non-empty list of token ids"),
        ("generate", "{}", "token_ids must be a non-empty list of token ids"),
        ("completion", '{"suffix": "b"}', "suffix is not supported yet"),
        ("completion", '{"logits_processors": []}', "unknown key 'logits_processors'"),
        ("completion", '{"prompt_logprobs": 1}', "unknown key 'prompt_logprobs'"),
        ("completion", '{"temprature": 1}', "unknown key 'temprature'; did you mean 'temperature'?"),
        ("completion", '{"stream_options": {"usage": true}}', "unknown key 'stream_options.usage'"),
        ("completion", '{"stream": "yes"}', "stream='yes' must be true or false"),
        ("completion", '{"max_tokens": "many"}', "max_tokens='many' must be an integer or null"),
        ("completion", '{"max_tokens": 0}', "max_tokens=0 is for echo=true"),
        ("completion", '{"stop": [1]}', "stop[0]=1 must be text"),
        ("chat", '{"chat_template_kwargs": 5}', "chat_template_kwargs=5 must be a mapping"),
        ("completion", '{"chat_template_kwargs": {"x": 1}}', "chat_template_kwargs are for /v1/chat"),
        ("chat", '{"echo": true}', "echo=true is for /v1/completions"),
        ("chat", '{"messages": "abc"}', "messages must be a list of objects"),
        ("chat", '{"messages": [5]}', "message 0 must be an object with 'role' and 'content'"),
        (
            "chat",
            '{"messages": [{"role": "user", "content": "a"}, [6]]}',
            "message 1 must be an object with 'role' and 'content'",
        ),
        ("completion", "[]", "a request is a JSON object"),
        ("completion", '{"extra_body": {"temprature": 1}}', "unknown key 'temprature'; did you mean 'temperature'?"),
        ("completion", '{"extra_body": [1]}', "extra_body must be an object"),
        ("completion", "[" * 100_000, "a request's JSON is at most 100 values deep"),
        ("completion", '{"metadata": ' + "[" * 200 + "]" * 200 + "}", "a request's JSON is at most 100"),
        ("completion", '{"prompt": "\\ud800"}', "'utf-8' codec can't encode character"),
    ],
)
def test_what_cannot_be_asked_is_one_line(dialect: Dialect, raw: str, message: str) -> None:
    def read() -> None:
        body = read_body(raw.encode())
        body = with_sampling_fields(body) if dialect == "generate" else body
        read_request(body, dialect)
        prompts_of(body, dialect)

    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refusal:
        read()
    assert str(refusal.value).startswith(message)


def test_messages_of_a_request_are_those_of_data() -> None:
    """Text parts are joined, and calls need no content."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    for said in ({"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "tool_calls": [call]}):
        (prompt,) = prompts_of({"messages": [asked, said]}, "chat")
        user, assistant = check_messages(prompt)
        assert user["content"] == "ab" and assistant["content"] == ""
        assert assistant["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    for name in ("reasoning", "reasoning_content", "thinking"):
        (prompt,) = prompts_of({"messages": [asked, {"role": "assistant", "content": "b", name: "a"}]}, "chat")
        assert prompt[0] == asked and prompt[1] | {"reasoning": "a", "reasoning_content": "a"} == prompt[1]
    with pytest.raises(ValueError, match="the content of message 0 must be text, not NoneType"):
        check_messages(prompts_of({"messages": [{"role": "user"}]}, "chat")[0])


@pytest.mark.parametrize(
    ("asked", "structured_outputs"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": {"not": False}},
                }
            },
            {"json": {"not": False}},
        ),
        ({"response_format": {"type": "text"}, "guided_json": "{}"}, {"json": "{}"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"', "guided_json": None}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": {}}}, {"json": {}}),
    ],
)
def test_all_names_of_structured_outputs_are_one(asked: dict[str, Any], structured_outputs: dict[str, Any]) -> None:
    for dialect in ("chat", "completion"):
        assert read_request(asked, dialect)[1].structured_outputs == StructuredOutputsParams(**structured_outputs)


def test_what_a_request_asks_for() -> None:
    nothing = {"tools": [], "tool_choice": "auto", "suffix": None, "best_of": 1, "response_format": {"type": "text"}}
    nothing |= {"parallel_tool_calls": True, "stream": False, "verbosity": "medium", "prompt_cache_key": "a"}
    assert read_request(nothing, "chat") == read_request({}, "chat") and read_request({}, "chat")[1].max_tokens is None
    form, params = read_request({"echo": True, "max_tokens": 0, "logprobs": 3}, "completion")
    assert form.echo and (form.generates, params.logprobs, params.prompt_logprobs) == (False, 3, 3)
    form, params = read_request({"logprobs": True, "stream": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat")
    assert (params.logprobs, params.prompt_logprobs, form.variables) == (0, None, {"enable_thinking": False})
    assert read_request({"reasoning_effort": "low"}, "chat")[0].variables == {"reasoning_effort": "low"}


def test_a_call_that_must_come_follows_the_schemas_of_its_tools() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": point}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}, json.loads(TOOL.replace('"f"', '"g"'))]
    body = {"tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}}

    def schema_of(**options: Any) -> dict[str, Any]:
        structured = read_request(body | options, "chat")[1].structured_outputs
        assert structured is not None and isinstance(structured.json, dict)
        return structured.json

    schema = schema_of()
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["name"] for call in calls] == [{"const": "f"}, {"const": "g"}] and "maxItems" not in schema
    assert calls[0]["properties"]["parameters"] == {key: parameters[key] for key in ("type", "properties")}
    assert schema["$defs"] == {"Point": point} and parameters["$defs"] == {"Point": point}
    assert schema_of(parallel_tool_calls=False)["maxItems"] == 1
    named = schema_of(tool_choice={"type": "function", "function": {"name": "g"}})
    assert [call["properties"]["name"] for call in named["items"]["anyOf"]] == [{"const": "g"}] and named["maxItems"] == 1
    tools[1]["function"]["parameters"] = {"$defs": {"Point": {}}}
    with pytest.raises(ValueError, match="functions define \\$defs/Point differently"):
        schema_of()
