"""The forms in which a conversation is asked for and answered over HTTP: OpenAI's chats, its Responses, Anthropic's Messages.

A chat is the form that everything behind it reads; the others are translated to it and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_spmd.agents import anthropic_messages, openai_responses


class AnswerForm(Protocol):
    """An answer in one of the forms, from that of a chat."""

    def whole(self, chat: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the whole answer."""

    def events(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """Yield the server-sent events for a part of a chat's stream, or for an error."""

    def end(self) -> Iterator[str]:
        """Yield the events behind the last part."""


class ChatAnswer:
    """The answer of a chat as it is."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        pass

    def whole(self, chat: Mapping[str, Any]) -> Mapping[str, Any]:
        return chat

    def events(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        yield f"data: {json.dumps(chunk)}\n\n"

    def end(self) -> Iterator[str]:
        yield "data: [DONE]\n\n"


@dataclass(frozen=True)
class Form:
    """A form of requests and answers.

    - path: behind the address of the API
    - chat_of: returns the request for a chat that a request stands for; raises ValueError
    - answer: returns the answer to a request, before its parts have come
    - names: a client's names of fields of a chat, where they are others
    """

    path: str
    chat_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    answer: Callable[[Mapping[str, Any]], AnswerForm]
    names: Mapping[str, str] = field(default_factory=dict)


CHAT = Form("chat/completions", lambda body: body, ChatAnswer)
TRANSLATED = (
    Form("responses", openai_responses.chat_of, openai_responses.ResponseAnswer, openai_responses.NAMES),
    Form("messages", anthropic_messages.chat_of, anthropic_messages.MessageAnswer, anthropic_messages.NAMES),
)
