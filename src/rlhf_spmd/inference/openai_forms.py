"""Turns requests of OpenAI and vLLM into ``SamplingParams``, and ``CompletionOutput`` into their answers. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isnan
from typing import Any, Literal

from rlhf_spmd.agents.answer_calls import calls_schema, check_tools
from rlhf_spmd.agents.dialect import NO_EFFECT
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.config.schema import read_section
from rlhf_spmd.config.words import check_keys
from rlhf_spmd.data.messages import thoughts_of
from rlhf_spmd.data.tokenizer import UNFINISHED
from rlhf_spmd.inference.requests import is_ids
from rlhf_spmd.inference.sampling_params import Logprob, SamplingParams

# what a request and its answer look like: OpenAI's chat or completion, or token ids in and out, as vLLM's /inference/v1/generate
Dialect = Literal["chat", "completion", "generate"]
# fields that do not concern sampling
OTHER = ("model", "prompt", "messages", *NO_EFFECT)
# fields of SamplingParams that requests may set
SAMPLING_KEYS = [field.name for field in fields(SamplingParams) if field.name not in ("prompt_logprobs", "logits_processors")]
CHAT_NAMES = ("max_completion_tokens", "top_logprobs")  # OpenAI's names of sampling fields in chats
# fields of OpenAI's and vLLM's that are not supported, with the values that ask for nothing
NOT_YET: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "priority": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
}
# older names of vLLM's, and the forms of structured_outputs that they stand for
GUIDED = {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}
# fields of a request in the dialect "generate"
GENERATE = ("model", "token_ids", "sampling_params", "stream", "stream_options", "request_id", "cache_salt", "priority")
CHAT_ONLY = ("chat_template_kwargs", "tools", "reasoning_effort")
MAX_STOPS, STOP_CHARACTERS = 64, 4096  # stop texts of a request, and their characters: all are looked for after each token
LEAST_LOGPROB = -9999.0  # JSON has no infinity
CHARACTER_BYTES = 4  # at most in UTF-8, so at most this many tokens share a character
ToBytes = Callable[[int, str], list[int] | None]  # (token, its text) -> its bytes
Entry = dict[int, Logprob]  # for a token: itself first, then the likeliest


def with_sampling_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request in the dialect "generate" as a completion has its fields. Raises ValueError."""
    request_fields = {key: value for key, value in body.items() if value is not None}
    check_keys(request_fields, GENERATE, "")
    params = request_fields.pop("sampling_params", {})
    if not isinstance(params, dict):
        raise ValueError("sampling_params must be an object")
    params = {key: value for key, value in params.items() if value is not None}
    check_keys(params, SAMPLING_KEYS, "sampling_params.")
    prompt = request_fields.pop("token_ids", None)
    return {**params, **request_fields, "prompt": prompt}


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


def prompts_of(body: Mapping[str, Any], dialect: Dialect) -> list[Any]:
    """Return the prompts of a request. Raises ValueError for messages that are no list of objects.

    A message with thoughts has them under both names that chat templates read, as in vLLM.
    """
    if dialect != "chat":
        prompt = body.get("prompt")
        if dialect == "generate" and not is_ids(prompt):
            raise ValueError("token_ids must be a non-empty list of token ids")
        return [prompt] if not isinstance(prompt, list) or is_ids(prompt) else prompt
    if not isinstance(messages := body.get("messages"), list):
        raise ValueError("messages must be a list of objects with 'role' and 'content', text or a list of texts")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} must be an object with 'role' and 'content'")
    thoughts = [thoughts_of(message) for message in messages]
    named = [{"reasoning_content": said, "reasoning": said} if said else {} for said in thoughts]
    return [[message | names for message, names in zip(messages, named, strict=True)]]


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
    - tools: only for chats: OpenAI's schemas of functions that the model may call; the template shows them to the model
    - tool_choice: "none": calls are not read, and stay in the text; "required", or the name of a function in OpenAI's form: the
      response is a call, which :func:`calls_schema` describes. parallel_tool_calls: false: only the first call is given
    - reasoning_effort: only for chats: a variable of the chat template
    - return_token_ids: give the ids of the prompt and of the response. return_tokens_as_token_ids: log-probs name tokens by their ids
    - request_id: part of the answer's id; None: a number. cache_salt: only requests with an equal one share the cache of prompts
    - generates: false for ``max_tokens`` 0, which answers with the prompt alone
    """

    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    echo: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    cache_salt: str | None = None
    generates: bool = True

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Return the tools of which the response must call one; none if it is free. Raises ValueError."""
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return []
        if choice == "required":
            chosen = self.tools
        else:
            function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
            if not isinstance(function, dict):
                raise ValueError(
                    f"tool_choice={choice!r} is not known; allowed: 'auto', 'none', 'required', "
                    "{'type': 'function', 'function': {'name': ...}}"
                )
            chosen = [tool for tool in self.tools if tool["function"]["name"] == function.get("name")]
        if not chosen:
            raise ValueError(f"tool_choice={choice!r}: tools has {'no such function' if self.tools else 'none'}")
        return chosen


