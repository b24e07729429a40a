"""How tokens come (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes ``Request`` rows and returns ``Completion`` rows with log-probs; ``generate_until`` may return
before all of them ended (``Until``) and goes on in its next call. ``GenerationConfig`` and ``SamplingConfig`` are the settings.
Inside: rows (``sequence``), pages (``block_manager``), what runs next (``scheduler``), all equal on every rank of a replica;
when rows end (``stopping``); the cache (``paged_attention``) and what attends over it (``backends``); one step on the device
(``runner``, ``logit_rules``, ``sampler``), or several (``decode_loop``).

Must not know: training, roles, rewards, how weights got into the decoder.
"""

from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.generator import GenerationStats, Generator
from rlhf_spmd.generation.sequence import Completion, Request
from rlhf_spmd.generation.stopping import StopStrings
from rlhf_spmd.generation.until import Until

__all__ = [
    "Completion",
    "GenerationConfig",
    "GenerationStats",
    "Generator",
    "Request",
    "SamplingConfig",
    "StopStrings",
    "Until",
]
