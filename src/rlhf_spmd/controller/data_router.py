"""How data get from call to call: who sends which rows to whom, when, and the token counts that say where rows go.

Every rank does the same bookkeeping in the same order, and its own part of the sending. The rules are at the head of
``controller.py`` (3 to 6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from rlhf_spmd.controller.graph import Graph
from rlhf_spmd.controller.reference import CallInput, CallRecord, FieldShard, ReplicatedBatch, pick_rows
from rlhf_spmd.controller.rows import Part, distinct
from rlhf_spmd.controller.transport import LENGTHS, Transport
from rlhf_spmd.data.batch import Batch, Field, concat, pack, unpack
from rlhf_spmd.parallel.collectives import Group

Share = tuple[
    CallInput, FieldShard, dict[str, str]
]  # of a consumer: what one producer makes for the same rows, as name here -> there


class DataRouter:
    """This rank's part of moving rows between the calls of a script. ``num_portions``: of rows that are handed out as they end."""

    def __init__(self, world: Group, num_portions: int = 1) -> None:
        self.num_portions = num_portions
        self.rank = world.ranks[world.rank]
        self.transport = Transport(world)
        self._consumers: dict[int, list[CallRecord]] = {}  # node -> who reads what it makes
        self._readers: dict[int, frozenset[int]] = {}  # node -> the ranks that must know the token counts which it makes
        self._foreseen: dict[int, CallRecord] = {}  # node -> the call as it was traced
        self._made: dict[int, CallRecord] = {}  # node -> the call that took its place, with the rows that it was traced with
        self._makers: list[CallRecord] = []  # of token counts that were told in this script
        self._pushed: dict[tuple[int, int], tuple[CallRecord, list[Share]]] = {}  # (call, node): sent ahead, not yet consumed

    def begin(self, graph: Graph) -> None:
        """Of a script that was traced as ``graph``."""
        self._consumers = graph.consumers()
        self._foreseen = {call.node: call for call in graph.nodes}
        readers: dict[CallRecord, frozenset[int]] = {}
        for call in graph.nodes:
            for maker, ranks in lengths_needed(call).items() if call.intakes else ():
                readers[maker] = readers.get(maker, frozenset()) | ranks
        for maker, ranks in readers.items():
            if maker.seq < 0:
                self._readers[maker.node] = ranks
            else:  # a call of an earlier script: what is made from its rows may be pushed at once
                self._tell(maker, ranks)

    def settle(self, spare: int = 0) -> None:
        """Receive what was sent here and not used, wait for what was sent, except by the last ``spare`` scripts."""
        for maker in self._makers:
            if self.rank in maker.told:
                self.learn(maker)
        for key in list(self._pushed):
            self._drop(*key)
        self.transport.finish(spare)
        for kept in (self._consumers, self._readers, self._foreseen, self._made, self._makers):
            kept.clear()

    # What comes in

    def gather(self, consumer: CallRecord, intake: CallInput, index: int, part: Part, arrived: Batch | None = None) -> Batch:
        """Fields of rows, out of this rank's memory and what others have sent. ``part``: the rows of part ``index``, or some of them;
        ``arrived``: what a call has made for these, if it is here."""
        if not len(part.positions):  # a member without rows gets a batch without fields
            return Batch(part.row_ids, part.group_ids, {})
        fields: dict[str, Field] = {}
        found: dict[str, list[tuple[np.ndarray, Batch]]] = defaultdict(list)
        for piece, names in intake.shares:
            own = self._own_part(piece.producer, index) if _cut_alike(piece, intake) else None
            if own is not None:
                fields |= {here: own[there] for here, there in names.items()}
                continue
            inside, ids = _within(piece, part.positions, len(intake.rows))
            if len(ids):
                if arrived is not None and isinstance(piece.producer, CallRecord):
                    data = pick_rows(arrived, torch.from_numpy(ids))
                else:
                    data = self._fetch(piece.producer, consumer, ids, list(names.values()))
                for here, there in names.items():
                    found[here].append((inside, data.select([there])))
        fields |= {name: _joined(name, pieces, len(part.positions)) for name, pieces in found.items()}
        return Batch(part.row_ids, part.group_ids, fields)

    def _own_part(self, producer: ReplicatedBatch | CallRecord, index: int) -> Batch | None:
        """The rows of a part of a call, if all of them lie here."""
        if isinstance(producer, ReplicatedBatch) or self.rank not in producer.members.holders(index) or producer.data is None:
            return None
        return producer.data if len(producer.data) == len(producer.intakes[0].part(index).positions) else None

    def _fetch(self, producer: ReplicatedBatch | CallRecord, consumer: CallRecord, ids: np.ndarray, names: list[str]) -> Batch:
        """These rows of a production: out of this rank's own memory, the rest from their holders."""
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
        """Rows of these parts of a production, one batch from the first holder of each part that does not lie here."""
        holders = [producer.members.holders(index) for index in parts]
        sources = [ranks[0] for ranks in holders if self.rank not in ranks]
        return [unpack(payload) for payload in self.transport.receive(sources, producer.seq, consumer.node, consumer.name)]

    # What goes out

    def send_inputs(self, consumer: CallRecord) -> None:
        """See that the inputs of a call get to it: those that were not pushed for just these rows are sent."""
        foreseen = self._foreseen.get(consumer.node)
        if foreseen is not None and _same_rows(foreseen, consumer):
            self._made[consumer.node] = consumer
        for maker, ranks in lengths_needed(consumer).items():
            self._tell(maker, ranks)
        by_producer: dict[int, tuple[CallRecord, list[Share]]] = {}
        for intake in consumer.intakes:
            for piece, names in intake.shares:
                if isinstance(piece.producer, CallRecord):
                    by_producer.setdefault(piece.producer.seq, (piece.producer, []))[1].append((intake, piece, names))
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
        """Send the results of a call to the consumers that the graph names, where the trace knew their rows."""
        if producer.rows is None:
            return
        if producer.spec.lengths_of is not None:
            self._tell(producer, self._readers.get(producer.node, frozenset()))
        for foreseen in self.foreseen_consumers(producer):
            if foreseen.in_portions:
                continue  # it has sent them
            intakes = [known for intake in foreseen.intakes if (known := self._real(intake)) is not None]
            if len(intakes) < len(foreseen.intakes):
                continue  # its rows are decided later, or placed by token counts that a later call makes
            for share in self._announce(producer, foreseen, intakes):
                self._send(producer, foreseen, share)

    def _announce(self, producer: CallRecord, foreseen: CallRecord, intakes: Sequence[CallInput]) -> list[Share]:
        """Note that ``producer`` sends to a foreseen call; returns what it sends: nothing where all of it stays."""
        shares = [
            (intake, FieldShard(producer, piece.name, piece.at, piece.ids), names)
            for intake in intakes
            for piece, names in intake.shares
            if isinstance(piece.producer, CallRecord) and piece.producer.seq < 0 and piece.producer.node == producer.node
        ]
        if self._all_stay(producer, foreseen, shares):
            return []
        self._pushed[producer.seq, foreseen.node] = foreseen, shares
        return shares

    def _all_stay(self, producer: CallRecord, consumer: CallRecord, shares: list[Share]) -> bool:
        """Whether a call works on what another made just where it lies, so that no rank sends any of it. False on ranks that do not
        answer for what was made: they need not know yet where rows go."""
        is_known = producer.members.answered(self.rank) is not None and consumer.members.are_holders(producer.members)
        return is_known and all(_cut_alike(piece, intake) for intake, piece, _ in shares)

    def foreseen_consumers(self, producer: CallRecord) -> Sequence[CallRecord]:
        """As they were traced; none if the call itself came otherwise: then these do so too, and pull."""
        return self._consumers.get(producer.node, ()) if self._made.get(producer.node) is producer else ()

    def announce_portions(self, producer: CallRecord) -> list[tuple[CallRecord, Share]]:
        """Before a generate call: note that it sends in portions to those foreseen calls that take their rows so; what it sends."""
        calls = [call for call in self.foreseen_consumers(producer) if call.in_portions]
        return [(call, share) for call in calls for share in self._announce(producer, call, call.intakes)]

    def sends_portions(self, consumer: CallRecord) -> bool:
        """Whether just the rows that a call takes are sent to it in portions."""
        if not consumer.in_portions:
            return False
        (intake,) = consumer.intakes
        (share,) = [(intake, *share) for share in intake.shares if isinstance(share[0].producer, CallRecord)]
        foreseen, pushed = self._pushed.get((share[1].producer.seq, consumer.node), (consumer, []))
        return foreseen.in_portions and _alike(pushed, [share])

    def _real(self, intake: CallInput) -> CallInput | None:
        """A traced call's intake with the calls that now make its token counts; None where it cannot be known yet."""
        if intake.rows.decided:
            return None
        tokens = []
        for piece in intake.tokens:
            maker = piece.producer
            if isinstance(maker, CallRecord) and maker.seq < 0:
                if maker.node not in self._made:
                    return None
                piece = FieldShard(self._made[maker.node], piece.name, piece.at, piece.ids)
            tokens.append(piece)
        same = tokens == [*intake.tokens]  # none was made in this script
        return intake if same else CallInput(intake.rows, intake.fields, tuple(tokens), intake.cut, intake.shares)

    def _send(self, producer: CallRecord, consumer: CallRecord, share: Share) -> None:
        """This rank's part of moving rows to a consumer."""
        for ranks, row_ids in self.outgoing(producer, consumer, share):
            assert producer.data is not None, f"{producer.name} has made no data here"
            names = dict.fromkeys(share[2].values())
            payload = pack(pick_rows(producer.data.select(names), torch.from_numpy(row_ids)))
            self.transport.send(payload, ranks, producer.seq, consumer.node, consumer.name)

    def outgoing(self, producer: CallRecord, consumer: CallRecord, share: Share) -> Iterator[tuple[list[int], np.ndarray]]:
        """Ranks, and the rows that this rank sends to each of them: those it is the first holder of, to members that lack them."""
        intake, piece, _ = share
        index = producer.members.answered(self.rank)
        if index is None:
            return
        holders = producer.members.holders(index)
        if all(rank in holders for rank in consumer.members.part_of):
            return
        alike = _cut_alike(piece, intake)
        if alike and consumer.members.are_holders(producer.members):
            return
        parts = intake.placement.parts[:, piece.at]
        mine = parts[0] == index if alike else producer.parts_of(piece.ids) == index
        for wanted in [index] if alike else distinct(parts[:, mine]):
            ranks = [rank for rank in consumer.members.workers(wanted) if rank not in holders]
            if ranks and len(row_ids := np.unique(piece.ids[mine & (parts == wanted).any(0)])):
                yield ranks, row_ids

    def _drop(self, seq: int, node: int) -> None:
        """Receive what was pushed for a call that came otherwise than foreseen, or did not come."""
        consumer, shares = self._pushed.pop((seq, node))
        index = consumer.members.part_of.get(self.rank)
        if index is None:
            return
        for intake, piece, _ in shares:
            _, ids = _within(piece, intake.part(index).positions, len(intake.rows))
            assert isinstance(piece.producer, CallRecord)
            for _ in range(self.num_portions if consumer.in_portions else 1):
                self.receive(piece.producer, consumer, distinct(piece.producer.parts_of(ids)))

    # Token counts

    def _tell(self, maker: CallRecord, ranks: Iterable[int]) -> None:
        """Send the token counts of the rows that this rank made to those of ``ranks`` that have not been told."""
        new = set(ranks) - maker.told
        if not new:
            return
        maker.told |= new
        self._makers.append(maker)
        index = maker.members.answered(self.rank)
        if index is not None and len(maker.intakes[0].part(index).positions):
            counts = torch.from_numpy(self._own_lengths(maker, index))
            self.transport.send(counts.view(torch.uint8), sorted(new - {self.rank}), maker.seq, LENGTHS, "lengths")

    def _own_lengths(self, maker: CallRecord, index: int) -> np.ndarray:
        """Of each row of the part; 0 for rows that have not come out."""
        assert maker.data is not None, f"{maker.name} has made no data here"
        part = maker.intakes[0].part(index)
        counts = torch.zeros(len(part.positions), dtype=torch.int64)
        if len(maker.data):  # without rows it may be without fields
            counts[torch.searchsorted(part.row_ids, maker.data.row_ids)] = maker.data[maker.spec.lengths_of or ""].lengths
        return counts.numpy()

    def learn(self, maker: CallRecord) -> np.ndarray:
        """Token counts int64 [rows] that a call made; waits for those made elsewhere. Only for ranks that are told."""
        if maker.counts is None:
            assert self.rank in maker.told, f"rank {self.rank} is not told the token counts of {maker.name}"
            counts = np.zeros(len(maker.intakes[0].rows), dtype=np.int64)
            elsewhere: dict[int, np.ndarray] = {}  # first holder -> positions
            for index, positions in maker.intakes[0].placement.positions():
                first = maker.members.holders(index)[0]
                if first == self.rank:
                    counts[positions] = self._own_lengths(maker, index)
                else:
                    elsewhere[first] = positions
            payloads = self.transport.receive(list(elsewhere), maker.seq, LENGTHS, "lengths")
            for positions, payload in zip(elsewhere.values(), payloads, strict=True):
                counts[positions] = payload.view(torch.int64).numpy()
            maker.counts = counts
        return maker.counts


