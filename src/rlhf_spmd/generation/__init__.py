"""Generation (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes requests and returns completions with log-probs. ``generate_until`` may return before all rows have
ended (``GenerationLimits``), and goes on in its next call. ``GenerationConfig`` and ``SamplingConfig`` are the settings. A
*row* is one response in the making, as elsewhere a row of a batch.

Read in this order: ``sequence`` (a row and the work of a step), ``page_allocator`` and ``scheduler`` (what runs next; without
torch, and equal on every rank of a replica), ``decode_micro_batches`` (the decode loop), ``model_runner`` (a step on the device),
``generator``. Beside these: ``call`` (a call's arguments and early ends), ``kv_cache`` and ``backends`` (attention over pages),
``recurrent_states`` (linear attention), ``routed_experts``, ``sampler``, ``logit_rules``, ``stopping``, ``graphs``,
``pipeline_channels``, ``multi_turn`` and ``balancing``.

Must not know: training, roles, rewards, how weights got into the decoder.
"""

from rlhf_spmd.generation.call import GenerationLimits as GenerationLimits
from rlhf_spmd.generation.config import GenerationConfig as GenerationConfig
from rlhf_spmd.generation.config import SamplingConfig as SamplingConfig
from rlhf_spmd.generation.generator import Generator as Generator
from rlhf_spmd.generation.scheduler import GenerationStats as GenerationStats
from rlhf_spmd.generation.sequence import Completion as Completion
from rlhf_spmd.generation.sequence import NotFinite as NotFinite
from rlhf_spmd.generation.sequence import Request as Request
from rlhf_spmd.generation.stopping import StopStrings as StopStrings
