"""Batch-invariant arithmetic on GPUs: a row's bits depend on that row and the weights alone, so generation has those of training.

torch's libraries choose kernels and splits by the number of rows. So this class replaces what
:class:`~rlhf_spmd.kernels.gpu_ops.GpuOps` leaves to them by Triton:

- matrix products: :mod:`triton_products`
- attention over packed sequences: the kernel that reads the pages of generation, with tiles that give a query the same bits
- log-probs of drawn tokens: the reduction of training's LM head

Gradients stay torch's, since nothing is compared with them.

Shape legend: T tokens, H KV heads, G query heads per KV head, D head_dim, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from rlhf_spmd.kernels import triton_lm_head, triton_paged_attention
from rlhf_spmd.kernels.flash_attention import TorchFlash
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.layer_args import AttentionRule
from rlhf_spmd.kernels.ops import UNCHANGED, Ops
from rlhf_spmd.kernels.packing import Packing
from rlhf_spmd.kernels.sampling_tensors import Drawn, SamplingTensors
from rlhf_spmd.kernels.triton_paged_attention import TileShape, score_factors
from rlhf_spmd.kernels.triton_products import product

PAGE_SIZE = 64  # tokens of a page of packed sequences: a multiple of every block of keys


class BatchInvariantGpuOps(GpuOps):
    """Ops on GPUs whose bits do not depend on the batch.

    ``flash``: the flash attention whose backward pass is used; None: autograd of torch's plain attention, as for rules that flash
    attention does not have.
    """

    name = "triton"
    chunk_invariant = True

    def __init__(self, flash: TorchFlash | None = None) -> None:
        super().__init__()
        self._flash = flash

    def min_rows(self, numel: int, inner: int) -> int:
        return 1

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    # -- products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
        return self._linear_by(product, x, weight, bias, recomputed)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return product(hidden, weight, wide=True)

    def wide_product(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight, wide=True)

    # -- packed sequences

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if not len(q):
            return torch.zeros_like(q)
        if rule.sinks is not None:  # only models with experts have sinks, and they are not exact here anyway
            return Ops.attend_packed(self, q, k, v, packing, rule)
        flash = self._flash if self._flash is not None and self._flash.fits(q, rule) else None
        return differentiable(partial(_packed, packing, rule), partial(_packed_backward, flash, packing, rule), q, k, v)

    # -- the head

    def cap_logits(self, logits: Tensor, softcap: float) -> Tensor:
        return triton_lm_head.cap_logits(logits, softcap)

    def draw_rows(self, scores: Tensor, logits: Tensor, settings: SamplingTensors, keys: Tensor, positions: Tensor) -> Drawn:
        """Return :class:`Drawn`. Log-probs are those that training's head computes from these logits, at a temperature that fp32
        holds."""
        tokens, tempered, at_one = super().draw_rows(scores, logits, settings, keys, positions)
        if settings.tempered:
            temperature = settings.temperature.double()
            scales = torch.where(temperature == 0, 1.0, 1.0 / temperature).float()
            tempered = self._log_probs(logits, tokens, tempered, scales)
        at_one = self._log_probs(logits, tokens, at_one, None)
        return tokens, tempered if settings.tempered else at_one, at_one

    @staticmethod
    def _log_probs(logits: Tensor, tokens: Tensor, drawn: Tensor, scales: Tensor | None) -> Tensor:
        """Return log-probs as ``models.heads`` makes them of one rank's statistics; NaN where the ``drawn`` ones are not finite."""
        largest, total, label, _ = triton_lm_head.logit_statistics(logits, tokens, 0, False, UNCHANGED, scales)
        return torch.add((label - largest) - total.log(), drawn, alpha=0)  # one launch, of 0 * drawn


def _packed(
    packing: Packing, rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Return the attention over packed sequences. Writes keys and values to pages as a cache has them, then reads these."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = k.shape
    group = q.shape[1] // heads
    shape = TileShape.of_invariant_chunks(dim, q.element_size(), PAGE_SIZE, group)
    tiles = packing.tiles(shape.rows // group, PAGE_SIZE)
    pages = k.new_empty(2, heads, tiles.num_pages, PAGE_SIZE * dim)
    strides = (*k.stride()[:2], *v.stride()[:2], pages.stride(1))
    triton_paged_attention.write[(tokens, heads)](k, v, pages, tiles.slots, *strides, heads, dim, triton.next_power_of_2(dim))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_sums = q.new_empty(q.shape[1], tokens, dtype=torch.float32)
    sizes = group, PAGE_SIZE, dim, 0, rule.window or 0, rule.softcap is not None, triton_paged_attention.SPLIT_KEYS
    triton_paged_attention.attend_chunks[(len(tiles.tiles) * heads,)](
        q, pages, out, log_sums, q, tiles.tiles, tiles.table, *q.stride()[:2], pages.stride(1), tiles.table.stride(0), heads, tokens,
        *score_factors(rule), True, False, *sizes, *shape[:3], **shape.options,
    )  # fmt: skip
    return out, (q, k, v, out, log_sums)


def _packed_backward(
    flash: TorchFlash | None, packing: Packing, rule: AttentionRule, needed: object, grad: Tensor, *saved: Tensor
) -> tuple[Tensor, ...]:
    q, k, v, out, log_sums = saved
    if flash is not None:
        return flash.backward(packing, rule, needed, grad, q, k, v, out, log_sums)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        recomputed = Ops().attend_packed(q, k, v, packing, rule)
    return torch.autograd.grad(recomputed, (q, k, v), grad)
