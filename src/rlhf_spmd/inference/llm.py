"""Prompts in, responses out, in a script or a notebook: ``LLM``, and the ``Engine`` that it shares with ``serve``.

Each rank is asked the same. Prompts are dealt to the replicas by tokens, rows that differ only in how a token is drawn run in one call
of the generator, and all ranks get all results.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rlhf_spmd.config.bounds import SEEDS, check_bounds
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.schema import Reader
from rlhf_spmd.data.balance import micro_batches_by_tokens
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder, check_ids, read_template
from rlhf_spmd.data.ends import end_token_ids
from rlhf_spmd.data.tokenizer import decode, load_tokenizer, longest_token
from rlhf_spmd.generation import Completion, GenerationConfig, Request, SamplingConfig, StopStrings
from rlhf_spmd.generation.stopping import StopCriteria, build_ends, special_stops
from rlhf_spmd.inference.job import LoadedConfig, LoadedModel, gather_records, own_rows, read_weights
from rlhf_spmd.inference.loading import build_generator, check_cache, check_generation, generate_in_parts
from rlhf_spmd.inference.sampling_params import CompletionOutput, Logprob, RequestOutput, SamplingParams, refuse_vllm_only
from rlhf_spmd.kernels.cuda_settings import set_up_cuda
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.models.spec import join_ends
from rlhf_spmd.parallel.world import Launch, World, join_world, read_launch

Params = SamplingParams | Sequence[SamplingParams] | None
Prompt = tuple[list[int], str | None]  # token ids, and the text they are of, if it was given as one
Entries = list[list[tuple[int, float]]]  # of each token: itself and its log-prob, then those of the likeliest


@dataclass(frozen=True)
class EngineConfig(LoadedConfig):
    """The generation layout is ``layout``; ``generation`` holds the other knobs.

    - seed: keys the draws of requests without one
    - max_model_len: tokens of a prompt and its response; null: what the model's context has
    - tokenizer: directory of the tokenizer; null: the model's
    """

    generation: GenerationConfig = field(default_factory=GenerationConfig)
    seed: int = 0
    max_model_len: int | None = None
    tokenizer: str | None = None

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "seed", **SEEDS)
        check_bounds(self, where, "max_model_len", least=2)
        check_generation(self.layout, self.generation)
        if self.layout.pp != 1:
            raise ValueError(f"layout.pp={self.layout.pp}: a model that is asked has no stages; allowed is 1, and layout.tp")
        if self.generation.rebalance_steps:
            raise ValueError(
                f"generation.rebalance_steps={self.generation.rebalance_steps}: rows stay where they are; allowed is 0"
            )


def prepare_model(config: EngineConfig, launch: Launch) -> LoadedModel:
    """Local: no communication. Raises ValueError or DataError, one line."""
    config, spec, layout, checkpoint = read_weights(config, launch)
    check_cache(spec, layout, config.generation, config.model, launch)
    if (config.max_model_len or 0) > spec.max_position_embeddings:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model's context is max_position_embeddings={spec.max_position_embeddings}; "
            "lower it, or leave it out"
        )
    tokenizer = load_tokenizer(config.tokenizer or config.model.path, required=config.tokenizer is not None)
    if config.tokenizer is not None and len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"tokenizer={config.tokenizer}: it has {len(tokenizer)} tokens, and the model's vocabulary {spec.vocab_size}; "
            "leave it out for the model's own"
        )
    return LoadedModel(config, join_ends(spec, tokenizer), layout, checkpoint, tokenizer)


@dataclass(frozen=True)
class Asked:
    """A prompt and what is asked of it. ``prompt``: its text, if it was given as one. ``sampling``: of the call that it can be in."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    sampling: SamplingConfig
    ends: StopCriteria
    requests: list[Request]

    @property
    def most(self) -> int:
        """Tokens, of the prompt and its responses."""
        return len(self.prompt_ids) + sum(request.max_new_tokens for request in self.requests)


