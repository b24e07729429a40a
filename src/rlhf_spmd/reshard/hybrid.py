"""One model's weights, moving between its training and its generation layout. The package's docstring has a drawing.

To generation, bucket by bucket: allocate generation parameters, gather, then free the training storage whose values they hold now. A
training parameter that is one slice of a generation parameter becomes a view of it. Others have no storage until they are restored:
FSDP2's shards, whose storage FSDP owns, and parameters that are scattered over the generation shard. So with ``zero_redundancy`` no
value is held twice.

The peak is the generation shard plus one bucket. A bucket starts only if all buffers in flight, with the training parameters that they
will replace, stay within the size of the largest bucket; one bucket is in flight in any case. If a generation stage has several
training stages, a bucket has a layer of each. During a transition nobody may write training parameters, or read those without a view.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import RECORDER, Group
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.parallel.zero import is_sharded, local_part
from rlhf_spmd.reshard.bucketing import TransferContext, TransferStep, plan_bucket, plan_steps
from rlhf_spmd.reshard.cells import HostOf
from rlhf_spmd.reshard.holdings import ShardsAt, held_by
from rlhf_spmd.reshard.reshard_methods import ONE_HOST, Method, single_slice
from rlhf_spmd.reshard.storages import Storages, held_bytes, materialise
from rlhf_spmd.reshard.transfer import Transfer

LABEL = "reshard"


@dataclass
class TransitionCost:
    """What one transition to generation and back has cost so far, and the ``version`` of the weights that it moved.

    ``peak_bytes``: the most bytes of live storages (parameters of both modules, buffers, whole tensors) in both directions. It exceeds
    the method's formula by at most ``HybridWeights.bucket_bytes``.
    """

    version: int | None = None
    bytes_received: int = 0
    bytes_sent: int = 0
    peak_bytes: int = 0


class HybridWeights:
    """A role's weights in two layouts on one rank, with one copy of the values.

    - ``train_shards``: the training parameters of any rank. ``train_parameters``: returns the current ones of this rank under the same
      names, plain ``nn.Parameter`` or FSDP2's DTensor, sharded (not gathered).
    - ``generation``: the generation module, on "meta" or any device. Its parameters are replaced by empty ones on the training device,
      which :meth:`to_generation` fills. ``generation_shards``: the parameters of any rank.
    - ``group``: ``method.gather_ranks`` of pool index ``index`` under ``layout``. ``host_of``: pool index -> its host.
    - ``buffers``: "free": generation storage exists only during generation. "keep": it stays allocated during training at fixed
      addresses, so captured CUDA graphs stay valid. "offload": as "free", and training shards that would stay beside the generation
      shard are moved to host memory, pinned if the device is a GPU.
    - ``temporary``: training parameters that exist for one transition only, and have no storage after it: weights merged with adapters.

    ``cost``: of the last transition. ``bucket_bytes``: the size of the largest bucket. Construction does not communicate.
    Raises ValueError if layouts do not fit.
    """

    def __init__(
        self,
        train_shards: ShardsAt,
        train_parameters: Callable[[], Mapping[str, Tensor]],
        generation: nn.Module,
        generation_shards: ShardsAt,
        group: Group,
        method: Method,
        layout: GenerationLayout,
        index: int,
        buffers: str = "free",
        max_bucket_bytes: int = 256 << 20,
        host_of: HostOf = ONE_HOST,
        temporary: Collection[str] = (),
    ) -> None:
        self.cost, self.in_generation = TransitionCost(), False
        self.temporary = temporary
        self.group = group
        self.keep = buffers == "keep"
        self.offload = buffers == "offload"
        self.parameters, self.index = train_parameters, index
        self.members = method.gather_ranks(layout, index)
        self.shards: Mapping[str, ParamShard] = held_by(layout.train, train_shards, index)
        self.storages: dict[str, Storages] = {}  # of training parameters that are not views during generation
        train = self._local()
        self.device = next(iter(train.values())).device
        self.generation = materialise(generation, self.device)
        self.shapes = {name: shard.shape for name, shard in held_by(layout, generation_shards, index).items()}
        assert set(self.generation) == set(self.shapes), "generation module and its plan name different parameters"
        dtypes = {parameter.dtype for parameter in self.generation.values()}
        assert len(dtypes) == 1, f"generation parameters have one dtype, not {dtypes}"
        (self.dtype,) = dtypes
        self._dtypes = {name: tensor.dtype for name, tensor in train.items()}

        limit = max(max_bucket_bytes // self.dtype.itemsize, 1)
        self.plan = method.plan(layout, index, train_shards, generation_shards, limit, host_of)
        self.views = {name: single_slice(location, self.shards[name].shape) for name, location in self.plan.locations.items()}
        self.shared = self._find_shared()
        self.finished = self.plan.finished(self.shards)
        self.gathered = {name: shard.shape for name, shard in self.plan.gathered.items()}
        sizes = [sum(math.prod(self.gathered[target]) for target in bucket) for bucket in self.plan.buckets]
        if not self.plan.buckets:  # the parameters of all ranks, because all split alike
            every = [generation_shards(pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]
            sizes = [min(limit, math.prod(shard.shape)) for shards in every for shard in shards.values()]
        self.bucket_bytes = max(sizes, default=0) * self.dtype.itemsize
        self._steps: dict[int, TransferStep] = {}
        # of a transition
        self._train: dict[str, Tensor] = {}  # the training parameters that later buckets need
        self._gathered: dict[str, Tensor] = {}  # what buckets fill: generation parameters or whole tensors
        self._without_storage: set[str] = set()  # training parameters without storage of their own
        self._counts_before = 0, 0

    # -- there and back

    @torch.no_grad()
    def to_generation(self, version: int = 0) -> None:
        """Fill the generation parameters from the training parameters, which are the weights of ``version``.

        Collective over the gather group: every rank of it must call, in program order.
        """
        assert not self.in_generation, "the weights are already in the generation layout"
        self.in_generation, self.cost = True, TransitionCost(version)
        self._counts_before = RECORDER.received[LABEL], RECORDER.sent[LABEL]
        self._train = self._local()
        if self.shared is not None:
            for target, source in self.shared.items():
                self.generation[target].data = self._train[source]
            self._train = {}
            self._note_peak(self._live_bytes())
        elif not self.plan.buckets:
            self._take_all_at_once()
        else:
            limit = self.bucket_bytes // self.dtype.itemsize
            transfer = Transfer(
                len(self.plan.buckets),
                self._step,
                *(self._train, self._gathered, self.group, self.dtype, limit, LABEL),
                before_step=self._before_bucket,
                after_step=self._after_bucket,
                measure=self._live_bytes,
            )
            transfer.wait()
            self._note_peak(transfer.peak_bytes)

    @torch.no_grad()
    def to_training(self) -> None:
        """Give the training parameters their own storage again, and free the generation parameters. No communication."""
        assert self.in_generation, "the weights are already in the training layout"
        self.in_generation = False
        if self.shared is not None:  # both modules share one set of parameters, but for the temporary ones
            self._free(target for target, source in self.shared.items() if source in self.temporary)
            return
        locations = {name: {piece.target.parameter for piece in pieces} for name, pieces in self.plan.locations.items()}
        uses = Counter(target for targets in locations.values() for target in targets)
        live = self._note_peak(self._live_bytes()) - self._free(target for target in self.shapes if not uses[target])
        parameters = self.parameters()
        for name in chain.from_iterable(self.finished):
            if name in self._without_storage:
                live += self._restore(name, parameters[name])
                self._note_peak(live)
            targets = locations.get(name, set())
            uses.subtract(targets)
            live -= self._free(target for target in targets if not uses[target])

    @property
    def version(self) -> int | None:
        """Return the version of the weights in the generation parameters; None if they hold no values."""
        return self.cost.version if self.keep or self.in_generation else None

    # -- what all transitions share

    def _local(self) -> dict[str, Tensor]:
        """Return the training parameters as plain local tensors that share their storage."""
        current = self.parameters()
        assert set(current) == set(self.shards), "training module and its plan name different parameters"
        local = {name: local_part(parameter) for name, parameter in current.items()}
        for name, tensor in local.items():
            shape, expected = tuple(tensor.shape), self.shards[name].shape
            assert shape == expected, f"training parameter {name}: shape {shape}, shard {expected}"
        return local

    def _step(self, bucket: int) -> TransferStep:
        """Return the step that moves a bucket; the same in every transition."""
        if bucket not in self._steps:
            tensors = self.plan.tensors(bucket)
            moves, copies = list(self.plan.transfer.moves(tensors)), list(self.plan.transfer.copies(tensors))
            context = self._context(self.bucket_bytes // self.dtype.itemsize)
            replaced = sum(math.prod(self.shards[name].shape) for name in self.finished[bucket] if self._replaced(name))
            self._steps[bucket] = replace(
                plan_bucket(moves, copies, context, capabilities(self.device).streams), extra=replaced
            )
        return self._steps[bucket]

    @cached_property
    def _steps_at_once(self) -> list[TransferStep]:
        """Return the steps, if there are no buckets because each rank needs a part of its own."""
        return plan_steps(self.plan.transfer, self._context(self.bucket_bytes // 2 // self.dtype.itemsize))

    def _context(self, limit: int) -> TransferContext:
        converted = any(dtype != self.dtype for dtype in self._dtypes.values())
        sources = {name: shard.shape for name, shard in self.shards.items()}
        return TransferContext(self.index, self.members, sources, self.gathered, converted, max(limit, 1))

    def _replaced(self, name: str) -> bool:
        """Return True if generation parameters hold a training parameter's values during generation. With another dtype they do not."""
        return name in self.plan.locations and self._dtypes[name] == self.dtype

    def _releases(self, name: str) -> bool:
        """Return True if a training parameter has no storage on the device during generation."""
        return self.offload or self._replaced(name) or name in self.temporary

    def allocate(self, target: str) -> Tensor:
        parameter, shape = self.generation[target], self.shapes[target]
        if tuple(parameter.shape) != shape:
            parameter.data = parameter.new_empty(shape)
        return parameter.data

    def _free(self, targets: Iterable[str]) -> int:
        """Free generation parameters, unless their buffers are kept. Returns the freed bytes."""
        freed = 0
        for target in () if self.keep else targets:
            freed += self.generation[target].nbytes
            self.generation[target].data = self.generation[target].new_empty(0)
        return freed

    def _find_shared(self) -> dict[str, str] | None:
        """Return generation parameter -> the equal training parameter, if every one has such: then nothing has to move."""
        if self.group.size > 1 or not self.plan.locations or not all(map(self._replaced, self.shards)):
            return None
        views = [(view[0], name) for name, view in self.views.items() if view is not None]
        shared = {target: name for target, name in views if self.shapes[target] == self.shards[name].shape}
        return shared if len(shared) == len(self.shapes) == len(self.shards) else None

    # -- bucket by bucket

    def _before_bucket(self, bucket: int) -> None:
        """Allocate what a bucket fills."""
        for target in self.plan.buckets[bucket]:
            if self.plan.from_whole:
                self._gathered[target] = torch.empty(self.gathered[target], dtype=self.dtype, device=self.device)
            else:
                self._gathered[target] = self.allocate(target)

    def _after_bucket(self, bucket: int) -> None:
        """Free what no later bucket needs."""
        is_last = bucket == len(self.plan.buckets) - 1
        if is_last and self.plan.from_whole:
            self._copy_from_whole()
        self._release(self.finished[bucket])
        if is_last:
            self._gathered.clear()
            assert not self._train, f"training parameters that no bucket finished: {list(self._train)}"

    def _copy_from_whole(self) -> None:
        """Copy the generation parameters from the whole tensors, and free each of these after its last use."""
        uses = Counter(piece.source.parameter for piece in self.plan.from_whole)
        for source, target in ((piece.source, piece.target) for piece in self.plan.from_whole):
            location = self.allocate(target.parameter)
            self._note_peak(self._live_bytes())
            location[target.slices].copy_(self._gathered[source.parameter][source.slices])
            uses[source.parameter] -= 1
            if not uses[source.parameter]:
                del self._gathered[source.parameter]

    def _take_all_at_once(self) -> None:
        """Receive what this rank lacks, if ranks need different parts. The training shards stay."""
        targets = {target: self.allocate(target) for target in self.shapes}
        size = self.bucket_bytes // self.dtype.itemsize
        args = self._train, targets, self.group, self.dtype, size, LABEL
        transfer = Transfer(len(self._steps_at_once), self._steps_at_once.__getitem__, *args, on_side_stream=True)
        transfer.wait()
        self._note_peak(transfer.peak_bytes + self._live_bytes())
        self._release(list(self._train))

    def _release(self, names: Iterable[str]) -> None:
        """Free the storage of training parameters that nobody needs any more, unless they stay on the device."""
        parameters = self.parameters()
        for name in names:
            local, view = self._train.pop(name), self.views.get(name)
            if not self._releases(name):
                continue
            if name in self.temporary:
                parameters[name].data = local.new_empty(0)
                continue
            self._without_storage.add(name)
            if view is not None and self._replaced(name) and not is_sharded(parameters[name]):
                parameters[name].data = self.generation[view[0]].data[view[1]]
                continue
            storage = self.storages.setdefault(name, Storages([local]))
            if self._replaced(name):
                storage.free()
            else:
                storage.offload()

    def _restore(self, name: str, parameter: Tensor) -> int:
        """Allocate and fill a training parameter's storage again; returns its bytes."""
        self._without_storage.remove(name)
        storage = self.storages.get(name)
        if not self._replaced(name):
            assert storage is not None, f"{name} has no host copy"
            storage.reload()
            return storage.nbytes
        if storage is None:
            values = parameter.new_empty(self.shards[name].shape)
        else:
            storage.allocate()
            values = local_part(parameter)
        for piece in self.plan.locations[name]:
            source, target = piece.source, piece.target
            values[source.slices].copy_(self.generation[target.parameter].data[target.slices])
        if storage is None:
            parameter.data = values
        return values.untyped_storage().nbytes()

    # -- what it costs

    def _live_bytes(self) -> int:
        """Return the bytes of all live storages with parameter values on the device."""
        training = map(local_part, self.parameters().values())
        return held_bytes([*training, *self.generation.values(), *self._gathered.values()])

    def _note_peak(self, live: int) -> int:
        cost, (received, sent) = self.cost, self._counts_before
        cost.peak_bytes = max(cost.peak_bytes, live)
        cost.bytes_received = RECORDER.received[LABEL] - received
        cost.bytes_sent = RECORDER.sent[LABEL] - sent
        return live
