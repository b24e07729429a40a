"""``serve``: as a program that clients ask over HTTP, and as a service in this process, one step of the generator a turn."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from generate_runs import arguments, read_output, write_rows
from generate_runs import model as model  # a fixture
from generators import transformers_greedy
from rlhf_spmd import score, serve
from rlhf_spmd.agents import http as agents_http
from rlhf_spmd.agents.http import error_answer
from rlhf_spmd.data.tokenizer import decode, load_tokenizer
from rlhf_spmd.generation import Request
from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.endpoint import AccessRules, Endpoint
from rlhf_spmd.inference.openai_forms import Dialect
from rlhf_spmd.parallel.launch import Launch
from serving import KEY, arrive, arrive_raw, ask, choices_of, program, service_of, turn_until_idle

TALK = [{"role": "user", "content": "abd"}]
RENDERED_TALK = "<|user|>abd<|assistant|>"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    """Of a program on two ranks, which ends with the module."""
    with program(model, "served_model_name=small", "token_env=TEST_KEY", "generation.max_num_seqs=4", TEST_KEY=KEY) as url:
        yield url


def greedy_text(model: Path, prompt: str, limit: int, **options: Any) -> str:
    return decode(load_tokenizer(model), transformers_greedy(str(model), [ids_of(prompt)], limit, **options))[0]


def ids_of(text: str) -> list[int]:
    return [ord(character) - 29 for character in text]


# -- the program on two ranks


def test_completions_and_chats_are_answered_in_openai_s_form(address: str, model: Path) -> None:
    body = {"model": "small", "prompt": ["abc", "x y"], "n": 2, "logprobs": 2, **GREEDY}
    status, answer = ask(address, "/completions", body)
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "small"
    texts = [greedy_text(model, prompt, 12) for prompt in ("abc", "x y")]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(i, texts[i // 2]) for i in range(4)]
    log_probs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in log_probs.values()} == {12} and log_probs["text_offset"][0] == 0
    assert max(log_probs["top_logprobs"][0].values()) == log_probs["token_logprobs"][0] < 0
    del answer["usage"]["prompt_tokens_details"]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 48, "total_tokens": 54}

    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bd"}]}]
    body = {"messages": parts, "temperature": 0, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1}
    _, answer = ask(address, "/chat/completions", body)
    (choice,) = answer["choices"]
    text = greedy_text(model, RENDERED_TALK, 9)
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "length"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text
    for entry in choice["logprobs"]["content"]:
        (best,) = entry.pop("top_logprobs")
        assert best == entry and bytes(best["bytes"]).decode() == best["token"]
    _, answer = ask(address, "/chat/completions", {"messages": TALK, "temperature": 0})
    assert answer["usage"]["total_tokens"] <= 64 and answer["choices"][0]["message"]["content"].startswith(text)
    assert ask(address, "/models")[1]["data"][0]["id"] == "small"


def test_requests_that_come_together_are_each_answered_as_if_alone(address: str) -> None:
    """Also after the ranks have waited longer than an idle rank waits."""
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "temperature": 0, "max_tokens": 4 + 3 * number}
        for number, prompt in enumerate(["abc", "x y", "The quick", "zzzz", "q", "12 34"] * 2)
    ]
    for number, body in enumerate(bodies):
        body |= [{}, {"seed": number, "temperature": 1.0}, {"presence_penalty": 0.5}, {"n": 0}][number % 4]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, content = ask(address, "/completions", body)
        return status, content.get("choices")

    answers_alone = [answer(body) for body in bodies]
    time.sleep(3 * services.IDLE_S)
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(answer, bodies)) == answers_alone
    assert [status for status, _ in answers_alone] == [200, 200, 200, 400] * 3


def test_a_stream_brings_the_same_text(address: str) -> None:
    body: dict[str, Any] = {"messages": TALK, "n": 2, "seed": 3, "max_tokens": 40}
    _, unstopped = ask(address, "/chat/completions", body)
    body["stop"] = unstopped["choices"][0]["message"]["content"][5:9]
    _, answer = ask(address, "/chat/completions", body)
    assert answer["choices"][0]["stop_reason"] == body["stop"]
    streamed = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{address}/chat/completions", streamed, {"x-api-key": KEY})
    with urllib.request.urlopen(request, timeout=120) as response:
        *events, end, rest = response.read().decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    *parts, last_part = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last_part["choices"] == [] and last_part["usage"] == answer["usage"]
    for choice in answer["choices"]:
        deltas = [delta for part in parts for delta in part["choices"] if delta["index"] == choice["index"]]
        assert "".join(delta["delta"]["content"] for delta in deltas) == choice["message"]["content"]
        assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + [choice["finish_reason"]]
        assert ["role" in delta["delta"] for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


def test_answers_follow_a_grammar(address: str) -> None:
    """Beside requests without one, which are answered as if alone."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 20, 300]}, "b": {"type": "boolean"}}, "required": ["n", "b"]}
    schema["additionalProperties"] = False
    response_format = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema, "strict": True}}
    chat = {"messages": TALK, "response_format": response_format, "n": 3, "seed": 1}
    plain = {"prompt": "abc", "seed": 2, "n": 2, "max_tokens": 20}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/chat/completions", chat),
        ("/completions", plain),
        ("/completions", {"prompt": "abc", "guided_choice": ["yes", "no"], "temperature": 0}),
        ("/completions", {"prompt": "abc", "structured_outputs": {"regex": "[0-9]{3}-x"}, "seed": 3}),
        ("/completions", {"prompt": "abc", "structured_outputs": {"regex": "[0-9]{9}"}, "max_tokens": 5}),
        ("/completions", {"prompt": "abc", "structured_outputs": {"regex": "ab(\u00e9|\n)"}, "max_tokens": 5}),
    ]
    plain_alone = ask(address, "/completions", plain)[1]["choices"]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda body: ask(address, *body), asked))
    assert [status for status, _ in answers] == [200] * len(asked)
    chats, beside, *texts = (answer["choices"] for _, answer in answers)
    for choice in chats:
        value = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and value.keys() == {"n", "b"}
        assert value["n"] in (1, 20, 300) and type(value["b"]) is bool
    assert beside == plain_alone
    assert texts[0][0]["text"] in ("yes", "no") and re.fullmatch("[0-9]{3}-x", texts[1][0]["text"])
    assert re.fullmatch("[0-9]{5}", texts[2][0]["text"]) and texts[2][0]["finish_reason"] == "length"
    assert (texts[3][0]["text"], texts[3][0]["finish_reason"]) == ("ab", "error"), "no token has what must follow"
    for refused, message in (
        ({"guided_regex": "(a"}, "structured_outputs: at 1(8): invalid regex"),
        ({"guided_json": {"uniqueItems": True, "type": "array"}}, "structured_outputs: Unimplemented keys"),
        ({"guided_regex": "a" * 70_000}, "structured_outputs: the grammar has 70"),
        ({"guided_regex": "a", "ignore_eos": True}, "sampling_params.structured_outputs: no token could end the response"),
    ):
        status, error = ask(address, "/completions", {"prompt": "abc", **refused})
        assert status == 400 and error["message"].startswith(message) and "\n" not in error["message"]


