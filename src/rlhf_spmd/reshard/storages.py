"""Tensors whose device memory is freed for a while. Their values are lost, or are copied to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import capabilities, wait
from rlhf_spmd.kernels.devices import side_stream
from rlhf_spmd.kernels.pinned_memory import host_zeros


class Storages:
    """The storages of some tensors, which are freed and allocated again while the tensors live.

    :meth:`free` loses the values, and :meth:`allocate` fills with zeros. :meth:`offload` copies them to host memory, pinned if the
    tensors are on a GPU, and :meth:`reload` brings them back. Without storage, the tensors must not be read or written.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._host: list[Tensor] = []
        self._coming: torch.cuda.Event | bool = False  # set by :meth:`prefetch`
        self.include(tensors)

    def include(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that share no storage with those before."""
        more = _distinct(tensors)
        self._storages += more
        self._sizes += [storage.nbytes() for storage in more]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the storages hold on their device."""
        return sum(storage.nbytes() for storage in self._storages)

    def free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Give the tensors storage again, filled with zeros: FSDP pads shards, and the padding is summed."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).zero_()

    def offload(self, tensors: Iterable[Tensor] | None = None, changed: Iterable[Tensor] | None = None) -> None:
        """Copy values to host memory and free the storages. The host memory is reused the next time.

        ``tensors``: the same tensors, if some have other storages of the same sizes by now. ``changed``: copy only these; for the
        others the last copy is still good.
        """
        if tensors is not None:
            self._storages = _distinct(tensors)
        if not self._host:
            device = next((storage.device for storage in self._storages), torch.device("cpu"))
            self._host = host_zeros([((size,), torch.uint8) for size in self._sizes], device)
        copied = self._storages if changed is None else _distinct(changed)
        numbers = {storage._cdata for storage in copied}
        for host, storage in zip(self._host, self._storages, strict=True):
            if storage._cdata in numbers:
                host.copy_(_bytes(storage), non_blocking=True)
        if copied:
            wait()
        self.free()

    def release(self) -> None:
        """After :meth:`reload`: stop holding the storages, so that one which a tensor exchanges for another is freed.

        Call :meth:`offload` with the tensors before anything else.
        """
        self._storages = []

    def reload(self) -> None:
        if not self._coming:
            self._copy_back()
        elif not isinstance(self._coming, bool):
            torch.cuda.current_stream().wait_event(self._coming)
        self._coming = False

    def prefetch(self) -> None:
        """Start a :meth:`reload`. On a GPU the copy runs during this rank's computation."""
        if self._coming:
            return
        self._coming = True
        if not any(capabilities(storage.device).streams for storage in self._storages):
            self._copy_back()
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        stream = side_stream()
        stream.wait_stream(torch.cuda.current_stream())  # it may still use that memory for something else
        with torch.cuda.stream(stream):
            self._copy_back()
        self._coming = stream.record_event()

    def _copy_back(self) -> None:
        for host, storage, size in zip(self._host, self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:  # on a GPU an equal size would be allocated anew, on the copy's stream
                storage.resize_(size)
            _bytes(storage).copy_(host, non_blocking=True)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the host copy of one of the tensors after :meth:`offload`. :meth:`reload` brings back what is written there."""
        (host,) = (h for h, s in zip(self._host, self._storages, strict=True) if s._cdata == tensor.untyped_storage()._cdata)
        return host.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, each counted once."""
    storages = map(Tensor.untyped_storage, tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def materialise(module: nn.Module, device: torch.device) -> dict[str, nn.Parameter]:
    """Replace a module's parameters by empty ones on ``device``, without storage. Returns them by name. Tied ones stay tied."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in fresh:
                    fresh[parameter] = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
                part._parameters[key] = fresh[parameter]
    return dict(module.named_parameters())
