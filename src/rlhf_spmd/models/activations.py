"""What of a layer's forward pass is kept for its backward pass: all of it, a part from which the rest is computed again, or
either of them in host memory.

Recomputation stops at the last tensor that is missing, so a part of a layer that ends with a matrix product recomputes what its
product takes, not the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rlhf_spmd.kernels.pinned_memory import host_like
from rlhf_spmd.parallel.zero import local_part

CHECKPOINTING = ("none", "selective", "full")


def keep_layer(layer: Callable[..., Any], *args: Any) -> Any:
    """Return ``layer(*args)``, which keeps what its operations need."""
    return layer(*args)


def recompute_layer(layer: Callable[..., Any], *args: Any, random: bool = False) -> Any:
    """Return ``layer(*args)``, which keeps the tensors among ``args``. The backward pass computes again what lies between, with the
    same draws if the layer is ``random``."""
    if not torch.is_grad_enabled():
        return layer(*args)
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=random)


def keep_part(part: Callable[..., Any], *args: Any) -> Any:
    """Return ``part(recomputed, *args)`` with ``recomputed`` false, see :func:`recompute_part`."""
    return part(False, *args)


def recompute_part(part: Callable[..., Any], *args: Any, random: bool = False) -> Any:
    """Return ``part(recomputed, *args)`` by :func:`recompute_layer`.

    ``recomputed`` is true in the backward pass, which does not use the result: a part ends with a product of C++, which autograd
    cannot leave before it is done.
    """
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1  # the first is the forward pass, later ones compute it again
        return part(calls > 1, *args)

    return recompute_layer(counted, *args, random=random)


def save_on_host(module: nn.Module, *resident: Tensor) -> saved_tensors_hooks:
    """Return a context in which what autograd saves goes to host memory (pinned on GPUs, where the copies run in stream order and the
    host does not wait) and comes back when the backward pass asks for it.

    What stays anyway is saved as it is: the parameters of ``module``, ``resident``, and views of them.
    """

    def pack(tensor: Tensor) -> Any:
        storage = _storage(tensor)
        if not storage or storage in {_storage(other) for other in (*resident, *module.parameters())}:
            return tensor
        return host_like(tensor).copy_(tensor, non_blocking=True), tensor.device

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved[0].to(saved[1], non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    local = local_part(tensor)  # a parameter is sharded until its layer runs
    return 0 if local is None else local.untyped_storage().data_ptr()
