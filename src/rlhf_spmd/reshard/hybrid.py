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
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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


class HybridWeights:
    """A role's weights in two layouts on one rank, with one copy of the values. It holds what all transitions share.

    - ``train_shards``: the training parameters of any rank. ``train_parameters``: returns the current ones of this rank under the same
      names, plain ``nn.Parameter`` or FSDP2's DTensor, sharded (not gathered).
    - ``generation``: the generation module, on "meta" or any device. Its parameters are replaced by empty ones on the training device,
      which :meth:`to_generation` fills. ``generation_shards``: the parameters of any rank.
    - ``group``: ``method.gather_ranks`` of pool index ``index`` under ``layout``. ``host_of``: pool index -> its host.
    - ``buffers``: "free": generation storage exists only during generation. "keep": it stays allocated during training at fixed
      addresses, so captured CUDA graphs stay valid. "offload": as "free", and training shards that would stay beside the generation
      shard are moved to host memory, pinned if the device is a GPU.
    - ``temporary``: training parameters that exist for one transition only, and have no storage after it: weights merged with adapters.

    ``transition``: the last one, with its cost. ``bucket_bytes``: the size of the largest bucket. Construction does not communicate.
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
        self.transition: Transition | None = None
        self.temporary = temporary
        self.group, self.keep, self.offload = group, buffers == "keep", buffers == "offload"
        self.parameters, self.module, self.index = train_parameters, generation, index
        self.members = method.gather_ranks(layout, index)
        self.shards: Mapping[str, ParamShard] = held_by(layout.train, train_shards, index)
        self.storages: dict[str, Storages] = {}  # of training parameters that are not views during generation
        train = self.local()
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

    # -- there and back

    def to_generation(self, wait: bool = True, version: int = 0) -> None:
        """Fill the generation parameters from the training parameters, which are the weights of ``version``.

        With ``wait`` false it may return while the first bucket is in flight. Each part of the generation module then waits for its own
        parameters in its first forward pass, while the next bucket comes, and :meth:`finish` waits for the rest.

        Collective over the gather group: every rank of it must call, in program order.
        """
        assert not self.in_generation, "the weights are already in the generation layout"
        self.transition = Transition(self, version)
        self.transition.begin(wait or bool(self.plan.from_whole))

    def finish(self) -> None:
        """Wait for the remaining buckets. Collective over the gather group: every rank of it must call, in program order."""
        assert self.transition is not None, "no transition has begun"
        self.transition.advance(len(self.plan.buckets))

    def to_training(self) -> None:
        """Give the training parameters their own storage again, and free the generation parameters.

        Communicates only what :meth:`finish` must.
        """
        assert self.in_generation and self.transition is not None, "the weights are already in the training layout"
        self.finish()
        self.transition.end()

    @property
    def version(self) -> int | None:
        """The version of the weights in the generation parameters; None if they hold no values."""
        return self.transition.version if self.transition is not None and (self.keep or not self.transition.over) else None

    @property
    def in_generation(self) -> bool:
        return self.transition is not None and not self.transition.over

    @property
    def pending_bytes(self) -> int:
        """How much the device's memory will grow until the last bucket has arrived.

        That is the generation storage still to allocate, minus the training storage that will be freed, plus a bucket's buffers.
        """
        assert self.transition is not None, "no transition has begun"
        making = sum(math.prod(self.shapes[name]) for name, here in self.generation.items() if not here.numel())
        leaving = sum(local.nbytes for name, local in self.transition.train.items() if self.releases(name))
        return making * self.dtype.itemsize - leaving + self.bucket_bytes * self.transition.under_way

    # -- what transitions need

    def local(self) -> dict[str, Tensor]:
        """Returns the training parameters as plain local tensors that share their storage."""
        current = self.parameters()
        assert set(current) == set(self.shards), "training module and its plan name different parameters"
        local = {name: local_part(parameter) for name, parameter in current.items()}
        for name, tensor in local.items():
            found, expected = tuple(tensor.shape), self.shards[name].shape
            assert found == expected, f"training parameter {name}: shape {found}, shard {expected}"
        return local

    def step(self, bucket: int) -> TransferStep:
        """Returns the step that moves a bucket; the same in every transition."""
        if bucket not in self._steps:
            tensors = self.plan.tensors(bucket)
            moves, copies = list(self.plan.transfer.moves(tensors)), list(self.plan.transfer.copies(tensors))
            context = self._context(self.bucket_bytes // self.dtype.itemsize)
            replaced = sum(math.prod(self.shards[name].shape) for name in self.finished[bucket] if self.replaced(name))
            self._steps[bucket] = replace(plan_bucket(moves, copies, context, capabilities(self.device).streams), held=replaced)
        return self._steps[bucket]

    @cached_property
    def steps(self) -> list[TransferStep]:
        """The steps, if there are no buckets because each rank needs a part of its own."""
        return plan_steps(self.plan.transfer, self._context(self.bucket_bytes // 2 // self.dtype.itemsize))

    def _context(self, limit: int) -> TransferContext:
        converted = any(dtype != self.dtype for dtype in self._dtypes.values())
        sources = {name: shard.shape for name, shard in self.shards.items()}
        return TransferContext(self.index, self.members, sources, self.gathered, converted, max(limit, 1))

    def replaced(self, name: str) -> bool:
        """True if generation parameters hold a training parameter's values during generation. With another dtype they do not."""
        return name in self.plan.locations and self._dtypes[name] == self.dtype

    def releases(self, name: str) -> bool:
        """True if a training parameter has no storage on the device during generation."""
        return self.offload or self.replaced(name) or name in self.temporary

    def allocate(self, target: str) -> Tensor:
        parameter, shape = self.generation[target], self.shapes[target]
        if tuple(parameter.shape) != shape:
            parameter.data = parameter.new_empty(shape)
        return parameter.data

    def free(self, targets: Iterable[str]) -> int:
        """Free generation parameters; returns the bytes."""
        freed = 0
        for target in () if self.keep else targets:
            freed += self.generation[target].nbytes
            self.generation[target].data = self.generation[target].new_empty(0)
        return freed

    def _find_shared(self) -> dict[str, str] | None:
        """Returns generation parameter -> the equal training parameter, if every one has such: then nothing has to move."""
        if self.group.size > 1 or not self.plan.locations or not all(map(self.replaced, self.shards)):
            return None
        views = [(view[0], name) for name, view in self.views.items() if view is not None]
        shared = {target: name for target, name in views if self.shapes[target] == self.shards[name].shape}
        return shared if len(shared) == len(self.shapes) == len(self.shards) else None


