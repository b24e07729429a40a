"""Settings of the generator (``models.actor.generation``) and of sampling (``sampling``). Knobs carry vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass

ENGINES = ("zero_redundancy",)
ATTENTION = ("auto", "torch")
MIN_TEMPERATURE = 1e-3  # below it scaled logits overflow before they differ from greedy


@dataclass(frozen=True)
class GenerationConfig:
    """How tokens are made.

    - pp, tp: the generation layout; both divide the training layout's.
    - engine: how training weights become generation weights; the hybrid engine reads it.
    - attention: the paged attention; ``auto`` takes the best that is there, which is ``torch``.
    - page_size: tokens per page of the KV cache.
    - num_pages: size of the cache; null: what the rows that can run at once may need, within ``gpu_memory_utilization`` of the
      memory that is free on the device (GPU or CPU).
    - max_num_seqs: rows in flight. max_num_batched_tokens: tokens computed in one step.
    - enable_prefix_caching: rows share the pages of equal prompts.
    - enable_chunked_prefill: a long prompt may be computed over several steps; if false, each row (prompt and response) must
      fit in ``max_num_batched_tokens``.
    - enforce_eager: only true is accepted; no CUDA graphs are captured.
    """

    pp: int = 1
    tp: int = 1
    engine: str = "zero_redundancy"
    attention: str = "auto"
    page_size: int = 64
    num_pages: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool = True

    def check(self, where: str) -> None:
        """Raises ValueError naming key, value and what is allowed. ``where``: the section, as ``models.actor.generation``."""
        for key in ("pp", "tp", "page_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{where}.{key}={getattr(self, key)}: must be at least 1")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"{where}.num_pages={self.num_pages}: must be at least 1, or null (sized from free memory)")
        if self.engine not in ENGINES:
            raise ValueError(f"{where}.engine={self.engine!r}: allowed are {', '.join(ENGINES)}")
        if self.attention not in ATTENTION:
            raise ValueError(f"{where}.attention={self.attention!r}: allowed are {', '.join(ATTENTION)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"{where}.gpu_memory_utilization={self.gpu_memory_utilization}: must be in (0, 1]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{where}.max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "every row in flight computes at least one token in a step; raise the first or lower the second"
            )
        if not self.enforce_eager:
            raise ValueError(f"{where}.enforce_eager=false: CUDA graphs are not captured by this generator; allowed is true")


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn; the filters apply in the order of this list.

    - n: responses per prompt.
    - temperature: 0 is greedy.
    - min_p: drops tokens below min_p times the likeliest one's probability; 0: off.
    - top_k: keeps the k likeliest, and ties with the k-th; 0 or -1: off.
    - top_p: keeps the smallest set of likeliest tokens whose probability reaches top_p of what is left; 1: off.
    - max_response_length: tokens, the stop token included; null: what the caller's data or the model's context allows.
    - ignore_eos: go on to the length limit.
    - seed: keys the draws of a program; a training run keys them by its own seed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_length: int | None = None
    ignore_eos: bool = False
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the returned ``log_probs``."""
        return 1.0 if self.greedy else self.temperature

    def check(self, where: str) -> None:
        """Raises ValueError naming key, value and what is allowed. ``where``: the section, as ``sampling``."""
        if self.n < 1:
            raise ValueError(f"{where}.n={self.n}: must be at least 1")
        if self.temperature != 0.0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(f"{where}.temperature={self.temperature}: must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"{where}.top_p={self.top_p}: must be in (0, 1]; 1 turns it off")
        if self.top_k < -1:
            raise ValueError(f"{where}.top_k={self.top_k}: must be at least 1; 0 or -1 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"{where}.min_p={self.min_p}: must be in [0, 1]; 0 turns it off")
        if self.max_response_length is not None and self.max_response_length < 1:
            raise ValueError(f"{where}.max_response_length={self.max_response_length}: must be at least 1, or null")
