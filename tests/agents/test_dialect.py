"""Between messages and tokens: an agent that uses tools goes on from what the model drew, whatever the template would write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rlhf_spmd.agents.dialect import Dialect, completion_body, read_chat_request
from rlhf_spmd.agents.forest import Draws, Forest, Turn
from rlhf_spmd.agents.forms import TRANSLATED, Form
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from tool_models import CALL, END, HEAD, OPEN, TEXT, TOOL, write_tool_model

USER = {"role": "user", "content": "2 and 3?"}
OPENAI, ANTHROPIC = TRANSLATED


@pytest.fixture(scope="module", params=[False, True], ids=["marks are text", "marks are special"])
def dialect(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dialect:
    path = tmp_path_factory.mktemp("tools") / "model"
    write_tool_model(path, special=request.param)
    return Dialect(load_tokenizer(str(path)), EncodingConfig(), (END,))


def ask(dialect: Dialect, forest: Forest, drawn: list[int], **fields: Any) -> tuple[Turn, dict[str, Any]]:
    """The turn of a request whose answer the model draws, and the message that the agent gets."""
    request = read_chat_request(fields)
    options = request.conversation_options
    parent, messages = forest.attach(request.messages, options)
    turn = forest.add(parent, messages, dialect.read_ids(parent, messages, request.options), options)
    turn.draws = Draws(drawn, [-1.0] * len(drawn), [0] * len(drawn), "stop")
    answer = dialect.answer(turn, request)
    forest.finish(turn, turn.draws, answer, options)
    return turn, answer


def test_calls_in_parallel_and_their_results(dialect: Dialect) -> None:
    forest = Forest("e")
    drawn = [TEXT, *CALL, *CALL, END]
    first, answer = ask(dialect, forest, drawn, messages=[USER], tools=[TOOL])
    assert answer["content"] == "Let me see." and len(answer["tool_calls"]) == 2
    assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [{"a": 2, "b": "3"}] * 2
    results = [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in answer["tool_calls"]]
    sent_back = json.loads(json.dumps(answer))
    second, _ = ask(dialect, forest, [TEXT, END], messages=[USER, sent_back, *results], tools=[TOOL])
    assert second.parent is first and second.ids[: len(first.ids)] == first.ids, "what was drawn is as it was drawn"
    assert len(second.messages) == 2
    _, alone = ask(dialect, forest, drawn, messages=[USER], tools=[TOOL], parallel_tool_calls=False)
    assert len(alone["tool_calls"]) == 1


def test_what_is_no_call_stays_in_the_content(dialect: Dialect) -> None:
    forest = Forest("e")
    _, broken = ask(dialect, forest, [OPEN, HEAD, END], messages=[USER], tools=[TOOL])
    assert "tool_calls" not in broken and '"name": "add"' in broken["content"]
    is_special = dialect.tokenizer.added_tokens_decoder[OPEN].special
    assert broken["content"].startswith("<tool_call>") != is_special, "special tokens are no text"
    _, plain = ask(dialect, forest, [TEXT, END], messages=[USER])
    assert plain == {"role": "assistant", "content": "Let me see. "}
    _, unread = ask(dialect, forest, [*CALL, END], messages=[USER], tools=[TOOL], tool_choice="none")
    assert "tool_calls" not in unread


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [USER], "stop": ["a"]}, "unknown key 'stop'"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs=2: must be at least 0 and at most 0"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice='required': no call can be forced"),
        (
            {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice=.*: no call can be forced",
        ),
        ({"messages": [USER], "tools": [{}]}, r"tools\[0\] must be"),
        ({"messages": [USER], "n": 0}, "n=0"),
        ({"messages": [USER], "n": 1000}, "n=1000"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens=0"),
        ({"messages": [USER], "stream": "yes"}, "stream="),
        ({"messages": []}, "empty list of messages"),
        ({}, "list of chat messages"),
        ({"messages": [USER, {"role": "assistant", "content": "so"}]}, "the last message is the assistant's"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_chat_request(fields)


def test_what_the_trainer_decides_is_counted() -> None:
    assert read_chat_request({"messages": [USER], "temperature": 0.1}).ignores
    fields = {"temperature": None, "max_completion_tokens": 3, "top_logprobs": 0, "prompt_cache_key": "a", "user": "b"}
    assert not read_chat_request({"messages": [USER], **fields}).ignores


@pytest.mark.parametrize(
    ("form", "fields", "name"),
    [
        (OPENAI, {"input": "hi", "reasoning": {"effort": "low"}}, "reasoning.effort='low'"),
        (OPENAI, {"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity='low'"),
        (OPENAI, {"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format={'type': 'json_object'}"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["x"]}, "stop_sequences=['x']"),
    ],
)
def test_a_refusal_names_the_field_that_the_client_sent(form: Form, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(name)} is not supported in training; leave it out$"):
        read_chat_request(form.chat_of(fields), form.names)


def test_usage_counts_what_every_answer_found_in_the_cache(dialect: Dialect) -> None:
    request = read_chat_request({"messages": [USER], "n": 2})
    turns = [ask(dialect, Forest("e"), [TEXT, END], messages=[USER])[0] for _ in range(2)]
    for turn, num_cached in zip(turns, (9, 4), strict=True):
        assert turn.draws is not None
        turn.draws, turn.answer = turn.draws._replace(num_cached=num_cached), {"role": "assistant", "content": ""}
    usage = completion_body("actor", "1", turns, request, range(12), dialect.tokenizer)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4} and usage["total_tokens"] == 12 + 4
