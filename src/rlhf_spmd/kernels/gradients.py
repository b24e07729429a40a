"""Makes one autograd node from the forward and backward functions of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])


def differentiable(
    forward: Callable[..., tuple[Result, Sequence[Tensor | None]]], backward: Callable[..., Any], *inputs: Tensor | None
) -> Result:
    """Return the first result of ``forward(*inputs)``, one tensor or several, as one autograd node.

    The second result is saved. ``backward(needed, *gradients, *saved)`` returns the inputs' gradients; where ``needed`` is
    False any value will do. The functions must not hold activations in any other way: only saved tensors can be
    offloaded or recomputed.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs)[0]
    result: Result = _Node.apply(forward, backward, *inputs)
    return result


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., tuple[Any, Sequence[Tensor | None]]], backward: Callable[..., Any], *inputs: Tensor
    ) -> Any:
        out, saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.backward_function = backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.backward_function(ctx.needs_input_grad[2:], *grads, *ctx.saved_tensors)
