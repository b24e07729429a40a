"""Rows that an environment extends between the model's turns.

A turn ends where a response would: at a stop token or string, or at the row's limit. The row is then *held*: it keeps its pages,
unless other rows need them, and is not scheduled until its environment has answered. The answer's tokens are appended and
computed like those of a prompt.

The replica's first rank runs the environments and broadcasts their answers, so all schedulers stay the same. In steps in which no
row waits it sends nothing. The time of an answer decides which rows are computed together. No token depends on that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import Row, named_row
from rlhf_spmd.data.messages import chat_options
from rlhf_spmd.data.reasoning import strip_reasoning
from rlhf_spmd.data.tokenizer import decode, encode_continued, longest_token, spelled_marks
from rlhf_spmd.environments.config import ChatMessage, EnvironmentConfig, environment_of
from rlhf_spmd.environments.runner import Answer, EnvironmentRunner, error_words
from rlhf_spmd.environments.tool_calls import TurnContext
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.telemetry.run_dir import equal_runs

SPARE_LEVELS = 200  # levels of nesting kept free: other readers put the messages inside further lists
TAIL = 32  # tokens before a turn that may contain a mark which opens thoughts

# an answer: row id, tokens of the observation, the observation as messages, reward, done, why it failed
Encoded = tuple[int, list[int], list[ChatMessage], float, bool, str | None]


@dataclass(frozen=True)
class Environments:
    """The environments of a call. A row has one of them or none.

    - configs: the environments' settings, by name
    - rows: what a row's environment begins with, by row id
    - encoding: how messages between turns are rendered
    """

    configs: Mapping[str, EnvironmentConfig]
    rows: Mapping[int, Mapping[str, Any]]
    tokenizer: Any
    encoding: EncodingConfig | None = None


def turn_messages(
    tokenizer: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    mask: Sequence[bool],
    observations: Sequence[list[ChatMessage]],
    reasoning_tags: Sequence[str] | None = None,
) -> list[ChatMessage]:
    """Return a response as messages: the model's turns by ``assistant``, as text without special tokens, and the observations.

    ``mask``, ``observations``: see :class:`Completion`. ``reasoning_tags``: what these enclose is left out of each turn.
    """
    messages = list[ChatMessage]()
    next_observations = iter(observations)
    for drawn, begin, end in equal_runs(mask):
        if not drawn:
            messages += next(next_observations)
            continue
        if reasoning_tags is None:
            content: str | None = decode(tokenizer, [response[begin:end]])[0]
        else:
            before = response[max(begin - TAIL, 0) : begin] if begin >= TAIL else [*prompt[-TAIL:], *response[:begin]]
            content = strip_reasoning(tokenizer, before, response[begin:end], reasoning_tags)
        messages.append({"role": "assistant", "content": content or ""})
    return messages


class MultiTurnRollouts:
    """The rows of one call that have an environment, and its answers. A ``with`` statement ends the environments.

    It changes what belongs to a row (mask, reward, turns, its end). The caller schedules: rows that :meth:`end_turns` returns
    are to be held, and those that :meth:`answers` returns go on with the tokens beside them, or have ended.

    - rows: the call's rows that have an environment, by row id; they are held when the call begins
    - awaited: ids of the rows whose environments have yet to answer, the same on every rank
    - tick: called while the first rank waits for answers
    """

    def __init__(
        self,
        environments: Environments,
        rows: Iterable[SequenceState],
        spec: ModelSpec,
        replica: Group,
        tick: Callable[[], None],
    ) -> None:
        self.environments, self.spec = environments, spec
        self.replica, self.tick = replica, tick
        configs = environments.configs
        self._names = {row_id: name for row_id, row in environments.rows.items() if (name := environment_of(configs, row))}
        self.rows: dict[int, SequenceState] = {}
        self._encoder = PromptEncoder(environments.tokenizer, environments.encoding or EncodingConfig())
        self._runner: EnvironmentRunner | None = None
        if self.replica.rank == 0:
            self._runner = EnvironmentRunner(configs, self._names, environments.rows, self._template())
        for row in rows:
            row.mask = []
            if (row_id := row.request.row_id) in self._names:
                self.rows[row_id] = row
                if self._runner is not None:
                    self._runner.reset(row_id)
        self.awaited = set(self.rows)

    def __enter__(self) -> MultiTurnRollouts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def end_turns(self, step: ScheduledStep) -> list[SequenceState]:
        """Ask the environments of rows whose turn ``step`` has ended. Return the rows that go on after the answer."""
        waiting = []
        for row in (item.row for item in step.work if item.samples):
            if not (row.stopped or row.length >= row.limit):
                continue
            start = row.turn_start
            row_id = row.request.row_id
            turn = row.tokens[start:]
            assert row.mask is not None
            row.mask += [True] * len(turn)
            row.num_turns += 1
            if row_id not in self.rows:
                continue
            if row.length < row.limit and row.num_turns != self.environments.configs[self._names[row_id]].max_turns:
                row.stopped = False
                waiting.append(row)
            self.awaited.add(row_id)
            if self._runner is not None:
                spoken_ids = [token for token in turn if token not in self.spec.eos_token_ids]
                # models write tool calls between special tokens
                text = self._decode(spoken_ids)
                before = self._decode(row.tokens[max(start - TAIL, 0) : start])
                marks = spelled_marks(self.environments.tokenizer, spoken_ids, text)
                self._runner.step(row_id, text, TurnContext(before, marks))
        return waiting

    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids with their special tokens."""
        return decode(self.environments.tokenizer, [ids], skip_special_tokens=False)[0]

    def _template(self) -> str | None:
        """Return the text of the chat template; of several, all."""
        template = self._encoder.template or getattr(self.environments.tokenizer, "chat_template", None)
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def answers(self, wait: bool) -> list[tuple[SequenceState, list[int] | None]]:
        """Return rows whose environments have answered, at least one if ``wait``, and the tokens to append; a row that ended gets none.

        With None in place of tokens a row begins again: its environment has failed, and a new one is asked.

        Raises EnvironmentFailure. Collective over the replica: every rank of it must call, in program order.
        """
        if not self.awaited:
            return []
        payload: bytes | None = None
        if self._runner is not None:  # answers as JSON; empty if there are none
            answers = [self._encode(answer) for answer in self._runner.answers(wait, self.tick)]
            payload = json.dumps(answers).encode() if answers else b""
        payload = self.replica.broadcast_bytes(payload, "generation:environments")
        return [self._take(*answer) for answer in json.loads(payload)] if payload else []

    def _encode(self, answer: Answer) -> Encoded:
        """Return the answer with its observation as tokens; one that the model cannot read has failed."""
        row_id, observation, reward, done, failure = answer
        if failure is not None or done or not self.rows[row_id].on_hold:
            return row_id, [], [], reward, done, failure
        messages = [{"role": "tool", "content": observation}] if isinstance(observation, str) else observation
        try:
            nested: list[Any] = messages
            for _ in range(SPARE_LEVELS):
                nested = [nested]
            json.dumps(nested)
            return row_id, self._observation_ids(self.rows[row_id], observation), messages, reward, done, None
        # The boundary to the user's data: whatever JSON, the template or the tokenizer cannot read ends the row.
        except Exception as error:
            reason = str(error) if isinstance(error, TypeError | ValueError) else error_words(error)
            return row_id, [], [], 0.0, True, f"environment {self._names[row_id]!r}: row {row_id}: {reason}"

    def _observation_ids(self, row: SequenceState, observation: str | list[ChatMessage]) -> list[int]:
        """Return the tokens after the row's turn, at most as many as end the row.

        Raises ValueError for tokens that the model does not know, for a template that refuses the messages, and for a beginning
        that leaves the model no token.
        """
        tokenizer = self.environments.tokenizer
        room = row.limit - row.length
        texts = [observation] if isinstance(observation, str) else [str(message["content"]) for message in observation]
        num_characters = sum(map(len, texts))
        if num_characters > room * longest_token(tokenizer):  # it ends the row: tokenising megabytes would take minutes
            ids = [row.tokens[-1]] * room
        elif isinstance(observation, str):
            ids = encode_continued(tokenizer, observation)
        else:
            data_row = Row(dict(self.environments.rows[row.request.row_id]), "its messages")
            with named_row(data_row.where):
                options = chat_options(data_row)
                ids = self._encoder.ids_between_turns(row.tokens[-1], observation, self.spec.eos_token_ids, options)
        if max(ids, default=0) >= self.spec.vocab_size:
            raise ValueError(
                f"an observation has the token id {max(ids)}, and the model a vocabulary of {self.spec.vocab_size}"
            )
        if row.num_new == 0 and len(ids) >= room:
            raise ValueError(
                f"reset() observes {num_characters} characters, at least {room} tokens, but max_response_length="
                f"{row.limit - row.prompt_length}, which they count towards, must leave one for the model"
            )
        return ids

    def _take(
        self, row_id: int, ids: list[int], messages: list[ChatMessage], reward: float, done: bool, failure: str | None
    ) -> tuple[SequenceState, list[int] | None]:
        row = self.rows[row_id]
        if failure is not None and row.retries + 1 < self.environments.configs[self._names[row_id]].attempts:
            if self._runner is not None:
                self._runner.reset(row_id)
            return row, None
        self.awaited.remove(row_id)
        row.reward += reward
        if failure is not None:
            row.failure = failure
            row.reward = math.nan
            if row.num_new == 0:  # a response has a token: the model answers once, alone
                del self.rows[row_id]
                return row, []
        if row.on_hold and (done or row.length + len(ids) >= row.limit):
            row.stopped = done
            row.ended = True
        if row.ended:  # now, or with its last turn
            return row, []
        assert row.mask is not None
        row.mask += [False] * len(ids)
        if ids:
            row.observations.append(messages)
        return row, ids