def test_refusals_over_http(address: str) -> None:
    """In OpenAI's form; what a header shows is refused before the body has come."""
    for path, body, key, status, message in (
        ("/completions", {"prompt": "a"}, "guessed", 401, "the bearer token is missing or wrong"),
        ("/completions", b"{", KEY, 400, "Expecting property name"),
        ("/completions", {"model": "large", "prompt": "a"}, KEY, 404, "the model 'large' is not here; there is small"),
        ("/embeddings", {}, KEY, 404, "there is nothing at /v1/embeddings"),
    ):
        code, error = ask(address, path, body, key)
        assert (code, error["type"]) == (status, "invalid_request_error") and error["message"].startswith(message)
    for head, status in (
        (f"Authorization: Bearer {KEY}\r\nContent-Length: -1", 400),
        (f"Authorization: Bearer {KEY}\r\nContent-Length: 99999999999", 413),
        ("Content-Length: 1000", 401),
    ):
        with socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])), timeout=30) as client:
            client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
            assert client.recv(100).split()[1] == str(status).encode()


# -- the service in this process, without an endpoint


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> services.Service:
    return service_of(model, monkeypatch)


def text_of(part: services.Part) -> str:
    assert part is not None and part[0] == 200
    return str(part[1]["choices"][0]["text"])


