"""What linear attention by the gated delta rule is (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.models.keys import read_size

KINDS = ("linear_attention", "full_attention")
# parameters of a layer that every tp rank applies to its own heads
MIXER = "linear_attn"


@dataclass(frozen=True)
class DeltaRule:
    """The linear attention that replaces attention in ``layers``, by their global index.

    - key_heads, value_heads: of the whole model; a key head serves value_heads / key_heads value heads, one after the other
    - key_dim, value_dim: elements of a head
    - kernel: tokens that the convolution before the rule sees
    - fused: files have the matrices in two tensors, by key head (Qwen3-Next), not in four
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values of all heads, which the convolution sees."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Columns of the fused first product: the channels, the gate, and two numbers for each value head."""
        return self.channels + self.value_heads * (self.value_dim + 2)

    @property
    def kept(self) -> int:
        """fp32 numbers that the operations of a layer keep of a token for the backward pass, as measured."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return 17 * keys + 2 * self.value_heads * self.key_dim + 13 * values + 320 * self.value_heads

    @property
    def state(self) -> int:
        """Elements of the state of one sequence in one layer, which are in fp32 at least."""
        return self.value_heads * self.key_dim * self.value_dim


def read_delta(full: Mapping[str, Any], source: str, fused: bool) -> DeltaRule:
    """From transformers' keys. Raises ValueError naming the key."""
    layers = read_size(full, source, "num_hidden_layers")
    interval = read_size(full, source, "full_attention_interval", 4)
    types = full.get("layer_types") or [KINDS[layer % interval == 0] for layer in range(1, layers + 1)]
    if len(types) != layers or not set(types) <= set(KINDS):
        raise ValueError(
            f"{source}: 'layer_types' is {types!r}; it must call each of the num_hidden_layers={layers} layers "
            f"{KINDS[0]!r} or {KINDS[1]!r}"
        )
    keys = read_size(full, source, "linear_num_key_heads", 16)
    values = read_size(full, source, "linear_num_value_heads", 32)
    if values % keys:
        raise ValueError(f"{source}: linear_num_value_heads={values} is not divisible by linear_num_key_heads={keys}")
    return DeltaRule(
        frozenset(layer for layer, kind in enumerate(types) if kind == KINDS[0]),
        keys,
        values,
        read_size(full, source, "linear_key_head_dim", 128),
        read_size(full, source, "linear_value_head_dim", 128),
        read_size(full, source, "linear_conv_kernel_dim", 4),
        fused,
    )
