"""Weight sync: copies of a role's weights on another pool or in another layout, for the calls of one method.

``models.<role>.calls.<method>`` gives these calls their own ranks and layout (ReaL's execution plan). A :class:`WeightReplica` holds
the weights there, without an optimizer. For each call the owner's weights are transferred into it. Every rank of both pools takes part;
a rank that only sends goes on while it sends. After the call the parameters lose their storage. With ``delta`` they keep it, and only
elements that have changed are sent.

If generation runs ahead of training, the replica is an :class:`AsyncWeightReplica` and keeps its weights. Each version is sent when
the first generate call after its update is reached, which on the training ranks is at once. A call that takes it loads it. So goes
version v, made in step k, with generation one step ahead::

                        step k                  step k + 1                                        step k + 2
    owner, trains       update: v exists        generate: sends notice and v; update: settles     ...
    replica, generates  generate                generate with v - 1, receives v (poll or leave)   generate: loads v
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from rlhf_spmd.controller import CallRecord, GroupShape, ResourcePool
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.collectives import Group, Work, wait_all
from rlhf_spmd.process.program import fail_beside
from rlhf_spmd.reshard import (
    WEIGHT_SYNC_LABEL,
    BackgroundTask,
    Delta,
    Transfer,
    TransferStep,
    holdings,
    plan_transfer,
    start_transfer,
    transfer_steps,
)
from rlhf_spmd.workers.model_weights import ModelWeights, OwnedWeights

NOTICE = 1  # the tag of notices, which must not be taken for weights
POLL_INTERVAL = 8  # steps of generation between two checks of a replica for a new version


class WeightSync:
    """Copies the weights of ``source`` into tensors laid out as those of ``target``.

    Built once and used for all transfers. Construction is collective over the world, transfers over both pools.
    """

    def __init__(self, source: OwnedWeights, target: ModelWeights, name: str, delta: bool = False) -> None:
        world = source.context.world
        spec = source.spec
        assert spec is not None, f"{source.name} has no weights to send"
        self.source = source
        self.target = target
        self._rank = world.rank
        ranks = sorted({*source.pool.ranks, *target.pool.ranks})
        # a channel of its own: weights may be in flight while the same ranks compute, or send others
        self.group = world.group(ranks, WEIGHT_SYNC_LABEL, channel=f"{source.name}.{name}")
        self.delta = Delta() if delta else None
        self._transfer: Transfer | None = None
        self._steps: list[TransferStep] | None = None  # the same for every transfer; planned for the first
        if self.group is not None:
            if capabilities(source.device).nccl:  # before any transfer is open
                self.group.connect(source.device)
            source_holdings, target_holdings = (
                holdings(weights.shape.layout, weights.shards(spec), weights.pool.ranks) for weights in (source, target)
            )
            self._plan = plan_transfer(
                source_holdings, target_holdings, lambda rank: rank // world.launch.local_size, world.rank
            )

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets``: on the target's ranks tensors like its local shards, on others {}.

        A rank that receives returns when it has them. A rank that only sends returns at once, and its weights must not change before
        :meth:`settle`.

        Collective over both pools: every rank of them must call, in program order.
        """
        self.prepare()
        if self.group is not None:
            self.send(targets)

    def settle(self) -> None:
        """Wait until this rank has sent and received its part. Then the source's weights may change."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def prepare(self) -> None:
        """Finish the last transfer, and note the current call for errors: the main thread may be in another call by then."""
        self.settle()
        if self.group is not None:
            self.group.connect(self.source.device)
        board = self.source.context.controller.board
        self._call = board.call if board is not None else (0, "", "")

    def send(self, targets: Mapping[str, Tensor]) -> None:
        """Start a transfer. Waits for it on ranks that receive, and on ranks whose weights go back to host memory."""
        source = self.source
        offloaded = source.offloaded
        if offloaded is not None:
            offloaded.reload()
        self._transfer = self.start(source.local_tensors(), targets)
        if offloaded is None and not self.target.member:
            self._transfer.proceed(self.fail)
            return
        self.settle()
        if offloaded is not None:
            offloaded.offload(source.local_tensors().values(), ())

    def start(
        self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], stream: torch.cuda.Stream | None = None
    ) -> Transfer:
        """Start this rank's part of a transfer, and return it."""
        assert self.group is not None, "a rank of neither pool has no part in it"
        dtype = self.target.config.torch_dtype(self.target.device)
        if self._steps is None:
            self._steps = transfer_steps(self._plan, self._rank, sources, targets, self.group.ranks, dtype)
        return start_transfer(self._steps, sources, targets, self.group, dtype, delta=self.delta, stream=stream)

    def fail(self, error: BaseException) -> None:
        """End the job from a background thread: the other ranks must not wait for this one until their timeout."""
        board = self.source.context.controller.board
        if board is not None:
            fail_beside(board, error, self._call)


