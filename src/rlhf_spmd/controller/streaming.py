"""Calls on rows that are still being generated, which hides idle time (APP).

A generate call ends when its longest row ends. Other calls can start before that, in one of two ways:

- *Early*, on the ranks that generate: a call without a model, such as a reward function, takes the rows that were made on its own rank
  (:func:`local_input`). It starts on each group as it ends (``Role.start_early``).
- *In chunks*, on other ranks: a generate call sends the rows of each replica in a fixed number of chunks of whole groups. A call whose
  rows all come from it runs its body on each chunk. Its rows are partitioned by the lengths of prompts, which every rank knows before,
  because final lengths are not known yet. Several such calls wait together: each chunk goes through all of them before the next one.
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


def choose_arrival(call: CallRecord, num_chunks: int) -> None:
    """Decide how the rows of a planned call arrive: on the ranks where one generate call makes them, in chunks, or all at once."""
    if len(call.inputs) != 1:
        return
    (call_input,) = call.inputs
    if (local := local_input(call, call_input)) is not None:
        call.inputs = [local]
    elif num_chunks > 1 and can_stream(call, call_input):
        call.inputs = [input_by_prompt_lengths(call_input)]
        call.in_chunks = True


def can_stream(call: CallRecord, call_input: CallInput) -> bool:
    """Return True if a call may take its rows while another call generates them, on ranks that do not generate."""
    producers = call_input.producing_calls()
    if not (call.spec.streams and call.spec.kind == "infer" and len(producers) == 1) or call_input.rows.data_dependent:
        return False
    producer, ids = producers[0]
    ranks = {*call.role.pool.ranks, *call.role.weight_sources}
    return (
        producer.spec.kind == "generate"
        and ranks.isdisjoint(producer.role.pool.ranks)
        and np.array_equal(ids, call_input.rows.row_ids)
    )


def local_input(call: CallRecord, call_input: CallInput) -> CallInput | None:
    """Return the input of a call that can start early: its rows stay on the ranks where one generate call makes them.

    Returns None if they cannot, or if that is not known before the script starts.
    """
    if not call.role.starts_early(call.spec.name) or call_input.rows.data_dependent:
        return None
    producers = call_input.producing_calls()
    if len(producers) != 1:
        return None
    rows = call_input.rows
    producer, ids = producers[0]
    prompts, *other_inputs = producer.inputs
    has_all_rows = producer.spec.kind == "generate" and prompts.rows.same(rows) and np.array_equal(ids, rows.row_ids)
    if not (has_all_rows and producer.role.streams_rollouts and prompts.partition_spec.keep_groups):
        return None
    if other_inputs or prompts.length_producers:
        return None
    if not {*call.role.pool.ranks} <= producer.members.part_of.keys():  # the others would have no rows
        return None
    parts = [call.members.part_sent_by(producer.members.holders(part)[0]) for part in range(producer.members.num_parts)]
    if None in parts:
        return None
    follows = prompts.partition_spec, prompts.counts_key, tuple(parts)
    partition_spec = PartitionSpec(call.members.num_parts, follows=follows)
    if partition_spec not in rows.fixed_parts:
        rows.fixed_parts[partition_spec] = np.array(parts)[prompts.partition.parts[0]]
    return replace(call_input, tokens=(), partition_spec=partition_spec)


def input_by_prompt_lengths(call_input: CallInput) -> CallInput:
    """Return the input partitioned only by token counts that every rank has before the script starts."""
    prompts = [shard for shard in call_input.tokens if isinstance(shard.producer, ReplicatedBatch)]
    return replace(call_input, tokens=tuple(prompts))


class Recipients(NamedTuple):
    """``ranks`` that get the ``fields`` of the rows ``row_ids`` (int64, ascending), for the call ``name`` at ``node``."""

    ranks: Sequence[int]
    row_ids: np.ndarray
    node: int
    name: str
    fields: tuple[str, ...]


@dataclass
class RolloutStreamer:
    """Sends a replica's rows from a generating rank, in ``num_chunks`` messages to each recipient.

    Empty chunks are sent too, because recipients expect that many. ``early``: functions that start calls on rows of this rank.
    """

    transport: Transport
    seq: int
    num_chunks: int
    recipients: Sequence[Recipients]
    early: Sequence[Callable[[Batch], None]]
    _num_sent: int = 0
    _sent_row_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def send(self, rows: Batch) -> None:
        """Send the next chunk; returns while the sends are in flight."""
        self._num_sent += 1
        ids = rows.row_ids.numpy()
        self._sent_row_ids = np.concatenate([self._sent_row_ids, ids])
        for to in self.recipients:
            positions = np.flatnonzero(np.isin(ids, to.row_ids))
            chunk = (
                rows.select(to.fields).take(positions) if len(positions) else Batch(rows.row_ids[:0], rows.group_ids[:0], {})
            )
            self.transport.send(pack(chunk), to.ranks, self.seq, to.node, to.name)

    def begin(self, rows: Batch) -> None:
        """Start the early calls on whole groups that have ended."""
        for start in self.early:
            start(rows)

    def finish(self, rows: Batch | None) -> None:
        """Send the remaining chunks. The first of them has the call's ``rows`` that were not sent yet."""
        assert rows is not None, "the call has made no data here"
        while self.recipients and self._num_sent < self.num_chunks:
            self.send(rows.take(np.flatnonzero(~np.isin(rows.row_ids.numpy(), self._sent_row_ids))))


@dataclass
class WaitingCall:
    """A call whose rows come in chunks. ``batches`` and ``results``: what its body took and returned for each chunk on this rank."""

    record: CallRecord
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: list[Batch] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


