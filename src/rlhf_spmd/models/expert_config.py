"""What a mixture of experts is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_spmd.kernels import RoutingRule

SCORE_BIAS, SCALAR = "score_bias", "scalar"  # the parameters of a layer that no optimizer changes
# every tp rank has them whole, beside its slices of the others: their gradients are sums over tp
WHOLE = ("router", "shared_gate", "router_bias", "down_bias")

BY_EXPERT = ("gate_up", "down", "gate_up_bias", "down_bias")  # those whose rows are of one expert after the other


def is_fixed(name: str) -> bool:
    """Returns True for a parameter of the decoder that no optimizer changes."""
    return name.endswith((f".{SCORE_BIAS}.weight", f".{SCALAR}.weight"))


@dataclass(frozen=True)
class Experts:
    """The mixture that replaces the MLP in every layer but ``dense_layers``.

    - count, per_token, intermediate_size: experts, how many of them a token takes, and columns of each
    - normalise, scoring, scale, groups, top_groups, group_best: how a token chooses them, see :class:`~rlhf_spmd.kernels.RoutingRule`
    - score_biased: the router adds a bias to the scores by which it chooses; gradients do not change it
    - shared_size: columns of an MLP beside the experts, which every token takes. shared_gate: its output is multiplied by the sigmoid
      of one more product
    - wide_router: half-precision models compute the router's logits in fp32
    - biased: router and experts have biases
    - clamp: alpha and limit of the experts' gate, see :meth:`~rlhf_spmd.kernels.Ops.clamped_gate`
    - fused: files have the matrices of all experts in one tensor, transposed
    - stacked: files may have them in one tensor [E, out, in], gates above the others; exports do not
    """

    count: int
    per_token: int
    intermediate_size: int
    normalise: bool
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: Literal[1, 2] = 2
    score_biased: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    wide_router: bool = False
    biased: bool = False
    clamp: tuple[float, float] | None = None
    fused: bool = False
    stacked: bool = False

    @property
    def rule(self) -> RoutingRule:
        grouped = self.groups, self.top_groups, self.group_best
        return RoutingRule(self.per_token, self.scoring, self.normalise, self.scale, *grouped)

    @property
    def number_dtype(self) -> torch.dtype:
        """The smallest that can number the experts."""
        return torch.uint8 if self.count <= 256 else torch.int16

    @property
    def width(self) -> int:
        """Columns of the experts that a token takes, the shared one among them."""
        return self.per_token * self.intermediate_size + self.shared_size

    @property
    def routers(self) -> int:
        """Rows of its matrices that give one number each: of the router and of the shared expert's gate."""
        return self.count + self.shared_gate

    @property
    def matrices(self) -> tuple[str, ...]:
        """The parameters of a layer's mixture."""
        shared = ("shared_gate_up", "shared_down") if self.shared_size else ()
        biases = ("router_bias", "gate_up_bias", "down_bias") if self.biased else ()
        return (
            "router",
            "gate_up",
            "down",
            *biases,
            *(SCORE_BIAS,) * self.score_biased,
            *shared,
            *("shared_gate",) * self.shared_gate,
        )