def greedy_response(model: Path, prompt: str, limit: int) -> str:
    return greedy_text(model, prompt, limit, eos_token_id=-1)


def test_echoed_log_probs_are_those_of_score(service: services.Service, model: Path, tmp_path: Path) -> None:
    texts = ["abc abd", "The quick brown fox"]
    ids = [ids_of(text) for text in texts]
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": each[:1], "response_ids": each[1:]} for each in ids])
    score.main(arguments(model, rows, tmp_path / "out.jsonl"))
    scores = [row["log_probs"] for row in read_output(tmp_path / "out.jsonl")]
    for limit in (0, 5):
        answers = []
        for prompt in (ids, texts):
            reply = arrive(service, limit, prompt=prompt, echo=True, logprobs=2, max_tokens=limit)
            service.turn()
            turn_until_idle(service)
            answer = reply.get_nowait()
            assert answer is not None and answer[0] == 200
            answers.append(answer[1]["choices"])
        assert answers[0] == answers[1]
        for choice, prompt_ids, log_probs in zip(answers[0], ids, scores, strict=True):
            entries, size = choice["logprobs"], len(prompt_ids)
            assert {len(values) for values in entries.values()} == {size + limit}
            assert entries["token_logprobs"][0] is entries["top_logprobs"][0] is None
            assert entries["token_logprobs"][1:size] == log_probs
            assert choice["text"] == "".join(entries["tokens"]) and choice["finish_reason"] == "length"
            assert entries["text_offset"] == [len("".join(entries["tokens"][:i])) for i in range(size + limit)]
            columns = [*zip(entries["tokens"], entries["token_logprobs"], entries["top_logprobs"], strict=True)]
            for token, log_prob, best in columns[1:]:
                assert best[token] >= log_prob and 1 <= len(best) <= 3  # some tokens of this model have one text
            # by which a client knows that the tokens are greedy
            assert all(log_prob == max(best.values()) for _, log_prob, best in columns[size:])


