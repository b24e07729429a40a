"""Single-controller semantics without a controller process: every rank derives who sends what to whom from the same script.

What holds, and what the code below rests on:

1. Every rank walks the same script and makes the same calls in the same order. A call has a number, ``seq``, for the whole run;
   ranks that are in neither role only count it.
2. A script is traced before it runs: the same function, whose calls only record nodes. ``node`` is a call's place in that graph.
   Calls that the trace did not foresee (a loop's second round, calls outside :meth:`Controller.run`) have the node UNTRACED.
3. Rows are found by id. No two references need the same rows in the same order; a row lies where the call that made a field put it.
4. Data are pushed when they are made, to the consumers that the graph names, if the trace knew their rows. They are pulled, sent
   when the consumer is called, if it did not: rows that a decision took, calls that were not foreseen, results of earlier scripts.
   What was pushed and then not consumed as foreseen is received and dropped, on all ranks alike.
5. Token counts that a call makes go in a small header to the ranks that need them to place rows: members of a consumer, and of
   whoever sends to it. ``CallRecord.told`` is the same on every rank.
6. Data live as long as a reference to them. The end of a script only settles messages.
7. A call that takes its rows in portions waits, and runs when a call comes that must come after it (``streaming.py``). Which call
   that is follows from the script, so every rank runs the same calls in the same order, those that waited among them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.controller.data_router import DataRouter, held_first
from rlhf_spmd.controller.graph import CallStats, Graph
from rlhf_spmd.controller.reference import CallInput, CallRecord, Reference, ReplicatedBatch, made_by, pick_rows, source
from rlhf_spmd.controller.rows import PartitionSpec
from rlhf_spmd.controller.streaming import RolloutStreamer, Streaming, comes_in_portions, known_before, one_result, staying
from rlhf_spmd.controller.transport import REPORTS, UNTRACED
from rlhf_spmd.controller.versions import Versions
from rlhf_spmd.controller.worker import MethodSpec, Signature, Worker
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.parallel.collectives import Group, wait_all
from rlhf_spmd.process.board import Board
from rlhf_spmd.telemetry.progress import say
from rlhf_spmd.telemetry.trace import Argument, Timeline


class Controller:
    """Runs an algorithm's script on this rank. ``seed`` shuffles mini-batches. ``ahead``: see :class:`Versions`. ``speeds``: of each
    rank of the world; calls deal their rows in this proportion; empty: all alike. ``num_portions``: in which rows leave the generate
    calls that hand them out; 1: they leave them together."""

    def __init__(
        self,
        world: Group,
        board: Board | None = None,
        timeline: Timeline | None = None,
        seed: int = 0,
        ahead: int = 0,
        speeds: Sequence[float] = (),
        num_portions: int = 1,
        limits: tuple[int, int] = (0, 0),
    ) -> None:
        self.world = world
        self.rank = world.ranks[world.rank]
        self.board = board
        self.timeline = timeline or Timeline(self.rank)
        self.seed, self.speeds, self.num_portions, self.limits = seed, speeds, num_portions, limits
        self.span: dict[str, Argument] = {}  # arguments of the last call's span: a worker may add to them
        self.graph = Graph()  # of the last script
        self.taken: list[CallStats] = []  # the calls of the last script and since, foreseen or not
        self.handing_out: RolloutStreamer | None = None  # of the generate call under way, where rows go on as they end
        self.delivery = DataRouter(world, num_portions)
        self._streaming = Streaming(self, self.delivery, num_portions)
        self._own_reports: deque[bytes] = deque()
        self._seq = 1  # for the board 0 is before the first call
        self._last_site = ""  # of the last call
        self._tracing = False
        self.versions = Versions(ahead)
        # by name and site: the calls still to come in this script
        self._nodes: dict[tuple[str, str], deque[CallRecord]] = defaultdict(deque)
        self._next: dict[int, Worker] = {}  # node -> whose call comes after it on this rank, and wants to know

    # The script's side

    source = staticmethod(source)

    def run(self, script: Callable[..., Any], *args: Any) -> Any:
        """Trace the script, run it, and settle every message. Collective over the world: every rank of it must call."""
        self._streaming.drop_begun()
        self.graph = self.trace(script, *args)
        self.taken = []
        self.delivery.begin(self.graph)
        own: list[CallRecord] = []  # calls that this rank has a part in
        for node in self.graph.nodes:
            self._nodes[node.name, node.site].append(node)
            if self.rank in node.members.part_of:
                if own and node.role.prefetches and node.role is not own[-1].role:
                    self._next[own[-1].node] = node.role
                own.append(node)
        result = script(*args)
        # a rank whose script has fewer calls must not wait here for messages while the others wait for its next call
        self._enter("controller.settle", f"end of the script{' after ' * bool(self._last_site)}{self._last_site}")
        self.settle(self.versions.ahead)
        self._leave()
        return result

    def run_step(self, number: int, script: Callable[[], Any]) -> Any:
        """:meth:`run` of training step ``number``, in which generation may be ahead of training; so this does not wait until
        others have taken what the steps before sent them."""
        self.versions.begin_step(number)
        try:
            return self.run(script)
        finally:
            self.versions.end_step()

    def trace(self, script: Callable[..., Any], *args: Any) -> Graph:
        """The script's dataflow graph; nothing is computed and nothing moves."""
        outer, versions = self.graph, self.versions
        self.graph, self.versions, self._tracing = Graph(), versions.copy(), True
        try:
            returned = script(*args)
            calls = returned if isinstance(returned, list) else []
            self.graph.returned = [one.call for one in calls if isinstance(one, Reference) and one.call is not None]
            return self.graph
        finally:
            self.graph, self.versions, self._tracing = outer, versions, False

    def settle(self, spare: int = 0) -> None:
        """End of a script: receive what was sent here and not used, wait for what was sent, but not by the last ``spare`` scripts.

        Every rank of the world must call, in program order; it waits only for the ranks it exchanged data with.
        """
        self._streaming.run_waiting()
        self.delivery.settle(spare)
        self._nodes.clear()
        self._next.clear()

    def get(self, *references: Reference) -> list[Any]:
        """For each call the list of its collected values, the same on every rank (empty while tracing).

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return [[] for _ in references]
        self._streaming.run_waiting()
        return ordered_values(self._from_all("controller.get", self.values(*references)), len(references))

    def get_field(self, reference: Reference, name: str) -> Tensor:
        """A field with one number per row, float64 [rows], the same on every rank: what a script decides by. Ones while tracing.

        Collective over the world: every rank of it must call, in program order.
        """
        found = torch.ones(len(reference), dtype=torch.float64)
        if self._tracing:
            return found
        self._streaming.run_waiting()
        mine = []
        for piece in reference.select(name).fields[name]:
            data, at = held_first(piece, self.rank)
            if data is None or not len(at):
                continue
            values = pick_rows(data, torch.from_numpy(piece.ids[at]))[piece.name].double()
            if isinstance(piece.producer, ReplicatedBatch):  # every rank has it
                found[piece.at[at]] = values
            else:
                mine.append([piece.at[at].tolist(), values.tolist()])
        for at, values in (entry for part in self._from_all("controller.get_field", mine) for entry in part):
            found[at] = torch.tensor(values, dtype=torch.float64)
        return found

    def decide(self, wish: bool) -> bool:
        """True on every rank if any rank wishes it: the only way to branch on what one rank knows.

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return False
        self._enter("controller.decide", _site(sys._getframe(1)))
        result = bool(self.world.all_reduce(torch.tensor([int(wish)]), "control", "max"))
        self._leave()
        return result

    def vote(self, wish: bool) -> Callable[[], bool]:
        """As :meth:`decide`, without waiting for the others: the answer is what the returned function waits for.

        Collective over the world: every rank of it must call, in program order.
        """
        self._enter("controller.vote", _site(sys._getframe(1)))
        result = torch.tensor([int(wish)])
        work = self.world.start_all_reduce(result, "control", "max")
        self._leave()

        def answer() -> bool:
            wait_all([work])
            return bool(result)

        return answer

    def tell(self, line: str) -> None:
        """A line for people, from the first rank; nothing while tracing."""
        if self.world.rank == 0 and not self._tracing:
            say(line)

    def send_report(self, report: Any) -> None:
        """JSON for the first rank of the world, on its way while this rank goes on."""
        data = json.dumps(report).encode()
        if self.world.rank == 0:
            self._own_reports.append(data)
        else:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.delivery.transport.send(payload, self.world.ranks[:1], 0, REPORTS, "report")

    def receive_reports(self) -> list[Any]:
        """On the first rank: what each rank has sent, in rank order; waits for those that have yet to send."""
        others = self.delivery.transport.receive(self.world.ranks[1:], 0, REPORTS, "report")
        return [json.loads(report) for report in (self._own_reports.popleft(), *(bytes(one.numpy()) for one in others))]

    def values(self, *references: Reference) -> list[list[Any]]:
        """This rank's share of what :meth:`get` collects: [which reference, position in its list, value] each, as JSON."""
        mine = []
        for i, call in enumerate(reference.call for reference in references):
            if call is None:  # nothing was computed for it
                continue
            for position, index in enumerate(call.spec.protocol.collect(call.role.shape)):
                if call.role.pool.ranks[index] == self.rank:
                    mine.append([i, position, call.values])
        return mine

    def _from_all(self, name: str, mine: Any) -> list[Any]:
        """Every rank's JSON, on every rank."""
        self._enter(name, _site(sys._getframe(2)))
        result: list[Any] = self.world.broadcast_json(self.world.gather_json(mine, "control"), "control")
        self._leave()
        return result

    # The calls' side

    def _enter(self, name: str, site: str) -> int:
        """Number a call and note it on the board, which compares the ranks' call logs."""
        seq, self._seq = self._seq, self._seq + 1
        self._last_site = site
        if self.board is not None:
            self.board.enter_call(seq, name, site)
        return seq

    def tick(self) -> None:
        """For the body of a long call without collectives: this rank is still going on."""
        if self.board is not None:
            self.board.tick()
        self._streaming.go_on()

    def _leave(self) -> None:
        if self.board is not None:
            self.board.leave_call()

    def call(
        self, role: Worker, spec: MethodSpec, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> Reference:
        """One call of a registered method; see :func:`rlhf_spmd.controller.worker.register`."""
        signature = spec.describe(role, *args, **kwargs)
        production = self._plan(role, spec, signature, batch, (*args, *kwargs.values()))
        if spec.kind == "train":
            self.versions.train(role.name)
        site = _site(caller)
        if self._tracing:
            production.site, production.node = site, len(self.graph.nodes)
            assert production.node < REPORTS, "more than a thousand calls in one step"
            self.graph.nodes.append(production)
            return self._reference(production)
        production.seq = self._enter(production.name, site)
        coming = self._nodes.get((production.name, site))
        self.taken.append(CallStats(role.name, spec.kind, production.num_rows, production.epochs))
        if coming:
            production.node = coming.popleft().node
        takes_portions = self._streaming.enter(production)
        self.delivery.send_inputs(production)
        if takes_portions:
            self._streaming.wait_for_rows(production, args, kwargs)
        else:
            self._run(production, batch, args, kwargs)
        self._leave()
        return self._reference(production)

    def _run(self, production: CallRecord, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        production.role.enter(production)
        self._streaming.expect(production)
        self.handing_out = self._streaming.hand_out(production)
        index = production.members.part_of.get(self.rank)
        if index is not None:
            inputs = self._inputs(production, batch, index)
            if production.node in self._next:
                self._next.pop(production.node).prefetch()
            with self.timeline.span(production.name, category="compute", call=production.seq) as self.span:
                result = production.spec.body(production.role, *inputs, *args, **kwargs)
                result = one_result(production, inputs, [result])
            self.keep(production, result, index)
        if self.handing_out is not None:
            self.handing_out.finish(production.data)
            self.handing_out = None
        self.end(production)

    def end(self, production: CallRecord) -> None:
        """After the body, on every rank: what it made goes to its consumers."""
        production.role.leave(production)
        self.delivery.push(production)
        for intake in production.intakes:
            intake.forget()

    def _plan(self, role: Worker, spec: MethodSpec, signature: Signature, batch: Any, args: tuple[Any, ...]) -> CallRecord:
        name = f"{role.name}.{signature.name}"
        batches = _references(batch)
        assert len(batches) in (0, len(signature.streams)), (
            f"{name}: {len(batches)} references for {len(signature.streams)} streams"
        )
        version = (self.versions.generating if spec.kind == "generate" else self.versions.newest)(role.name)
        production = CallRecord(-1, UNTRACED, role, spec, name, signature.outputs, [], args, version)
        num_chunks = 0
        for reference, stream in zip(batches, signature.streams, strict=False):
            rows = reference.rows
            assert rows is not None, f"{name}: a reference without rows"
            wanted = stream.wanted(reference, name, role.unused)
            tokens = tuple([piece for token in spec.tokens for piece in reference.fields.get(token, ())])
            limits = (0, 0) if stream.keep_groups else self.limits  # of whole groups nothing hangs on them
            cut = PartitionSpec(
                production.members.num_parts, stream.keep_groups, speeds=production.members.speeds, limits=limits
            )
            if spec.kind == "train":
                if not (len(rows) or self._tracing):
                    raise ValueError(
                        f"{name}: no rows to train on; a script that takes some of its rows may branch on len(rows)"
                    )
                num_chunks = num_chunks or max(1, -(-rows.num_groups // (signature.mini_batch_size or max(rows.num_groups, 1))))
                if num_chunks > max(rows.num_groups, 1):
                    raise ValueError(f"{name}: {rows.num_groups} groups of rows cannot be cut into {num_chunks} mini-batches")
                cut = cut._replace(num_chunks=num_chunks, epochs=signature.epochs, seed=self.seed)
            fields = {field: reference.fields[field] for field in wanted}
            production.intakes.append(CallInput(rows, fields, tokens, cut))
        if len(production.intakes) == 1 and (stays := staying(production, production.intakes[0])) is not None:
            production.intakes = [stays]
        elif self.num_portions > 1 and len(production.intakes) == 1 and comes_in_portions(role, spec, production.intakes[0]):
            production.intakes, production.in_portions = [known_before(production.intakes[0])], True
        return production

    def _reference(self, production: CallRecord) -> Reference:
        if production.rows is None:
            return Reference(None, call=production)
        return made_by(production, production.rows, production.outputs, production)

    def _inputs(self, production: CallRecord, batch: Any, index: int) -> list[Any]:
        """The body's first argument: this member's rows, in row order. ``index``: the part that it works on."""
        if batch is None:
            return []
        if not production.intakes:
            per_member = production.spec.protocol.per_member
            return [batch[production.role.pool.ranks.index(self.rank)] if per_member else batch]
        with self.timeline.span(f"{production.name}: inputs", category="wait", call=production.seq):
            batches = [self.delivery.gather(production, intake, index, intake.part(index)) for intake in production.intakes]
        if production.spec.kind != "train":
            return batches
        updates = [intake.part(index).updates for intake in production.intakes]
        steps = zip(*([part.take(at) for at in its] for part, its in zip(batches, updates, strict=True)), strict=True)
        return [[list(step) for step in steps]]

    def keep(self, production: CallRecord, result: Any, index: int) -> None:
        """What the body returned for part ``index``."""
        data, production.values = result if isinstance(result, tuple) else (result, None)
        if isinstance(data, Batch):
            part, name = production.intakes[0].part(index), production.name
            missing = set(production.outputs) - set(data.fields)
            is_holder = bool(missing) and self.rank in production.members.holders(index)
            assert not (is_holder and len(data)), f"{name} declares {sorted(missing)}, but did not return it"
            same = data.row_ids is part.row_ids or torch.equal(data.row_ids, part.row_ids)
            some = production.spec.kind == "generate" and bool(torch.isin(data.row_ids, part.row_ids).all())
            some = some and bool((data.row_ids.diff() > 0).all())
            assert same or some, f"{name} returned other rows than it got, or not in their order"
            production.data = data
        elif data is not None:
            production.values = data


def ordered_values(parts: Sequence[Any], num_references: int) -> list[list[Any]]:
    """All ranks' shares of values (:meth:`Controller.values`): for each reference the list in the order of its protocol."""
    found = sorted((entry for part in parts for entry in part), key=lambda entry: entry[:2])
    return [[value for which, _, value in found if which == i] for i in range(num_references)]


def _references(batch: Any) -> list[Reference]:
    if batch is None or isinstance(batch, Reference):  # nearly all calls: these two lines save them two microseconds
        return [] if batch is None else [batch]
    several = isinstance(batch, list | tuple) and all(isinstance(entry, Reference) for entry in batch)
    return list(batch) if several else []


def _site(caller: FrameType) -> str:
    return _line(caller.f_code.co_filename, caller.f_lineno)


@cache
def _line(path: str, number: int) -> str:
    return f"{path.rsplit('/', 1)[-1]}:{number}"
