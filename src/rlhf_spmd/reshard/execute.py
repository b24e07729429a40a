"""The hybrid engine at work: one model moved between its training and its generation layout, as its engine's plan says.

To generation, bucket by bucket: allocate what the bucket makes, gather, then give up the training storage whose values are in
the generation storage now. A training parameter that is one slice of a generation parameter becomes a view of it. Others give up
their storage until they are restored: FSDP2 shards, whose storage belongs to FSDP (it is resized to nothing and back), and
parameters that lie scattered in the generation shard. So with ``zero_redundancy`` no value is held twice, and the peak is the
generation shard plus one bucket: so much at most are the buffers of all buckets on their way and the training parameters that
these will replace, else the next one waits.

While ``mode`` is "generation" the training parameters must not be written, and those without a view not be read.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rlhf_spmd.parallel.collectives import RECORDER, Group
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.parallel.zero import local_part
from rlhf_spmd.reshard.engines import Engine, held_by
from rlhf_spmd.reshard.gather import LABEL, Flight, Route, land_bucket, plan_route, start_bucket
from rlhf_spmd.reshard.move import Schedule, Storages, execute_reallocation, schedule
from rlhf_spmd.reshard.plan import Bucket, Piece, ShardsAt
from rlhf_spmd.reshard.reallocation import RankPlan


class HybridEngine:
    """Moves a role's weights between its training module and its generation module.

    train_shards: training parameters by name, of any rank. train_parameters: returns the current ones of this rank
    under the same names: plain ``nn.Parameter`` or FSDP2's DTensor, sharded (not gathered).
    generation: the generation module, built on "meta" or any device; the engine replaces its parameters by empty ones on the
    training device and fills them in :meth:`to_generation`. generation_shards: its parameters, of any rank.
    group: ``engine.gather_ranks`` of pool index ``index`` under ``layout``.
    buffers: "free": generation storage exists while generating. "keep": it stays allocated, at fixed addresses, during training
    (captured CUDA graphs stay valid). "offload": as free, and training shards that would be held beside the generation shard
    wait in host memory, pinned where the device is a GPU.
    After each transition: ``bytes_received``, ``bytes_sent`` and ``peak_bytes``, the most that live storages held (parameters
    of both modules, buffers, whole tensors), there and back. It exceeds the engine's formula by the attribute ``bucket_bytes`` at
    most: what the largest bucket makes.
    Construction does not communicate. Raises ValueError where the layouts do not fit.
    """

    def __init__(
        self,
        train_shards: ShardsAt,
        train_parameters: Callable[[], Mapping[str, Tensor]],
        generation: nn.Module,
        generation_shards: ShardsAt,
        group: Group,
        engine: Engine,
        layout: GenerationLayout,
        index: int,
        buffers: str = "free",
        bucket_bytes: int = 256 << 20,
    ) -> None:
        self.mode = "training"
        self.bytes_received = self.bytes_sent = self.peak_bytes = 0
        self.group, self._keep, self._offload = group, buffers == "keep", buffers == "offload"
        (self._shards,) = held_by(layout.train, train_shards, [index])
        self._parameters, self._module = train_parameters, generation
        train = self._local()
        self._device = next(iter(train.values())).device
        self._generation = materialise(generation, self._device)
        pp, _, tp = layout.coordinate(index)
        self._shapes = {name: shard.shape for name, shard in generation_shards(pp, tp).items()}
        assert set(self._generation) == set(self._shapes), "generation module and its plan name different parameters"
        dtypes = {parameter.dtype for parameter in self._generation.values()}
        assert len(dtypes) == 1, f"generation parameters have one dtype, not {dtypes}"
        (self.dtype,) = dtypes

        limit = max(bucket_bytes // self.dtype.itemsize, 1)
        self.plan = engine.plan(layout, index, train_shards, generation_shards, limit)
        self.shared = self._find_shared(train)
        self._finished = self.plan.finished(self._shards)
        made = self.plan.whole or self._shapes
        sizes = [sum(math.prod(made[target]) for target in bucket.targets) for bucket in self.plan.buckets]
        if self.plan.move is not None:  # every rank's, since all cut alike
            places = [generation_shards(pp, tp) for pp in range(layout.pp) for tp in range(layout.tp)]
            sizes = [min(limit, math.prod(shard.shape)) for shards in places for shard in shards.values()]
        self.bucket_bytes = max(sizes, default=0) * self.dtype.itemsize
        self._routes = [self._plan_route(bucket, train, max(sizes)) for bucket in self.plan.buckets]
        replaced = [sum(train[name].nbytes for name in names if self._replaced(name, train)) for names in self._finished]
        self._beyond = [route.buffers * self.dtype.itemsize + n for route, n in zip(self._routes, replaced, strict=False)]
        self._whole: dict[str, Tensor] = {}
        self._away: set[str] = set()  # training parameters without storage of their own
        self._storages: dict[str, Storages] = {}  # of those that are no views then
        self._train: dict[str, Tensor] = {}  # while buckets are to come
        self._next = len(self.plan.buckets)  # the bucket to land next; all have landed
        self._flights: deque[Flight] = deque()  # of the next buckets
        self._hooks: list[RemovableHandle] = []

    def to_generation(self, wait: bool = True) -> None:
        """Fill the generation parameters from the training parameters.

        With ``wait`` false it may return when the first bucket is under way: each part of the generation module then waits for
        its own parameters in its first forward pass, while the next bucket comes, and :meth:`finish` takes what is left.
        Collective over the gather group: every rank of it must call, in program order.
        """
        assert self.mode == "training", "the weights are already in the generation layout"
        self.mode = "generation"
        self.bytes_received = self.bytes_sent = self.peak_bytes = 0
        self._train = self._local()
        if self.shared is not None:
            for target, source in self.shared.items():
                self._generation[target].data = self._train.pop(source)
            self._train = {}
            self._sample()
            return
        if self.plan.move is not None:
            self._reallocate()
            return
        self._next = 0
        self._start_some()
        if wait or self.plan.cuts:
            self.finish()
        else:
            self._wait_in_modules()

    def finish(self) -> None:
        """Wait for the buckets that are still to come. Collective over the gather group: every rank of it must call."""
        self._advance(len(self.plan.buckets) - 1)

    @property
    def pending_bytes(self) -> int:
        """What the device will hold more of while the buckets that are still to come are coming, and then."""
        making = sum(math.prod(self._shapes[name]) for name, here in self._generation.items() if not here.numel())
        leaving = sum(local.nbytes for name, local in self._train.items() if self._leaves(name, local.dtype))
        return making * self.dtype.itemsize - leaving + self.bucket_bytes * bool(self._flights)

    @torch.no_grad()
    def to_training(self) -> None:
        """Give the training parameters their own storage again, and free the generation parameters.

        Communicates only what :meth:`finish` has to.
        """
        assert self.mode == "generation", "the weights are already in the training layout"
        self.finish()
        self.mode = "training"
        if self.shared is not None:
            return  # one set of parameters, which both modules use
        homes = self.plan.homes
        uses = Counter(target for home in homes.values() for target in {piece.target for piece in home.pieces})
        held = self._sample() - self._free(target for target in self._shapes if not uses[target])
        parameters = self._parameters()
        for name in [name for names in self._finished for name in names]:
            if name in self._away:
                held += self._restore(name, parameters[name])
                self.peak_bytes = max(self.peak_bytes, held)
            if homes:
                targets = {piece.target for piece in homes[name].pieces}
                uses.subtract(targets)
                held -= self._free(target for target in targets if not uses[target])

    # -- planning

    def _local(self) -> dict[str, Tensor]:
        """The training parameters as plain local tensors that share their storage."""
        current = self._parameters()
        assert set(current) == set(self._shards), "training module and its plan name different parameters"
        local = {name: local_part(parameter) for name, parameter in current.items()}
        for name, tensor in local.items():
            expected = self._shards[name].shape
            assert tuple(tensor.shape) == expected, f"training parameter {name}: shape {tuple(tensor.shape)}, shard {expected}"
        return local

    def _find_shared(self, train: Mapping[str, Tensor]) -> dict[str, str] | None:
        """Generation parameter -> the training parameter that it is, if that holds for all of them: nothing has to move."""
        if self.group.size > 1 or not self.plan.homes or any(tensor.dtype != self.dtype for tensor in train.values()):
            return None
        shared = {}
        for name, home in self.plan.homes.items():
            if home.view is None or self._shapes[home.view[0]] != self._shards[name].shape:
                return None
            shared[home.view[0]] = name
        return shared if len(shared) == len(self._shapes) == len(self._shards) else None

    def _replaced(self, name: str, train: Mapping[str, Tensor]) -> bool:
        return name in self.plan.homes and train[name].dtype == self.dtype

    def _plan_route(self, bucket: Bucket, train: Mapping[str, Tensor], limit: int) -> Route:
        shapes = {name: shard.shape for name, shard in self._shards.items()}
        converted = any(tensor.dtype != self.dtype for tensor in train.values())
        on_gpu = self._device.type == "cuda"
        return plan_route(bucket, self.group, shapes, self.plan.whole or self._shapes, converted, limit, on_gpu)

    # -- to generation

    def _wait_in_modules(self) -> None:
        """Let each layer's first forward pass wait for its bucket, the module's for its first parameter, the rest's for all."""
        made = {target: i for i, bucket in enumerate(self.plan.buckets) for target in bucket.targets}
        lists = {name for name, part in self._module.named_modules() if isinstance(part, nn.ModuleList)}
        for name, part in self._module.named_modules():
            if not name:
                upto = next(iter(made[target] for target in self._shapes))
            elif name.rpartition(".")[0] in lists:
                upto = max(made[target] for target in self._shapes if target.startswith(f"{name}."))
            elif "." not in name and name not in lists:
                upto = len(self.plan.buckets) - 1
            else:
                continue
            self._hooks.append(part.register_forward_pre_hook(lambda *_, upto=upto: self._advance(upto)))

    @torch.no_grad()
    def _advance(self, upto: int) -> None:
        """Put the buckets up to number ``upto`` into place, the following ones under way."""
        while self._next <= upto:
            land_bucket(self._flights[0], self._place)
            self._flights.popleft()
            self._next += 1
            if self._next == len(self.plan.buckets) and self.plan.cuts:
                self._cut()
            self._give_up(self._finished[self._next - 1])
            self._start_some()
        if self._next == len(self.plan.buckets):
            assert not self._train, f"training parameters that no bucket finished: {list(self._train)}"
            while self._hooks:
                self._hooks.pop().remove()

    @torch.no_grad()
    def _start_some(self) -> None:
        """Start the next buckets, in order, as far as all that is under way stays within one bucket; one in any case."""
        for number in range(self._next + len(self._flights), len(self._routes)):
            if self._flights and sum(self._beyond[self._next : number + 1]) > self.bucket_bytes:
                return
            for target in self.plan.buckets[number].targets:
                if target in self.plan.whole:
                    self._whole[target] = torch.empty(self.plan.whole[target], dtype=self.dtype, device=self._device)
                else:
                    self._allocate(target)
            with self._counted():
                made = self._whole or self._generation
                flight = start_bucket(self._routes[number], self.group, self._source, self._place, made, self.dtype)
            self._flights.append(flight)
            self._sample()

    def _source(self, piece: Piece) -> Tensor:
        return self._train[piece.source][piece.source_box.local_slices]

    def _place(self, piece: Piece) -> Tensor:
        """The part of a whole tensor or of a generation parameter that a piece fills."""
        holder = self._whole[piece.target] if piece.target in self._whole else self._generation[piece.target].data
        return holder[piece.target_box.local_slices]

    def _cut(self) -> None:
        """Generation parameters out of the whole tensors, each of which is let go after its last use."""
        uses = Counter(piece.source for piece in self.plan.cuts)
        for piece in self.plan.cuts:
            self._allocate(piece.target)
            self._sample()
            self._place(piece).copy_(self._whole[piece.source][piece.source_box.local_slices])
            uses[piece.source] -= 1
            if not uses[piece.source]:
                del self._whole[piece.source]
        self._whole.clear()  # those that this rank has no part of

    def _allocate(self, target: str) -> None:
        parameter, shape = self._generation[target], self._shapes[target]
        if tuple(parameter.shape) != shape:
            parameter.data = parameter.new_empty(shape)

    def _leaves(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a training parameter gives up its storage on the device. With another dtype it is no copy, and stays."""
        return self._offload or (name in self.plan.homes and dtype == self.dtype)

    def _give_up(self, names: Iterable[str]) -> None:
        """These training parameters' values are in the generation parameters or not needed: drop their storage, or keep it."""
        parameters = self._parameters()
        for name in names:
            local, home = self._train.pop(name), self.plan.homes.get(name)
            if not self._leaves(name, local.dtype):
                continue
            self._away.add(name)
            in_place = home is not None and local.dtype == self.dtype
            if home is not None and in_place and home.view is not None and not isinstance(parameters[name], DTensor):
                parameters[name].data = self._generation[home.view[0]].data[home.view[1]]
                continue
            storage = self._storages.setdefault(name, Storages([local]))
            if in_place:
                storage.free()
            else:
                storage.offload()

    @cached_property
    def _schedule(self) -> Schedule:
        plan, ranks = self.plan.move, self.group.ranks
        assert plan is not None, "buckets have no schedule"
        sends, receives = ({ranks[i]: parts for i, parts in side.items()} for side in (plan.sends, plan.receives))
        return schedule(RankPlan(sends, receives, plan.copies), self.group, self.bucket_bytes // 2 // self.dtype.itemsize)

    def _reallocate(self) -> None:
        for target in self._shapes:
            self._allocate(target)
        targets = {name: parameter.data for name, parameter in self._generation.items()}
        with self._counted():
            size, label, dtype = self.bucket_bytes, LABEL, self.dtype
            move = execute_reallocation(
                self._schedule, self._train, targets, self.group, buffer_bytes=size, label=label, dtype=dtype
            )
            move.wait()
        self._sample()
        self.peak_bytes += move.peak_bytes
        self._give_up(list(self._train))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        received, sent = RECORDER.received[LABEL], RECORDER.sent[LABEL]
        yield
        self.bytes_received += RECORDER.received[LABEL] - received
        self.bytes_sent += RECORDER.sent[LABEL] - sent

    def _sample(self) -> int:
        """Note and return the bytes of all live storages that hold parameter values on the device."""
        flights = (tensor for flight in self._flights for tensor in flight.alive)
        training = map(local_part, self._parameters().values())
        held = held_bytes([*training, *self._generation.values(), *self._whole.values(), *flights])
        self.peak_bytes = max(self.peak_bytes, held)
        return held

    # -- to training

    def _restore(self, name: str, parameter: Tensor) -> int:
        """Returns the bytes of the storage that the parameter has got."""
        self._away.remove(name)
        home, storage = self.plan.homes.get(name), self._storages.get(name)
        if home is None or parameter.dtype != self.dtype:
            assert storage is not None, f"{name} went nowhere"
            storage.reload()
            return storage.nbytes
        if storage is None:
            values = parameter.new_empty(self._shards[name].shape)
        else:
            storage.allocate()
            values = local_part(parameter)
        for piece in home.pieces:
            values[piece.source_box.local_slices].copy_(self._generation[piece.target].data[piece.target_box.local_slices])
        if storage is None:
            parameter.data = values
        return values.untyped_storage().nbytes()

    def _free(self, targets: Iterable[str]) -> int:
        """Returns the bytes of what is freed."""
        freed = 0
        for target in () if self._keep else targets:
            freed += self._generation[target].nbytes
            self._generation[target].data = self._generation[target].new_empty(0)
        return freed


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that these tensors live in, each counted once."""
    storages = map(Tensor.untyped_storage, tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def materialise(module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Replace a module's parameters by empty ones without storage on ``device``; returns them by name. Ties stay ties."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in fresh:
                    fresh[parameter] = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
                part._parameters[key] = fresh[parameter]
    return dict(module.named_parameters())
