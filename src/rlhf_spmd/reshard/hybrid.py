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
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

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
    the method's formula by at most ``HybridWeights.bucket_bytes``. ``counts_before``: bytes received and sent before the transition.
    """

    version: int | None = None
    bytes_received: int = 0
    bytes_sent: int = 0
    peak_bytes: int = 0
    counts_before: tuple[int, int] = (0, 0)


@dataclass
class _Transition:
    """The tensors of a transition to generation, made by :meth:`HybridWeights.to_generation`.

    - train: the training parameters that later buckets need; empty after the last bucket
    - gathered: the tensors that buckets fill, generation parameters or whole ones; empty after the last bucket
    - without_storage: names of the training parameters that have no storage of their own until ``to_training``
    """

    train: dict[str, Tensor] = field(default_factory=dict)
    gathered: dict[str, Tensor] = field(default_factory=dict)
    without_storage: set[str] = field(default_factory=set)


class HybridWeights:
    """A role's weights in two layouts on one rank, with one copy of the values.

    - ``train_shards``: the training shards of any rank. ``train_parameters``: returns the current training parameters of this rank
      under the same names, plain ``nn.Parameter`` or FSDP2's DTensor, sharded (not gathered).
    - ``generation``: the generation module, on "meta" or any device. Its parameters are replaced by empty ones on the training device,
      which :meth:`to_generation` fills. ``generation_shards``: the generation shards of any rank.
    - ``group``: ``method.gather_ranks`` of pool index ``index`` under ``layout``. ``host_of``: pool index -> its host.
    - ``buffers``: "free": generation storage exists only during generation. "keep": it stays allocated during training at fixed
      addresses, so captured CUDA graphs stay valid. "offload": as "free", and training shards that would stay beside the generation
      shard are moved to host memory, pinned if the device is a GPU.
    - ``temporary``: training parameters that exist for one transition only, and have no storage after it: weights merged with adapters.

    ``cost``: the cost of the last transition. ``bucket_bytes``: the size of the largest bucket. Construction does not communicate.
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
        self.cost = TransitionCost()
        self.in_generation = False
        self.temporary = temporary
        self.group = group
        self.keeps_buffers = buffers == "keep"
        self.offload = buffers == "offload"
        self.parameters = train_parameters
        self.index = index
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
        self.shared = self._find_identical_parameters()
        self.last_uses = self.plan.last_uses(self.shards)
        self.gathered = {name: shard.shape for name, shard in self.plan.gathered.items()}
        sizes = [sum(math.prod(self.gathered[target]) for target in bucket) for bucket in self.plan.buckets]
        if not self.plan.buckets:  # the parameters of all ranks, because all split alike
            shards_of_ranks = [generation_shards(pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]
            sizes = [min(limit, math.prod(shard.shape)) for shards in shards_of_ranks for shard in shards.values()]
        self.bucket_bytes = max(sizes, default=0) * self.dtype.itemsize
        self._steps: dict[int, TransferStep] = {}
        self._transition = _Transition()

    # -- there and back

    @torch.no_grad()
    def to_generation(self, version: int = 0) -> None:
        """Fill the generation parameters from the training parameters, which are the weights of ``version``.

        Collective over the gather group: every rank of it must call, in program order.
        """
        assert not self.in_generation, "the weights are already in the generation layout"
        self.in_generation = True
        self.cost = TransitionCost(version, counts_before=(RECORDER.received[LABEL], RECORDER.sent[LABEL]))
        train = self._local()
        self._transition = _Transition(train)
        if self.shared is not None:
            for target, source in self.shared.items():
                self.generation[target].data = train[source]
            train.clear()
            self._note_peak(self._live_bytes())
        elif not self.plan.buckets:
            self._take_all_at_once()
        else:
            limit = self.bucket_bytes // self.dtype.itemsize
            args = self._step, train, self._transition.gathered, self.group, self.dtype, limit, LABEL
            hooks: dict[str, Any] = {"before_step": self._before_bucket, "after_step": self._after_bucket}
            transfer = Transfer(len(self.plan.buckets), *args, **hooks, measure=self._live_bytes)
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
        for name in chain.from_iterable(self.last_uses):
            if name in self._transition.without_storage:
                live += self._restore(name, parameters[name])
                self._note_peak(live)
            targets = locations.get(name, set())
            uses.subtract(targets)
            live -= self._free(target for target in targets if not uses[target])

    @property
    def version(self) -> int | None:
        """Return the version of the weights in the generation parameters; None if they hold no values."""
        return self.cost.version if self.keeps_buffers or self.in_generation else None

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
            copies = list(self.plan.transfer.remote_copies(tensors)), list(self.plan.transfer.local_copies(tensors))
            context = self._context(self.bucket_bytes // self.dtype.itemsize)
            step = plan_bucket(*copies, context, capabilities(self.device).streams)
            replaced = filter(self._is_held_by_generation, self.last_uses[bucket])
            num_replaced = sum(math.prod(self.shards[name].shape) for name in replaced)
            self._steps[bucket] = replace(step, temporary_elements=num_replaced)
        return self._steps[bucket]

    @cached_property
    def _steps_at_once(self) -> list[TransferStep]:
        """Return the steps, if there are no buckets because each rank needs a part of its own."""
        return plan_steps(self.plan.transfer, self._context(self.bucket_bytes // 2 // self.dtype.itemsize))

    def _context(self, limit: int) -> TransferContext:
        converted = any(dtype != self.dtype for dtype in self._dtypes.values())
        sources = {name: shard.shape for name, shard in self.shards.items()}
        return TransferContext(self.index, self.members, sources, self.gathered, converted, max(limit, 1))

    def _is_held_by_generation(self, name: str) -> bool:
        """Return True if generation parameters hold a training parameter's values during generation. With another dtype they do not."""
        return name in self.plan.locations and self._dtypes[name] == self.dtype

    def _loses_storage(self, name: str) -> bool:
        """Return True if a training parameter has no storage on the device during generation."""
        return self.offload or self._is_held_by_generation(name) or name in self.temporary

    def allocate(self, target: str) -> Tensor:
        parameter = self.generation[target]
        shape = self.shapes[target]
        if tuple(parameter.shape) != shape:
            parameter.data = parameter.new_empty(shape)
        return parameter.data

    def _free(self, targets: Iterable[str]) -> int:
        """Free generation parameters, unless their buffers are kept. Returns the freed bytes."""
        freed = 0
        for target in () if self.keeps_buffers else targets:
            freed += self.generation[target].nbytes
            self.generation[target].data = self.generation[target].new_empty(0)
        return freed

    def _find_identical_parameters(self) -> dict[str, str] | None:
        """Return the training parameter that each generation parameter equals; None if one has none, so that something must move."""
        if self.group.size > 1 or not self.plan.locations or not all(map(self._is_held_by_generation, self.shards)):
            return None
        views = [(view[0], name) for name, view in self.views.items() if view is not None]
        shared = {target: name for target, name in views if self.shapes[target] == self.shards[name].shape}
        return shared if len(shared) == len(self.shapes) == len(self.shards) else None

    # -- bucket by bucket

    def _before_bucket(self, bucket: int) -> None:
        """Allocate what a bucket fills."""
        for target in self.plan.buckets[bucket]:
            if self.plan.from_whole:
                tensor = torch.empty(self.gathered[target], dtype=self.dtype, device=self.device)
            else:
                tensor = self.allocate(target)
            self._transition.gathered[target] = tensor

    def _after_bucket(self, bucket: int) -> None:
        """Free what no later bucket needs."""
        is_last = bucket == len(self.plan.buckets) - 1
        if is_last and self.plan.from_whole:
            self._copy_from_whole()
        self._release(self.last_uses[bucket])
        if is_last:
            self._transition.gathered.clear()
            assert not self._transition.train, f"training parameters that no bucket finished: {list(self._transition.train)}"

    def _copy_from_whole(self) -> None:
        """Copy the generation parameters from the whole tensors, and free each of these after its last use."""
        gathered = self._transition.gathered
        uses = Counter(piece.source.parameter for piece in self.plan.from_whole)
        for source, target in ((piece.source, piece.target) for piece in self.plan.from_whole):
            location = self.allocate(target.parameter)
            self._note_peak(self._live_bytes())
            location[target.slices].copy_(gathered[source.parameter][source.slices])
            uses[source.parameter] -= 1
            if not uses[source.parameter]:
                del gathered[source.parameter]

    def _take_all_at_once(self) -> None:
        """Receive what this rank lacks, if ranks need different parts. The training shards stay."""
        targets = {target: self.allocate(target) for target in self.shapes}
        size = self.bucket_bytes // self.dtype.itemsize
        train = self._transition.train
        args = train, targets, self.group, self.dtype, size, LABEL
        transfer = Transfer(len(self._steps_at_once), self._steps_at_once.__getitem__, *args, on_side_stream=True)
        transfer.wait()
        self._note_peak(transfer.peak_bytes + self._live_bytes())
        self._release(list(train))

    def _release(self, names: Iterable[str]) -> None:
        """Free the storage of training parameters that nobody needs any more, unless they stay on the device."""
        parameters = self.parameters()
        for name in names:
            local = self._transition.train.pop(name)
            view = self.views.get(name)
            if not self._loses_storage(name):
                continue
            if name in self.temporary:
                parameters[name].data = local.new_empty(0)
                continue
            self._transition.without_storage.add(name)
            if view is not None and self._is_held_by_generation(name) and not is_sharded(parameters[name]):
                parameters[name].data = self.generation[view[0]].data[view[1]]
                continue
            storage = self.storages.setdefault(name, Storages([local]))
            if self._is_held_by_generation(name):
                storage.free()
            else:
                storage.offload()

    def _restore(self, name: str, parameter: Tensor) -> int:
        """Allocate and fill a training parameter's storage again; returns its bytes."""
        self._transition.without_storage.remove(name)
        storage = self.storages.get(name)
        if not self._is_held_by_generation(name):
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
        return held_bytes([*training, *self.generation.values(), *self._transition.gathered.values()])

    def _note_peak(self, live: int) -> int:
        cost = self.cost
        cost.peak_bytes = max(cost.peak_bytes, live)
        cost.bytes_received = RECORDER.received[LABEL] - cost.counts_before[0]
        cost.bytes_sent = RECORDER.sent[LABEL] - cost.counts_before[1]
        return live
