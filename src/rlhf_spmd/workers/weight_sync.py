"""Per-call layouts (ReaL's execution plan): a role's weights on loan to a worker that serves one of its methods elsewhere.

The twin is a worker of the same class on the call's pool and layout, without an optimizer; between calls its parameters have no
storage (with ``delta`` they keep it, and what has not changed is not sent). For a call they get some, and the home's weights are
transferred into them: every rank of both pools takes part, each member of the home only as a sender where it does not run the call,
and it goes on while it sends.

Where generation is ahead of training (:class:`AsyncWeightSync`), the twin keeps its weights. Each version sets out when the first
generate
call after its update is reached, which on the ranks that train is at once, and is put into place when a call takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.collectives import Group, Work, wait_all
from rlhf_spmd.process.program import fail_beside
from rlhf_spmd.reshard import BackgroundTask, Delta, Transfer, holdings, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.messages import Step

if TYPE_CHECKING:
    from rlhf_spmd.workers.model_worker import ModelWorker

NOTICE = 1  # the tag of notices, which must not be taken for weights
POLLED = 8  # steps of generation between two questions of a replica whether a version has set out


class WeightSync:
    """The weights of ``home`` for the calls that ``twin`` serves. Collective over both pools; every rank of the world makes one."""

    def __init__(self, home: ModelWorker, twin: ModelWorker, method: str) -> None:
        world, spec = home.build.world, home.spec
        assert spec is not None, f"{home.name} has no weights to lend"
        self.home, self.twin, self._rank = home, twin, world.rank
        ranks = sorted({*home.pool.ranks, *twin.pool.ranks})
        # a channel of its own: weights may still be on their way while the same ranks compute, or lend others
        self._group = world.group(ranks, "loan", channel=f"{home.name}.{method}")
        self._transfer: Transfer | None = None
        call = home.config.calls.get(method)
        self._delta = Delta() if call is not None and call.delta else None
        self._steps: list[Step] | None = None  # of every transfer; made for the first
        if self._group is not None:
            if capabilities(home.device).nccl:  # before any transfer is open
                self._group.connect(home.device)
            here, there = (holdings(at.shape.layout, at.shards(spec), at.pool.ranks) for at in (home, twin))
            self._plan = plan_transfer(here, there, lambda rank: rank // world.launch.local_size, world.rank)

    def take(self, version: int) -> None:
        """Fill the twin's parameters. Collective over both pools: every rank of them must call, in program order."""
        if self.twin.member and not (self._delta and self._delta.begun):
            self.twin.engine.storages.allocate()
        self.copy(self.twin.engine.local_tensors() if self.twin.member else {})

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets``, which on the twin's ranks are like its local shards. Collective as :meth:`take`."""
        self._get_ready()
        if self._group is not None:
            self._set_out(targets)

    def settle(self) -> None:
        """Wait until this rank has sent and received what it had to: the home's weights may change then."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def give_back(self) -> None:
        if self.twin.member:
            self.twin.engine.reshard()
            if self._delta is None:
                self.twin.engine.storages.free()

    def _get_ready(self) -> None:
        """For a transfer: the one before has ended, and ``_call`` is the call that this one leaves for. When it fails the main thread
        may be in another one."""
        self.settle()
        if self._group is not None:
            self._group.connect(self.home.device)
        board = self.home.controller.board
        self._call = board.call if board is not None else (0, "", "")

    def _set_out(self, targets: Mapping[str, Tensor]) -> None:
        """Start a transfer. A rank that the weights come to waits for it, and one whose own go back to host memory."""
        home, resting = self.home, self.home.resting
        if resting is not None:
            resting.reload()
        self._transfer = self._start(home.engine.local_tensors() if home.member else {}, targets)
        if resting is None and not self.twin.member:
            self._transfer.proceed(self._fail)
            return
        self.settle()
        if resting is not None:
            resting.rest(home.engine.local_tensors().values())

    def _start(
        self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], stream: torch.cuda.Stream | None = None
    ) -> Transfer:
        assert self._group is not None, "a rank of neither pool has no part in it"
        dtype = self.twin.config.torch_dtype(self.twin.device)
        if self._steps is None:
            self._steps = transfer_steps(self._plan, self._rank, sources, targets, self._group.ranks, dtype)
        return start_transfer(self._steps, sources, targets, self._group, dtype, delta=self._delta, stream=stream)

    def _fail(self, error: BaseException) -> None:
        """Of a thread beside the main one: the others must not wait for this rank until their time is up."""
        board = self.home.controller.board
        if board is not None:
            fail_beside(board, error, self._call)


class AsyncWeightSync(WeightSync):
    """For generation on ranks apart from the home's, which may be some steps ahead. ``kept``: on the twin's ranks the versions that
    have come or are coming, besides ``held``, the one in its parameters; elsewhere their names. The same versions on all ranks of
    both pools.
    """

    def __init__(self, home: ModelWorker, twin: ModelWorker, method: str) -> None:
        super().__init__(home, twin, method)
        self.held: int | None = None
        self.kept: dict[int, dict[str, Tensor]] = {}
        self._arrivals: dict[int, _Arrival] = {}  # by version, in the order in which they come
        self._last: _Arrival | None = None
        self._polls = 0  # since the newest version was sent
        self._notices: list[tuple[Work | None, Tensor]] = []
        self._base: dict[str, Tensor] = {}

    def take(self, version: int) -> None:
        """Put ``version`` of the weights into place. The newest sets out if the twin has not got it yet, and is waited for only if it
        is that one.

        Collective over both pools: every rank of them must call, in program order.
        """
        versions, role = self.home.controller.versions, self.home.name
        if self._group is None:
            return
        to_come, newest = versions.to_come(role), versions.newest(role)
        if version in self.kept:  # first of all, so that there is room for another one
            self._place(version, to_come)
        for old in self.kept.keys() - to_come:
            self._arrive(old)
            del self.kept[old]
        if newest not in (self.held, *self.kept):
            self._send(newest)
        if version != self.held:
            self._place(version, to_come)

    def give_back(self) -> None:
        """The twin keeps what it has, and begins to receive what it has not: no other call may, and the home's next update waits for
        it. The home need not have come so far: for that it needs nothing of what this rank does from here on."""
        for arrival in self._arrivals.values():
            arrival.begin()

    def poll(self, replica: Group) -> None:
        """Begin to receive the next version, if it has set out.

        Collective over ``replica``, ranks of the twin: every rank of it must call, in program order, as often as the others between two
        calls of :meth:`take`.
        """
        waiting = next((arrival for arrival in self._arrivals.values() if arrival.to_begin), None)
        if waiting is None:
            return
        self._polls += 1
        if self._polls % POLLED == 0 and bool(replica.broadcast(torch.tensor([waiting.has_set_out]), 0, "control")):
            waiting.begin()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """On GPUs, where versions arrive, one after the other."""
        return torch.cuda.Stream(self.twin.device)

    def needed(self) -> dict[int, Mapping[str, Tensor]]:
        """Versions that steps to come take and that the home does not have, on the twin's ranks. Local; waits for them to come."""
        versions, role = self.home.controller.versions, self.home.name
        return {version: self._values(version) for version in sorted(versions.to_come(role) - {versions.newest(role)})}

    def keep(self, version: int) -> dict[str, Tensor]:
        """Room for a version that comes from a checkpoint; the same on all ranks of both pools."""
        self.kept[version] = self._room()
        return self.kept[version]

    def receives(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a transfer goes into: with ``delta`` the values that came last, which then are copied to ``targets``."""
        if self._delta is None:
            return targets
        self._base = self._base or self._room()
        return self._base

    def settle(self) -> None:
        super().settle()
        wait_all([work for work, _ in self._notices])
        self._notices.clear()

    def _values(self, version: int) -> Mapping[str, Tensor]:
        if version == self.held:
            return self.twin.engine.local_tensors() if self.twin.member else {}
        self._arrive(version)
        return self.kept[version]

    @torch.no_grad()
    def _place(self, version: int, to_come: set[int]) -> None:
        """In place of the version that is held, which is kept if a step to come takes it."""
        self._arrive(version)
        before: dict[str, Tensor] = {}
        if self.twin.member:
            if self.held is None:
                self.twin.engine.storages.allocate()
            parameters = self.twin.engine.local_tensors()
            if self.held in to_come:
                before = {name: tensor.clone() for name, tensor in parameters.items()}
            for name, tensor in self.kept[version].items():
                parameters[name].copy_(tensor)
        del self.kept[version]
        if self.held is not None and self.held in to_come:
            self.kept[self.held] = before
        self.held = version

    def _send(self, version: int) -> None:
        """Start it on its way, on the home's ranks from its weights, which must not change before :meth:`settle`."""
        home, group = self.home, self._group
        assert group is not None
        self._get_ready()
        self.kept[version], self._polls = self._room(), 0
        first = group.ranks.index(home.pool.ranks[0])
        if not home.member:
            self._last = self._arrivals[version] = _Arrival(self, self.kept[version], group, first, self._last)
            return
        if group.rank == first:
            notice = torch.tensor([version])
            others = [group.ranks.index(rank) for rank in self.twin.pool.ranks]
            self._notices = [(group.isend(notice, member, "control", NOTICE), notice) for member in others]
        self._set_out({})

    def _room(self) -> dict[str, Tensor]:
        if not self.twin.member:
            return {}
        local = self.twin.engine.local_tensors()
        return {name: torch.empty(x.shape, dtype=x.dtype, device=self.twin.device) for name, x in local.items()}

    def _arrive(self, version: int) -> None:
        for earlier in [known for known in self._arrivals if known <= version]:
            self._arrivals.pop(earlier).wait()


class _Arrival:
    """A version on its way into ``targets``, received after ``before``: this rank may be generating, or waiting for others. A thread
    waits for the notice that the version has set out, from group index ``first``: on GPUs a kernel that receives would otherwise wait
    for it beside all of the generation.

    Over gloo that thread receives, too. NCCL's kernels are started by the main thread (:meth:`begin`), where all ranks of the replica
    have agreed to. Threads would start them in another order on each rank, beside those that generate: where the allocator then
    frees memory, which waits for the device, two ranks would each wait for the other's receive.
    """

    def __init__(
        self, loan: AsyncWeightSync, targets: dict[str, Tensor], group: Group, first: int, before: _Arrival | None
    ) -> None:
        self._loan, self._targets, self._before = loan, targets, before
        notice = torch.zeros(1, dtype=torch.int64)
        self._notice = notice, group.irecv(notice, first, "control", NOTICE)
        device = loan.twin.device
        self._free = (
            torch.cuda.current_stream().record_event() if capabilities(device).streams else None
        )  # ``targets`` are, from then on
        self._arrived: torch.cuda.Event | None = None
        self.to_begin = capabilities(device).nccl
        self._thread = BackgroundTask(self._hear if self.to_begin else self._receive, "weights", loan._fail)

    @property
    def has_set_out(self) -> bool:
        return not self._thread.is_alive()

    def begin(self) -> None:
        """Start all of its transfers and copies, if the thread does not. On GPUs the host waits for none of them, but with ``delta``
        for the numbers that come first. Collective over both pools: every rank of the replica at the same point of its program."""
        if not self.to_begin:
            return
        self.to_begin, self._before = False, None
        if self._free is None:
            self._fill()
            return
        stream = self._loan.stream  # no other transfer, which this rank may have begun sooner than its peers, stands before it
        stream.wait_event(self._free)
        with torch.cuda.stream(stream):  # only the stream waits for what comes
            self._fill()
        self._arrived = stream.record_event()

    def wait(self) -> None:
        self.begin()
        self._thread.wait()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        self._targets = {}  # the next one holds this one

    def _hear(self) -> None:
        wait_all([self._notice[1]])

    def _receive(self) -> None:
        self._hear()
        if self._before is not None:
            self._before._thread.join()
        self._before = None
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        came = self._loan.receives(self._targets)
        self._loan._start({}, came, None if self._free is None else self._loan.stream).wait()
        if came is not self._targets:
            for name, tensor in self._targets.items():
                tensor.copy_(came[name])