# vLLM's arguments of LLM that have nothing to set here: values that ask for nothing, and what stands for the others
VLLM_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": (
        (False,),
        "no code of a model's directory is ever run; convert the model to a family in docs/models.md",
    ),
    "quantization": ((None,), "weights are computed with as they are; set dtype"),
    "tokenizer_mode": (("auto",), "the tokenizer is the one that its files name; give another directory in tokenizer"),
    "skip_tokenizer_init": ((False,), "a model's directory without a tokenizer has none; give prompts as token ids"),
    "revision": ((None,), "a model is a directory or what the hub has now; download the revision and name its directory"),
    "download_dir": ((None,), "the hub's own cache is used; set HF_HOME in the environment"),
    "load_format": (("auto", "safetensors"), "weights are read from safetensors files; convert others"),
    "kv_cache_dtype": (("auto",), "keys and values have the model's dtype; set dtype"),
    "block_size": ((None,), "give page_size"),
    "swap_space": ((0,), "rows that find no room are computed again later; lower max_num_seqs"),
    "cpu_offload_gb": ((0,), "the weights stay on the device; raise tensor_parallel_size"),
    "pipeline_parallel_size": ((1,), "a model that is asked has no stages; give tensor_parallel_size"),
    "data_parallel_size": ((1,), "it is torchrun's number of ranks over tensor_parallel_size"),
    "distributed_executor_backend": ((None,), "start the script with torchrun"),
    "enable_lora": ((False,), "give the run's directory or checkpoint, whose adapters are added to its weights"),
    "speculative_config": ((None,), "give speculative_tokens"),
    "disable_log_stats": ((True, False), "nothing is logged"),
    "disable_custom_all_reduce": ((True, False), "there is none"),
    "max_logprobs": ((20,), "up to 100 may be asked for"),
}


