"""Weights that rest in host memory between a role's calls (``models.<role>.offload``)."""

from __future__ import annotations

from torch import Tensor

from rlhf_spmd.reshard import Storages
from rlhf_spmd.workers.engine import TrainEngine


class Resting:
    """The weights of ``engine``: on the device from :meth:`wake` to :meth:`rest`, otherwise in host memory only, pinned on GPUs.

    They go to the host when a call has changed them; else the copy there is good, and the device's is dropped.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine, self._storages = engine, Storages(engine.local_tensors().values())
        self._storages.offload()

    def wake(self) -> None:
        self._storages.reload()

    def rest(self, changed: bool) -> None:
        self._storages.follow(self._engine.local_tensors().values())  # generation may have given them other storages
        if changed:
            self._storages.offload()
        else:
            self._storages.free()

    def tensors(self) -> dict[str, Tensor]:
        """Between calls: the local shards where they lie, in host memory. Writing there changes the weights."""
        return {name: self._storages.on_host(tensor) for name, tensor in self._engine.local_tensors().items()}
