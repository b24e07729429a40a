"""Products of bf16 and fp16 matrices in fp32, for which torch has kernels on GPUs alone, in place of these on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def wide_products_on_cpus() -> Iterator[None]:
    def check(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32
        return a.float() @ b.float()

    def mm_out(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert out.dtype == dtype
        return out.copy_(check(a, b, dtype))

    def addmm_out(
        total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        assert total.dtype == out.dtype == dtype and beta == alpha == 1
        return out.copy_(total + check(a, b, dtype))

    library = torch.library.Library("aten", "IMPL")
    if not torch.cuda.is_available():
        library.impl("mm.dtype", check, "CPU")
        library.impl("mm.dtype_out", mm_out, "CPU")
        library.impl("addmm.dtype_out", addmm_out, "CPU")
    try:
        yield
    finally:
        library._destroy()
