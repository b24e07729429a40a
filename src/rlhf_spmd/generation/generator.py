"""The generator: rows in, completions out, on every rank of a generation replica (pp * tp ranks that hold one model).

A call allocates its KV cache and gives it back. Every rank of the replica passes the same requests and gets the same
completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.generation.balancing import exchange, pack, plan_moves, unpack
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.logit_rules import build_rules
from rlhf_spmd.generation.paged_attention import KVCache
from rlhf_spmd.generation.runner import Draws, Runner
from rlhf_spmd.generation.scheduler import Limits, Scheduler, Step
from rlhf_spmd.generation.sequence import Completion, Drawn, Interner, Progress, Request, Row
from rlhf_spmd.generation.speculation import Speculation
from rlhf_spmd.generation.stopping import Decode, Ends, StopStrings
from rlhf_spmd.generation.until import Until, Watch
from rlhf_spmd.models.attention import choose_attention
from rlhf_spmd.models.decoder import Block, Decoder
from rlhf_spmd.parallel.mesh import Mesh


@dataclass
class GenerationStats:
    """Counts of one call on this replica. ``hit_tokens``: prompt tokens found in the cache. ``prefill_tokens``: computed tokens
    beyond one per drawn token (prompts, and what preemption made to be computed again). ``num_pages``: size of the cache.
    ``draft_tokens``: guessed and computed, of which ``accepted_tokens`` came true.
    ``moved_rows``: that left for other replicas. ``seconds``: of the call; ``busy_seconds``: those without waits for other replicas."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    num_pages: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    moved_rows: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0


