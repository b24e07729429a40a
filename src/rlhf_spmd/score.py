"""Computes log-probs of responses. After ``scripts/quickstart.sh``, which makes a model and pairs:

rlhf-spmd score --nproc-per-node 2 model.path=runs/quickstart/ppo/export \\
    data.path=runs/quickstart/task/sft.jsonl out=scores.jsonl

Input: one row per response with ``prompt_ids`` and ``response_ids``, or with ``prompt`` (text or chat messages) and ``response``
(text); optional ``id`` (else the row's number). Nothing is appended to a response.
``model.path`` is a Hugging Face directory, a run's directory or one of its checkpoints.

Output, in input order: ``id``, ``response_ids``, ``log_probs`` (of the response tokens, temperature 1, in nats, full precision).
The numbers come from the forward pass and the head that training uses.
"""

from __future__ import annotations

import math
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.checkpoint.save import RoleState
from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.data.balance import micro_batches_by_tokens
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.data.encoding import check_ids
from rlhf_spmd.data.files import DataError, Row, list_paths, named_row
from rlhf_spmd.data.sft import ID_KEYS, PromptResponseConfig, encode_pairs, has_ids
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.inference.inference_engine import gather_records, rows_of_replica
from rlhf_spmd.inference.inference_program import InferenceConfig, inference_program, read_config, say_warnings
from rlhf_spmd.inference.loaded_model import CheckedModel, base_directory, load_from_checkpoint, not_finite, read_weights
from rlhf_spmd.inference.output_files import check_out, write_rows
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.objective import MicroBatch, pack_rows, response_log_probs, sequence_lengths
from rlhf_spmd.workers.train_engine import TrainEngine


@dataclass(frozen=True)
class ScoreConfig(InferenceConfig):
    """Everything that ``score`` takes.

    - max_token_len_per_gpu: tokens of a micro-batch on one rank
    """

    data: PromptResponseConfig = field(default_factory=PromptResponseConfig)
    max_token_len_per_gpu: PositiveInt = 16384


@dataclass(frozen=True)
class ScoreJob(CheckedModel[ScoreConfig]):
    """The checked input. ``batch``: prompt_ids and response_ids, in input order; ``ids``: the rows' ids in the input."""

    ids: list[Any]
    batch: Batch

    @property
    def must_match(self) -> dict[str, str]:
        """Return values that must be equal on all ranks, see :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        tokens = [zlib.crc32(self.batch[key].values.numpy()) for key in ID_KEYS]
        return {"set of rows": str([len(self.ids), *tokens]), **super().must_match}


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> ScoreJob:
    """Return the checked input. Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config = read_config(ScoreConfig, path, overrides)
    if launch.rank == 0:
        check_out(Path(config.out), *list_paths(config.data.path))
    config, spec, layout, checkpoint = read_weights(config, launch)
    rows = config.data.read()
    tokenizer = None if all(map(has_ids, rows)) else load_tokenizer(config.model.path, required=False)
    say_warnings(launch, config.data.warnings("data", tokenizer))
    pairs = encode_pairs(rows, config.data, tokenizer, spec.vocab_size)
    for row, pair in zip(rows, pairs, strict=True):
        with named_row(row.where):
            for ids, key in zip(pair, ID_KEYS, strict=True):
                check_ids(ids, spec.vocab_size, key)
        check_length(row, len(pair[0]), len(pair[1]), config, spec)
    number = torch.arange(len(rows))
    columns = {key: ragged([pair[side] for pair in pairs], torch.int64) for side, key in enumerate(ID_KEYS)}
    ids = [row.values.get("id", index) for index, row in enumerate(rows)]
    return ScoreJob(config, spec, layout, checkpoint, tokenizer, ids, Batch(number, number.clone(), columns))


