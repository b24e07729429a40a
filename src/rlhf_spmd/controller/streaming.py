"""Calls on rows that are still being generated (APP's bubble hiding): which they are, what a generating rank hands out, and what of
several runs of a body is its result.

On the ranks that generate, a call without a model takes the rows that were made there (:func:`staying`), and begins on whole groups
as they end (``Worker.begin``). On other ranks rows come in portions.

A generate call hands out the rows of each replica in a fixed number of portions, whole groups as they end. A call on other ranks whose
rows all come from it runs its body on each portion. Which rows it gets on which of its ranks is known before: they are dealt by
what is known of them then (prompts), not by what they will have become. Several such calls wait together, so that those on the same
ranks take turns: each portion goes through all of them before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller.reference import CallInput, CallRecord, ReplicatedBatch
from rlhf_spmd.controller.rows import Part, PartitionSpec, distinct
from rlhf_spmd.controller.transport import Transport
from rlhf_spmd.data.batch import Batch, concat, pack

if TYPE_CHECKING:
    from rlhf_spmd.controller.controller import Controller
    from rlhf_spmd.controller.data_router import DataRouter
    from rlhf_spmd.controller.worker import MethodSpec, Worker
    from rlhf_spmd.telemetry.trace import Argument


def comes_in_portions(role: Worker, spec: MethodSpec, intake: CallInput) -> bool:
    """Whether a call may take rows as they are generated, on ranks that it need not wait for, by one call; all else must be known."""
    made = made_pieces(intake)
    if not (spec.streams and spec.kind == "infer" and len(made) == 1) or intake.rows.decided:
        return False
    (maker, ids), ranks = made[0], {*role.pool.ranks, *role.lenders}
    return (
        maker.spec.kind == "generate" and ranks.isdisjoint(maker.role.pool.ranks) and np.array_equal(ids, intake.rows.row_ids)
    )


def staying(call: CallRecord, intake: CallInput) -> CallInput | None:
    """The intake of a call that can begin on the ranks where one generate call makes just its rows: they stay there, by whatever
    that call's rows were dealt. None where that cannot be, or is not known before the script begins."""
    if not call.role.begins_early(call.spec.name) or intake.rows.decided:
        return None
    made, rows = made_pieces(intake), intake.rows
    if len(made) != 1:
        return None
    (maker, ids), (its, *others) = made[0], made[0][0].intakes
    is_whole = maker.spec.kind == "generate" and its.rows.same(rows) and np.array_equal(ids, rows.row_ids)
    if others or not (is_whole and maker.role.hands_out and its.cut.keep_groups) or its.token_makers:
        return None
    if not {*call.role.pool.ranks} <= maker.members.part_of.keys():  # the others would score nothing
        return None
    parts = [call.members.answered(maker.members.holders(part)[0]) for part in range(maker.members.num_parts)]
    if None in parts:
        return None
    cut = PartitionSpec(call.members.num_parts, follows=(its.cut, its.counted, tuple(parts)))
    if cut not in rows.given:
        rows.given[cut] = np.array(parts)[its.placement.parts[0]]
    return replace(intake, tokens=(), cut=cut)


def made_pieces(intake: CallInput) -> list[tuple[CallRecord, np.ndarray]]:
    """For each share that a call makes this call, and the ids of its rows there."""
    return [(piece.producer, piece.ids) for piece, _ in intake.shares if isinstance(piece.producer, CallRecord)]


def known_before(intake: CallInput) -> CallInput:
    """Its rows dealt by those token counts only that every rank has before the script begins."""
    return replace(intake, tokens=tuple(piece for piece in intake.tokens if isinstance(piece.producer, ReplicatedBatch)))


class Recipients(NamedTuple):
    """``ranks`` that get the rows ``row_ids`` (int64, ascending) for the call ``name`` at a node, with the fields ``fields``."""

    ranks: Sequence[int]
    row_ids: np.ndarray
    node: int
    name: str
    fields: tuple[str, ...]


class EarlyCall(NamedTuple):
    """``inputs``: what a foreseen call of ``role`` takes of rows that the generate call under way has made. ``ranks``: of the replica,
    in whose place this one takes rows."""

    role: Worker
    inputs: Callable[[Batch], Batch]
    ranks: int


