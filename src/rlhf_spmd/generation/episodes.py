"""Rows that an environment extends between the model's turns.

A turn ends where a response would: at a stop token or string, or at the row's limit. Then the row is *held*: it keeps its pages,
unless others need them, and is not scheduled until its environment has answered. The answer's tokens are appended and computed
like those of a prompt. The replica's first rank runs the environments and tells the others what they said, so that all
schedulers stay the same; in steps in which no row waits no message is sent.

When answers come decides what is computed together, and nothing else: tokens do not depend on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_spmd.data.tokenizer import decode, encode
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.runner import Answer, EnvironmentFailure, EnvironmentRunner
from rlhf_spmd.generation.progress import Episode
from rlhf_spmd.generation.scheduler import Step
from rlhf_spmd.parallel.collectives import Group

if TYPE_CHECKING:
    from rlhf_spmd.generation.lanes import LaneRun

Told = tuple[int, list[int], float, bool]  # row id, observation, reward, done


@dataclass(frozen=True)
class Environments:
    """What a call needs to run environments: ``rows``: what each row id's environment begins with."""

    config: EnvironmentConfig
    rows: Mapping[int, Mapping[str, Any]]
    tokenizer: Any


class Episodes:
    """The environments of all rows of a call, which are those of ``runs``; ``tick`` is called while it waits.

    Use it in a ``with`` statement: at its end all answers are there.
    """

    def __init__(self, environments: Environments, runs: Sequence[LaneRun], replica: Group, tick: Callable[[], None]) -> None:
        self.environments, self.replica, self.tick = environments, replica, tick
        self._places = {run.progress[row.index].request.row_id: (run, row) for run in runs for row in run.rows}
        self._awaited = set(self._places)  # row ids; the same on every rank
        self._runner: EnvironmentRunner | None = None
        if replica.rank == 0:
            self._runner = EnvironmentRunner(environments.config, {row: environments.rows[row] for row in self._places})
        for row_id, (run, row) in self._places.items():
            run.lane.scheduler.hold(row)
            run.progress[row.index].episode = Episode()
            if self._runner is not None:
                self._runner.reset(row_id)

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            while self._awaited and kind is None:
                self.take_in(wait=True)
        finally:
            if self._runner is not None:
                self._runner.close()

    def record(self, run: LaneRun, step: Step) -> None:
        """Rows of ``run`` whose turn this step has ended, before the scheduler lets go of them."""
        for row, _, _, samples in step.work:
            if not (samples and (row.stopped or row.length >= row.limit)):
                continue
            done = run.progress[row.index]
            turn, episode = done.turn, done.episode
            assert episode is not None
            episode.mask += [True] * len(turn)
            episode.num_turns += 1
            if row.length < row.limit and episode.num_turns != self.environments.config.max_turns:
                row.stopped = False
                run.lane.scheduler.hold(row)
            self._awaited.add(done.request.row_id)
            if self._runner is not None:
                self._runner.step(done.request.row_id, decode(self.environments.tokenizer, [turn])[0])

    def take_in(self, wait: bool) -> None:
        """Go on with the rows whose environments have answered; with ``wait`` there is at least one.

        Raises EnvironmentFailure. Collective over the replica: every rank of it must call, in program order.
        """
        if not self._awaited:
            return
        answers = self.replica.broadcast_bytes(self._collect(wait), "generation:environments")
        for told in json.loads(answers) if answers else ():
            if isinstance(told, str):
                raise EnvironmentFailure(told)
            self._apply(*told)

    def _collect(self, wait: bool) -> bytes | None:
        """Answers as JSON, or what went wrong; None on other ranks than the first, and empty where there are none."""
        if self._runner is None:
            return None
        told: list[Told | str]
        try:
            told = [self._told(answer) for answer in self._runner.answers(wait, self.tick)]
        except EnvironmentFailure as failure:
            told = [str(failure)]
        return json.dumps(told).encode() if told else b""

    def _told(self, answer: Answer) -> Told:
        """Raises EnvironmentFailure for an observation that no model could read."""
        run, row = self._places[answer.row_id]
        ids, vocabulary = encode(self.environments.tokenizer, answer.observation), run.runner.decoder.spec.vocab_size
        if max(ids, default=0) >= vocabulary:
            raise EnvironmentFailure(
                f"the observation {answer.observation[:80]!r} of row {answer.row_id} has the token id {max(ids)}, but the model has "
                f"a vocabulary of {vocabulary}"
            )
        if row.num_new == 0 and row.length + len(ids) >= row.limit:
            raise EnvironmentFailure(
                f"environment {self.environments.config.cls!r}: reset() of row {answer.row_id} observes {len(ids)} tokens, but "
                f"max_response_length={row.limit - row.prompt_length}, which they count to, must leave one for the model"
            )
        return answer.row_id, ids, answer.reward, answer.done

    def _apply(self, row_id: int, ids: list[int], reward: float, done: bool) -> None:
        self._awaited.remove(row_id)
        run, row = self._places[row_id]
        progress, scheduler = run.progress[row.index], run.lane.scheduler
        assert progress.episode is not None
        progress.episode.reward += reward
        if not row.held:
            return  # that was the last turn
        if done or row.length + len(ids) >= row.limit:
            row.stopped, row.ended = done, True
            scheduler.remove(row)
            return
        run.runner.extend(row, ids)
        progress.token_ids += ids
        progress.episode.mask += [False] * len(ids)
        if run.speculation is not None:
            run.speculation.note(row.index, ids)
        row.length += len(ids)
        scheduler.resume(row)
