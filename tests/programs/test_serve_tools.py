"""Calls of tools and token ids from ``serve``: over HTTP, in streams, and with the client of the ``openai`` package."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.endpoint import AccessRules, Endpoint
from serving import arrive, ask, choices_of, program, service_of, turn_until_idle
from tool_models import ANSWER, CALL, END, PIECES, TEXT, THINK, THOUGHT, TOOL, forced, write_tool_model

TALK: list[dict[str, Any]] = [{"role": "user", "content": "2 and 3?"}]
ASKED: dict[str, Any] = {"messages": TALK, "tools": [TOOL], "ignore_eos": False}
FUNCTION = {"name": "add", "arguments": '{"a": 2, "b": "3"}'}
# the Python of an environment with the package openai, by default this one if it has it
CLIENT = os.environ.get("OPENAI_CLIENT_PYTHON") or (importlib.util.find_spec("openai") and sys.executable)


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "llama"
    write_tool_model(path)
    return path


@pytest.fixture(scope="module")
def address(tool_model: Path) -> Iterator[str]:
    with program(tool_model, "served_model_name=small") as url:
        yield url


@pytest.fixture
def service(tool_model: Path, monkeypatch: pytest.MonkeyPatch) -> services.Service:
    return service_of(tool_model, monkeypatch)


def text_of(ids: list[int]) -> str:
    return "".join(PIECES[token - 98] if token >= 98 else chr(token + 29) for token in ids)


# -- the program on two ranks


def test_a_call_and_the_answer_to_its_result(address: str) -> None:
    body = {**ASKED, "return_token_ids": True, "logprobs": True, **forced(TEXT, *CALL, END)}
    status, answer = ask(address, "/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    message = choice["message"]
    ((call,),) = [message["tool_calls"]]
    assert (message["content"], call["type"], call["function"]) == ("Let me see.", "function", FUNCTION)
    assert choice["finish_reason"] == "tool_calls" and choice["token_ids"] == [TEXT, *CALL, END]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [*(PIECES[token - 98] for token in (TEXT, *CALL)), "</s>"]
    prompt = f"<|tools|>{json.dumps([TOOL])}<|user|>2 and 3?<|assistant|>"
    assert text_of(answer["prompt_token_ids"]) == prompt

    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    body = {**ASKED, "messages": [*TALK, message, result], "return_token_ids": True, **forced(ANSWER, END)}
    status, answer = ask(address, "/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "So: 5."} and choice["finish_reason"] == "stop"
    written = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "3"}}</tool_call>'
    assert text_of(answer["prompt_token_ids"]) == f"{prompt}Let me see.{written}<|tool|>5<|assistant|>"


SCRIPT = """
import json, sys
import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
asked = json.loads(sys.argv[2])
extra = {"return_token_ids": True}
answer = client.chat.completions.create(model="small", extra_body=extra, **asked)
with client.chat.completions.stream(model="small", **asked) as stream:
    for event in stream:
        pass
    streamed = stream.get_final_completion()
