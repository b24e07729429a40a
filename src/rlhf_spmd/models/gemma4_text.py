"""Gemma 4, dense (31B): Gemma 3's layers where those without a window have heads of another size, turn a part of each, and take the
keys as values, too. Norms multiply by their weights, values have one without, and a number multiplies each layer's output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_spmd.models import gemma2
from rlhf_spmd.models.gemma2 import read_cap
from rlhf_spmd.models.keys import read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_windows, standard_spec

NAMES = replace(gemma2.NAMES, scalar="model.layers.{layer}.layer_scalar")
SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
DEFAULTS = {**SIZES, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 131072}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Gemma4TextConfig, with its defaults. Refused: inputs of each layer (E2B, E4B), keys and values of other layers, and
    experts (26B-A4B)."""
    full = {"tie_word_embeddings": True, "hidden_size_per_layer_input": 256, **DEFAULTS, **config}
    reject_unless(full, source, "hidden_size_per_layer_input", 0)
    reject_unless(full, source, "num_kv_shared_layers", 0)
    reject_unless(full, source, "enable_moe_block", False)
    reject_unless(full, source, "hidden_activation", "gelu_pytorch_tanh")
    reject_unless(full, source, "use_bidirectional_attention", "vision")  # of images
    windows = read_windows(full, source, pattern=6)
    windows = (*windows[:-1], None)  # transformers makes the last layer one without a window
    rope = {**ROPE, **(full.get("rope_parameters") or {})}
    local, whole = rope["sliding_attention"], rope["full_attention"]
    reject_unless(local, source, "rope_type", "default")
    shared, heads = bool(full.get("attention_k_eq_v", False)), read_global_heads(full, source, windows)
    bias = bool(full.get("attention_bias", False))
    spec = standard_spec(
        {**full, "rope_parameters": whole},
        source,
        windows=windows,
        global_heads=heads,
        keys_as_values=shared,
        value_norm=True,
        qk_norm=True,
        attention_scale=1.0,
        local_rope_theta=read_positive(local.get("rope_theta"), source, "rope_theta"),
        attention_bias=bias,
        attention_out_bias=bias,
        logit_softcap=read_cap(full, source, "final_logit_softcapping"),
        embed_scale=math.sqrt(read_size(full, source, "hidden_size")),
        hidden_act="gelu_tanh",
        names=NAMES,
        partial_rotary_factor=1.0,
        hf_config=dict(config),
    )
    if any(windows):
        return spec
    return replace(spec, num_key_value_heads=heads[0], head_dim=heads[1], global_heads=None)


def read_global_heads(full: Mapping[str, Any], source: str, windows: Sequence[int | None]) -> tuple[int, int]:
    """``ModelSpec.global_heads``, in both notations: ``per_layer_config`` of each layer without a window, or keys for all of them."""
    usual, key = read_size(full, source, "num_key_value_heads"), "per_layer_config"
    if full.get(key) is None:
        shared = full.get("attention_k_eq_v", False)
        kv_heads = read_size(full, source, "num_global_key_value_heads", usual) if shared else usual
        return kv_heads, read_size(full, source, "global_head_dim", 512)
    wanted = [str(layer) for layer, window in enumerate(windows) if window is None]
    listed = full[key]
    if sorted(listed) != sorted(wanted) or any(listed[layer] != listed[wanted[0]] for layer in wanted):
        raise ValueError(
            f"{source}: '{key}' is {listed!r}; it must give the same for layers {', '.join(wanted)}, which have no window"
        )
    one = listed[wanted[0]]
    return read_size(one, f"{source}: {key}", "num_key_value_heads", usual), read_size(one, f"{source}: {key}", "head_dim")
