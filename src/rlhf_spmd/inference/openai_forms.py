"""Turns OpenAI's requests into ``SamplingParams``, and ``CompletionOutput`` into OpenAI's answers. Pure."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isnan
from typing import Any, Literal

from rlhf_spmd.config.rules import check_section
from rlhf_spmd.config.schema import read_section
from rlhf_spmd.data.tokenizer import UNFINISHED
from rlhf_spmd.inference.requests import is_ids
from rlhf_spmd.inference.sampling_params import Logprob, SamplingParams

# fields that do not concern sampling
OTHER = ("model", "prompt", "messages", "user", "metadata", "store", "service_tier")
INTERNAL = ("prompt_logprobs", "logits_processors")  # fields of SamplingParams that requests may not set
# fields of OpenAI's and vLLM's that are not supported, with the values that ask for nothing
NOT_YET: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
}
# older names of vLLM's, and the forms of structured_outputs that they stand for
GUIDED = {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}
MAX_DEPTH = 100  # of nested lists and objects in a request's JSON
MAX_STOPS, STOP_CHARACTERS = 64, 4096  # stop texts of a request, and their characters: all are looked for after each token
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half a character
LEAST_LOGPROB = -9999.0  # JSON has no infinity
CHARACTER_BYTES = 4  # at most in UTF-8, so at most this many tokens share a character
ToBytes = Callable[[int, str], list[int] | None]  # (token, its text) -> its bytes
Entry = dict[int, Logprob]  # for a token: itself first, then the likeliest


class HttpError(ValueError):
    """An error with another HTTP status than 400."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON of an answer to a request that failed with ``error``."""
    status = getattr(error, "status", 400 if isinstance(error, ValueError) else 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": getattr(error, "code", None)}}


def read_body(raw: bytes) -> dict[str, Any]:
    """Return a request's JSON object. Raises ValueError if it is none, too deep, or has text that is not Unicode."""

    def depth(value: Any) -> int:
        children = value.values() if isinstance(value, dict) else value
        return 1 + max((depth(child) for child in children if isinstance(child, dict | list)), default=0)

    text = raw.decode("utf-8-sig")
    try:
        body = json.loads(text)
        is_deep = isinstance(body, dict) and depth(body) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"a request's JSON is at most {MAX_DEPTH} values deep")
    if not isinstance(body, dict):
        raise ValueError("a request is a JSON object")
    if SURROGATE.search(text):
        json.dumps(body, ensure_ascii=False).encode()
    return body


def check_sizes(body: Mapping[str, Any], vocab_size: int, longest: int) -> None:
    """Raise ValueError for a field that is longer than it can be, before it is read: that would hold up other requests.

    ``longest``: tokens of a prompt and its response.
    """
    for key, value in body.items():
        limit = {"prompt": sys.maxsize, "messages": longest, "stop": MAX_STOPS}.get(key, vocab_size)
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"{key} has {len(value)} entries, and may have {limit}")
    stop = body.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    length = sum(len(text) for text in stops if isinstance(text, str))
    if length > STOP_CHARACTERS:
        raise ValueError(f"stop has {length} characters, and may have {STOP_CHARACTERS}")


def prompts_of(body: Mapping[str, Any], chat: bool) -> list[Any]:
    """Return the prompts of a request. Raises ValueError for messages that are no list of objects."""
    if not chat:
        prompt = body.get("prompt")
        return [prompt] if not isinstance(prompt, list) or is_ids(prompt) else prompt
    if not isinstance(messages := body.get("messages"), list):
        raise ValueError("messages must be a list of objects with 'role' and 'content', text or a list of texts")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} must be an object with 'role' and 'content'")
    return [messages]


@dataclass(frozen=True)
class StreamOptions:
    """OpenAI's ``stream_options``. ``include_usage``: a last part of the stream counts tokens."""

    include_usage: bool = False


@dataclass(frozen=True)
class JsonSchema:
    """OpenAI's ``json_schema``. Only ``schema`` has an effect: a response always follows it strictly."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class ResponseFormat:
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    def check(self, where: str) -> None:
        """Raise ValueError for a schema that is missing or would have no effect."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"{where}.type={self.type}: json_schema is for type json_schema, which needs it")


@dataclass(frozen=True)
class AnswerFormat:
    """The fields of a request that decide the form of its answer.

    - stream: send the answer in parts, as tokens are drawn
    - echo: only for completions: repeat the prompt, with the log-probs of its tokens, before the response
    - chat_template_kwargs: only for chats: variables of the chat template
    - response_format: what the response must be
    - generates: false for ``max_tokens`` 0, which answers with the prompt alone
    """

    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    echo: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    generates: bool = True


def structured_outputs_of(settings: dict[str, Any], format: ResponseFormat) -> Any:
    """Return the field ``structured_outputs``, which may have other names. Removes them from ``settings``.

    Raises ValueError if there are two.
    """
    asked = {key: settings.pop(key) for key in ("structured_outputs", *GUIDED) if key in settings}
    asked = {key: {GUIDED[key]: value} if key in GUIDED else value for key, value in asked.items()}
    if format.type != "text":
        asked["response_format"] = {"json": format.json_schema.schema} if format.json_schema else {"json_object": True}
    if len(asked) > 1:
        raise ValueError(f"{', '.join(asked)}: a response follows one of them; leave the others out")
    return next(iter(asked.values()), None)


