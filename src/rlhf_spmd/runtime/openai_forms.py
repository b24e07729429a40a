"""OpenAI's requests and answers, between their JSON and ``SamplingParams`` and ``CompletionOutput``. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_spmd.config.schema import Reader
from rlhf_spmd.runtime.llm import is_ids
from rlhf_spmd.runtime.sampling_params import CompletionOutput, Logprob, SamplingParams

# not of sampling
OTHER = ("model", "prompt", "messages", "stream", "stream_options", "user", "metadata", "store", "service_tier")
INTERNAL = ("prompt_logprobs", "logits_processors")  # of sampling, and not for requests
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {  # values of fields that are refused otherwise
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
}
MOST_DEPTH = 100  # of a request's JSON
ToBytes = Callable[[int, str], list[int] | None]  # of a token and its text


def read_body(raw: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no JSON object that can be sent on: deeper than anybody needs, or text that is no Unicode."""

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, inner), default=0)

    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()
        is_deep = depth(body) > MOST_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"a request's JSON is at most {MOST_DEPTH} values deep")
    if not isinstance(body, dict):
        raise ValueError("a request is a JSON object")
    return body


def prompts_of(body: Mapping[str, Any], chat: bool) -> list[Any]:
    """Raises ValueError. A message's content may come as parts of text."""
    if not chat:
        prompt = body.get("prompt")
        return [prompt] if not isinstance(prompt, list) or is_ids(prompt) else prompt
    try:
        said = [message["content"] for message in body["messages"]]
        texts = ["".join(part["text"] for part in each) if isinstance(each, list) else each for each in said]
        return [[{**message, "content": text} for message, text in zip(body["messages"], texts, strict=True)]]
    except (KeyError, TypeError) as error:
        raise ValueError("messages must be a list of objects with 'role' and 'content', text or a list of texts") from error


def params_of(body: Mapping[str, Any], chat: bool) -> SamplingParams:
    """Raises ValueError, also for what nobody here would follow."""
    asked = {key: value for key, value in body.items() if value is not None and value not in ASKS_NOTHING.get(key, ())}
    given = {key: value for key, value in asked.items() if key not in OTHER}
    if chat:
        given["max_tokens"] = given.pop("max_completion_tokens", given.get("max_tokens"))
        likeliest = given.pop("top_logprobs", 0)
        given["logprobs"] = likeliest if given.pop("logprobs", False) else None
    if body.get("stream") and given.get("logprobs") is not None:
        raise ValueError("logprobs come with whole responses; leave out logprobs, or stream")
    if bad := [key for key in INTERNAL if key in given]:
        raise ValueError(f"unknown key '{bad[0]}'")
    params: SamplingParams = Reader(SamplingParams, {}, given, interpolated=False, strict=True).read()
    return params


def choice(index: int, its: CompletionOutput, chat: bool, to_bytes: ToBytes) -> dict[str, Any]:
    """A whole response as OpenAI tells it."""
    said = {"message": {"role": "assistant", "content": its.text}} if chat else {"text": its.text}
    told: dict[str, Any] | None = None
    if its.logprobs is not None:
        entries = [[*entry.items()] for entry in its.logprobs]  # the drawn one first
        ranked = [sorted((each for each in entry if each[1].rank), key=lambda each: each[1].rank or 0) for entry in entries]
        drawn, best = [entry[0][1] for entry in entries], [[each for _, each in likeliest] for likeliest in ranked]
        if chat:
            named = [[_named(*each, to_bytes) for each in (entry[0], *top)] for entry, top in zip(entries, ranked, strict=True)]
            told = {"content": [{**first, "top_logprobs": likeliest} for first, *likeliest in named]}
        else:
            told = {"tokens": [token.decoded_token for token in drawn], "token_logprobs": [token.logprob for token in drawn]}
            # of tokens with one text the likeliest
            told["top_logprobs"] = [{each.decoded_token: each.logprob for each in reversed(likeliest)} for likeliest in best]
    return {"index": index, **said, "logprobs": told, "finish_reason": its.finish_reason, "stop_reason": its.stop_reason}


def _named(token: int, its: Logprob, to_bytes: ToBytes) -> dict[str, Any]:
    return {"token": its.decoded_token, "logprob": its.logprob, "bytes": to_bytes(token, its.decoded_token)}
