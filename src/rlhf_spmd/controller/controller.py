"""Single-controller semantics without a controller process: every rank derives who sends what to whom from the same script.

These rules hold in all of this package:

1. Every rank runs the same script and makes the same calls in the same order. A call has a number, ``seq``, for the whole run. Its
   body runs on members of its role. Other ranks may send inputs of the call.
2. A script is traced before it runs: the same function is called, and its calls only record nodes. ``node`` is a call's place in that
   graph. Calls that the trace did not contain (a loop's second round, calls outside :meth:`Controller.run`) have the node UNTRACED.
3. Rows are found by id. Two references need not have the same rows, nor the same order. Each field of a row is on the ranks whose call
   made it.
4. A producer pushes data as soon as they exist to the consumers in the graph, if the trace knew their rows. Otherwise consumers pull:
   the data are sent when the consumer is called. That happens with filtered rows, untraced calls and results of earlier scripts. If a
   call does not take what was pushed to it, its ranks receive and drop that, all of them alike.
5. Token counts that a call makes go in a small message to the ranks that partition rows by them: the members of a consumer, and the
   ranks that send to it. ``CallRecord.lengths_sent_to`` is the same on every rank.
6. Data are freed when the last reference to them goes. The end of a script only waits for its messages.
7. A call that takes its rows in chunks waits until the script makes a call that must follow it (``streaming.py``). That depends on the
   script only, so every rank runs the same calls in the same order.
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

from rlhf_spmd.controller.call import CallRecord, CallStats, Graph, ReplicatedBatch, Role
from rlhf_spmd.controller.data_router import DataRouter, pick_rows, rows_sent_by
from rlhf_spmd.controller.protocols import EQUAL_SPEEDS, RankSpeeds
from rlhf_spmd.controller.reference import Reference, call_inputs, made_by, source
from rlhf_spmd.controller.signature import MethodSpec, Signature
from rlhf_spmd.controller.streaming import RolloutStreamer, Streaming, WaitingCall, choose_arrival, one_result
from rlhf_spmd.controller.transport import REPORTS, UNTRACED
from rlhf_spmd.controller.versions import Versions
from rlhf_spmd.parallel.collectives import Group, wait_all
from rlhf_spmd.process.board import Board
from rlhf_spmd.telemetry.progress import say
from rlhf_spmd.telemetry.trace import Argument, Timeline


class Controller:
    """Runs an algorithm's script on this rank.

    - seed: shuffles mini-batches
    - ahead: see :class:`Versions`
    - speeds: ranks get tokens in this proportion
    - num_chunks: messages in which a replica's rows leave a generate call that streams them; 1: all at once
    - limits: tokens and rows of a micro-batch, which balancing respects; 0: no limit
    """

    def __init__(
        self,
        world: Group,
        board: Board | None = None,
        timeline: Timeline | None = None,
        seed: int = 0,
        ahead: int = 0,
        speeds: RankSpeeds = EQUAL_SPEEDS,
        num_chunks: int = 1,
        limits: tuple[int, int] = (0, 0),
    ) -> None:
        self.world = world
        self.rank = world.ranks[world.rank]
        self.board = board
        self.timeline = timeline or Timeline(self.rank)
        self.seed = seed
        self.speeds = speeds
        self.num_chunks = num_chunks
        self.limits = limits
        self.span: dict[str, Argument] = {}  # what the timeline says of the last call; a worker may add to it
        self.graph = Graph()  # of the last script
        self.call_stats: list[CallStats] = []  # the calls since the last script began
        self.rollout_streamer: RolloutStreamer | None = None  # of the current generate call, if it streams rows
        self.router = DataRouter(world, num_chunks)
        self.versions = Versions(ahead)
        self._streaming = Streaming(self.router)
        self._local_reports: deque[bytes] = deque()
        self._seq = 1  # on the error board, 0 is the time before the first call
        self._last_site = ""  # of the last call
        self._tracing = False
        # (name, site) -> the traced calls that this script has not made yet
        self._nodes: dict[tuple[str, str], deque[CallRecord]] = defaultdict(deque)
        self._prefetch_after: dict[int, Role] = {}  # node -> the role to prefetch: that of this rank's next call

    # For scripts

    source = staticmethod(source)

    def run(self, script: Callable[..., Any], *args: Any) -> Any:
        """Trace the script, run it, and settle. Collective over the world: every rank of it must call, in program order."""
        self._streaming.drop_early()
        self.graph = self.trace(script, *args)
        self.call_stats = []
        self.router.begin(self.graph)
        computed: list[CallRecord] = []  # calls that this rank computes
        for node in self.graph.nodes:
            self._nodes[node.name, node.site].append(node)
            if self.rank in node.members.part_of:
                if computed and node.role.prefetches and node.role is not computed[-1].role:
                    self._prefetch_after[computed[-1].node] = node.role
                computed.append(node)
        result = script(*args)
        # a rank whose script has fewer calls must not wait here for messages while others wait for its next call
        self._enter("controller.settle", f"end of the script{' after ' * bool(self._last_site)}{self._last_site}")
        self.settle(self.versions.ahead)
        self._leave()
        return result

    def run_step(self, global_step: int, script: Callable[[], Any]) -> Any:
        """Run the script of training step ``global_step``, in which generation may be ahead of training, as :meth:`run` does.

        Collective over the world: every rank of it must call, in program order.
        """
        self.versions.begin_step(global_step)
        try:
            return self.run(script)
        finally:
            self.versions.end_step()

    def trace(self, script: Callable[..., Any], *args: Any) -> Graph:
        """Return the script's dataflow graph. Nothing is computed or sent."""
        outer_graph, outer_versions = self.graph, self.versions
        self.graph, self.versions, self._tracing = Graph(), outer_versions.copy(), True
        try:
            returned = script(*args)
            calls = returned if isinstance(returned, list) else []
            self.graph.returned = [each.call for each in calls if isinstance(each, Reference) and each.call is not None]
            return self.graph
        finally:
            self.graph, self.versions, self._tracing = outer_graph, outer_versions, False

    def settle(self, num_unfinished_scripts: int = 0) -> None:
        """End a script: receive what was sent to this rank and not used, and wait for its own sends.

        It waits only for ranks with which it exchanged data, and not for the sends of the last ``num_unfinished_scripts`` scripts.

        Collective over the world: every rank of it must call, in program order.
        """
        self._run_waiting()
        self.router.settle(num_unfinished_scripts)
        self._nodes.clear()
        self._prefetch_after.clear()

    def get(self, *references: Reference) -> list[Any]:
        """Return for each reference the list of its call's collected values, the same on every rank; empty lists while tracing.

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return [[] for _ in references]
        self._run_waiting()
        return ordered_values(self._from_all("controller.get", self.values(*references)), len(references))

    def get_field(self, reference: Reference, name: str) -> Tensor:
        """Return a field of one number per row, float64 [rows], the same on every rank, for a script to branch on; ones while tracing.

        Collective over the world: every rank of it must call, in program order.
        """
        numbers = torch.ones(len(reference), dtype=torch.float64)
        if self._tracing:
            return numbers
        self._run_waiting()
        entries = []
        for shard in reference.select(name).fields[name]:
            data, sent = rows_sent_by(shard, self.rank)
            if data is None or not len(sent):
                continue
            values = pick_rows(data, torch.from_numpy(shard.ids[sent]))[shard.name].double()
            if isinstance(shard.producer, ReplicatedBatch):  # every rank has it
                numbers[shard.positions[sent]] = values
            else:
                entries.append([shard.positions[sent].tolist(), values.tolist()])
        for positions, values in (entry for part in self._from_all("controller.get_field", entries) for entry in part):
            numbers[positions] = torch.tensor(values, dtype=torch.float64)
        return numbers

    def any_rank(self, value: bool) -> bool:
        """Return True on every rank if ``value`` is True on any rank. A script may branch on what one rank knows only through this.

        Collective over the world: every rank of it must call, in program order.
        """
        if self._tracing:
            return False
        self._enter("controller.any_rank", _site(sys._getframe(1)))
        result = bool(self.world.all_reduce(torch.tensor([int(value)]), "control", "max"))
        self._leave()
        return result

    def any_async(self, value: bool) -> Callable[[], bool]:
        """Start an :meth:`any_rank`, and return a function that waits for the result.

        Collective over the world: every rank of it must call, in program order.
        """
        self._enter("controller.any_async", _site(sys._getframe(1)))
        result = torch.tensor([int(value)])
        work = self.world.start_all_reduce(result, "control", "max")
        self._leave()

        def wait() -> bool:
            wait_all([work])
            return bool(result)

        return wait

    def log(self, line: str) -> None:
        """Print a line on the first rank. Does nothing while tracing."""
        if self.world.rank == 0 and not self._tracing:
            say(line)

    def send_report(self, report: Any) -> None:
        """Send JSON to the first rank of the world. Return while the message is in flight."""
        data = json.dumps(report).encode()
        if self.world.rank == 0:
            self._local_reports.append(data)
        else:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.router.transport.send(payload, self.world.ranks[:1], 0, REPORTS, "report")

    def receive_reports(self) -> list[Any]:
        """Return the next report of each rank, in rank order, once they are there. Only for the first rank of the world."""
        others = self.router.transport.receive(self.world.ranks[1:], 0, REPORTS, "report")
        return [json.loads(report) for report in (self._local_reports.popleft(), *(bytes(report.numpy()) for report in others))]

    def values(self, *references: Reference) -> list[list[Any]]:
        """Return what this rank contributes to :meth:`get`: a list of [index of the reference, position in its list, value]."""
        entries = []
        for i, call in enumerate(reference.call for reference in references):
            if call is None:  # nothing was computed for it
                continue
            for position, index in enumerate(call.spec.protocol.collect(call.role.shape)):
                if call.role.pool.ranks[index] == self.rank:
                    entries.append([i, position, call.values])
        return entries

    def _from_all(self, name: str, value: Any) -> list[Any]:
        """Return every rank's JSON ``value``, on every rank.

        Collective over the world: every rank of it must call, in program order.
        """
        self._enter(name, _site(sys._getframe(2)))
        result: list[Any] = self.world.broadcast_json(self.world.gather_json(value, "control"), "control")
        self._leave()
        return result

    # For calls

    def _enter(self, name: str, site: str, rows: str = "") -> int:
        """Give a call its number, and post it on the error board, which compares the calls of all ranks and their rows."""
        seq, self._seq = self._seq, self._seq + 1
        self._last_site = site
        if self.board is not None:
            self.board.enter_call(seq, name, site, rows)
        return seq

    def _leave(self) -> None:
        if self.board is not None:
            self.board.leave_call()

    def tick(self) -> None:
        """Report that this rank is alive. Bodies of long calls without collectives call it."""
        if self.board is not None:
            self.board.tick()
        self._streaming.continue_early()

    def call(
        self, role: Role, spec: MethodSpec, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> Reference:
        """Make one call of a registered method; see :func:`rlhf_spmd.controller.worker.register`."""
        signature = spec.describe(role, *args, **kwargs)
        call = self._plan(role, spec, signature, batch, (*args, *kwargs.values()))
        if spec.kind == "train":
            self.versions.train(role.name)
        site = _site(caller)
        if self._tracing:
            call.site, call.node = site, len(self.graph.nodes)
            assert call.node < REPORTS, "more than a thousand calls in one step"
            self.graph.nodes.append(call)
            return _result(call)
        call.seq = self._enter(call.name, site, ", ".join(dict.fromkeys(each.rows.digest for each in call.inputs)))
        self.call_stats.append(CallStats(role.name, spec.kind, call.num_rows, call.epochs))
        if traced := self._nodes.get((call.name, site)):
            call.node = traced.popleft().node
        in_chunks = self.router.arrives_in_chunks(call)
        if self._streaming.must_run_waiting(call, in_chunks):
            self._run_waiting()
        self.router.send_inputs(call)
        if in_chunks:
            self._streaming.waiting.append(WaitingCall(call, args, kwargs))
        else:
            self._run(call, batch, args, kwargs)
        self._leave()
        return _result(call)

    def _run(self, call: CallRecord, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.role.enter(call)
        self._streaming.drop_stale(call)
        self.rollout_streamer = self._streaming.streamer(call)
        index = call.members.part_of.get(self.rank)
        if index is not None:
            inputs = self._inputs(call, batch, index)
            if call.node in self._prefetch_after:
                self._prefetch_after.pop(call.node).prefetch()
            with self.timeline.span(call.name, category="compute", call=call.seq) as self.span:
                result = one_result(call, inputs, [call.spec.body(call.role, *inputs, *args, **kwargs)])
            call.store_result(result, index, self.rank)
        if self.rollout_streamer is not None:
            self.rollout_streamer.finish(call.data)
            self.rollout_streamer = None
        self._end(call)

    def _run_waiting(self) -> None:
        """Run the calls that wait for chunks. Each chunk goes through all of them before the next one.

        Collective over the world: every rank of it must call, in program order.
        """
        waiting, self._streaming.waiting = self._streaming.waiting, []
        local = [(call, call.record.members.part_of[self.rank]) for call in waiting if self.rank in call.record.members.part_of]
        for call in waiting:
            call.record.role.enter(call.record)
            self._streaming.drop_stale(call.record)
        for number in range(self.num_chunks if local else 0):
            for call, index in local:
                self._run_chunk(call, index, number)
        for call, index in local:
            with self.timeline.span(call.record.name, category="compute", call=call.record.seq) as self.span:
                result = one_result(call.record, call.batches, call.results)
            call.record.store_result(result, index, self.rank)
        for call in waiting:
            self._end(call.record)

    def _run_chunk(self, call: WaitingCall, index: int, number: int) -> None:
        record = call.record
        span_arguments: dict[str, Argument] = {"call": record.seq, "chunk": number}
        with self.timeline.span(f"{record.name}: inputs", category="wait", **span_arguments):
            batch = self._streaming.receive(record, index)
        with self.timeline.span(record.name, category="compute", rows=len(batch), **span_arguments) as self.span:
            call.results.append(record.spec.body(record.role, batch, *call.args, **call.kwargs))
        call.batches.append(batch)

    def _end(self, call: CallRecord) -> None:
        """Send a call's results to their consumers. Runs after the body, on every rank."""
        call.role.leave(call)
        self.router.push(call)
        for call_input in call.inputs:
            call_input.forget()

    def _plan(self, role: Role, spec: MethodSpec, signature: Signature, batch: Any, args: tuple[Any, ...]) -> CallRecord:
        name = f"{role.name}.{signature.name}"
        references = _references(batch)
        assert len(references) in (0, len(signature.inputs)), (
            f"{name}: {len(references)} references for {len(signature.inputs)} inputs"
        )
        version = (self.versions.generating if spec.kind == "generate" else self.versions.newest)(role.name)
        call = CallRecord(-1, UNTRACED, role, spec, name, signature.outputs, [], args, version, self.router.read_lengths)
        call.inputs = call_inputs(call, references, signature, self.seed, self.limits, self._tracing)
        choose_arrival(call, self.num_chunks)
        return call

    def _inputs(self, call: CallRecord, batch: Any, index: int) -> list[Any]:
        """Return the body's first arguments: the rows of part ``index``, in row order. The call's own arguments follow them."""
        if batch is None:
            return []
        if not call.inputs:
            return [batch[call.role.pool.ranks.index(self.rank)] if call.spec.protocol.per_member else batch]
        with self.timeline.span(f"{call.name}: inputs", category="wait", call=call.seq):
            batches = [self.router.gather(call, call_input, index, call_input.part(index)) for call_input in call.inputs]
        if call.spec.kind != "train":
            return batches
        updates = [call_input.part(index).updates for call_input in call.inputs]
        batches_of_steps = [[batch.take(rows) for rows in steps] for batch, steps in zip(batches, updates, strict=True)]
        return [[list(step) for step in zip(*batches_of_steps, strict=True)]]


def ordered_values(parts: Sequence[Any], num_references: int) -> list[list[Any]]:
    """Return for each reference its values in the order of its protocol. ``parts``: :meth:`Controller.values` of every rank."""
    values: list[list[Any]] = [[] for _ in range(num_references)]
    for reference, _, value in sorted((entry for part in parts for entry in part), key=lambda entry: entry[:2]):
        values[reference].append(value)
    return values


def _result(call: CallRecord) -> Reference:
    return Reference(None, call=call) if call.rows is None else made_by(call, call.rows, call.outputs, call)


def _references(batch: Any) -> list[Reference]:
    if batch is None or isinstance(batch, Reference):  # nearly all calls: these two lines save them two microseconds
        return [] if batch is None else [batch]
    is_references = isinstance(batch, list | tuple) and all(isinstance(entry, Reference) for entry in batch)
    return list(batch) if is_references else []


def _site(caller: FrameType) -> str:
    return _line(caller.f_code.co_filename, caller.f_lineno)


@cache
def _line(path: str, number: int) -> str:
    return f"{path.rsplit('/', 1)[-1]}:{number}"