def check_length(row: Row, prompt: int, response: int, config: ScoreConfig, spec: ModelSpec) -> None:
    """Raise DataError for a row beyond the model's context, ValueError for one beyond the micro-batch's budget."""
    size = f"{row.where}: prompt({prompt}) + response({response}) = {prompt + response} tokens"
    if prompt + response > spec.max_position_embeddings:
        raise DataError(
            f"{size}, but the model's context is max_position_embeddings={spec.max_position_embeddings}; shorten the row"
        )
    if prompt + response > config.max_token_len_per_gpu * config.layout.cp:
        shared = f" * layout.cp={config.layout.cp}" if config.layout.cp > 1 else ""
        raise ValueError(f"{size}, more than max_token_len_per_gpu={config.max_token_len_per_gpu}{shared}; raise it")


def score(job: ScoreJob, world: World) -> None:
    """Score all rows and write the file on rank 0.

    Collective over the world: every rank of it must call. Raises FloatingPointError if a log-prob is not finite.
    """
    started = time.perf_counter()
    config, layout, model = job.config, job.layout, job.config.model
    mesh = build_mesh(world, range(world.size), layout)
    dtype = model.torch_dtype(world.device)
    source = base_directory(model.path, job.checkpoint)
    engine = TrainEngine(job.spec, source, "lm", mesh, None, dtype=dtype, device=world.device, attention=model.attention)
    weights = RoleState(engine.param_shards(), engine.local_tensors())
    load_from_checkpoint(job.spec, weights, model.path, job.checkpoint, world)
    # before any rank computes: the others must not wait in a collective for one that cannot load its weights
    world.all.barrier("score:loaded")
    loaded = time.perf_counter()
    lengths = sequence_lengths(job.batch)
    replica_batch = job.batch.take(rows_of_replica(lengths, mesh))
    records = score_rows(engine, replica_batch, config.max_token_len_per_gpu * layout.cp)
    scored = gather_records(world, records if mesh.tp_rank == mesh.cp_rank == 0 else [], "score:results")
    if scored is None:
        return
    for row, log_probs in scored:
        if not all(map(math.isfinite, log_probs)):
            raise not_finite(row, job.ids[row], config.model)
    responses = job.batch["response_ids"].rows()
    write_rows(config.out, ({"id": job.ids[i], "response_ids": responses[i].tolist(), "log_probs": x} for i, x in scored))
    seconds = time.perf_counter() - loaded
    all_log_probs = [log_prob for _, row in scored for log_prob in row]
    print(
        f"{len(scored)} rows, {sum(lengths)} tokens in {seconds:.1f} s ({sum(lengths) / seconds:.0f} tokens/s; "
        f"{loaded - started:.1f} s to load) on {layout}; {len(all_log_probs)} response tokens of mean log-prob "
        f"{sum(all_log_probs) / len(all_log_probs):.4f}: {config.out}",
        file=sys.stderr,
    )


def score_rows(engine: TrainEngine, batch: Batch, max_tokens: int) -> list[tuple[int, list[float]]]:
    """Return (row id, log-probs of its response tokens) on the last stage; nothing on the others.

    Collective over the pool: every rank of it must call, in program order.
    """

    def head(decoder: Decoder, hidden: Tensor, micro: MicroBatch) -> Tensor:
        return response_log_probs(decoder, hidden, micro, temperature=1.0)[0]

    lengths = sequence_lengths(batch)
    where = "max_token_len_per_gpu"
    number = torch.tensor([len(micro_batches_by_tokens(lengths, max_tokens, where=where))])
    index = micro_batches_by_tokens(lengths, max_tokens, int(engine.mesh.dp.all_reduce(number, "control", "max")), where)
    outputs = engine.forward([pack_rows(batch.take(rows), engine.device) for rows in index], head)
    if not engine.mesh.last_stage:
        return []
    records = []
    for rows, values in [pair for pair in zip(index, outputs, strict=True) if pair[0]]:
        micro = batch.take(rows)
        log_probs = values.cpu().split(micro["response_ids"].lengths.tolist())
        records += [(row, x.tolist()) for row, x in zip(micro.row_ids.tolist(), log_probs, strict=True)]
    return records


# keys: the configuration's keys; main: the command line
keys, main = inference_program("score", __doc__, ScoreConfig, prepare, lambda job, world, board: score(job, world))


if __name__ == "__main__":
    main()
