"""Anthropic's Messages as chats: a request becomes a chat's, and the chat's answer becomes a message, whole or as events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_spmd.agents.dialect import usage_of
from rlhf_spmd.agents.request_parts import chat_tools, joined_text, kind_of
from rlhf_spmd.config.words import check_keys, listed

# fields that a chat has under the same name
SAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "chat_template_kwargs", "cache_salt")
OTHER = ("messages", "system", "tools", "tool_choice", "stop_sequences")
# fields that clients send and that change nothing here
NO_EFFECT = ("metadata", "service_tier", "thinking", "cache_control", "context_management", "output_config", "inference_geo")
NAMES = {"stop": "stop_sequences"}  # of fields of a chat that have others here
# there is no word for a call that no token goes on with; clients take "max_tokens" as an answer that was cut
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "error": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = {"name": "name", "description": "description", "input_schema": "parameters"}
TEXTS = ("text",)
THOUGHTS = ("thinking", "redacted_thinking")


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a chat that a request for a message stands for. Raises ValueError, one line."""
    fields = {key: value for key, value in body.items() if value is not None and key not in NO_EFFECT}
    check_keys(fields, [*SAME, *OTHER, *NO_EFFECT], "")
    system = fields.get("system") or ""
    messages = [{"role": "system", "content": joined_text(system, TEXTS, "system")}] if system else []
    if not isinstance(fields.get("messages"), list):
        raise ValueError("messages must be a list of objects with 'role' and 'content'")
    for number, message in enumerate(fields["messages"]):
        messages += _messages(message, f"messages[{number}]")
    chat: dict[str, Any] = {"messages": messages} | {key: fields[key] for key in SAME if key in fields}
    if tools := fields.get("tools"):
        chat["tools"] = chat_tools(tools, "custom", TOOL_FIELDS)
    choice = fields.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in (*CHOICES, "tool"):
        raise ValueError(f"tool_choice={choice!r} must be an object of the type {listed([*CHOICES, 'tool'])}")
    chat["tool_choice"] = CHOICES.get(choice["type"]) or {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a chat that a message stands for: results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise ValueError(f"{where} must have the role 'user' or 'assistant', not {role!r}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ValueError(f"{where}.content must be text or a list of blocks")
    texts, thoughts, calls, results = [], [], [], []
    for number, block in enumerate(blocks):
        kind = kind_of(block)
        if kind == "text":
            texts.append(joined_text([block], TEXTS, f"{where}.content[{number}]"))
        elif kind in THOUGHTS and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(
                {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}
            )
        elif kind == "tool_result" and role == "user":
            result = joined_text(block.get("content") or "", TEXTS, f"{where}.content[{number}]")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            raise ValueError(
                f"{where}.content[{number}] has the type {kind!r}; only texts, thoughts and calls of tools are supported"
            )
    answer = {"role": role, "content": "".join(texts)}
    if any(thoughts):
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return [*results, answer] if texts or calls or not results else results


class MessageAnswer:
    """The answer to a request for a message, block by block, from the parts of a chat's answer.

    ``content``: its blocks so far; the last one may be open: more text may come.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.content: list[dict[str, Any]] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._is_open = False
        self._has_begun = False

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message of a chat's whole answer."""
        (choice,) = chat["choices"]
        for _ in self._advance(choice["message"], choice):
            pass  # a whole message has no events
        return self._message(chat)

    def events(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """Yield the server-sent events for a part of a chat's stream, the last of which counts tokens, or for an error."""
        if "error" in chunk:
            yield _event("error", error=chunk["error"])
            return
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message=self._message(chunk))
        for choice in chunk["choices"]:
            yield from self._advance(choice["delta"], choice)
        if chunk.get("usage"):
            end = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
            yield _event("message_delta", delta=end, usage=_usage(chunk))
            yield _event("message_stop")

    def end(self) -> Iterator[str]:
        """Yield nothing: ``message_stop`` is the last event."""
        return iter(())

    def _advance(self, message: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[str]:
        """Add what is new in a chat's answer, and yield the events."""
        for kind, text in (("thinking", message.get("reasoning_content")), ("text", message.get("content"))):
            if text:
                yield from self._text(kind, text)
        for call in message.get("tool_calls") or ():
            yield from self._close()
            arguments = call["function"]["arguments"]
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._open(block)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            block["input"] = json.loads(arguments)
        if choice["finish_reason"] is None:
            return
        yield from self._close()
        self.stop_reason = STOP_REASONS[choice["finish_reason"]]
        if self.stop_reason == "end_turn" and isinstance(choice.get("stop_reason"), str):
            self.stop_reason, self.stop_sequence = "stop_sequence", choice["stop_reason"]

    def _text(self, kind: str, text: str) -> Iterator[str]:
        if not self._is_open or self.content[-1]["type"] != kind:
            yield from self._close()
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[str]:
        self.content.append(block)
        self._is_open = True
        yield _event("content_block_start", index=len(self.content) - 1, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> str:
        return _event("content_block_delta", index=len(self.content) - 1, delta=delta)

    def _close(self) -> Iterator[str]:
        """End the block that is open, if one is."""
        if self._is_open:
            self._is_open = False
            yield _event("content_block_stop", index=len(self.content) - 1)

    def _message(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message so far."""
        return {
            "id": "msg_" + str(chat["id"]).removeprefix("chatcmpl-"),
            "type": "message",
            "role": "assistant",
            "model": chat["model"],
            "content": self.content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": _usage(chat),
        }


def _usage(chat: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens; 0 while they are not known. Those that were in the cache are counted apart."""
    counts = chat.get("usage") or usage_of(0, 0, 0)
    num_cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - num_cached,
        "output_tokens": counts["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
    }


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
