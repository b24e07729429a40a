"""An episode's turns as a forest: each turn of the model is a node, and a branch is a fork. Pure.

An agent sends its whole conversation with every request. A request goes on from the deepest turn whose conversation, with the
answer that the agent got, is a prefix of it; only the messages behind it are read. So what the model drew is never written again.
A request that no turn is a prefix of begins a new root.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf_spmd.data.messages import Message

DRAW_BYTES = 7  # of a digest that key the draws of a turn: torch takes numbers below 2 ** 63


class Draws(NamedTuple):
    """What the model drew in a turn. The lists have an entry for each token.

    ``num_cached``: tokens of what it read whose pages were there.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    num_cached: int = 0


@dataclass(eq=False)
class Turn:
    """A turn of the model.

    - key: names the turn by what was asked, whatever the order of requests
    - parent: the turn before; None: a root
    - messages: those that the model reads in this turn
    - read_ids: their tokens, behind the parent's
    - answer: the message that the agent got; None until then
    - number: of the turn among those that the replica generates
    - num_waiting: clients that wait for the answer
    - was_delivered: the agent has the answer. Others are not learned
    """

    key: str
    parent: Turn | None
    messages: list[Message]
    read_ids: list[int]
    draws: Draws | None = None
    answer: Message | None = None
    number: int = 0
    num_waiting: int = 0
    was_delivered: bool = False

    @property
    def draw_number(self) -> int:
        """Return the number that keys the turn's draws."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:DRAW_BYTES], "big")

    @property
    def path(self) -> list[Turn]:
        """Return the turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        """Return the tokens of the whole conversation up to the end of this turn."""
        return [token for turn in self.path for token in (*turn.read_ids, *(turn.draws.ids if turn.draws else ()))]


class PathTurn(NamedTuple):
    """A turn in a row. ``number``: of its draws. ``is_new``: no earlier row learns it."""

    read_ids: list[int]
    number: int
    is_new: bool


class EpisodeRow(NamedTuple):
    """A path from a root to a leaf, as a row to learn.

    - observations: the messages of each run of tokens that the row does not learn
    - node, parent: keys of the last turn and of the one before it, "" for a root
    """

    turns: list[PathTurn]
    observations: list[list[Message]]
    node: str
    parent: str

    @property
    def num_turns(self) -> int:
        """Return how many turns the row learns."""
        return sum(turn.is_new for turn in self.turns)


class RowTokens(NamedTuple):
    """The tokens of a row: an entry for each. ``mask``: the model drew the token, and no earlier row has it."""

    ids: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str


def row_tokens(turns: Sequence[PathTurn], draws: Mapping[int, Draws]) -> RowTokens:
    """Return the tokens of a row's turns, of which there is one at least. ``draws``: by the turns' numbers."""
    row = RowTokens([], [], [], [], draws[turns[-1].number].finish_reason)
    for read_ids, number, is_new in turns:
        ids, log_probs, versions, *_ = draws[number]
        row.ids.extend((*read_ids, *ids))
        row.mask.extend([False] * len(read_ids) + [is_new] * len(ids))
        row.log_probs.extend([0.0] * len(read_ids) + (log_probs if is_new else [0.0] * len(ids)))
        row.versions.extend([versions[0]] * len(read_ids) + versions)
    return row


