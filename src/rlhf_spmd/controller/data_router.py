"""How data get from call to call: who sends which rows to whom, when, and which token counts decide it.

Every rank does the same bookkeeping in the same order, and its own part of the sending. The rules are at the head of
``controller.py`` (3 to 6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller.call import CallInput, CallRecord, FieldShard, Graph, ReplicatedBatch
from rlhf_spmd.controller.rows import RowPart, distinct
from rlhf_spmd.controller.transport import LENGTHS, Transport
from rlhf_spmd.data.batch import Batch, Field, concat, pack, unpack
from rlhf_spmd.parallel.collectives import Group


class Share(NamedTuple):
    """What one call makes for an input of another: a shard, and its fields as name at the consumer -> name at the producer."""

    input: CallInput
    shard: FieldShard
    names: dict[str, str]


class DataRouter:
    """This rank's part of moving rows between the calls of a script. ``num_portions``: messages per streamed rollout."""

    def __init__(self, world: Group, num_portions: int = 1) -> None:
        self.num_portions = num_portions
        self.rank = world.ranks[world.rank]
        self.transport = Transport(world)
        self._consumers: dict[int, list[CallRecord]] = {}  # node -> the calls that read what it makes
        self._length_readers: dict[int, frozenset[int]] = {}  # node -> the ranks that need its token counts
        self._traced: dict[int, CallRecord] = {}  # node -> the call as it was traced
        self._actual: dict[int, CallRecord] = {}  # node -> the call that took its place, on the rows it was traced with
        self._counted: list[CallRecord] = []  # calls whose token counts were sent in this script
        self._pushed: dict[tuple[int, int], tuple[CallRecord, list[Share]]] = {}  # (call, node): sent ahead, not yet consumed

    def begin(self, graph: Graph) -> None:
        """Start a script that was traced as ``graph``."""
        self._consumers = graph.consumers()
        self._traced = {call.node: call for call in graph.nodes}
        readers: dict[CallRecord, frozenset[int]] = {}
        for call in graph.nodes:
            for maker, ranks in length_readers(call).items() if call.inputs else ():
                readers[maker] = readers.get(maker, frozenset()) | ranks
        for maker, ranks in readers.items():
            if maker.seq < 0:
                self._length_readers[maker.node] = ranks
            else:  # a call of an earlier script: results made from its rows may be pushed at once
                self._send_lengths(maker, ranks)

    def settle(self, spare: int = 0) -> None:
        """Receive what was sent here and not used. Wait for this rank's sends, except those of the last ``spare`` scripts."""
        for maker in self._counted:
            if self.rank in maker.lengths_sent_to:
                self.read_lengths(maker)
        for key in list(self._pushed):
            self._drop(*key)
        self.transport.finish(spare)
        for kept in (self._consumers, self._length_readers, self._traced, self._actual, self._counted):
            kept.clear()

    # What comes in

    def gather(self, consumer: CallRecord, its: CallInput, index: int, part: RowPart, arrived: Batch | None = None) -> Batch:
        """The fields of ``part``, from this rank's memory and from other ranks.

        ``part``: all or some rows of part ``index``. ``arrived``: what a call made for these rows, if it has come already.
        """
        if not len(part.positions):  # a member without rows gets a batch without fields
            return Batch(part.row_ids, part.group_ids, {})
        fields: dict[str, Field] = {}
        found: dict[str, list[tuple[np.ndarray, Batch]]] = defaultdict(list)
        for shard, names in its.shares:
            own = self._own_part(shard.producer, index) if _cut_alike(shard, its) else None
            if own is not None:
                fields |= {here: own[there] for here, there in names.items()}
                continue
            inside, ids = _within(shard, part.positions, len(its.rows))
            if len(ids):
                if arrived is not None and isinstance(shard.producer, CallRecord):
                    data = pick_rows(arrived, torch.from_numpy(ids))
                else:
                    data = self._fetch(shard.producer, consumer, ids, list(names.values()))
                for here, there in names.items():
                    found[here].append((inside, data.select([there])))
        fields |= {name: _joined(name, pieces, len(part.positions)) for name, pieces in found.items()}
        return Batch(part.row_ids, part.group_ids, fields)

    def _own_part(self, producer: ReplicatedBatch | CallRecord, index: int) -> Batch | None:
        """The rows of part ``index`` of a call, if all of them lie on this rank."""
        if isinstance(producer, ReplicatedBatch) or self.rank not in producer.members.holders(index) or producer.data is None:
            return None
        return producer.data if len(producer.data) == len(producer.inputs[0].part(index).positions) else None

    def _fetch(self, producer: ReplicatedBatch | CallRecord, consumer: CallRecord, ids: np.ndarray, names: list[str]) -> Batch:
        """These rows of a producer: from this rank's memory, and the rest from their holders."""
        row_ids = torch.from_numpy(ids)
        if isinstance(producer, ReplicatedBatch):
            return pick_rows(producer.data.select(names), row_ids)
        parts = distinct(producer.parts_of(ids))
        pieces = self.receive(producer, consumer, parts)
        if any(self.rank in producer.members.holders(index) for index in parts):
            assert producer.data is not None, f"{consumer.name}: {producer.name} has made no data here"
            pieces.append(producer.data.select(names))
        return pick_rows(pieces[0] if len(pieces) == 1 else concat(pieces), row_ids)

    def receive(self, producer: CallRecord, consumer: CallRecord, parts: Iterable[int]) -> list[Batch]:
        """One batch from the first holder of each of these parts, except parts that lie on this rank."""
        holders = [producer.members.holders(index) for index in parts]
        sources = [ranks[0] for ranks in holders if self.rank not in ranks]
        return [unpack(payload) for payload in self.transport.receive(sources, producer.seq, consumer.node, consumer.name)]

    # What goes out

    def send_inputs(self, consumer: CallRecord) -> None:
        """Send the inputs of a call that were not already pushed for exactly these rows."""
        traced = self._traced.get(consumer.node)
        if traced is not None and _same_rows(traced, consumer):
            self._actual[consumer.node] = consumer
        for maker, ranks in length_readers(consumer).items():
            self._send_lengths(maker, ranks)
        by_producer: dict[int, tuple[CallRecord, list[Share]]] = {}
        for its in consumer.inputs:
            for shard, names in its.shares:
                if isinstance(shard.producer, CallRecord):
                    by_producer.setdefault(shard.producer.seq, (shard.producer, []))[1].append(Share(its, shard, names))
        for seq, (producer, shares) in sorted(by_producer.items()):
            key = seq, consumer.node
            if key in self._pushed:
                if _alike(self._pushed[key][1], shares):
                    del self._pushed[key]
                    continue
                self._drop(*key)
            for share in shares:
                self._send(producer, consumer, share)

    def push(self, producer: CallRecord) -> None:
        """Send the results of a call to its consumers in the graph, where the trace knew their rows."""
        if producer.rows is None:
            return
        if producer.spec.lengths_of is not None:
            self._send_lengths(producer, self._length_readers.get(producer.node, frozenset()))
        for traced in self.traced_consumers(producer):
            if traced.in_portions:
                continue  # the streamer has sent them
            inputs = [known for its in traced.inputs if (known := self._resolved(its)) is not None]
            if len(inputs) < len(traced.inputs):
                continue  # its rows are decided later, or placed by token counts that a later call makes
            for share in self._announce(producer, traced, inputs):
                self._send(producer, traced, share)

    def _announce(self, producer: CallRecord, traced: CallRecord, inputs: Sequence[CallInput]) -> list[Share]:
        """Note that ``producer`` pushes to a traced call. Returns the shares to send; none if all rows stay where they are."""
        shares = [
            Share(its, FieldShard(producer, shard.name, shard.at, shard.ids), names)
            for its in inputs
            for shard, names in its.shares
            if isinstance(shard.producer, CallRecord) and shard.producer.seq < 0 and shard.producer.node == producer.node
        ]
        if self._all_stay(producer, traced, shares):
            return []
        self._pushed[producer.seq, traced.node] = traced, shares
        return shares

    def _all_stay(self, producer: CallRecord, consumer: CallRecord, shares: list[Share]) -> bool:
        """True if every consumer rank already holds its rows. False on ranks that send nothing: they may not know yet."""
        is_known = producer.members.part_sent_by(self.rank) is not None and consumer.members.are_holders(producer.members)
        return is_known and all(_cut_alike(share.shard, share.input) for share in shares)

    def traced_consumers(self, producer: CallRecord) -> Sequence[CallRecord]:
        """The traced consumers of a call; none if the call itself differs from its trace. Then its consumers pull."""
        return self._consumers.get(producer.node, ()) if self._actual.get(producer.node) is producer else ()

    def announce_portions(self, producer: CallRecord) -> list[tuple[CallRecord, Share]]:
        """Before a generate call: note that it streams rows to the traced calls that take them in portions; returns what it sends."""
        calls = [call for call in self.traced_consumers(producer) if call.in_portions]
        return [(call, share) for call in calls for share in self._announce(producer, call, call.inputs)]

    def sends_portions(self, consumer: CallRecord) -> bool:
        """True if ``consumer`` gets all its rows, and no others, in portions."""
        if not consumer.in_portions:
            return False
        (its,) = consumer.inputs
        (share,) = [Share(its, *share) for share in its.shares if isinstance(share[0].producer, CallRecord)]
        traced, pushed = self._pushed.get((share.shard.producer.seq, consumer.node), (consumer, []))
        return traced.in_portions and _alike(pushed, [share])

    def _resolved(self, its: CallInput) -> CallInput | None:
        """A traced call's input, with actual calls in place of the traced makers of token counts; None if one is not known yet."""
        if its.rows.decided:
            return None
        tokens = []
        for shard in its.tokens:
            maker = shard.producer
            if isinstance(maker, CallRecord) and maker.seq < 0:
                if maker.node not in self._actual:
                    return None
                shard = FieldShard(self._actual[maker.node], shard.name, shard.at, shard.ids)
            tokens.append(shard)
        same = tokens == [*its.tokens]  # none was made in this script
        return its if same else CallInput(its.rows, its.fields, tuple(tokens), its.cut, its.shares)

    def _send(self, producer: CallRecord, consumer: CallRecord, share: Share) -> None:
        """This rank's part of moving rows to a consumer."""
        for ranks, row_ids in self.outgoing(producer, consumer, share):
            assert producer.data is not None, f"{producer.name} has made no data here"
            names = dict.fromkeys(share.names.values())
            payload = pack(pick_rows(producer.data.select(names), torch.from_numpy(row_ids)))
            self.transport.send(payload, ranks, producer.seq, consumer.node, consumer.name)

    def outgoing(self, producer: CallRecord, consumer: CallRecord, share: Share) -> Iterator[tuple[list[int], np.ndarray]]:
        """Ranks, and the rows that this rank sends to each of them: rows it is the first holder of, to members that lack them."""
        its, shard, _ = share
        index = producer.members.part_sent_by(self.rank)
        if index is None:
            return
        holders = producer.members.holders(index)
        if all(rank in holders for rank in consumer.members.part_of):
            return
        alike = _cut_alike(shard, its)
        if alike and consumer.members.are_holders(producer.members):
            return
        parts = its.partition.parts[:, shard.at]
        mine = parts[0] == index if alike else producer.parts_of(shard.ids) == index
        for wanted in [index] if alike else distinct(parts[:, mine]):
            ranks = [rank for rank in consumer.members.workers(wanted) if rank not in holders]
            if ranks and len(row_ids := np.unique(shard.ids[mine & (parts == wanted).any(0)])):
                yield ranks, row_ids

    def _drop(self, seq: int, node: int) -> None:
        """Receive what was pushed for a call that differs from its trace or does not come."""
        consumer, shares = self._pushed.pop((seq, node))
        index = consumer.members.part_of.get(self.rank)
        if index is None:
            return
        for its, shard, _ in shares:
            _, ids = _within(shard, its.part(index).positions, len(its.rows))
            assert isinstance(shard.producer, CallRecord)
            for _ in range(self.num_portions if consumer.in_portions else 1):
                self.receive(shard.producer, consumer, distinct(shard.producer.parts_of(ids)))

    # Token counts

    def _send_lengths(self, maker: CallRecord, ranks: Iterable[int]) -> None:
        """Send the token counts of the rows that this rank made to those of ``ranks`` that do not have them yet."""
        new = set(ranks) - maker.lengths_sent_to
        if not new:
            return
        maker.lengths_sent_to |= new
        self._counted.append(maker)
        index = maker.members.part_sent_by(self.rank)
        if index is not None and len(maker.inputs[0].part(index).positions):
            counts = torch.from_numpy(self._own_lengths(maker, index))
            self.transport.send(counts.view(torch.uint8), sorted(new - {self.rank}), maker.seq, LENGTHS, "lengths")

    def _own_lengths(self, maker: CallRecord, index: int) -> np.ndarray:
        """Token count of each row of the part; 0 for rows that the call did not return."""
        assert maker.data is not None, f"{maker.name} has made no data here"
        part = maker.inputs[0].part(index)
        counts = torch.zeros(len(part.positions), dtype=torch.int64)
        if len(maker.data):  # without rows it may be without fields
            counts[torch.searchsorted(part.row_ids, maker.data.row_ids)] = maker.data[maker.spec.lengths_of or ""].lengths
        return counts.numpy()

    def read_lengths(self, maker: CallRecord) -> np.ndarray:
        """Token counts int64 [rows] that a call made; waits for other ranks. Only for ranks to which they were sent."""
        if maker.row_lengths is None:
            assert self.rank in maker.lengths_sent_to, f"rank {self.rank} does not get the token counts of {maker.name}"
            counts = np.zeros(len(maker.inputs[0].rows), dtype=np.int64)
            elsewhere: dict[int, np.ndarray] = {}  # first holder -> positions
            for index, positions in maker.inputs[0].partition.positions():
                first = maker.members.holders(index)[0]
                if first == self.rank:
                    counts[positions] = self._own_lengths(maker, index)
                else:
                    elsewhere[first] = positions
            payloads = self.transport.receive(list(elsewhere), maker.seq, LENGTHS, "lengths")
            for positions, payload in zip(elsewhere.values(), payloads, strict=True):
                counts[positions] = payload.view(torch.int64).numpy()
            maker.row_lengths = counts
        return maker.row_lengths