@dataclass
class RolloutStreamer:
    """A generating rank's sends of its replica's rows, in ``num_portions`` to each recipient; empty ones too, so that nobody has to be
    told how many come. ``early``: the calls that begin on these rows here."""

    transport: Transport
    seq: int
    num_portions: int
    recipients: Sequence[Recipients]
    early: Sequence[EarlyCall]
    _num_sent: int = 0
    _gone: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def send(self, rows: Batch) -> None:
        """The next portion; sends are under way when it returns."""
        self._num_sent += 1
        ids = rows.row_ids.numpy()
        self._gone = np.concatenate([self._gone, ids])
        for to in self.recipients:
            at = np.flatnonzero(np.isin(ids, to.row_ids))
            theirs = rows.select(to.fields).take(at) if len(at) else Batch(rows.row_ids[:0], rows.group_ids[:0], {})
            self.transport.send(pack(theirs), to.ranks, self.seq, to.node, to.name)

    def begin(self, rows: Batch) -> None:
        """Whole groups that have ended."""
        for call in self.early:
            call.role.begin(call.inputs(rows), call.ranks)

    def finish(self, rows: Batch | None) -> None:
        """The portions that are left, of which the first has those of the call's ``rows`` that have not been sent."""
        assert rows is not None, "the call has made no data here"
        while self.recipients and self._num_sent < self.num_portions:
            self.send(rows.take(np.flatnonzero(~np.isin(rows.row_ids.numpy(), self._gone))))


@dataclass
class WaitingCall:
    """A call whose rows come in portions; ``batches`` and ``results``: of its body's runs on this rank."""

    production: CallRecord
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: list[Batch] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


