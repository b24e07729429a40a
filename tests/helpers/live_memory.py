"""How many bytes of tensors live, op by op: every storage that an operation makes counts from there until nothing holds it. Those
on the meta device have no bytes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlhf_spmd.parallel.zero import local_part


class LiveMemory(TorchDispatchMode):
    """``live`` bytes now, ``peak`` bytes at the worst moment, both above what lay there when the mode was entered.

    Storages that were there before do not count, also when they are seen again or freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x)._cdata for x in tree_iter((args, kwargs or {})) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = _storage(tensor)
                if storage._cdata not in self._sizes and storage._cdata not in given:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return out

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _storage(tensor: Tensor) -> Any:
    return local_part(tensor).untyped_storage()
