"""An operation as one node of autograd, made of two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable(
    forward: Callable[..., tuple[Tensor, Sequence[Tensor]]], backward: Callable[..., Any], *inputs: Tensor | None
) -> Tensor:
    """``forward(*inputs)``'s first result; its second is saved, and ``backward(needed, gradient, *saved)`` gives the inputs'
    gradients (any where ``needed`` says that there is no use for it).

    What the halves keep beside that may not be activations: only what is saved goes to the host or is computed again.
    """
    return _Node.apply(forward, backward, *inputs) if torch.is_grad_enabled() else forward(*inputs)[0]


def differentiable_several(
    forward: Callable[..., tuple[tuple[Tensor, ...], Sequence[Tensor | None]]],
    backward: Callable[..., Any],
    *inputs: Tensor | None,
) -> tuple[Tensor, ...]:
    """:func:`differentiable` of several results: ``backward(needed, *gradients, *saved)``."""
    return _Node.apply(forward, backward, *inputs) if torch.is_grad_enabled() else forward(*inputs)[0]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Any, Sequence[Tensor | None]]], backward: Callable[..., Any], *inputs: Tensor
    ) -> Any:
        out, saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.backward_half = backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_half(ctx.needs_input_grad[2:], *grads, *ctx.saved_tensors)
