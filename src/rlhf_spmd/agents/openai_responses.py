"""OpenAI's Responses as chats: a request becomes a chat's, and the chat's answer becomes a response, whole or as events. Pure.

Nothing is kept between requests: each has its whole conversation as ``input``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_spmd.agents.dialect import NO_EFFECT, SAMPLING
from rlhf_spmd.agents.request_parts import chat_tools, joined_text, kind_of
from rlhf_spmd.config.words import check_keys, listed

# fields that a chat has under the same name
SAME = ("model", "stream", "parallel_tool_calls", "chat_template_kwargs", "cache_salt", *SAMPLING)
NO_STORE = "responses are not kept; leave it out, and send the whole conversation as input"
# fields that are refused, with the values that ask for nothing, and why
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), NO_STORE),
    "conversation": ((), NO_STORE),
    "store": ((False,), NO_STORE),
    "background": ((False,), NO_STORE),
    "prompt": ((), "no prompts are kept; send instructions and input"),
    "context_management": ((), "a conversation is not changed; send one that fits"),
    "truncation": (("disabled",), "a conversation is not changed; send one that fits"),
    "include": (([], ["reasoning.encrypted_content"]), "only 'reasoning.encrypted_content' may be named, and changes nothing"),
    "max_tool_calls": ((), "the server has no tools of its own"),
    "top_logprobs": ((0,), "log-probs are in the answers of /v1/chat/completions"),
}
OTHER = ("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "stream_options")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
# fields of a chat that have other names here
NAMES = {"response_format": "text.format", "verbosity": "text.verbosity", "reasoning_effort": "reasoning.effort"}
TOOL_FIELDS = {"name": "name", "description": "description", "parameters": "parameters"}
STATUSES = {"length": "incomplete", "error": "failed"}  # by why a chat ended; else it is completed
DEAD_END = {"code": "server_error", "message": "no token of the model goes on with a text of text.format, or with a call"}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")  # types of parts


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a chat that a request for a response stands for. Raises ValueError, one line."""
    fields = {key: value for key, value in body.items() if value is not None}
    for key, (harmless, why) in REFUSED.items():
        if key in fields and fields.pop(key) not in harmless:
            raise ValueError(f"{key}={body[key]!r} is not supported: {why}")
    check_keys(fields, [*SAME, *OTHER, *NO_EFFECT, *REFUSED], "")
    messages = _messages(fields.get("input"))
    if "instructions" in fields:
        messages.insert(0, {"role": "system", "content": fields["instructions"]})
    chat: dict[str, Any] = {"messages": messages} | {key: fields[key] for key in SAME if key in fields}
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if tools := fields.get("tools"):
        chat["tools"] = chat_tools(tools, "function", TOOL_FIELDS)
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    text, reasoning = (_object(fields, key) for key in ("text", "reasoning"))
    format = _object(text, "format", "text.")
    if format.get("type") == "json_schema":
        schema = {key: format[key] for key in ("name", "schema", "strict", "description") if key in format}
        format = {"type": "json_schema", "json_schema": schema}
    if format == {"type": "text"}:  # the default, which clients may spell out
        format = {}
    more = {"response_format": format or None, "verbosity": text.get("verbosity"), "reasoning_effort": reasoning.get("effort")}
    if fields.get("stream"):
        more["stream_options"] = {"include_usage": True}
    return chat | {"tool_choice": choice} | {key: value for key, value in more.items() if value is not None}


def _object(fields: Mapping[str, Any], key: str, where: str = "") -> dict[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}{key} must be an object, not {value!r}")
    return value


