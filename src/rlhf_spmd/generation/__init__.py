"""How tokens come (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes ``Request`` rows and returns ``Completion`` rows with log-probs; ``generate_until`` may return
before all of them ended (``Until``) and goes on in its next call. ``GenerationConfig`` and ``SamplingConfig`` are the settings.
Inside: rows (``sequence``), pages (``block_manager``), what runs next (``scheduler``), without torch and equal on every rank of a
replica; what was drawn (``progress``);
when rows end (``stopping``); the cache (``kv_cache``) and what attends over it (``backends``); one step on the device
(``runner``, ``logit_rules``, ``sampler``), or several (``decode_loop``).

Must not know: training, roles, rewards, how weights got into the decoder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_spmd.generation.config import GenerationConfig as GenerationConfig
    from rlhf_spmd.generation.config import SamplingConfig as SamplingConfig
    from rlhf_spmd.generation.generator import GenerationStats as GenerationStats
    from rlhf_spmd.generation.generator import Generator as Generator
    from rlhf_spmd.generation.progress import Completion as Completion
    from rlhf_spmd.generation.progress import NotFinite as NotFinite
    from rlhf_spmd.generation.sequence import Request as Request
    from rlhf_spmd.generation.stopping import StopStrings as StopStrings
    from rlhf_spmd.generation.until import Until as Until

_MODULES = {
    "config": ("GenerationConfig", "SamplingConfig"),
    "generator": ("GenerationStats", "Generator"),
    "progress": ("Completion", "NotFinite"),
    "sequence": ("Request",),
    "stopping": ("StopStrings",),
    "until": ("Until",),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: whoever takes the scheduler alone imports no torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
