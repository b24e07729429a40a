"""Which settings of verl and TRL a conversion computes with or looks up by their value, and what they must be for that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.config.verl_sft import is_sft
from rlhf_spmd.config.written import Plain, resolve

# patterns of dotted keys: what must be above 0 too; other numbers; those of layouts, if Megatron's are compared; what is a word
COUNTS = re.compile(
    r"trainer\.(nnodes|n_gpus_per_node)|optim\.lr"
    r"|num_processes|num_generations|num_iterations|per_device_train_batch_size|gradient_accumulation_steps"
)
NUMBERS = re.compile(
    r".*\bfsdp_size|trainer\.(test_freq|save_freq|max_(actor_)?ckpt_to_keep)|data\.(train|val)_max_samples|optim\.min_lr"
    r"|actor_rollout_ref\.(rollout\.(val_kwargs\.)?top_k|actor\.clip_ratio_low)"
    r"|generation_batch_size|steps_per_generation|(max|save|eval|logging|warmup)_steps|save_total_limit|epsilon(_high)?|delta|beta"
    r"|vllm_max_model_length|max_completion_length|max_length"
)
LAYOUTS = re.compile(r"(actor_rollout_ref|critic|engine)\..*\b(\w+_parallel_size|[tp]p|[tpe]p_size|e?tp|ep)")
MEGATRON = re.compile(r".*\b(megatron\..*|expert_tensor_parallel_size|etp)")
WORDS = re.compile(
    r"trainer|truncation_mode|trainer\.resume_mode|data\.(prompt|response)_key|algorithm\.filter_groups\.metric"
    r"|actor_rollout_ref\.actor\.policy_loss\.loss_mode"
)
EPOCHS = "after_each_epoch"  # verl's SFT trainer takes it for a number of steps


def read_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with numbers where a conversion computes, and text where it looks a word up.

    Text that says a number, or none, is read so. Raises ConfigError, one line, for other values.
    """
    by_megatron = given.get("model_engine") == "megatron" or any(map(MEGATRON.fullmatch, given))
    by_examples, values = is_sft(given), dict[str, Any]()
    for key, value in given.items():
        is_count = COUNTS.fullmatch(key) is not None
        if by_examples and (value == EPOCHS or _is_copied(key, value, given)):
            values[key] = value
            continue
        if is_count or NUMBERS.fullmatch(key) or (by_megatron and LAYOUTS.fullmatch(key)):
            value = _number(key, value)
        elif WORDS.fullmatch(key) and value is not None:
            if isinstance(value, list | dict):
                raise ConfigError(f"{key}={value} must be a word")
            value = str(value)
        if is_count and value is not None and value <= 0:
            raise ConfigError(f"{key}={value} must be above 0")
        values[key] = value
    return values


def _is_copied(key: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Return True for a reference to the environment that verl's SFT trainer has where nothing is computed."""
    computed = key.startswith("trainer.") or LAYOUTS.fullmatch(key) or "optim.min_lr" in given
    return not computed and isinstance(value, str) and "${oc.env:" in value


def _number(key: str, value: Any) -> Any:
    number = resolve(Plain(value)) if isinstance(value, str) else value
    if number in (None, "none", "None"):
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ConfigError(f"{key}={value} must be a number")
    return number
