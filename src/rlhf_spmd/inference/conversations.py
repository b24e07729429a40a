"""The tokens of chats that a server has answered, so that later requests go on from what the model drew. As agents do in training."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from rlhf_spmd.agents.forest import canonical, conversation_digests, digest
from rlhf_spmd.data.messages import Message, thoughts_of

# of all conversations, with one more for each; those that were not used for the longest time are forgotten
MAX_TOKENS = 1 << 24


class Conversations:
    """Token ids of conversations up to the end of an answer. Any thread may call.

    A conversation is named by a digest of its messages, with thoughts that the client sends, and of what else decides its text. Where
    different tokens have one name, as with thoughts that clients leave out, none of them is kept: they may be another client's.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # none: of different tokens
        self._num_tokens = 0
        self._lock = Lock()

    def attach(self, messages: Sequence[Message], options: Any) -> tuple[str, int, list[int]]:
        """Return the digest of a request, how many of its messages are the longest known conversation, and the tokens of these.

        There are none if no conversation is a prefix. ``options``: what decides the text beside the messages.
        """
        digests = conversation_digests(messages, options, lambda message: [canonical(message), thoughts_of(message)])
        with self._lock:
            for number in range(len(messages) - 1, 0, -1):
                if ids := self._ids.get(digests[number]):
                    self._ids.move_to_end(digests[number])
                    return digests[-1], number, ids.tolist()
        return digests[-1], 0, []

    def add(self, request: str, answer: Message, ids: Sequence[int]) -> None:
        """Keep the tokens of a conversation: of the request with this digest and of its ``answer``."""
        names = {digest(request, [canonical(answer), thoughts]) for thoughts in ("", thoughts_of(answer))}
        with self._lock:
            for name in names:
                old = self._ids.pop(name, None)
                self._ids[name] = array("i", ids if old is None or old.tolist() == [*ids] else ())
                self._num_tokens += 1 + len(self._ids[name]) - (0 if old is None else 1 + len(old))
            while self._num_tokens > MAX_TOKENS:
                self._num_tokens -= 1 + len(self._ids.popitem(last=False)[1])