def structured_outputs_of(settings: dict[str, Any], format: AnswerFormat) -> Any:
    """Return the field ``structured_outputs``, which may have other names. Removes them from ``settings``.

    Raises ValueError if there are two. A call that must come goes before ``response_format``, which is for answers.
    """
    asked = {key: settings.pop(key) for key in ("structured_outputs", *GUIDED) if key in settings}
    asked = {key: {GUIDED[key]: value} if key in GUIDED else value for key, value in asked.items()}
    response_format = format.response_format
    if tools := format.forced_tools:
        asked["tool_choice"] = {"json": calls_schema(tools, format.parallel_tool_calls and format.tool_choice == "required")}
    elif (schema := response_format.json_schema) is not None:
        asked["response_format"] = {"json": schema.schema}
    elif response_format.type != "text":
        asked["response_format"] = {"json_object": True}
    if len(asked) > 1:
        raise ValueError(f"{', '.join(asked)}: a response follows one of them; leave the others out")
    return next(iter(asked.values()), None)


def read_request(body: Mapping[str, Any], dialect: Dialect) -> tuple[AnswerFormat, SamplingParams]:
    """Return how a request is to be answered and sampled. Raises ValueError, also for fields that are not supported.

    ``max_tokens`` may be 0 with ``echo``; the sampling parameters then have 1.
    """
    request_fields = {key: value for key, value in body.items() if value is not None and value not in NOT_YET.get(key, ())}
    for key in NOT_YET:
        if key in request_fields:
            raise ValueError(f"{key} {'are' if key.endswith('s') else 'is'} not supported yet; leave the field out")
    format_keys = [field.name for field in fields(AnswerFormat) if field.name != "generates"]
    check_keys(request_fields, [*OTHER, *format_keys, *SAMPLING_KEYS, *GUIDED, *(CHAT_NAMES if dialect == "chat" else ())], "")
    settings = {key: value for key, value in request_fields.items() if key not in OTHER and key not in format_keys}
    if dialect == "chat":
        settings["max_tokens"] = settings.pop("max_completion_tokens", settings.get("max_tokens"))
        likeliest = settings.pop("top_logprobs", 0)
        settings["logprobs"] = likeliest if settings.pop("logprobs", False) else None
    elif dialect == "generate":
        settings.setdefault("max_tokens", None)  # what the context leaves
    format_values = {key: value for key, value in request_fields.items() if key in format_keys}
    format: AnswerFormat = read_section(AnswerFormat, format_values, strict=True)
    check_section(format.response_format, "response_format")
    check_tools(format.tools)
    settings["structured_outputs"] = structured_outputs_of(settings, format)
    if type(max_tokens := settings.get("max_tokens")) is int and max_tokens == 0:  # neither false nor 0.0
        format = replace(format, generates=False)
        settings["max_tokens"] = 1
    params: SamplingParams = read_section(SamplingParams, settings, strict=True)
    if format.echo and dialect == "chat":
        raise ValueError("echo=true is for /v1/completions: a chat's prompt is its messages")
    for key in CHAT_ONLY:
        if getattr(format, key) and dialect != "chat":
            raise ValueError(
                f"{key} {'are' if key.endswith('s') else 'is'} for /v1/chat/completions: a completion's prompt has no template"
            )
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
    - calls: of tools, in OpenAI's form; first_call: the number of the first one in its response
    - token_ids: of its tokens; None: the request does not ask for them
    - prompt_ids: of its prompt, in its first part, if the request asks for them
    """

    text: str
    entries: Sequence[Entry] | None = None
    offsets: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    calls: Sequence[dict[str, Any]] = ()
    first_call: int = 0
    token_ids: Sequence[int] | None = None
    prompt_ids: Sequence[int] | None = None


def choice_of(
    index: int, delta: TextDelta, dialect: Dialect, to_bytes: ToBytes | None, part: str | None = None
) -> dict[str, Any]:
    """Return the ``choice`` of an answer. ``part``: the "first" or a "later" one of a stream; None: a whole response.

    ``to_bytes``: None: log-probs name tokens by their ids.
    """
    entries = delta.entries
    if entries is not None and to_bytes is None:
        entries = _named_by_id(entries)
    ends = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    ids = {} if delta.token_ids is None else {"token_ids": [*delta.token_ids]}
    if dialect == "completion":
        log_probs = None if entries is None else _completion_logprobs(entries, delta.offsets)
        ids |= {} if delta.prompt_ids is None else {"prompt_token_ids": [*delta.prompt_ids]}
        return {"index": index, "text": delta.text, "logprobs": log_probs, **ends, **ids}
    if dialect == "generate":
        log_probs = None if entries is None else _chat_logprobs(entries, to_bytes)
        return {"index": index, **ids, "logprobs": log_probs, "finish_reason": delta.finish_reason}
    message: dict[str, Any] = {} if part == "later" else {"role": "assistant"}
    if delta.reasoning is not None:
        message["reasoning_content"] = delta.reasoning or None
    message["content"] = (delta.text or None) if delta.calls else delta.text
    if delta.calls:
        calls = [{"index": number, **call} for number, call in enumerate(delta.calls, delta.first_call)]
        message["tool_calls"] = [*delta.calls] if part is None else calls
    log_probs = None if entries is None else _chat_logprobs(entries, to_bytes)
    return {"index": index, "message" if part is None else "delta": message, "logprobs": log_probs, **ends, **ids}


def _named_by_id(entries: Sequence[Entry]) -> list[Entry]:
    """Return log-probs whose tokens have vLLM's names for ids in place of texts."""
    return [
        {token: replace(log_prob, decoded_token=f"token_id:{token}") for token, log_prob in entry.items()} for entry in entries
    ]


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


def _chat_logprobs(entries: Sequence[Entry], to_bytes: ToBytes | None) -> dict[str, Any]:
    def logprob_object(token: int, log_prob: Logprob) -> dict[str, Any]:
        text = log_prob.decoded_token
        return {"token": text, "logprob": _finite(log_prob.logprob), "bytes": to_bytes and to_bytes(token, text)}

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