def lengths_needed(consumer: CallRecord) -> dict[CallRecord, frozenset[int]]:
    """The calls whose token counts a call's placement needs, and the ranks that need them: members, and those that send to them.

    Members also need those by which the senders' own rows were placed, and who knows a call's counts, those that placed its rows.
    """
    found: dict[CallRecord, frozenset[int]] = {}
    pieces = [piece for intake in consumer.intakes for piece, _ in intake.shares]
    senders = dict.fromkeys(piece.producer for piece in pieces if isinstance(piece.producer, CallRecord))  # in program order
    if not any(intake.token_makers for call in (consumer, *senders) for intake in call.intakes):
        return found

    def note(intake: CallInput, ranks: frozenset[int]) -> None:
        for maker in intake.token_makers:
            if not ranks <= found.get(maker, frozenset()):
                found[maker] = found.get(maker, frozenset()) | ranks
                note(maker.intakes[0], ranks)

    members = frozenset(consumer.role.pool.ranks)
    everyone = members.union(*(sender.role.pool.ranks for sender in senders))
    for intake in consumer.intakes:
        note(intake, everyone)
    for sender in senders:
        note(sender.intakes[0], members)
    return found


def _alike(foreseen: list[Share], shares: list[Share]) -> bool:
    """Whether what was pushed is what the call takes: the same rows and fields, cut alike."""
    return len(foreseen) == len(shares) and all(
        a.rows.same(b.rows)
        and (a.cut, a.counted, [*mine.values()]) == (b.cut, b.counted, [*theirs.values()])
        and one.same(other)
        for (a, one, mine), (b, other, theirs) in zip(foreseen, shares, strict=True)
    )