class Streaming:
    """This rank's part of all that comes in portions. ``_waiting``: the calls, in the script's order, until somebody needs results."""

    def __init__(self, controller: Controller, delivery: DataRouter, num_portions: int) -> None:
        self.controller, self.delivery, self.num_portions = controller, delivery, num_portions
        self._waiting: list[WaitingCall] = []
        self._begun: dict[Worker, CallRecord] = {}  # role -> the generate call on whose rows its next call has begun here

    def hand_out(self, call: CallRecord) -> RolloutStreamer | None:
        """Before the body of a call, on every rank: where its rows go as they end, if it generates and this rank is to send any, or
        begins calls on them."""
        if call.spec.kind != "generate":
            return None
        recipients = [
            Recipients(ranks, ids, consumer.node, consumer.name, tuple(dict.fromkeys(share[2].values())))
            for consumer, share in self.delivery.announce_portions(call)
            for ranks, ids in self.delivery.outgoing(call, consumer, share)
        ]
        early = self._early(call)
        num_portions = self.num_portions if recipients else 1
        return (
            RolloutStreamer(self.delivery.transport, call.seq, num_portions, recipients, early) if recipients or early else None
        )

    def _early(self, call: CallRecord) -> list[EarlyCall]:
        rank = self.controller.rank
        index = call.members.answered(rank)
        if index is None:
            return []
        found = []
        for consumer in self.delivery.foreseen_consumers(call):
            if consumer.intakes[0].cut.follows is not None and consumer.role not in self._begun:
                self._begun[consumer.role] = call
                inputs = partial(self._gather, consumer, consumer.members.part_of[rank])
                ranks = {*call.members.workers(index)} & {*consumer.role.pool.ranks}
                found.append(EarlyCall(consumer.role, inputs, len(ranks)))
        return found

    def expect(self, call: CallRecord) -> None:
        """Before a call, on every rank: what was begun for another call of its role is dropped."""
        maker = self._begun.pop(call.role, None)
        awaited = maker is not None and any(i.cut.follows and made_pieces(i)[0][0] is maker for i in call.intakes)
        if maker is not None and not awaited:
            call.role.drop()

    def go_on(self) -> None:
        """With the calls that have begun here."""
        for role in self._begun:
            role.go_on()

    def drop_begun(self) -> None:
        """For calls that did not come."""
        while self._begun:
            self._begun.popitem()[0].drop()

    def enter(self, call: CallRecord) -> bool:
        """Whether the rows of a call come in portions, so that it waits. Calls that wait and must come before it run first."""
        in_portions = self.delivery.sends_portions(call)
        if self._waiting and must_wait_for(call, [other.production for other in self._waiting], in_portions):
            self.run_waiting()
        return in_portions

    def wait_for_rows(self, call: CallRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._waiting.append(WaitingCall(call, args, kwargs))

    def run_waiting(self) -> None:
        """Run the calls that wait: each portion through all of them.

        Every rank of the world must call, in program order.
        """
        waiting, self._waiting = self._waiting, []
        controller, rank = self.controller, self.controller.rank
        mine = [call for call in waiting if rank in call.production.members.part_of]
        for call in waiting:
            call.production.role.enter(call.production)
            self.expect(call.production)
        for number in range(self.num_portions if mine else 0):
            for call in mine:
                self._run_portion(call, number)
        for call in waiting:
            production = call.production
            if call in mine:
                with controller.timeline.span(production.name, category="compute", call=production.seq) as controller.span:
                    result = one_result(production, call.batches, call.results)
                controller.keep(production, result, production.members.part_of[rank])
            controller.end(production)

    def _run_portion(self, call: WaitingCall, number: int) -> None:
        production, controller = call.production, self.controller
        told: dict[str, Argument] = {"call": production.seq, "portion": number}
        with controller.timeline.span(f"{production.name}: inputs", category="wait", **told):
            batch = self._receive(production, production.members.part_of[controller.rank])
        with controller.timeline.span(production.name, category="compute", rows=len(batch), **told) as controller.span:
            call.results.append(production.spec.body(production.role, batch, *call.args, **call.kwargs))
        call.batches.append(batch)

    def _receive(self, call: CallRecord, index: int) -> Batch:
        """The next portion of the rows of a part; waits for it."""
        (intake,) = call.intakes
        ((maker, _),) = made_pieces(intake)
        parts = distinct(maker.parts_of(intake.rows.row_ids[intake.part(index).positions]))
        arrived = [batch for batch in self.delivery.receive(maker, call, parts) if len(batch)]
        return self._gather(call, index, concat(arrived) if arrived else None)

    def _gather(self, call: CallRecord, index: int, arrived: Batch | None) -> Batch:
        """What a call takes of the rows ``arrived``, which lie in its part ``index``."""
        (intake,) = call.intakes
        rows = intake.rows
        ids = rows.row_ids[:0] if arrived is None else np.sort(arrived.row_ids.numpy())
        at = np.searchsorted(rows.row_ids, ids)
        part = Part(at, torch.from_numpy(ids), torch.from_numpy(rows.group_ids[at]), [])
        return self.delivery.gather(call, intake, index, part, arrived)


def must_wait_for(call: CallRecord, waiting: Sequence[CallRecord], in_portions: bool) -> bool:
    """Whether ``call`` comes after calls that wait: it takes what one of them makes, works on ranks of theirs, or may change weights.
    One that gets its own rows ``in_portions`` waits with them if it takes those of the same generate call, for another role."""
    makers = [maker for intake in call.intakes for maker, _ in made_pieces(intake)]
    if in_portions:
        return any(made_pieces(other.intakes[0])[0][0] is not makers[0] or other.role is call.role for other in waiting)
    ranks = set(call.role.pool.ranks)
    changes = call.spec.kind in ("train", "control")
    return changes or any(other in makers or not ranks.isdisjoint(other.role.pool.ranks) for other in waiting)


def one_result(call: CallRecord, batches: Sequence[Batch], results: Sequence[Any]) -> Any:
    """What the runs of a body on ``batches`` returned, as of one run on all their rows; its value is what the method's ``report``
    says, if it has one."""
    report = call.spec.report
    if report is None and len(results) == 1:
        return results[0]
    pairs = [result if isinstance(result, tuple) else (result, None) for result in results]
    made = _joined([data for data, _ in pairs])
    noted = [note for _, note in pairs]
    if report is not None:
        return made, report(call.role, _joined(batches), made, noted)
    assert noted == [None] * len(noted), f"{call.name} streams and returns a value beside its rows: give register() a report="
    return made


def _joined(batches: Sequence[Any]) -> Any:
    """In the order of their ids; None where all are None."""
    filled = [batch for batch in batches if batch is not None and len(batch)]
    if not filled or len(batches) == 1:
        return batches[0]
    whole = concat(filled)
    return whole.take(torch.argsort(whole.row_ids))
