"""The arithmetic of a model, one object per device: by torch, on any device, in the form that suits GPUs.

What a model calls is differentiable (``linear`` to ``attend_packed``); the halves that its autograd nodes are made of, and what the
head and the sampler take, are not. :mod:`batch_invariant` and :mod:`cpp_ops` replace what CPUs compute otherwise; a kernel for another
device replaces a method in the same way, and no model changes.

Shape legend: T tokens, H KV heads, G query heads per KV head, D head_dim, V local vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels import expert_rows
from rlhf_spmd.kernels.dense_attention import attend_dense
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.packing import AttentionRule, HeadShape, LayerOptions, Norms, Packing, PageTarget, pad_rows, visible
from rlhf_spmd.kernels.routing import RoutingRule, choose, sigmoid, weigh

GPU_CHUNK_LOGITS = 1 << 28  # of GpuOps: 1 GiB; the weight is read, and sums are added to, once for so many
MIN_ROWS = 4  # fewer rows are multiplied by other kernels, with other rounding
ONEDNN_MIN_SIZE = 16**3  # torch gives products of at most so many multiplications to MKL even where oneDNN is chosen

Groups = Sequence[int] | Tensor  # of rows by expert, see Ops.expert_groups


class LogitShape(NamedTuple):
    """What becomes of a head's logits: softcap * tanh(logits / softcap), where there is a ``softcap``, divided by ``temperature``."""

    temperature: float = 1.0
    softcap: float | None = None