def is_ids(prompt: Any) -> bool:
    """Whether it is a list of token ids, not a text and not messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Integral)


class Engine:
    """``longest``: tokens that a row may have. Collective over the world: every rank of it must call, in program order."""

    def __init__(self, ready: LoadedModel, world: World, tick: Callable[[], None] = lambda: None) -> None:
        self.world, self.seed, self.tick = world, ready.config.seed, tick
        self.spec, self.path = ready.spec, ready.config.model.path
        self.tokenizer = ready.tokenizer
        self.generator = build_generator(ready, world)
        self.mesh, self.longest = self.generator.mesh, ready.config.max_model_len or ready.spec.max_position_embeddings
        self._num_rows = 0

    def encode(
        self, prompts: Sequence[Any], template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> list[Prompt]:
        """``prompts``: texts, token ids, chat messages (rendered by ``template``, by default the tokenizer's, with its ``variables``),
        or mappings with ``prompt`` or ``prompt_token_ids``. Local; any thread may call. Raises ValueError or DataError, one line."""
        given = [p.get("prompt_token_ids", p.get("prompt")) if isinstance(p, Mapping) else p for p in prompts]
        given = [p.tolist() if hasattr(p, "tolist") else p for p in given]  # an array
        names = [f"prompt {number}" for number in range(len(given))]
        said = [i for i, p in enumerate(given) if not is_ids(p)]
        read: dict[int, Prompt] = {i: (list(p), None) for i, p in enumerate(given) if is_ids(p)}
        if said:
            tokenizer = self.tokenizer or load_tokenizer(self.path)
            encoding = EncodingConfig(chat_template=template, chat_template_kwargs=dict(variables or {}))
            encoding.check("chat")
            encoder = PromptEncoder(tokenizer, encoding, "")
            most = self.longest * longest_token(tokenizer)
            read |= zip(
                said, encoder.encode([given[i] for i in said], [names[i] for i in said], most_characters=most), strict=True
            )
        for i, name in enumerate(names):
            room = self.longest - len(check_ids(read[i][0], self.spec.vocab_size, name, "prompt_token_ids"))
            if room < 1:
                raise ValueError(
                    f"{name} has {self.longest - room} tokens, and a row may have {self.longest}, one of which is the response's"
                )
        return [read[i] for i in range(len(given))]

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Asked]:
        """``prompts``: as :meth:`encode` returns them. Numbers the responses. Local. Raises ValueError, one line."""
        read_params = {id(its): its.read() for its in params}
        return [self._asked(*prompt, read_params[id(its)]) for prompt, its in zip(prompts, params, strict=True)]

    def _asked(self, ids: list[int], text: str | None, params: SamplingParams) -> Asked:
        where, sampling, config = "sampling_params", params.of_call(), self.generator.config
        ends = build_ends(sampling, self.generator.eos_ids, self.generator.decoding, where)
        sampling.check_ids(self.spec.vocab_size, ends.token_ids, params.min_tokens > 0, where)
        if (params.prompt_logprobs or 0) > self.spec.vocab_size:
            raise ValueError(
                f"{where}.prompt_logprobs={params.prompt_logprobs}: the model's vocabulary has {self.spec.vocab_size} tokens"
            )
        room = self.longest - len(ids)
        most = min(params.max_tokens or room, room)
        if params.min_tokens > most:
            raise ValueError(f"{where}.min_tokens={params.min_tokens}: must be at most {most}, the tokens that are left")
        processors = tuple(params.logits_processors or ())
        if processors and (config.speculative_tokens or (config.steps_per_sync or 1) > 1):
            raise ValueError(f"{where}.logits_processors need speculative_tokens=0 and steps_per_sync=1: they see drawn tokens")
        first, self._num_rows = self._num_rows, self._num_rows + params.n
        keys = [None if params.seed is None else (params.seed, j) for j in range(params.n)]
        limits = most, params.min_tokens, params.drawing
        requests = [Request(first + j, first, ids, *limits, key, processors) for j, key in enumerate(keys)]
        return Asked(text, ids, params, sampling, ends, requests)

    def generate(self, asked: Sequence[Asked], ended_more: Callable[[int], Any] = lambda count: None) -> list[RequestOutput]:
        """In the order of ``asked``. ``ended_more`` is told how many of this replica's responses have ended. Raises NotFinite.
        Collective over the world: every rank of it must call, in program order, with the same arguments."""
        mine = own_rows([its.most for its in asked], self.mesh)
        alike: dict[str, list[Asked]] = {}
        longest_first = sorted(mine, key=lambda i: -asked[i].most)  # whose pages serve all that follow
        for i in longest_first:
            alike.setdefault(repr(asked[i].sampling), []).append(asked[i])
        ended: dict[int, Completion] = {}
        self.generator.drop({row.request.row_id for row in self.generator.kept})  # of a call that was interrupted
        for together in alike.values():
            waiting = deque(its.requests for its in together)
            for part in generate_in_parts(self.generator, waiting, together[0].sampling, self.seed, self.tick):
                ended |= {completion.row_id: completion for completion in part}
                ended_more(len(part))
        many = {i: number for i in mine if (number := asked[i].params.prompt_logprobs) is not None}
        prompts, at_once = [asked[i].prompt_ids for i in many], self.generator.config.max_num_batched_tokens
        noted = dict(zip(many, prompt_log_probs(self.generator.decoder, prompts, [*many.values()], at_once), strict=True))
        records = []
        for i in mine if self.mesh.replica.rank == 0 else ():
            made = [self.record(asked[i], ended[request.row_id]) for request in asked[i].requests]
            records.append((i, [made, noted.get(i)]))
        gathered = gather_records(self.world, records, "generate:results")
        shared = self.world.all.broadcast_json(gathered, "generate:results")
        return [self.output(its, *record) for its, (_, record) in zip(asked, shared, strict=True)]

    def record(self, asked: Asked, its: Completion) -> dict[str, Any]:
        """What only the replica knows of a response, as JSON can hold it."""
        log_probs, entries = its.log_probs_t1.double(), None
        if asked.params.logprobs is not None:
            entries = entries_of(its.token_ids, log_probs, its.top_log_probs)
        text, reason = self.text_of(asked, its.token_ids, its.finish_reason == "stop")
        more = {"logprobs": entries, "finish_reason": its.finish_reason, "stop_reason": reason}
        return {"text": text, "token_ids": its.token_ids, "cumulative_logprob": float(log_probs.sum()), **more}

    def output(self, asked: Asked, made: Sequence[dict[str, Any]], prompt: Entries | None = None) -> RequestOutput:
        named = [its | {"logprobs": its["logprobs"] and self.named(its["logprobs"])} for its in made]
        outputs = [CompletionOutput(j, **its) for j, its in enumerate(named)]
        first = None if prompt is None else [None, *self.named(prompt)]
        return RequestOutput(str(asked.requests[0].row_id), asked.prompt, asked.prompt_ids, first, outputs)

    def text_of(self, asked: Asked, ids: Sequence[int], stopped: bool) -> tuple[str, int | str | None]:
        """The text of a response or of its beginning, and what ``stopped`` it."""
        params, whole, stops = asked.params, asked.params.include_stop_str_in_output, asked.sampling.stop
        token = ids[-1] if stopped and ids[-1] in asked.ends.token_ids else None
        ended = None if token in self.generator.eos_ids and not params.ignore_eos else token
        read = self.generator.decoding
        if read is None:
            return "", ended
        plain = partial(self._decode, skips=params.skip_special_tokens)
        if stopped and token is None:
            (text, _), (_, stop) = (StopStrings(stops, its).cut(ids) for its in (plain, read))
            return text + stop * whole, stop
        special = {token: stop for stop, token in special_stops(stops, read.special_ids, "").items()}
        return plain(ids if whole or token is None else ids[:-1]), None if ended is None else special.get(ended, ended)

    def _decode(self, ids: Sequence[int], skips: bool) -> str:
        return "" if self.tokenizer is None else decode(self.tokenizer, [ids], skips)[0]

    def named(self, entries: Entries) -> list[dict[int, Logprob]]:
        texts = {token: self._decode([token], skips=False) for token in {token for entry in entries for token, _ in entry}}
        told = []
        for entry in entries:
            ranks = {token: rank for rank, (token, _) in enumerate(entry[1:], 1)}
            told.append({token: Logprob(value, ranks.get(token), texts[token]) for token, value in entry})
        return told


def entries_of(token_ids: Sequence[int], log_probs: Tensor, top: Sequence[Tensor] | None) -> Entries:
    """``log_probs`` [tokens]; ``top``: ids and log-probs of the likeliest, [tokens, so many] each."""
    entries: Entries = [[pair] for pair in zip(token_ids, log_probs.tolist(), strict=True)]
    for entry, *likeliest in zip(entries, *(part.tolist() for part in top or ()), strict=True):
        entry += zip(*likeliest, strict=True)
    return entries


def prompt_log_probs(decoder: Decoder, prompts: Sequence[Sequence[int]], many: Sequence[int], max_tokens: int) -> list[Entries]:
    """Of all tokens of the prompts but their first, at temperature 1, computed as training does, about ``max_tokens`` at once; beside
    each so ``many`` of the likeliest.

    Collective over tp: every rank of it must call, in program order, with the same arguments.
    """
    lengths, device = [len(ids) for ids in prompts], decoder.head_weight.device
    noted: list[Entries] = [[] for _ in prompts]
    chunk = max(decoder.ops.chunk_logits // decoder.head_weight.shape[0], 64)
    for rows in micro_batches_by_tokens(lengths, max([max_tokens, *lengths])):
        packed, sizes = torch.tensor([token for i in rows for token in prompts[i]], device=device), [lengths[i] for i in rows]
        with torch.no_grad():
            hidden = decoder(packed, PackedAttention(sizes, device))
        entries: Entries = []
        for states, labels in zip(hidden.split(chunk), packed.roll(-1).split(chunk), strict=True):
            logits = local_logits(decoder, states)
            ids = torch.cat([labels[:, None], gather_logits(decoder, logits).topk(max(many)).indices], 1)
            values = log_probs_of(decoder, logits, ids)
            entries += [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        for i, end in zip(rows, accumulate(sizes), strict=True):
            noted[i] = [entry[: 1 + many[i]] for entry in entries[end - lengths[i] : end - 1]]
    return noted


class LLM:
    """A model to ask, with vLLM's names. ``model``: a Hugging Face directory, or a run's. ``tokenizer``: a directory, by default the
    model's. ``dtype``: as of a role. ``seed`` keys the draws of all that have none of their own. ``max_model_len``: tokens of a prompt
    and its response. ``generation``: knobs of :class:`~rlhf_spmd.generation.GenerationConfig`, which has vLLM's names too.

    Under torchrun every rank makes the same calls with the same arguments and gets all results; ``tensor_parallel_size`` ranks hold
    one replica. Collective over the world: every rank of it must call, in program order. Raises ValueError, one line.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        max_model_len: int | None = None,
        **generation: Any,
    ) -> None:
        settings = {"model": {"path": str(model), "dtype": dtype}, "layout": {"tp": tensor_parallel_size}, "seed": seed or 0}
        settings |= {"max_model_len": max_model_len, "tokenizer": None if tokenizer is None else str(tokenizer)}
        refuse_vllm_only(generation, VLLM_ONLY)
        knobs = {key: value for key, value in generation.items() if key not in VLLM_ONLY}
        config = Reader(EngineConfig, {}, settings | {"generation": knobs}, interpolated=False).read()
        check_tree(config)
        set_up_cuda()
        ready = prepare_model(config, read_launch())
        self.engine = Engine(ready, join_world())

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer; None without one."""
        return self.engine.tokenizer

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Responses to texts, lists of token ids, or mappings with ``prompt`` or ``prompt_token_ids``: one of these or a list.
        ``sampling_params``: of all prompts, or of each. ``use_tqdm``: a bar counts the responses, on a terminal. As :class:`LLM`
        says."""
        given = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array
        given = [given] if isinstance(given, str | Mapping) or is_ids(given) else given
        if not isinstance(given, Sequence):
            raise ValueError(f"prompts are a {type(prompts).__name__}: give a text, token ids, a mapping, or a list of these")
        return self._answer(self.engine.encode(given), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to a conversation, messages with ``role`` and ``content``, or to a list of these. ``chat_template``: Jinja or a
        file of it, in place of the tokenizer's; ``chat_template_kwargs``: its variables, as ``enable_thinking``."""
        talks = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
        if isinstance(talks, str) or not all(isinstance(talk, list | tuple) for talk in talks):
            raise ValueError("a conversation is a list of messages with 'role' and 'content'")
        prompts = self.engine.encode(talks, chat_template, chat_template_kwargs)
        template = read_template(chat_template, "chat_template")
        ends = () if template is None else end_token_ids(self.engine.tokenizer, template)
        return self._answer(prompts, sampling_params, use_tqdm, ends)

    def _answer(
        self, prompts: Sequence[Prompt], params: Params, use_tqdm: bool, ends: Sequence[int] = ()
    ) -> list[RequestOutput]:
        """``ends``: of a chat template that is not the tokenizer's."""
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if wrong := [type(its).__name__ for its in each if not isinstance(its, SamplingParams)]:
            raise ValueError(f"sampling_params are a {wrong[0]}: give SamplingParams, or a list of them")
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(each)} of them for {len(prompts)} prompts; give one for all, or one for each"
            )
        if ends:
            stops = [[*(its.stop_token_ids or ()), *(() if its.ignore_eos else ends)] for its in each]
            each = [replace(its, stop_token_ids=stop) for its, stop in zip(each, stops, strict=True)]
        asked = self.engine.ask(prompts, each)
        shown = use_tqdm and self.engine.world.rank == 0 and sys.stderr.isatty()
        total = sum(len(its.requests) for its in asked) if self.engine.mesh.layout.dp == 1 else None  # others' are not seen
        with tqdm(total=total, unit=" responses", disable=not shown) as bar:
            return self.engine.generate(asked, bar.update)
