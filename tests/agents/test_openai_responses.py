"""Requests for OpenAI's Responses as chats, and chats' answers as responses, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_spmd.agents.openai_responses import ResponseAnswer, chat_of

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": '{"a": 2}', "status": "completed"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
HEAD = {"id": "chatcmpl-7", "created": 5, "model": "small"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def test_a_conversation_with_a_call_is_a_chat() -> None:
    said = {"type": "message", "role": "assistant", "id": "msg", "content": [{"type": "output_text", "text": "hm"}]}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "add them"}]}
    result = {"type": "function_call_output", "call_id": "c", "output": "5"}
    user = {"role": "user", "content": [{"type": "input_text", "text": "2 "}, {"type": "input_text", "text": "and 3?"}]}
    body = {"model": "small", "instructions": "Add.", "input": [user, thought, said, CALL, result, CALL], "tools": [ADD]}
    assert chat_of(body) == {
        "model": "small",
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "2 and 3?"},
            {"role": "assistant", "content": "hm", "reasoning_content": "add them", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
            {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL]},
        ],
        "tools": [{"type": "function", "function": {key: ADD[key] for key in ("name", "description", "parameters")}}],
        "tool_choice": "auto",
    }


def test_settings_have_a_chat_s_names() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    text = {"format": schema, "verbosity": "medium"}
    choice = {"type": "function", "name": "add"}
    body = {"input": "hi", "max_output_tokens": 3, "text": text, "reasoning": {"effort": "low", "summary": "auto"}}
    harmless = {"store": False, "truncation": "disabled", "include": [], "previous_response_id": None, "metadata": {"a": "b"}}
    chat = chat_of({**body, **harmless, "tool_choice": choice, "stream": True, "top_p": 0.5})
    assert chat == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if k != "type"}},
        "verbosity": "medium",
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.5,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1' is not supported: responses are not kept"),
        ({"store": True}, "store=True is not supported: responses are not kept"),
        ({"background": True}, "background=True is not supported"),
        ({"truncation": "auto"}, "truncation='auto' is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include=.* is not supported"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] has the type 'web_search'; only 'function' is supported"),
        ({"tools": "add"}, "tools must be a list"),
        ({"messages": []}, "unknown key 'messages'"),
        ({"text": "json"}, "text must be an object"),
        ({"input": None}, "input must be text or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] has the type 'item_reference'; allowed: message"),
        ({"input": [3]}, r"input\[0\] has the type 'int'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            r"input\[0\] has a part of the type 'input_image'; only text is supported",
        ),
        ({"input": [{"role": "user"}]}, r"input\[0\]: the content must be text"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_of({"input": "hi", **fields})


def test_the_default_form_of_text_asks_for_nothing() -> None:
    assert "response_format" not in chat_of({"input": "hi", "text": {"format": {"type": "text"}}})


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


CHUNKS = [
    chunk(role="assistant", content="", reasoning_content="hm"),
    chunk(content="Let "),
    chunk(content="me."),
    chunk("tool_calls", tool_calls=[{"index": 0, **CHAT_CALL}]),
    {**HEAD, "choices": [], "usage": USAGE},
]


def test_a_stream_s_events_build_the_whole_response() -> None:
    request = {"input": "hi", "tools": [ADD], "stream": True}
    answer = ResponseAnswer(request)
    lines = [event.split("\n") for part in CHUNKS for event in answer.events(part)]
    events = [json.loads(line[1].removeprefix("data: ")) for line in lines]
    assert [line[0] for line in lines] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    added = [event for event in events if event["type"].endswith("output_item.added")]
    done = [event for event in events if event["type"].endswith("output_item.done")]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    assert all(event["item"]["status"] == "in_progress" for event in added) and added[1]["item"]["content"] == []
    response = events[-1]["response"]
    assert response["output"] == [event["item"] for event in done] and response["status"] == "completed"

    message = {"role": "assistant", "content": "Let me.", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    assert ResponseAnswer(request).whole({**HEAD, "choices": [choice], "usage": USAGE}) == response
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][2] == {**CALL, "id": "fc_7_2"} and response["usage"]["total_tokens"] == 7
    assert response["usage"]["input_tokens"] == 3 and response["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert (response["id"], response["created_at"], response["tools"]) == ("resp_7", 5, [ADD])


def test_a_response_that_no_token_goes_on_with_has_failed() -> None:
    answer = ResponseAnswer({"stream": True})
    *_, last = [event for part in (chunk("error", content='{"a'), CHUNKS[-1]) for event in answer.events(part)]
    response = json.loads(last.partition("data: ")[2])["response"]
    assert last.startswith("event: response.failed\n") and response["error"]["code"] == "server_error"
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["output"][0]["content"][0]["text"] == '{"a'


def test_a_response_that_was_cut_is_incomplete() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length"}
    response = ResponseAnswer({}).whole({**HEAD, "choices": [choice], "usage": USAGE})
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == ""


def test_an_error_in_a_stream_stays_as_it_is() -> None:
    error = {"error": {"message": "the server has ended"}}
    assert [*ResponseAnswer({}).events(error)] == [f"data: {json.dumps(error)}\n\n"]
