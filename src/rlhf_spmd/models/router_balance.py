"""How evenly the routers of mixtures spread tokens over experts: metrics, and the loss that asks for it.

The metrics are of all tokens of an optimizer step, those of prompts too. Rows count alike, whether they share their prompt's tokens in
a micro-batch or not.

- ``moe/max_vio``: the largest load of an expert over the mean load, minus 1; the mean over layers (Wang et al., arXiv 2408.15664)
- ``moe/router_entropy``: the entropy of a token's scores over all experts, in nats; the mean over tokens and layers
- ``moe/load_balancing_loss``: the loss below, without its coefficient

The loss of a row and a layer is E * sum_e f_e * P_e. P_e is the mean share of expert e in a token's scores. f_e is the number of the
row's tokens that have e among their K highest scores, divided by the number of tokens; with sigmoid scores also by K. With softmax
scores that is transformers' ``load_balancing_loss_func`` of one row and one layer, and with sigmoid scores the balance loss of
DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20). The loss of a mini-batch is the mean over its rows and layers, so that neither
micro-batches nor layouts change it. A loss over all tokens of a mini-batch would need their counts before the first backward pass.

Shape legend: T tokens of this rank, R rows, E experts, K of which a token takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops, RoutingRule, differentiable, on_device
from rlhf_spmd.kernels.routing import TINY, sigmoid
from rlhf_spmd.models.attention import Copies
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.collectives import Group


def check_balance(spec: ModelSpec, coef: float, trained: bool, where: str) -> None:
    """Raises ValueError if ``coef`` cannot be that of the balance loss of a role, ``trained`` or not. ``where`` names it."""
    if not 0 <= coef < math.inf:
        raise ValueError(f"{where}={coef:g} must be at least 0")
    if coef and not trained:
        raise ValueError(f"{where}={coef:g}: this role is not trained; leave it out")
    if coef and spec.experts is None:
        raise ValueError(f"{where}={coef:g}: models of {spec.family} have no experts; leave it out")


def shares(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Each expert's share in a token's scores, [T, E] from logits [T, E], in fp32 at least; the sum of a token's is 1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if rule.scoring != "sigmoid":
        return torch.softmax(wide, -1)
    scores = sigmoid(wide)
    return scores / (scores.sum(-1, keepdim=True) + TINY)


class RouterBalance:
    """The routers of the layers that this rank trains: their sums since the last :meth:`report`."""

    def __init__(self, spec: ModelSpec, layers: Iterable[int], coef: float, tp: Group, cp: Group, device: torch.device) -> None:
        """``layers``: global indices of this rank's. ``coef``: of the loss."""
        mixtures = {layer: spec.experts_of(layer) for layer in range(spec.num_hidden_layers)}
        self.numbers = {layer: number for number, layer in enumerate(i for i, experts in mixtures.items() if experts)}
        self.coef, self.tp, self.cp, self.device = coef, tp, cp, device
        self.local = [layer for layer in layers if layer in self.numbers]
        self.num_experts, self.per_token = (spec.experts.count, spec.experts.per_token) if spec.experts else (0, 1)
        # of each mixture: tokens by expert, the sum of their entropies, and the loss
        self.sums = torch.zeros(len(self.numbers), self.num_experts + 2, dtype=torch.float64, device=device)

    def begin(self, lengths: Tensor, places: Tensor | None, row_weight: float) -> RouterPass | None:
        """What the routers of one micro-batch's forward pass report to; None without rows or routers.

        ``lengths`` int64 [R] and ``places``: as of ``PackedAttention``. ``row_weight``: by which the loss of each row is multiplied.
        """
        return RouterPass(self, lengths, places, row_weight * self.coef) if self.local and len(lengths) else None

    def report(self, pool: Group) -> dict[str, float]:
        """The metrics, the same on all ranks; {} without mixtures or tokens. Collective over ``pool``: every rank of it must call, in
        program order."""
        if not self.numbers:
            return {}
        sums = self.sums.to("cpu", copy=True) if self.tp.rank == 0 else torch.zeros(self.sums.shape, dtype=torch.float64)
        pool.all_reduce(sums, "control")
        self.sums.zero_()
        loads, entropy, loss = sums[:, :-2], sums[:, -2], sums[:, -1]
        tokens = loads.sum(1) / self.per_token
        if not bool(tokens.all()):
            return {}
        found = {
            "moe/max_vio": float((loads.amax(1) / loads.mean(1) - 1).mean()),
            "moe/router_entropy": float((entropy / tokens).mean()),
        }
        return found | ({"moe/load_balancing_loss": float(loss.mean())} if self.coef else {})