@dataclass(eq=False)
class Forest:
    """The turns of one attempt at an episode.

    - key: names the attempt
    - episode: number of the episode
    - turns: by key, in the order in which they were asked for
    - is_closed: the attempt has ended: what still comes is not learned
    - num_ignored: requests with settings that the trainer decides
    - refusal: of the last request that was refused; "" if none was
    """

    key: str
    episode: int = 0
    turns: dict[str, Turn] = field(default_factory=dict)
    is_closed: bool = False
    num_ignored: int = 0
    refusal: str = ""
    _by_conversation: dict[str, Turn] = field(default_factory=dict)  # digest of a conversation with its answer -> the turn
    _asked: dict[str, list[Turn]] = field(default_factory=dict)  # digest of a request -> the turns that answer it

    def attach(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[Turn | None, list[Message]]:
        """Return the turn that a request goes on from, and the messages behind it; None and all messages for a new root.

        ``options``: what else decides the text of a conversation, such as its tools.
        """
        digests = conversation_digests(messages, options)
        for number in range(len(messages) - 1, 0, -1):
            if (turn := self._by_conversation.get(digests[number])) is not None:
                return turn, list(messages[number:])
        return None, list(messages)

    def repeated(
        self, parent: Turn | None, messages: Sequence[Message], options: Mapping[str, Any], retries: bool
    ) -> Turn | None:
        """Return the turn that answers a request which has come before, and whose answer never arrived; else None.

        Of several it is the one that was asked for last. ``retries``: the request says that it is sent again. Then its client may
        have gone unnoticed, or not have read the answer: it gets an answer that others wait for, or one that was delivered.
        """
        turns = self._asked.get(self._request(parent, messages, options), [])
        undelivered = [turn for turn in turns if not turn.was_delivered]
        lost = [turn for turn in undelivered if not turn.num_waiting]
        candidates = lost or ((undelivered or turns) if retries else [])
        return candidates[-1] if candidates else None

    def add(self, parent: Turn | None, messages: list[Message], read_ids: list[int], options: Mapping[str, Any]) -> Turn:
        """Return a new turn. Equal requests are siblings with other draws."""
        request = self._request(parent, messages, options)
        siblings = self._asked.setdefault(request, [])
        turn = Turn(f"{request}.{len(siblings)}", parent, messages, read_ids)
        siblings.append(turn)
        self.turns[turn.key] = turn
        return turn

    def finish(self, turn: Turn, draws: Draws, answer: Message, options: Mapping[str, Any]) -> None:
        """Note what a turn drew, and the message that the agent gets for it."""
        turn.draws, turn.answer = draws, answer
        name = conversation_digests(self.conversation(turn), options)[-1]
        known = self._by_conversation.setdefault(name, turn)
        if turn.key < known.key:  # equal answers of siblings: one of them goes on, whichever came first
            self._by_conversation[name] = turn

    def conversation(self, turn: Turn) -> list[Message]:
        """Return all messages up to the turn's answer."""
        return [message for each in turn.path for message in (*each.messages, *([each.answer] if each.answer else []))]

    def rows(self) -> Iterator[EpisodeRow]:
        """Yield the row of each path whose turns the agent has, in an order that requests do not decide."""
        learned: set[str] = set()
        delivered = [turn for turn in self.turns.values() if all(each.was_delivered for each in turn.path)]
        parents = {turn.parent.key for turn in delivered if turn.parent}
        for leaf in sorted(
            (turn for turn in delivered if turn.key not in parents), key=lambda turn: [t.key for t in turn.path]
        ):
            yield _row(leaf.path, learned)

    @property
    def num_roots(self) -> int:
        """Return how many conversations the episode has."""
        return sum(turn.parent is None and turn.was_delivered for turn in self.turns.values())

    def _request(self, parent: Turn | None, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return digest(self.key, parent.key if parent else "", options, *map(canonical, messages))


def canonical(message: Message) -> list[Any]:
    """Return what two messages must have in common to be the same one.

    That is all but names of calls, which no model reads, and how the JSON of arguments is written.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function["arguments"]
        calls.append([function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments])
    return [message["role"], message.get("content") or "", calls, message.get("name"), message.get("tool_call_id")]


def conversation_digests(
    messages: Sequence[Message], options: Any, identity: Callable[[Message], Any] | None = None
) -> list[str]:
    """Return a digest of each beginning of a conversation: of no message, of one, and so on.

    - options: what decides the text of a conversation beside its messages, as values that JSON can have
    - identity: what two messages must have in common to be the same one; None: :func:`canonical`
    """
    digests = [digest(options)]
    for message in messages:
        digests.append(digest(digests[-1], (identity or canonical)(message)))
    return digests


def digest(*parts: Any) -> str:
    """Return 32 hexadecimal digits that name values which JSON can have."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _row(path: Sequence[Turn], learned: set[str]) -> EpisodeRow:
    """Return the row of a path. ``learned``: keys of the turns of earlier rows, to which those of this one are added."""
    turns: list[PathTurn] = []
    observations: list[list[Message]] = []
    for turn in path:
        assert turn.answer is not None, "the agent has its answer"
        if not turns or turns[-1].is_new:
            observations.append([])
        observations[-1].extend(turn.messages)
        turns.append(PathTurn(turn.read_ids, turn.number, turn.key not in learned))
        if turn.key in learned:
            observations[-1].append(turn.answer)
        learned.add(turn.key)
    leaf = path[-1]
    return EpisodeRow(turns, observations, leaf.key, leaf.parent.key if leaf.parent else "")
