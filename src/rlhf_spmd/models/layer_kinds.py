"""What a layer may have in place of attention and an MLP: a mixture of experts, linear attention, latent attention. Sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_spmd.kernels import RoutingRule

# the parameters of a layer that no optimizer changes
SCORE_BIAS = "score_bias"
SCALAR = "scalar"
# the parameters of a mixture that are the same on every tp rank: their gradients are sums over tp
REPLICATED = ("router", "shared_gate", "router_bias", "down_bias")
# those whose rows belong to one expert after the other
BY_EXPERT = ("gate_up", "down", "gate_up_bias", "down_bias")
_ATTENTION = "model.layers.{layer}.self_attn."
# the parameters of a layer -> their tensors, without ".weight" and ".bias"; where there is no q_a, q_b has the name of q
LATENT_NAMES = {
    "q_a": _ATTENTION + "q_a_proj",
    "q_a_norm": _ATTENTION + "q_a_layernorm",
    "q_b": _ATTENTION + "q_b_proj",
    "kv_a": _ATTENTION + "kv_a_proj_with_mqa",
    "kv_a_norm": _ATTENTION + "kv_a_layernorm",
    "kv_b": _ATTENTION + "kv_b_proj",
}


def is_fixed(name: str) -> bool:
    """Return True for a parameter of the decoder that no optimizer changes."""
    return name.endswith((f".{SCORE_BIAS}.weight", f".{SCALAR}.weight"))


@dataclass(frozen=True)
class Experts:
    """The mixture that replaces the MLP in every layer but ``dense_layers``.

    - num_experts, experts_per_token, intermediate_size: experts, how many of them a token takes, and columns of each
    - normalise, scoring, scale, groups, top_groups, group_best: how a token chooses them, see :class:`~rlhf_spmd.kernels.RoutingRule`
    - score_biased: the router adds a bias to the scores by which it chooses; gradients do not change it
    - shared_size: columns of an MLP beside the experts, which every token takes
    - shared_gate: the output of that MLP is multiplied by the sigmoid of one more product
    - wide_router: half-precision models compute the router's logits in fp32
    - has_biases: router and experts have biases
    - clamp: alpha and limit of the experts' gate, see :meth:`~rlhf_spmd.kernels.Ops.clamped_gate`
    - files_are_transposed: files have the matrices of all experts in one tensor, transposed
    - files_are_stacked: files may have them in one tensor [E, out, in], gates above the others; exports do not
    """

    num_experts: int
    experts_per_token: int
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
    has_biases: bool = False
    clamp: tuple[float, float] | None = None
    files_are_transposed: bool = False
    files_are_stacked: bool = False

    @property
    def rule(self) -> RoutingRule:
        """Return the rule by which a token chooses experts."""
        return RoutingRule(
            self.experts_per_token, self.scoring, self.normalise, self.scale, self.groups, self.top_groups, self.group_best
        )

    @property
    def number_dtype(self) -> torch.dtype:
        """Return the smallest dtype that can number the experts."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    @property
    def columns_per_token(self) -> int:
        """Return the columns of the experts that a token takes, the shared expert included."""
        return self.experts_per_token * self.intermediate_size + self.shared_size

    @property
    def num_router_outputs(self) -> int:
        """Return the number of router outputs of a token: one for each expert, and one for the shared expert's gate."""
        return self.num_experts + self.shared_gate

    @property
    def matrices(self) -> tuple[str, ...]:
        """Return the names of the parameters of a layer's mixture, in the order of the decoder's parameters."""
        shared = ("shared_gate_up", "shared_down") if self.shared_size else ()
        biases = ("router_bias", "gate_up_bias", "down_bias") if self.has_biases else ()
        score_bias = (SCORE_BIAS,) if self.score_biased else ()
        shared_gate = ("shared_gate",) if self.shared_gate else ()
        return "router", "gate_up", "down", *biases, *score_bias, *shared, *shared_gate


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    - layers: the global indices of the layers that have it
    - key_heads, value_heads: heads of the whole model; a key head serves value_heads / key_heads value heads, one after the other
    - key_dim, value_dim: elements of a head
    - kernel: tokens that the convolution before the rule sees
    - files_are_fused: files have the matrices in two tensors, by key head (Qwen3-Next), not in four
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    files_are_fused: bool

    @property
    def channels(self) -> int:
        """Return the columns of queries, keys and values of all heads, which the convolution sees."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Return the columns of the fused first product: the channels, the gate, and two numbers for each value head."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def saved_numbers_per_token(self) -> int:
        """Return the fp32 numbers that a layer saves of a token for the backward pass, as measured."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return 17 * keys + 2 * self.value_heads * self.key_dim + 13 * values + 320 * self.value_heads

    @property
    def state_numel(self) -> int:
        """Return the elements of the state of a sequence in a layer, which are in fp32 at least."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): queries, keys and values of all heads come from two short
    vectors of a token.

    - q_rank: elements of the vector of the queries; None: they come from the hidden state itself
    - kv_rank: elements of the vector of keys and values
    - nope_dim: elements of a head's queries and keys that are not rotated
    - rope_dim: elements of them that are; those of a key come from the hidden state, and are the same in all heads
    - value_dim: elements of a head's values
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def cached_elements(self) -> int:
        """Return the numbers that a generator caches of a token and layer: all keys and values come from them."""
        return self.kv_rank + self.rope_dim

    @property
    def padded_head_dim(self) -> int:
        """Return the elements of a head for attention kernels, which need queries, keys and values of equal size."""
        return max(self.nope_dim + self.rope_dim, self.value_dim)

    def matrix_numel(self, hidden: int, heads: int) -> int:
        """Return the elements of a layer's attention matrices, the one behind the attention included."""
        q_width = heads * (self.nope_dim + self.rope_dim)
        q_numel = hidden * q_width if self.q_rank is None else self.q_rank * (hidden + q_width)
        kv_numel = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return q_numel + hidden * self.cached_elements + kv_numel + hidden * heads * self.value_dim
