"""Prompts and vLLM's ``SamplingParams`` to requests of the engine, for ``LLM`` and ``serve``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from rlhf_spmd.config.constraints import Range, Seed
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder, check_ids
from rlhf_spmd.data.files import DataError, named_row
from rlhf_spmd.data.messages import ChatOptions, Message
from rlhf_spmd.data.reasoning import begins_reasoning
from rlhf_spmd.data.tokenizer import decode, encode_continued, load_tokenizer, longest_token
from rlhf_spmd.generation import Request, SamplingConfig
from rlhf_spmd.generation.stopping import StopCriteria, build_stop_criteria
from rlhf_spmd.inference.inference_engine import GeneratingConfig, InferenceEngine, read_generating_model
from rlhf_spmd.inference.loaded_model import CheckedModel
from rlhf_spmd.inference.sampling_params import SamplingParams
from rlhf_spmd.inference.structured_outputs import GrammarMask, compile_grammar
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World

if TYPE_CHECKING:
    from llguidance import LLMatcher

Prompt = tuple[list[int], str | None]  # token ids, and the text that they encode, if it was given as one


@dataclass(frozen=True)
class EngineConfig(GeneratingConfig):
    """A model that answers requests.

    - seed: keys the draws of requests without a seed
    - max_model_len: tokens of a prompt and its response; null: what the model's context has
    - tokenizer: directory of the tokenizer; null: the model's
    """

    seed: Seed = 0
    max_model_len: Annotated[int, Range(least=2)] | None = None
    tokenizer: str | None = None

    rules: ClassVar[Rules] = (
        Rule(("layout.pp",), lambda s: s.layout.pp != 1, "a model that is asked has no stages", "set layout.tp instead"),
    )


Config = TypeVar("Config", bound=EngineConfig)


def prepare_model(config: Config, launch: Launch) -> CheckedModel[Config]:
    """Return the model that ``config`` names. Local: no communication. Raises ValueError or DataError, one line."""
    loaded = read_generating_model(config, launch, config.tokenizer is not None, tokenizer_path=config.tokenizer)
    context = loaded.spec.max_position_embeddings
    if (config.max_model_len or 0) > context:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model's context is max_position_embeddings={context}; lower it, or leave it out"
        )
    if config.tokenizer is not None and len(loaded.tokenizer) > loaded.spec.vocab_size:
        raise ValueError(
            f"tokenizer={config.tokenizer}: it has {len(loaded.tokenizer)} tokens, and the model's vocabulary "
            f"{loaded.spec.vocab_size}; leave it out for the model's own"
        )
    return loaded


@dataclass(frozen=True)
class PromptRequest:
    """A prompt, how it is to be answered, and the rows of the engine for it, one per response.

    ``prompt``: its text, None for a prompt of token ids. Rows with equal ``sampling`` can be in one call of the generator.
    ``thoughts_end``: the token that ends the thoughts which a prompt begins, and behind which structured outputs begin; None: there
    is none.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    sampling: SamplingConfig
    stop: StopCriteria
    rows: list[Request]
    thoughts_end: int | None = None


