"""``SamplingParams`` and the outputs of ``LLM``, with vLLM's names and shapes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar

from rlhf_spmd.config.constraints import NonNegativeInt, NumRows, PositiveInt, Range, Seed
from rlhf_spmd.config.rules import Rule, Rules, check_section
from rlhf_spmd.config.schema import read_value, type_hints
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.generation.config import MAX_LOGPROBS
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.inference.structured_outputs import StructuredOutputsParams

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# fields that all rows of a generator call share, beside stop
SHARED = (*PENALTIES, "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos", "logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is answered. Fields that change the distribution are those of :class:`~rlhf_spmd.generation.SamplingConfig`.

    - n: responses
    - max_tokens: of each response; None: what the model's context leaves. min_tokens: before it may stop
    - seed: keys the draws, so that other prompts do not change them; None: the engine's seed and the number of the response do
    - stop, stop_token_ids: end a response; they are left out of ``text`` unless include_stop_str_in_output
    - logprobs: that many of the likeliest tokens beside each drawn one, at temperature 1 and before any penalty; 0: only the drawn
      token. prompt_logprobs: the same for the prompt's tokens
    - skip_special_tokens: leave special tokens out of ``text``
    - logits_processors: functions (tokens drawn so far, logits [vocabulary]) -> logits to draw from, applied after all
      penalties. Every rank of a replica calls them for every token with the same arguments, so they must keep no state of a row
    - structured_outputs: what the response must be; it is applied last. A response that reaches max_tokens before may be a part
    """

    rules: ClassVar[Rules] = (
        Rule(
            ("min_tokens", "max_tokens"),
            lambda s: s.max_tokens is not None and s.min_tokens > s.max_tokens,
            "no response could be as long",
            "lower the first or raise the second",
        ),
    )

    n: NumRows = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: Seed | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: PositiveInt | None = 16
    min_tokens: NonNegativeInt = 0
    logprobs: int | None = None
    prompt_logprobs: Annotated[int, Range(least=0, most=MAX_LOGPROBS)] | None = None
    skip_special_tokens: bool = True
    logits_processors: Any = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Put every field in its declared type. Raises ValueError, one line."""
        for name in [field.name for field in fields(self)]:
            value = getattr(self, name)
            raw_value = asdict(value) if isinstance(value, StructuredOutputsParams) else value
            object.__setattr__(self, name, read_value(type_hints(SamplingParams)[name], raw_value, name))
        functions = self.logits_processors
        if not (functions is None or (isinstance(functions, list | tuple) and all(map(callable, functions)))):
            raise ValueError(f"logits_processors={functions!r} must be a list of functions")
        check_section(self, "sampling_params")
        if self.structured_outputs is not None:
            self.structured_outputs.check("structured_outputs")
        check_section(self.of_call().with_overrides(self.overrides), "sampling_params")

    @property
    def overrides(self) -> SamplingOverrides:
        """Return the fields in which rows of one call may differ."""
        return SamplingOverrides(self.temperature, self.top_p, self.top_k, self.min_p)

    def of_call(self) -> SamplingConfig:
        """Return the fields that all rows of one generator call share."""
        shared = {key: value for key in SHARED if (value := getattr(self, key)) is not None}
        return SamplingConfig(**shared, stop=[self.stop] if isinstance(self.stop, str) else self.stop or [])


@dataclass(frozen=True)
class Logprob:
    """The log-prob of a token at its place, in nats. ``rank``: 1 for the likeliest; None outside the ``logprobs`` likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """A response.

    - token_ids: with the token that ended it
    - cumulative_logprob: the sum over all tokens, at temperature 1
    - finish_reason: "stop" or "length"; "error" where ``structured_outputs`` let no token of the model go on, as in vLLM
    - stop_reason: the stop string or stop token that ended it; None for the model's end-of-text token
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """The responses to a prompt. ``prompt``: its text; None if token ids were given. ``prompt_logprobs``: the first is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
