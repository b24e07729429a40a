"""Tiny models: their configurations (contents of config.json), one per feature that models differ in, with weights and a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.models.weights import write_random_model

LENGTHS = [1, 40, 7, 66, 3]

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
_MSCALES = {"original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}
_GROWING_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, **_MSCALES, "llama_4_scaling_beta": 0.4}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50000.0},
}
_LINEAR = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def _small(model_type: str, name: str, **changes: Any) -> dict[str, Any]:
    return {**_SIZES, "model_type": model_type, "architectures": [f"{name}ForCausalLM"], **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _small("llama", "Llama", rope_theta=500.0),
    "llama-tied-bias": _small("llama", "Llama", tie_word_embeddings=True, attention_bias=True)
    | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": _small("llama", "Llama", rope_theta=10000.0, rope_scaling=_LLAMA3_ROPE),
    "qwen2": _small("qwen2", "Qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
    "qwen3-tied": _small("qwen3", "Qwen3", head_dim=12, tie_word_embeddings=True),
    "mistral": _small("mistral", "Mistral", sliding_window=9, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "phi3": _small("phi3", "Phi3", sliding_window=33, pad_token_id=0),
    "gemma2": _small("gemma2", "Gemma2", head_dim=8, query_pre_attn_scalar=12, sliding_window=5, attn_logit_softcapping=2.0)
    | {"final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
    "gemma3": _small("gemma3_text", "Gemma3", head_dim=12, query_pre_attn_scalar=10, sliding_window=64)
    | {"sliding_window_pattern": 3, "rope_theta": 50000.0, "rope_local_base_freq": 500.0}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma4": _small("gemma4_text", "Gemma4", head_dim=12, global_head_dim=20, num_global_key_value_heads=1)
    | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 32, "final_logit_softcapping": 3.0}
    | {"rope_parameters": _GEMMA4_ROPE, "pad_token_id": 0},
    "phi4-mini": _small("phi3", "Phi3", partial_rotary_factor=0.75, original_max_position_embeddings=160)
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.3, 2.1], "long_factor": [2.0, 5.0, 9.0]}}
    | {"tie_word_embeddings": True, "pad_token_id": 0},
    "seed-oss": _small("seed_oss", "SeedOss", head_dim=12, attention_out_bias=True, rope_theta=1000.0)
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "olmo2": _small("olmo2", "Olmo2"),
    "olmo3": _small("olmo3", "Olmo3", sliding_window=9, rope_theta=2000.0)
    | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2}},
    "exaone4": _small("exaone4", "Exaone4", head_dim=12, sliding_window=9, sliding_window_pattern=2, rope_theta=1000.0)
    | {"rope_scaling": _LLAMA3_ROPE},
    "smollm3": _small("smollm3", "SmolLM3", no_rope_layer_interval=2, pad_token_id=0),
    "granite": _small("granite", "Granite", embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.22)
    | {"logits_scaling": 1.7, "rope_scaling": {"rope_type": "dynamic", "factor": 2.7}},
    "glm4": _small("glm4", "Glm4", head_dim=12, pad_token_id=0),
    "ministral3": _small("ministral3", "Ministral3", head_dim=12, pad_token_id=0, rope_parameters=_GROWING_ROPE),
    "qwen3-moe": _small("qwen3_moe", "Qwen3Moe", **_ROUTED, head_dim=12, norm_topk_prob=True, decoder_sparse_step=1)
    | {"mlp_only_layers": [1]},
    "qwen2-moe": _small("qwen2_moe", "Qwen2Moe", **_ROUTED, shared_expert_intermediate_size=40, norm_topk_prob=False)
    | {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "olmoe": _small("olmoe", "Olmoe", intermediate_size=24, attention_bias=True, num_experts=6, num_experts_per_tok=3)
    | {"norm_topk_prob": False, "pad_token_id": 0},
    "glm4-moe": _small("glm4_moe", "Glm4Moe", head_dim=12)
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}, "attention_bias": True}
    | {"use_qk_norm": True, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
    | {"pad_token_id": 0},
    "deepseek-v3": _small("deepseek_v3", "DeepseekV3", **_LATENT, q_lora_rank=24, attention_bias=True)
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, **_MSCALES}, "n_routed_experts": 8, "num_experts_per_tok": 3}
    | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "pad_token_id": 0},
    "deepseek-v2": _small("deepseek_v2", "DeepseekV2", **_LATENT, q_lora_rank=None, rope_theta=1000.0, n_routed_experts=8)
    | {"num_experts_per_tok": 3, "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    | {"routed_scaling_factor": 1.3, "pad_token_id": 0},
    "gpt-oss": _small("gpt_oss", "GptOss", head_dim=12, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    | {"sliding_window": 9, "swiglu_limit": 1.5, "num_local_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0},
    "qwen3-5": _small("qwen3_5_text", "Qwen3_5", **_LINEAR),
    "qwen3-5-moe": _small("qwen3_5_moe_text", "Qwen3_5Moe", **_LINEAR, **_ROUTED, shared_expert_intermediate_size=40),
    "qwen3-next": _small("qwen3_next", "Qwen3Next", **_LINEAR, **_ROUTED, shared_expert_intermediate_size=40)
    | {"norm_topk_prob": True, "mlp_only_layers": [2]},
    "mixtral": _small("mixtral", "Mixtral", sliding_window=33, num_local_experts=5, num_experts_per_tok=2, pad_token_id=0),
}


# The families that go through every test of the short tier. The others are compared with transformers in float64 and exported there:
# the only ones with norms over all heads (olmo2), layers without rotary embeddings (smollm3), scales of the residual stream and the
# logits (granite), growing queries (ministral3), and a gated shared expert (qwen2-moe) are among these.
SHORT_FAMILIES = ("llama", "qwen3-tied", "gemma2", "gemma4", "gpt-oss", "glm4-moe", "deepseek-v3", "qwen3-5")


def make_model(path: Path, config: dict[str, Any]) -> Path:
    """Random weights large enough that attention is not uniform, and biases that matter."""
    write_random_model(path, {**config, "initializer_range": 0.2}, 5)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, vocab_size, (sum(LENGTHS),), generator=generator)
    return ids, torch.randint(0, vocab_size, (sum(LENGTHS),), generator=generator)