def length_readers(consumer: CallRecord) -> dict[CallRecord, frozenset[int]]:
    """The calls whose token counts place a consumer's rows, and the ranks that need them: its members, and those that send to them.

    Members also need the counts that placed the senders' own rows. A rank that needs a call's counts also needs the counts that
    placed that call's rows.
    """
    found: dict[CallRecord, frozenset[int]] = {}
    senders = dict.fromkeys(maker for its in consumer.inputs for maker, _ in its.made_calls())  # in program order
    if not any(its.length_makers for call in (consumer, *senders) for its in call.inputs):
        return found

    def note(its: CallInput, ranks: frozenset[int]) -> None:
        for maker in its.length_makers:
            if not ranks <= found.get(maker, frozenset()):
                found[maker] = found.get(maker, frozenset()) | ranks
                note(maker.inputs[0], ranks)

    members = frozenset(consumer.role.pool.ranks)
    everyone = members.union(*(sender.role.pool.ranks for sender in senders))
    for its in consumer.inputs:
        note(its, everyone)
    for sender in senders:
        note(sender.inputs[0], members)
    return found


def _alike(pushed: list[Share], shares: list[Share]) -> bool:
    """True if what was pushed is what the call takes: the same rows and fields, cut alike."""
    return len(pushed) == len(shares) and all(
        a.rows.same(b.rows)
        and (a.cut, a.counts_key, [*mine.values()]) == (b.cut, b.counts_key, [*theirs.values()])
        and one.same(other)
        for (a, one, mine), (b, other, theirs) in zip(pushed, shares, strict=True)
    )