def _messages(items: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. Thoughts go to the assistant's next message, calls to the one that they follow."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ValueError("input must be text or a list of items")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = kind_of(item, "message")
        if kind == "reasoning":
            thoughts += joined_text(item.get("content") or item.get("summary") or "", TEXTS, where)
        elif kind == "function_call_output":
            content = joined_text(item.get("output"), TEXTS, where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": joined_text(item.get("content"), TEXTS, where)})
        elif kind == "function_call":
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {key: item.get(key) for key in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            raise ValueError(f"{where} has the type {kind!r}; allowed: {listed(ITEMS)}")
        if thoughts and kind in ("message", "function_call") and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thoughts = thoughts, ""
    return messages


class ResponseAnswer:
    """A response to ``request``, item by item, from the parts of a chat's answer.

    - output: its items so far; the last one may be open: more text may come
    - status: of the response
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request = request
        self.output: list[dict[str, Any]] = []
        self.status = "in_progress"
        self._is_open = False
        self._num_events = 0

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of a chat's whole answer."""
        (choice,) = chat["choices"]
        for _ in self._advance(_number(chat), choice["message"], choice["finish_reason"]):
            pass  # a whole response has no events
        return self._response(chat)

    def events(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """Yield the server-sent events for a part of a chat's stream, the last of which counts tokens, or for an error."""
        if "error" in chunk:
            yield f"data: {json.dumps(chunk)}\n\n"
            return
        if not self._num_events:
            yield self._event("response.created", response=self._response(chunk))
            yield self._event("response.in_progress", response=self._response(chunk))
        for choice in chunk["choices"]:
            yield from self._advance(_number(chunk), choice["delta"], choice["finish_reason"])
        if "usage" in chunk:
            yield self._event(f"response.{self.status}", response=self._response(chunk))

    def end(self) -> Iterator[str]:
        """Yield nothing: the event with the status is the last."""
        return iter(())

    def _advance(self, number: str, message: Mapping[str, Any], finish_reason: str | None) -> Iterator[str]:
        """Add what is new in a chat's answer, and yield the events."""
        for kind, text in (("reasoning", message.get("reasoning_content")), ("message", message.get("content"))):
            if text:
                yield from self._text(number, kind, text)
        for call in message.get("tool_calls") or ():
            yield from self._close("completed")
            yield from self._call(number, call)
        if finish_reason is None:
            return
        if not self.output:
            yield from self._open(number, "message")
        self.status = STATUSES.get(finish_reason, "completed")
        yield from self._close("completed" if self.status == "completed" else "incomplete")

    def _text(self, number: str, kind: str, text: str) -> Iterator[str]:
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(number, kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        yield self._event(f"response.{part['type']}.delta", **self._place(0), delta=text, **_logprobs(part))

    def _open(self, number: str, kind: str) -> Iterator[str]:
        """Begin an item of text."""
        head: dict[str, Any] = {"id": f"msg_{number}_{len(self.output)}", "type": kind, "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if kind == "reasoning":
            head = {"id": f"rs_{number}_{len(self.output)}", "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.output.append(head | {"status": "in_progress", "content": []})
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=self.output[-1])
        self.output[-1]["content"].append(part)
        yield self._event("response.content_part.added", **self._place(0), part=part)

    def _close(self, status: str) -> Iterator[str]:
        """End the item of text that is open, if one is."""
        if not self._is_open:
            return
        item, self._is_open = self.output[-1], False
        (part,) = item["content"]
        item["status"] = status
        yield self._event(f"response.{part['type']}.done", **self._place(0), text=part["text"], **_logprobs(part))
        yield self._event("response.content_part.done", **self._place(0), part=part)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _call(self, number: str, call: Mapping[str, Any]) -> Iterator[str]:
        """Add a call, which is complete."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        head = {"id": f"fc_{number}_{len(self.output)}", "type": "function_call", "call_id": call["id"], "name": name}
        self.output.append(head | {"arguments": arguments, "status": "completed"})
        place = {"output_index": len(self.output) - 1}
        begun = self.output[-1] | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **place, item=begun)
        yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
        yield self._event("response.function_call_arguments.done", **self._place(), name=name, arguments=arguments)
        yield self._event("response.output_item.done", **place, item=self.output[-1])

    def _place(self, *content_index: int) -> dict[str, Any]:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        return place | ({"content_index": content_index[0]} if content_index else {})

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def _response(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response so far. Cached tokens and those of reasoning are not counted."""
        usage = None
        if (counts := chat.get("usage")) is not None:
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
        is_cut = self.status == "incomplete"
        settings = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0}
        settings |= {"instructions": None, "max_output_tokens": None, "metadata": {}, "text": {"format": {"type": "text"}}}
        return {
            "id": f"resp_{_number(chat)}",
            "object": "response",
            "created_at": chat["created"],
            "status": self.status,
            "error": DEAD_END if self.status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": chat["model"],
            "output": self.output,
            "usage": usage,
            "store": False,
            **{key: default if self.request.get(key) is None else self.request[key] for key, default in settings.items()},
        }


def _number(chat: Mapping[str, Any]) -> str:
    """Return what numbers an answer, from the chat's id."""
    return str(chat["id"]).removeprefix("chatcmpl-")


def _logprobs(part: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    return {"logprobs": part["logprobs"]} if "logprobs" in part else {}
