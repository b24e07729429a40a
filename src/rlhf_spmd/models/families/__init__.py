"""Model families as descriptions: from a config.json to a ``ModelSpec``, one function for each ``model_type``.

- ``llama``: Llama and dense families of its shape
- ``qwen``: Qwen 2 to 3.5
- ``gemma``: Gemma 2 to 4
- ``deepseek``: DeepSeek and GLM
- ``mixtures``: other mixtures of experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.config.words import nearest
from rlhf_spmd.models.families import deepseek, gemma, llama, mixtures, qwen
from rlhf_spmd.models.keys import check_fp8, read_text_config, reject_unless
from rlhf_spmd.models.spec import ModelSpec

BuildSpec = Callable[[Mapping[str, Any], str], ModelSpec]


def language_model(*text_types: str, **defaults: Any) -> BuildSpec:
    """Return the builder of a family with a vision tower: its language model, for text. Exports are of the text-only class.

    ``text_types``: the model types that ``text_config`` may have; where it has none, the first. ``defaults``: values
    for keys that ``text_config`` lacks.
    """

    def build(config: Mapping[str, Any], source: str) -> ModelSpec:
        text = read_text_config(config, source)
        text_type = text.get("model_type", text_types[0]) if len(text_types) > 1 else text_types[0]
        if text_type not in text_types:
            raise ValueError(
                f"{source}: 'text_config' has the model_type {text_type!r}; {config['model_type']!r} takes {' or '.join(text_types)}"
            )
        text = {**defaults, **text, "model_type": text_type}
        return replace(FAMILIES[text_type](text, source), text_prefix="language_model.", hf_config=text)

    return build


FAMILIES: dict[str, BuildSpec] = {
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "exaone4": llama.exaone4,
    "gemma2": gemma.gemma2,
    "gemma3": language_model("gemma3_text", num_attention_heads=8, vocab_size=262208, max_position_embeddings=131072),
    "gemma3_text": gemma.gemma3_text,
    "gemma4": language_model("gemma4_text"),
    "gemma4_text": gemma.gemma4_text,
    "glm4": deepseek.glm4,
    "glm4_moe": deepseek.glm4_moe,
    "gpt_oss": mixtures.gpt_oss,
    "granite": llama.granite,
    "llama": llama.llama,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mistral3": language_model("mistral", "ministral3"),
    "mixtral": mixtures.mixtral,
    "olmo2": llama.olmo2,
    "olmo3": llama.olmo3,
    "olmoe": mixtures.olmoe,
    "phi3": llama.phi3,
    "qwen2": qwen.qwen2,
    "qwen2_moe": qwen.qwen2_moe,
    "qwen3": qwen.qwen3,
    "qwen3_5": language_model("qwen3_5_text"),
    "qwen3_5_moe": language_model("qwen3_5_moe_text"),
    "qwen3_5_moe_text": qwen.qwen3_5_moe_text,
    "qwen3_5_text": qwen.qwen3_5_text,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen3_next": qwen.qwen3_next,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
}
# Keys that are not checked here: the code of these families came with their first files, and transformers has since taken it in.
# gpt-oss checks its quantization itself.
IGNORED_KEYS = {
    "deepseek_v2": ("auto_map",),
    "deepseek_v3": ("auto_map",),
    "gpt_oss": ("quantization_config",),
    "phi3": ("auto_map",),
}
# families that the decoder cannot compute: why, and the nearest family that it can
UNSUPPORTED = {
    "llama4": ("its attention is in chunks, and its experts take weighted tokens", "llama"),
}


def spec_from_config(config: Mapping[str, Any], source: str, eos_token_ids: tuple[int, ...] | None = None) -> ModelSpec:
    """Return the architecture that a config.json describes; ``source`` names it in messages. Raises ValueError."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"{source}: 'model_type' is {family!r}; it must name a model family")
    if unsupported := UNSUPPORTED.get(family.removesuffix("_text")):
        reason, nearest_family = unsupported
        raise ValueError(f"{source}: model_type {family!r} is not supported: {reason}; the nearest that is: {nearest_family!r}")
    if family not in FAMILIES:
        hint = nearest(family.lower(), list(FAMILIES)) or ";"
        known = ", ".join(FAMILIES)
        raise ValueError(f"{source}: model_type: unknown model family '{family}'{hint} available: {known}")
    ignored = IGNORED_KEYS.get(family, ())
    if "quantization_config" not in ignored:
        check_fp8(config, source)
    if "auto_map" not in ignored:
        reject_unless(config, source, "auto_map", None)
    spec = FAMILIES[family](config, source)
    if not spec.text_prefix:
        spec = replace(spec, hf_config=dict(config))
    return spec if eos_token_ids is None else replace(spec, eos_token_ids=eos_token_ids)
