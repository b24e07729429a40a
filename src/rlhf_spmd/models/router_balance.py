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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.kernels import Ops, RoutingRule, differentiable, on_device
from rlhf_spmd.kernels.routing import TINY
from rlhf_spmd.models.attention import Copies
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.collectives import Group


@dataclass(frozen=True)
class BalanceLoss:
    """The balance loss of a role, trained or not."""

    router_aux_loss_coef: float
    spec: ModelSpec
    trained: bool


BALANCE_RULES: Rules = (
    Rule(
        ("router_aux_loss_coef",),
        lambda s: s.router_aux_loss_coef > 0 and not s.trained,
        "this role is not trained",
        "leave it out",
    ),
    Rule(
        ("router_aux_loss_coef",),
        lambda s: s.router_aux_loss_coef > 0 and s.spec.experts is None,
        "models of {s.spec.family} have no experts",
        "leave it out",
    ),
)


def mixture_numbers(spec: ModelSpec) -> dict[int, int]:
    """Return the number, among the mixtures of the model, of each layer that has one."""
    layers = (layer for layer in range(spec.num_hidden_layers) if spec.experts_at(layer) is not None)
    return {layer: number for number, layer in enumerate(layers)}


def score_shares(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return each expert's share in a token's scores, [T, E], from logits [T, E], in fp32 at least. A token's shares sum to 1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if rule.scoring != "sigmoid":
        return torch.softmax(wide, -1)
    scores = torch.sigmoid(wide)
    return scores / (scores.sum(-1, keepdim=True) + TINY)


class RouterBalance:
    """The routers of the layers that this rank trains: their sums since the last :meth:`report`."""

    def __init__(self, spec: ModelSpec, layers: Iterable[int], coef: float, tp: Group, cp: Group, device: torch.device) -> None:
        """``layers``: global indices of this rank's layers. ``coef``: the coefficient of the loss."""
        self.numbers = mixture_numbers(spec)
        self.coef = coef
        self.tp, self.cp = tp, cp
        self.device = device
        self.local = [layer for layer in layers if layer in self.numbers]
        self.num_experts, self.experts_per_token = (
            (spec.experts.num_experts, spec.experts.experts_per_token) if spec.experts else (0, 1)
        )
        # a row for each mixture: tokens by expert, the sum of their entropies, and the loss
        self.sums = torch.zeros(len(self.numbers), self.num_experts + 2, dtype=torch.float64, device=device)

    def begin(
        self, lengths: Tensor, token_index: Tensor | None, row_weight: float, chosen: Tensor | None = None, counts: bool = True
    ) -> RouterPass | None:
        """Return what the routers of one micro-batch's forward pass report to; None without rows or routers.

        ``lengths`` int64 [R] and ``token_index``: as of ``PackedAttention``. ``row_weight``: factor of the loss of each row.
        ``chosen`` [sum(lengths), mixtures of the model, K] on the CPU: the ids of the experts that each token of the rows must take.
        ``counts``: whether :meth:`report` counts the tokens.
        """
        options = row_weight * self.coef, chosen, counts
        return RouterPass(self, lengths, token_index, *options) if self.local and len(lengths) else None

    def report(self, pool: Group) -> dict[str, float]:
        """Return the metrics, equal on all ranks; {} without mixtures or tokens. Collective over ``pool``: every rank of it must
        call, in program order."""
        if not self.numbers:
            return {}
        sums = self.sums.to("cpu", copy=True) if self.tp.rank == 0 else torch.zeros(self.sums.shape, dtype=torch.float64)
        pool.all_reduce(sums, "control")
        self.sums.zero_()
        loads, entropy, loss = sums[:, :-2], sums[:, -2], sums[:, -1]
        tokens = loads.sum(1) / self.experts_per_token
        if not bool(tokens.all()):
            return {}
        metrics = {
            "moe/max_vio": float((loads.amax(1) / loads.mean(1) - 1).mean()),
            "moe/router_entropy": float((entropy / tokens).mean()),
        }
        return metrics | ({"moe/load_balancing_loss": float(loss.mean())} if self.coef else {})


class Routers(Protocol):
    """How the routers of a forward pass choose experts."""

    def route(
        self, ops: Ops, layer: int, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return weights and experts as ``Ops.route`` does, of a layer by its global index."""


class RouterPass:
    """The routers of one micro-batch. A backward pass that computes a layer again finds it counted."""

    def __init__(
        self,
        balance: RouterBalance,
        lengths: Tensor,
        token_index: Tensor | None,
        weight: float,
        chosen: Tensor | None = None,
        counts: bool = True,
    ) -> None:
        self._balance = balance
        self._weight = weight
        cp = balance.cp
        tokens = torch.arange(int(lengths.sum())) if token_index is None else token_index
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        if cp.size > 1:
            on_this_rank = tokens % cp.size == cp.rank
            tokens, row = tokens[on_this_rank] // cp.size, row[on_this_rank]
            chosen = None if chosen is None else chosen[on_this_rank]
        self._num_tokens = int(tokens.max()) + 1 if len(tokens) else 0
        self._counted: set[int] = set() if counts else set(balance.local)
        # tokens that several rows share count once in each
        self._copies = None if token_index is None else Copies(tokens, balance.device)
        row_counts = torch.bincount(tokens, minlength=self._num_tokens).double()
        self._row_counts = on_device(row_counts.repeat_interleave(balance.experts_per_token), balance.device)  # for each choice
        self._chosen: Tensor | None = None
        if chosen is not None:
            local = on_device(chosen[:, [balance.numbers[layer] for layer in balance.local]], balance.device)
            self._chosen = local if self._copies is None else local.index_select(0, self._copies.firsts)
        if weight:
            self._row = on_device(row, balance.device)
            self._norm = on_device(balance.num_experts / lengths.double().square()[:, None], balance.device)

    def route(
        self, ops: Ops, layer: int, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return weights and experts of a layer by its global index. In the backward pass the logits' gradient gets that of the loss.

        Collective over cp if there is a loss: every rank of it must call, in program order.
        """
        counts = layer not in self._counted
        if counts or self._weight:
            scores = score_shares(logits[: self._num_tokens].detach(), rule)
        if self._weight:
            logits = self._balanced(layer, logits, scores, rule)
        weights, chosen = ops.route(logits, score_bias, rule, dtype, self._prescribed(layer, logits))
        if counts:
            self._count(layer, scores, chosen)
        return weights, chosen

    def _prescribed(self, layer: int, logits: Tensor) -> Tensor | None:
        """Return the experts that each row of the logits has to take, padding included; None where routers choose."""
        if self._chosen is None:
            return None
        experts = self._chosen[:, self._balance.local.index(layer)].long()
        padding = torch.arange(experts.shape[1], device=experts.device).expand(len(logits) - len(experts), -1)
        return torch.cat([experts, padding])

    def _count(self, layer: int, scores: Tensor, chosen: Tensor) -> None:
        self._counted.add(layer)
        sums = self._balance.sums[self._balance.numbers[layer]]
        entropy = torch.special.entr(scores)
        sums.scatter_add_(0, chosen[: self._num_tokens].flatten(), self._row_counts)
        if self._copies is not None:
            entropy = entropy * self._row_counts[:: chosen.shape[1], None]
        sums[-2] += entropy.sum(dtype=torch.float64)

    def _balanced(self, layer: int, logits: Tensor, scores: Tensor, rule: RoutingRule) -> Tensor:
        """Return ``logits``; the backward pass adds the loss's gradient to theirs, on one tp rank alone, because a router's
        gradients are summed over tp."""
        factors = self._factors(scores, rule)
        if layer not in self._counted:
            loss = (self._by_row_tokens(scores) * factors.index_select(0, self._row)).sum(dtype=torch.float64)
            self._balance.sums[self._balance.numbers[layer], -1] += loss * (self._weight / self._balance.coef)
        if self._balance.tp.rank:
            return logits
        tokens = self._num_tokens
        weight = self._weight / len(self._balance.numbers)

        def backward(_: object, grad: Tensor, logits: Tensor, factors: Tensor) -> tuple[Tensor]:
            scores = score_shares(logits[:tokens], rule)
            row_factors = factors.index_select(0, self._row)
            row_factors = row_factors if self._copies is None else self._copies.sum(row_factors)
            slope = scores * (row_factors - (row_factors * scores).sum(-1, keepdim=True))
            if rule.scoring == "sigmoid":
                slope = slope * torch.sigmoid(-logits[:tokens].to(slope.dtype))
            grad = grad.clone()
            grad[:tokens].add_(slope, alpha=weight)
            return (grad,)

        return differentiable(lambda x: (x.view_as(x), (x, factors)), backward, logits)

    def _factors(self, scores: Tensor, rule: RoutingRule) -> Tensor:
        """Return the factors [R, E] of the shares in the loss of each row: E * f / number of tokens."""
        experts = self._balance.num_experts
        best = self._by_row_tokens(scores.topk(rule.experts_per_token, -1).indices) + self._row[:, None] * experts
        load = torch.zeros(len(self._norm) * experts, dtype=torch.float64, device=scores.device)
        load.scatter_add_(0, best.flatten(), torch.ones_like(best, dtype=load.dtype).flatten())
        self._balance.cp.all_reduce(load, "expert_load")
        factors = load.view(-1, experts) * self._norm
        return (factors / rule.experts_per_token if rule.scoring == "sigmoid" else factors).to(scores.dtype)

    def _by_row_tokens(self, x: Tensor) -> Tensor:
        """Return the entries [N, ...] of ``x`` [T, ...] for each row's tokens on this rank, one row after the other."""
        return x if self._copies is None else x.index_select(0, self._copies.token_index)
