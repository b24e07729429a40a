"""What a GPU would be given: kernels that would be launched, and bytes that these would read and write, counted on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
    "alias",
)
WAITS = ("_local_scalar_dense", "bincount", "nonzero", "unique_consecutive", "_unique2", "masked_select")  # on CUDA for a size


def _bytes(values: Any) -> int:
    return sum(x.numel() * x.itemsize for x in tree_leaves(values) if isinstance(x, Tensor))


class DeviceWork(TorchDispatchMode):
    """``launches`` by operator; ``bytes`` of what each reads and writes, once each; ``waits``: operators for which the host waits.

    An operator is one launch, although some are several (a sort). Triton's kernels of the modules given to :meth:`watch` are not
    run, but counted."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def note(self, name: str, *tensors: Any) -> None:
        self.launches[name] += 1
        self.bytes[name] += sum(map(_bytes, tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in WAITS or (name == "_to_copy" and torch.device((kwargs or {}).get("device") or "meta").type == "cpu"):
            self.waits.append(name)
        if name not in FREE and not func.is_view and any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs, result))):
            self.note(name, args, kwargs, result if not func._schema.is_mutable or "out" not in (kwargs or {}) else None)
        return result

    def watch(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernels: Iterable[str]) -> None:
        for name in kernels:
            monkeypatch.setattr(module, name, _Watched(self, name))


class _Watched:
    def __init__(self, work: DeviceWork, name: str) -> None:
        self.work, self.name = work, name

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.work.note(self.name, args)