def test_a_prompt_that_fills_the_context_is_echoed(service: services.Service) -> None:
    (choice,) = choices_of(service, prompt="a" * 64, echo=True, logprobs=0, max_tokens=0, stream=False)
    assert choice["text"] == "a" * 64 == "".join(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("dialect", ["completion", "chat"])
def test_a_stream_brings_the_same_log_probs(service: services.Service, dialect: Dialect) -> None:
    form: dict[str, Any] = {"echo": True, "prompt": "abc", "logprobs": 2}
    if dialect == "chat":
        form = {"messages": TALK, "logprobs": True, "top_logprobs": 2}
    answers = [
        choices_of(service, dialect, stream=stream, max_tokens=20, seed=3, temperature=1, stop="\u0000", **form)
        for stream in (False, True)
    ]
    (answer,), parts = [[choice["logprobs"] for choice in choices] for choices in answers]
    assert len(parts) > 3 and all(part.keys() == answer.keys() for part in parts)
    assert {key: [entry for part in parts for entry in part[key]] for key in answer} == answer


def test_what_cannot_be_answered_is_one_line(service: services.Service) -> None:
    """Beside what test_openai_forms has, which needs no model."""
    bodies: list[tuple[Any, str]] = [
        (b'{"prompt": "a", "temperature": NaN}', "sampling_params.temperature=nan: must be a finite number"),
        ({"prompt": "a" * 2000}, "prompt 0 has 2000 characters, and no more than 320 can fit"),
        ({"prompt": "a" * 64}, "prompt 0 has 64 tokens"),
        ({"prompt": "a" * 65, "max_tokens": 0, "echo": True}, "prompt 0 has 65 tokens, and a row may have 64"),
        ({"prompt": "a", "top_k": 2**31}, "sampling_params.top_k=2147483648: must be at most 2147483647, which 32 bits hold"),
        (
            {"prompt": "a", "max_tokens": 10**400},
            f"sampling_params.max_tokens=1{'0' * 39}... (401 digits): must be at most 2147483647",
        ),
        ({"prompt": "a", "temperature": 10**400}, f"temperature=1{'0' * 39}... (401 digits): must be at most 3.4028"),
        ({"prompt": [1] * 100_000}, "prompt 0 has 100000 tokens, and a row may have 64"),
        ({"prompt": "a", "allowed_token_ids": [1] * 201}, "allowed_token_ids has 201 entries, and may have 200"),
        ({"messages": TALK * 65}, "messages has 65 entries, and may have 64"),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop has 65 entries, and may have 64"),
        ({"prompt": "a", "stop": "x" * 5000}, "stop has 5000 characters, and may have 4096"),
        ({"prompt": [2**70]}, "prompt 0: token id 1180591620717411303424 in"),
        ({"prompt": "${oc.env:HOME}", "stop": "${oc.env:HOME}", "n": 0}, "sampling_params.n=0"),
        ({"prompt": []}, "0 prompts, n=1: a request is for 1 to 4096 responses"),
        ({"prompt": "a", "n": 10**6}, "1 prompts, n=1000000: a request is for 1 to 4096 responses"),
        ({}, "prompt 0: a prompt must be text or a list of chat messages, not NoneType"),
        ({"messages": [{"role": "user", "content": None}]}, "prompt 0: the content of message 0"),
        ({"messages": TALK, "chat_template_kwargs": {"tokenize": True}}, "chat.chat_template_kwargs.tokenize is no variable"),
    ]
    for body, message in bodies:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = arrive_raw(service, 0, raw, "chat" if b"messages" in raw else "completion")
        service.turn()
        answer = reply.get_nowait()
        assert answer is not None and answer[0] == 400 and answer[1]["error"]["message"].startswith(message), answer


def test_requests_join_those_that_run_and_others_wait_their_turn(service: services.Service, model: Path) -> None:
    generator = service.engine.generator
    replies = [arrive(service, 0, prompt="abc", max_tokens=20)]
    for _ in range(5):
        service.turn()
    replies.append(arrive(service, 1, prompt="x", max_tokens=40))
    service.turn()
    assert [row.request.row_id for row in generator.kept] == [0, 1] and 0 < generator.kept[1].num_new < generator.kept[
        0
    ].num_new
    replies.append(arrive(service, 2, prompt="x", presence_penalty=1.0, max_tokens=2))
    replies.append(arrive(service, 3, prompt="y", max_tokens=2))  # could join, but does not overtake
    while 1 in service.running:
        service.turn()
        assert not {2, 3} & set(service.running)
    turn_until_idle(service)
    texts = [text_of(reply.get_nowait()) for reply in replies]
    assert [texts[0], texts[1], texts[3]] == [greedy_response(model, *asked) for asked in (("abc", 20), ("x", 40), ("y", 2))]
    assert generator.config.num_pages == 4 * 8  # of 8 tokens: room for all that can run, whoever came first


def test_variables_of_the_template_are_the_requests_or_the_servers(service: services.Service) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}{{ more }}"
    service.processor.tokenizer.chat_template, service.variables = template, {"ending": "!", "more": "?"}
    bodies = ({"messages": TALK, **more} for more in ({}, {"chat_template_kwargs": {"ending": "#"}}))
    requests = [service.read(body, "chat") for body in bodies]
    assert [request["prompts"][0][1] for request in requests] == ["abd!?", "abd#?"]


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_separated_in_whole_answers_and_in_streams(service: services.Service, begun: bool) -> None:
    """The tags are a text that the model writes, and what the prompt ends with or the response begins with."""
    body = {"messages": TALK, "max_tokens": 30, "allowed_token_ids": list(range(3, 98)), "seed": 5, "temperature": 1}
    text = choices_of(service, "chat", **body)[0]["message"]["content"]
    opening, closing = "<|assistant|>" if begun else text[:2], text[9:12]
    service.reasoning_tags = [opening, closing]
    start = 0 if begun else 2
    message = {"role": "assistant", "reasoning_content": text[start:9], "content": text[12:]}
    assert text.index(closing, start) == 9 and choices_of(service, "chat", **body)[0]["message"] == message
    deltas = [choice["delta"] for choice in choices_of(service, "chat", **body, stream=True)]
    for key in ("reasoning_content", "content"):
        assert "".join(delta[key] or "" for delta in deltas) == message[key]
    assert sum(delta["reasoning_content"] is not None for delta in deltas) > 3
    service.reasoning_tags = ["#?#", "@?@"]
    message = {"role": "assistant", "reasoning_content": None, "content": text}
    assert choices_of(service, "chat", **body)[0]["message"] == message


