"""What is done where NCCL carries tensors, on CPUs and over gloo: batched exchanges, whole gathers in place, sums that may differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import tasks
from rlhf_spmd.kernels import devices, dispatch
from rlhf_spmd.parallel.world import World


@contextlib.contextmanager
def nccl_branches() -> Iterator[None]:
    """CPU tensors of this process are taken for those of a device with nccl and without exact bits; torch computes, without a GPU."""
    before, unavailable = devices._CPU, dispatch.unavailable
    devices._CPU = replace(before, nccl=True, batch_invariant=False)
    dispatch.unavailable = lambda *_: "here is no GPU"
    try:
        yield
    finally:
        devices._CPU, dispatch.unavailable = before, unavailable


def train_here(world: World, config: str, overrides: Sequence[str]) -> None:
    with nccl_branches():
        tasks.train_here(world, config, overrides)
