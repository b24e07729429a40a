"""Responses to prompts, ``sampling.n`` to each. After ``scripts/quickstart.sh``, which makes a model and prompts:

torchrun --nproc-per-node 2 -m rlhf_spmd.generate model.path=runs/quickstart/ppo/export \\
    data.path=runs/quickstart/task/val.jsonl out=answers.jsonl

In: one row per prompt with ``prompt`` (text or chat messages) or ``prompt_ids``, optional ``id`` (else the row's number),
``max_response_length`` (else ``sampling.max_response_length``, else what the context leaves) and ``min_response_length``.
Out, in input order, ``sampling.n`` rows per prompt: ``id``, ``prompt_ids``, ``response_ids`` (stop token included),
``log_probs`` (temperature 1), ``text`` (null without a tokenizer), ``finish_reason`` (``stop``, or ``length``: the limit or the
end of the model's context); with ``sampling.logprobs`` also ``top_log_probs``: for each token [id, log-prob] of the likeliest;
with ``environment.cls`` also ``response_mask`` (1: the model's token, 0: the environment's), ``environment_reward``, ``num_turns``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.encoding import check_ids
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.prompts import encode_prompts, has_ids, response_limits
from rlhf_spmd.data.tokenizer import decoding, load_tokenizer
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, NotFinite, Request, SamplingConfig, StopStrings
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.episodes import Environments
from rlhf_spmd.generation.stopping import build_ends, special_stops
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec, read_eos_ids
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.offline import OfflineConfig, gather_records, not_finite, read_input, run_offline_program, write_rows
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import Launch, World


@dataclass(frozen=True)
class GenerateConfig(OfflineConfig):
    """Everything that ``generate`` takes. The generation layout is ``layout``; ``generation`` holds the other knobs."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def check(self, where: str) -> None:
        super().check(where)
        for axis in ("pp", "tp"):
            if getattr(self.generation, axis) != 1:
                raise ValueError(
                    f"generation.{axis}={getattr(self.generation, axis)}: here layout.{axis} says it; leave it out"
                )
        if self.layout.zero:
            raise ValueError(f"layout.zero={self.layout.zero}: nothing is trained here; allowed is 0")
        if self.layout.vpp != 1:
            raise ValueError(f"layout.vpp={self.layout.vpp}: generation does not interleave stages; allowed is 1")
        if self.layout.sequence_parallel:
            raise ValueError("layout.sequence_parallel=true: generation runs without it; allowed is false")
        self.environment.check_together("environment", self.timeout_s, self.generation.rebalance_steps)


