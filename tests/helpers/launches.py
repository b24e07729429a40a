"""Launches that a GPU would see, and the memory that they name, counted on any device: torch's operations and Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.jit import KernelInterface

from triton_device import DEVICE as DEVICE  # mends the interpreter

ALLOCATIONS = "empty empty_like empty_strided new_empty new_empty_strided"
FREE = {*ALLOCATIONS.split(), "_unsafe_view", "_reshape_alias", "detach", "lift_fresh"}
# for a size that the host must know
WAITS = {"_local_scalar_dense", "bincount", "nonzero", "unique_consecutive", "_unique2", "masked_select"}
PRODUCTS = {"mm", "addmm", "bmm", "linear"}


class Launches(TorchDispatchMode):
    """``names`` of those inside it in their order, views and allocations left out; ``bytes`` of the tensors of each, once each;
    ``waits``: operations for which the host waits;
    ``grids``: of Triton's kernels, by name. An operation is one launch, although some are several (a sort)."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes: list[int] = []
        self.waits: list[str] = []
        self.grids: list[tuple[str, tuple[int, ...]]] = []

    def note(self, name: str, values: Iterable[Any]) -> None:
        tensors = [x for x in values if isinstance(x, Tensor)]
        sizes: dict[int, int] = {}
        for x in tensors:
            at = x.untyped_storage().data_ptr()
            sizes[at] = max(sizes.get(at, 0), x.numel() * x.element_size())
        self.names.append(name)
        self.bytes.append(sum(sizes.values()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        to_host = name == "_to_copy" and torch.device((kwargs or {}).get("device") or "meta").type == "cpu"
        if name in WAITS or (to_host and args[0].device.type != "cpu"):
            self.waits.append(name)
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if not view and name not in FREE:
            results = out if isinstance(out, tuple | list) else (out,)
            self.note(name, [*args, *(kwargs or {}).values(), *results])
        return out

    def elementwise_bytes(self) -> int:
        """What all but the matrix products read and write."""
        return sum(size for name, size in zip(self.names, self.bytes, strict=True) if name not in PRODUCTS)

    def bytes_of(self, *names: str) -> int:
        """What the launches of these names read and write."""
        return sum(size for name, size in zip(self.names, self.bytes, strict=True) if name in names)


@contextmanager
def counted_launches(run: bool = True) -> Iterator[Launches]:
    """``run``: Triton's kernels are run, too. On meta tensors they cannot be."""
    launches, original = Launches(), KernelInterface.__getitem__

    def get(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = original(kernel, grid)

        def counted(*args: Any, **options: Any) -> Any:
            launches.note(kernel.__name__, args)
            launches.grids.append((kernel.__name__, tuple(grid)))
            if not run:
                return None
            with _disable_current_modes():  # the interpreter's own operations are no launches
                return launch(*args, **options)

        return counted

    KernelInterface.__getitem__ = get
    try:
        with launches:
            yield launches
    finally:
        KernelInterface.__getitem__ = original
