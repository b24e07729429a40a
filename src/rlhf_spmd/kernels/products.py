"""Matrix products in torch, on any device, and what a mixture of experts needs around its own.

Shape legend: T tokens, K experts of each, N = T * K rows sorted by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.kernels.routing import RoutingRule, choose, sigmoid, weigh

MIN_ROWS = 4  # fewer rows are multiplied by other kernels, with other rounding
ONEDNN_MIN_SIZE = 16**3  # torch gives products of at most so many multiplications to MKL even where oneDNN is chosen
Groups = Sequence[int] | Tensor  # the rows of each expert, see ProductOps.expert_groups


class ProductOps:
    """The part of :class:`~rlhf_spmd.kernels.ops.Ops` that multiplies by weights."""

    def min_rows(self, numel: int, inner: int) -> int:
        """Return the fewest rows with which x @ w is batch-invariant. ``numel``: elements of all w; ``inner``: columns of x."""
        return max(MIN_ROWS, ONEDNN_MIN_SIZE // max(numel, 1) + 1)

    def is_batch_invariant(self, dtype: torch.dtype, threads: int = 1) -> bool:
        """Return True if a row's bits do not depend on the rest of the batch on this device."""
        return False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
        """Return ``x`` [T, in] times the transpose of ``weight`` [out, in], plus ``bias``: [T, out].

        With at least :meth:`min_rows` rows a row's bits do not depend on the others.

        ``recomputed``: only the tensors saved for the backward pass are needed; the result may be left uninitialised.
        """
        return F.linear(x, weight, bias)

    def _linear_by(
        self, product: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, recomputed: bool
    ) -> Tensor:
        """Return :meth:`linear`, computed by ``product(x, weight, bias)``."""
        if not torch.is_grad_enabled():
            return product(x, weight, bias)

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
            return x.new_empty(len(x), len(weight)) if recomputed else product(x, weight, bias), (x, weight)

        return differentiable(forward, self._linear_backward, x, weight, bias)

    def _linear_backward(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_x = self.gradient_product(grad, weight) if needed[0] else None
        grad_weight = self.gradient_product(grad.t(), x) if needed[1] else None
        grad_bias = grad.sum(0) if needed[2] else None
        return grad_x, grad_weight, grad_bias

    def gradient_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left`` [n, k] times ``right`` [k, m]. Bits may depend on the number of rows."""
        return torch.mm(left, right)

    def wide_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x`` [T, in] times the transpose of ``weight`` [out, in], both in half precision, as fp32 [T, out]."""
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def add_product(self, out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        """Add ``scale`` * ``left`` [n, k] times ``right`` [k, m] to ``out`` [n, m], summed in fp32 at least and rounded once."""
        out.addmm_(left, right, alpha=scale)

    def sum_product(self, total: Tensor, a: Tensor, b: Tensor, begins: bool) -> None:
        """Add ``a`` [n, k] times ``b`` [k, m] to ``total`` [n, m], or set ``total`` to the product if ``begins``. ``total`` may have a
        wider dtype; the product is not rounded before it is added."""
        if begins:
            total.zero_()
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total += self.wide_product(a, b.t())

    # -- a mixture of experts

    def route(
        self, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype, expert_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights in ``dtype`` and the ids, int64, of each token's experts: [T, K] each, from ``logits`` [T, E].

        Computes in fp32 at least. ``score_bias`` [E, 3], see :func:`~rlhf_spmd.kernels.routing.split_to_bf16_terms`, has no gradient.
        ``expert_ids``: the ids where experts were chosen before; None: the router chooses."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        expert_ids = choose(wide, score_bias, rule) if expert_ids is None else expert_ids
        return weigh(wide, expert_ids, rule).to(dtype), expert_ids

    def local_choices(
        self, weights: Tensor, expert_ids: Tensor, first: int, num_local: int, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """Return ``weights`` and ``expert_ids`` [T, K] as a rank with some of the experts needs them, without gradients.

        The rank has ``num_local`` experts from the ``first`` on. The weights of others become 0. Local ids count from ``first``,
        in a circle."""
        local_ids = (expert_ids - first) % num_experts
        return weights.masked_fill(local_ids >= num_local, 0.0), local_ids

    def sort_choices(self, expert_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``expert_ids`` [T, K] sorted, and ``pair_of_row`` and ``row_of_pair`` of :meth:`expert_rows`: [T * K] each."""
        sorted_ids, pair_of_row = expert_ids.flatten().sort(stable=True)
        rows = torch.arange(len(pair_of_row), device=pair_of_row.device)
        return sorted_ids, pair_of_row, torch.empty_like(pair_of_row).scatter_(0, pair_of_row, rows)

    def sigmoid_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sigmoid of ``x`` [T, in] times the transpose of ``weight`` [1, in]: [T, 1]."""
        wide = torch.promote_types(x.dtype, torch.float32)  # a sum: no product with one column is exact on CPUs
        return sigmoid((x.to(wide) * weight.to(wide)).sum(-1, keepdim=True)).to(x.dtype)

    def expert_groups(self, experts: Tensor, count: int) -> Groups:
        """Return ``groups`` of :meth:`per_expert`: here each expert's number of rows. ``experts`` [N], sorted: each row's, or
        ``count`` and above."""
        return torch.bincount(experts, minlength=count)[:count].tolist()

    def moe_syncs_host(self, weight: Tensor) -> bool:
        """Return True if :meth:`per_expert` with ``weight`` [E, blocks, out, in] makes the host wait for the device."""
        return True

    def per_expert(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """Return each row of ``x`` [N, in] times the matrix [blocks, out, in] of its expert: [N, blocks * out]. Rows are sorted by
        expert. ``weight``: [E, blocks, out, in]. ``groups``: from :meth:`expert_groups`."""
        assert not isinstance(groups, Tensor), "rows of experts are counted on the host here"
        return differentiable(partial(self._multiply, groups), partial(self._multiply_backward, groups), x, weight)

    def _multiply(self, counts: Sequence[int], x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        out = x.new_empty(len(x), weight.shape[1] * weight.shape[2])
        min_rows = self.min_rows(weight[0].numel(), weight.shape[-1])
        for expert, rows in _ranges(counts):
            matrix = weight[expert].flatten(0, 1)  # a copy only if there are several blocks
            out[rows] = self.linear(pad_rows(x[rows], min_rows), matrix)[: rows.stop - rows.start]
        return out, (x, weight)

    def _multiply_backward(
        self, counts: Sequence[int], _: object, grad: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in _ranges(counts):
            grad_x[rows] = self.gradient_product(grad[rows], weight[expert].flatten(0, 1))
            grad_weight[expert] = self.gradient_product(grad[rows].t(), x[rows]).view(weight.shape[1:])
        return grad_x, grad_weight

    def add_expert_bias(self, rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
        """Return ``rows`` [N, m], each plus the ``bias`` [E, m] of its expert. ``experts``: [N]."""

        def forward(rows: Tensor, bias: Tensor, experts: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            return rows + bias.index_select(0, experts), (bias, experts)

        def backward(_: object, grad: Tensor, bias: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, None]:
            # by a product, which adds in a fixed order, unlike additions by index on GPUs
            numbers = torch.arange(len(bias), device=bias.device)
            return grad, torch.mm((experts == numbers[:, None]).to(grad.dtype), grad), None

        return differentiable(forward, backward, rows, bias, experts)

    def clamped_gate(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Return gate * sigmoid(alpha * gate) * (up + 1) [T, n] of ``gate_up`` [T, 2n] = [gate; up], as in gpt-oss. The gate is cut at
        ``limit``, up at -``limit`` and ``limit``."""
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return gate * sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)

    def expert_rows(self, x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor, per_token: int) -> Tensor:
        """Return a copy of a token's row of ``x`` [T, hidden] for each of its experts, sorted by expert: [T * per_token, hidden].

        Pairs (token, choice) are numbered by token. Row i of the result belongs to pair ``pair_of_row[i]``; pair j lies in row
        ``row_of_pair[j]``."""
        copies = x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1])
        # not x[pair_of_row // per_token]: its backward pass would add in no fixed order on GPUs
        return copies.index_select(0, pair_of_row)

    def sum_experts(self, rows: Tensor, weights: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        """Return for each token the sum of its ``rows`` times ``weights`` [T, per_token]: [T, hidden]. Rows are sorted as by
        :meth:`expert_rows`, and added in the order of the token's choices. GPUs do not read rows of weight 0."""
        parts = rows.index_select(0, row_of_pair).view(*weights.shape, rows.shape[1]) * weights[:, :, None]
        total, *others = parts.unbind(1)
        for part in others:
            total = total + part
        return total


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
