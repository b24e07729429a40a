"""The tokens of chats that a server has answered, so that later requests go on from what the model drew. As agents do in training."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from rlhf_spmd.agents.forest import canonical, conversation_digests, digest
from rlhf_spmd.data.messages import Message

MAX_TOKENS = 1 << 24  # of all conversations; those that were not used for the longest time are forgotten


class Conversations:
    """Token ids of conversations up to the end of an answer. Any thread may call.

    A conversation is named by a digest of its messages and of what else decides its text.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._num_tokens = 0
        self._lock = Lock()

    def attach(self, messages: Sequence[Message], options: Any) -> tuple[str, list[int], list[Message]]:
        """Return the digest of a request, the tokens of the longest conversation that it goes on from, and the messages behind it.

        There are no tokens, and all messages, if none is a prefix of it. ``options``: what decides the text beside the messages.
        """
        digests = conversation_digests(messages, options)
        with self._lock:
            for number in range(len(messages) - 1, 0, -1):
                if digests[number] in self._ids:
                    self._ids.move_to_end(digests[number])
                    return digests[-1], self._ids[digests[number]].tolist(), list(messages[number:])
        return digests[-1], [], list(messages)

    def add(self, request: str, answer: Message, ids: Sequence[int]) -> None:
        """Keep the tokens of a conversation: of the request with this digest and of its ``answer``. Of equal answers the last stays."""
        with self._lock:
            name = digest(request, canonical(answer))
            self._num_tokens += len(ids) - len(self._ids.pop(name, ()))
            self._ids[name] = array("i", ids)
            while self._num_tokens > MAX_TOKENS:
                self._num_tokens -= len(self._ids.popitem(last=False)[1])