class WeightReplica(ModelWeights):
    """A copy of a role's weights for the calls of one method, on their own pool and layout. It has storage only during a call."""

    def __init__(self, owner: OwnedWeights, method: str, pool: ResourcePool, shape: GroupShape) -> None:
        super().__init__(owner.context, owner.name, pool, shape, owner.config, owner.spec, owner.head)
        self.owner = owner
        self.build_engine(None, owner.config.activation_checkpointing, fill=False)
        self.sync = WeightSync(owner, self, method, owner.config.calls[method].delta)

    def enter(self, call: CallRecord) -> None:
        with self.context.controller.timeline.span(f"{self.name}.reallocate", category="reshard"):
            self.receive(call.version)
            self.version = call.version

    def leave(self, call: CallRecord) -> None:
        if self.member:
            self.engine.reshard()
            if self.sync.delta is None:
                self.engine.storages.free()

    def settle(self) -> None:
        """Wait until this rank has sent and received its part. Then the owner's weights may change."""
        self.sync.settle()

    def receive(self, version: int) -> None:
        """Fill the parameters. Collective over both pools: every rank of them must call, in program order."""
        if self.member and not (self.sync.delta and self.sync.delta.has_sent):
            self.engine.storages.allocate()
        self.sync.copy(self.local_tensors())


class AsyncWeightReplica(WeightReplica):
    """A replica whose pool lies apart from the owner's and generates, possibly some steps ahead of training.

    - loaded: the version in its parameters
    - versions: version -> its weights, received or in flight, without the loaded one; {} for weights on ranks outside the replica's
      pool. All ranks of both pools have the same versions
    """

    def __init__(self, owner: OwnedWeights, method: str, pool: ResourcePool, shape: GroupShape) -> None:
        super().__init__(owner, method, pool, shape)
        self.loaded: int | None = None
        self.versions: dict[int, dict[str, Tensor]] = {}
        self._arrivals: dict[int, _Arrival] = {}  # by version, in the order in which they come
        self._last: _Arrival | None = None
        self._polls = 0  # since the newest version was sent
        self._notices: list[tuple[Work | None, Tensor]] = []
        self._base: dict[str, Tensor] = {}

    def receive(self, version: int) -> None:
        """Load ``version``. Start to send the newest version if the replica lacks it; wait for it only if it is ``version``.

        Collective over both pools: every rank of them must call, in program order.
        """
        if self.sync.group is None:
            return
        needed_later = self.context.controller.versions.needed_later(self.name)
        newest = self.context.controller.versions.newest(self.name)
        if version in self.versions:  # before a new version comes, so that there is room for it
            self._load(version, needed_later)
        for old in self.versions.keys() - needed_later:
            self._arrive(old)
            del self.versions[old]
        if newest not in (self.loaded, *self.versions):
            self._send(newest)
        if version != self.loaded:
            self._load(version, needed_later)

    def leave(self, call: CallRecord) -> None:
        """Keep the weights, and start to receive what is missing: no other call may do so, and the owner's next update waits for it.

        The owner may not have reached that send yet. It needs nothing from this rank before.
        """
        for arrival in self._arrivals.values():
            arrival.start_receiving()

    def poll(self, replica: Group) -> None:
        """Start to receive the next version, if it has been sent.

        Collective over ``replica``, the ranks of one generation replica: every rank of it must call, in program order, as often as
        the others between two calls of :meth:`receive`.
        """
        arrival = next((arrival for arrival in self._arrivals.values() if arrival.must_be_started), None)
        if arrival is None:
            return
        self._polls += 1
        if self._polls % POLL_INTERVAL == 0 and bool(replica.broadcast(torch.tensor([arrival.was_sent]), 0, "control")):
            arrival.start_receiving()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Return the stream on GPUs on which versions arrive, one after the other."""
        return torch.cuda.Stream(self.device)

    def older_versions(self) -> dict[int, Mapping[str, Tensor]]:
        """Return version -> weights, for versions that later steps take and the owner no longer has. Wait for them to arrive.

        Only for ranks of the replica's pool.
        """
        versions = self.context.controller.versions
        later = sorted(versions.needed_later(self.name) - {versions.newest(self.name)})
        return {version: self._values(version) for version in later}

    def allocate_version(self, version: int) -> dict[str, Tensor]:
        """Return empty tensors for a version that comes from a checkpoint. Call it on all ranks of both pools."""
        self.versions[version] = self._empty()
        return self.versions[version]

    def transfer_target(self, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that a transfer fills. With ``delta``: the last transfer's, which are copied to ``targets`` later."""
        if self.sync.delta is None:
            return targets
        self._base = self._base or self._empty()
        return self._base

    def settle(self) -> None:
        super().settle()
        wait_all([work for work, _ in self._notices])
        self._notices.clear()

    def _values(self, version: int) -> Mapping[str, Tensor]:
        if version == self.loaded:
            return self.local_tensors()
        self._arrive(version)
        return self.versions[version]

    @torch.no_grad()
    def _load(self, version: int, needed_later: set[int]) -> None:
        """Replace the loaded version, and keep that one if a later step takes it."""
        self._arrive(version)
        previous: dict[str, Tensor] = {}
        if self.member:
            if self.loaded is None:
                self.engine.storages.allocate()
            parameters = self.engine.local_tensors()
            if self.loaded in needed_later:
                previous = {name: tensor.clone() for name, tensor in parameters.items()}
            for name, tensor in self.versions[version].items():
                parameters[name].copy_(tensor)
        del self.versions[version]
        if self.loaded is not None and self.loaded in needed_later:
            self.versions[self.loaded] = previous
        self.loaded = version

    def _send(self, version: int) -> None:
        """Start to send a version. On the owner's ranks the weights must not change before :meth:`settle`."""
        group = self.sync.group
        assert group is not None
        self.settle()
        self.sync.prepare()
        self.versions[version] = self._empty()
        self._polls = 0
        notifier = group.ranks.index(self.owner.pool.ranks[0])
        if not self.owner.member:
            self._last = self._arrivals[version] = _Arrival(self, self.versions[version], group, notifier, self._last)
            return
        if group.rank == notifier:
            notice = torch.tensor([version])
            receivers = [group.ranks.index(rank) for rank in self.pool.ranks]
            self._notices = [(group.isend(notice, receiver, "control", NOTICE), notice) for receiver in receivers]
        self.sync.send({})

    def _empty(self) -> dict[str, Tensor]:
        return {name: torch.empty(x.shape, dtype=x.dtype, device=self.device) for name, x in self.local_tensors().items()}

    def _arrive(self, version: int) -> None:
        for earlier in [old for old in self._arrivals if old <= version]:
            self._arrivals.pop(earlier).wait()


