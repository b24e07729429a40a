"""The operations of a model, in torch, on any device, in the form that suits GPUs.

A model calls the methods from ``rms_norm`` to ``attend_packed``, and products, which :mod:`products` has. They are differentiable, but
for those of generation, which say so. The head, the sampler and the autograd nodes call the others, which have no gradients.
Subclasses replace methods by kernels for one device; no model changes.

Shape legend: T tokens, H KV heads, G query heads per KV head, D head_dim, V local vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.dense_attention import LatentKeys, attend_dense, latent_heads
from rlhf_spmd.kernels.flash_linear_attention import FlashLinearAttention
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.layer_args import AttentionRule, HeadShape, LayerOptions, LayerParts, Norms, PageTarget
from rlhf_spmd.kernels.packing import Packing, pad_rows, visible_keys
from rlhf_spmd.kernels.products import ProductOps

GPU_CHUNK_LOGITS = 1 << 28  # ``chunk_logits`` of GpuOps, 1 GiB: for each chunk the weight is read, and sums are added to, once


class LogitTransform(NamedTuple):
    """What is done to a head's logits: softcap * tanh(logits / softcap) if there is a ``softcap``, then division by ``temperature``."""

    temperature: float = 1.0
    softcap: float | None = None


UNCHANGED = LogitTransform()