def test_a_stream_sends_no_beginning_of_a_stop_string(service: services.Service) -> None:
    body = {"prompt": "abc", "max_tokens": 30, "allowed_token_ids": list(range(3, 98))}  # a character for each token
    (choice,) = choices_of(service, **body)
    text = choice["text"]
    stop = text[7:11]
    for stops, end in ((stop, text.index(stop)), ("\u0000" * 9, len(text)), (None, len(text))):
        parts = [choice["text"] for choice in choices_of(service, **body, stream=True, stop=stops)]
        assert "".join(parts) == text[:end] and len(parts) >= 5


def test_a_client_that_goes_away_frees_its_place(service: services.Service, model: Path) -> None:
    arrive(service, 0, prompt="abc", n=3)
    reply = arrive(service, 1, prompt="x", max_tokens=12)
    arrive(service, 2, prompt="abc", presence_penalty=1.0)
    for _ in range(3):
        service.turn()
    assert len(service.engine.generator.kept) == 4 and len(service.waiting) == 1
    service.arrivals.put((0, None))
    service.arrivals.put((2, None))
    service.turn()
    assert [row.request.row_id for row in service.engine.generator.kept] == [3] and not service.waiting
    turn_until_idle(service)
    assert text_of(reply.get_nowait()) == greedy_response(model, "x", 12)


