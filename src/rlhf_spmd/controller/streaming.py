"""Calls on rows that are still being generated, which hides idle time (APP).

On the ranks that generate, a call without a model takes the rows that were made there (:func:`staying_input`) and starts on whole
groups as they end (``Role.start_early``). On other ranks rows come in portions:

A generate call hands over the rows of each replica in a fixed number of portions, whole groups as they end. A call on other ranks
whose rows all come from it runs its body on each portion. Which rows go to which of its ranks is known before: they are dealt by
what every rank knows then (prompts), not by their final lengths. Several such calls wait together, so that those on the same ranks
take turns: each portion goes through all of them before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller.call import CallInput, CallRecord, ReplicatedBatch, Role
from rlhf_spmd.controller.data_router import DataRouter
from rlhf_spmd.controller.rows import PartitionSpec, RowPart, distinct
from rlhf_spmd.controller.transport import Transport
from rlhf_spmd.data.batch import Batch, concat, pack


def stay_or_stream(call: CallRecord, num_portions: int) -> None:
    """Let a planned call take its rows where one generate call makes them, or in portions, if that can be."""
    if len(call.inputs) != 1:
        return
    (its,) = call.inputs
    if (stays := staying_input(call, its)) is not None:
        call.inputs = [stays]
    elif num_portions > 1 and comes_in_portions(call, its):
        call.inputs, call.in_portions = [known_before(its)], True


def comes_in_portions(call: CallRecord, its: CallInput) -> bool:
    """True if a call may take its rows while another call generates them, on ranks that do not generate."""
    made = its.made_calls()
    if not (call.spec.streams and call.spec.kind == "infer" and len(made) == 1) or its.rows.decided:
        return False
    (maker, ids), ranks = made[0], {*call.role.pool.ranks, *call.role.weight_sources}
    return maker.spec.kind == "generate" and ranks.isdisjoint(maker.role.pool.ranks) and np.array_equal(ids, its.rows.row_ids)


def staying_input(call: CallRecord, own: CallInput) -> CallInput | None:
    """The input of a call that can start on the ranks where one generate call makes exactly its rows: the rows stay there.

    None if that cannot be, or is not known before the script starts.
    """
    if not call.role.starts_early(call.spec.name) or own.rows.decided:
        return None
    made, rows = own.made_calls(), own.rows
    if len(made) != 1:
        return None
    (maker, ids), (its, *others) = made[0], made[0][0].inputs
    is_whole = maker.spec.kind == "generate" and its.rows.same(rows) and np.array_equal(ids, rows.row_ids)
    if others or not (is_whole and maker.role.streams_rollouts and its.cut.keep_groups) or its.length_makers:
        return None
    if not {*call.role.pool.ranks} <= maker.members.part_of.keys():  # the others would have no rows
        return None
    parts = [call.members.part_sent_by(maker.members.holders(part)[0]) for part in range(maker.members.num_parts)]
    if None in parts:
        return None
    cut = PartitionSpec(call.members.num_parts, follows=(its.cut, its.counts_key, tuple(parts)))
    if cut not in rows.fixed_parts:
        rows.fixed_parts[cut] = np.array(parts)[its.partition.parts[0]]
    return replace(own, tokens=(), cut=cut)


def known_before(its: CallInput) -> CallInput:
    """The input with its rows dealt only by token counts that every rank has before the script starts."""
    return replace(its, tokens=tuple(shard for shard in its.tokens if isinstance(shard.producer, ReplicatedBatch)))


class Recipients(NamedTuple):
    """``ranks`` that get the rows ``row_ids`` (int64, ascending), with ``fields``, for the call ``name`` at ``node``."""

    ranks: Sequence[int]
    row_ids: np.ndarray
    node: int
    name: str
    fields: tuple[str, ...]


class EarlyCall(NamedTuple):
    """A traced call of ``role`` that starts on rows of the current generate call. ``inputs``: the fields it takes of such rows.

    ``ranks``: how many ranks of the replica this one takes rows for.
    """

    role: Role
    inputs: Callable[[Batch], Batch]
    ranks: int


@dataclass
class RolloutStreamer:
    """Sends a replica's rows from a generating rank, in ``num_portions`` to each recipient.

    Empty portions are sent too, so that nobody must be told how many come. ``early``: calls that start on these rows on this rank.
    """

    transport: Transport
    seq: int
    num_portions: int
    recipients: Sequence[Recipients]
    early: Sequence[EarlyCall]
    _num_sent: int = 0
    _gone: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def send(self, rows: Batch) -> None:
        """Send the next portion; returns while the sends are in flight."""
        self._num_sent += 1
        ids = rows.row_ids.numpy()
        self._gone = np.concatenate([self._gone, ids])
        for to in self.recipients:
            at = np.flatnonzero(np.isin(ids, to.row_ids))
            theirs = rows.select(to.fields).take(at) if len(at) else Batch(rows.row_ids[:0], rows.group_ids[:0], {})
            self.transport.send(pack(theirs), to.ranks, self.seq, to.node, to.name)

    def begin(self, rows: Batch) -> None:
        """Start the early calls on whole groups that have ended."""
        for call in self.early:
            call.role.start_early(call.inputs(rows), call.ranks)

    def finish(self, rows: Batch | None) -> None:
        """Send the remaining portions. The first of them has those of the call's ``rows`` that were not sent."""
        assert rows is not None, "the call has made no data here"
        while self.recipients and self._num_sent < self.num_portions:
            self.send(rows.take(np.flatnonzero(~np.isin(rows.row_ids.numpy(), self._gone))))


