"""How tokens come (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes ``Request`` rows and returns ``Completion`` rows with log-probs; ``GenerationConfig`` and
``SamplingConfig`` are its settings. Inside: rows (``sequence``), pages (``block_manager``), what runs next (``scheduler``), all
free of torch and equal on every rank of a replica; the cache and its attention (``paged_attention``); one step on the device
(``runner``, ``sampler``).

Must not know: training, roles, rewards, how weights got into the decoder.
"""

from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.generator import GenerationStats, Generator
from rlhf_spmd.generation.sequence import Completion, Request

__all__ = ["Completion", "GenerationConfig", "GenerationStats", "Generator", "Request", "SamplingConfig"]