def is_ids(prompt: Any) -> bool:
    """Return True if ``prompt`` is a list of token ids, not a text and not messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Integral)


class RequestProcessor:
    """Turns prompts into requests of an engine. ``longest``: tokens that a prompt and its response may have together."""

    def __init__(self, loaded: CheckedModel[EngineConfig], world: World, tick: Callable[[], None] = lambda: None) -> None:
        """Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError."""
        self.engine = InferenceEngine(loaded, world, tick)
        self.seed = loaded.config.seed
        self.spec = loaded.spec
        self.tokenizer = loaded.tokenizer
        self.path = loaded.config.model.path
        self.longest = loaded.config.max_model_len or loaded.spec.max_position_embeddings
        self._num_rows = 0

    def encode(
        self,
        prompts: Sequence[Any],
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        generates: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Prompt]:
        """Return the token ids of texts, token ids, chat messages, or mappings with ``prompt`` or ``prompt_token_ids``.

        Messages are rendered by ``template``, by default the tokenizer's, with its ``variables`` and the schemas of ``tools``.
        Without ``generates`` a prompt may fill the context. Local; any thread may call.
        Raises ValueError or DataError, one line.
        """
        inputs = [p.get("prompt_token_ids", p.get("prompt")) if isinstance(p, Mapping) else p for p in prompts]
        inputs = [p.tolist() if hasattr(p, "tolist") else p for p in inputs]  # an array
        names = [f"prompt {number}" for number in range(len(inputs))]

        def check_room(length: int, name: str) -> None:
            if self.longest - length < generates:
                room = ", one of which is the response's" if generates else ""
                raise ValueError(f"{name} has {length} tokens, and a row may have {self.longest}{room}")

        for name, prompt in zip(names, inputs, strict=True):
            if is_ids(prompt):  # first: reading millions of ids takes seconds
                check_room(len(prompt), name)
        encoded: dict[int, Prompt] = {i: (list(prompt), None) for i, prompt in enumerate(inputs) if is_ids(prompt)}
        texts = [i for i in range(len(inputs)) if i not in encoded]
        if texts:
            tokenizer = self.tokenizer or load_tokenizer(self.path)
            encoding = EncodingConfig(chat_template=template, chat_template_kwargs=dict(variables or {}))
            encoding.check("chat")
            encoder = PromptEncoder(tokenizer, encoding, "")
            max_characters = self.longest * longest_token(tokenizer)
            options = [ChatOptions([*tools] if tools else None)] * len(texts)
            pairs = encoder.encode([inputs[i] for i in texts], [names[i] for i in texts], options, max_characters)
            encoded |= zip(texts, pairs, strict=True)
        for i, name in enumerate(names):
            with named_row(name):
                check_ids(encoded[i][0], self.spec.vocab_size, "prompt_token_ids")
            check_room(len(encoded[i][0]), name)
        return [encoded[i] for i in range(len(inputs))]

    def encode_behind(
        self,
        ids: list[int],
        answer: Message,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> Prompt | None:
        """Return the prompt of a chat that goes on from the tokens ``ids``, which end with an ``answer``, with ``messages`` behind it.

        None: the template cannot write them alone, or they are too long. Local; any thread may call. Raises ValueError.
        """
        if sum(len(message["content"]) for message in messages) > self.longest * longest_token(self.tokenizer):
            return None  # tokenising megabytes would take minutes
        encoder = PromptEncoder(self.tokenizer, EncodingConfig(chat_template_kwargs=dict(variables)), "")
        options = ChatOptions([*tools] or None)
        calls = answer.get("tool_calls") or ()
        try:
            behind = encoder.ids_between_turns(ids[-1], messages, self.engine.generator.eos_ids, options, calls)
        except DataError:
            return None
        ((prompt_ids, _),) = self.encode([[*ids, *behind]])
        return prompt_ids, decode(self.tokenizer, [prompt_ids], skip_special_tokens=False)[0]

    def compile_grammar(self, params: SamplingParams) -> LLMatcher | None:
        """Return the compiled ``structured_outputs``; None without. Local; any thread may call. Raises ValueError, one line."""
        structured_outputs = params.structured_outputs
        num_ids = self.engine.generator.num_drawable
        return None if structured_outputs is None else compile_grammar(structured_outputs, self.tokenizer, num_ids)

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        cache_salt: str | None = None,
        reasoning_tags: Sequence[str] | None = None,
    ) -> list[PromptRequest]:
        """Return the requests for prompts that :meth:`encode` returned. Numbers the responses.

        ``reasoning_tags``: of thoughts that a prompt may begin. Local. Raises ValueError, one line.
        """
        return [
            self._request(*prompt, prompt_params, cache_salt, self._thoughts_end(prompt[1], reasoning_tags))
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]

    def _thoughts_end(self, prompt: str | None, tags: Sequence[str] | None) -> int | None:
        if tags is None or prompt is None or not begins_reasoning(prompt, tags[0]):
            return None
        ids = encode_continued(self.tokenizer, tags[1])
        return ids[0] if len(ids) == 1 else None  # several tokens could spell it in more than one way

    def _request(
        self, ids: list[int], text: str | None, params: SamplingParams, cache_salt: str | None, thoughts_end: int | None
    ) -> PromptRequest:
        where = "sampling_params"
        generator = self.engine.generator
        sampling = params.of_call()
        stop = build_stop_criteria(sampling, generator.eos_ids, generator.decoding, where)
        sampling.check_ids(self.spec.vocab_size, generator.num_drawable, stop.token_ids, params.min_tokens > 0, where)
        if (params.prompt_logprobs or 0) > generator.num_drawable:
            raise ValueError(
                f"{where}.prompt_logprobs={params.prompt_logprobs}: the model's vocabulary has {generator.num_drawable} tokens"
            )
        room = self.longest - len(ids)
        max_new_tokens = min(params.max_tokens or room, room)
        if params.min_tokens > max_new_tokens:
            raise ValueError(
                f"{where}.min_tokens={params.min_tokens}: must be at most {max_new_tokens}, the tokens that are left"
            )
        processors = tuple(params.logits_processors or ())
        if processors and (generator.config.steps_per_sync or 1) > 1:
            raise ValueError(f"{where}.logits_processors need steps_per_sync=1: they see drawn tokens")
        grammar = self.compile_grammar(params)
        if grammar is not None and not stop.token_ids:
            raise ValueError(f"{where}.structured_outputs: no token could end the response; leave ignore_eos out")
        first = self._num_rows
        self._num_rows += params.n
        keys = [None if params.seed is None else (params.seed, j) for j in range(params.n)]
        limits = max_new_tokens, params.min_tokens, params.overrides
        mask_arguments = generator.num_drawable, stop.token_ids, thoughts_end
        masks = [() if grammar is None else (GrammarMask(grammar, *mask_arguments),) for _ in keys]
        rows = [
            Request(first + j, first, ids, *limits, key, (*processors, *masks[j]), cache_salt) for j, key in enumerate(keys)
        ]
        return PromptRequest(text, ids, params, sampling, stop, rows, thoughts_end)
