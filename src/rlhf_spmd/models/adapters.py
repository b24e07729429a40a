"""Low-rank adapters in a decoder: W + scale * B A is made in each pass, rounded to W's dtype, and multiplied by as one matrix.

So a forward pass has the bits of the merged matrix that generation has, and what it costs does not grow with the tokens: of the
arithmetic of a micro-batch of T tokens a share of rank / T, and W is read and written twice. The backward pass makes the matrix
again and never its gradient, but those of A and B. W may lie there in 4 or 8 bits: then it, too, is made in each pass.
With dropout, which acts on what A reads, updates compute both products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.kernels import Ops, differentiable
from rlhf_spmd.models.lora import AdapterPart, LoraConfig, adapter_parts
from rlhf_spmd.models.quantized import Quantized
from rlhf_spmd.parallel.boxes import ParamShard


def merge(ops: Ops, weight: Tensor, a: Tensor, b: Tensor, parts: Sequence[AdapterPart], scale: float, first: int = 0) -> Tensor:
    """Return ``weight``, rows of a parameter from ``first`` on, plus scale * B A; summed in fp32 at least, rounded once. ``a`` and
    ``b`` are not cut by ZeRO. On exact devices a row's bits do not depend on the other rows."""
    merged = weight.clone()
    for part in parts:
        low, high = max(part.rows.start, first), min(part.rows.stop, first + len(weight))
        if low < high:
            left = b[part.b.start + low - part.rows.start : part.b.start + high - part.rows.start]
            ops.add_product(merged[low - first : high - first], left, a[part.a], scale)
    return merged


class Adapter(nn.Module):
    """A and B of one parameter on this rank, not initialised.

    - base: the matrix itself, where it is quantized and so not a parameter
    - enabled: products use the trained A and B
    - start: A and B as training began, not cut by ZeRO, which products use otherwise; None: products then use none
    """

    def __init__(
        self,
        ops: Ops,
        matrix: ParamShard,
        shapes: Sequence[tuple[int, ...]],
        lora: LoraConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes)
        self.ops = ops
        self.parts = adapter_parts(matrix, lora)
        self.scale = lora.scale
        self.dropout = lora.dropout
        self.first_column = matrix.boxes[0].start[1]
        self.enabled = True
        self.start: tuple[Tensor, Tensor] | None = None
        self.base = None if lora.bits is None else Quantized(matrix.shape, lora.bits, dtype, device)

    @property
    def adds(self) -> bool:
        """Return True if products differ from those of the base."""
        return self.enabled or self.start is not None

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, recomputed: bool) -> Tensor:
        """Return ``x`` [R, in] times the transpose of weight plus adapter, plus ``bias``: [R, out]. ``weight``: None where there is
        a ``base``. ``recomputed``: see :meth:`Ops.linear`."""
        factors = (self.a, self.b) if self.enabled else self.start
        if factors is None:
            return self._base_product(x, weight, bias)
        if not torch.is_grad_enabled():
            return self.ops.linear(x, self.merged(self._whole(weight), *factors), bias)
        assert self.enabled, "what training began with is not trained"
        if self.dropout:
            base_product = self._base_product(x, weight, bias)
            return base_product + self._adapter_product(self._dropped(x), base_product.shape[1])
        return differentiable(partial(self._forward, recomputed), self._backward, x, weight, bias, self.a, self.b)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, first: int = 0) -> Tensor:
        """Return :func:`merge` of ``weight`` and the factors ``a`` and ``b``."""
        return merge(self.ops, weight, a, b, self.parts, self.scale, first)

    def _whole(self, weight: Tensor | None) -> Tensor:
        if self.base is not None:
            return self.base.values()
        assert weight is not None, "there is neither a weight nor a base"
        return weight

    def _base_product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the product without A and B. A quantized matrix is widened again for the backward pass."""
        if self.base is None:
            return self.ops.linear(x, self._whole(weight), bias)
        base = self.base
        return differentiable(
            lambda x: (self.ops.linear(x, base.values(), bias), ()),
            lambda _, grad: (self.ops.gradient_product(grad, base.values()),),
            x,
        )

    def _forward(
        self, recomputed: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        saved = (x, a, b) if weight is None else (x, a, b, weight)
        if recomputed:
            columns = (weight if weight is not None else self.base).shape[0]  # type: ignore[union-attr]
            return x.new_empty(len(x), columns), saved
        return self.ops.linear(x, self.merged(self._whole(weight), a, b), bias), saved

    def _backward(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        product = self.ops.gradient_product
        grad_x = product(grad, self.merged(self._whole(weight), a, b)) if needed[0] else None
        grad_a, grad_b = torch.zeros_like(a), torch.empty_like(b)
        for part in self.parts:
            grad_rows = grad[:, part.rows]
            grad_b[part.b] = product(grad_rows.t(), product(x, a[part.a].t())).mul_(self.scale)
            grad_a[part.a] += product(product(grad_rows, b[part.b]).mul_(self.scale).t(), x)
        return grad_x, None, None, grad_a, grad_b

    def _dropped(self, x: Tensor) -> Tensor:
        """Return ``x`` with elements dropped. Ranks that read the same x (tp ranks of a column-parallel matrix) drop the same if their
        default generators are equal; ranks with slices of x drop others. Recomputation finds the generator as it was."""
        generator = torch.Generator(x.device).manual_seed(int(torch.randint(1 << 48, ())) + self.first_column)
        dropped = torch.empty_like(x, dtype=torch.bool).bernoulli_(self.dropout, generator=generator)
        return x.masked_fill(dropped, 0) / (1 - self.dropout)

    def _adapter_product(self, x: Tensor, columns: int) -> Tensor:
        """Return scale * B A x [R, ``columns``] of ``x`` [R, in]."""
        out = x.new_zeros(len(x), columns)
        for part in self.parts:
            out = out.slice_scatter(
                F.linear(F.linear(x, self.a[part.a]), self.b[part.b]) * self.scale, 1, part.rows.start, part.rows.stop
            )
        return out
