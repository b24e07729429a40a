"""An engine's model without its low-rank adapters, and its weights with them, as generation and loans take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.lora import is_adapter
from rlhf_spmd.parallel.boxes import zero_rows
from rlhf_spmd.parallel.data_parallel import sum_in_buckets
from rlhf_spmd.workers.engine import TrainEngine, named_by_chunk


@contextmanager
def without_adapters(engine: TrainEngine) -> Iterator[None]:
    """Passes are of the model that the adapters stand beside."""
    for chunk in engine.chunks:
        chunk.enable_adapters(False)
    try:
        yield
    finally:
        for chunk in engine.chunks:
            chunk.enable_adapters(True)


def held_tensors(engine: TrainEngine) -> list[Tensor]:
    """What lies on this rank between calls: local shards, and matrices in 4 or 8 bits, which are none."""
    return [*engine.local_tensors().values(), *(buffer for chunk in engine.chunks for buffer in chunk.buffers())]


def merged_names(engine: TrainEngine) -> list[str]:
    """Of the matrices that have adapters."""
    end = ".lora.a"
    return [f"{name.removesuffix(end)}.weight" for name in engine.parameters() if name.endswith(end)]


@torch.no_grad()
def merge_adapters(engine: TrainEngine, into: dict[str, Tensor]) -> None:
    """Local shards of the matrices that have adapters, with these added, by name: written over what is there, or new. The weights
    themselves stay.

    A forward pass multiplies by the same bits where devices are exact. Under ZeRO collective over dp_shard: every rank of it must call,
    in program order.
    """
    if engine.lora is None:
        return
    local, shapes = engine.local_tensors(), named_by_chunk([chunk.shards for chunk in engine.chunks])
    halves, group = {name: local[name] for name in local if is_adapter(name)}, engine.mesh.dp_shard
    if engine.zero:  # each rank's rows beside zeros: the sum is exact
        for name, rows in halves.items():
            halves[name] = rows.new_zeros(shapes[name].shape)
            halves[name][slice(*zero_rows(len(halves[name]), group.rank, group.size))] = rows
        sum_in_buckets(halves, group, "adapters")
    modules = named_by_chunk([dict(chunk.named_modules()) for chunk in engine.chunks])
    for name in merged_names(engine):
        module = name.removesuffix(".weight")
        adapter = modules[f"{module}.lora"]
        assert isinstance(adapter, Adapter)
        first, last = zero_rows(shapes[name].shape[0], group.rank, group.size) if engine.zero else (0, shapes[name].shape[0])
        rows = local[name] if adapter.base is None else adapter.base.values()[first:last]
        merged = adapter.merged(rows, halves[f"{module}.lora.a"], halves[f"{module}.lora.b"], first)
        if name in into:
            into[name].copy_(merged)
        else:
            into[name] = merged