message = answer.choices[0].message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
messages = [*asked["messages"], message, result]
second = client.chat.completions.create(model="small", messages=messages, tools=asked["tools"], max_tokens=3)
chosen = [completion.choices[0] for completion in (answer, streamed)]
names = [choice.message.tool_calls[0].function.to_dict() for choice in chosen]
ids = [choice.message.tool_calls[0].id for choice in chosen]
print(json.dumps([names, ids, [choice.finish_reason for choice in chosen], chosen[0].token_ids, second.usage.completion_tokens]))
"""


def test_the_client_of_openai_calls_a_tool(address: str) -> None:
    if not CLIENT:
        pytest.skip("the package openai is absent, and OPENAI_CLIENT_PYTHON names no Python that has it")
    asked = {"messages": TALK, "tools": [TOOL], **forced(TEXT, *CALL, END)}
    command = [CLIENT, "-c", SCRIPT, address, json.dumps(asked)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    names, ids, reasons, token_ids, num_second = json.loads(run.stdout)
    assert [{key: name[key] for key in FUNCTION} for name in names] == [FUNCTION] * 2 and ids[0] == ids[1]
    assert reasons == ["tool_calls"] * 2 and token_ids == [TEXT, *CALL, END] and 1 <= num_second <= 3


# what openai-agents 0.24 sends with its default settings, with sampling that forces the answer
AGENT_TOOL = {
    "name": "add",
    "parameters": {
        "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "string"}},
        "required": ["a", "b"],
        "title": "add_args",
        "type": "object",
        "additionalProperties": False,
    },
    "strict": True,
    "type": "function",
    "description": "Adds two numbers.",
}
AGENT: dict[str, Any] = {"model": "small", "include": [], "instructions": "Use tools.", "tools": [AGENT_TOOL]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_call_a_tool_and_take_its_result(address: str, stream: bool) -> None:
    talk: list[dict[str, Any]] = [{"content": "2 and 3?", "role": "user"}]
    response = responded(address, {**AGENT, "input": talk, **forced(TEXT, *CALL, END)}, stream)
    said, call = response["output"]
    assert said["content"][0]["text"] == "Let me see." and response["usage"]["output_tokens"] == len((TEXT, *CALL, END))
    assert {key: call[key] for key in FUNCTION} == FUNCTION and response["status"] == "completed"
    output = {"call_id": call["call_id"], "output": "5", "type": "function_call_output"}
    body = {**AGENT, "input": [*talk, said, call, output], **forced(ANSWER, END)}
    response = responded(address, body, stream)
    assert [part["text"] for item in response["output"] for part in item["content"]] == ["So: 5."]


def responded(address: str, body: dict[str, Any], stream: bool) -> Any:
    """The response, of a stream from its last event."""
    if not stream:
        status, response = ask(address, "/responses", body)
        assert status == 200, response
        return response
    raw = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/responses", raw), timeout=60) as answer:
        events = answer.read().decode().strip().split("\n\n")
    kind, data = events[-1].split("\n")
    assert kind == "event: response.completed"
    return json.loads(data.removeprefix("data: "))["response"]


def test_responses_that_cannot_be_are_refused(address: str) -> None:
    status, error = ask(address, "/responses", {"input": "hi", "previous_response_id": "resp_1", "stream": True})
    assert status == 400 and "responses are not kept" in error["message"]
    status, error = ask(address, "/responses", {"input": "hi", "temperature": -1})
    assert status == 400 and "temperature" in error["message"]


def test_messages_of_anthropic_are_chats(address: str) -> None:
    """Whole and streamed; greedy, so both have the same text."""
    body = {"model": "small", "messages": [{"role": "user", "content": "2 and 3?"}], "max_tokens": 6, "temperature": 0}
    status, message = ask(address, "/messages", {**body, "system": "Add."})
    messages = [{"role": "system", "content": "Add."}, *body["messages"]]
    _, chat = ask(address, "/chat/completions", {**body, "messages": messages})
    assert status == 200 and "".join(block["text"] for block in message["content"]) == chat["choices"][0]["message"]["content"]
    usage = message["usage"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    raw = json.dumps({**body, "system": "Add.", "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}/messages", raw), timeout=60) as answer:
        events = [json.loads(event.split("data: ")[1]) for event in answer.read().decode().strip().split("\n\n")]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == chat["choices"][0]["message"]["content"] and events[-1] == {"type": "message_stop"}
    assert ask(address, "/messages", {**body, "tools": [{"type": "web_search_20250305", "name": "x"}]})[0] == 400


RESPONSES_SCRIPT = """
import json, sys
import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
body = json.loads(sys.argv[2])
body.pop("include")
known = {key: body.pop(key) for key in ("model", "instructions", "tools", "input", "temperature")}
answer = client.responses.create(extra_body=body, **known)
with client.responses.stream(extra_body=body, **known) as stream:
    for event in stream:
        pass
    streamed = stream.get_final_response()
