"""``serve``: asked by the ``openai`` package where there is one, and by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import tasks
from generate_runs import arguments, read_output, write_rows
from generate_runs import model as model  # a fixture
from generators import alone, transformers_greedy
from rlhf_spmd import score, serve
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.data.tokenizer import decode, load_tokenizer
from rlhf_spmd.inference import endpoint as endpoints
from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.endpoint import AccessRules, Endpoint
from rlhf_spmd.inference.openai_forms import refused
from rlhf_spmd.inference.requests import RequestProcessor
from rlhf_spmd.parallel.launch import Launch

KEY = "a secret of this test"
TALK = [{"role": "user", "content": "abd"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@contextmanager
def served(model: Path, ranks: int, *settings: str, interrupted: bool = False) -> Iterator[str]:
    """The address of a service, which ends with the block."""
    command = [
        *(sys.executable, "-m", "rlhf_spmd", "serve"),
        *("--nproc-per-node", str(ranks)),
        f"model.path={model}",
        "port=0",
        "generation.page_size=8",
        *settings,
    ]
    process = subprocess.Popen(command, env=tasks.environment() | {"TEST_KEY": KEY}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        yield next(line for line in lines if "http://" in line).split()[-1]
        process.send_signal(signal.SIGINT if interrupted else signal.SIGTERM)
        *_, last = lines
        assert last == "ended\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with served(
        model, 1, "served_model_name=small", "token_env=TEST_KEY", "generation.max_num_seqs=4", interrupted=True
    ) as found:
        yield found


def ask(address: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def greedy_text(model: Path, ids: list[int], most: int) -> str:
    return decode(load_tokenizer(model), transformers_greedy(str(model), [ids], most))[0]


def ids_of(text: str) -> list[int]:
    return [ord(character) - 29 for character in text]


def test_completions_and_chats_are_answered_in_openai_s_form(address: str, model: Path) -> None:
    status, told = ask(address, "/completions", {"model": "small", "prompt": ["abc", "x y"], "n": 2, "logprobs": 2, **GREEDY})
    assert status == 200 and told["object"] == "text_completion" and told["model"] == "small"
    texts = [greedy_text(model, ids_of(prompt), 12) for prompt in ("abc", "x y")]
    assert [(c["index"], c["text"]) for c in told["choices"]] == [(i, texts[i // 2]) for i in range(4)]
    first = told["choices"][0]["logprobs"]
    assert len(first["tokens"]) == len(first["token_logprobs"]) == len(first["top_logprobs"]) == 12
    assert max(first["top_logprobs"][0].values()) == first["token_logprobs"][0] < 0
    assert len(first["text_offset"]) == 12 and first["text_offset"][0] == 0
    assert told["usage"] == {"prompt_tokens": 6, "completion_tokens": 48, "total_tokens": 54}

    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bd"}]}]
    body = {"messages": parts, "temperature": 0, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1}
    _, told = ask(address, "/chat/completions", body)
    (choice,) = told["choices"]
    wanted = greedy_text(model, ids_of("<|user|>abd<|assistant|>"), 9)
    assert choice["message"] == {"role": "assistant", "content": wanted} and choice["finish_reason"] == "length"
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == wanted
    for entry in choice["logprobs"]["content"]:
        (best,) = entry.pop("top_logprobs")
        assert best == entry and bytes(best["bytes"]).decode() == best["token"]
    _, told = ask(address, "/chat/completions", {"messages": TALK, "temperature": 0})
    assert told["usage"]["total_tokens"] <= 64 and told["choices"][0]["message"]["content"].startswith(wanted)
    assert ask(address, "/models")[1]["data"][0]["id"] == "small"


def test_requests_that_come_together_are_each_answered_as_if_alone(address: str, model: Path) -> None:
    prompts = ["abc", "x y", "The quick", "zzzz", "q", "12 34"] * 3
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "temperature": 0, "max_tokens": 4 + 3 * i} for i, prompt in enumerate(prompts)
    ]
    for i, body in enumerate(bodies):
        body |= [{}, {"seed": i, "temperature": 1.0}, {"presence_penalty": 0.5}][i % 3]
    alone = [ask(address, "/completions", body)[1]["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: ask(address, "/completions", body)[1]["choices"], bodies))
    assert together == alone


def parts_of(address: str, path: str, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(
        address + path, json.dumps(body | {"stream": True}).encode(), {"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream_body(**more: Any) -> dict[str, Any]:
    return {"messages": TALK, "n": 2, "seed": 3, "max_tokens": 40, "stream_options": {"include_usage": True}, **more}


def without_stream(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "stream_options"}


@pytest.mark.parametrize("stops", ["never", "nowhere", "inside"])
def test_a_stream_brings_the_same_text(address: str, stops: str) -> None:
    body = stream_body()
    if stops != "never":
        _, told = ask(address, "/chat/completions", without_stream(body))
        body["stop"] = told["choices"][0]["message"]["content"][5:9] if stops == "inside" else "\u0000" * 9
    _, whole = ask(address, "/chat/completions", without_stream(body))
    assert (whole["choices"][0]["stop_reason"] is not None) == (stops == "inside")
    *parts, last = parts_of(address, "/chat/completions", body)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [each for part in parts for each in part["choices"] if each["index"] == choice["index"]]
        assert "".join(each["delta"]["content"] for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert ["role" in each["delta"] for each in mine] == [True] + [False] * (len(mine) - 1)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


@pytest.mark.parametrize("most", [0, 5])
def test_echoed_log_probs_are_those_of_score(address: str, model: Path, tmp_path: Path, most: int) -> None:
    ids = [ids_of("abc abd"), ids_of("The quick brown fox")]
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": each[:1], "response_ids": each[1:]} for each in ids])
    score.main(arguments(model, rows, tmp_path / "out.jsonl"))
    wanted = [row["log_probs"] for row in read_output(tmp_path / "out.jsonl")]
    asked = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": most, "ignore_eos": True}
    _, by_ids = ask(address, "/completions", {"prompt": ids, **asked})
    _, by_text = ask(address, "/completions", {"prompt": ["abc abd", "The quick brown fox"], **asked})
    assert by_ids["choices"] == by_text["choices"]
    for choice, prompt, log_probs in zip(by_ids["choices"], ids, wanted, strict=True):
        told = choice["logprobs"]
        assert {len(each) for each in told.values()} == {len(prompt) + most}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(prompt)] == log_probs
        assert choice["text"] == "".join(told["tokens"]) and choice["finish_reason"] == "length"
        assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(prompt) + most)]
        for token, its, best in [*zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)][1:]:
            assert best[token] >= its and 1 <= len(best) <= 3  # some tokens of this model have one text
        for its, best in [*zip(told["token_logprobs"], told["top_logprobs"], strict=True)][len(prompt) :]:
            assert its == max(best.values())  # which is how a client knows that they are greedy


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_brings_the_same_log_probs(service: services.Service, chat: bool) -> None:
    asked: dict[str, Any] = {
        "logprobs": 2,
        "max_tokens": 20,
        "seed": 3,
        "temperature": 1,
        "stop": "\u0000",
        "echo": True,
        "prompt": "abc",
    }
    if chat:
        asked = {**asked, "echo": False, "logprobs": True, "top_logprobs": 2, "messages": TALK}
    answers = []
    for number, stream in enumerate((False, True)):
        got: list[Any] = []
        reply = arrive(service, number, chat, stream=stream, **asked)
        while part_or_turn(service, reply, got):
            pass
        answers.append([part["choices"][0]["logprobs"] for part in got])
    (whole,), parts = answers
    assert len(parts) > 3 and all(part.keys() == whole.keys() for part in parts)
    assert {key: [each for part in parts for each in part[key]] for key in whole} == whole


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "said"),
    [
        ("/completions", {"prompt": "a", "temperature": -1}, KEY, 400, "sampling_params.temperature=-1.0: must be 0"),
        ("/completions", {"prompt": "a", "temprature": 1}, KEY, 400, "unknown key 'temprature'; did you mean 'temperature'?"),
        ("/completions", {"prompt": "a", "max_tokens": "many"}, KEY, 400, "max_tokens='many' must be an integer or null"),
        ("/completions", {"prompt": "a", "prompt_logprobs": 1}, KEY, 400, "unknown key 'prompt_logprobs'"),
        ("/completions", {"prompt": "a", "max_tokens": 0}, KEY, 400, "max_tokens=0 is for echo=true"),
        ("/completions", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, KEY, 400, "chat_template_kwargs are for /v1/chat"),
        ("/completions", {"prompt": "a" * 2000}, KEY, 400, "prompt 0 has 2000 characters, and no more than 320 can fit"),
        ("/completions", {"prompt": "a", "stream_options": {"usage": True}}, KEY, 400, "unknown key 'stream_options.usage'"),
        ("/chat/completions", {"messages": TALK, "tools": [{}]}, KEY, 400, "tools are not supported yet"),
        ("/chat/completions", {"messages": TALK, "echo": True}, KEY, 400, "echo=true is for /v1/completions"),
        (
            "/chat/completions",
            {"messages": TALK, "chat_template_kwargs": {"tokenize": True}},
            KEY,
            400,
            "chat.chat_template_kwargs.tokenize is no variable",
        ),
        ("/completions", {"prompt": "a" * 64}, KEY, 400, "prompt 0 has 64 tokens"),
        ("/completions", {"model": "large", "prompt": "a"}, KEY, 404, "the model 'large' is not here; there is 'small'"),
        (
            "/completions",
            {"prompt": "${oc.env:TEST_KEY}", "stop": "${oc.env:TEST_KEY}", "n": 0},
            KEY,
            400,
            "sampling_params.n=0",
        ),
        ("/completions", {"prompt": "a"}, "guessed", 401, "the bearer token is missing or wrong"),
        ("/completions", b"{", KEY, 400, "Expecting property name"),
        ("/completions", [], KEY, 400, "a request is a JSON object"),
        ("/completions", {"prompt": []}, KEY, 400, "0 prompts, n=1: a request is for 1 to 4096 responses"),
        (
            "/completions",
            {"prompt": "a", "n": 10**9},
            KEY,
            400,
            "1 prompts, n=1000000000: a request is for 1 to 4096 responses",
        ),
        ("/completions", {}, KEY, 400, "prompt 0: a prompt must be text or a list of chat messages, not NoneType"),
        ("/completions", {"prompt": [5, "a"]}, KEY, 400, "prompt 0: 'prompt_token_ids' must be a non-empty list of token ids"),
        ("/completions", {"prompt": "a", "logit_bias": {"x": 1}}, KEY, 400, "logit_bias.x='x' must be an integer"),
        ("/completions", b'{"prompt": "a", "temperature": NaN}', KEY, 400, "sampling_params.temperature=nan: must be 0"),
        ("/completions", {"prompt": "a", "n": "2"}, KEY, 400, "n='2' must be an integer"),
        ("/completions", {"prompt": "a", "stop": [1]}, KEY, 400, "stop[0]=1 must be text"),
        ("/completions", {"prompt": "a", "suffix": "b"}, KEY, 400, "suffix is not supported yet"),
        ("/completions", {"prompt": "a", "temperature": 1e39}, KEY, 400, "sampling_params.temperature=1e+39: must be 0"),
        ("/completions", b"[" * 100_000, KEY, 400, "a request's JSON is at most 100 values deep"),
        ("/completions", b'{"metadata": ' + b"[" * 200 + b"]" * 200 + b"}", KEY, 400, "a request's JSON is at most 100"),
        ("/completions", {"prompt": "\ud800"}, KEY, 400, "'utf-8' codec can't encode character"),
        ("/embeddings", {}, KEY, 404, "there is nothing at /v1/embeddings"),
        ("/chat/completions", {"messages": "abc"}, KEY, 400, "messages must be a list of objects"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            KEY,
            400,
            "prompt 0: the content of message 0",
        ),
    ],
)
def test_what_cannot_be_answered_is_said_as_openai_does(
    address: str, path: str, body: Any, key: str, status: int, said: str
) -> None:
    found, error = ask(address, path, body, key)
    assert (found, error["type"]) == (status, "invalid_request_error") and error["message"].startswith(said)


def test_fields_that_ask_for_nothing_are_taken(address: str) -> None:
    asked = {"echo": False, "response_format": {"type": "text"}, "tools": [], "parallel_tool_calls": True, "suffix": None}
    plain, same = (ask(address, "/completions", {"prompt": "abc", **GREEDY, **more}) for more in ({}, asked))
    assert plain[0] == same[0] == 200 and plain[1]["choices"] == same[1]["choices"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"Authorization: Bearer {KEY}\r\nContent-Length: -1", 400),
        (f"Authorization: Bearer {KEY}\r\nContent-Length: 99999999999", 413),
        ("Content-Length: 1000", 401),
    ],
)
def test_what_cannot_be_read_is_refused_before_its_body_has_come(address: str, head: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])), timeout=30) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
        assert client.recv(100).split()[1] == str(status).encode()


def test_the_openai_package(address: str, model: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    wanted = greedy_text(model, ids_of("<|user|>abd<|assistant|>"), 12)
    chat = client.chat.completions.create(model="small", messages=TALK, **GREEDY)
    assert chat.choices[0].message.content == wanted and chat.usage.completion_tokens == 12
    stream = client.chat.completions.create(model="small", messages=TALK, stream=True, **GREEDY)
    assert "".join(part.choices[0].delta.content for part in stream) == wanted
    texts = client.completions.create(model="small", prompt="abc", extra_body={"top_k": 1}, max_tokens=12)
    assert texts.choices[0].text == greedy_text(model, ids_of("abc"), 12)
    assert [each.id for each in client.models.list()] == ["small"]
    with pytest.raises(openai.BadRequestError, match="must be at least 1"):
        client.completions.create(model="small", prompt="abc", max_tokens=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="guessed", max_retries=0).models.list()


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> services.Service:
    """Without an endpoint, and with a step of the generator in each turn."""
    monkeypatch.setattr(services, "TURN_S", 1e-9)
    monkeypatch.setattr(services, "IDLE_S", 1e-3)
    world, settings = alone()[0], [f"model.path={model}", "generation.max_num_seqs=4", "generation.page_size=8"]
    return services.Service(RequestProcessor(serve.prepare(None, settings, world.launch), world), "small")


def arrive(service: services.Service, number: int, chat: bool = False, **body: Any) -> Queue[services.Part]:
    """As the endpoint puts it."""
    reply: Queue[services.Part] = Queue()
    service.replies[number] = reply.put
    try:
        service.arrivals.put((number, service.read(json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode(), chat)))
    except ValueError as error:
        reply.put(refused(error))
    return reply


def test_requests_join_those_that_run_and_others_wait_their_turn(service: services.Service, model: Path) -> None:
    kept = service.engine.generator
    first = arrive(service, 0, prompt="abc", max_tokens=20)
    for _ in range(5):
        service.turn()
    second = arrive(service, 1, prompt="x", max_tokens=40)
    service.turn()
    assert [row.request.row_id for row in kept.kept] == [0, 1] and 0 < kept.kept[1].num_new < kept.kept[0].num_new
    other = arrive(service, 2, prompt="x", presence_penalty=1.0, max_tokens=2)
    last = arrive(service, 3, prompt="y", max_tokens=2)  # could join, but does not overtake
    while 1 in service.running:
        service.turn()
        assert not {2, 3} & set(service.running)
    while service.running or service.waiting:
        service.turn()
    answers = [reply.get_nowait() for reply in (first, second, other, last)]
    wanted = [greedy_tokens(model, prompt, most) for prompt, most in (("abc", 20), ("x", 40), ("y", 2))]
    assert [text_of(answer) for answer in (*answers[:2], answers[3])] == wanted
    assert kept.config.num_pages == 4 * 8  # of 8 tokens: room for all that can run, whoever came first


def test_variables_of_the_template_are_the_requests_or_the_servers(service: services.Service) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}{{ more }}"
    service.processor.tokenizer.chat_template, service.variables = template, {"ending": "!", "more": "?"}
    asked = [{}, {"chat_template_kwargs": {"ending": "#"}}]
    read = [service.read(json.dumps({"messages": TALK, **more}).encode(), chat=True) for more in asked]
    assert [one["prompts"][0][1] for one in read] == ["abd!?", "abd#?"]


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_separated_in_whole_answers_and_in_streams(service: services.Service, begun: bool) -> None:
    """The tags are a text that the model writes, and what the prompt ends with or the response begins with."""
    asked = {"messages": TALK, "max_tokens": 30, "allowed_token_ids": list(range(3, 98)), "seed": 5, "temperature": 1}

    def said(**more: Any) -> list[dict[str, Any]]:
        reply, parts = arrive(service, 0, True, **asked, **more), list[Any]()
        while part_or_turn(service, reply, parts):
            pass
        return [part["choices"][0] for part in parts]

    (plain,) = said()
    text = plain["message"]["content"]
    opening, closing = "<|assistant|>" if begun else text[:2], text[9:12]
    service.reasoning_tags = [opening, closing]
    start = 0 if begun else 2
    wanted = {"role": "assistant", "reasoning_content": text[start:9], "content": text[12:]}
    assert text.index(closing, start) == 9 and said()[0]["message"] == wanted
    deltas = [choice["delta"] for choice in said(stream=True)]
    for key in ("reasoning_content", "content"):
        assert "".join(delta[key] or "" for delta in deltas) == wanted[key]
    assert sum(delta["reasoning_content"] is not None for delta in deltas) > 3
    service.reasoning_tags = ["#?#", "@?@"]
    assert said()[0]["message"] == {"role": "assistant", "reasoning_content": None, "content": text}


def test_tags_that_responses_do_not_show_are_refused(model: Path) -> None:
    given = [f"model.path={model}", "separate_reasoning=true", "reasoning_tags=[<s>, </s>]"]
    with pytest.raises(ValueError, match=r"reasoning_tags: </s> is a special token of this tokenizer"):
        serve.prepare(None, given, Launch())
    with pytest.raises(ConfigError, match="reasoning_tags"):
        serve.prepare(None, [given[0], given[2]], Launch())


def greedy_tokens(model: Path, prompt: str, most: int) -> str:
    return decode(load_tokenizer(model), transformers_greedy(str(model), [ids_of(prompt)], most, eos_token_id=-1))[0]


def text_of(answer: services.Part) -> Any:
    assert answer is not None and answer[0] == 200
    return answer[1]["choices"][0]["text"]


def test_a_stream_sends_no_beginning_of_a_stop_string(service: services.Service) -> None:
    asked = {"prompt": "abc", "max_tokens": 30, "allowed_token_ids": list(range(3, 98))}  # a character for each token

    def said(**more: Any) -> list[str]:
        reply, parts = arrive(service, 0, **asked, **more), []
        while part_or_turn(service, reply, parts):
            pass
        return [part["choices"][0]["text"] for part in parts]

    (whole,) = said()
    stop = whole[7:11]
    texts = said(stream=True, stop=stop)
    assert "".join(texts) == whole[: whole.index(stop)] and len(texts) >= 5
    assert "".join(said(stream=True)) == whole


def part_or_turn(service: services.Service, reply: Queue[services.Part], parts: list[Any]) -> bool:
    """Whether more is to come."""
    if reply.empty():
        service.turn()
        return True
    part = reply.get()
    if part is not None:
        assert part[0] == 200, part
        parts.append(part[1])
    return part is not None


def test_a_client_that_goes_away_frees_its_place(service: services.Service, model: Path) -> None:
    arrive(service, 0, prompt="abc", n=3)
    stays = arrive(service, 1, prompt="x", max_tokens=12)
    arrive(service, 2, prompt="abc", presence_penalty=1.0)
    for _ in range(3):
        service.turn()
    assert len(service.engine.generator.kept) == 4 and len(service.waiting) == 1
    service.arrivals.put((0, None))
    service.arrivals.put((2, None))
    service.turn()
    assert [row.request.row_id for row in service.engine.generator.kept] == [3] and not service.waiting
    while service.running:
        service.turn()
    assert text_of(stays.get_nowait()) == greedy_tokens(model, "x", 12)


@pytest.fixture
def endpoint(service: services.Service) -> Iterator[Endpoint]:
    made = Endpoint(0, AccessRules("127.0.0.1", None, ["https://chat.example.org"]), service)
    yield made
    made.close()


def test_a_client_that_does_not_wait_for_its_answer_frees_its_place(service: services.Service, endpoint: Endpoint) -> None:
    for stream in (False, True):
        asked = {"prompt": "abc", "n": 4, "max_tokens": 60, "ignore_eos": True, "stream": stream}
        body = json.dumps(asked).encode()
        with socket.create_connection((endpoint.bound, endpoint.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            while len(service.engine.generator.kept) < 4:
                service.turn()
        await_that(lambda: not service.replies)  # without a step of the generator
        service.turn()
        assert not service.running and not service.engine.generator.kept


def test_a_client_that_stops_reading_is_cut_off(
    service: services.Service, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "UNREAD_S", 0.5)
    body = json.dumps({"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((endpoint.bound, endpoint.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while not service.running:
            service.turn()
        (reply,) = service.replies.values()
        for _ in range(32):
            reply((200, {"text": "x" * (1 << 20)}))  # more than the sockets hold
        await_that(lambda: not service.replies and not endpoint.server.server_state.connections)
    service.turn()
    assert not service.running and not service.engine.generator.kept


def test_a_long_text_is_tokenised_while_others_are_answered(
    service: services.Service, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, encode = threading.Event(), service.processor.encode

    def encode_slowly(prompts: Any, **more: Any) -> Any:
        assert prompts != ["long"] or go_on.wait(60)
        return encode(prompts, **more)

    monkeypatch.setattr(service.processor, "encode", encode_slowly)
    with ThreadPoolExecutor(2) as pool:
        long, short = (pool.submit(ask, endpoint.url, "/completions", {"prompt": text, **GREEDY}) for text in ("long", "x"))
        while not short.done():
            service.turn()
        assert short.result()[0] == 200 and not long.done()
        go_on.set()
        while not long.done():
            service.turn()
        assert long.result()[0] == 200


def await_that(is_so: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


def test_a_connection_answers_more_than_one_request(endpoint: Endpoint) -> None:
    connection = http.client.HTTPConnection(endpoint.bound, endpoint.port, timeout=30)
    found = []
    for method, path in (
        ("GET", "/health"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/v1/completions"),
    ):
        connection.request(method, path)
        answer = connection.getresponse()
        found.append((answer.status, answer.read()[:16], answer.getheader("Allow")))
        socket_of = connection.sock
        assert socket_of is not None
    assert found == [
        (200, b'{"status":"on"}', None),
        (200, b"", None),
        (204, b"", "POST, OPTIONS"),
        (405, b'{"error":{"messa', "POST, OPTIONS"),
    ]
    connection.request("GET", "/version")
    assert connection.sock is socket_of and json.loads(connection.getresponse().read()) == {"version": version("rlhf_spmd")}


@pytest.mark.parametrize(
    ("headers", "status", "allowed"),
    [
        ({"Host": "localhost:1"}, 200, None),
        ({"Host": "[::1]"}, 200, None),
        ({"Host": "LOCALHOST"}, 200, None),
        ({"Host": "rebound.example.org"}, 403, None),
        ({"Host": "127.0.0.1.example.org"}, 403, None),
        ({"Host": "rebound.example.org:127"}, 403, None),
        ({"Origin": "https://elsewhere.example.org"}, 403, None),
        ({"Origin": "null"}, 403, None),
        ({"Origin": "https://chat.example.org"}, 200, "https://chat.example.org"),
    ],
)
def test_pages_from_elsewhere_are_not_answered(
    endpoint: Endpoint, headers: dict[str, str], status: int, allowed: str | None
) -> None:
    connection = http.client.HTTPConnection(endpoint.bound, endpoint.port, timeout=30)
    connection.request("GET", "/v1/models", headers=headers)
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Access-Control-Allow-Origin")) == (status, allowed)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer.read()
    connection.request("OPTIONS", "/v1/completions", headers={**headers, **asks})
    answer = connection.getresponse()
    assert (answer.status < 300, answer.getheader("Access-Control-Allow-Origin")) == (status == 200, allowed)


def test_connections_that_ask_for_nothing_cost_no_thread_and_end(
    service: services.Service, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "SILENT_S", 2.0)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((endpoint.bound, endpoint.port), 30)) for _ in range(100)]
        slow = silent[0]
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        await_that(lambda: len(endpoint.server.server_state.connections) == 100)
        assert threading.active_count() == before
        slow.sendall(b"Host: localhost\r\n")  # gives it no more time
        assert {client.recv(1) for client in silent} == {b""}


def test_the_service_ends_when_what_runs_has_been_answered(model: Path, service: services.Service) -> None:
    runs = arrive(service, 0, prompt="abc", max_tokens=20)
    other = arrive(service, 1, prompt="x", presence_penalty=1.0)
    assert service.turn() and 0 in service.running and len(service.waiting) == 1
    service.told_to_end = lambda: True
    late = arrive(service, 2, prompt="x")
    while service.turn():
        assert service.state == "ending"
    assert text_of(runs.get_nowait()) == greedy_tokens(model, "abc", 20)
    assert [reply.get_nowait() for reply in (other, late)] == [refused(services.Refusal(503, "the server is ending"))] * 2


def test_the_service_ends_in_time(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "END_S", 0.0)
    runs = arrive(service, 0, prompt="abc", max_tokens=60)
    assert service.turn()
    service.told_to_end = lambda: True
    assert not service.turn() and runs.get_nowait() == refused(services.Refusal(503, "the server has ended"))


def test_numbers_that_are_not_finite_end_requests_and_not_the_service(service: services.Service, model: Path) -> None:
    failing = [arrive(service, 0, prompt="abc", max_tokens=20, n=2), arrive(service, 1, prompt="x", max_tokens=20, stream=True)]
    waits = arrive(service, 2, prompt="x", max_tokens=5, presence_penalty=0.0, stop="never there")
    for _ in range(3):
        service.turn()
    weight = service.engine.generator.decoder.head_weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    service.turn()
    weight.copy_(kept)
    assert not service.running and not service.engine.generator.kept
    for reply in failing:
        *_, (status, told), end = [reply.get_nowait() for _ in range(reply.qsize())]
        assert status == 500 and "is not finite" in told["error"]["message"] and end is None
    while service.waiting or service.running:
        service.turn()
    assert text_of(waits.get_nowait()) == greedy_tokens(model, "x", 5)


def test_the_pages_of_prompts_stay_while_nothing_runs(service: services.Service) -> None:
    hits, prompt = [], "a prompt of some pages"
    for number in range(3):
        if number == 2:
            service.engine.generator.before_training()  # as after many requests
        arrive(service, number, prompt=prompt, max_tokens=1)
        service.turn()
        assert not service.engine.generator.kept
        hits.append(service.engine.generator.stats.hit_tokens)
    assert hits == [0, len(prompt) - 1, 0]


def test_what_is_noted_of_tokens_is_bounded(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MOST_LOG_PROBS", 4 * 20 * 3)
    replies = [
        arrive(service, number, prompt="abc", logprobs=2, **asked)
        for number, asked in enumerate(
            ({"max_tokens": 20, "n": 3}, {"max_tokens": 21, "n": 4}, {"max_tokens": 2}, {"max_tokens": 2})
        )
    ]
    service.turn()
    refusal = replies[1].get_nowait()
    assert refusal is not None and refusal[0] == 400 and "4 responses with so many tokens" in refusal[1]["error"]["message"]
    assert list(service.running) == [0, 2] and [job.number for job in service.waiting] == [3]
    while service.running or service.waiting:
        service.turn()
    assert all(text_of(replies[i].get_nowait()) is not None for i in (0, 2, 3))


def test_two_ranks_serve_one_model(model: Path, address: str) -> None:
    by_one = address
    with served(model, 2, "layout.tp=2") as address:
        bodies = [{"prompt": "abc", **GREEDY}, {"prompt": "x", **GREEDY}, {"prompt": "a", "n": 0}, {"prompt": "abc", **GREEDY}]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda body: ask(address, "/completions", body), bodies))
        assert [status for status, _ in answers] == [200, 200, 400, 200]
        assert answers[0][1]["choices"][0]["text"] == greedy_text(model, ids_of("abc"), 12)
        time.sleep(3 * services.IDLE_S)  # longer than an idle rank waits
        assert ask(address, "/completions", bodies[1])[1]["choices"] == answers[1][1]["choices"]
        echo = {"prompt": "The quick", "echo": True, "max_tokens": 0, "logprobs": 1}
        one, two = (
            ask(each, "/completions", echo)[1]["choices"][0]["logprobs"]["token_logprobs"] for each in (by_one, address)
        )
        assert two[0] is None and two[1:] == pytest.approx(one[1:], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "ranks", "said"),
    [
        (["port=70000"], 1, "port=70000: must be at least 0 and at most 65535"),
        (["allowed_origins=[chat.example.org]"], 1, "allowed_origins: 'chat.example.org' must be as https://"),
        (["allowed_origins=['*',https://a.example.org/]"], 1, "allowed_origins: 'https://a.example.org/' must be as https://"),
        (["allowed_origins=https://a.example.org"], 1, "allowed_origins='https://a.example.org' must be a list"),
        (["max_model_len=65"], 1, "max_model_len=65: the model's context is max_position_embeddings=64"),
        (["token_env=NOT_THERE"], 1, "token_env='NOT_THERE': there is no such variable in the environment"),
        ([], 2, "layout.tp=1 on 2 ranks: they hold one model; set layout.tp=2"),
        (["layout.pp=2"], 2, "layout.pp=2: a model that is asked has no stages"),
        (["generation.tp=2"], 2, "generation.tp=2: here layout.tp says it"),
    ],
)
def test_settings_that_cannot_be_are_refused(model: Path, settings: list[str], ranks: int, said: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as refusal:
        serve.prepare(None, [f"model.path={model}", *settings], Launch(size=ranks))
    assert str(refusal.value).startswith(said)