def read_request(body: Mapping[str, Any], chat: bool) -> tuple[AnswerFormat, SamplingParams]:
    """Return how a request is to be answered and sampled. Raises ValueError, also for fields that are not supported.

    ``max_tokens`` may be 0 with ``echo``; the sampling parameters then have 1.
    """
    request_fields = {key: value for key, value in body.items() if value is not None and value not in NOT_YET.get(key, ())}
    for key in NOT_YET:
        if key in request_fields:
            raise ValueError(f"{key} {'are' if key.endswith('s') else 'is'} not supported yet; leave the field out")
    format_keys = {field.name for field in fields(AnswerFormat)} - {"generates"}
    settings = {key: value for key, value in request_fields.items() if key not in OTHER and key not in format_keys}
    if bad := [key for key in INTERNAL if key in settings]:
        raise ValueError(f"unknown key '{bad[0]}'")
    if chat:
        settings["max_tokens"] = settings.pop("max_completion_tokens", settings.get("max_tokens"))
        likeliest = settings.pop("top_logprobs", 0)
        settings["logprobs"] = likeliest if settings.pop("logprobs", False) else None
    format_values = {key: value for key, value in request_fields.items() if key in format_keys}
    format: AnswerFormat = read_section(AnswerFormat, format_values, strict=True)
    check_section(format.response_format, "response_format")
    settings["structured_outputs"] = structured_outputs_of(settings, format.response_format)
    if type(max_tokens := settings.get("max_tokens")) is int and max_tokens == 0:  # neither false nor 0.0
        format = replace(format, generates=False)
        settings["max_tokens"] = 1
    params: SamplingParams = read_section(SamplingParams, settings, strict=True)
    if format.echo and chat:
        raise ValueError("echo=true is for /v1/completions: a chat's prompt is its messages")
    if format.chat_template_kwargs and not chat:
        raise ValueError("chat_template_kwargs are for /v1/chat/completions: a completion's prompt has no template")
    if not (format.generates or format.echo):
        raise ValueError("max_tokens=0 is for echo=true, which answers with the prompt; otherwise it must be at least 1")
    return format, replace(params, prompt_logprobs=params.logprobs if format.echo else None)


@dataclass(frozen=True)
class TextDelta:
    """A whole response, or the part that a stream has not sent yet.

    - entries: log-probs of its tokens, if the request asks for them; NaN for a token without one, such as a prompt's first
    - offsets: for completions, where each token begins in the whole text
    - finish_reason: None while the response goes on
    - reasoning: what comes before ``text``; None if it is not separated
    """

    text: str
    entries: Sequence[Entry] | None = None
    offsets: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None


def choice_of(index: int, delta: TextDelta, chat: bool, to_bytes: ToBytes, part: str | None = None) -> dict[str, Any]:
    """Return the ``choice`` of an OpenAI answer. ``part``: the "first" or a "later" one of a stream; None: a whole response."""
    content: dict[str, Any] = {"text": delta.text}
    if chat:
        role = {} if part == "later" else {"role": "assistant"}
        reasoning = {} if delta.reasoning is None else {"reasoning_content": delta.reasoning or None}
        content = {"message" if part is None else "delta": {**role, **reasoning, "content": delta.text}}
    log_probs = None
    if delta.entries is not None:
        log_probs = _chat_logprobs(delta.entries, to_bytes) if chat else _completion_logprobs(delta.entries, delta.offsets)
    ends = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    return {"index": index, **content, "logprobs": log_probs, **ends}


def _completion_logprobs(entries: Sequence[Entry], offsets: Sequence[int]) -> dict[str, Any]:
    """Return a completion's ``logprobs``. ``top_logprobs`` has the token itself, too, and of equal texts the likeliest."""
    drawn = [next(iter(entry.values())) for entry in entries]
    top_logprobs = []
    for token, entry in zip(drawn, entries, strict=True):
        tokens = [token, *(likely for _, likely in reversed(_ranked(entry)))]  # of equal texts the last stays
        by_text = {log_prob.decoded_token: _finite(log_prob.logprob) for log_prob in tokens}
        top_logprobs.append(None if isnan(token.logprob) else by_text)
    return {
        "tokens": [token.decoded_token for token in drawn],
        "token_logprobs": [_finite(token.logprob) for token in drawn],
        "top_logprobs": top_logprobs,
        "text_offset": [*offsets],
    }


def _chat_logprobs(entries: Sequence[Entry], to_bytes: ToBytes) -> dict[str, Any]:
    def logprob_object(token: int, log_prob: Logprob) -> dict[str, Any]:
        text = log_prob.decoded_token
        return {"token": text, "logprob": _finite(log_prob.logprob), "bytes": to_bytes(token, text)}

    content = []
    for entry in entries:
        top_logprobs = [logprob_object(*pair) for pair in _ranked(entry)]
        content.append({**logprob_object(*next(iter(entry.items()))), "top_logprobs": top_logprobs})
    return {"content": content}


def _ranked(entry: Entry) -> list[tuple[int, Logprob]]:
    """Return the likeliest tokens in order."""
    return sorted((pair for pair in entry.items() if pair[1].rank), key=lambda pair: pair[1].rank or 0)


def _finite(log_prob: float) -> float | None:
    return None if isnan(log_prob) else max(log_prob, LEAST_LOGPROB)


class TextOffsets:
    """Finds where each token begins in a text that grows; ``length``: its characters so far.

    ``decode`` turns token ids into text that continues other text. A token that does not end its character begins where the
    character does.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], length: int = 0) -> None:
        self.decode = decode
        self.length = length
        self._texts: dict[int, str] = {}
        self._open: list[int] = []  # the tokens so far of an incomplete character

    def add(self, ids: Sequence[int]) -> list[int]:
        """Return where the next tokens begin."""
        offsets = []
        for token in ids:
            offsets.append(self.length)
            self._open.append(token)
            if token not in self._texts:
                self._texts[token] = self.decode([token])
            text = self._texts[token] if len(self._open) == 1 else self.decode(self._open)
            if not text.endswith(UNFINISHED) or len(self._open) == CHARACTER_BYTES:
                self.length += len(text)
                self._open.clear()
        return offsets
