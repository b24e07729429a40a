"""The generator: rows in, completions out, on every rank of a generation replica (pp * tp ranks that hold one model).

A call allocates its KV cache and gives it back. Every rank of the replica passes the same requests and gets the same
completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.paged_attention import KVCache
from rlhf_spmd.generation.runner import Draws, Runner
from rlhf_spmd.generation.scheduler import Limits, Scheduler, Step
from rlhf_spmd.generation.sequence import Completion, Interner, Request, Row
from rlhf_spmd.models.decoder import Block, Decoder
from rlhf_spmd.parallel.mesh import Mesh


@dataclass
class GenerationStats:
    """Counts of one call on this replica. ``hit_tokens``: prompt tokens found in the cache. ``prefill_tokens``: computed tokens
    beyond one per drawn token (prompts, and what preemption made to be computed again). ``num_pages``: size of the cache."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    num_pages: int = 0
    seconds: float = 0.0


class Generator:
    """Generates with ``decoder``, this rank's shard under ``mesh`` (generation axes). ``stats`` describes the last call."""

    def __init__(self, decoder: Decoder, mesh: Mesh, config: GenerationConfig, eos_ids: Collection[int]) -> None:
        assert decoder.head_kind == "lm", f"generation needs a language-model head, this decoder has {decoder.head_kind!r}"
        self.decoder, self.mesh, self.config = decoder, mesh, config
        self.eos_ids = frozenset(eos_ids)
        self.stats = GenerationStats()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        step: int,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """One completion per request, in their order; ``seed`` and ``step`` key the draws (``sampling.seed`` and ``.n`` are the
        caller's business). ``tick`` is called after each step: a replica of one rank shows no other sign of life.

        Raises ValueError for rows that cannot be generated. Collective over the replica: every rank of it must call, in program
        order, with the same arguments.
        """
        if not requests:
            self.stats = GenerationStats()
            return []
        started = time.perf_counter()
        self._check(requests)
        limits = self._limits(requests)
        scheduler = Scheduler(limits)
        rows = _build_rows(requests, limits.page_size)
        for row in rows:
            scheduler.add(row)
        eos_ids = frozenset() if sampling.ignore_eos else self.eos_ids
        self.stats = stats = GenerationStats(num_pages=limits.num_pages)
        token_ids: list[list[int]] = [[] for _ in requests]
        with torch.no_grad():
            runner = Runner(self.decoder, self.mesh, self._build_cache(limits.num_pages), requests, Draws(sampling, seed, step))
            while not scheduler.finished:
                plan = scheduler.schedule()
                _record(plan, runner.run(plan), token_ids, eos_ids, stats)
                scheduler.complete(plan)
                tick()
            log_probs = runner.results()
        stats.hit_tokens, stats.preemptions = scheduler.num_hit_tokens, scheduler.num_preemptions
        stats.seconds = time.perf_counter() - started
        return [_complete(request, row, ids, log_probs) for request, row, ids in zip(requests, rows, token_ids, strict=True)]

    def _check(self, requests: Sequence[Request]) -> None:
        vocabulary = self.decoder.spec.vocab_size
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"row {request.row_id}: the prompt is empty; at least one token is needed")
            if request.max_new_tokens < 1:
                raise ValueError(f"row {request.row_id}: max_new_tokens={request.max_new_tokens} must be at least 1")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
                raise ValueError(f"row {request.row_id}: prompt ids must lie in 0 .. {vocabulary - 1}, the model's vocabulary")
        if len({request.row_id for request in requests}) < len(requests):
            raise ValueError("row ids must differ: they key the random draws")

    def _limits(self, requests: Sequence[Request]) -> Limits:
        config = self.config
        return Limits(
            page_size=config.page_size,
            num_pages=config.num_pages or self._agree_on_pages(requests),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
            chunked_prefill=config.enable_chunked_prefill,
        )

    def _cache_shape(self) -> tuple[int, int, int]:
        """(layers, KV heads, head_dim) of this rank."""
        block = self.decoder.layers[0]
        assert isinstance(block, Block)
        return len(self.decoder.layers), block.num_kv_heads, block.head_dim

    def _agree_on_pages(self, requests: Sequence[Request]) -> int:
        """What the rows that can run at once may need, but no more than memory has; the least over the replica's ranks.

        Collective over the replica: every rank of it must call, in program order.
        """
        lengths = sorted((len(r.prompt_ids) + r.max_new_tokens - 1 for r in requests), reverse=True)
        wanted = sum(-(-length // self.config.page_size) for length in lengths[: self.config.max_num_seqs])
        page_bytes = KVCache.page_bytes(*self._cache_shape(), self.config.page_size, self.decoder.dtype)
        affordable = int(self.config.gpu_memory_utilization * _free_bytes(self._device)) // page_bytes
        return int(self.mesh.replica.all_reduce(torch.tensor([max(min(wanted, affordable), 1)]), "generation:pages", "min"))

    def _build_cache(self, num_pages: int) -> KVCache:
        return KVCache(*self._cache_shape(), num_pages, self.config.page_size, self.decoder.dtype, self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.decoder.parameters()).device


def _free_bytes(device: torch.device) -> int:
    """Memory that a cache could take: on GPUs what the driver has left plus what torch holds unused, on CPU MemAvailable."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _build_rows(requests: Sequence[Request], page_size: int) -> list[Row]:
    interner = Interner(page_size)
    rows = []
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        rows.append(Row(index, length, length + request.max_new_tokens, interner.contents(request.prompt_ids)))
    return rows


def _record(plan: Step, drawn: list[int], token_ids: list[list[int]], eos_ids: frozenset[int], stats: GenerationStats) -> None:
    """Append the drawn tokens to their rows."""
    tokens = iter(drawn)
    computed = 0
    for row, _, count, samples in plan.work:
        computed += count
        if samples:
            token = next(tokens)
            token_ids[row.index].append(token)
            row.length += 1
            row.stopped = token in eos_ids
    stats.steps += 1
    stats.decode_tokens += len(drawn)
    stats.prefill_tokens += computed - len(drawn)


def _complete(request: Request, row: Row, ids: list[int], log_probs: tuple[Tensor, Tensor]) -> Completion:
    sampled, at_one = (part[row.index, : len(ids)].clone() for part in log_probs)
    return Completion(request.row_id, ids, sampled, at_one, "stop" if row.stopped else "length")
