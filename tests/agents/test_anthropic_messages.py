"""Requests for Anthropic's Messages as chats, and chats' answers as messages, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_spmd.agents.anthropic_messages import MessageAnswer, chat_of

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 2}}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
HEAD = {"id": "chatcmpl-7", "created": 5, "model": "small"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_a_conversation_with_a_call_is_a_chat() -> None:
    thought = {"type": "thinking", "thinking": "add them", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("5")], "is_error": False}
    messages = [
        {"role": "user", "content": [text("2 "), text("and 3?")]},
        {"role": "assistant", "content": [thought, text("hm"), CALL]},
        {"role": "user", "content": [result, text("go on")]},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": [{**result, "content": "6"}]},
    ]
    body = {"model": "small", "max_tokens": 9, "system": [text("Add.")], "messages": messages, "tools": [TOOL]}
    assert chat_of({**body, "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}}) == {
        "model": "small",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "2 and 3?"},
            {"role": "assistant", "content": "hm", "reasoning_content": "add them", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "5"},
            {"role": "tool", "tool_call_id": "c", "content": "6"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ("required", False, None)),
        ({"tool_choice": {"type": "tool", "name": "add"}}, ({"type": "function", "function": {"name": "add"}}, None, None)),
        ({"stop_sequences": ["x"], "tool_choice": {"type": "none"}}, ("none", None, ["x"])),
    ],
)
def test_settings_have_a_chat_s_names(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    chat = chat_of({"messages": [{"role": "user", "content": "hi"}], **fields})
    assert tuple(chat.get(key) for key in ("tool_choice", "parallel_tool_calls", "stop")) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": []}, "unknown key 'mcp_servers'"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\] must have the role 'user' or 'assistant'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\] has the type 'image'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, r"content\[0\] has the type 'tool_use'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\] has the type 'bash_20250124'; only 'custom'"),
        ({"tools": "add"}, "tools must be a list"),
        ({"tool_choice": "any"}, "tool_choice='any' must be an object"),
        ({"system": [3]}, "system has a part of the type 'int'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_of({"messages": [{"role": "user", "content": "hi"}], **fields})


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_a_stream_s_events_build_the_whole_message() -> None:
    chunks = [
        chunk(role="assistant", content="", reasoning_content="hm"),
        chunk(content="Let "),
        chunk(content="me."),
        chunk("tool_calls", tool_calls=[{"index": 0, **CHAT_CALL}]),
        {**HEAD, "choices": [], "usage": USAGE},
    ]
    answer = MessageAnswer({})
    lines = [event.strip().split("\n") for part in chunks for event in answer.events(part)]
    events = [json.loads(line[1].removeprefix("data: ")) for line in lines]
    assert [line[0] for line in lines] == [f"event: {event['type']}" for event in events]
    assert not [*answer.end()]
    content: list[dict[str, Any]] = []
    written = ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            assert event["index"] == len(content) - 1
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                written += delta["partial_json"]
            else:
                content[-1][kind] += delta[kind]
    content[2]["input"] = json.loads(written)
    assert [event["type"] for event in events].count("content_block_stop") == 3

    message = {"role": "assistant", "content": "Let me.", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    whole = MessageAnswer({}).whole({**HEAD, "choices": [choice], "usage": USAGE})
    assert whole["content"] == content == [{"type": "thinking", "thinking": "hm", "signature": ""}, text("Let me."), CALL]
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    assert (events[-2]["delta"], events[-2]["usage"], events[-1]) == (end, whole["usage"], {"type": "message_stop"})
    assert events[0]["message"] | {"content": content, "usage": whole["usage"]} | end == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"], whole["usage"]["output_tokens"]) == (
        1,
        2,
        4,
    )


def test_why_a_message_ended() -> None:
    def stop(reason: str, **more: Any) -> tuple[str, str | None]:
        choice = {"message": {"content": "x"}, "finish_reason": reason, **more}
        message = MessageAnswer({}).whole({**HEAD, "choices": [choice], "usage": USAGE})
        return message["stop_reason"], message["stop_sequence"]

    assert stop("stop") == ("end_turn", None) and stop("length") == stop("error") == ("max_tokens", None)
    assert stop("stop", stop_reason="END") == ("stop_sequence", "END") and stop("stop", stop_reason=7) == ("end_turn", None)
    (event,) = MessageAnswer({}).events({"error": {"message": "the server has ended"}})
    assert event.startswith("event: error\n")
