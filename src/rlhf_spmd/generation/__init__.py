"""How tokens come (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes ``Request`` rows and returns ``Completion`` rows with log-probs; ``generate_until`` may return
before all of them ended (``GenerationLimits``) and goes on in its next call. ``GenerationConfig`` and ``SamplingConfig`` are the
settings.
Inside: rows (``sequence``), pages (``page_pool``), what runs next (``scheduler``), without torch and equal on every rank of a
replica; a row's way from its queue to its last token (``lanes``, ``stopping``); the cache (``kv_cache``) and what attends over it
(``backends``); steps on the device (``runner``, ``logit_rules``, ``sampler``).

Must not know: training, roles, rewards, how weights got into the decoder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_spmd.generation.config import GenerationConfig as GenerationConfig
    from rlhf_spmd.generation.config import SamplingConfig as SamplingConfig
    from rlhf_spmd.generation.generator import Generator as Generator
    from rlhf_spmd.generation.interruption import GenerationLimits as GenerationLimits
    from rlhf_spmd.generation.scheduler import GenerationStats as GenerationStats
    from rlhf_spmd.generation.sequence import Completion as Completion
    from rlhf_spmd.generation.sequence import NotFinite as NotFinite
    from rlhf_spmd.generation.sequence import Request as Request
    from rlhf_spmd.generation.stopping import StopStrings as StopStrings

_MODULES = {
    "config": ("GenerationConfig", "SamplingConfig"),
    "generator": ("Generator",),
    "interruption": ("GenerationLimits",),
    "scheduler": ("GenerationStats",),
    "sequence": ("Completion", "NotFinite", "Request"),
    "stopping": ("StopStrings",),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: whoever takes the scheduler alone imports no torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
