"""``torchrun ... -m rlhf_spmd.generate model.path=DIR data.path=IN.jsonl out=OUT.jsonl layout.tp=2 sampling.n=4``: responses.

In: one row per prompt with ``prompt`` (text or chat messages) or ``prompt_ids``, optional ``id`` (else the row's number) and
``max_response_length`` (else ``sampling.max_response_length``, else what the context leaves).
Out, in input order, ``sampling.n`` rows per prompt: ``id``, ``prompt_ids``, ``response_ids`` (stop token included),
``log_probs`` (temperature 1), ``text`` (null without a tokenizer), ``finish_reason`` (``stop``, or ``length``: the limit or the
end of the model's context).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.config import check_tree, load
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.encoding import EncodingConfig, PromptEncoder, check_ids
from rlhf_spmd.data.files import DataError, Row, read_rows
from rlhf_spmd.data.tokenizer import decode, load_tokenizer
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec, read_eos_ids, read_spec
from rlhf_spmd.models.weights import check_pretrained, load_pretrained
from rlhf_spmd.offline import ModelConfig, check_out, run_offline_program
from rlhf_spmd.parallel.layout import Layout, LayoutConfig, resolve_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import Launch, World


@dataclass(frozen=True)
class PromptFileConfig(EncodingConfig):
    """``path``: a jsonl or parquet file, or a ``datasets`` name with ``split`` and ``subset``."""

    path: str = ""
    prompt_key: str = "prompt"
    split: str = "train"
    subset: str | None = None


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that ``generate`` takes. The generation layout is ``layout``; ``generation`` holds the other knobs.

    ``timeout_s``: the longest that one rank may keep the others waiting.
    """

    model: ModelConfig
    out: str
    data: PromptFileConfig = field(default_factory=PromptFileConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    timeout_s: float = 3600.0

    def check(self, where: str) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} must be a number of seconds above 0")
        for axis in ("pp", "tp"):
            if getattr(self.generation, axis) != 1:
                raise ValueError(
                    f"generation.{axis}={getattr(self.generation, axis)}: here layout.{axis} says it; leave it out"
                )
        if self.layout.zero:
            raise ValueError(f"layout.zero={self.layout.zero}: nothing is trained here; allowed is 0")


@dataclass(frozen=True)
class Prepared:
    """The checked input. ``limits``: tokens that each prompt's responses may have; ``ids``: what names each prompt outside."""

    config: GenerateConfig
    spec: ModelSpec
    layout: Layout
    tokenizer: Any
    ids: list[Any]
    prompts: list[list[int]]
    limits: list[int]


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> Prepared:
    """Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config = load(GenerateConfig, path, overrides)
    check_tree(config)
    if launch.rank == 0:
        check_out(Path(config.out), Path(config.data.path))
    spec = read_spec(config.model.path)
    layout = resolve_layout(config.layout, launch.size, "layout on all ranks")
    check_layout(spec, layout.pp, layout.tp, "layout")
    check_pretrained(spec, config.model.path, "lm")
    rows = read_rows(config.data.path, config.data.split, config.data.subset)
    has_text = any(needs_tokenizer(row, config.data) for row in rows)
    tokenizer = load_tokenizer(config.model.path, required=has_text)
    prompts = encode_prompts(rows, config.data, tokenizer, spec.vocab_size)
    limits = [response_limit(row, len(ids), config.sampling, spec) for row, ids in zip(rows, prompts, strict=True)]
    ids = [row.values.get("id", index) for index, row in enumerate(rows)]
    return Prepared(config, spec, layout, tokenizer, ids, prompts, limits)


def needs_tokenizer(row: Row, config: PromptFileConfig) -> bool:
    return config.prompt_key in row.values or "prompt_ids" not in row.values


def encode_prompts(rows: Sequence[Row], config: PromptFileConfig, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token ids of each row: its prompt through the tokenizer (messages through the chat template), or its ``prompt_ids``."""
    prompts: list[list[int]] = [[] for _ in rows]
    texts = []
    for index, row in enumerate(rows):
        if needs_tokenizer(row, config):
            texts.append(index)
        else:
            prompts[index] = check_ids(row.values["prompt_ids"], vocab_size, row.where, "prompt_ids")
    if texts:
        values = [rows[index].get(config.prompt_key, "data.prompt_key") for index in texts]
        encoded, _ = PromptEncoder(tokenizer, config).encode(values, [rows[index].where for index in texts])
        for index, ids in zip(texts, encoded, strict=True):
            prompts[index] = check_ids(ids, vocab_size, rows[index].where, config.prompt_key)
    return prompts