print(json.dumps([[response.output_text, response.output[-1].arguments] for response in (answer, streamed)]))
"""


def test_the_client_of_openai_asks_for_responses(address: str) -> None:
    if not CLIENT:
        pytest.skip("the package openai is absent, and OPENAI_CLIENT_PYTHON names no Python that has it")
    asked = {**AGENT, "input": "2 and 3?", **forced(TEXT, *CALL, END)}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [CLIENT, "-c", RESPONSES_SCRIPT, address, json.dumps(asked)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [["Let me see.", FUNCTION["arguments"]]] * 2


def test_the_client_of_trl_gets_what_it_reads(address: str) -> None:
    """The bodies of ``generate`` and ``chat`` in server mode, as of TRL 1.16. Choices come prompt by prompt; names are ids."""
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4}
    ids = {"model": "small", "return_token_ids": True, "return_tokens_as_token_ids": True}
    prompts = [[5, 6, 7], [8]]
    status, answer = ask(address, "/completions", {**ids, "prompt": prompts, **sampling, "logprobs": 0})
    assert status == 200, answer
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    for choice in answer["choices"]:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    chat = {**sampling, "logprobs": True, "top_logprobs": 0, **ids, "tools": [TOOL], "tool_choice": "none"}
    status, answer = ask(address, "/chat/completions", {**chat, "messages": TALK})
    assert status == 200 and text_of(answer["prompt_token_ids"]).startswith("<|tools|>"), answer
    for choice in answer["choices"]:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]


def test_token_ids_in_and_out(address: str) -> None:
    """Equal to what a completion says of the same prompt."""
    url = address.removesuffix("/v1")
    asked = {"prompt": [[5, 6, 7], [8]], "temperature": 0, "max_tokens": 4, "logprobs": 2, "return_token_ids": True}
    _, completion = ask(address, "/completions", asked)
    choices = completion["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == asked["prompt"] and "prompt_token_ids" not in completion
    params = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "n": 1}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "request_id": "mine", "cache_salt": "x", "priority": 0}
    status, answer = ask(url, "/inference/v1/generate", {**body, "features": None})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert answer.keys() == {"request_id", "choices", "usage"} and answer["request_id"] == "mine"
    assert choice.keys() == {"index", "token_ids", "logprobs", "finish_reason"} and choice["finish_reason"] == "length"
    assert choice["token_ids"] == choices[0]["token_ids"] and len(choice["token_ids"]) == 4
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["logprob"] for entry in content] == choices[0]["logprobs"]["token_logprobs"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    streamed = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/inference/v1/generate", streamed), timeout=60) as response:
        *events, end, _ = response.read().decode().split("\n\n")
    *parts, last_part = [json.loads(event.removeprefix("data: ")) for event in events]
    assert end == "data: [DONE]" and last_part["usage"]["completion_tokens"] == 4
    assert [token for part in parts for token in part["choices"][0]["token_ids"]] == choice["token_ids"]
    assert [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]] == content
    _, answer = ask(url, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"ignore_eos": True}})
    assert answer["usage"]["total_tokens"] == 1024  # what the context leaves
    status, answer = ask(url, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"bad_words": ["a"]}})
    assert (status, answer["message"]) == (400, "unknown key 'sampling_params.bad_words'")


# what proxies of training send, byte for byte but for the model's name
PROXIES = {
    "rllm-model-gateway 0.1.0": b'{"model": "small", "messages": [{"role": "user", "content": "2 and 3?"}], "max_tokens": 5, '
    b'"logprobs": true, "extra_body": {"return_token_ids": true}, "return_token_ids": true}',
    "openenv 0.10.0": b'{"model":"small","messages":[{"role":"user","content":"2 and 3?"},{"role":"assistant","content":"5",'
    b'"reasoning":"a"},{"role":"user","content":"2 and 3?"}],"max_tokens":8,"temperature":0.7,"top_k":-1,"top_p":1.0,"min_p":0.0,'
    b'"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logprobs":true,"return_token_ids":true,'
    b'"top_logprobs":0}',
}


@pytest.mark.parametrize("proxy", PROXIES)
def test_proxies_that_capture_tokens_get_them(address: str, proxy: str) -> None:
    status, answer = ask(address, "/chat/completions", PROXIES[proxy])
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert text_of(answer["prompt_token_ids"]).endswith("<|user|>2 and 3?<|assistant|>")
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


def test_generate_as_renderers_asks(address: str) -> None:
    """Version 0.1.12, with which verifiers trains; TRL 1.16 asks for completions in the same way."""
    params = {"max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "stop_token_ids": [END], "logprobs": 1}
    asked = {"model": "small", "token_ids": [5, 6], "sampling_params": {**params, "skip_special_tokens": False}}
    status, answer = ask(address.removesuffix("/v1"), "/inference/v1/generate", {**asked, "cache_salt": "1", "priority": 0})
    assert status == 200 and len(answer["choices"][0]["logprobs"]["content"]) == len(answer["choices"][0]["token_ids"]) > 0
    trl = {
        "model": "small",
        "seed": 2**63 - 1,
        "prompt": [5, 6],
        "max_tokens": 8,
        "temperature": 0.7,
        "n": 1,
        "return_token_ids": True,
    }
    status, answer = ask(address, "/completions", {**trl, "logprobs": 0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0})
    assert (
        status == 200 and len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(answer["choices"][0]["token_ids"]) > 0
    )


# -- the service in this process


def deltas_of(service: services.Service, **body: Any) -> list[dict[str, Any]]:
    return [choice["delta"] | {"token_ids": choice["token_ids"]} for choice in choices_of(service, "chat", **body)]


def test_a_stream_brings_calls_whole_and_no_beginning_of_a_mark(service: services.Service) -> None:
    body = {**ASKED, "return_token_ids": True, **forced(TEXT, *CALL, END)}
    (whole,) = choices_of(service, "chat", **body)
    parts = choices_of(service, "chat", stream=True, **body)
    assert [part["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), "tool_calls"] and len(parts) == 6
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"] == [TEXT, *CALL, END]
    deltas = [part["delta"] for part in parts]
    assert "".join(delta["content"] or "" for delta in deltas) == whole["message"]["content"] == "Let me see."
    ((call,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert call.pop("index") == 0 and [call] == whole["message"]["tool_calls"]
    spelled = [5 + i for i in range(3)]  # characters: neither a call nor its beginning
    for shown in ({"tool_choice": "none"}, {"tools": []}):
        (choice,) = choices_of(service, "chat", **{**body, **shown})
        text = text_of([TEXT, *CALL])
        assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"
    (choice,) = choices_of(service, "chat", **{**body, **forced(*spelled, END)})
    assert choice["message"] == {"role": "assistant", "content": text_of(spelled)} and choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_stays_in_the_content(service: services.Service) -> None:
    body = {**ASKED, "max_tokens": 3, **forced(TEXT, *CALL, END)}
    (whole,) = choices_of(service, "chat", **body)
    text = text_of([TEXT, *CALL[:2]])
    assert whole["message"] == {"role": "assistant", "content": text} and whole["finish_reason"] == "length"
    parts = choices_of(service, "chat", stream=True, **body)
    assert "".join(part["delta"]["content"] for part in parts) == text
    assert [part["delta"]["content"] for part in parts[:-1]] == ["Let me see.", ""]


def test_reasoning_is_separated_and_has_no_calls(service: services.Service) -> None:
    service.reasoning_tags = ["<think>", "</think>"]
    body = {**ASKED, **forced(THINK, TEXT, THOUGHT, *CALL, END)}
    for stream in (False, True):
        choices = choices_of(service, "chat", stream=stream, **body)
        messages = [choice["delta" if stream else "message"] for choice in choices]
        assert "".join(message["reasoning_content"] or "" for message in messages) == "Let me see. "
        assert "".join(message["content"] or "" for message in messages) == ""
        assert [call["function"] for message in messages for call in message.get("tool_calls", ())] == [FUNCTION]
    (choice,) = choices_of(service, "chat", **{**ASKED, **forced(THINK, *CALL, THOUGHT, ANSWER, END)})
    thoughts = text_of([*CALL])
    assert choice["message"] == {"role": "assistant", "reasoning_content": thoughts, "content": "So: 5."}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_come(service: services.Service, stream: bool) -> None:
    """Also where the prompt begins reasoning that no token ends: the call is none of it, nor is a choice that was asked for."""
    pytest.importorskip("llguidance")
    service.reasoning_tags = ["<think>", "</thought>"]
    service.variables = {"thinks": True}
    service.processor.tokenizer.chat_template += "{% if thinks and add_generation_prompt %}<think>{% endif %}"
    named = {"type": "function", "function": {"name": "add"}}
    body = {"messages": TALK, "tools": [TOOL], "ignore_eos": False, "temperature": 1, "seed": 3, "max_tokens": 900}
    for choice in ("required", named):
        choices = choices_of(service, "chat", stream=stream, tool_choice=choice, **body)
        messages = [each["delta" if stream else "message"] for each in choices]
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        assert choices[-1]["finish_reason"] == "tool_calls" and (len(calls) == 1 if choice is named else calls)
        assert {call["function"]["name"] for call in calls} == {"add"}
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert type(arguments.get("a", 0)) is int and type(arguments.get("b", "")) is str
        assert not any(message["content"] or message["reasoning_content"] for message in messages)
    choices = choices_of(service, "chat", stream=stream, guided_choice=["yes", "no"], **body)
    assert "".join(each["delta" if stream else "message"]["content"] for each in choices) in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
def test_what_must_come_begins_behind_the_reasoning(service: services.Service, stream: bool) -> None:
    """Where the prompt begins it. What looks like a call in it is none."""
    pytest.importorskip("llguidance")
    service.reasoning_tags = ["<think>", "</think>"]
    service.variables = {"thinks": True}
    service.processor.tokenizer.chat_template += "{% if thinks and add_generation_prompt %}<think>{% endif %}"
    body = {"messages": TALK, "ignore_eos": False, "max_tokens": 900, **forced(TEXT, *CALL, THOUGHT)}
    for fields in (
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"guided_choice": ["yes", "no"]},
    ):
        choices = choices_of(service, "chat", stream=stream, **body, **fields)
        messages = [each["delta" if stream else "message"] for each in choices]
        assert "".join(message["reasoning_content"] or "" for message in messages) == text_of([TEXT, *CALL])
        content = "".join(message["content"] or "" for message in messages)
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        assert (content, calls) == ("", ["add"]) if "tools" in fields else (content in ("yes", "no") and not calls)
        assert choices[-1]["finish_reason"] == ("tool_calls" if "tools" in fields else "stop")


def test_log_probs_at_the_temperature_of_the_request(service: services.Service) -> None:
    """In a stream, too: what lies between two tokens grows with 1 / temperature; greedy decoding has temperature 1."""
    asked = {"prompt": "abc", "max_tokens": 4, "seed": 3, "logprobs": 20, "allowed_token_ids": [5, 6, 7], "temperature": 0.5}
    (raw,) = choices_of(service, **asked)
    service.output_builder.logprobs_mode = "processed_logprobs"
    (processed,) = choices_of(service, **asked)
    parts = choices_of(service, stream=True, **asked)
    assert [value for part in parts for value in part["logprobs"]["token_logprobs"]] == processed["logprobs"]["token_logprobs"]
    (again,) = choices_of(service, **{**asked, "temperature": 0})
    for temperature, choice in ((1.0, raw), (0.5, processed), (1.0, again)):
        for number, (drawn, likeliest) in enumerate(
            zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True)
        ):
            values = sorted(likeliest.values(), reverse=True)
            assert min(abs(value - drawn) for value in values) < 1e-5
            if choice is processed:
                gaps = [values[0] - value for value in values[1:20]]
                others = sorted(raw["logprobs"]["top_logprobs"][number].values(), reverse=True)
                assert gaps == pytest.approx([(others[0] - value) / temperature for value in others[1:20]], abs=1e-5)


def test_log_probs_may_name_tokens_by_their_ids(service: services.Service) -> None:
    service.names_by_id = True
    for dialect, fields in (("completion", {"prompt": "abc"}), ("chat", {"messages": TALK})):
        asked: dict[str, Any] = {**fields, "max_tokens": 3, "return_token_ids": True, "logprobs": dialect == "chat" or 1}
        (choice,) = choices_of(service, "chat" if dialect == "chat" else "completion", **asked)
        log_probs = choice["logprobs"]
        tokens = log_probs["tokens"] if dialect == "completion" else [entry["token"] for entry in log_probs["content"]]
        assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]


def test_marks_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tool_model(tmp_path, special=True)
    service = service_of(tmp_path, monkeypatch)
    service.call_format = "hermes"
    (choice,) = choices_of(service, "chat", **ASKED, **forced(TEXT, *CALL, END))
    assert choice["message"]["content"] == "Let me see." and choice["message"]["tool_calls"][0]["function"] == FUNCTION
    (choice,) = choices_of(service, "chat", **ASKED, max_tokens=3, **forced(TEXT, *CALL))
    assert choice["message"]["content"] == text_of([TEXT, CALL[1]])


def test_token_ids_of_several_prompts_and_responses(service: services.Service) -> None:
    reply = arrive(service, 0, prompt=[[5, 6], [7]], n=2, max_tokens=3, return_token_ids=True, stream=True, logprobs=0)
    service.turn()
    turn_until_idle(service)
    parts = [part[1] for part in iter(reply.get_nowait, None) if part is not None]
    assert not any("prompt_token_ids" in part for part in parts)
    for index in range(4):
        choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in choices] == [
            [[5, 6], [7]][index // 2],
            *[None] * (len(choices) - 1),
        ]
        assert all(len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) for choice in choices)
        assert sum(len(choice["token_ids"]) for choice in choices) == 3
    reply = arrive(service, 1, "chat", messages=TALK, max_tokens=2, n=2, return_token_ids=True, stream=True)
    service.turn()
    turn_until_idle(service)
    parts = [part[1] for part in iter(reply.get_nowait, None) if part is not None]
    assert ["prompt_token_ids" in part for part in parts] == [True] + [False] * (len(parts) - 1)
    assert text_of(parts[0]["prompt_token_ids"]) == "<|user|>2 and 3?<|assistant|>"


def test_prompts_with_another_salt_share_no_pages(service: services.Service) -> None:
    for number, salt in enumerate(("x", "x", "y", None)):
        arrive(service, number, prompt=[5] * 33, max_tokens=2, cache_salt=salt)
    service.turn()
    first, second, third, fourth = (row.prefix_ids for row in service.engine.generator.kept)
    assert first == second and len({*first, *third, *fourth}) == 3 * len(first)


def test_metrics_count_what_was_done(service: services.Service) -> None:
    service.name = 'sm"all'
    endpoint = Endpoint(0, AccessRules("127.0.0.1", "a key", []), service)
    try:
        arrive(service, 0, prompt=[[5, 6, 7], [8]], max_tokens=5, n=2)
        arrive(service, 1, prompt=[5], stop="never", max_tokens=1)
        service.turn()
        service.turn()

        def values() -> dict[str, float]:
            with urllib.request.urlopen(endpoint.url.removesuffix("v1") + "metrics", timeout=30) as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                lines = response.read().decode().splitlines()
            samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
            label = '{model_name="sm\\"all"'
            assert all(label in name for name, _ in samples)
            return {name.replace(label, "").removesuffix("}"): float(value) for name, value in samples}

        early = values()
        assert early["vllm:num_requests_running"] == early["vllm:num_requests_waiting"] == 1
        assert early["vllm:prompt_tokens_total"] == 5 and 4 <= early["vllm:generation_tokens_total"] < 20
        assert 0 < early["vllm:kv_cache_usage_perc"] <= 1
        turn_until_idle(service)
        late = values()
        assert late["vllm:kv_cache_usage_perc"] == 0
        assert late["vllm:num_requests_running"] == late["vllm:num_requests_waiting"] == 0
        assert late["vllm:generation_tokens_total"] == 21
        assert late['vllm:request_success_total,finished_reason="length"'] == 5
    finally:
        endpoint.close()


def test_what_tools_need_is_said(service: services.Service) -> None:
    service.processor.tokenizer.chat_template = "{{ messages[0].content }}"
    part = arrive(service, 0, "chat", **ASKED).get_nowait()
    assert part is not None and part[0] == 400
    remedy = "put a chat_template.jinja that does beside the tokenizer, or give LLM.chat its chat_template"
    assert part[1]["error"]["message"] == f"prompt 0: the chat template does not tell the model of tools; {remedy}"


def test_a_call_that_the_tokenizer_cannot_spell_is_refused(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"messages": TALK, "ignore_eos": False, "tool_choice": "required"}
    assert arrive(service, 0, "chat", **asked, tools=[TOOL]).empty()
    named = {"type": "function", "function": {"name": "add\u00e9"}}
    part = arrive(service, 1, "chat", **asked, tools=[named]).get_nowait()
    assert part is not None and part[0] == 400
    assert (
        part[1]["error"]["message"]
        == "tool_choice='required': no token of the model has the character '\u00e9', which the response needs"
    )
