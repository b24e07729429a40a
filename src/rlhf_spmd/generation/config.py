"""Settings of the generator (``models.actor.generation``) and of sampling (``sampling``). Knobs carry vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch

from rlhf_spmd.config.constraints import (
    FiniteFloat,
    Fraction,
    NonNegativeInt,
    NumRows,
    PositiveFraction,
    PositiveInt,
    Range,
    Seed,
)
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.kernels import ATTENTION, capabilities, model_device
from rlhf_spmd.kernels.devices import unavailable

MAX_LOGPROBS = 100
MIN_TEMPERATURE = 1e-3  # at less, scaled logits overflow before they differ from greedy decoding
MAX_SHIFT, MAX_FACTOR = 1e9, 1e6  # limits of what logits are shifted and multiplied by: results fit in fp32
AttentionName = Literal["auto", "torch", "cpp", "triton"]
Keeping = Literal["free", "keep", "offload"]  # what happens to memory that is not used for a while
Penalty = Annotated[float, Range(least=-MAX_SHIFT, most=MAX_SHIFT)]


def check_attention(attention: str, device: torch.device, where: str, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError if ``attention`` cannot run on ``device``."""
    if attention == "triton" and (reason := unavailable(attention, device, dtype)):
        raise ValueError(f"{where}={attention}: {reason}; allowed here: {', '.join(ATTENTION)}")


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are generated.

    - pp: pipeline stages while generating; divides `layout.pp`, or with `layout.zero: 3` any number where `pp * tp` divides the
      ranks
    - tp: tensor-parallel ranks while generating; divides `layout.tp`, or with `layout.zero: 3` or `ep` as for `pp`
    - ep: 1: the ranks of `tp` have a slice of each expert; the same number as `tp`: each has that part of the experts, whole. See
      [parallelism.md](parallelism.md#experts-in-parallel)
    - reshard_method: how training weights become generation weights: `zero_redundancy`, or, to measure against, `full_gather` and
      `naive_groups`; see [parallelism.md](parallelism.md#from-training-to-generation)
    - buffers: generation weights while training: `free`, `keep` (memory at fixed addresses), or `offload` (as `free`; training
      shards that an engine holds beside the generation shard wait in host memory while generating)
    - attention: `torch`, `cpp` (CPUs) or `triton` (CUDA devices); `auto`: on CUDA devices `triton`, or `torch` where that cannot
      serve, on CPUs the actor's `attention`. Another choice than the actor's loses the equality of
      generation's and training's log-probs. See [generation.md](generation.md#backends)
    - reuse_rollout_log_probs: take the sampled tokens' log-probs as training's old ones instead of computing these in a forward
      pass of their own. `null`: where both are the same bits (on CPUs whose products are exact, in float32 and bfloat16, if
      generation and training have the same `tp` and attention and no response takes several steps); `true`: refuse settings
      in which they are not, and on CUDA devices compute both by [kernels](generation.md#exact-on-gpus) whose bits do not
      depend on the batch; `false`: never. `rollout/log_prob_diff_max` is then measured in the first update of a step
    - page_size: tokens per page of the KV cache
    - kv_cache: what becomes of the pages of rows that go on after a training step (`rollout.in_flight`): `free` (the new
      weights compute them again), `keep`, or `offload` (they wait in host memory). With `keep` and `offload` rows go on from what
      older weights computed, see [generation.md](generation.md#pages-between-steps)
    - num_pages: pages of the cache; null: what the rows that can run at once need, within `gpu_memory_utilization`
    - max_num_seqs: rows in flight per replica
    - max_num_batched_tokens: tokens computed in one step; at least `max_num_seqs`
    - gpu_memory_utilization: as in vLLM, the share of a GPU's memory that weights, cache and the work of a step may fill; tensors
      that training leaves there count too. On CPUs the cache may take this share of the rank's part of the host's free memory.
      null: 0.9, on CPUs 0.5
    - enable_prefix_caching: rows of equal prompts share pages; with linear attention whole prompts, and their states
    - enable_chunked_prefill: a long prompt may take several steps; `false`: each row, prompt and response, must fit in
      `max_num_batched_tokens`
    - steps_per_sync: tokens that each row draws before the host looks at them; what is drawn after a stop is dropped. See
      [generation.md](generation.md#cuda-graphs). null: 8 where steps are captured as CUDA graphs,
      else 1. With `pp` above 1, or with environments and linear attention, it is always 1
    - enforce_eager: `true`: never CUDA graphs, for debugging. `false`: on CUDA devices decode steps are graphs where `pp` is 1 and
      attention is `triton`; with `tp` above 1 if a trial at the start succeeds
    """

    pp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    reshard_method: Literal["zero_redundancy", "full_gather", "naive_groups"] = "zero_redundancy"
    buffers: Keeping = "free"
    attention: AttentionName = "auto"
    reuse_rollout_log_probs: bool | None = None
    page_size: PositiveInt = 64
    kv_cache: Keeping = "free"
    num_pages: PositiveInt | None = None
    max_num_seqs: NumRows = 256
    max_num_batched_tokens: PositiveInt = 8192
    gpu_memory_utilization: PositiveFraction | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    steps_per_sync: PositiveInt | None = None
    enforce_eager: bool = False

    rules: ClassVar[Rules] = (
        Rule(
            ("max_num_batched_tokens", "max_num_seqs"),
            lambda s: s.max_num_batched_tokens < s.max_num_seqs,
            "every row in flight computes at least one token in a step",
            "raise the first or lower the second",
        ),
    )

    def memory_share(self, on_host: bool) -> float:
        """Return ``gpu_memory_utilization`` or its default. ``on_host``: the device is a CPU."""
        default = 0.5 if on_host else 0.9
        return default if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def check_device(self, where: str) -> None:
        """Raise ValueError if this process's device cannot run ``attention``. A plan may be for other devices."""
        check_attention(self.attention, model_device(), f"{where}.attention")

    def captures(self, device: torch.device, pp: int) -> bool:
        """Return True if decode steps become CUDA graphs on this device, as far as attention and experts allow it."""
        return not self.enforce_eager and capabilities(device).graphs and pp == 1

    def check_row(self, where: str, num_tokens: int, words: str) -> None:
        """Raise ValueError if a row of ``num_tokens`` tokens, prompt and response, could never run. ``words`` explain the number."""
        pages = -(-(num_tokens - 1) // self.page_size)
        if self.num_pages is not None and pages > self.num_pages:
            raise ValueError(
                f"{where}.num_pages={self.num_pages}: {words}, which need {pages} pages of page_size={self.page_size}; raise it to at "
                f"least {pages}, or leave it out and see that {where}.gpu_memory_utilization leaves the cache so much memory"
            )
        if not self.enable_chunked_prefill and num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{where}.max_num_batched_tokens={self.max_num_batched_tokens}: {words}; raise it, or set "
                f"{where}.enable_chunked_prefill=true"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn.

    The options apply in vLLM's order: allowed, forbidden and stop tokens, bias, penalties, temperature, min_p, top_k, top_p.

    - n: responses per prompt; 1 where `temperature` is 0
    - temperature: 0 is greedy (in `train` only for validation); else 1e-3 to 1e6
    - top_p: keeps the smallest set of likeliest tokens that reach this probability, of what is left; 1: off
    - top_k: keeps the likeliest, and ties with the last of them; 0 or -1: off
    - min_p: drops tokens below this share of the likeliest one's probability; 0: off
    - repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the prompt or the response so far;
      1e-6 to 1e6, 1: off
    - presence_penalty: subtracted from logits of tokens in the response so far, -1e9 to 1e9
    - frequency_penalty: the same for each time that the token is there
    - logit_bias: token id: what is added to its logit, as in `sampling.logit_bias.5=1.5`; -1e9 to 1e9
    - allowed_token_ids: only these are drawn; null: all
    - forbidden_token_ids: never drawn
    - stop_token_ids: end a response, as the model's own end tokens do
    - stop: texts that end a response which contains them, or special tokens such as `<|im_end|>`
    - include_stop_str_in_output: `text` of `generate` keeps the stop string; else the text ends before it. `response_ids` always
      keep its tokens
    - logprobs: that many of the likeliest tokens beside each drawn one, up to 100 and the vocabulary (`top_log_probs` of
      `generate`)
    - min_response_length: tokens before anything but the limit may end a response
    - max_response_length: tokens, stop token included; null: `data.max_response_length`, or in `generate` and `evaluate` what
      the model's context leaves
    - ignore_eos: go on to the limit (`stop_token_ids` and `stop` still count)
    - seed: keys the draws; `train` and `sft` do not read it, since their draws follow `run.seed`
    """

    n: NumRows = 1
    temperature: FiniteFloat = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Annotated[int, Range(least=-1)] = 0
    min_p: Fraction = 0.0
    repetition_penalty: Annotated[float, Range(least=1 / MAX_FACTOR, most=MAX_FACTOR)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[NonNegativeInt, Penalty] = field(default_factory=dict)
    allowed_token_ids: list[NonNegativeInt] | None = None
    forbidden_token_ids: list[NonNegativeInt] = field(default_factory=list)
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    logprobs: Annotated[int, Range(least=0, most=MAX_LOGPROBS)] = 0
    min_response_length: NonNegativeInt = 0
    max_response_length: PositiveInt | None = None
    ignore_eos: bool = False
    seed: Seed = 0

    rules: ClassVar[Rules] = (
        Rule(
            ("temperature", "n"),
            lambda s: s.greedy and s.n > 1,
            "greedy responses to a prompt are all the same",
            "set n=1, or a temperature above 0",
        ),
        Rule(
            ("min_response_length", "max_response_length"),
            lambda s: s.min_response_length > (s.max_response_length or math.inf),
            "no response could be as long",
            "lower the first or raise the second",
        ),
        Rule(
            ("temperature",),
            lambda s: s.temperature and not MIN_TEMPERATURE <= s.temperature <= MAX_FACTOR,
            f"must be 0 (greedy) or at least {MIN_TEMPERATURE}, at most {MAX_FACTOR}, since scaled logits overflow elsewhere",
            "set it to 1 for the model's own distribution",
        ),
        Rule(("allowed_token_ids",), lambda s: s.allowed_token_ids == [], "no token is left to draw", "leave it out for all"),
        Rule(("stop",), lambda s: not all(s.stop), "a stop string must not be empty", "leave the empty one out"),
    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def overrides(self) -> SamplingOverrides:
        """Return the fields that a row may override."""
        return SamplingOverrides(self.temperature, self.top_p, self.top_k, self.min_p)

    def with_overrides(self, overrides: SamplingOverrides) -> SamplingConfig:
        """Return the configuration of a row with these overrides."""
        return replace(self, n=1, **overrides._asdict())

    @property
    def log_prob_temperature(self) -> float:
        """Return the temperature of the returned ``log_probs``."""
        return 1.0 if self.greedy else self.temperature

    def check_ids(
        self, vocab_size: int, num_drawable: int, stop_ids: Collection[int], rows_have_minimum: bool, where: str
    ) -> None:
        """Raise ValueError for token ids outside the vocabulary, and if no token is left to draw.

        ``num_drawable``: only ids below this number are drawn (:func:`~.sampler.num_drawable_ids`). ``stop_ids``: tokens that end a
        response. ``rows_have_minimum``: some rows have a ``min_response_length`` of their own.
        """
        if self.logprobs > num_drawable:
            raise ValueError(
                f"{where}.logprobs={self.logprobs}: must be between 0 and {num_drawable}, the ids that may be drawn"
            )
        for key in ("logit_bias", "allowed_token_ids", "forbidden_token_ids", "stop_token_ids"):
            bad = [token for token in getattr(self, key) or () if not 0 <= token < vocab_size]
            if bad:
                raise ValueError(f"{where}.{key}: token id {bad[0]} must lie in 0 .. {vocab_size - 1}, the model's vocabulary")
        if beyond := [token for token in self.stop_token_ids if token >= num_drawable]:
            raise ValueError(
                f"{where}.stop_token_ids: token id {beyond[0]} is never drawn: the tokenizer has ids up to {num_drawable - 1} only"
            )
        barred = {*self.forbidden_token_ids, *(stop_ids if self.min_response_length or rows_have_minimum else ())}
        allowed = range(num_drawable) if self.allowed_token_ids is None else self.allowed_token_ids
        if barred.issuperset(token for token in allowed if token < num_drawable):
            raise ValueError(
                f"{where}: allowed_token_ids without forbidden_token_ids (before min_response_length also without the tokens "
                "that end a response) leave no token to draw; allow more"
            )