def response_limit(row: Row, prompt_length: int, sampling: SamplingConfig, spec: ModelSpec) -> int:
    """The row's own limit or the common one, cut at the end of the model's context."""
    room = spec.max_position_embeddings - prompt_length
    if room < 1:
        raise DataError(
            f"{row.where}: the prompt has {prompt_length} tokens, the model's context {spec.max_position_embeddings}"
        )
    own = row.values.get("max_response_length")
    if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own < 1):
        raise DataError(f"{row.where}: max_response_length={own!r} must be a whole number of at least 1")
    return min(room, own or sampling.max_response_length or room)


def generate(ready: Prepared, world: World, tick: Callable[[], None] = lambda: None) -> None:
    """Generate for all prompts and write the file on rank 0; ``tick`` is called after each step of the generator.

    Collective over the world: every rank of it must call."""
    config = ready.config
    started = time.perf_counter()
    mesh = build_mesh(world, range(world.size), ready.layout)
    dtype = config.model.torch_dtype(world.device)
    decoder = Decoder(ready.spec, "lm", mesh.pp_rank, ready.layout.pp, mesh.tp, dtype, world.device)
    load_pretrained(decoder, config.model.path)
    generator = Generator(decoder, mesh, config.generation, read_eos_ids(config.model.path))
    # before any rank generates: one that cannot load its weights must not leave the others in a collective for long
    world.all.barrier("generate:loaded")
    loaded = time.perf_counter()
    requests = replica_requests(ready, mesh.dp_rank)
    completions = generator.generate(requests, config.sampling, config.sampling.seed, 0, tick)
    is_leader = mesh.replica.rank == 0
    payload = json.dumps([record(completion) for completion in completions]).encode() if is_leader else b""
    parts = world.all.gather_bytes(payload, "generate:results")
    if parts is None:
        return
    records = sorted(entry for part in parts if part for entry in json.loads(part))
    write_rows(ready, records)
    num_tokens = sum(len(entry[1]) for entry in records)
    seconds = time.perf_counter() - loaded
    print(
        f"{len(records)} responses, {num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.0f} tokens/s; "
        f"{loaded - started:.1f} s to load) on {ready.layout}: {config.out}",
        file=sys.stderr,
    )


def replica_requests(ready: Prepared, replica: int) -> list[Request]:
    """This replica's rows: whole groups, so that a prompt is computed once; token counts (at most) balanced over replicas."""
    n = ready.config.sampling.n
    longest = [len(prompt) + n * limit for prompt, limit in zip(ready.prompts, ready.limits, strict=True)]
    requests = []
    for index in partition_by_tokens(longest, ready.layout.dp)[replica]:
        prompt, limit = ready.prompts[index], ready.limits[index]
        requests += [Request(index * n + j, index, prompt, limit) for j in range(n)]
    return requests


def record(completion: Completion) -> tuple[int, list[int], list[float], str]:
    return completion.row_id, completion.token_ids, completion.log_probs_t1.tolist(), completion.finish_reason


def write_rows(ready: Prepared, records: Sequence[Sequence[Any]]) -> None:
    """``records``: (row id, response ids, log-probs, finish reason) of all rows in the order of their row ids."""
    n = ready.config.sampling.n
    out = Path(ready.config.out)
    texts = decode(ready.tokenizer, [entry[1] for entry in records]) if ready.tokenizer is not None else [None] * len(records)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for (row_id, response_ids, log_probs, finish_reason), text in zip(records, texts, strict=True):
            row = {
                "id": ready.ids[row_id // n],
                "prompt_ids": ready.prompts[row_id // n],
                "response_ids": response_ids,
                "log_probs": log_probs,
                "text": text,
                "finish_reason": finish_reason,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.replace(out)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: overrides, and ``--config FILE`` if there are many."""
    run_offline_program("generate", __doc__, prepare, generate, argv)


if __name__ == "__main__":
    main()
