"""rlhf_spmd: RLHF as one SPMD program under torchrun. See README.md for the tour; nothing heavy is imported here.

From Python: ``LLM``, ``SamplingParams`` and ``train``, each imported when it is first asked for (docs/python.md).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_spmd.inference.llm import LLM as LLM
    from rlhf_spmd.inference.sampling_params import RequestOutput as RequestOutput
    from rlhf_spmd.inference.sampling_params import SamplingParams as SamplingParams
    from rlhf_spmd.inference.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from rlhf_spmd.notebook import train as train

__version__ = "0.4.0"
_MODULES = {
    "LLM": "inference.llm",
    "RequestOutput": "inference.sampling_params",
    "SamplingParams": "inference.sampling_params",
    "StructuredOutputsParams": "inference.structured_outputs",
}


class _Package(ModuleType):
    """Has ``train``, the function. The import of the module ``rlhf_spmd.train`` would put the module in its place."""

    train = property(lambda _: import_module(f"{__name__}.notebook").train, lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


sys.modules[__name__].__class__ = _Package
