"""rlhf_spmd: RLHF as one SPMD program under torchrun. See README.md for the tour; nothing heavy is imported here.

From Python: ``LLM``, ``SamplingParams`` and ``train``, each imported when it is first asked for (docs/python.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_spmd.inference.llm import LLM as LLM
    from rlhf_spmd.inference.sampling_params import RequestOutput as RequestOutput
    from rlhf_spmd.inference.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
_MODULES = {"LLM": "llm", "RequestOutput": "sampling_params", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    if name == "train":  # the program, which can be called
        return import_module(f"{__name__}.train")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.inference.{_MODULES[name]}"), name)
