"""Prompts and vLLM's ``SamplingParams`` to requests of the engine, and completions to vLLM's outputs, for ``LLM`` and ``serve``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from numbers import Integral
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import Range, Seed
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.data.balance import micro_batches_by_tokens
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder, check_ids
from rlhf_spmd.data.files import named_row
from rlhf_spmd.data.tokenizer import decode, load_tokenizer, longest_token
from rlhf_spmd.generation import Completion, Generator, Request, SamplingConfig, StopStrings
from rlhf_spmd.generation.stopping import StopCriteria, build_stop_criteria, special_stops
from rlhf_spmd.inference.inference_engine import GeneratingConfig, InferenceEngine, gather_records, read_generating_model
from rlhf_spmd.inference.loaded_model import CheckedModel
from rlhf_spmd.inference.sampling_params import CompletionOutput, Logprob, RequestOutput, SamplingParams
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World

Prompt = tuple[list[int], str | None]  # token ids, and the text that they encode, if it was given as one
Entries = list[list[tuple[int, float]]]  # for each token: itself and its log-prob, then the likeliest tokens and theirs


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
        Rule(
            ("generation.rebalance_steps",),
            lambda s: s.generation.rebalance_steps,
            "rows of requests stay on their replica",
            "leave it out",
        ),
    )


def prepare_model(config: EngineConfig, launch: Launch) -> CheckedModel:
    """Return what ``config`` names, read before the ranks meet. Local: no communication. Raises ValueError or DataError, one line."""
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
    """A prompt, how it is to be answered, and the engine's requests for it, one per response.

    ``prompt``: its text, if it was given as one. Requests with equal ``sampling`` can be in one call of the generator.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    sampling: SamplingConfig
    stop: StopCriteria
    requests: list[Request]