@dataclass(frozen=True)
class Prepared:
    """The checked input. ``limits``: least and most tokens of each prompt's responses; ``ids``: what names each prompt outside;
    ``rows``: what environments begin with."""

    config: GenerateConfig
    spec: ModelSpec
    layout: Layout
    tokenizer: Any
    ids: list[Any]
    prompts: list[list[int]]
    limits: list[tuple[int, int]]
    rows: list[dict[str, Any]]


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> Prepared:
    """Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config, spec, layout, rows = read_input(GenerateConfig, path, overrides, launch)
    has_text = not all(has_ids(row, config.data) for row in rows)
    needed = has_text or bool(config.sampling.stop) or config.environment.cls is not None
    tokenizer = load_tokenizer(config.model.path, required=needed)
    prompts = [prompt for prompt, _ in encode_prompts(rows, config.data, tokenizer, spec.vocab_size)]
    for row, prompt in zip(rows, prompts, strict=True):
        check_ids(prompt, spec.vocab_size, row.where, config.data.prompt_key)
    limits = [limits_of(row, len(prompt), config.sampling, spec) for row, prompt in zip(rows, prompts, strict=True)]
    ends = build_ends(config.sampling, spec.eos_token_ids, decoding(tokenizer), "sampling")
    config.sampling.check_ids(spec.vocab_size, ends.token_ids, any(least for least, _ in limits), "sampling")
    longest = max(len(prompt) + most for prompt, (_, most) in zip(prompts, limits, strict=True))
    config.generation.check_row("generation", longest, f"the longest row may have {longest} tokens")
    ids = [row.values.get("id", index) for index, row in enumerate(rows)]
    return Prepared(config, spec, layout, tokenizer, ids, prompts, limits, [row.values for row in rows])


def limits_of(row: Row, prompt_length: int, sampling: SamplingConfig, spec: ModelSpec) -> tuple[int, int]:
    """Least and most tokens: the row's own limits or the common ones, cut at the end of the model's context."""
    room = spec.max_position_embeddings - prompt_length
    if room < 1:
        raise DataError(
            f"{row.where}: the prompt has {prompt_length} tokens, the model's context {spec.max_position_embeddings}"
        )
    least, own = response_limits(row)
    most = min(room, own or sampling.max_response_length or room)
    if least > most:
        raise DataError(
            f"{row.where}: min_response_length={least} must be at most {most}, which max_response_length (the row's, else "
            "sampling's) and the model's context leave"
        )
    return least, most


def generate(ready: Prepared, world: World, tick: Callable[[], None] = lambda: None) -> None:
    """Generate for all prompts and write the file on rank 0; ``tick`` is called after each step of the generator.

    Collective over the world: every rank of it must call. Raises FloatingPointError where a log-prob is not finite.
    """
    config = ready.config
    started = time.perf_counter()
    mesh = build_mesh(world, range(world.size), ready.layout)
    dtype = config.model.torch_dtype(world.device)
    decoder = Decoder(ready.spec, "lm", mesh.pp_rank, ready.layout.pp, mesh.tp, dtype, world.device)
    load_pretrained(decoder, config.model.path)
    eos_ids = read_eos_ids(config.model.path)
    backend = choose_backend(config.generation.attention, config.model.attention, dtype, world.device, "generation.attention")
    generation = replace(config.generation, attention=backend)
    generator = Generator(decoder, mesh, generation, eos_ids, decoding(ready.tokenizer))
    # before any rank generates: one that cannot load its weights must not leave the others in a collective for long
    world.all.barrier("generate:loaded")
    loaded = time.perf_counter()
    requests = replica_requests(ready, mesh.dp_rank)
    environments = None
    if config.environment.cls is not None and requests:
        rows = {request.row_id: ready.rows[request.group_id] for request in requests}
        environments = Environments(config.environment, rows, ready.tokenizer)
    try:
        completions = generator.generate(requests, config.sampling, config.sampling.seed, 0, tick, environments)
    except NotFinite as error:
        row = error.row_id // config.sampling.n
        raise not_finite(row, ready.ids[row], config.model) from error
    mine = [(completion.row_id, record(completion)) for completion in completions] if mesh.replica.rank == 0 else []
    records = gather_records(world, mine, "generate:results")
    if records is None:
        return
    write_rows(config.out, (output_row(ready, *entry) for entry in records))
    num_tokens = sum(len(made["response_ids"]) for _, made in records)
    seconds = time.perf_counter() - loaded
    print(
        f"{len(records)} responses, {num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.0f} tokens/s; "
        f"{loaded - started:.1f} s to load) on {ready.layout}, {config.threads} thread(s), attention {backend}: {config.out}",
        file=sys.stderr,
    )


def replica_requests(ready: Prepared, replica: int) -> list[Request]:
    """This replica's rows: whole groups, so that a prompt is computed once; token counts (at most) balanced over replicas."""
    n = ready.config.sampling.n
    longest = [len(prompt) + n * limit for prompt, (_, limit) in zip(ready.prompts, ready.limits, strict=True)]
    requests = []
    for index in np.flatnonzero(partition_by_tokens(longest, ready.layout.dp) == replica).tolist():
        least, most = ready.limits[index]
        requests += [Request(index * n + j, index, ready.prompts[index], most, least) for j in range(n)]
    return requests


def record(completion: Completion) -> dict[str, Any]:
    """The fields of an output row that only this rank has."""
    row: dict[str, Any] = {"response_ids": completion.token_ids, "log_probs": completion.log_probs_t1.tolist()}
    row["finish_reason"] = completion.finish_reason
    if completion.top_log_probs is not None:
        pairs = zip(*(part.tolist() for part in completion.top_log_probs), strict=True)
        row["top_log_probs"] = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    if completion.episode is not None:
        told = completion.episode
        row |= {"response_mask": list(map(int, told.mask)), "environment_reward": told.reward, "num_turns": told.num_turns}
    return row


def output_row(ready: Prepared, row_id: int, made: dict[str, Any]) -> dict[str, Any]:
    """``made``: what :func:`record` gave."""
    prompt = row_id // ready.config.sampling.n
    text = response_text(ready, made["response_ids"], made["finish_reason"])
    return {"id": ready.ids[prompt], "prompt_ids": ready.prompts[prompt], **made, "text": text}


def response_text(ready: Prepared, token_ids: Sequence[int], finish_reason: str) -> str | None:
    """None without a tokenizer. Ends before the stop string that ended the response, unless it is to be included."""
    decode, sampling = decoding(ready.tokenizer), ready.config.sampling
    if decode is None:
        return None
    if finish_reason != "stop" or not sampling.stop:
        return decode(token_ids)
    if not sampling.include_stop_str_in_output:
        return StopStrings(sampling.stop, decode).cut(token_ids)
    special = special_stops(sampling.stop, decode.special_ids, "sampling")
    return decode(token_ids) + "".join(stop for stop, token in special.items() if token == token_ids[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: overrides, and ``--config FILE`` if there are many."""
    run_offline_program("generate", __doc__, GenerateConfig, prepare, generate, argv)


if __name__ == "__main__":
    main()