class Ops:
    """The operations of a model on one kind of device, in torch. Subclasses replace some of them by kernels.

    - name: the attention's name in ``models.<role>.attention``.
    - joins_layers: :meth:`layer` can run the attention over packed sequences as one of its steps.
    - chunk_logits: the most logits that the head computes at once.
    - backward_rows: the most rows of a chunk in the head's backward pass.
    - small_head: up to this many logits, the head's backward pass computes a chunk of rows over the whole vocabulary.
    - keeps_logits: such a chunk's logits are kept from the forward pass and not computed again.
    - head_columns: larger chunks are cut into blocks of the vocabulary, whose width is a multiple of this.
    - alike_chunks: paged attention gives a prompt's tokens the same bits in one chunk and one by one.
    - wide_head: the products of the head's backward pass are in fp32 for half-precision weights too.
    """

    name, joins_layers, alike_chunks = "torch", False, False
    chunk_logits, backward_rows = 1 << 26, 1 << 13
    small_head, keeps_logits, wide_head, head_columns = 1 << 23, False, False, 1

    def min_rows(self, numel: int, inner: int) -> int:
        """The fewest rows with which x @ w is batch-invariant. ``numel``: elements of w, with its batch; ``inner``: columns of x."""
        return max(MIN_ROWS, ONEDNN_MIN_SIZE // max(numel, 1) + 1)

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        """True if a row's bits do not depend on the rest of the batch on this device."""
        return False

    @staticmethod
    def page_elements(page_size: int, head_dim: int) -> int:
        """Elements of one page of one head in the KV cache, keys or values."""
        return page_size * head_dim

    # -- differentiable

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
        """x [T, in] times the transpose of ``weight`` [out, in], plus ``bias``: with at least :meth:`min_rows` rows a row's bits do
        not depend on the others. ``recomputed``: only what the backward pass needs is wanted, the result need not be there."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last dim; ``plus_one``: (1 + weight) * ..."""
        if not torch.is_grad_enabled():  # before the halves are made: decoding has no host time to spare
            return self.norm(x, weight, eps, plus_one)[0]

        def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out, scale = self.norm(x, weight, eps, plus_one)
            return out, (x, weight, scale)

        return differentiable(forward, partial(self.norm_backward, plus_one), x, weight)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> tuple[Tensor, Tensor]:
        """x + y, and :meth:`rms_norm` of it."""
        total = x + y
        return total, self.rms_norm(total, weight, eps, plus_one)

    def heads(self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) * D] -> q [T, Hq, D], k and v [T, Hkv, D]; q and k normed where there are weights for it in ``norms``,
        then rotated by cos and sin [T, 1, D / 2], or fewer: of the first dims alone."""
        queries, keys, dim = shape.queries, shape.keys, shape.dim
        per_head = qkv.view(qkv.shape[0], queries + 2 * keys, dim)
        if shape.blocks > 1:
            blocks = per_head.view(qkv.shape[0], shape.blocks, -1, dim)
            parts = blocks.split([n // shape.blocks for n in (queries, keys, keys)], 2)
            per_head = torch.cat([part.flatten(1, 2) for part in parts], 1)
        of_q, of_k = norms
        if of_q is None or of_k is None:
            qk, v = per_head.split([queries + keys, keys], 1)
            q, k = self.rotate(qk, cos, sin, shape.interleaved).split([queries, keys], 1)
            return q, k, v
        q, k, v = per_head.split([queries, keys, keys], 1)
        q, k = (
            self.rotate(self.rms_norm(x, weight, shape.eps, shape.plus_one), cos, sin, shape.interleaved)
            for x, weight in ((q, of_q), (k, of_k))
        )
        return q, k, v

    def heads_to_pages(
        self,
        qkv: Tensor,
        norms: Norms,
        cos: Tensor,
        sin: Tensor,
        shape: HeadShape,
        pages: PageTarget,
    ) -> Tensor:
        """q of :meth:`heads`, without gradients; k and v of the first tokens, as many as have slots, go to ``pages``."""
        q, k, v = self.heads(qkv, norms, cos, sin, shape)
        for block, x in zip(pages.pages.view(2, shape.keys, -1, shape.dim), (k, v), strict=True):
            block.index_copy_(1, pages.slots, x[: len(pages.slots)].transpose(0, 1))
        return q

    def gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        """[T, 2n] = [gate; up] -> silu(gate) * up [T, n], or gelu(gate) * up, gelu in its tanh form."""
        if not torch.is_grad_enabled():
            return self.gate(gate_up, gelu)
        return differentiable(lambda x: (self.gate(x, gelu), [x]), partial(self.gate_backward, gelu), gate_up)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        """Rotary embedding of x [T, heads, D] in half-split form, or of neighbours; cos and sin [T, 1, D / 2], or fewer: of the first
        dims alone."""
        if not cos.shape[-1]:
            return x
        if not torch.is_grad_enabled():
            return self.turn(x, cos, sin, interleaved)
        backward = partial(self.turn_backward, interleaved)
        return differentiable(lambda x: (self.turn(x, cos, sin, interleaved), (cos, sin)), backward, x)

    def route(self, logits: Tensor, correction: Tensor | None, rule: RoutingRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights in ``dtype`` and numbers, int64, of the experts of each token [T, K], from logits [T, E]. ``correction`` [E, 3], see
        :func:`~rlhf_spmd.kernels.routing.as_parts`, has no gradient. Computed in fp32 at least."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = choose(wide, correction, rule)
        return weigh(wide, chosen, rule).to(dtype), chosen

    def sigmoid_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        """The sigmoid of x [T, in] times the transpose of ``weight`` [1, in] -> [T, 1]."""
        wide = torch.promote_types(x.dtype, torch.float32)  # a sum: no product with one column is exact on CPUs
        return sigmoid((x.to(wide) * weight.to(wide)).sum(-1, keepdim=True)).to(x.dtype)

    def expert_groups(self, experts: Tensor, count: int) -> Groups:
        """What :meth:`per_expert` is told of the rows of ``count`` experts: here how many each has, as numbers on the host. ``experts``
        [N]: of each row, sorted."""
        return torch.bincount(experts, minlength=count).tolist()

    def waits_for_experts(self, weight: Tensor) -> bool:
        """Whether :meth:`per_expert` with ``weight`` [E, blocks, out, in] lets the host wait for the device."""
        return True

    def per_expert(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """x [N, in], rows of each expert in turn, times that expert's matrix [blocks, out, in] -> [N, blocks * out]. ``groups``:
        :meth:`expert_groups`."""
        assert not isinstance(groups, Tensor), "rows of experts are counted on the host here"
        halves = partial(expert_rows.multiply, self, groups), partial(expert_rows.multiply_backward, self, groups)
        return differentiable(*halves, x, weight)

    def add_expert_bias(self, rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
        """``rows`` [N, m] plus the ``bias`` [E, m] of the expert of each, ``experts`` [N]."""
        return differentiable(expert_rows.add_bias, expert_rows.add_bias_backward, rows, bias, experts)

    def clamped_gate(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """[T, 2n] = [gate; up] -> gate * sigmoid(alpha * gate) * (up + 1) [T, n], gate at most ``limit``, up within it (gpt-oss)."""
        return expert_rows.clamped_gate(gate_up, alpha, limit)

    def expert_rows(self, x: Tensor, order: Tensor, places: Tensor, per_token: int) -> Tensor:
        """x [T, hidden] -> a row of each token for each of its experts, by expert [T * per_token, hidden]. Row i belongs to the pair
        ``order[i]`` of token and choice; pair j lies at ``places[j]``."""
        copies = x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1])
        return copies.index_select(0, order)  # not x[order // per_token]: its backward pass would add in no fixed order on GPUs

    def sum_experts(self, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """Add up each token's rows, which lie as :meth:`expert_rows` has them, times ``weights`` [T, per_token] -> [T, hidden]. The
        order is that of the token's own choices."""
        parts = rows.index_select(0, places).view(*weights.shape, rows.shape[1]) * weights[:, :, None]
        total, *others = parts.unbind(1)
        for part in others:
            total = total + part
        return total

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, allowed: Tensor) -> Tensor:
        """Rows q over keys k and values v [B, H, L, D] -> as q, for generation, without gradients. ``allowed`` (bool, broadcasts to the
        scores): which keys a row sees, the rule's window included."""
        return attend_dense(q, k, v, rule, allowed, rule.sinks_of_rows(q.shape[1], q.shape[2]))

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        """Causal attention within each sequence: q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]."""
        outs, sinks = [], None if rule.sinks is None else rule.sinks[None, :, None, None]
        for part in packing.alike(q.shape[1], math.inf):
            queries, keys, values = (part.gather(x).transpose(1, 2) for x in (q, k, v))
            at = torch.arange(part.num_queries, device=q.device)
            reached = rule.window is not None and part.num_queries > rule.window
            allowed = visible(at, at, rule.window) if reached else None
            mixed = attend_dense(queries, keys, values, rule, allowed, sinks).transpose(1, 2)
            outs.append(part.picked(mixed))
        return torch.cat(outs).index_select(0, packing.places(q.shape[1], math.inf)) if outs else torch.zeros_like(q)

    def layer(
        self, parts: Sequence[Any], sizes: Sequence[int], options: LayerOptions, rule: AttentionRule, index: int
    ) -> Callable[..., Tensor | None] | None:
        """A whole layer on one rank as one function, with the bits of its operations and without gradients: of x [R, hidden], cos,
        sin, the attention and the number of tokens -> [R, hidden], or None where the attention is another one. None: there is none.

        ``parts`` have a weight and a bias, or are None: norm, qkv, norms of q and k, out, norm, norm, gate_up, down, norm. ``sizes``:
        query heads, KV heads, head_dim, inner; ``index``: the attention's name for the layer.
        """
        return None

    # -- in place

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        """``out`` [n, m] += ``scale`` * ``left`` [n, k] times ``right`` [k, m], summed in fp32 at least and rounded once."""
        out.addmm_(left, right, alpha=scale)

    # -- halves of the above

    def norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        """The norm and its scales [..., 1], in fp32 for bf16."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if plus_one:
            return (wide * scale * (1 + weight.to(wide.dtype))).to(x.dtype), scale
        return weight * (wide * scale).to(x.dtype), scale

    def norm_backward(
        self, plus_one: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the weight from that of :meth:`norm`'s first result, its inputs and the scales."""
        normal, grad = x.to(scale.dtype) * scale, grad.to(scale.dtype)
        grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_normal = grad * (1 + weight.to(grad.dtype) if plus_one else weight)
        along = (grad_normal * normal).mean(-1, keepdim=True)
        return grad_normal.addcmul_(normal, along, value=-1).mul_(scale).to(x.dtype), grad_weight

    def gate(self, gate_up: Tensor, gelu: bool) -> Tensor:
        # views with gaps: contiguous silu gives a tensor's last elements another rounding on CPUs; of these all rows end alike
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)

    def gate_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        """The gradient of [gate; up] from that of :meth:`gate`'s result."""
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.mul(grad, up, out=grad_gate)
        aten = torch.ops.aten  # with their results in place: copies of such matrices cost as much as the arithmetic
        if gelu:
            aten.gelu.out(gate, approximate="tanh", out=grad_up)
            aten.gelu_backward.grad_input(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        else:
            aten.silu.out(gate, out=grad_up)
            aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        grad_up.mul_(grad)
        return (grads,)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        out, turned = torch.empty_like(x), 2 * cos.shape[-1]
        first = slice(0, turned, 2) if interleaved else slice(turned // 2)
        second = slice(1, turned, 2) if interleaved else slice(turned // 2, turned)
        a, b = x[..., first], x[..., second]
        # no addcmul: it may fuse the rounding on some elements and not on others
        torch.sub(a * cos, b * sin, out=out[..., first])
        torch.add(b * cos, a * sin, out=out[..., second])
        if turned < x.shape[-1]:
            out[..., turned:] = x[..., turned:]
        return out

    def turn_backward(self, interleaved: bool, _: object, grad: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        return (self.turn(grad.contiguous(), cos, -sin, interleaved),)

    def gradient_product(self, left: Tensor, right: Tensor) -> Tensor:
        """left [n, k] times right [k, m], where bits may depend on the number of rows."""
        return torch.mm(left, right)

    # -- the head and the sampler

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [T, in] times the transpose of ``weight`` [V, in], in fp32 (fp64 for fp64), in enough rows to be exact."""
        padded = pad_rows(hidden, self.min_rows(weight.numel(), weight.shape[1]))
        if hidden.dtype in (torch.float32, torch.float64):
            return F.linear(padded, weight)[: len(hidden)]
        return self.wide_product(padded, weight)[: len(hidden)]

    def wide_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, in] times the transpose of ``weight`` [out, in], both in half precision -> fp32 [T, out]."""
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def logit_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
        """fp32 or fp64 logits [T, V] of the vocabulary from ``first`` on -> [4, T]: largest, sum of exp(l - largest), the label's
        logit (0 where it lies elsewhere), and with ``entropy`` the sum of exp(l - largest) * (l - largest), else 0. Overwrites
        the logits unless ``keeps_logits``."""
        local = labels - first
        inside = (local >= 0) & (local < logits.shape[1])
        at_label = logits.gather(1, local.masked_fill(~inside, 0)[:, None])[:, 0].masked_fill(~inside, 0)
        maximum = logits.amax(-1)
        shifted = logits.sub_(maximum[:, None])
        exponentials = shifted.exp() if entropy else shifted.exp_()
        total = exponentials.sum(-1)
        weighted = shifted.mul_(exponentials).sum(-1) if entropy else torch.zeros_like(maximum)
        return torch.stack([maximum, total, at_label, weighted])

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Gradients of log-probs of ``labels`` [T] times ``grads`` [T, 1] in the logits [T, V] of the vocabulary from ``first`` on,
        which are overwritten. ``log_z`` [T, 1]: log-sum-exps over the whole vocabulary; ``entropy``: the entropies and their
        gradients, [T, 1] each."""
        local = labels - first
        log_p = logits.sub_(log_z)
        if entropy is None:
            grad = log_p.exp_().neg_().mul_(grads)
        else:
            grad = log_p.exp().neg_()
            grad *= log_p.add_(entropy[0]).mul_(entropy[1]).add_(grads)
        inside = ((local >= 0) & (local < grad.shape[1]))[:, None]
        return grad.scatter_add_(1, local[:, None].masked_fill(~inside, 0), grads.masked_fill(~inside, 0))

    def cap_logits(self, logits: Tensor, softcap: float) -> Tensor:
        """``logits``, overwritten with softcap * tanh(logits / softcap)."""
        return logits.div_(softcap).tanh_().mul_(softcap)

    def shape_logits(self, logits: Tensor, shape: LogitShape) -> Tensor:
        """``logits``, overwritten with their ``shape``; unless the statistics and gradients of the head make it as they read them."""
        if shape.softcap is not None:
            logits = self.cap_logits(logits, shape.softcap)
        return logits if shape.temperature == 1.0 else logits.div_(shape.temperature)

    def head_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool, shape: LogitShape) -> Tensor:
        """:meth:`logit_statistics` of what :meth:`shape_logits` gave."""
        return self.logit_statistics(logits, labels, first, entropy)

    def head_gradients(
        self,
        logits: Tensor,
        labels: Tensor,
        first: int,
        log_z: Tensor,
        grads: Tensor,
        entropy: Sequence[Tensor] | None,
        shape: LogitShape,
        dtype: torch.dtype,
    ) -> Tensor:
        """:meth:`logit_gradients` of what :meth:`shape_logits` gave, as gradients of the head's product, in ``dtype``."""
        slope = None if shape.softcap is None else 1 - (logits * (shape.temperature / shape.softcap)).square_()
        grad = self.logit_gradients(logits, labels, first, log_z, grads, entropy)
        grad = grad if slope is None else grad.mul_(slope)
        return (grad if shape.temperature == 1.0 else grad.div_(shape.temperature)).to(dtype)

    def sum_product(self, total: Tensor, a: Tensor, b: Tensor, begins: bool) -> None:
        """``total`` [n, m] += a [n, k] times b [k, m], or where it ``begins``, the product alone. ``total`` may have a wider dtype, to
        which the product is not rounded on its way."""
        if begins:
            total.zero_()
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total += self.wide_product(a, b.t())

    def argmax(self, logits: Tensor) -> Tensor:
        """Where the largest of logits [T, V] is, the first of equal ones: int64 [T]."""
        return logits.argmax(-1)

    def draw(self, logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor | None:
        """Token ids int64 [T] from logits [T, V]: the first whose cumulative probability exceeds ``uniforms`` fp64 [T]. None: not
        by one kernel here."""
        return None
