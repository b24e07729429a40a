"""Generation (floor F4): continuous batching over a paged KV cache, on the same modules that train.

``Generator.generate`` takes requests and returns completions with log-probs. ``generate_until`` may return before all rows have
ended (``GenerationLimits``), and goes on in its next call. One row, from its request to its completion::

    Request        what to generate: prompt ids, limit, how tokens are drawn
      |            DecodeMicroBatch.enter: the row becomes a SequenceState and waits in the scheduler's queue
    Scheduler      schedule: which rows compute which tokens in the next step, and on which pages  <---------+
      |            ScheduledStep                                                                             |
    ModelRunner    start: forward pass over the pages, one draw per row; finish: token ids on the host       |
      |            DecodeMicroBatch.finish: tokens join their rows; a stop or the limit ends a row  ---------+
    Completion     the response with its log-probs

Words:

- *row*: one response in the making, as elsewhere a row of a batch. *group*: the rows of one prompt.
- *replica*: the pp * tp ranks that together hold one model. All of them run the same scheduler.
- *step*: one forward pass over some tokens of some rows, and the draws after it.
- *page*: memory for the keys and values of ``page_size`` tokens. *slot*: a token's place in it; or a row's state of linear attention.
- *micro-batch*: rows with a scheduler and pages of their own; one for each pipeline stage.

Files in reading order, by what they are about.

What runs next; without torch, and the same on every rank of a replica:

- ``sequence``: a row in its three forms, and the work of a step
- ``page_allocator``: which row has which page, and which page holds which part of a prompt
- ``scheduler``: which rows compute which tokens in the next step

A step on the device:

- ``kv_cache``: the pages, and where the tokens of a step lie in them
- ``backends``: the choice of the attention: ``paged_attention`` (torch, C++) or ``triton_attention``
- ``recurrent_states``: states of layers with linear attention
- ``routed_experts``: the experts that tokens took
- ``graphs``: decode steps as CUDA graphs
- ``model_runner``: runs a step

Tokens:

- ``config``: the settings of the generator and of sampling
- ``sampler``: draws tokens
- ``logit_rules``: masks, bias and penalties before a draw
- ``stopping``: what ends a response

The loop:

- ``call``: the arguments of a call, and what makes it return early
- ``pipeline_channels``: transfers between pipeline stages
- ``decode_micro_batches``: rows from the queue to their last token
- ``generator``: :class:`Generator`

Beside the loop:

- ``multi_turn``: rows that an environment extends between the model's turns

Must not know: training, roles, how rewards are computed, how weights got into the decoder.
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
