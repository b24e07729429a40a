"""Tiny model configurations (contents of config.json), one per feature that models differ in."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500.0},
    "llama-tied-bias": {
        **_SIZES,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama3": {
        **_SIZES,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "qwen2": {
        **_SIZES,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "qwen3-tied": {
        **_SIZES,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
}