def _same_rows(one: CallRecord, other: CallRecord) -> bool:
    pairs = zip(one.intakes, other.intakes, strict=False)
    return len(one.intakes) == len(other.intakes) and all(a.rows.same(b.rows) for a, b in pairs)


def _cut_alike(piece: FieldShard, intake: CallInput) -> bool:
    """Whether the call that made the piece had just these rows in just these parts."""
    if isinstance(piece.producer, ReplicatedBatch) or piece.ids is not intake.rows.row_ids:
        return False
    return piece.producer.intakes[0].placement is intake.placement


def _within(piece: FieldShard, positions: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows at these ascending positions, out of ``num_rows``: which the piece has, and their ids there; int64 both."""
    if len(piece.at) == num_rows:  # it has all
        return np.arange(len(positions)), piece.ids[positions] if len(positions) < num_rows else piece.ids
    inside = np.flatnonzero(np.isin(positions, piece.at, assume_unique=True))
    return inside, piece.ids[np.searchsorted(piece.at, positions[inside])]


def _joined(name: str, pieces: list[tuple[np.ndarray, Batch]], num_rows: int) -> Field:
    """One field of all rows, out of what several calls made for some of them each."""
    (order, whole), *_ = pieces
    if len(pieces) > 1:
        order = np.concatenate([at for at, _ in pieces])
        renamed = [Batch(b.row_ids, b.group_ids, {name: next(iter(b.fields.values()))}) for _, b in pieces]
        whole = concat(renamed).take(torch.from_numpy(np.argsort(order)))
    assert len(order) == num_rows, f"field {name!r} is there for {len(order)} of {num_rows} rows"
    field: Field = next(iter(whole.fields.values()))
    return field


def held_first(piece: FieldShard, rank: int) -> tuple[Batch | None, np.ndarray]:
    """The rows of a piece for which this rank answers: data, and which of the piece's rows (int64)."""
    producer = piece.producer
    if isinstance(producer, ReplicatedBatch):
        return producer.data, np.arange(len(piece.ids))  # every rank has them all
    index = producer.members.answered(rank)
    if index is None:
        return None, np.empty(0, dtype=np.int64)
    return producer.data, np.flatnonzero(producer.parts_of(piece.ids) == index)
