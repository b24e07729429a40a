"""``serve keep_conversations=true``: a chat goes on from the tokens that the model drew, as an agent's does in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.agents.dialect import Dialect, read_chat_request
from rlhf_spmd.agents.forest import Draws, Forest
from rlhf_spmd.data import encoding
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.inference import conversations as module
from rlhf_spmd.inference import service as services
from rlhf_spmd.inference.conversations import Conversations
from serving import arrive, ask, choices_of, program, service_of
from tool_models import ANSWER, CALL, END, OPEN, TEXT, THINK, THOUGHT, TOOL, forced, write_tool_model

TALK: list[dict[str, Any]] = [{"role": "user", "content": "2 and 3?"}]
ASKED: dict[str, Any] = {"tools": [TOOL], "ignore_eos": False, "return_token_ids": True}
SAID = {"role": "assistant", "content": "So: 5."}
FIRST = {**ASKED, "messages": TALK, **forced(TEXT, *CALL, END)}  # text with a blank that the template does not write again


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "llama"
    write_tool_model(path)
    return path


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> services.Service:
    service = service_of(model, monkeypatch)
    service.conversations = Conversations()
    return service


def chat(service: services.Service, **body: Any) -> tuple[list[int], dict[str, Any]]:
    """The prompt's ids and the choice of a whole answer."""
    reply = service.read({"temperature": 0, **body}, "chat")
    (choice,) = choices_of(service, "chat", **body)
    return reply["prompts"][0][0], choice


def behind(message: dict[str, Any], content: str = "5") -> list[dict[str, Any]]:
    (call,) = message["tool_calls"]
    return [*TALK, message, {"role": "tool", "tool_call_id": call["id"], "content": content}]


def in_training(
    model: Path, prompt: list[int], drawn: list[int], messages: list[dict[str, Any]], template: str | None = None
) -> list[int]:
    """The tokens that an agent's next turn reads in training, behind a turn that drew ``drawn``."""
    dialect = Dialect(load_tokenizer(str(model)), EncodingConfig(chat_template=template), [END])
    request = read_chat_request({"messages": TALK, "tools": [TOOL]})
    forest, options = Forest("an attempt"), request.conversation_options
    turn = forest.add(None, request.messages, dialect.read_ids(None, request.messages, request.options), options)
    assert turn.read_ids == prompt
    draws = Draws(drawn, [0.0] * len(drawn), [0] * len(drawn), "stop")
    turn.draws = draws
    forest.finish(turn, draws, dialect.answer(turn, request), options)
    next_request = read_chat_request({"messages": messages, "tools": [TOOL]})
    parent, unread = forest.attach(next_request.messages, options)
    assert parent is turn
    return [*turn.ids, *dialect.read_ids(parent, unread, request.options)]


def test_a_chat_goes_on_from_what_was_drawn_as_in_training(service: services.Service, model: Path) -> None:
    prompt, choice = chat(service, **FIRST)
    drawn = choice["token_ids"]
    assert drawn == [TEXT, *CALL, END]
    talk = behind(choice["message"])
    next_prompt, next_choice = chat(service, **ASKED, messages=talk, **forced(ANSWER, END))
    assert next_prompt[: len(prompt) + len(drawn)] == [*prompt, *drawn]
    assert next_prompt == in_training(model, prompt, drawn, talk)
    rendered = service.processor.encode([talk], tools=[TOOL])[0][0]
    assert rendered != next_prompt, "the template would write it otherwise"
    more = [*talk, next_choice["message"], {"role": "user", "content": "Thanks"}]
    third, _ = chat(service, **ASKED, messages=more, **forced(ANSWER, END))
    assert third[: len(next_prompt) + 2] == [*next_prompt, ANSWER, END]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("the answer is changed", {"messages": [*TALK, {"role": "assistant", "content": "Let me"}, *TALK]}),
        ("a salt of its own", {"cache_salt": "a"}),
        ("other tools", {"tools": []}),
        ("other variables", {"chat_template_kwargs": {"x": 1}}),
        ("the last answer is continued", {"messages": [*TALK, SAID, *TALK, SAID]}),
    ],
)
def test_another_conversation_is_rendered_anew(service: services.Service, name: str, change: dict[str, Any]) -> None:
    plain = {**ASKED, "tools": [TOOL], "messages": TALK, **forced(ANSWER, END)}
    prompt, choice = chat(service, **plain)
    talk = [*TALK, choice["message"], *TALK]
    assert chat(service, **(plain | {"messages": talk}))[0][len(prompt) :][:2] == [ANSWER, END]
    body = plain | {"messages": talk} | change
    template = service.processor.encode([body["messages"]], tools=body["tools"], variables=body.get("chat_template_kwargs"))
    assert chat(service, **body)[0] == template[0][0]


