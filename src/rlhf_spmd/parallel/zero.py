"""ZeRO by FSDP2, its collectives through the door of :mod:`~rlhf_spmd.parallel.collectives`.

FSDP2 sees the shard group only. With several copies of the shards (HSDP) the engine sums gradients over the copies, once for each
optimizer step, where FSDP2's mesh of two axes would do so after every reduction and by collectives of its own.

FSDP2 is imported where a role uses it: that takes a rank most of a second, and a fifth of all that it imports.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

STAGED = 1 << 21  # elements that a rank gives to a collective of gloo at a time: it holds them all twice more


def stage_of_zero(layout: Layout) -> int:
    """A rank that holds whole parameters has nobody to share them with."""
    return layout.zero if layout.dp_shard > 1 else 0


class _Collective:
    """What FSDP2 calls instead of its own collective, with the arguments that it gives."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def pieces(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Cuts of each rank's part of [size, n] that travel together, and those columns in one piece of memory."""
        size, width = rows.shape
        if capabilities(rows.device).nccl or width <= STAGED:
            yield slice(0, width), rows
            return
        staging = rows.new_empty(size * STAGED)  # one for all pieces: gloo's threads let go of a tensor late
        for first in range(0, width, STAGED):
            columns = slice(first, min(first + STAGED, width))
            piece = staging[: size * (columns.stop - first)].view(size, -1)
            yield columns, piece.copy_(rows[:, columns])


class _AllGather(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        assert not async_op, "FSDP2 was asked for asynchronous gathers"
        rows = output_tensor.view(self.group.size, -1)
        for columns, piece in self.pieces(rows):
            self.group.all_gather_into(piece.view(-1), input_tensor[columns], "zero_parameters")
            if piece is not rows:
                rows[:, columns] = piece


class _ReduceScatter(_Collective):
    """``reduced``: the last result, flat, before FSDP2 rounds it to the dtype of the parameters; kept for ``readers`` of it."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.reduced: Tensor | None = None
        self.readers = self.unread = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        for columns, piece in self.pieces(input_tensor.view(self.group.size, -1)):
            self.group.reduce_scatter_into(output_tensor[columns], piece.view(-1), "zero_gradients")
        if not capabilities(input_tensor.device).streams:
            input_tensor.untyped_storage().resize_(0)  # FSDP2 lets go of it in the last backward pass, for the streams of GPUs
        self.reduced, self.unread = (output_tensor if self.readers else None), self.readers

    def read(self) -> Tensor:
        reduced = self.reduced
        assert reduced is not None, "no gradient was reduced"
        self.unread -= 1
        self.reduced = reduced if self.unread else None
        return reduced


class FSDPModel:
    """FSDP2 applied to a module over ``mesh.dp_shard``: every one of ``blocks`` by itself, the rest at the root. Gradients are sums.

    stage: 1 or 2 hold the gathered parameters from the first micro-batch to the last one; 3 gathers them in every pass. 1
    reduces gradients after the last micro-batch only. ``reduce_dtype``: in which gradients are summed over ranks.
    """

    def __init__(
        self, module: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, stage: int, reduce_dtype: torch.dtype
    ) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.stage = stage
        self._parts: list[FSDPModule] = []
        self._collectives: list[_ReduceScatter] = []  # of the parts
        self._reductions: dict[int, _ReduceScatter] = {}  # by the identity of the parameter
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nobody writes into it
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        axis = "dp" if mesh.dp_shard.size == mesh.dp.size else "dp_shard"
        for part in [*blocks, module]:
            fully_shard(part, mesh=mesh.device_mesh[axis], reshard_after_forward=stage == 3, mp_policy=policy)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
            reduction: Any = _ReduceScatter(mesh.dp_shard)
            gather: Any = _AllGather(mesh.dp_shard)
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(reduction)
            self._parts.append(part)
            self._collectives.append(reduction)

    def keep_reduced(self) -> None:
        """Keep what reductions give for :meth:`take_gradient`, which must then be called for every parameter that has gradients."""
        for part, reduction in zip(self._parts, self._collectives, strict=True):
            assert isinstance(part, nn.Module)
            for param in part.parameters():
                if param.requires_grad and self._reductions.setdefault(id(param), reduction) is reduction:
                    reduction.readers += 1

    def before_backward(self, is_last: bool) -> None:
        """``is_last``: of the micro-batches whose gradients are summed."""
        root = self._parts[-1]
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last or self.stage >= 2)
        root.set_reshard_after_backward(is_last or self.stage == 3)

    def reshard(self) -> None:
        """Let go of gathered parameters, so that the local shards are all that there is. No communication."""
        for part in self._parts:
            part.reshard()

    def take_gradient(self, param: Tensor) -> Tensor:
        """This rank's shard of a parameter's reduced gradient as it came out of the reduction, taken off the parameter.

        To be called in the hook that runs when FSDP2 has set the gradient. FSDP2 itself rounds the result to the parameter's
        dtype, and cuts the shards out of the rounded copy, in which they lie as in the original.
        """
        assert param.grad is not None, "the hook ran without a gradient"
        rounded, param.grad = local_part(param.grad), None
        reduced = self._reductions[id(param)].read()
        assert rounded.untyped_storage().nbytes() == reduced.numel() * rounded.itemsize, (
            "FSDP2 laid the gradients out otherwise"
        )
        return reduced.as_strided(rounded.shape, rounded.stride(), rounded.storage_offset())


def allocate(module: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> Iterator[list[Tensor]]:
    """Memory, not filled, for a module that was built on "meta" and there perhaps sharded: for each of ``blocks``, then for the rest.
    Yields the local tensors of each."""
    blocks = list(blocks)
    for block in blocks:
        block.to_empty(device=device)
        yield [local_part(held) for held in (*block.parameters(), *block.buffers())]
    inside = {part for block in blocks for part in block.modules()}
    rest = [part for part in module.modules() if part not in inside]
    for part in reversed(rest):  # the module itself last: FSDP2 then finds its parameters' new storages
        part.to_empty(device=device, recurse=False)
    yield [local_part(param) for part in rest for param in part.parameters(recurse=False)]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, which FSDP2 makes of a parameter."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, the tensor itself otherwise; shares storage, outside autograd.

    By its attribute: ``to_local()`` of what ``detach()`` makes takes a DTensor's dispatch, 30 times as long, and a transition asks
    for every parameter at each of its buckets.
    """
    held: Any = tensor
    local: Tensor = (held._local_tensor if is_sharded(held) else held).detach()
    return local