def _same_rows(one: CallRecord, other: CallRecord) -> bool:
    pairs = zip(one.inputs, other.inputs, strict=False)
    return len(one.inputs) == len(other.inputs) and all(a.rows.same(b.rows) for a, b in pairs)


def _cut_alike(shard: FieldShard, its: CallInput) -> bool:
    """True if the call that made the shard had exactly these rows in exactly these parts."""
    if isinstance(shard.producer, ReplicatedBatch) or shard.ids is not its.rows.row_ids:
        return False
    return shard.producer.inputs[0].partition is its.partition


def _within(shard: FieldShard, positions: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of the rows at these ascending positions (out of ``num_rows``) a shard has, and their ids at its producer; int64 both."""
    if len(shard.at) == num_rows:  # it has all
        return np.arange(len(positions)), shard.ids[positions] if len(positions) < num_rows else shard.ids
    inside = np.flatnonzero(np.isin(positions, shard.at, assume_unique=True))
    return inside, shard.ids[np.searchsorted(shard.at, positions[inside])]


def _joined(name: str, pieces: list[tuple[np.ndarray, Batch]], num_rows: int) -> Field:
    """One field of all rows, from what several calls made for some rows each."""
    (order, whole), *_ = pieces
    if len(pieces) > 1:
        order = np.concatenate([at for at, _ in pieces])
        renamed = [Batch(b.row_ids, b.group_ids, {name: next(iter(b.fields.values()))}) for _, b in pieces]
        whole = concat(renamed).take(torch.from_numpy(np.argsort(order)))
    assert len(order) == num_rows, f"field {name!r} is there for {len(order)} of {num_rows} rows"
    field: Field = next(iter(whole.fields.values()))
    return field


def pick_rows(batch: Batch, row_ids: Tensor) -> Batch:
    """The rows with these ids, in that order, from a batch that holds at least these."""
    return batch if batch.row_ids is row_ids or torch.equal(batch.row_ids, row_ids) else batch.reorder(row_ids)


def sent_first(shard: FieldShard, rank: int) -> tuple[Batch | None, np.ndarray]:
    """The rows of a shard that others fetch from ``rank``: the data, and which of the shard's rows these are (int64)."""
    producer = shard.producer
    if isinstance(producer, ReplicatedBatch):
        return producer.data, np.arange(len(shard.ids))  # every rank has them all
    index = producer.members.part_sent_by(rank)
    if index is None:
        return None, np.empty(0, dtype=np.int64)
    return producer.data, np.flatnonzero(producer.parts_of(shard.ids) == index)