def test_streams_thoughts_and_branches(service: services.Service) -> None:
    service.reasoning_tags = ("<think>", "</think>")
    body = {**ASKED, "messages": TALK, "stream": True, **forced(THINK, TEXT, THOUGHT, ANSWER, END)}
    parts = choices_of(service, "chat", **body)
    content = "".join(part["delta"].get("content") or "" for part in parts)
    prompt = service.read({"messages": TALK, "tools": [TOOL]}, "chat")
    talk = [*TALK, {"role": "assistant", "content": content}, *TALK]  # without the thoughts
    ids = [*prompt["prompts"][0][0], THINK, TEXT, THOUGHT, ANSWER, END]
    for question in ("a", "b"):
        branch = chat(service, **ASKED, messages=[*talk, {"role": "user", "content": question}], **forced(ANSWER, END))[0]
        assert branch[: len(ids)] == ids


@pytest.mark.parametrize("stop", [{"stop": ["see"]}, {"stop_token_ids": [TEXT]}])
def test_an_answer_that_a_stop_cut_is_not_kept(service: services.Service, stop: dict[str, Any]) -> None:
    _, choice = chat(service, **ASKED, messages=TALK, **stop, **forced(TEXT, END))
    assert choice["stop_reason"] in ("see", TEXT)
    talk = [*TALK, choice["message"], *TALK]
    assert chat(service, **ASKED, messages=talk, **forced(END))[0] == service.processor.encode([talk], tools=[TOOL])[0][0]


def test_thoughts_of_others_are_not_read(service: services.Service) -> None:
    """Two clients get one answer after different thoughts. Who sends them back reads their own; who does not, none."""
    service.reasoning_tags = ("<think>", "</think>")
    talks = []
    for thought in (TEXT, OPEN):
        _, choice = chat(service, **ASKED, messages=TALK, **forced(THINK, thought, THOUGHT, ANSWER, END))
        assert choice["token_ids"] == [THINK, thought, THOUGHT, ANSWER, END]
        talks.append(([*TALK, choice["message"], *TALK], thought))
    for talk, thought in talks:
        assert thought in chat(service, **ASKED, messages=talk, **forced(END))[0]
    plain = {key: value for key, value in talks[0][0][1].items() if key != "reasoning_content"}
    talk = [*TALK, plain, *TALK]
    assert chat(service, **ASKED, messages=talk, **forced(END))[0] == service.processor.encode([talk], tools=[TOOL])[0][0]
    edited = [*TALK, plain | {"reasoning_content": "x"}, *TALK]
    assert THINK not in chat(service, **ASKED, messages=edited, **forced(END))[0]


WANTS_CALLS = (
    "{% set ns = namespace(call=none) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|{{ ns.call }}|>{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set ns.call = c.function.name %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}{% if tools and add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_first_call_may_be_forced(service: services.Service) -> None:
    prompt, choice = chat(service, **ASKED, messages=TALK, tool_choice="required", max_tokens=200, temperature=1.0, seed=1)
    assert choice["finish_reason"] == "tool_calls", choice
    drawn = [*prompt, *choice["token_ids"]]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in choice["message"]["tool_calls"]]
    assert chat(service, **ASKED, messages=[*TALK, choice["message"], *results], **forced(END))[0][: len(drawn)] == drawn


