"""What a family does not compute is refused with the file, the key and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_spmd.models.families import spec_from_config
from small_models import CONFIGS

FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"partial_rotary_factor": 0.75}, "'partial_rotary_factor' is 0.75"),
        ("phi3", {"partial_rotary_factor": 0.4}, "'partial_rotary_factor' is 0.4; of head_dim=8 .* even number of dims"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "'rope_scaling.long_factor' is None"),
        ("phi4-mini", {"partial_rotary_factor": 1.0}, "'short_factor' .* has 3 numbers; a head rotates 4 pairs"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": -1.0}}, "'rope_parameters.factor' is -1.0"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'rope_type' is 'yarn'"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "'sliding_window_pattern' is 'LLLG'"),
        ("exaone4", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "'sliding_window' is None"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "'no_rope_layers' is .* 0 or 1 for each of 4 layers"),
        ("granite", {"mlp_bias": True}, "'mlp_bias' is True"),
        ("granite", {"logits_scaling": 0}, "'logits_scaling' is 0"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn"}}, "llama_4_scaling_beta' is None"),
        ("llama", {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "mistral or ministral3"),
        ("mistral", {"sliding_window": 0}, "'sliding_window' is 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "'layer_types' is .* num_hidden_layers=4"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "'layer_types' is "),
        ("gemma2", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "'final_logit_softcapping' is -1.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ("gemma3", {"model_type": "gemma3"}, "'text_config' is None"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "'rope_type' is 'linear'"),
        ("qwen3-5", {"layer_types": ["sliding_attention"] * 4}, "'layer_types' is .*=4 layers 'linear_attention'"),
        ("qwen3-5", {"linear_num_value_heads": 6}, "linear_num_value_heads=6 is not divisible by linear_num_key_heads=4"),
        ("qwen3-5", {"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' is 0"),
        ("qwen3-5", {"model_type": "qwen3_5"}, "'text_config' is None"),
        ("qwen3-5-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds num_experts=6"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "awq"}}, "config: 'quant_method' is 'awq', .* allowed: 'fp8'"),
        ("qwen3-tied", {"quantization_config": FP8 | {"weight_block_size": [1, 32]}}, r"'weight_block_size' is \[1, 32\]"),
        ("qwen3-tied", {"quantization_config": "fp8"}, "'quantization_config' is 'fp8'; it must be an object"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "'num_key_value_heads' is 2, .* allowed: 4"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax', .* allowed: 'sigmoid'"),
        ("deepseek-v3", {"qk_rope_head_dim": 5}, "'qk_rope_head_dim' is 5; it must be even"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "'topk_method' is .*, .* allowed: 'greedy', 'group_limited_greedy'"),
        ("deepseek-v2", {"topk_group": 5}, "n_group=4 must divide n_routed_experts=8, and topk_group=5 of the groups"),
        ("deepseek-v2", {"norm_topk_prob": True}, "'norm_topk_prob' is True, .* allowed: False"),
        ("gemma4", {"hidden_size_per_layer_input": 16}, "'hidden_size_per_layer_input' is 16, which is not supported; .* 0"),
        ("gemma4", {"num_kv_shared_layers": 2}, "'num_kv_shared_layers' is 2"),
        ("gemma4", {"enable_moe_block": True}, "'enable_moe_block' is True"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        ("llama", {"model_type": "llama4"}, "'llama4' is not supported: .* chunks, .* 'llama'"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds num_experts=6"),
        ("qwen3-moe", {"use_sliding_window": True}, "'use_sliding_window' is True"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 exceeds num_local_experts=5"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' is 0"),
        ("glm4-moe", {"n_group": 3}, "n_group=3 must divide n_routed_experts=8"),
        ("glm4-moe", {"topk_group": 1}, "topk_group=1 of the groups must have num_experts_per_tok=3 experts"),
        ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "of head_dim=12 it must rotate an even number"),
        ("qwen3-moe", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ("qwen2", {"model_type": "qwen22"}, r"unknown model family 'qwen22'.*qwen2"),
        ("qwen2", {"model_type": None}, "'model_type' is None"),
        ("qwen2", {"hidden_size": "32"}, "'hidden_size' is '32'"),
        ("qwen2", {"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ("qwen2", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; it must be at most 1000"),
        ("qwen3-moe", {"num_experts": 10**9}, "'num_experts' is 1000000000; it must be at most 10000"),
        ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3"),
        ("qwen2", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'.*'silu'"),
        ("qwen2", {"use_sliding_window": True}, "'use_sliding_window' is True"),
        ("qwen2", {"rope_parameters": {"rope_type": "su", "rope_theta": 1.0}}, "rope_type' is 'su'.*llama3"),
        ("qwen2", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters.factor' is None"),
        ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config: 'quant_method' is 'none'"),
        ("gpt-oss", {"quantization_config": FP8}, "'quant_method' is 'fp8', .*; allowed: 'mxfp4'"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^test: .*" + words):
        spec_from_config({**CONFIGS[name], **changes}, "test")