class _Arrival:
    """A version on its way into ``targets``, received after ``previous`` while this rank generates or waits for others.

    A thread waits for the notice, from group index ``notifier``, that the version was sent: on GPUs a kernel that receives would
    otherwise wait beside the whole generation. Over gloo that thread also receives. NCCL's kernels are started by the main thread
    (:meth:`start_receiving`), where all ranks of the replica agree. Threads would start them in a different order on each rank, beside
    the kernels that generate. When the allocator then frees memory, which waits for the device, two ranks could each wait for the
    other's receive.

    ``must_be_started``: the main thread has to call :meth:`start_receiving`.
    """

    def __init__(
        self, replica: AsyncWeightReplica, targets: dict[str, Tensor], group: Group, notifier: int, previous: _Arrival | None
    ) -> None:
        self._replica = replica
        self._targets = targets
        self._previous_arrival = previous
        notice = torch.zeros(1, dtype=torch.int64)
        self._notice = notice, group.irecv(notice, notifier, "control", NOTICE)
        device = capabilities(replica.device)
        self._free = torch.cuda.current_stream().record_event() if device.streams else None  # from then on ``targets`` are free
        self._arrived: torch.cuda.Event | None = None
        self.must_be_started = device.nccl
        body = self._await_notice if self.must_be_started else self._receive
        self._thread = BackgroundTask(body, "weights", replica.sync.fail)

    @property
    def was_sent(self) -> bool:
        """Return True if the notice has arrived, and without NCCL the version itself."""
        return not self._thread.is_alive()

    def start_receiving(self) -> None:
        """Start all transfers and copies, unless the thread does.

        On GPUs the host waits for none of them; with ``delta`` it waits for the counts that come first.

        Collective over both pools: every rank of the replica must call at the same point of its program.
        """
        if not self.must_be_started:
            return
        self.must_be_started = False
        self._previous_arrival = None
        if self._free is None:
            self._fill()
            return
        stream = self._replica.stream  # apart from other transfers, which this rank may have started sooner than its peers
        stream.wait_event(self._free)
        with torch.cuda.stream(stream):  # only the stream waits for what comes
            self._fill()
        self._arrived = stream.record_event()

    def wait(self) -> None:
        """Return when the version is in its targets, or on GPUs when the current stream waits for that."""
        self.start_receiving()
        self._thread.wait()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        self._targets = {}  # the next arrival holds this one

    def _await_notice(self) -> None:
        wait_all([self._notice[1]])

    def _receive(self) -> None:
        self._await_notice()
        if self._previous_arrival is not None:
            self._previous_arrival._thread.join()
        self._previous_arrival = None
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        arrived = self._replica.transfer_target(self._targets)
        self._replica.sync.start({}, arrived, None if self._free is None else self._replica.stream).wait()
        if arrived is not self._targets:
            for name, tensor in self._targets.items():
                tensor.copy_(arrived[name])