@pytest.mark.parametrize("more", [[], TALK])
def test_a_result_has_the_name_of_its_function(service: services.Service, model: Path, more: list[dict[str, Any]]) -> None:
    """Also where the template refuses a result without its call, and writes the call's name before it."""
    service.processor.tokenizer.chat_template = WANTS_CALLS
    prompt, choice = chat(service, **ASKED, messages=TALK, **forced(*CALL, END))
    talk = [*behind(choice["message"]), *more]
    ids = chat(service, **ASKED, messages=talk, **forced(END))[0]
    drawn = [*prompt, *CALL, END]
    rendered = service.processor.encode([talk], tools=[TOOL])[0][1]
    assert ids[: len(drawn)] == drawn and rendered is not None
    text = service.processor.tokenizer.decode(ids)
    assert text.endswith(rendered.partition("</tool_call>")[2]) and "<|add|>5" in text
    assert ids == in_training(model, prompt, [*CALL, END], talk, WANTS_CALLS)


def test_a_long_message_is_refused_at_once(service: services.Service, monkeypatch: pytest.MonkeyPatch) -> None:
    _, choice = chat(service, **ASKED, messages=TALK, **forced(ANSWER, END))
    lengths = list[int]()
    encode = encoding.encode_continued
    monkeypatch.setattr(
        encoding, "encode_continued", lambda tokenizer, text: lengths.append(len(text)) or encode(tokenizer, text)
    )
    with pytest.raises(ValueError, match="characters"):
        service.read(
            {"messages": [*TALK, choice["message"], {"role": "user", "content": "x" * 1_000_000}], "tools": [TOOL]}, "chat"
        )
    assert max(lengths, default=0) < 1_000_000


def test_a_stream_is_kept_before_its_end_is_sent(service: services.Service) -> None:
    reply = arrive(service, 0, "chat", **{**ASKED, "messages": TALK, "stream": True, **forced(ANSWER, END)})
    known = []
    service.replies[0] = lambda part: known.append(bool(service.conversations and service.conversations._ids))
    while service.running or service.waiting or not service.arrivals.empty():
        service.turn()
    assert reply.empty() and known[-2:] == [True, True]  # the part with the finish reason, and the end


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 12)
    conversations, answer = Conversations(), {"role": "assistant", "content": "x"}

    def ids_of(name: str) -> list[int]:
        return conversations.attach([{"role": "user", "content": name}, answer, *TALK], [])[2]

    for name in "abab":  # the second time in place of the first
        request = conversations.attach([{"role": "user", "content": name}], [])[0]
        conversations.add(request, answer, [1, 2, 3, 4])
    assert ids_of("a") == ids_of("b") == [1, 2, 3, 4]
    assert ids_of("a")
    conversations.add(conversations.attach([{"role": "user", "content": "c"}], [])[0], answer, [5, 6, 7, 8])
    assert (ids_of("a"), ids_of("b"), ids_of("c")) == ([1, 2, 3, 4], [], [5, 6, 7, 8])


def test_two_ranks(model: Path) -> None:
    with program(model, "keep_conversations=true") as address:
        _, answer = ask(address, "/chat/completions", FIRST)
        (choice,) = answer["choices"]
        body = {**ASKED, "messages": behind(choice["message"]), **forced(ANSWER, END)}
        status, second = ask(address, "/chat/completions", body)
    assert status == 200, second
    ids = [*answer["prompt_token_ids"], *choice["token_ids"]]
    assert second["prompt_token_ids"][: len(ids)] == ids and second["choices"][0]["message"]["content"] == "So: 5."
