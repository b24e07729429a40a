"""How data get from call to call: who sends which rows to whom, when, and which token counts decide that.

Every rank keeps the same records in the same order, and sends what it holds. ``controller.py`` opens with the rules (3 to 6).
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


class FieldTransfer(NamedTuple):
    """What a producer makes for one input of a consumer: a shard, and ``names``, field at the consumer -> field at the producer."""

    input: CallInput
    shard: FieldShard
    names: dict[str, str]


class DataRouter:
    """Moves rows between the calls of a script, as far as this rank takes part. ``num_chunks``: messages per streamed rollout.

    Each call of a script exists twice: the trace records it, then the run makes the actual call in its place. Say a script makes ::

        responses = actor.generate_sequences(prompts)                                    # node 0
        scores = reward.compute_reward(responses)                                        # node 1
        actor.update(responses.take(models.controller.get_field(scores, "scores") > 0))  # node 2

    ``_traced`` has all three. The trace cannot know the third call's rows, because they depend on scores. When the run makes a call on
    the rows that its trace has, the call is also in ``_run_calls``: here nodes 0 and 1. So the actor's ranks push responses to node 1
    as soon as they exist, and the reward's ranks expect them. The third call has other rows than its trace, so it is not in
    ``_run_calls``. Its inputs are sent when it is made, and its own results when another call asks for them.
    """

    def __init__(self, world: Group, num_chunks: int = 1) -> None:
        self.num_chunks = num_chunks
        self.rank = world.ranks[world.rank]
        self.transport = Transport(world)
        self._consumers: dict[int, list[CallRecord]] = {}  # node -> the traced calls that read what it makes
        self._length_readers: dict[int, frozenset[int]] = {}  # node -> the ranks that need its token counts
        self._traced: dict[int, CallRecord] = {}  # node -> the call in the trace
        self._run_calls: dict[int, CallRecord] = {}  # node -> the call that the run made there, if it has the traced rows
        self._counted: list[CallRecord] = []  # calls whose token counts were sent in this script
        # (seq, consumer's node) -> the traced consumer, and what was pushed to it that the actual call has not taken yet
        self._pushed: dict[tuple[int, int], tuple[CallRecord, list[FieldTransfer]]] = {}

    def begin(self, graph: Graph) -> None:
        """Start a script that was traced as ``graph``."""
        self._consumers = graph.consumers()
        self._traced = {call.node: call for call in graph.nodes}
        readers: dict[CallRecord, frozenset[int]] = {}
        for call in graph.nodes:
            for producer, ranks in length_readers(call).items() if call.inputs else ():
                readers[producer] = readers.get(producer, frozenset()) | ranks
        for producer, ranks in readers.items():
            if producer.seq < 0:
                self._length_readers[producer.node] = ranks
            else:  # a call of an earlier script: results made from its rows may be pushed at once
                self._send_lengths(producer, ranks)

    def settle(self, num_unfinished_scripts: int = 0) -> None:
        """Receive what was sent to this rank and not used, and wait for its sends as :meth:`Transport.finish` does."""
        for producer in self._counted:
            if self.rank in producer.lengths_sent_to:
                self.read_lengths(producer)
        for key in list(self._pushed):
            self._drop(*key)
        self.transport.finish(num_unfinished_scripts)
        for records in (self._consumers, self._length_readers, self._traced, self._run_calls, self._counted):
            records.clear()

    # Receiving

    def gather(
        self, consumer: CallRecord, call_input: CallInput, index: int, part: RowPart, arrived: Batch | None = None
    ) -> Batch:
        """Return the fields of ``part``, from this rank's memory and from other ranks.

        ``part``: all or some rows of part ``index``. ``arrived``: what the producer made for these rows, if this rank has received it.
        """
        if not len(part.positions):  # a member without rows gets a batch without fields
            return Batch(part.row_ids, part.group_ids, {})
        fields: dict[str, Field] = {}
        pieces: dict[str, list[tuple[np.ndarray, Batch]]] = defaultdict(list)
        for shard, names in call_input.sources:
            local = self._local_part(shard.producer, index) if _same_parts(shard, call_input) else None
            if local is not None:
                fields |= {here: local[there] for here, there in names.items()}
                continue
            positions, ids = _within(shard, part.positions, len(call_input.rows))
            if len(ids):
                if arrived is not None and isinstance(shard.producer, CallRecord):
                    data = pick_rows(arrived, torch.from_numpy(ids))
                else:
                    data = self._fetch(shard.producer, consumer, ids, list(names.values()))
                for here, there in names.items():
                    pieces[here].append((positions, data.select([there])))
        fields |= {name: _joined(name, pieces_of_field, len(part.positions)) for name, pieces_of_field in pieces.items()}
        return Batch(part.row_ids, part.group_ids, fields)

    def _local_part(self, producer: ReplicatedBatch | CallRecord, index: int) -> Batch | None:
        """Return the rows of part ``index`` of a call, or None if this rank does not hold all of them."""
        if isinstance(producer, ReplicatedBatch) or self.rank not in producer.members.holders(index) or producer.data is None:
            return None
        return producer.data if len(producer.data) == len(producer.inputs[0].part(index).positions) else None

    def _fetch(self, producer: ReplicatedBatch | CallRecord, consumer: CallRecord, ids: np.ndarray, names: list[str]) -> Batch:
        """Return these rows of a producer: from this rank's memory, and the rest from their holders."""
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
        """Return one batch from the first holder of each of these parts, except parts that this rank holds."""
        holders = [producer.members.holders(index) for index in parts]
        sources = [ranks[0] for ranks in holders if self.rank not in ranks]
        return [unpack(payload) for payload in self.transport.receive(sources, producer.seq, consumer.node, consumer.name)]

    # Sending

    def send_inputs(self, consumer: CallRecord) -> None:
        """Send the inputs of a call, except what was already pushed for exactly these rows."""
        traced = self._traced.get(consumer.node)
        if traced is not None and _same_rows(traced, consumer):
            self._run_calls[consumer.node] = consumer
        for producer, ranks in length_readers(consumer).items():
            self._send_lengths(producer, ranks)
        by_producer: dict[int, tuple[CallRecord, list[FieldTransfer]]] = {}
        for call_input in consumer.inputs:
            for shard, names in call_input.sources:
                if isinstance(shard.producer, CallRecord):
                    by_producer.setdefault(shard.producer.seq, (shard.producer, []))[1].append(
                        FieldTransfer(call_input, shard, names)
                    )
        for seq, (producer, transfers) in sorted(by_producer.items()):
            key = seq, consumer.node
            if key in self._pushed:
                if _same_transfers(self._pushed[key][1], transfers):
                    del self._pushed[key]
                    continue
                self._drop(*key)
            for transfer in transfers:
                self._send(producer, consumer, transfer)

    def push(self, producer: CallRecord) -> None:
        """Send the results of a call to those of its consumers in the graph whose rows the trace knew."""
        if producer.rows is None:
            return
        if producer.spec.lengths_of is not None:
            self._send_lengths(producer, self._length_readers.get(producer.node, frozenset()))
        for traced in self.traced_consumers(producer):
            if traced.in_chunks:
                continue  # the streamer has sent these rows
            inputs = [resolved for each in traced.inputs if (resolved := self._resolved(each)) is not None]
            if len(inputs) < len(traced.inputs):
                continue  # a later call decides which rows it takes, or makes the token counts that balance them
            for transfer in self._announce(producer, traced, inputs):
                self._send(producer, traced, transfer)

    def _announce(self, producer: CallRecord, traced: CallRecord, inputs: Sequence[CallInput]) -> list[FieldTransfer]:
        """Note that ``producer`` pushes to a traced call. Return the transfers to send; none if every consumer rank holds its rows."""
        transfers = [
            FieldTransfer(call_input, FieldShard(producer, shard.name, shard.positions, shard.ids), names)
            for call_input in inputs
            for shard, names in call_input.sources
            if isinstance(shard.producer, CallRecord) and shard.producer.seq < 0 and shard.producer.node == producer.node
        ]
        if self._all_stay(producer, traced, transfers):
            return []
        self._pushed[producer.seq, traced.node] = traced, transfers
        return transfers

    def _all_stay(self, producer: CallRecord, consumer: CallRecord, transfers: list[FieldTransfer]) -> bool:
        """Return True if every consumer rank already holds its rows.

        Return False on ranks that send nothing, because they may not know yet.
        """
        is_known = producer.members.part_sent_by(self.rank) is not None and consumer.members.are_holders(producer.members)
        return is_known and all(_same_parts(transfer.shard, transfer.input) for transfer in transfers)

    def traced_consumers(self, producer: CallRecord) -> Sequence[CallRecord]:
        """Return the traced consumers of a call; none if the call differs from its trace, because then its consumers pull."""
        return self._consumers.get(producer.node, ()) if self._run_calls.get(producer.node) is producer else ()

    def announce_chunks(self, producer: CallRecord) -> list[tuple[CallRecord, FieldTransfer]]:
        """Note, before a generate call, to which traced calls it sends rows in chunks. Return these calls with what it sends."""
        calls = [call for call in self.traced_consumers(producer) if call.in_chunks]
        return [(call, transfer) for call in calls for transfer in self._announce(producer, call, call.inputs)]

    def arrives_in_chunks(self, consumer: CallRecord) -> bool:
        """Return True if ``consumer`` gets all its rows, and no others, in chunks."""
        if not consumer.in_chunks:
            return False
        (call_input,) = consumer.inputs
        (transfer,) = [
            FieldTransfer(call_input, *source) for source in call_input.sources if isinstance(source[0].producer, CallRecord)
        ]
        traced, pushed = self._pushed.get((transfer.shard.producer.seq, consumer.node), (consumer, []))
        return traced.in_chunks and _same_transfers(pushed, [transfer])

    def _resolved(self, call_input: CallInput) -> CallInput | None:
        """Return a traced call's input with actual calls as producers of token counts; None if one of them was not made yet."""
        if call_input.rows.data_dependent:
            return None
        tokens = []
        for shard in call_input.tokens:
            producer = shard.producer
            if isinstance(producer, CallRecord) and producer.seq < 0:
                if producer.node not in self._run_calls:
                    return None
                shard = FieldShard(self._run_calls[producer.node], shard.name, shard.positions, shard.ids)
            tokens.append(shard)
        if tokens == [*call_input.tokens]:  # no call of this script made token counts
            return call_input
        return CallInput(call_input.rows, call_input.fields, tuple(tokens), call_input.partition_spec, call_input.sources)

    def _send(self, producer: CallRecord, consumer: CallRecord, transfer: FieldTransfer) -> None:
        """Send the rows of a transfer that this rank has to send."""
        for ranks, row_ids in self.outgoing(producer, consumer, transfer):
            assert producer.data is not None, f"{producer.name} has made no data here"
            names = dict.fromkeys(transfer.names.values())
            payload = pack(pick_rows(producer.data.select(names), torch.from_numpy(row_ids)))
            self.transport.send(payload, ranks, producer.seq, consumer.node, consumer.name)

    def outgoing(
        self, producer: CallRecord, consumer: CallRecord, transfer: FieldTransfer
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield ranks, and the ids of the rows that this rank sends to them: rows of which it is the first holder."""
        call_input, shard, _ = transfer
        index = producer.members.part_sent_by(self.rank)
        if index is None:
            return
        holders = producer.members.holders(index)
        if all(rank in holders for rank in consumer.members.part_of):
            return
        has_same_parts = _same_parts(shard, call_input)
        if has_same_parts and consumer.members.are_holders(producer.members):
            return
        parts = call_input.partition.parts[:, shard.positions]
        is_local = parts[0] == index if has_same_parts else producer.parts_of(shard.ids) == index
        for part in [index] if has_same_parts else distinct(parts[:, is_local]):
            ranks = [rank for rank in consumer.members.workers(part) if rank not in holders]
            if ranks and len(row_ids := np.unique(shard.ids[is_local & (parts == part).any(0)])):
                yield ranks, row_ids

    def _drop(self, seq: int, node: int) -> None:
        """Receive, and drop, what was pushed for a call that differs from its trace or was not made."""
        consumer, transfers = self._pushed.pop((seq, node))
        index = consumer.members.part_of.get(self.rank)
        if index is None:
            return
        for call_input, shard, _ in transfers:
            _, ids = _within(shard, call_input.part(index).positions, len(call_input.rows))
            assert isinstance(shard.producer, CallRecord)
            for _ in range(self.num_chunks if consumer.in_chunks else 1):
                self.receive(shard.producer, consumer, distinct(shard.producer.parts_of(ids)))

    # Token counts

    def _send_lengths(self, producer: CallRecord, ranks: Iterable[int]) -> None:
        """Send the token counts of the rows that this rank made to those of ``ranks`` that do not have them yet."""
        new_ranks = set(ranks) - producer.lengths_sent_to
        if not new_ranks:
            return
        producer.lengths_sent_to |= new_ranks
        self._counted.append(producer)
        index = producer.members.part_sent_by(self.rank)
        if index is not None and len(producer.inputs[0].part(index).positions):
            counts = torch.from_numpy(self._local_lengths(producer, index))
            self.transport.send(counts.view(torch.uint8), sorted(new_ranks - {self.rank}), producer.seq, LENGTHS, "lengths")

    def _local_lengths(self, producer: CallRecord, index: int) -> np.ndarray:
        """Return the token count of each row of the part; 0 for rows that the call did not return."""
        assert producer.data is not None, f"{producer.name} has made no data here"
        part = producer.inputs[0].part(index)
        counts = torch.zeros(len(part.positions), dtype=torch.int64)
        if len(producer.data):  # without rows it may be without fields
            counts[torch.searchsorted(part.row_ids, producer.data.row_ids)] = producer.data[
                producer.spec.lengths_of or ""
            ].lengths
        return counts.numpy()

    def read_lengths(self, producer: CallRecord) -> np.ndarray:
        """Return the token counts that a call made, int64 [rows], once they are there. Only for ranks that get them."""
        if producer.row_lengths is None:
            assert self.rank in producer.lengths_sent_to, f"rank {self.rank} does not get the token counts of {producer.name}"
            counts = np.zeros(len(producer.inputs[0].rows), dtype=np.int64)
            positions_at: dict[int, np.ndarray] = {}  # another rank, the first holder -> positions
            for index, positions in producer.inputs[0].partition.positions():
                first = producer.members.holders(index)[0]
                if first == self.rank:
                    counts[positions] = self._local_lengths(producer, index)
                else:
                    positions_at[first] = positions
            payloads = self.transport.receive(list(positions_at), producer.seq, LENGTHS, "lengths")
            for positions, payload in zip(positions_at.values(), payloads, strict=True):
                counts[positions] = payload.view(torch.int64).numpy()
            producer.row_lengths = counts
        return producer.row_lengths


def length_readers(consumer: CallRecord) -> dict[CallRecord, frozenset[int]]:
    """Return the calls whose token counts partition a consumer's rows, and the ranks that need the counts.

    These are the consumer's members and the ranks that send to them. Members also need the counts that partitioned the senders' own
    rows. A rank that needs a call's counts also needs the counts that partitioned that call's rows.
    """
    readers: dict[CallRecord, frozenset[int]] = {}
    # in program order
    senders = dict.fromkeys(producer for call_input in consumer.inputs for producer, _ in call_input.producing_calls())
    if not any(call_input.length_producers for call in (consumer, *senders) for call_input in call.inputs):
        return readers

    def add_readers(call_input: CallInput, ranks: frozenset[int]) -> None:
        for producer in call_input.length_producers:
            if not ranks <= readers.get(producer, frozenset()):
                readers[producer] = readers.get(producer, frozenset()) | ranks
                add_readers(producer.inputs[0], ranks)

    members = frozenset(consumer.role.pool.ranks)
    all_ranks = members.union(*(sender.role.pool.ranks for sender in senders))
    for call_input in consumer.inputs:
        add_readers(call_input, all_ranks)
    for sender in senders:
        add_readers(sender.inputs[0], members)
    return readers


def _same_transfers(pushed: list[FieldTransfer], transfers: list[FieldTransfer]) -> bool:
    """Return True if what was pushed is what the call takes: the same rows and fields in the same parts."""
    return len(pushed) == len(transfers) and all(
        a.input.rows.same(b.input.rows)
        and (a.input.partition_spec, a.input.counts_key) == (b.input.partition_spec, b.input.counts_key)
        and [*a.names.values()] == [*b.names.values()]
        and a.shard.same(b.shard)
        for a, b in zip(pushed, transfers, strict=True)
    )


def _same_rows(traced: CallRecord, actual: CallRecord) -> bool:
    pairs = zip(traced.inputs, actual.inputs, strict=False)
    return len(traced.inputs) == len(actual.inputs) and all(a.rows.same(b.rows) for a, b in pairs)


def _same_parts(shard: FieldShard, call_input: CallInput) -> bool:
    """Return True if the producer of the shard had exactly these rows in exactly these parts."""
    if isinstance(shard.producer, ReplicatedBatch) or shard.ids is not call_input.rows.row_ids:
        return False
    return shard.producer.inputs[0].partition is call_input.partition


def _within(shard: FieldShard, positions: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the rows at these ascending positions (out of ``num_rows``) a shard has, and their ids at its producer."""
    if len(shard.positions) == num_rows:  # it has all
        return np.arange(len(positions)), shard.ids[positions] if len(positions) < num_rows else shard.ids
    inside = np.flatnonzero(np.isin(positions, shard.positions, assume_unique=True))
    return inside, shard.ids[np.searchsorted(shard.positions, positions[inside])]


def _joined(name: str, pieces: list[tuple[np.ndarray, Batch]], num_rows: int) -> Field:
    """Return one field of all rows, from what several producers made for some rows each."""
    (order, batch), *_ = pieces
    if len(pieces) > 1:
        order = np.concatenate([positions for positions, _ in pieces])
        renamed = [Batch(b.row_ids, b.group_ids, {name: next(iter(b.fields.values()))}) for _, b in pieces]
        batch = concat(renamed).take(torch.from_numpy(np.argsort(order)))
    assert len(order) == num_rows, f"field {name!r} is there for {len(order)} of {num_rows} rows"
    field: Field = next(iter(batch.fields.values()))
    return field


def pick_rows(batch: Batch, row_ids: Tensor) -> Batch:
    """Return the rows with these ids, in that order, from a batch that has them."""
    return batch if batch.row_ids is row_ids or torch.equal(batch.row_ids, row_ids) else batch.reorder(row_ids)


def rows_sent_by(shard: FieldShard, rank: int) -> tuple[Batch | None, np.ndarray]:
    """Return the data that other ranks fetch from ``rank`` for a shard, and which of the shard's rows these are (int64)."""
    producer = shard.producer
    if isinstance(producer, ReplicatedBatch):
        return producer.data, np.arange(len(shard.ids))  # every rank has them all
    index = producer.members.part_sent_by(rank)
    if index is None:
        return None, np.empty(0, dtype=np.int64)
    return producer.data, np.flatnonzero(producer.parts_of(shard.ids) == index)