def is_ids(prompt: Any) -> bool:
    """Return True if ``prompt`` is a list of token ids, not a text and not messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Integral)


class RequestProcessor:
    """Answers prompts with an engine. ``longest``: tokens that a prompt and its response may have together."""

    def __init__(self, loaded: CheckedModel, world: World, tick: Callable[[], None] = lambda: None) -> None:
        """Collective over the world: every rank of it must call, in program order. Raises ValueError, CheckpointError."""
        self.engine = InferenceEngine(loaded, world, tick)
        self.seed, self.spec, self.tokenizer = loaded.config.seed, loaded.spec, loaded.tokenizer
        self.path = loaded.config.model.path
        self.longest = loaded.config.max_model_len or loaded.spec.max_position_embeddings
        self._num_rows = 0
        self._texts: dict[int, str] = {}  # of tokens

    def encode(
        self,
        prompts: Sequence[Any],
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        generates: bool = True,
    ) -> list[Prompt]:
        """Return the token ids of texts, token ids, chat messages, or mappings with ``prompt`` or ``prompt_token_ids``.

        Messages are rendered by ``template``, by default the tokenizer's, with its ``variables``. Without ``generates`` a
        prompt may fill the context. Local; any thread may call.
        Raises ValueError or DataError, one line.
        """
        inputs = [p.get("prompt_token_ids", p.get("prompt")) if isinstance(p, Mapping) else p for p in prompts]
        inputs = [p.tolist() if hasattr(p, "tolist") else p for p in inputs]  # an array
        names = [f"prompt {number}" for number in range(len(inputs))]

        def check_room(length: int, name: str) -> None:
            if self.longest - length < generates:
                answer = ", one of which is the response's" if generates else ""
                raise ValueError(f"{name} has {length} tokens, and a row may have {self.longest}{answer}")

        for name, prompt in zip(names, inputs, strict=True):
            if is_ids(prompt):  # first: reading millions of ids takes seconds
                check_room(len(prompt), name)
        texts = [i for i, p in enumerate(inputs) if not is_ids(p)]
        read: dict[int, Prompt] = {i: (list(p), None) for i, p in enumerate(inputs) if is_ids(p)}
        if texts:
            tokenizer = self.tokenizer or load_tokenizer(self.path)
            encoding = EncodingConfig(chat_template=template, chat_template_kwargs=dict(variables or {}))
            encoding.check("chat")
            encoder = PromptEncoder(tokenizer, encoding, "")
            max_characters = self.longest * longest_token(tokenizer)
            encoded = encoder.encode([inputs[i] for i in texts], [names[i] for i in texts], most_characters=max_characters)
            read |= zip(texts, encoded, strict=True)
        for i, name in enumerate(names):
            with named_row(name):
                check_ids(read[i][0], self.spec.vocab_size, "prompt_token_ids")
            check_room(len(read[i][0]), name)
        return [read[i] for i in range(len(inputs))]

    def requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[PromptRequest]:
        """Return the requests for prompts that :meth:`encode` returned. Numbers the responses. Local. Raises ValueError, one line."""
        return [self._request(*prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _request(self, ids: list[int], text: str | None, params: SamplingParams) -> PromptRequest:
        where, sampling, config = "sampling_params", params.of_call(), self.engine.generator.config
        stop = build_stop_criteria(sampling, self.engine.generator.eos_ids, self.engine.generator.decoding, where)
        drawable = self.engine.generator.num_drawable
        sampling.check_ids(self.spec.vocab_size, drawable, stop.token_ids, params.min_tokens > 0, where)
        if (params.prompt_logprobs or 0) > drawable:
            raise ValueError(f"{where}.prompt_logprobs={params.prompt_logprobs}: the model's vocabulary has {drawable} tokens")
        room = self.longest - len(ids)
        max_new_tokens = min(params.max_tokens or room, room)
        if params.min_tokens > max_new_tokens:
            raise ValueError(
                f"{where}.min_tokens={params.min_tokens}: must be at most {max_new_tokens}, the tokens that are left"
            )
        processors = tuple(params.logits_processors or ())
        if processors and (config.steps_per_sync or 1) > 1:
            raise ValueError(f"{where}.logits_processors need steps_per_sync=1: they see drawn tokens")
        first, self._num_rows = self._num_rows, self._num_rows + params.n
        keys = [None if params.seed is None else (params.seed, j) for j in range(params.n)]
        limits = max_new_tokens, params.min_tokens, params.overrides
        requests = [Request(first + j, first, ids, *limits, key, processors) for j, key in enumerate(keys)]
        return PromptRequest(text, ids, params, sampling, stop, requests)

    def generate(
        self, asked: Sequence[PromptRequest], ended_more: Callable[[int], Any] = lambda count: None
    ) -> list[RequestOutput]:
        """Return the outputs in the order of ``asked``. ``ended_more`` hears how many responses of this replica have just ended.

        Collective over the world: every rank of it must call, in program order, with the same arguments. Raises NotFinite.
        """
        engine = self.engine
        mine = engine.groups_of_replica([each.requests for each in asked])
        calls: dict[str, list[PromptRequest]] = {}
        for i in mine:
            calls.setdefault(repr(asked[i].sampling), []).append(asked[i])
        ended: dict[int, Completion] = {}
        for together in calls.values():
            for part in engine.complete([each.requests for each in together], together[0].sampling, self.seed):
                ended |= {completion.row_id: completion for completion in part}
                ended_more(len(part))
        many = {i: number for i in sorted(mine) if (number := asked[i].params.prompt_logprobs) is not None}
        prompts, at_once = [asked[i].prompt_ids for i in many], engine.generator.config.max_num_batched_tokens
        scored = dict(zip(many, prompt_log_probs(engine.generator, prompts, [*many.values()], at_once), strict=True))
        records = []
        for i in mine if engine.leads else ():
            responses = [self.record(asked[i], ended[request.row_id]) for request in asked[i].requests]
            records.append((i, [responses, scored.get(i)]))
        gathered = gather_records(engine.world, records, "generate:results")
        shared = engine.world.all.broadcast_json(gathered, "generate:results")
        return [self.output(each, *record) for each, (_, record) in zip(asked, shared, strict=True)]

    def record(self, asked: PromptRequest, completion: Completion) -> dict[str, Any]:
        """Return a completion as JSON, which the replica sends to the other ranks."""
        ids, log_probs, entries = completion.token_ids, completion.log_probs_t1.double(), None
        if asked.params.logprobs is not None:
            entries = entries_of(ids, log_probs, completion.top_log_probs)
        text, reason = self.text_of(asked, ids, completion.finish_reason == "stop")
        more = {"logprobs": entries, "finish_reason": completion.finish_reason, "stop_reason": reason}
        return {"text": text, "token_ids": ids, "cumulative_logprob": float(log_probs.sum()), **more}

    def output(self, asked: PromptRequest, records: Sequence[dict[str, Any]], prompt: Entries | None = None) -> RequestOutput:
        """Return vLLM's output from the records of all responses; ``prompt``: the log-probs of its tokens."""
        named = [record | {"logprobs": record["logprobs"] and self.named(record["logprobs"])} for record in records]
        outputs = [CompletionOutput(j, **fields) for j, fields in enumerate(named)]
        first = None if prompt is None else [None, *self.named(prompt)]
        return RequestOutput(str(asked.requests[0].row_id), asked.prompt, asked.prompt_ids, first, outputs)

    def text_of(self, asked: PromptRequest, ids: Sequence[int], stopped: bool) -> tuple[str, int | str | None]:
        """Return the text of a response or of its beginning, and what stopped it: a stop string, a token id, or None."""
        params, keeps_stop, stops = asked.params, asked.params.include_stop_str_in_output, asked.sampling.stop
        token = ids[-1] if stopped and ids[-1] in asked.stop.token_ids else None
        ended = None if token in self.engine.generator.eos_ids and not params.ignore_eos else token
        decoding = self.engine.generator.decoding
        if decoding is None:
            return "", ended
        plain = partial(self.decode, skips=params.skip_special_tokens)
        if stopped and token is None:
            (text, _), (_, stop) = (StopStrings(stops, each).cut(ids) for each in (plain, decoding))
            return text + stop * keeps_stop, stop
        special = {token: stop for stop, token in special_stops(stops, decoding.special_ids, "").items()}
        return plain(ids if keeps_stop or token is None else ids[:-1]), None if ended is None else special.get(ended, ended)

    def decode(self, ids: Sequence[int], skips: bool) -> str:
        """Return the text of token ids, "" without a tokenizer. ``skips``: without special tokens."""
        return "" if self.tokenizer is None else decode(self.tokenizer, [ids], skips)[0]

    def named(self, entries: Entries) -> list[dict[int, Logprob]]:
        """Return ``entries`` with the rank and the text of each token."""
        texts, named = self._texts, list[dict[int, Logprob]]()
        for token in {token for entry in entries for token, _ in entry}.difference(texts):
            texts[token] = self.decode([token], skips=False)
        for entry in entries:
            ranks = {token: rank for rank, (token, _) in enumerate(entry[1:], 1)}
            named.append({token: Logprob(value, ranks.get(token), texts[token]) for token, value in entry})
        return named