def test_the_service_ends_when_what_runs_has_been_answered_or_in_time(
    model: Path, service: services.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = arrive(service, 0, prompt="abc", max_tokens=20)
    waiting = arrive(service, 1, prompt="x", presence_penalty=1.0)
    assert service.turn() and 0 in service.running and len(service.waiting) == 1
    service.must_end = lambda: True
    late = arrive(service, 2, prompt="x")
    while service.turn():
        assert service.state == "ending"
    assert text_of(running.get_nowait()) == greedy_response(model, "abc", 20)
    assert [reply.get_nowait() for reply in (waiting, late)] == [
        error_answer(services.HttpError(503, "the server is ending"))
    ] * 2

    service.state, service.must_end = "on", lambda: False
    monkeypatch.setattr(services, "END_S", 0.0)
    running = arrive(service, 3, prompt="abc", max_tokens=60)
    assert service.turn()
    service.must_end = lambda: True
    assert not service.turn() and running.get_nowait() == error_answer(services.HttpError(503, "the server has ended"))


@pytest.mark.parametrize("how", ["not finite", "engine", "answer"])
def test_whatever_a_request_does_costs_that_request_alone(
    service: services.Service, model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Numbers that are not finite, a row that the engine refuses, a text that cannot be made."""
    processor, tokenizer = service.processor, service.processor.tokenizer
    others = [arrive(service, 1, prompt="x", max_tokens=20), arrive(service, 2, prompt="x", max_tokens=5, stop="never")]
    if how == "engine":
        service.turn()
        monkeypatch.setattr(processor, "longest", 1000)  # more than its pages hold
    elif how == "answer":
        decode = tokenizer.decode
        refusing = lambda ids, **options: decode(ids, **options) if options["skip_special_tokens"] else 1 // 0  # noqa: E731
        monkeypatch.setattr(tokenizer, "decode", refusing)
    limit = 500 if how == "engine" else 20
    failing = arrive(service, 0, prompt="abc", max_tokens=limit, n=2, stream=True, skip_special_tokens=how != "answer")
    if how == "not finite":
        failing, others[0] = others[0], failing  # whose row is read first
        service.turn()
        weight = service.engine.generator.decoder.head_weight.data
        copy = weight.clone()
        weight.fill_(float("nan"))
        service.turn()
        weight.copy_(copy)
    service.turn()
    turn_until_idle(service)
    *_, (status, content), end = [failing.get_nowait() for _ in range(failing.qsize())]
    words = {"not finite": "is not finite", "engine": "num_pages=", "answer": "by zero"}
    assert status == (400 if how == "engine" else 500) and words[how] in content["error"]["message"] and end is None
    assert text_of(others[1].get_nowait()) == greedy_response(model, "x", 5)
    if how == "not finite":
        assert [others[0].get_nowait() for _ in range(others[0].qsize())][-2][0] == 200  # type: ignore[index]
    else:
        assert text_of(others[0].get_nowait()) == greedy_response(model, "x", 20)
    assert not service.running and not service.waiting and not service.engine.generator.kept


@pytest.mark.parametrize(("part", "method"), [("processor", "requests"), ("output_builder", "record")])
@pytest.mark.parametrize("error", [MemoryError, OSError, ValueError])
def test_what_other_ranks_may_not_have_met_ends_the_service(
    service: services.Service, monkeypatch: pytest.MonkeyPatch, part: str, method: str, error: type[Exception]
) -> None:
    """Whether a request arrives or is answered. An error of the request itself costs that request alone."""

    def fail(*_: Any) -> Any:
        raise error("not on every rank")

    monkeypatch.setattr(service.engine, "world", SimpleNamespace(rank=0, size=2))
    monkeypatch.setattr(getattr(service, part), method, fail)
    reply = arrive(service, 0, prompt="abc", max_tokens=1)
    with contextlib.nullcontext() if error is ValueError else pytest.raises(error):
        service.turn()
        turn_until_idle(service)
        assert reply.get_nowait() == error_answer(error("not on every rank"))


def test_a_cache_is_made_anew_after_so_many_requests(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are taken count, whatever their numbers: refused ones and clients that go away have numbers too."""
    times: list[int] = []
    monkeypatch.setattr(services, "REQUESTS_PER_CACHE", 3)
    monkeypatch.setattr(service.engine.generator, "before_training", lambda: times.append(number))
    for number in range(0, 14, 2):
        arrive(service, number, prompt="x", max_tokens=1, stop_token_ids=[10_000] if number == 2 else [])
        service.turn()
        turn_until_idle(service)
    assert times == [6, 12]


def test_usage_counts_the_tokens_of_prompts_that_were_cached(service: services.Service) -> None:
    prompts = ["abcdefghijklmnopqrst", "x y"]

    def num_cached(number: int, **fields: Any) -> int:
        reply = arrive(service, number, prompt=prompts, n=2, max_tokens=2, **fields)
        service.turn()
        turn_until_idle(service)
        answer = reply.get_nowait()
        assert answer is not None and answer[1]["usage"]["prompt_tokens"] == 23
        return int(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert num_cached(0) == 0, "though the second response to each has what the first one computed"
    assert num_cached(1) == 19 + 2, "all but the last token of each"
    assert num_cached(2, cache_salt="other") == 0


def test_requests_that_are_sampled_alike_run_together(service: services.Service) -> None:
    """Those that wait when others have ended; one that comes later waits for what came before it."""
    kinds: tuple[dict[str, Any], ...] = ({"stop": "never"}, {"presence_penalty": 1.0})
    for number in range(4):
        arrive(service, number, prompt="x", max_tokens=3, **kinds[number % 2])
    service.turn()
    assert [*service.running] == [0, 2] and [served.number for served in service.waiting] == [1, 3]
    arrive(service, 4, prompt="x", max_tokens=3, **kinds[0])
    service.turn()
    assert [*service.running] == [0, 2]
    while not {1, 3} <= service.running.keys():
        service.turn()
    assert [served.number for served in service.waiting] == [4]


def test_a_row_that_starts_is_not_compared_with_all_others(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a turn grows with its rows, not with their square."""
    reads: list[int] = []

    class Row:
        @property
        def max_new_tokens(self) -> int:
            reads.append(1)
            return 20

    monkeypatch.setattr(service.engine.generator, "config", replace(service.engine.generator.config, max_num_seqs=100))
    arrive(service, 0, prompt="abc", n=100)
    service._take(*service.arrivals.get_nowait())
    service.waiting[0].unstarted = deque([cast("Request", Row()) for _ in range(100)])
    assert len(service._admit()) == 100 and len(reads) <= 200


def test_many_responses_for_one_client_do_not_hold_up_others(service: services.Service) -> None:
    """Each waits for its turn among the requests, whatever it asks for; not for all responses of another."""
    arrive(service, 0, prompt="abc", n=4096, max_tokens=20)
    arrive(service, 1, prompt=["x"] * 4096, max_tokens=20, echo=True, logprobs=0)
    service.turn()
    options: list[dict[str, Any]] = [{}, {"stop": "never"}, {"n": 4}, {"echo": True, "logprobs": 0}]
    replies = [arrive(service, 2 + i, prompt="x", max_tokens=10, **options[i % 4]) for i in range(16)]
    for _ in range(500):  # the two alone take 40,000
        service.turn()
    assert not any(reply.empty() for reply in replies) and {0, 1} <= service.running.keys()
    service.arrivals.put((0, None))
    service.arrivals.put((1, None))
    service.turn()
    assert not service.running and not service.waiting and not service.engine.generator.kept


def test_what_is_noted_of_tokens_is_bounded(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_LOG_PROBS", 4 * 20 * 3)
    bodies = ({"max_tokens": 20, "n": 3}, {"max_tokens": 21, "n": 4}, {"max_tokens": 2}, {"max_tokens": 2})
    replies = [arrive(service, number, prompt="abc", logprobs=2, **body) for number, body in enumerate(bodies)]
    service.turn()
    refusal = replies[1].get_nowait()
    assert refusal is not None and refusal[0] == 400 and "4 responses with so many tokens" in refusal[1]["error"]["message"]
    assert [*service.running] == [0, 2, 3] and [served.number for served in service.waiting] == [0]
    assert len(service.engine.generator.kept) == 4
    turn_until_idle(service)
    for number in (0, 2, 3):
        text_of(replies[number].get_nowait())


# -- with an endpoint


@pytest.fixture
def endpoint(service: services.Service) -> Iterator[Endpoint]:
    endpoint = Endpoint(0, AccessRules("127.0.0.1", None, ["https://chat.example.org"]), service)
    yield endpoint
    endpoint.close()


def post(client: socket.socket, **body: Any) -> None:
    """Sends a completion request of 60 tokens, and reads nothing."""
    content = json.dumps({"prompt": "abc", "max_tokens": 60, "ignore_eos": True, **body}).encode()
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )


def await_that(is_so: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


def test_a_client_that_does_not_wait_or_does_not_read_frees_its_place(
    service: services.Service, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (False, True):
        with socket.create_connection((endpoint.bound, endpoint.port)) as client:
            post(client, n=4, stream=stream)
            while len(service.engine.generator.kept) < 4:
                service.turn()
        await_that(lambda: not service.replies)  # without a step of the generator
        service.turn()
        assert not service.running and not service.engine.generator.kept

    monkeypatch.setattr(agents_http, "UNREAD_S", 0.5)
    with socket.create_connection((endpoint.bound, endpoint.port)) as client:
        post(client, stream=True)
        while not service.running:
            service.turn()
        (reply,) = service.replies.values()
        for _ in range(32):
            reply((200, {"text": "x" * (1 << 20)}))  # more than the sockets hold
        await_that(lambda: not service.replies and not endpoint.server.server_state.connections)
    service.turn()
    assert not service.running and not service.engine.generator.kept


def test_what_is_too_much_is_refused(service: services.Service) -> None:
    """A body that is too long, and a request that finds others waiting; the place of either is free again."""
    endpoint = Endpoint(0, AccessRules("127.0.0.1", None, [], max_body_bytes=200, max_queued_requests=1), service)
    with contextlib.closing(endpoint), ThreadPoolExecutor(1) as pool:
        for prompt, status in (("a" * 300, 413), ([], 400)):
            assert ask(endpoint.url, "/completions", {"prompt": prompt})[0] == status
        first = pool.submit(ask, endpoint.url, "/completions", {"prompt": "a", "max_tokens": 2})
        await_that(lambda: service.arrivals.qsize() == 1)
        status, error = ask(endpoint.url, "/completions", {"prompt": "a"})
        assert (status, error["message"]) == (429, "max_queued_requests=1 requests wait already; ask again later")
        service.turn()
        turn_until_idle(service)
        assert first.result(30)[0] == 200
        await_that(lambda: not service.replies)


def test_a_connection_answers_more_than_one_request(endpoint: Endpoint) -> None:
    connection = http.client.HTTPConnection(endpoint.bound, endpoint.port, timeout=30)
    connection.connect()
    first_socket = connection.sock
    release = json.dumps({"version": version("rlhf_spmd")}, separators=(",", ":")).encode()
    for method, path, answer in (
        ("GET", "/health", (200, b'{"status":"on"}', None)),
        ("HEAD", "/v1/models", (200, b"", None)),
        ("GET", "/v1/completions", (405, b'{"error":{"message":"/v1/compl', "POST")),
        ("GET", "/version", (200, release, None)),
    ):
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.read()[:30], response.getheader("Allow")) == answer
        assert connection.sock is first_socket


def test_pages_from_elsewhere_are_not_answered(endpoint: Endpoint) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    connection = http.client.HTTPConnection(endpoint.bound, endpoint.port, timeout=30)
    for header, value, status, origin in (
        ("Host", "localhost:1", 200, None),
        ("Host", "[::1]", 200, None),
        ("Host", "LOCALHOST", 200, None),
        ("Host", "rebound.example.org", 403, None),
        ("Host", "127.0.0.1.example.org", 403, None),
        ("Host", "rebound.example.org:127", 403, None),
        ("Origin", "https://elsewhere.example.org", 403, None),
        ("Origin", "null", 403, None),
        ("Origin", "https://chat.example.org", 200, "https://chat.example.org"),
    ):
        for method, more in (("GET", {}), ("OPTIONS", asks)) if header == "Origin" else (("GET", {}),):
            connection.request(method, "/v1/models", headers={header: value, **more})
            answer = connection.getresponse()
            answer.read()
            assert (answer.status < 300) == (status == 200) and answer.status in (status, 204), (method, header, value)
            assert answer.getheader("Access-Control-Allow-Origin") == origin, (method, header, value)


def test_connections_that_ask_for_nothing_cost_no_thread_and_end(
    service: services.Service, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_http, "REQUEST_S", 2.0)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((endpoint.bound, endpoint.port), 30)) for _ in range(100)]
        slow = silent[0]
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        await_that(lambda: len(endpoint.server.server_state.connections) == 100)
        assert threading.active_count() == threads
        slow.sendall(b"Host: localhost\r\n")  # gives it no more time
        assert {client.recv(1) for client in silent} == {b""}


# -- settings


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (["allowed_origins=[chat.example.org]"], 1, "allowed_origins: 'chat.example.org' must be as https://"),
        (["token_env=NOT_THERE"], 1, "token_env='NOT_THERE': there is no such variable in the environment"),
        ([], 2, "layout.tp=1 on 2 ranks: they hold one model; set layout.tp=2"),
        (["separate_reasoning=true", "reasoning_tags=[<s>, </s>]"], 1, "reasoning_tags: </s> is a special token of this"),
        (["tool_call_parser=herms"], 1, "tool_call_parser='herms' is not a form of calls; did you mean 'hermes'?"),
        (["reasoning_tags=[a, b]"], 1, "reasoning_tags=['a', 'b'] does nothing without"),
    ],
)
def test_settings_that_cannot_be_are_refused(model: Path, settings: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        serve.prepare(None, [f"model.path={model}", *settings], Launch(size=ranks))
