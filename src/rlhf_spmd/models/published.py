"""Configurations of models of the Hugging Face hub, as published: what a plan needs of them where there is no network."""

from __future__ import annotations

from typing import Any

QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128}
LLAMA = {
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "max_position_embeddings": 131072,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SHARED = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V3 = {
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LLAMA["rope_scaling"] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


TIED = {"vocab_size": 151936, "tie_word_embeddings": True}
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
# name on the hub, without "-Instruct" -> what its config.json says of sizes
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": QWEN2 | _sizes(896, 4864, 24, 14, 2, **TIED),
    "Qwen/Qwen2.5-1.5B": QWEN2 | _sizes(1536, 8960, 28, 12, 2, **TIED),
    "Qwen/Qwen2.5-7B": QWEN2 | _sizes(3584, 18944, 28, 28, 4, vocab_size=152064),
    "Qwen/Qwen2.5-32B": QWEN2 | _sizes(5120, 27648, 64, 40, 8, vocab_size=152064),
    "Qwen/Qwen3-0.6B": QWEN3 | _sizes(1024, 3072, 28, 16, 8, **TIED),
    "Qwen/Qwen3-1.7B": QWEN3 | _sizes(2048, 6144, 28, 16, 8, **TIED),
    "Qwen/Qwen3-4B": QWEN3 | _sizes(2560, 9728, 36, 32, 8, **TIED),
    "Qwen/Qwen3-8B": QWEN3 | _sizes(4096, 12288, 36, 32, 8, vocab_size=151936),
    "Qwen/Qwen3-30B-A3B": QWEN3 | _sizes(2048, 6144, 48, 32, 4, vocab_size=151936) | {"model_type": "qwen3_moe"} | MIXTURE,
    "Qwen/Qwen3.5-9B": QWEN3_5 | _sizes(4096, 12288, 32, 16, 4),
    "Qwen/Qwen3.5-35B-A3B": QWEN3_5 | _sizes(2048, 512, 40, 16, 2) | {"model_type": "qwen3_5_moe_text"} | SHARED,
    "openai/gpt-oss-20b": GPT_OSS | _sizes(2880, 2880, 24, 64, 8, vocab_size=201088, num_local_experts=32),
    "unsloth/DeepSeek-V3-bf16": DEEPSEEK | V3 | _sizes(7168, 18432, 61, 128, 128, vocab_size=129280),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": DEEPSEEK | V2_LITE | _sizes(2048, 10944, 27, 16, 16, vocab_size=102400),
    "meta-llama/Llama-3.1-8B": LLAMA | _sizes(4096, 14336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": LLAMA | _sizes(8192, 28672, 80, 64, 8),
}


def published_config(name: str) -> dict[str, Any] | None:
    """The configuration of a model by its name on the hub; None for one that is not known here."""
    return PUBLISHED.get(name.removesuffix("-Instruct"))
