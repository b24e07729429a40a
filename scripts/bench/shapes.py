"""The models of the benchmarks: shapes by name, and random weights, in a file or drawn on the device that needs them.

``NAME:LAYERS`` is the model with fewer layers, for devices that do not hold all of them. Models of a billion parameters and more
have no file: every process draws the same numbers from the tensors' names. Peers import this in Python environments of their own.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlhf_spmd.models.decoder import Decoder

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim")
SMALL = {  # with 8 heads of queries, 4 of keys and values
    "tiny": (32, 64, 2, 64, 4),
    "quickstart": (192, 512, 4, 16, 24),
    "S": (256, 768, 4, 4096, 32),
    "M": (512, 1536, 8, 8192, 64),
    "110M": (768, 2048, 12, 16000, 96),
}
# family, hidden size, intermediate size, layers, heads of queries, of keys and values, head_dim, vocabulary, tied embeddings
LARGE = {
    "qwen2.5_0.5b": ("Qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen3_0.6b": ("Qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3_1.7b": ("Qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3_4b": ("Qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "llama_1b": ("Llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama_8b": ("Llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
}
# mixtures of experts: the same, without family, then experts, those of a token, and their intermediate size
MIXTURES = {
    "mixture": (64, 128, 2, 4, 2, 16, 512, False, 8, 2, 32),
    "qwen3_30b_a3b": (2048, 6144, 48, 32, 4, 128, 151936, False, 128, 8, 768),
}


def is_large(model: str) -> bool:
    return model.partition(":")[0] in {*LARGE, *MIXTURES}


def config_of(model: str) -> dict[str, Any]:
    """The contents of config.json. Ends the program where no model has this name."""
    name, _, layers = model.partition(":")
    if name not in {*SMALL, *LARGE, *MIXTURES} or not (layers.isdecimal() or model == name):
        sys.exit(f"no model {model!r}; there are {', '.join([*SMALL, *LARGE, *MIXTURES])}; llama_8b:16 has 16 of its layers")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02}
    config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name in SMALL:
        config |= dict(zip(SIZES, SMALL[name], strict=True))
        config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
        config |= {"max_position_embeddings": 1024, "dtype": "float32"}
    else:
        family, hidden, inner, depth, heads, kv_heads, head_dim, vocab, tied = LARGE.get(name) or ("Qwen3", *MIXTURES[name][:8])
        config |= {"architectures": [f"{family}ForCausalLM"], "model_type": str(family).lower()}
        config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocab}
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "rope_theta": 1e6}
        config |= {"tie_word_embeddings": tied, "max_position_embeddings": 8192, "dtype": "bfloat16"}
    if name in MIXTURES:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
        config |= dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), MIXTURES[name][8:], strict=True))
    return {**config, "num_hidden_layers": int(layers)} if layers else config


def write_model(path: Path, model: str, with_weights: bool) -> None:
    """A Hugging Face directory; without weights :func:`fill` and :func:`peer_model` draw them."""
    from rlhf_spmd.models.weights import write_random_model

    if with_weights:
        write_random_model(path, config_of(model), seed=0)
        return
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config_of(model)), encoding="utf-8")


def has_weights(path: str) -> bool:
    return any(Path(path).glob("*.safetensors"))


def draw(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The fp32 values of a Hugging Face tensor, the same in every process that draws them on such a device."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, device=device)  # of a norm: no model here has biases
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())), device=device) * 0.02


def fill(decoder: Decoder) -> None:
    """Drawn weights for ours, which fuses and slices tensors."""
    import torch

    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            for box in decoder.shards[name].boxes:
                parameter.data[box.local_slices].copy_(draw(box.name, box.shape, parameter.device)[box.global_slices])


def peer_model(path: str, dtype: str, device: str, **options: Any) -> Any:
    """transformers' model with the directory's weights, or drawn ones where it has none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options |= {"dtype": getattr(torch, dtype)}
    if has_weights(path):
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        return model.to(device)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **options)
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), parameter.device))
    return model