class Generator:
    """Generates with ``decoder``, this rank's shard under ``mesh`` (generation axes). ``decode``: token ids to text, for stop
    strings. ``stats`` describes the last call; ``kept`` are the rows that :meth:`generate_until` has not ended yet."""

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        config: GenerationConfig,
        eos_ids: Collection[int],
        decode: Decode | None = None,
    ) -> None:
        assert decoder.head_kind == "lm", f"generation needs a language-model head, this decoder has {decoder.head_kind!r}"
        self.decoder, self.mesh, self.config, self.decode = decoder, mesh, config, decode
        self.eos_ids = frozenset(eos_ids)
        self.stats = GenerationStats()
        self.reserved_bytes = 0  # free memory that others will take before the first step has ended
        self.kept: list[Progress] = []
        self._cached: _Cached | None = None

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

        Raises ValueError for rows that cannot be generated. Collective over the replica, with ``rebalance_steps`` over all
        replicas: every rank of it must call, in program order, a replica's with the same arguments.
        """
        started = time.perf_counter()
        self.stats = GenerationStats()
        self._check(requests, sampling)
        progress = [Progress(request, step) for request in requests]
        if self.config.rebalance_steps and self.mesh.dp.size > 1:
            progress = self._balance(progress, _Call(sampling, seed, step, tick))
        elif progress:
            self._advance(progress, None, _Call(sampling, seed, step, tick), None)
        self.stats.seconds = time.perf_counter() - started
        return [row.completion() for row in progress]

    def generate_until(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        step: int,
        until: Until,
        version: int,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """As :meth:`generate`, but returns when ``until`` says so, with the rows that have ended; the others are ``kept`` and go
        on in the next such call, after the new ``requests``' own ``step`` their draws still follow the one they began with.

        ``version`` names the weights. While it stays the same, kept rows keep their pages (see :meth:`drop_pages`) and come out
        as if never interrupted; under other weights their tokens are computed again, and new ones are drawn from those.
        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        self._check([*(row.request for row in self.kept), *requests], sampling)
        self.kept += [Progress(request, step) for request in requests]
        self.stats = GenerationStats()
        if self.kept:
            cached, self._cached = self._cached, None
            self._cached = self._advance(self.kept, cached, _Call(sampling, seed, version, tick), until)
        self.stats.seconds = self.stats.busy_seconds
        ended = [row.completion() for row in self.kept if row.finish_reason]
        self.kept = [row for row in self.kept if not row.finish_reason]
        if not self.kept:
            self.drop_pages()
        return ended

    def drop_pages(self) -> None:
        """Give back the cache of kept rows; their tokens stay."""
        self._cached = None

    def _advance(self, progress: Sequence[Progress], cached: _Cached | None, call: _Call, until: Until | None) -> _Cached:
        """Draw tokens for all rows until they end, or ``until`` says so; returns the cache that they lie in: ``cached`` if it
        was made by the same weights and they fit. Adds to ``stats``."""
        started = time.perf_counter()
        requests = [row.request for row in progress]
        if cached is None or cached.version != call.version or not cached.fits(requests):
            limits = self._limits(requests)
            cache = self._build_cache(limits.num_pages)
            cached = _Cached(call.version, Scheduler(limits), cache, Interner(limits.page_size), {})
        scheduler, stats = cached.scheduler, self.stats
        before = scheduler.num_hit_tokens, scheduler.num_preemptions
        rows = cached.enter(progress, call.sampling.min_response_length)
        firsts = [len(row.token_ids) for row in progress]
        ends = self._ends(call.sampling)
        rules = build_rules(call.sampling, ends.token_ids, rows, self.decoder.spec.vocab_size, self._device)
        watch = Watch(until, progress, self.mesh.replica) if until else None
        most = self.config.speculative_tokens
        speculation = Speculation(progress, most) if most else None
        with torch.no_grad():
            draws = Draws(call.sampling, call.seed, rules, most > 0)
            runner = Runner(self.decoder, self.mesh, cached.cache, progress, draws)
            while not scheduler.finished:
                plan = scheduler.schedule()
                _record(plan, runner.run(plan), progress, ends, stats, speculation)
                scheduler.complete(plan)
                call.tick()
                if watch is not None and watch.reached(plan, stats.decode_tokens):
                    break
            results = runner.results()
        for row, done, first in zip(rows, progress, firsts, strict=True):
            _note(row, done, first, results, call.version)
        stats.num_pages = scheduler.limits.num_pages
        stats.hit_tokens += scheduler.num_hit_tokens - before[0]
        stats.preemptions += scheduler.num_preemptions - before[1]
        stats.busy_seconds += time.perf_counter() - started
        return cached

    def _balance(self, rows: Sequence[Progress], call: _Call) -> list[Progress]:
        """``rows`` at their end. They may end on another replica, and this one helps with those of others.

        Collective over all replicas: every rank of them must call, in program order.
        """
        group, until = self.mesh.dp, Until(steps=self.config.rebalance_steps)
        dtype = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        going, ended = [(group.rank, row) for row in rows], []  # (where it belongs, row)
        cached: _Cached | None = None
        while True:
            counts = torch.cat(group.all_gather(torch.tensor([len(going)]), "generation:moves")).tolist()
            if not any(counts):
                break
            if moves := plan_moves(counts):
                if cached is not None:
                    going.sort(key=cached.cost_of_moving)
                outgoing: dict[int, list[Any]] = {}
                for source, to, number in moves:
                    if source == group.rank:
                        outgoing[to], going = [pack(*item) for item in going[:number]], going[number:]
                        self.stats.moved_rows += number
                going += [unpack(item, dtype) for item in exchange(group, outgoing)]
                if cached is not None:
                    cached.forget_all_but(row for _, row in going)
            if going:
                cached = self._advance([row for _, row in going], cached, call, until)
            else:
                call.tick()
            ended += [item for item in going if item[1].finish_reason]
            going = [item for item in going if not item[1].finish_reason]
        back: dict[int, list[Any]] = {}
        for home, row in ended:
            back.setdefault(home, []).append(pack(home, row))
        returned = [unpack(item, dtype)[1] for item in exchange(group, back)]
        place = {row.request.row_id: i for i, row in enumerate(rows)}
        return sorted(returned, key=lambda row: place[row.request.row_id])

    def _ends(self, sampling: SamplingConfig) -> Ends:
        if sampling.stop and self.decode is None:
            raise ValueError(f"sampling.stop={sampling.stop}: stop strings need a tokenizer, and this model has none")
        eos_ids = frozenset() if sampling.ignore_eos else self.eos_ids
        strings = StopStrings(sampling.stop, self.decode) if sampling.stop and self.decode else None
        return Ends(eos_ids.union(sampling.stop_token_ids), strings)

    def _check(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        sampling.check_ids(self.decoder.spec.vocab_size, () if sampling.ignore_eos else self.eos_ids, "sampling")
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
        free = _free_bytes(self._device) - self.reserved_bytes
        affordable = int(self.config.gpu_memory_utilization * free) // page_bytes
        return int(self.mesh.replica.all_reduce(torch.tensor([max(min(wanted, affordable), 1)]), "generation:pages", "min"))

    def _build_cache(self, num_pages: int) -> KVCache:
        attention = choose_attention(self.config.attention, self.decoder.dtype, self._device, "generation.attention")
        return KVCache(*self._cache_shape(), num_pages, self.config.page_size, self.decoder.dtype, self._device, attention)

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


@dataclass(frozen=True)
class _Call:
    """What a call was asked for. ``version``: of the weights."""

    sampling: SamplingConfig
    seed: int
    version: int
    tick: Callable[[], None]


@dataclass
class _Cached:
    """The KV cache of a call and whose it is: ``rows`` by row id. Kept between interrupted calls under one ``version``."""

    version: int
    scheduler: Scheduler
    cache: KVCache
    interner: Interner
    rows: dict[int, Row]

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether each of these rows could run alone."""
        longest = max(len(request.prompt_ids) + request.max_new_tokens - 1 for request in requests)
        return longest <= self.scheduler.limits.num_pages * self.scheduler.limits.page_size

    def cost_of_moving(self, item: tuple[int, Progress]) -> int:
        """Tokens of a row (the second of ``item``) that lie in pages, which stay behind."""
        row = self.rows.get(item[1].request.row_id)
        return row.num_computed if row else 0

    def forget_all_but(self, progress: Iterable[Progress]) -> None:
        """Drop the rows that are not in ``progress``."""
        staying = {done.request.row_id for done in progress}
        for row_id in [row_id for row_id, row in self.rows.items() if not row.ended and row_id not in staying]:
            self.scheduler.remove(self.rows.pop(row_id))

    def enter(self, progress: Sequence[Progress], min_new: int) -> list[Row]:
        """The rows of ``progress`` in its order; those that the scheduler does not know yet wait there."""
        rows = []
        for index, done in enumerate(progress):
            request = done.request
            row = self.rows.get(request.row_id)
            if row is None:
                length = len(request.prompt_ids)
                minimum = max(min_new, request.min_new_tokens)
                row = Row(index, length, length + request.max_new_tokens, self.interner.contents(request.prompt_ids), minimum)
                row.length += len(done.token_ids)
                self.scheduler.add(row)
            row.index = index
            rows.append(row)
        self.rows = {done.request.row_id: row for done, row in zip(progress, rows, strict=True)}
        return rows


def _record(
    plan: Step,
    drawn: list[int],
    progress: Sequence[Progress],
    ends: Ends,
    stats: GenerationStats,
    speculation: Speculation | None,
) -> None:
    """Append the drawn tokens to their rows: all up to the first that a row's draft did not foresee."""
    tokens = iter(drawn)
    computed = 0
    for row, _, count, samples in plan.work:
        computed += count
        if not samples:
            continue
        token_ids = progress[row.index].token_ids
        before, going = len(token_ids), True
        for guess in (*row.draft, None):
            token = next(tokens)
            if not going:
                continue  # drawn after a guess that failed
            token_ids.append(token)
            row.length += 1
            row.stopped = token in ends.token_ids
            if ends.strings is not None and not row.stopped and row.num_new >= row.min_new:
                row.stopped = ends.strings.completed_by_last(token_ids)
            going = token == guess and not row.stopped
        new = len(token_ids) - before
        stats.decode_tokens += new
        if speculation is not None:
            stats.draft_tokens += len(row.draft)
            stats.accepted_tokens += new - 1
            speculation.note(row.index, token_ids[before:])
            row.draft = [] if row.stopped else speculation.guess(row)
    stats.steps += 1
    stats.prefill_tokens += computed - len(drawn)


def _note(row: Row, done: Progress, first: int, results: tuple[Tensor, Tensor, Tensor, Tensor], version: int) -> None:
    """What the runner knows of a row's tokens from number ``first`` on."""
    count = len(done.token_ids) - first
    if count:
        sampled, at_one, *top = (part[row.index, first : len(done.token_ids)].clone() for part in results)
        done.parts.append(Drawn(sampled, at_one, torch.full((count,), version), *top))
    if row.ended:
        done.finish_reason = "stop" if row.stopped else "length"