class Ops(ProductOps):
    """The operations of a model, in torch. Subclasses replace some of them by kernels for one kind of device."""

    name = "torch"  # the attention's name in ``models.<role>.attention``
    chunk_invariant = False  # paged attention gives a prompt's tokens the same bits in one chunk and one by one
    joins_layers = False  # :meth:`fused_layer` can run the attention over packed sequences as one of its steps
    packed_delta: FlashLinearAttention | None = None  # linear attention over packed sequences; None: :func:`.delta_rule`
    # the LM head
    chunk_logits = 1 << 26  # the most logits that are computed at once
    backward_rows = 1 << 13  # the most rows of a chunk in the backward pass
    small_head = 1 << 23  # up to so many logits, the backward pass computes a chunk of rows over the whole vocabulary
    keeps_logits = False  # such a chunk's logits are kept from the forward pass instead of recomputed
    head_columns = 1  # larger chunks are computed in blocks of the vocabulary, whose width is a multiple of this
    wide_head = False  # the products of the backward pass are in fp32 for half-precision weights too

    @staticmethod
    def page_elements(page_size: int, head_dim: int) -> int:
        """Return the elements of one page of one head in the KV cache, of keys or of values."""
        return page_size * head_dim

    # -- what a model calls

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """Return weight * x / sqrt(mean(x^2) + eps), the mean over the last dim; with ``unit_offset`` times 1 + weight."""
        if not torch.is_grad_enabled():  # early, because decoding has no host time to spare
            return self.norm(x, weight, eps, unit_offset)[0]

        def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out, scale = self.norm(x, weight, eps, unit_offset)
            return out, (x, weight, scale)

        return differentiable(forward, partial(self.norm_backward, unit_offset), x, weight)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> tuple[Tensor, Tensor]:
        """Return x + y, and :meth:`rms_norm` of the sum."""
        total = x + y
        return total, self.rms_norm(total, weight, eps, unit_offset)

    def split_heads(
        self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, Hq, D], k and v [T, Hkv, D] of ``qkv`` [T, (Hq + 2 Hkv) * D]. q and k are normed if ``norms`` has weights, and
        rotated by ``cos`` and ``sin`` [T, 1, D / 2]; with fewer columns only their first dims are rotated."""
        queries, keys = shape.queries, shape.keys
        per_head = qkv.view(qkv.shape[0], queries + 2 * keys, shape.dim)
        if shape.fused_slices > 1:
            blocks = per_head.view(qkv.shape[0], shape.fused_slices, -1, shape.dim)
            parts = blocks.split([n // shape.fused_slices for n in (queries, keys, keys)], 2)
            per_head = torch.cat([part.flatten(1, 2) for part in parts], 1)
        q_weight, k_weight = norms
        if q_weight is None or k_weight is None:
            qk, v = per_head.split([queries + keys, keys], 1)
            q, k = self.rotate(qk, cos, sin, shape.interleaved).split([queries, keys], 1)
            return q, k, v
        q, k, v = per_head.split([queries, keys, keys], 1)
        q, k = (
            self.rotate(self.rms_norm(x, weight, shape.eps, shape.unit_offset), cos, sin, shape.interleaved)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        return q, k, v

    def heads_to_pages(
        self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape, pages: PageTarget
    ) -> Tensor:
        """Return q of :meth:`split_heads`, without gradients.

        Writes k and v of the first ``len(pages.cache_slots)`` tokens to ``pages``.
        """
        q, k, v = self.split_heads(qkv, norms, cos, sin, shape)
        for block, x in zip(pages.pages.view(2, shape.keys, -1, shape.dim), (k, v), strict=True):
            block.index_copy_(1, pages.cache_slots, x[: len(pages.cache_slots)].transpose(0, 1))
        return q

    def latent_to_pages(self, q: Tensor, short: Tensor, keys: LatentKeys, pages: PageTarget) -> Tensor:
        """Return the queries of :func:`latent_heads`. Writes the keys of the first ``len(pages.cache_slots)`` tokens to ``pages``."""
        q, entries = latent_heads(self, q, short, keys)
        pages.pages.view(-1, entries.shape[1]).index_copy_(0, pages.cache_slots, entries[: len(pages.cache_slots)])
        return q

    def gated_activation(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """Return silu(gate) * up [T, n] of ``gate_up`` [T, 2n] = [gate; up]; with ``gelu``, gelu(gate) * up in its tanh form."""
        if not torch.is_grad_enabled():
            return self.gated_activation_forward(gate_up, gelu)
        return differentiable(
            lambda x: (self.gated_activation_forward(x, gelu), [x]), partial(self.gated_activation_backward, gelu), gate_up
        )

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """Return ``x`` [T, heads, D] rotated by ``cos`` and ``sin`` [T, 1, D / 2]; with fewer columns only its first dims are rotated.
        A pair is a dim of each half, or with ``interleaved`` two neighbours."""
        if not cos.shape[-1]:
            return x
        if not torch.is_grad_enabled():
            return self.apply_rotary(x, cos, sin, interleaved)
        backward = partial(self.apply_rotary_backward, interleaved)
        return differentiable(lambda x: (self.apply_rotary(x, cos, sin, interleaved), (cos, sin)), backward, x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor) -> Tensor:
        """Return the attention of ``q`` over keys ``k`` and values ``v`` [H, B, L, D], in the shape of ``q``, without gradients: for
        generation. ``allowed`` (bool, broadcasts to the scores): which keys a row sees, with the rule's window applied."""
        return attend_dense(q, k, v, rule, allowed, rule.sinks_of_rows(q.shape[0], q.shape[2], 0))

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Return the causal attention within each sequence, [T, H * G, D]. ``q``: [T, H * G, D]; ``k`` and ``v``: [T, H, D]."""
        sinks = None if rule.sinks is None else rule.sinks[None, :, None, None]
        outs = []
        for part in packing.padded_groups(q.shape[1], math.inf):
            queries, keys, values = (part.gather(x).transpose(1, 2) for x in (q, k, v))
            position = torch.arange(part.num_queries, device=q.device)
            needs_mask = rule.window is not None and part.num_queries > rule.window
            allowed = visible_keys(position, position, rule.window) if needs_mask else None
            mixed = attend_dense(queries, keys, values, rule, allowed, sinks).transpose(1, 2)
            outs.append(part.without_padding(mixed))
        return torch.cat(outs).index_select(0, packing.group_positions(q.shape[1], math.inf)) if outs else torch.zeros_like(q)

    def fused_layer(
        self, parts: LayerParts, options: LayerOptions, rule: AttentionRule, layer_index: int
    ) -> Callable[..., Tensor | None] | None:
        """Return one function for a whole layer on one rank, without gradients, or None. Its bits equal those of the operations.

        The function takes x [R, hidden], cos, sin, the attention and the number of tokens, and returns [R, hidden], or None
        for an attention that it does not know.

        ``layer_index``: the attention's name for the layer.
        """
        return None

    # -- forward and backward functions of the above

    def norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
        """Return the norm and its scales [..., 1]; computes in fp32 for bf16."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (wide * scale * (1 + weight.to(wide.dtype))).to(x.dtype), scale
        return weight * (wide * scale).to(x.dtype), scale

    def norm_backward(
        self, unit_offset: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of x and of the weight, from ``grad`` of :meth:`norm`'s first result, its inputs and the scales."""
        normal = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_normal = grad * (1 + weight.to(grad.dtype) if unit_offset else weight)
        projection = (grad_normal * normal).mean(-1, keepdim=True)
        return grad_normal.addcmul_(normal, projection, value=-1).mul_(scale).to(x.dtype), grad_weight

    def gated_activation_forward(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """Return :meth:`gated_activation` of ``gate_up``, without gradients."""
        # views with gaps: on CPUs, silu of a contiguous tensor rounds the last elements differently; here all rows end alike
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)

    def gated_activation_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        """Return the gradient of [gate; up] from the gradient of :meth:`gated_activation_forward`'s result."""
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.mul(grad, up, out=grad_gate)
        aten = torch.ops.aten  # with ``out``: copies of such matrices cost as much as the arithmetic
        if gelu:
            aten.gelu.out(gate, approximate="tanh", out=grad_up)
            aten.gelu_backward.grad_input(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        else:
            aten.silu.out(gate, out=grad_up)
            aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        grad_up.mul_(grad)
        return (grads,)

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """Return :meth:`rotate` of ``x``, without gradients."""
        out = torch.empty_like(x)
        rotated_dims = 2 * cos.shape[-1]
        first = slice(0, rotated_dims, 2) if interleaved else slice(rotated_dims // 2)
        second = slice(1, rotated_dims, 2) if interleaved else slice(rotated_dims // 2, rotated_dims)
        a, b = x[..., first], x[..., second]
        # no addcmul: it may fuse the rounding on some elements and not on others
        torch.sub(a * cos, b * sin, out=out[..., first])
        torch.add(b * cos, a * sin, out=out[..., second])
        if rotated_dims < x.shape[-1]:
            out[..., rotated_dims:] = x[..., rotated_dims:]
        return out

    def apply_rotary_backward(self, interleaved: bool, _: object, grad: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        """Return the gradient of x from the gradient of :meth:`apply_rotary`'s result."""
        return (self.apply_rotary(grad.contiguous(), cos, -sin, interleaved),)

    # -- the head and the sampler

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return ``hidden`` [T, in] times the transpose of ``weight`` [V, in]: [T, V], in fp32, or fp64 for fp64. Rows are padded so
        that the product is batch-invariant."""
        padded = pad_rows(hidden, self.min_rows(weight.numel(), weight.shape[1]))
        if hidden.dtype in (torch.float32, torch.float64):
            return F.linear(padded, weight)[: len(hidden)]
        return self.wide_product(padded, weight)[: len(hidden)]

    def logit_statistics(
        self, logits: Tensor, labels: Tensor, first: int, entropy: bool, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        """Return four statistics of ``logits`` [T, V], fp32 or fp64, of the vocabulary from ``first`` on, as [4, T].

        They are the largest logit; the sum of exp(l - largest); the label's logit, or 0 if it lies in another slice; and with
        ``entropy`` the sum of exp(l - largest) * (l - largest), else 0. ``transform``: the logits are the result of
        :meth:`transform_logits`. Overwrites the logits unless ``keeps_logits``."""
        local = labels - first
        is_local = (local >= 0) & (local < logits.shape[1])
        label_logits = logits.gather(1, local.masked_fill(~is_local, 0)[:, None])[:, 0].masked_fill(~is_local, 0)
        maximum = logits.amax(-1)
        shifted = logits.sub_(maximum[:, None])
        exponentials = shifted.exp() if entropy else shifted.exp_()
        total = exponentials.sum(-1)
        weighted = shifted.mul_(exponentials).sum(-1) if entropy else torch.zeros_like(maximum)
        return torch.stack([maximum, total, label_logits, weighted])

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return the gradients of the logits [T, V] of the vocabulary from ``first`` on, and overwrite the logits. ``grads`` [T, 1]:
        gradients of the log-probs of ``labels`` [T]; ``log_z`` [T, 1]: log-sum-exps over the whole vocabulary; ``entropy``: the
        entropies and their gradients, [T, 1] each."""
        local = labels - first
        log_p = logits.sub_(log_z)
        if entropy is None:
            grad = log_p.exp_().neg_().mul_(grads)
        else:
            grad = log_p.exp().neg_()
            grad *= log_p.add_(entropy[0]).mul_(entropy[1]).add_(grads)
        is_local = ((local >= 0) & (local < grad.shape[1]))[:, None]
        return grad.scatter_add_(1, local[:, None].masked_fill(~is_local, 0), grads.masked_fill(~is_local, 0))

    def cap_logits(self, logits: Tensor, softcap: float) -> Tensor:
        """Return softcap * tanh(logits / softcap), written over ``logits``."""
        return logits.div_(softcap).tanh_().mul_(softcap)

    def transform_logits(self, logits: Tensor, transform: LogitTransform) -> Tensor:
        """Return ``logits`` after ``transform``, in place. Subclasses whose head kernels apply it as they read return ``logits``
        unchanged."""
        if transform.softcap is not None:
            logits = self.cap_logits(logits, transform.softcap)
        return logits if transform.temperature == 1.0 else logits.div_(transform.temperature)

    def head_gradients(
        self,
        logits: Tensor,
        labels: Tensor,
        first: int,
        log_z: Tensor,
        grads: Tensor,
        entropy: Sequence[Tensor] | None,
        transform: LogitTransform,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return gradients of the head's matrix product, in ``dtype``. ``logits``: the result of :meth:`transform_logits`."""
        slope = None if transform.softcap is None else 1 - (logits * (transform.temperature / transform.softcap)).square_()
        grad = self.logit_gradients(logits, labels, first, log_z, grads, entropy)
        grad = grad if slope is None else grad.mul_(slope)
        return (grad if transform.temperature == 1.0 else grad.div_(transform.temperature)).to(dtype)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64 [T]: the index of the largest of logits [T, V], the first of equal ones."""
        return logits.argmax(-1)

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor | None:
        """Return token ids int64 [T], the first with cumulative probability above ``uniforms`` fp64 [T]; None: no kernel does."""
        return None
