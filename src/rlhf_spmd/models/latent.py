"""What multi-head latent attention is (MLA; DeepSeek-V2, arXiv 2405.04434): its sizes, and how files name its matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.models.keys import read_positive, read_size

_ATTENTION = "model.layers.{layer}.self_attn."
# the parameters of a layer -> their tensors, without ".weight" and ".bias"; where there is no q_a, q_b has the name of q
NAMES = {
    "q_a": _ATTENTION + "q_a_proj",
    "q_a_norm": _ATTENTION + "q_a_layernorm",
    "q_b": _ATTENTION + "q_b_proj",
    "kv_a": _ATTENTION + "kv_a_proj_with_mqa",
    "kv_a_norm": _ATTENTION + "kv_a_layernorm",
    "kv_b": _ATTENTION + "kv_b_proj",
}


@dataclass(frozen=True)
class Latent:
    """Queries, keys and values of all heads come from two short vectors of a token.

    - q_rank: elements of the vector of the queries; None: they come from the hidden state itself
    - kv_rank: elements of the vector of keys and values
    - nope_dim, rope_dim: elements of a head's queries and keys that are not rotated, and that are. Those of a key that are rotated
      come from the hidden state, and are the same in all heads
    - value_dim: elements of a head's values
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def entry(self) -> int:
        """Numbers of a token and layer from which a generator makes all keys and values."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Elements of a head as attention kernels see it, which take queries, keys and values of one size."""
        return max(self.nope_dim + self.rope_dim, self.value_dim)

    def matrix_numel(self, hidden: int, heads: int) -> int:
        """Elements of a layer's matrices, the one behind the attention too."""
        of_q = heads * (self.nope_dim + self.rope_dim)
        queries = hidden * of_q if self.q_rank is None else self.q_rank * (hidden + of_q)
        of_kv = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return queries + hidden * self.entry + of_kv + hidden * heads * self.value_dim


def read_latent(full: Mapping[str, Any], source: str) -> Latent:
    """The sizes, from a configuration that has all keys. Raises ValueError naming file, key and value."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, nope, rope, value = (read_size(full, source, name) for name in names)
    if rope % 2:
        raise ValueError(f"{source}: 'qk_rope_head_dim' is {rope}; it must be even: rotary embeddings turn pairs")
    return Latent(read_size(full, source, "q_lora_rank") if full.get("q_lora_rank") else None, kv_rank, nope, rope, value)


def latent_scale(latent: Latent, scaling: Mapping[str, Any], source: str) -> float:
    """The factor of the scores. ``scaling``: the configuration's own of rotary embeddings, whose ``mscale_all_dim`` raises it."""
    scale = 1 / math.sqrt(latent.nope_dim + latent.rope_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" and scaling.get("mscale_all_dim"):
        factor, of_all = (read_positive(scaling.get(key), source, key) for key in ("factor", "mscale_all_dim"))
        scale *= (0.1 * of_all * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return scale