class Transition:
    """One transition from training to generation and back: what is in flight, where the training parameters are, and the cost.

    ``peak_bytes``: the most bytes of live storages (parameters of both modules, buffers, whole tensors) in both directions. It exceeds
    the method's formula by at most ``bucket_bytes``. ``train``: the training parameters that later buckets need.
    """

    def __init__(self, weights: HybridWeights, version: int) -> None:
        self._weights, self.version, self.over = weights, version, False
        self.bytes_received = self.bytes_sent = self.peak_bytes = 0
        self.train: dict[str, Tensor] = weights.local()
        self._gathered: dict[str, Tensor] = {}  # what buckets fill: generation parameters or whole tensors
        self._before = RECORDER.received[LABEL], RECORDER.sent[LABEL]
        self._without_storage: set[str] = set()  # training parameters without storage of their own
        self._transfer: Transfer | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def under_way(self) -> bool:
        return self._transfer is not None and self._transfer.num_done < len(self._weights.plan.buckets)

    @torch.no_grad()
    def begin(self, wait: bool) -> None:
        weights, number = self._weights, len(self._weights.plan.buckets)
        if weights.shared is not None:
            for target, source in weights.shared.items():
                weights.generation[target].data = self.train[source]
            self.train = {}
            self._note_peak(self._held_bytes())
        elif number:
            limit = weights.bucket_bytes // weights.dtype.itemsize
            args = self.train, self._gathered, weights.group, weights.dtype, limit, LABEL
            self._transfer = Transfer(
                number,
                weights.step,
                *args,
                before_step=self._before_bucket,
                after_step=self._after_bucket,
                measure=self._held_bytes,
            )
            if wait:
                self.advance(number)
            else:
                self._wait_in_modules()
        else:
            self._take_all_at_once()

    def advance(self, upto: int) -> None:
        """Wait for the first ``upto`` buckets; later ones are in flight."""
        if self._transfer is not None:
            self._transfer.advance(upto)

    @torch.no_grad()
    def end(self) -> None:
        """Back to training."""
        self.over, weights = True, self._weights
        if weights.shared is not None:
            weights.free(target for target, source in weights.shared.items() if source in weights.temporary)
            return  # both modules share one set of the others
        locations = {name: {piece.target.parameter for piece in pieces} for name, pieces in weights.plan.locations.items()}
        uses = Counter(target for targets in locations.values() for target in targets)
        held = self._note_peak(self._held_bytes()) - weights.free(target for target in weights.shapes if not uses[target])
        parameters = weights.parameters()
        for name in chain.from_iterable(weights.finished):
            if name in self._without_storage:
                held += self._restore(name, parameters[name])
                self._note_peak(held)
            targets = locations.get(name, set())
            uses.subtract(targets)
            held -= weights.free(target for target in targets if not uses[target])

    # -- bucket by bucket

    def _before_bucket(self, bucket: int) -> None:
        """Allocate what a bucket fills."""
        weights = self._weights
        for target in weights.plan.buckets[bucket]:
            if weights.plan.from_whole:
                self._gathered[target] = torch.empty(weights.gathered[target], dtype=weights.dtype, device=weights.device)
            else:
                self._gathered[target] = weights.allocate(target)

    def _after_bucket(self, bucket: int) -> None:
        """Free what no later bucket needs."""
        weights, transfer = self._weights, self._transfer
        self._note_peak(transfer.peak_bytes if transfer else 0)
        is_last = bucket == len(weights.plan.buckets) - 1
        if is_last and weights.plan.from_whole:
            self._copy_from_whole()
        self._release(weights.finished[bucket])
        if is_last:
            self._gathered.clear()
            assert not self.train, f"training parameters that no bucket finished: {list(self.train)}"
            while self._hooks:
                self._hooks.pop().remove()

    def _wait_in_modules(self) -> None:
        """Let each layer wait for its bucket in its first forward pass, the module for its first parameter, other parts for all."""
        module, shapes = self._weights.module, self._weights.shapes
        bucket_of = {target: i for i, bucket in enumerate(self._weights.plan.buckets) for target in bucket}
        lists = {name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
        for name, part in module.named_modules():
            if not name:
                upto = next(iter(bucket_of[target] for target in shapes))
            elif name.rpartition(".")[0] in lists:
                upto = max(bucket_of[target] for target in shapes if target.startswith(f"{name}."))
            elif "." not in name and name not in lists:
                upto = len(self._weights.plan.buckets) - 1
            else:
                continue
            self._hooks.append(part.register_forward_pre_hook(lambda *_, upto=upto: self.advance(upto + 1)))

    def _copy_from_whole(self) -> None:
        """Copy the generation parameters from the whole tensors, and free each of these after its last use."""
        weights, from_whole = self._weights, self._weights.plan.from_whole
        uses = Counter(piece.source.parameter for piece in from_whole)
        for source, target in ((piece.source, piece.target) for piece in from_whole):
            location = weights.allocate(target.parameter)
            self._note_peak(self._held_bytes())
            location[target.slices].copy_(self._gathered[source.parameter][source.slices])
            uses[source.parameter] -= 1
            if not uses[source.parameter]:
                del self._gathered[source.parameter]

    def _take_all_at_once(self) -> None:
        """Receive what this rank lacks, if ranks need different parts. The training shards stay."""
        weights, steps = self._weights, self._weights.steps
        targets = {target: weights.allocate(target) for target in weights.shapes}
        size = weights.bucket_bytes // weights.dtype.itemsize
        args = self.train, targets, weights.group, weights.dtype, size, LABEL
        transfer = Transfer(len(steps), steps.__getitem__, *args, on_side_stream=True)
        transfer.wait()
        self._note_peak(transfer.peak_bytes + self._held_bytes())
        self._release(list(self.train))

    def _release(self, names: Iterable[str]) -> None:
        """Free the storage of training parameters that nobody needs any more, unless they stay on the device."""
        weights, parameters = self._weights, self._weights.parameters()
        for name in names:
            local, view = self.train.pop(name), weights.views.get(name)
            if not weights.releases(name):
                continue
            if name in weights.temporary:
                parameters[name].data = local.new_empty(0)
                continue
            self._without_storage.add(name)
            if view is not None and weights.replaced(name) and not is_sharded(parameters[name]):
                parameters[name].data = weights.generation[view[0]].data[view[1]]
                continue
            storage = weights.storages.setdefault(name, Storages([local]))
            if weights.replaced(name):
                storage.free()
            else:
                storage.offload()

    def _restore(self, name: str, parameter: Tensor) -> int:
        """Allocate and fill a training parameter's storage again; returns its bytes."""
        self._without_storage.remove(name)
        weights, storage = self._weights, self._weights.storages.get(name)
        if not weights.replaced(name):
            assert storage is not None, f"{name} has no host copy"
            storage.reload()
            return storage.nbytes
        if storage is None:
            values = parameter.new_empty(weights.shards[name].shape)
        else:
            storage.allocate()
            values = local_part(parameter)
        for piece in weights.plan.locations[name]:
            source, target = piece.source, piece.target
            values[source.slices].copy_(weights.generation[target.parameter].data[target.slices])
        if storage is None:
            parameter.data = values
        return values.untyped_storage().nbytes()

    # -- what it costs

    def _held_bytes(self) -> int:
        """Bytes of all live storages with parameter values on the device. Also notes what was sent and received so far."""
        self.bytes_received = RECORDER.received[LABEL] - self._before[0]
        self.bytes_sent = RECORDER.sent[LABEL] - self._before[1]
        training = map(local_part, self._weights.parameters().values())
        return held_bytes([*training, *self._weights.generation.values(), *self._gathered.values()])

    def _note_peak(self, held: int) -> int:
        self.peak_bytes = max(self.peak_bytes, held)
        return held
