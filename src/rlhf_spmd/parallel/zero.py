"""ZeRO by FSDP2, with its collectives replaced by those of :mod:`~rlhf_spmd.parallel.collectives`.

FSDP2 sees the shard group only. With several copies of the shards (HSDP) the engine sums gradients over the copies, once per optimizer
step. FSDP2's mesh of two axes would do so after every reduction, with collectives of its own.

FSDP2 is imported only if a role uses it: the import takes most of a second, a fifth of all imports.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

STAGED = 1 << 21  # the most elements that a rank gives to a gloo collective at a time: gloo makes two copies of them


def stage_of_zero(layout: Layout) -> int:
    """Return the ZeRO stage of a layout; 0 if no rank shares a copy with others."""
    return layout.zero if layout.dp_shard > 1 else 0


class _Collective:
    """What FSDP2 calls in place of its own collective, with FSDP2's arguments."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def pieces(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Return runs of columns of [size, n] that are sent together, and these columns in contiguous memory."""
        size, width = rows.shape
        if capabilities(rows.device).nccl or width <= STAGED:
            yield slice(0, width), rows
            return
        staging = rows.new_empty(size * STAGED)  # one for all pieces: gloo's threads release a tensor late
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
    """``reduced``: the last result, flat, before FSDP2 rounds it to the parameters' dtype. Kept until ``readers`` have read it."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.reduced: Tensor | None = None
        self.readers = self.unread = 0

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        for columns, piece in self.pieces(input_tensor.view(self.group.size, -1)):
            self.group.reduce_scatter_into(output_tensor[columns], piece.view(-1), "zero_gradients")
        if not capabilities(input_tensor.device).streams:
            input_tensor.untyped_storage().resize_(0)  # FSDP2 frees it only in the last backward pass, because of GPU streams
        self.reduced, self.unread = (output_tensor if self.readers else None), self.readers

    def read(self) -> Tensor:
        reduced = self.reduced
        assert reduced is not None, "no gradient was reduced"
        self.unread -= 1
        self.reduced = reduced if self.unread else None
        return reduced


class FSDPModel:
    """FSDP2 applied to a module over ``mesh.dp_shard``: each of ``blocks`` by itself, the rest at the root. Gradients are sums.

    - stage: 1 and 2 hold the gathered parameters from the first micro-batch to the last; 3 gathers them in every pass. 1 reduces
      gradients only after the last micro-batch
    - reduce_dtype: the dtype in which gradients are summed over ranks
    - plain_parameters: parameters that ZeRO does not divide
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        mesh: Mesh,
        stage: int,
        reduce_dtype: torch.dtype,
        plain_parameters: Collection[nn.Parameter] = (),
    ) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.stage = stage
        self._parts: list[FSDPModule] = []
        self._collectives: list[_ReduceScatter] = []  # one per part
        self._reductions: dict[int, _ReduceScatter] = {}  # id of a parameter -> its part's reduction
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nobody writes into it
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        axis = mesh.copies_axis if mesh.dp_shard.size == mesh.copies.size else "dp_shard"
        for part in [*blocks, module]:
            options: dict[str, Any] = {"mp_policy": policy, "ignored_params": set(plain_parameters)}
            fully_shard(part, mesh=mesh.device_mesh[axis], reshard_after_forward=stage == 3, **options)
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
        """Keep reduced gradients for :meth:`take_gradient`, which must then be called for every parameter that has a gradient."""
        for part, reduction in zip(self._parts, self._collectives, strict=True):
            assert isinstance(part, nn.Module)
            for param in part.parameters():
                if param.requires_grad and is_sharded(param) and self._reductions.setdefault(id(param), reduction) is reduction:
                    reduction.readers += 1

    def before_backward(self, is_last: bool) -> None:
        """Call this before each backward pass. ``is_last``: it is the last of the micro-batches whose gradients are summed."""
        root = self._parts[-1]
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last or self.stage >= 2)
        root.set_reshard_after_backward(is_last or self.stage == 3)

    def reshard(self) -> None:
        """Free gathered parameters, so that only the local shards are left. No communication."""
        for part in self._parts:
            part.reshard()

    def take_gradient(self, param: Tensor) -> Tensor:
        """Take this rank's shard of a parameter's reduced gradient off the parameter, before rounding.

        Call it in the hook that runs when FSDP2 has set the gradient. FSDP2 rounds the result to the parameter's dtype and cuts the
        shards out of the rounded copy, where they have the same positions as in the original.
        """
        assert param.grad is not None, "the hook ran without a gradient"
        rounded = local_part(param.grad)
        param.grad = None
        reduced = self._reductions[id(param)].read()
        assert rounded.untyped_storage().nbytes() == reduced.numel() * rounded.itemsize, (
            "FSDP2 laid the gradients out otherwise"
        )
        return reduced.as_strided(rounded.shape, rounded.stride(), rounded.storage_offset())


def allocate(module: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> Iterator[list[Tensor]]:
    """Allocate, without values, a module that was built (and perhaps sharded) on "meta": each of ``blocks``, then the rest.

    Yields the local tensors of each.
    """
    blocks = list(blocks)
    for block in blocks:
        block.to_empty(device=device)
        yield [local_part(tensor) for tensor in (*block.parameters(), *block.buffers())]
    inside = {part for block in blocks for part in block.modules()}
    rest = [part for part in module.modules() if part not in inside]
    for part in reversed(rest):  # the module itself comes last: then FSDP2 finds its parameters' new storages
        part.to_empty(device=device, recurse=False)
    yield [local_part(param) for part in rest for param in part.parameters(recurse=False)]


def zero_loss(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return 0, with a gradient of 0 for every parameter. FSDP reduces whatever has a gradient, and that must be the same on all
    ranks."""
    outside = [param.sum() for name, param in module.named_parameters() if not name.startswith("layers.")]
    return torch.stack([hidden.sum(), *outside]).sum() * 0.0


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor, which FSDP2 makes of a parameter."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or the tensor itself; shares storage, outside autograd.

    It reads the attribute, because ``detach().to_local()`` goes through DTensor's dispatch and takes 30 times as long. A transition
    asks for every parameter at each of its buckets.
    """
    dtensor: Any = tensor
    local: Tensor = (dtensor._local_tensor if is_sharded(dtensor) else dtensor).detach()
    return local
