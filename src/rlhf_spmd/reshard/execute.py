"""The hybrid engine at work: one model, one set of weights, moved between its training and its generation layout in place.

To generation, bucket by bucket: allocate the bucket's generation parameters, gather, then give up the training storage whose
values they now hold. A training parameter that is one slice of a generation parameter becomes a view of it. Others give up
their storage until they are restored: FSDP2 shards, whose storage belongs to FSDP (it is resized to nothing and back), and
parameters that lie scattered in the generation shard. Either way no value is held twice, and the peak is the generation
shard plus one bucket. While ``mode`` is "generation" the training parameters must not be written, and those without a view
not be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import RECORDER, Group
from rlhf_spmd.reshard.plan import Bucket, GatherPlan, Home, Piece, plan_gather, plan_homes, shards_from_json, shards_to_json

LABEL = "reshard"


class HybridEngine:
    """Moves a role's weights between its training module and its generation module.

    train_shards: this rank's training parameters (ZeRO rows included) by name. train_parameters: returns the current ones
    under the same names: plain ``nn.Parameter`` or FSDP2's DTensor, sharded (not gathered).
    generation: the generation module, built on "meta" or any device; the engine replaces its parameters by empty ones on the
    training device and fills them in :meth:`to_generation`. generation_shards: its plan.
    group: the gather group (``plan.gather_ranks``). keep_buffers: generation storage stays allocated, at fixed addresses,
    during training (captured CUDA graphs stay valid) at the price of holding it beside the training shard.
    Collective over ``group``: every rank of it must call, in program order. Raises ValueError where the layouts do not fit.
    """

    def __init__(
        self,
        train_shards: Mapping[str, ParamShard],
        train_parameters: Callable[[], Mapping[str, Tensor]],
        generation: nn.Module,
        generation_shards: Mapping[str, ParamShard],
        group: Group,
        bucket_bytes: int = 256 << 20,
        keep_buffers: bool = False,
    ) -> None:
        self.mode = "training"
        self.bytes_received = 0  # in the last transition to generation
        self.group, self.keep_buffers = group, keep_buffers
        self._shards, self._parameters = dict(train_shards), train_parameters
        train = self._local()
        first = next(iter(train.values()))
        self._generation = materialise(generation, first.device)
        self._shapes = {name: shard.shape for name, shard in generation_shards.items()}
        assert set(self._generation) == set(self._shapes), "generation module and its plan name different parameters"
        dtypes = {parameter.dtype for parameter in self._generation.values()}
        assert len(dtypes) == 1, f"generation parameters have one dtype, not {dtypes}"
        (self.dtype,) = dtypes

        members = [shards_from_json(text) for text in _exchange(group, shards_to_json(self._shards))]
        self.plan: GatherPlan = plan_gather(members, generation_shards, max(bucket_bytes // self.dtype.itemsize, 1))
        self.homes: dict[str, Home] = plan_homes(self._shards, generation_shards)
        self.shared = self._find_shared(train)
        self._finished = self._plan_finished()
        self._released: dict[str, int] = {}  # DTensor parameters without storage -> its bytes

    @torch.no_grad()
    def to_generation(self) -> None:
        """Fill the generation parameters from the training parameters; ``bytes_received`` then says what came over the network.

        Collective over the gather group: every rank of it must call, in program order.
        """
        assert self.mode == "training", "the weights are already in the generation layout"
        before = RECORDER.received[LABEL]
        train = self._local()
        if self.shared is not None:
            for target, source in self.shared.items():
                self._generation[target].data = train[source]
        else:
            parameters = self._parameters()
            for bucket, finished in zip(self.plan.buckets, self._finished, strict=True):
                self._gather(bucket, train)
                for name in finished:
                    del train[name]  # or its storage would live on
                    self._give_up(name, parameters[name])
        self.bytes_received = RECORDER.received[LABEL] - before
        self.mode = "generation"

    @torch.no_grad()
    def to_training(self) -> None:
        """Give the training parameters their own storage again, and free the generation parameters. No communication."""
        assert self.mode == "generation", "the weights are already in the training layout"
        self.mode = "training"
        if self.shared is not None:
            return  # one set of parameters, which both modules use
        uses = Counter(target for home in self.homes.values() for target in {piece.target for piece in home.pieces})
        self._free(target for target in self._shapes if not uses[target])
        parameters = self._parameters()
        for names in self._finished:
            for name in names:
                self._restore(name, parameters[name])
                targets = {piece.target for piece in self.homes[name].pieces}
                uses.subtract(targets)
                self._free(target for target in targets if not uses[target])

    def _local(self) -> dict[str, Tensor]:
        """The training parameters as plain local tensors that share their storage."""
        current = self._parameters()
        assert set(current) == set(self._shards), "training module and its plan name different parameters"
        local = {name: _local_tensor(parameter) for name, parameter in current.items()}
        for name, tensor in local.items():
            expected = self._shards[name].shape
            assert tuple(tensor.shape) == expected, f"training parameter {name}: shape {tuple(tensor.shape)}, shard {expected}"
        return local

    def _find_shared(self, train: Mapping[str, Tensor]) -> dict[str, str] | None:
        """Generation parameter -> the training parameter that it is, if that holds for all of them: nothing has to move."""
        if self.group.size > 1 or any(tensor.dtype != self.dtype for tensor in train.values()):
            return None
        shared = {}
        for name, home in self.homes.items():
            if home.view is None or self._shapes[home.view[0]] != self._shards[name].shape:
                return None
            shared[home.view[0]] = name
        return shared if len(shared) == len(self._shapes) == len(self._shards) else None

    def _plan_finished(self) -> list[list[str]]:
        """For each bucket the training parameters that no later one needs and whose values the generation storage then has."""
        made = {target: i for i, bucket in enumerate(self.plan.buckets) for target in bucket.targets}
        last = {name: max((made[piece.target] for piece in home.pieces), default=0) for name, home in self.homes.items()}
        for i, bucket in enumerate(self.plan.buckets):
            for piece in (*bucket.sends[self.group.rank], *bucket.copies[self.group.rank]):
                last[piece.source] = max(last[piece.source], i)
        return [[name for name, at in last.items() if at == i] for i in range(len(self.plan.buckets))]

    def _gather(self, bucket: Bucket, train: Mapping[str, Tensor]) -> None:
        for target in bucket.targets:
            parameter, shape = self._generation[target], self._shapes[target]
            if tuple(parameter.shape) != shape:
                parameter.data = parameter.new_empty(shape)
        me, sizes = self.group.rank, bucket.sizes
        for piece in bucket.copies[me]:
            self._put(piece, train[piece.source][piece.source_box.local_slices])
        if not any(sizes):
            return
        device = next(iter(self._generation.values())).device
        mine = torch.empty(sizes[me], dtype=self.dtype, device=device)
        for part, piece in zip(mine.split([p.source_box.numel for p in bucket.sends[me]]), bucket.sends[me], strict=True):
            part.view(piece.source_box.size).copy_(train[piece.source][piece.source_box.local_slices])
        if bucket.balanced:
            everything = mine.new_empty(self.group.size * sizes[me])
            self.group.all_gather_into(everything, mine, LABEL)
            for flat, pieces in zip(everything.split(sizes[me]), bucket.sends, strict=True):
                self._unpack(flat, pieces)
            return
        for member, pieces in enumerate(bucket.sends):
            if sizes[member]:
                flat = mine if member == me else mine.new_empty(sizes[member])
                self._unpack(self.group.broadcast(flat, member, LABEL), pieces)

    def _unpack(self, flat: Tensor, pieces: tuple[Piece, ...]) -> None:
        for part, piece in zip(flat.split([piece.source_box.numel for piece in pieces]), pieces, strict=True):
            self._put(piece, part.view(piece.target_box.size))

    def _put(self, piece: Piece, values: Tensor) -> None:
        self._generation[piece.target].data[piece.target_box.local_slices].copy_(values)

    def _give_up(self, name: str, parameter: Tensor) -> None:
        """The values are in the generation parameters: drop the training copy. With another dtype it is no copy, and stays."""
        view = self.homes[name].view
        if parameter.dtype != self.dtype:
            return
        if isinstance(parameter, DTensor):
            storage = _local_tensor(parameter).untyped_storage()
            self._released[name] = storage.nbytes()
            storage.resize_(0)
        elif view is not None:
            parameter.data = self._generation[view[0]].data[view[1]]
        else:
            parameter.data = parameter.new_empty(0)

    def _restore(self, name: str, parameter: Tensor) -> None:
        if parameter.dtype != self.dtype:
            return
        if isinstance(parameter, DTensor):
            values = _local_tensor(parameter)
            storage = values.untyped_storage()
            storage.resize_(self._released.pop(name))
            torch.empty(0, dtype=torch.uint8, device=values.device).set_(storage).zero_()  # FSDP's padding of uneven chunks too
        else:
            values = parameter.new_empty(self._shards[name].shape)
        for piece in self.homes[name].pieces:
            source = self._generation[piece.target].data[piece.target_box.local_slices]
            values[piece.source_box.local_slices].copy_(source)
        if not isinstance(parameter, DTensor):
            parameter.data = values

    def _free(self, targets: object) -> None:
        if not self.keep_buffers:
            for target in list(targets):  # type: ignore[call-overload]
                self._generation[target].data = self._generation[target].new_empty(0)


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


def _local_tensor(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _exchange(group: Group, text: str) -> list[str]:
    """Every member's text, in group order. Collective over the group: every rank of it must call, in program order."""
    import json

    parts = group.gather_bytes(text.encode(), LABEL)
    merged = None if parts is None else json.dumps([part.decode() for part in parts]).encode()
    return json.loads(group.broadcast_bytes(merged, LABEL))