class RouterPass:
    """The routers of one micro-batch. A backward pass that computes a layer again finds it counted."""

    def __init__(self, balance: RouterBalance, lengths: Tensor, places: Tensor | None, weight: float) -> None:
        self._balance, self._weight = balance, weight
        cp = balance.cp
        tokens, row = torch.arange(int(lengths.sum())), torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        if places is not None:
            tokens = places
        if cp.size > 1:
            mine = tokens % cp.size == cp.rank
            tokens, row = tokens[mine] // cp.size, row[mine]
        self._num_tokens = int(tokens.max()) + 1 if len(tokens) else 0
        self._row = on_device(row, balance.device)
        self._lengths = on_device(lengths.double(), balance.device)
        # tokens that several rows share count once in each
        self._copies = None if places is None else Copies(tokens, balance.device)
        times = torch.bincount(tokens, minlength=self._num_tokens).double()
        self._times = on_device(times, balance.device)
        self._counted: set[int] = set()

    def route(
        self, ops: Ops, layer: int, logits: Tensor, correction: Tensor | None, rule: RoutingRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As ``Ops.route``, of a layer by its global index. In the backward pass the logits' gradient gets that of the loss.

        Collective over cp if there is a loss: every rank of it must call, in program order.
        """
        if self._weight:
            logits = self._balanced(layer, logits, rule)
        weights, chosen = ops.route(logits, correction, rule, dtype)
        if layer not in self._counted:
            self._count(layer, logits.detach(), chosen, rule)
        return weights, chosen

    def _count(self, layer: int, logits: Tensor, chosen: Tensor, rule: RoutingRule) -> None:
        self._counted.add(layer)
        sums, tokens = self._balance.sums[self._balance.numbers[layer]], self._num_tokens
        sums.scatter_add_(0, chosen[:tokens].flatten(), self._times[:, None].expand(-1, chosen.shape[1]).flatten())
        entropy = torch.special.entr(shares(logits[:tokens], rule)).sum(-1)
        sums[-2] += (entropy * self._times).sum()

    def _balanced(self, layer: int, logits: Tensor, rule: RoutingRule) -> Tensor:
        """``logits``, whose gradient gets that of the loss; on one tp rank, because a router's gradients are summed over tp."""
        balance, tokens, counts = self._balance, self._num_tokens, layer not in self._counted

        def per_row(x: Tensor) -> Tensor:
            """[T, ...] -> [number of (row, token) pairs here, ...]"""
            return x if self._copies is None else x.index_select(0, self._copies.places)

        def forward(logits: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            scores, num_rows = shares(logits[:tokens], rule), len(self._lengths)
            best = per_row(scores.topk(rule.per_token, -1).indices) + self._row[:, None] * balance.num_experts
            load = scores.new_zeros(num_rows * balance.num_experts)
            load.scatter_add_(0, best.flatten(), torch.ones_like(best, dtype=load.dtype).flatten())
            balance.cp.all_reduce(load, "expert_load")
            norm = balance.num_experts / (rule.per_token if rule.scoring == "sigmoid" else 1)
            factors = load.view(num_rows, -1) * (norm / self._lengths.square()).to(load.dtype)[:, None]
            if counts:
                loss = (per_row(scores).double() * factors[self._row]).sum()
                balance.sums[balance.numbers[layer], -1] += loss * (self._weight / balance.coef)
            return logits.view_as(logits), (logits, factors)

        def backward(_: object, grad: Tensor, logits: Tensor, factors: Tensor) -> tuple[Tensor]:
            if balance.tp.rank:
                return (grad,)
            scores, given = shares(logits[:tokens], rule), factors.index_select(0, self._row)
            given = given if self._copies is None else self._copies.sum(given)
            slope = scores * (given - (given * scores).sum(-1, keepdim=True))
            if rule.scoring == "sigmoid":
                slope = slope * (1 - sigmoid(logits[:tokens].to(slope.dtype)))
            grad = grad.clone()
            grad[:tokens] += slope * (self._weight / len(balance.numbers))
            return (grad,)

        return differentiable(forward, backward, logits)
