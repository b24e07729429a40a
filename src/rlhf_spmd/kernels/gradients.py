"""Makes one autograd node from the forward and backward functions of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable(
    forward: Callable[..., tuple[Tensor, Sequence[Tensor]]], backward: Callable[..., Any], *inputs: Tensor | None
) -> Tensor:
    """Returns the first result of ``forward(*inputs)`` as one autograd node.

    The second result is saved. ``backward(needed, gradient, *saved)`` returns the inputs' gradients; where ``needed`` is
    False any value will do. The functions must not hold activations in any other way: only saved tensors can be
    offloaded or recomputed.
    """
    return _Node.apply(forward, backward, *inputs) if torch.is_grad_enabled() else forward(*inputs)[0]


def differentiable_several(
    forward: Callable[..., tuple[tuple[Tensor, ...], Sequence[Tensor | None]]],
    backward: Callable[..., Any],
    *inputs: Tensor | None,
) -> tuple[Tensor, ...]:
    """As :func:`differentiable`, for several results: ``backward(needed, *gradients, *saved)``."""
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
