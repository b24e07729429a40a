"""Rows that an environment extends between the model's turns.

A turn ends where a response would: at a stop token or string, or at the row's limit. Then the row is *held*: it keeps its pages,
unless others need them, and is not scheduled until its environment has answered. The answer's tokens are appended and computed
like those of a prompt. The replica's first rank runs the environments and tells the others what they said, so that all
schedulers stay the same; in steps in which no row waits no message is sent.

When answers come decides what is computed together, and nothing else: tokens do not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.tokenizer import decode, encode
from rlhf_spmd.environments.base import Message
from rlhf_spmd.environments.config import EnvironmentConfig, environment_of
from rlhf_spmd.environments.runner import Answer, EnvironmentFailure, EnvironmentRunner
from rlhf_spmd.generation.scheduler import Step
from rlhf_spmd.generation.sequence import SequenceState

if TYPE_CHECKING:
    from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch
    from rlhf_spmd.generation.runner import Call

Encoded = tuple[int, list[int], float, bool]  # an answer: row id, observation, reward, done


@dataclass(frozen=True)
class Environments:
    """What a call needs to run environments, of which each row has one or none: ``configs`` by name; ``rows``: what each row id's
    environment begins with. ``encoding``: how messages between turns are rendered."""

    configs: Mapping[str, EnvironmentConfig]
    rows: Mapping[int, Mapping[str, Any]]
    tokenizer: Any
    encoding: EncodingConfig | None = None


class MultiTurnRollouts:
    """The environments of ``rows``, those of ``call`` in ``lanes`` that have one; its ``tick`` is called while it waits, its
    ``portions`` are told of them at their last answer.

    Use it in a ``with`` statement: at its end all answers are there.
    """

    def __init__(self, environments: Environments, call: Call, lanes: Sequence[DecodeMicroBatch]) -> None:
        self.environments, self.replica, self.tick, self.portions = environments, call.mesh.replica, call.tick, call.portions
        configs, chosen = environments.configs, environments.rows.items()
        self._names = {row_id: name for row_id, row in chosen if (name := environment_of(configs, row))}
        self.rows = {row_id: (lane, row) for lane in lanes for row_id, row in lane.rows.items() if row_id in self._names}
        self._awaited = set(self.rows)  # row ids; the same on every rank
        self._encoder = PromptEncoder(environments.tokenizer, environments.encoding or EncodingConfig())
        self._runner: EnvironmentRunner | None = None
        if self.replica.rank == 0:
            self._runner = EnvironmentRunner(configs, self._names, environments.rows)
        for row in (row for lane in lanes for row in lane.rows.values()):
            row.mask = []
        for row_id, (lane, row) in self.rows.items():
            lane.scheduler.hold(row)
            if self._runner is not None:
                self._runner.reset(row_id)

    def __enter__(self) -> MultiTurnRollouts:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            while self._awaited and kind is None:
                self.take_in(wait=True)
        finally:
            if self._runner is not None:
                self._runner.close()

    def record(self, lane: DecodeMicroBatch, step: Step) -> None:
        """Rows of ``lane`` whose turn this step has ended, before the scheduler lets go of them."""
        for row in (item.row for item in step.work if item.samples):
            if not (row.stopped or row.length >= row.limit):
                continue
            turn, row_id = row.tokens[row.turn_start :], row.request.row_id
            assert row.mask is not None
            row.mask += [True] * len(turn)
            row.num_turns += 1
            if row_id not in self.rows:
                continue
            if row.length < row.limit and row.num_turns != self.environments.configs[self._names[row_id]].max_turns:
                row.stopped = False
                lane.scheduler.hold(row)
            self._awaited.add(row_id)
            if self._runner is not None:
                said = [token for token in turn if token not in lane.runner.decoder.spec.eos_token_ids]
                # models write calls of tools between special tokens
                self._runner.step(row_id, decode(self.environments.tokenizer, [said], skip_special_tokens=False)[0])

    def take_in(self, wait: bool) -> None:
        """Go on with the rows whose environments have answered; with ``wait`` there is at least one.

        Raises EnvironmentFailure. Collective over the replica: every rank of it must call, in program order.
        """
        if not self._awaited:
            return
        said: bytes | None = None
        if self._runner is not None:  # answers as JSON, or what went wrong; empty where there are none
            try:
                answers: list[Encoded | str] = [self._encode(answer) for answer in self._runner.answers(wait, self.tick)]
            except EnvironmentFailure as failure:
                answers = [str(failure)]
            said = json.dumps(answers).encode() if answers else b""
        said = self.replica.broadcast_bytes(said, "generation:environments")
        for answer in json.loads(said) if said else ():
            if isinstance(answer, str):
                raise EnvironmentFailure(answer)
            self._apply(*answer)

    def _encode(self, answer: Answer) -> Encoded:
        """Raises EnvironmentFailure for an observation that no model could read."""
        lane, row = self.rows[answer.row_id]
        if answer.done or not row.held:
            return answer.row_id, [], answer.reward, answer.done
        ids, vocabulary = self._read(lane, row, answer.observation), lane.runner.decoder.spec.vocab_size
        if max(ids, default=0) >= vocabulary:
            raise EnvironmentFailure(
                f"the observation {answer.observation[:80]!r} of row {answer.row_id} has the token id {max(ids)}, but the model has "
                f"a vocabulary of {vocabulary}"
            )
        if row.num_new == 0 and row.length + len(ids) >= row.limit:
            raise EnvironmentFailure(
                f"environment {self._names[answer.row_id]!r}: reset() of row {answer.row_id} observes {len(ids)} tokens, but "
                f"max_response_length={row.limit - row.prompt_length}, which they count to, must leave one for the model"
            )
        return answer.row_id, ids, answer.reward, answer.done

    def _read(self, lane: DecodeMicroBatch, row: SequenceState, observation: str | list[Message]) -> list[int]:
        """The tokens of what follows the row's turn; what a template ends a message with is left out where the turn has that already.

        Raises EnvironmentFailure.
        """
        if isinstance(observation, str):
            return encode(self.environments.tokenizer, observation)
        try:
            text = self._encoder.between_turns(observation, f"row {row.request.row_id}")
        except DataError as error:
            raise EnvironmentFailure(f"environment {self._names[row.request.row_id]!r}: {error}") from error
        first, *rest = encode(self.environments.tokenizer, text)
        has_ended = first == row.tokens[-1] or {first, row.tokens[-1]} <= set(lane.runner.decoder.spec.eos_token_ids)
        return rest if has_ended else [first, *rest]

    def _apply(self, row_id: int, ids: list[int], reward: float, done: bool) -> None:
        self._awaited.remove(row_id)
        lane, row = self.rows[row_id]
        assert row.mask is not None
        row.reward += reward
        if row.held and (done or row.length + len(ids) >= row.limit):
            row.stopped, row.ended = done, True
            lane.scheduler.remove(row)
        if row.ended:  # here, or with its last turn
            if self.portions is not None:
                self.portions.note(lane, row)
            return
        lane.runner.extend(row, ids)
        row.tokens += ids
        row.mask += [False] * len(ids)
        if lane.speculation is not None:
            lane.speculation.note(row, len(ids))
        lane.scheduler.resume(row)
