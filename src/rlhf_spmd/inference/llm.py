"""Prompts in, responses out, in a script or a notebook: ``LLM``, with vLLM's names.

Every rank makes the same calls. Prompts are dealt to the replicas by tokens, rows that differ only in how a token is drawn run
in one call of the generator, and all ranks get all results.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.schema import read_section
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.data.messages import unread_variables
from rlhf_spmd.data.tokenizer import end_token_ids
from rlhf_spmd.generation import Completion
from rlhf_spmd.inference.inference_engine import gather_records
from rlhf_spmd.inference.outputs import OutputBuilder
from rlhf_spmd.inference.requests import EngineConfig, Prompt, PromptRequest, RequestProcessor, is_ids, prepare_model
from rlhf_spmd.inference.sampling_params import RequestOutput, SamplingParams
from rlhf_spmd.kernels.devices import set_up_cuda
from rlhf_spmd.parallel.launch import read_launch
from rlhf_spmd.parallel.world import join_world

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model that answers prompts, with vLLM's names.

    - model: a Hugging Face directory, or the directory of a run
    - tokenizer: a directory, by default the model's
    - dtype: as for a role
    - tensor_parallel_size: ranks that hold one replica
    - seed: keys the draws of prompts without a seed of their own
    - max_model_len: tokens of a prompt and its response together
    - generation: fields of :class:`~rlhf_spmd.generation.GenerationConfig`, which has vLLM's names too

    Under torchrun every rank makes the same calls with the same arguments and gets all results. Collective over the world:
    every rank of it must call, in program order. Raises ValueError, one line.
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
        config = read_section(EngineConfig, settings | {"generation": generation})
        check_tree(config)
        set_up_cuda()
        loaded = prepare_model(config, read_launch())
        self.processor = RequestProcessor(loaded, join_world())
        self.output_builder = OutputBuilder(self.processor.engine.generator, loaded.tokenizer)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers, or None if the model has none."""
        return self.processor.tokenizer

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Respond to one prompt or a list: texts, lists of token ids, or mappings with ``prompt`` or ``prompt_token_ids``.

        ``sampling_params``: for all prompts, or a list for each. ``use_tqdm``: a bar counts the responses, on a terminal.
        Collective as :class:`LLM` says.
        """
        prompt_list = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array
        prompt_list = [prompt_list] if isinstance(prompt_list, str | Mapping) or is_ids(prompt_list) else prompt_list
        if not isinstance(prompt_list, Sequence):
            raise ValueError(f"prompts are a {type(prompts).__name__}: give a text, token ids, a mapping, or a list of these")
        return self._answer(self.processor.encode(prompt_list), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, a list of messages with ``role`` and ``content``, or a list of conversations.

        ``chat_template``: Jinja text or a file of it, in place of the tokenizer's; ``chat_template_kwargs``: its variables, such as
        ``enable_thinking``; ``tools``: schemas of functions, which the template shows to the model. Collective as :class:`LLM` says.
        """
        conversations = [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else messages
        if isinstance(conversations, str) or not all(isinstance(value, list | tuple) for value in conversations):
            raise ValueError("a conversation is a list of messages with 'role' and 'content'")
        prompts = self.processor.encode(conversations, chat_template, chat_template_kwargs, tools=tools)
        template = read_template(chat_template, "chat_template")
        if self.processor.engine.world.rank == 0:
            for line in unread_variables("chat_template_kwargs", chat_template_kwargs or {}, self.get_tokenizer(), template):
                warnings.warn(line, stacklevel=2)
        ends = () if template is None else end_token_ids(self.processor.tokenizer, template)
        return self._answer(prompts, sampling_params, use_tqdm, ends)

    def _answer(
        self, prompts: Sequence[Prompt], params: Params, use_tqdm: bool, ends: Sequence[int] = ()
    ) -> list[RequestOutput]:
        """Return the outputs. ``ends``: the end tokens of a chat template that is not the tokenizer's."""
        params_list = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if wrong := [type(value).__name__ for value in params_list if not isinstance(value, SamplingParams)]:
            raise ValueError(f"sampling_params are a {wrong[0]}: give SamplingParams, or a list of them")
        if len(params_list) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(params_list)} of them for {len(prompts)} prompts; give one for all, or one for each"
            )
        if ends:
            stops = [[*(value.stop_token_ids or ()), *(() if value.ignore_eos else ends)] for value in params_list]
            params_list = [replace(value, stop_token_ids=stop) for value, stop in zip(params_list, stops, strict=True)]
        requests = self.processor.requests(prompts, params_list)
        engine = self.processor.engine
        shown = use_tqdm and engine.world.rank == 0 and sys.stderr.isatty()
        # the bar counts this replica's responses, so only one replica has a total
        total = sum(len(request.rows) for request in requests) if engine.mesh.layout.dp == 1 else None
        with tqdm(total=total, unit=" responses", disable=not shown) as bar:
            return generate_outputs(self.processor, self.output_builder, requests, bar.update)


def generate_outputs(
    processor: RequestProcessor,
    builder: OutputBuilder,
    requests: Sequence[PromptRequest],
    report: Callable[[int], Any] = lambda count: None,
) -> list[RequestOutput]:
    """Return the outputs of ``requests``. ``report`` gets the number of this replica's responses that have just ended.

    Collective over the world: every rank of it must call, in program order, with the same arguments. Raises NotFinite.
    """
    engine = processor.engine
    indices = engine.groups_of_replica([request.rows for request in requests])
    completions = generate_completions(processor, [requests[i] for i in indices], report)
    num_likeliest = {i: number for i in sorted(indices) if (number := requests[i].params.prompt_logprobs) is not None}
    prompts = [requests[i].prompt_ids for i in num_likeliest]
    prompt_entries = dict(zip(num_likeliest, engine.prompt_entries(prompts, [*num_likeliest.values()]), strict=True))
    records = []
    for i in indices if engine.leads else ():
        responses = [builder.record(requests[i], completions[row.row_id]) for row in requests[i].rows]
        records.append((i, [responses, prompt_entries.get(i)]))
    gathered = gather_records(engine.world, records, "generate:results")
    shared = engine.world.all.broadcast_json(gathered, "generate:results")
    return [builder.output(request, *record) for request, (_, record) in zip(requests, shared, strict=True)]


def generate_completions(
    processor: RequestProcessor, requests: Sequence[PromptRequest], report: Callable[[int], Any]
) -> dict[int, Completion]:
    """Return the completions of this replica's ``requests`` by row id. Those with equal ``sampling`` run in one call."""
    calls: dict[str, list[PromptRequest]] = {}
    for request in requests:
        calls.setdefault(repr(request.sampling), []).append(request)
    completions: dict[int, Completion] = {}
    for call in calls.values():
        groups = [request.rows for request in call]
        for ended in processor.engine.complete(groups, call[0].sampling, processor.seed):
            completions |= {completion.row_id: completion for completion in ended}
            report(len(ended))
    return completions