@dataclass
class WaitingCall:
    """A call whose rows come in portions. ``batches`` and ``results``: of each run of its body on this rank."""

    record: CallRecord
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: list[Batch] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


class Streaming:
    """This rank's streamed rows: what generate calls hand over, and which calls have started early or wait for portions.

    ``waiting``: calls in the script's order that wait until somebody needs their results.
    """

    def __init__(self, router: DataRouter) -> None:
        self.router = router
        self.waiting: list[WaitingCall] = []
        self._started: dict[Role, CallRecord] = {}  # role -> the generate call on whose rows its next call has started here

    def streamer(self, call: CallRecord) -> RolloutStreamer | None:
        """Returns the streamer for rows that end in ``call``, or None if this rank streams nothing. Called before the body."""
        if call.spec.kind != "generate":
            return None
        recipients = [
            Recipients(ranks, ids, consumer.node, consumer.name, tuple(dict.fromkeys(share.names.values())))
            for consumer, share in self.router.announce_portions(call)
            for ranks, ids in self.router.outgoing(call, consumer, share)
        ]
        early = self._early(call)
        if not (recipients or early):
            return None
        return RolloutStreamer(
            self.router.transport, call.seq, self.router.num_portions if recipients else 1, recipients, early
        )

    def _early(self, call: CallRecord) -> list[EarlyCall]:
        rank = self.router.rank
        index = call.members.part_sent_by(rank)
        if index is None:
            return []
        found = []
        for consumer in self.router.traced_consumers(call):
            if consumer.inputs[0].cut.follows is not None and consumer.role not in self._started:
                self._started[consumer.role] = call
                inputs = partial(self._gather, consumer, consumer.members.part_of[rank])
                ranks = {*call.members.workers(index)} & {*consumer.role.pool.ranks}
                found.append(EarlyCall(consumer.role, inputs, len(ranks)))
        return found

    def expect(self, call: CallRecord) -> None:
        """Before a call, on every rank: drop what was started for another call of its role."""
        maker = self._started.pop(call.role, None)
        awaited = maker is not None and any(its.cut.follows and its.made_calls()[0][0] is maker for its in call.inputs)
        if maker is not None and not awaited:
            call.role.drop_early()

    def continue_early(self) -> None:
        """Go on with the calls that have started on this rank."""
        for role in self._started:
            role.continue_early()

    def drop_early(self) -> None:
        """Drop what was started for calls that did not come."""
        while self._started:
            self._started.popitem()[0].drop_early()

    def must_run_waiting(self, call: CallRecord, in_portions: bool) -> bool:
        """True if calls that wait must run before ``call``."""
        return bool(self.waiting) and must_wait_for(call, [other.record for other in self.waiting], in_portions)

    def receive(self, call: CallRecord, index: int) -> Batch:
        """The next portion of the rows of part ``index``; waits for it."""
        (its,) = call.inputs
        ((maker, _),) = its.made_calls()
        parts = distinct(maker.parts_of(its.rows.row_ids[its.part(index).positions]))
        arrived = [batch for batch in self.router.receive(maker, call, parts) if len(batch)]
        return self._gather(call, index, concat(arrived) if arrived else None)

    def _gather(self, call: CallRecord, index: int, arrived: Batch | None) -> Batch:
        """What a call takes of the rows ``arrived``, which are in its part ``index``."""
        (its,) = call.inputs
        rows = its.rows
        ids = rows.row_ids[:0] if arrived is None else np.sort(arrived.row_ids.numpy())
        at = np.searchsorted(rows.row_ids, ids)
        part = RowPart(at, torch.from_numpy(ids), torch.from_numpy(rows.group_ids[at]), [])
        return self.router.gather(call, its, index, part, arrived)


def must_wait_for(call: CallRecord, waiting: Sequence[CallRecord], in_portions: bool) -> bool:
    """True if ``call`` must come after calls that wait: it takes their results, uses their ranks, or may change weights.

    A call that gets its own rows ``in_portions`` joins them instead, if it is another role's and takes rows of the same generate
    call.
    """
    makers = [maker for its in call.inputs for maker, _ in its.made_calls()]
    if in_portions:
        return any(other.inputs[0].made_calls()[0][0] is not makers[0] or other.role is call.role for other in waiting)
    ranks = set(call.role.pool.ranks)
    changes = call.spec.kind in ("train", "control")
    return changes or any(other in makers or not ranks.isdisjoint(other.role.pool.ranks) for other in waiting)


def one_result(call: CallRecord, batches: Sequence[Batch], results: Sequence[Any]) -> Any:
    """Merge what runs of a body on ``batches`` returned into the result of one run on all rows.

    Its value is what the method's ``report`` returns, if it has one.
    """
    report = call.spec.report
    if report is None and len(results) == 1:
        return results[0]
    pairs = [result if isinstance(result, tuple) else (result, None) for result in results]
    made = _joined([data for data, _ in pairs])
    notes = [note for _, note in pairs]
    if report is not None:
        return made, report(call.role, _joined(batches), made, notes)
    assert notes == [None] * len(notes), f"{call.name} streams and returns a value beside its rows: give register() a report="
    return made


def _joined(batches: Sequence[Any]) -> Any:
    """All rows in the order of their ids; None if all batches are None."""
    filled = [batch for batch in batches if batch is not None and len(batch)]
    if not filled or len(batches) == 1:
        return batches[0]
    whole = concat(filled)
    return whole.take(torch.argsort(whole.row_ids))
