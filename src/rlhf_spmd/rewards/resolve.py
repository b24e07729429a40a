"""The name in ``reward.function`` -> the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_spmd.config import registry

RewardFunction = Callable[[str, str, dict[str, Any]], Any]

_PACKAGE = "rlhf_spmd.rewards"


def builtin_names() -> list[str]:
    """The built-in reward functions: the modules of this package that export ``score``."""
    return registry.available(_PACKAGE, "score")


def resolve_function(name: str, where: str = "reward.function") -> RewardFunction:
    """The function called ``name``: a built-in (``gsm8k``, ``gsm8k:flexible``), or ``package.module:function``.

    Without a function's name ``score`` is meant. Raises ValueError that names ``where``, the value and what exists.
    """
    module_name, _, function_name = name.partition(":")
    if "." in module_name:
        return registry.resolve_function(f"{module_name}:{function_name or 'score'}", where)
    if not function_name or module_name in builtin_names():
        module_name = registry.find(where, _PACKAGE, module_name, "score").__name__
        return registry.resolve_function(f"{module_name}:{function_name or 'score'}", where)
    return registry.resolve_function(name, where)
