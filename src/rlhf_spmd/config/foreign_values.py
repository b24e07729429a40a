"""Which settings of verl and TRL a conversion computes with or looks up by their value, and what they must be for that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlhf_spmd.config.foreign import foreign_names
from rlhf_spmd.config.plain_yaml import Plain, resolve
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.config.verl_settings import is_sft

MEGATRON = re.compile(r".*\b(megatron\..*|expert_tensor_parallel_size|etp)")
EPOCHS = "after_each_epoch"  # verl's SFT trainer takes it for a number of steps


@cache
def _patterns(kind: str) -> re.Pattern[str]:
    """Return the pattern of dotted keys whose values are of this kind, as the tables of verl and TRL have them."""
    return re.compile("|".join(pattern for names in foreign_names().values() for pattern in str(names.get(kind, "")).split()))


def read_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with numbers where a conversion computes, and text where it looks a word up.

    Text that says a number, or none, is read so. Raises ConfigError, one line, for other values.
    """
    by_megatron = settings.get("model_engine") == "megatron" or any(map(MEGATRON.fullmatch, settings))
    by_examples = is_sft(settings)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        is_count = _patterns("counts").fullmatch(key) is not None
        if by_examples and (value == EPOCHS or _is_copied(key, value, settings)):
            values[key] = value
            continue
        if is_count or _patterns("numbers").fullmatch(key) or (by_megatron and _patterns("layouts").fullmatch(key)):
            value = _number(key, value)
        elif _patterns("words").fullmatch(key) and value is not None:
            if isinstance(value, list | dict):
                raise ConfigError(f"{key}={value} must be a word")
            value = str(value)
        if is_count and value is not None and value <= 0:
            raise ConfigError(f"{key}={value} must be above 0")
        values[key] = value
    return values


def _is_copied(key: str, value: Any, settings: Mapping[str, Any]) -> bool:
    """Return True for a reference to the environment that verl's SFT trainer has where nothing is computed."""
    computed = key.startswith("trainer.") or _patterns("layouts").fullmatch(key) or "optim.min_lr" in settings
    return not computed and isinstance(value, str) and "${oc.env:" in value


def _number(key: str, value: Any) -> Any:
    number = resolve(Plain(value)) if isinstance(value, str) else value
    if number in (None, "none", "None"):
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ConfigError(f"{key}={value} must be a number")
    return number