class Streaming:
    """The state of streaming on this rank: calls that have started early, and calls that wait for chunks.

    ``waiting``: the calls that wait for chunks, in the script's order. They run when another call must follow them
    (:meth:`must_run_waiting`).
    """

    def __init__(self, router: DataRouter) -> None:
        self.router = router
        self.waiting: list[WaitingCall] = []
        self._early_on: dict[Role, CallRecord] = {}  # role -> the generate call on whose rows its next call has started

    def streamer(self, call: CallRecord) -> RolloutStreamer | None:
        """Return the streamer for rows that end in ``call``, or None if this rank streams nothing. Called before the body."""
        if call.spec.kind != "generate":
            return None
        recipients = [
            Recipients(ranks, ids, consumer.node, consumer.name, tuple(dict.fromkeys(share.names.values())))
            for consumer, share in self.router.announce_chunks(call)
            for ranks, ids in self.router.outgoing(call, consumer, share)
        ]
        early = self._early(call)
        if not (recipients or early):
            return None
        return RolloutStreamer(self.router.transport, call.seq, self.router.num_chunks if recipients else 1, recipients, early)

    def _early(self, call: CallRecord) -> list[Callable[[Batch], None]]:
        """Return functions that start the traced calls on rows of a generate call; note that these start early."""
        index = call.members.part_sent_by(self.router.rank)
        if index is None:
            return []
        starts: list[Callable[[Batch], None]] = []
        for consumer in self.router.traced_consumers(call):
            if consumer.inputs[0].partition_spec.follows is not None and consumer.role not in self._early_on:
                self._early_on[consumer.role] = call
                ranks = {*call.members.workers(index)} & {*consumer.role.pool.ranks}  # which share the rows
                starts.append(partial(self._start_early, consumer, len(ranks)))
        return starts

    def _start_early(self, call: CallRecord, num_ranks: int, rows: Batch) -> None:
        call.role.start_early(self._gather(call, call.members.part_of[self.router.rank], rows), num_ranks)

    def drop_stale(self, call: CallRecord) -> None:
        """Drop what was started for another call of this call's role. Runs before each call, on every rank."""
        producer = self._early_on.pop(call.role, None)
        local = [call_input for call_input in call.inputs if call_input.partition_spec.follows]
        if producer is not None and not any(call_input.producing_calls()[0][0] is producer for call_input in local):
            call.role.drop_early()

    def continue_early(self) -> None:
        """Go on with the calls that have started on this rank."""
        for role in self._early_on:
            role.continue_early()

    def drop_early(self) -> None:
        """Drop what was started for calls that the script did not make."""
        while self._early_on:
            self._early_on.popitem()[0].drop_early()

    def must_run_waiting(self, call: CallRecord, in_chunks: bool) -> bool:
        """Return True if the calls that wait must run before ``call``: it takes their results, uses their ranks, or may change weights.

        A call that gets its own rows in chunks joins them instead, if it is another role's and takes rows of the same generate call.
        """
        if not self.waiting:
            return False
        waiting = [other.record for other in self.waiting]
        producers = [producer for call_input in call.inputs for producer, _ in call_input.producing_calls()]
        if in_chunks:
            return any(
                other.inputs[0].producing_calls()[0][0] is not producers[0] or other.role is call.role for other in waiting
            )
        changes_weights = call.spec.kind in ("train", "control")
        ranks = set(call.role.pool.ranks)
        return changes_weights or any(other in producers or not ranks.isdisjoint(other.role.pool.ranks) for other in waiting)

    def receive(self, call: CallRecord, index: int) -> Batch:
        """Return the next chunk of part ``index``; waits for it."""
        (call_input,) = call.inputs
        ((producer, _),) = call_input.producing_calls()
        parts = distinct(producer.parts_of(call_input.rows.row_ids[call_input.part(index).positions]))
        arrived = [batch for batch in self.router.receive(producer, call, parts) if len(batch)]
        return self._gather(call, index, concat(arrived) if arrived else None)

    def _gather(self, call: CallRecord, index: int, arrived: Batch | None) -> Batch:
        """Return what a call takes of the rows ``arrived``, which are in its part ``index``."""
        (call_input,) = call.inputs
        rows = call_input.rows
        ids = rows.row_ids[:0] if arrived is None else np.sort(arrived.row_ids.numpy())
        positions = np.searchsorted(rows.row_ids, ids)
        part = RowPart(positions, torch.from_numpy(ids), torch.from_numpy(rows.group_ids[positions]), [])
        return self.router.gather(call, call_input, index, part, arrived)


def one_result(call: CallRecord, batches: Sequence[Batch], results: Sequence[Any]) -> Any:
    """Merge what runs of a body on ``batches`` returned into the result of one run on all rows.

    Its value is what the method's ``report`` returns, if it has one.
    """
    report = call.spec.report
    if report is None and len(results) == 1:
        return results[0]
    pairs = [result if isinstance(result, tuple) else (result, None) for result in results]
    rows = _joined([data for data, _ in pairs])
    notes = [note for _, note in pairs]
    if report is not None:
        return rows, report(call.role, _joined(batches), rows, notes)
    assert notes == [None] * len(notes), f"{call.name} streams and returns a value beside its rows: give register() a report="
    return rows


def _joined(batches: Sequence[Any]) -> Any:
    """Return all rows in the order of their ids; None if all batches are None."""
    filled = [batch for batch in batches if batch is not None and len(batch)]
    if not filled or len(batches) == 1:
        return batches[0]
    rows = concat(filled)
    return rows.take(torch.argsort(rows.row_ids))