def entries_of(token_ids: Sequence[int], log_probs: Tensor, top: Sequence[Tensor] | None) -> Entries:
    """Return the entries of a response. ``log_probs`` [tokens]; ``top``: ids and log-probs of the likeliest, [tokens, number] each."""
    entries: Entries = [[pair] for pair in zip(token_ids, log_probs.tolist(), strict=True)]
    for entry, *likeliest in zip(entries, *(part.tolist() for part in top or ()), strict=True):
        entry += zip(*likeliest, strict=True)
    return entries


def prompt_log_probs(
    generator: Generator, prompts: Sequence[Sequence[int]], many: Sequence[int], max_tokens: int
) -> list[Entries]:
    """Return the entries of all tokens of the prompts but the first, at temperature 1, as training computes them.

    ``many``: for each prompt, how many of the likeliest tokens; ``max_tokens``: about how many tokens to compute at once.
    Collective over tp: every rank of it must call, in program order, with the same arguments.
    """
    decoder = generator.decoder
    lengths, device = [len(ids) for ids in prompts], decoder.head_weight.device
    entries_of_prompts: list[Entries] = [[] for _ in prompts]
    chunk = max(decoder.ops.chunk_logits // decoder.head_weight.shape[0], 64)
    for rows in micro_batches_by_tokens(lengths, max([max_tokens, *lengths])):
        packed, sizes = torch.tensor([token for i in rows for token in prompts[i]], device=device), [lengths[i] for i in rows]
        with torch.no_grad():
            hidden = decoder(packed, PackedAttention(sizes, device))
        entries: Entries = []
        for states, labels in zip(hidden.split(chunk), packed.roll(-1).split(chunk), strict=True):
            logits = local_logits(decoder, states)
            likeliest = gather_logits(decoder, logits)[:, : generator.num_drawable].topk(max(many)).indices
            ids = torch.cat([labels[:, None], likeliest], 1)
            values = log_probs_of(decoder, logits, ids)
            entries += [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        for i, end in zip(rows, accumulate(sizes), strict=True):
            entries_of_prompts[i] = [entry[: 1 + many[i]] for entry in entries[end - lengths[i] : end - 1]]
    return entries_of_prompts
