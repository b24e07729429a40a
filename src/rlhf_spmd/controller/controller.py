"""Single-controller semantics without a controller process: every rank derives who sends what to whom from the same script."""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch

from rlhf_spmd.controller.graph import CallNode, Graph
from rlhf_spmd.controller.reference import Part, Production, Reference, RowSet, Source, pick_rows, source
from rlhf_spmd.controller.transport import LENGTHS, UNTRACED, Transport, pack, unpack
from rlhf_spmd.controller.worker import MethodSpec, Worker
from rlhf_spmd.data.batch import Batch, Field, concat
from rlhf_spmd.parallel.board import Board
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.telemetry.trace import Argument, Timeline


class Controller:
    """Runs an algorithm's script on this rank.

    Outside :meth:`run` calls may be made one by one (building, saving); inside it the script is traced first, so that results
    are pushed to their consumers as soon as they exist.
    """

    def __init__(self, world: Group, board: Board | None = None, timeline: Timeline | None = None) -> None:
        self.world = world
        self.rank = world.ranks[world.rank]
        self.board = board
        self.timeline = timeline or Timeline(self.rank)
        self.span: dict[str, Argument] = {}  # arguments of the last call's span: a worker may add to them
        self.graph = Graph()  # of the last script
        self._transport = Transport(world)
        self._seq = 1  # for the board 0 is before the first call
        self._tracing = False
        self._nodes: dict[str, deque[int]] = defaultdict(deque)  # of the calls of each name that are still to come in this run
        self._calls: dict[int, tuple[Worker, MethodSpec]] = {}  # node -> what it calls
        self._consumers: dict[int, list[CallNode]] = {}  # node -> who reads what it makes
        self._productions: list[Production] = []
        self._sent: dict[tuple[int, int], tuple[Production, Production]] = {}  # pushed and not yet consumed
        self._lengths: dict[int, np.ndarray] = {}  # token counts learnt from headers, by production

    # The script's side

    source = staticmethod(source)

    def run(self, script: Callable[..., Any], *args: Any) -> Any:
        """Trace the script, run it, and settle every message. Collective over the world: every rank of it must call."""
        self.graph = self.trace(script, *args)
        self._consumers = self.graph.consumers()
        for node in self.graph.nodes:
            self._nodes[node.name].append(node.index)
        result = script(*args)
        self.settle()
        return result

    def trace(self, script: Callable[..., Any], *args: Any) -> Graph:
        """The script's dataflow graph; nothing is computed and nothing moves."""
        outer = self.graph
        self.graph, self._tracing = Graph(), True
        try:
            script(*args)
            return self.graph
        finally:
            self.graph, self._tracing = outer, False

    def settle(self) -> None:
        """End of a script: receive what was sent here and not used, wait for what was sent, forget all data.

        Every rank of the world must call, in program order; it waits only for the ranks it exchanged data with.
        """
        for production in self._productions:
            if production.spec.lengths_of is not None and self.rank in self._readers(production):
                self._learn(production)
        for producer, consumer in self._sent.values():
            part = consumer.members.part_of.get(self.rank)
            if part is not None:
                self._receive(producer, consumer, producer.parts_with(consumer.part(part)))
        self._transport.finish()
        for kept in (self._productions, self._sent, self._lengths, self._nodes, self._consumers):
            kept.clear()

    def get(self, *references: Reference) -> list[Any]:
        """For each call the list of its collected values, the same on every rank (empty while tracing).

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return [[] for _ in references]
        self._enter("controller.get", sys._getframe(1))
        mine = []  # (which reference, position in its list, value)
        for i, reference in enumerate(references):
            call = reference.call
            assert call is not None, "get() takes what a call returned"
            for position, index in enumerate(call.spec.protocol.collect(call.role.shape)):
                if call.role.pool.ranks[index] == self.rank:
                    mine.append((i, position, call.values))
        parts = self.world.gather_bytes(json.dumps(mine).encode(), "control")
        found = sorted((entry for part in parts or [] for entry in json.loads(part)), key=lambda entry: entry[:2])
        ordered = [[value for which, _, value in found if which == i] for i in range(len(references))]
        result: list[Any] = json.loads(self.world.broadcast_bytes(json.dumps(ordered).encode() if parts else None, "control"))
        self._leave()
        return result

    def decide(self, wish: bool) -> bool:
        """True on every rank if any rank wishes it: the only way to branch on what one rank knows.

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return False
        self._enter("controller.decide", sys._getframe(1))
        result = bool(self.world.all_reduce(torch.tensor([int(wish)]), "control", "max"))
        self._leave()
        return result

    # The calls' side

    def _enter(self, name: str, caller: FrameType) -> int:
        """Number a call and note it on the board, which compares the ranks' call logs."""
        seq, self._seq = self._seq, self._seq + 1
        if self.board is not None:
            self.board.enter_call(seq, name, _site(caller))
        return seq

    def tick(self) -> None:
        """For the body of a long call without collectives: this rank is still going on."""
        if self.board is not None:
            self.board.tick()

    def _leave(self) -> None:
        if self.board is not None:
            self.board.leave_call()

    def call(
        self, role: Worker, spec: MethodSpec, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> Reference:
        """One call of a registered method; see :func:`rlhf_spmd.controller.worker.register`."""
        name = f"{role.name}.{spec.name}"
        reference = batch if isinstance(batch, Reference) else Reference(None)
        wanted = spec.wanted(batch, name, role) if reference is batch else []
        if self._tracing:
            return self._record(role, spec, reference, wanted, _site(caller))
        seq = self._enter(name, caller)
        node = self._nodes[name].popleft() if self._nodes[name] else UNTRACED
        production = Production(seq, node, reference.rows, role, spec)
        self._productions.append(production)
        self._send_inputs(production, reference, wanted)
        role.enter(spec, [*args, *kwargs.values()])
        index = production.members.part_of.get(self.rank)
        if index is not None:
            inputs = self._inputs(production, batch, wanted, index)
            with self.timeline.span(name, category="compute", call=seq) as self.span:
                result = spec.body(role, *inputs, *args, **kwargs)
            self._keep(production, result, index)
        role.leave()
        made = self._reference(production)
        self._push(production, made)
        self._leave()
        return made

    def _reference(self, production: Production) -> Reference:
        rows, spec = production.rows, production.spec
        if rows is None:
            return Reference(None, call=production)
        if spec.lengths_of is not None:
            rows = RowSet(rows.row_ids, rows.group_ids, lambda: self._learn(production), production.node)
        return Reference(rows, {name: (production, name) for name in spec.given(production.role)}, production)

    def _inputs(self, production: Production, batch: Any, wanted: list[str], index: int) -> list[Any]:
        """The body's first argument: this member's rows, in row order. ``index``: the part that it works on."""
        if batch is None:
            return []
        if not isinstance(batch, Reference):
            per_member = production.spec.protocol.per_member
            return [batch[production.role.pool.ranks.index(self.rank)] if per_member else batch]
        with self.timeline.span(f"{production.name}: inputs", category="wait", call=production.seq):
            part = production.part(index)
            local = self._assemble(production, batch, wanted, part)
        if production.spec.mini_batches is None:
            return [local]
        num_chunks = production.cut.num_chunks
        bounds = np.searchsorted(part.positions, np.arange(1, num_chunks) * (len(part.rows) // num_chunks))
        return [local.split(np.diff([0, *bounds, len(part.positions)]).tolist())]

    def _assemble(self, consumer: Production, batch: Reference, wanted: list[str], part: Part) -> Batch:
        fields: dict[str, Field] = {}
        if len(part.positions):  # a member without rows gets a batch without fields
            for producer, names in _by_producer(batch, wanted):
                data = self._fetch(producer, consumer, part, list(names.values()))
                fields |= {new: data[old] for new, old in names.items()}
        return Batch(part.row_ids, part.group_ids, fields)

    def _fetch(self, producer: Source | Production, consumer: Production, part: Part, names: list[str]) -> Batch:
        """These rows of a production: out of this rank's own memory, the rest from their holders."""
        if isinstance(producer, Source):
            return pick_rows(producer.data.select(names), part.row_ids)
        parts = producer.parts_with(part)
        pieces = self._receive(producer, consumer, parts)
        if any(self.rank in producer.members.holders(index) for index in parts):
            assert producer.data is not None, f"{consumer.name}: the data of call {producer.seq} are gone"
            pieces.append(producer.data.select(names))
        return pick_rows(pieces[0] if len(pieces) == 1 else concat(pieces), part.row_ids)

    def _receive(self, producer: Production, consumer: Production, parts: list[int]) -> list[Batch]:
        """Rows of these parts of a production, one batch from the first holder of each part that does not lie here."""
        holders = [producer.members.holders(index) for index in parts]
        sources = [ranks[0] for ranks in holders if self.rank not in ranks]
        return [unpack(self._transport.receive(rank, producer.seq, consumer.node, consumer.name)) for rank in sources]

    def _keep(self, production: Production, result: Any, index: int) -> None:
        data, production.values = result if isinstance(result, tuple) else (result, None)
        if isinstance(data, Batch):
            part, name = production.part(index), production.name
            missing = set(production.spec.given(production.role)) - set(data.fields)
            is_holder = bool(missing) and self.rank in production.members.holders(index)
            assert not (is_holder and len(data)), f"{name} declares {sorted(missing)}, but did not return it"
            same = data.row_ids is part.row_ids or torch.equal(data.row_ids, part.row_ids)
            assert same, f"{name} returned other rows than it got"
            production.data = data
        elif data is not None:
            production.values = data

    # Moving data

    def _send_inputs(self, consumer: Production, batch: Reference, wanted: list[str]) -> None:
        """Send what was not pushed: calls outside run(), or a branch that the trace did not foresee."""
        for producer, fields in _by_producer(batch, wanted):
            pushed = self._sent.pop((producer.seq, consumer.node), None)
            if isinstance(producer, Production) and pushed is None:
                self._send(producer, consumer, list(fields.values()))

    def _push(self, producer: Production, reference: Reference) -> None:
        """Send the results of a call to the consumers that the graph names."""
        if producer.rows is None:
            return
        if producer.spec.lengths_of is not None:
            self._send_lengths(producer)
        for node in self._consumers.get(producer.node, ()):
            rows = next((r for r in (reference.rows, producer.rows) if r and r.lengths_from == node.lengths_from), None)
            if rows is None:
                continue  # placed by lengths that a later call sets: sent when that call's results are consumed
            consumer = Production(-1, node.index, rows, *self._calls[node.index])
            fields = [name for made_by, name in node.inputs.values() if made_by == producer.node]
            self._send(producer, consumer, fields)
            self._sent[producer.seq, node.index] = (producer, consumer)

    def _send(self, producer: Production, consumer: Production, names: list[str]) -> None:
        """This rank's part of moving a production to a consumer: rows it is the first holder of, to members that lack them."""
        index = producer.members.part_of.get(self.rank)
        if producer.data is None or index is None:
            return
        holders = producer.members.holders(index)
        if holders[0] != self.rank or all(rank in holders for rank in consumer.members.part_of):
            return
        mine = producer.part(index)
        for wanted in consumer.parts_with(mine):
            ranks = [rank for rank in consumer.members.workers(wanted) if rank not in holders]
            if ranks:
                row_ids = mine.row_ids[torch.from_numpy(consumer.placement()[mine.positions] == wanted)]
                payload = pack(pick_rows(producer.data.select(names), row_ids))
                for rank in ranks:
                    self._transport.send(payload, rank, producer.seq, consumer.node, consumer.name)

    # Row lengths

    def _send_lengths(self, producer: Production) -> None:
        """Tell the token counts of the rows that this rank made to every rank that will work on them."""
        index = producer.members.part_of.get(self.rank)
        if index is None or producer.members.holders(index)[0] != self.rank or not len(producer.part(index).positions):
            return
        counts = torch.from_numpy(self._own_lengths(producer, index))
        for rank in self._readers(producer):
            if rank != self.rank:
                self._transport.send(counts.view(torch.uint8), rank, producer.seq, LENGTHS, "lengths")

    def _own_lengths(self, producer: Production, index: int) -> np.ndarray:
        assert producer.rows is not None and producer.data is not None
        before: np.ndarray = producer.rows.tokens()[producer.part(index).positions]
        return before + producer.data[producer.spec.lengths_of or ""].lengths.numpy()

    def _readers(self, producer: Production) -> list[int]:
        if producer.node < UNTRACED:
            return self.graph.readers_of_lengths(producer.node)
        return list(self.world.ranks)

    def _learn(self, producer: Production) -> np.ndarray:
        """Token counts int64 [rows] that ``producer`` set; waits for those made elsewhere."""
        if producer.seq not in self._lengths:
            assert producer.rows is not None
            counts = np.zeros(len(producer.rows), dtype=np.int64)
            for index in np.unique(producer.placement()).tolist():
                first, positions = producer.members.holders(index)[0], producer.part(index).positions
                if first == self.rank:
                    counts[positions] = self._own_lengths(producer, index)
                else:
                    payload = self._transport.receive(first, producer.seq, LENGTHS, "lengths")
                    counts[positions] = payload.view(torch.int64).numpy()
            self._lengths[producer.seq] = counts
        return self._lengths[producer.seq]

    def _record(self, role: Worker, spec: MethodSpec, batch: Reference, wanted: list[str], site: str) -> Reference:
        index = len(self.graph.nodes)
        assert index < UNTRACED, "more than a thousand calls in one step"
        inputs = {name: (producer.node, original) for name in wanted for producer, original in [batch.fields[name]]}
        lengths_from = batch.rows.lengths_from if batch.rows else -1
        node = CallNode(index, role.name, spec.name, site, inputs, spec.given(role), role.pool.ranks, lengths_from)
        self.graph.nodes.append(node)
        self._calls[index] = (role, spec)
        return self._reference(Production(-1, index, batch.rows, role, spec))


def _site(caller: FrameType) -> str:
    return f"{caller.f_code.co_filename.rsplit('/', 1)[-1]}:{caller.f_lineno}"


def _by_producer(batch: Reference, wanted: list[str]) -> list[tuple[Source | Production, dict[str, str]]]:
    """The wanted fields by the call that made them, in program order: name here -> name there."""
    found: dict[int, tuple[Source | Production, dict[str, str]]] = {}
    for name in wanted:
        producer, original = batch.fields[name]
        found.setdefault(id(producer), (producer, {}))[1][name] = original
    return sorted(found.values(), key=lambda item: item[0].seq)
