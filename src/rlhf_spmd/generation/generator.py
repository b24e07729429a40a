"""The generator: requests in, completions out, on every rank of a generation replica (pp * tp ranks that hold one model).

A call allocates its KV cache. ``generate`` frees it again; ``generate_until`` may keep it for the rows that it keeps. Every rank of
the replica passes the same requests and gets the same completions.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch

from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.call import FinishedGroups, GenerationCall, GenerationLimits, LimitWatch
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch, DecodeMicroBatches, partition_groups
from rlhf_spmd.generation.graphs import Graphs, reason_against_captured_sums
from rlhf_spmd.generation.kv_cache import Backend, KVCache, cache_room, kv_tensors_per_page
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.page_allocator import SPARE_SLOTS
from rlhf_spmd.generation.recurrent_states import RecurrentStates, slot_bytes
from rlhf_spmd.generation.routed_experts import ExpertPages
from rlhf_spmd.generation.sampler import num_drawable_ids
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request, SequenceState
from rlhf_spmd.generation.stopping import build_stop_criteria
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.packing import round_up
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.parallel.mesh import Mesh


class Generator:
    """Generates with ``decoder``, this rank's shard under ``mesh``, whose axes are those of generation.

    - decoding: turns token ids into text, for stop strings; ids that its tokenizer lacks are not drawn
    - local_size: ranks of this host, which share its memory on CPUs
    - records_experts: completions have the experts that their tokens took
    - num_drawable: only token ids below this number are drawn
    - stats: counts of the last call
    - kept: rows that :meth:`generate_until` has not ended yet
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        config: GenerationConfig,
        eos_ids: Collection[int],
        decoding: Decoding | None = None,
        local_size: int = 1,
        records_experts: bool = False,
    ) -> None:
        assert decoder.head_kind == "lm", f"generation needs a language-model head, this decoder has {decoder.head_kind!r}"
        self.decoder, self.mesh = decoder, mesh
        self.config, self.decoding = config, decoding
        self.eos_ids = frozenset(eos_ids)
        self.num_drawable = num_drawable_ids(decoder.spec.vocab_size, self.eos_ids, decoding)
        self.stats = GenerationStats()
        self.reserved = False  # True from :meth:`reserve_pages` on: pages and the prompts in them stay, even without rows
        self.local_size, self.records_experts = local_size, records_experts
        self.kept: list[SequenceState] = []
        self._micro_batches: DecodeMicroBatches | None = None  # those of the kept rows, if their pages are kept too
        self._has_warned = False  # that rows in flight find no memory
        self._graphs: list[Graphs] = []  # by micro-batch; they outlive the calls
        self._has_tried_graphs = False

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        step: int,
        tick: Callable[[], None] = lambda: None,
        environments: Environments | None = None,
        version: int | None = None,
        finished_groups: FinishedGroups | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in their order.

        - seed, step: key the draws; ``sampling.seed`` and ``sampling.n`` are not read
        - tick: called after each step; a replica of one rank shows no other sign of life
        - environments: answer between the model's turns
        - version: the version of the weights, noted with each token; None: ``step``
        - finished_groups: gets rows as they end

        Raises ValueError for rows that cannot be generated, NotFinite for a drawn token whose log-prob is not finite.
        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        started = time.perf_counter()
        call = self._check(requests, sampling, seed, step if version is None else version, tick)
        call = replace(call, environments=environments, finished_groups=finished_groups)
        rows = [SequenceState(request, step) for request in requests]
        if rows and self._micro_batches is not None:
            self._micro_batches.offload()  # or the pages of kept rows would leave no room
        if rows:
            self._advance(rows, None, call)
        self.stats.seconds = time.perf_counter() - started
        return [row.completion() for row in rows]

    def generate_until(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        step: int,
        limits: GenerationLimits,
        version: int,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """Generate as :meth:`generate` does, and return the rows that have ended when ``limits`` are reached.

        The other rows are ``kept`` and go on in the next call. ``step`` keys the draws of the new ``requests``; kept rows keep
        the step that they began with. If the call raises, all of them are kept with the tokens that they had before.

        ``version`` names the weights. While it stays the same, kept rows keep their pages (see :meth:`before_training`) and
        come out as if they had never been interrupted. Other weights compute their tokens again, unless ``kv_cache`` says that
        what the old weights computed is good enough. Collective over the replica: every rank of it must call, in program order,
        with the same arguments.
        """
        call = self._check([*(row.request for row in self.kept), *requests], sampling, seed, version, tick)
        self.kept += [SequenceState(request, step) for request in requests]
        if self.kept:
            micro_batches, self._micro_batches = self._usable(self._micro_batches, self.kept, version), None
            call = replace(call, interrupts=LimitWatch(limits, self.kept, self.mesh.replica).interrupts)
            num_new_before = [row.num_new for row in self.kept]
            try:
                self._micro_batches = self._advance(self.kept, micro_batches, call)
            except BaseException:
                for row, num_new in zip(self.kept, num_new_before, strict=True):
                    row.rewind(num_new)
                raise
        self.stats.seconds = self.stats.busy_seconds
        ended = [row.completion() for row in self.kept if row.ended]
        self.kept = [row for row in self.kept if not row.ended]
        if not (self.kept or self.reserved):
            self._micro_batches = None
        return ended

    def drop(self, row_ids: Collection[int]) -> None:
        """Forget kept rows. Every rank of the replica calls it with the same ids."""
        if self._micro_batches is not None:
            self._micro_batches.forget([row for row in self.kept if row.request.row_id in row_ids])
        self.kept = [row for row in self.kept if row.request.row_id not in row_ids]

    @property
    def page_usage(self) -> float:
        """Return the share of the kept rows' pages that rows refer to, between calls."""
        pages = [
            micro_batch.scheduler.pages for micro_batch in (self._micro_batches.micro_batches if self._micro_batches else ())
        ]
        return sum(len(each.used) for each in pages) / max(sum(each.num_pages for each in pages), 1)

    def reserve_pages(self, longest: int) -> int:
        """Give every later cache room for ``max_num_seqs`` rows of ``longest`` tokens, as far as memory allows.

        Rows that come later thus find room, and the pages of equal prompts. Returns how many tokens a row may have.
        Collective over the replica: every rank of it must call, in program order.
        """
        self._try_graphs()
        self.reserved = True
        config = self.config
        num_pages = config.num_pages
        if num_pages is None:
            num_rows, affordable_pages = self._affordable(config.max_num_seqs)
            num_pages = min(num_rows * -(-(longest - 1) // config.page_size), affordable_pages)
            self.config = replace(config, num_pages=num_pages, max_num_seqs=num_rows)
        longest = min(longest, num_pages * config.page_size + 1)
        return longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)

    @contextmanager
    def reserving(self, longest: int) -> Iterator[int]:
        """Open a context in which pages are reserved: :meth:`reserve_pages`, whose result it yields. Training comes behind it.

        Collective over the replica: every rank of it must call, in program order.
        """
        self._try_graphs()  # which may change the configuration for good
        config = self.config
        try:
            yield self.reserve_pages(longest)
        finally:
            self.before_training()
            self.reserved = False
            self.config = config

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Open a context that begins without kept rows. Those of before are kept again at its end."""
        rows, micro_batches = self.kept, self._micro_batches
        self.kept, self._micro_batches = [], None
        try:
            yield
        finally:
            self.kept, self._micro_batches = rows, micro_batches

    def before_training(self) -> None:
        """Free the pages of kept rows, or do what ``kv_cache`` says. Their tokens stay. Training comes before the next call."""
        if self.config.kv_cache == "free":
            self._micro_batches = None
        elif self.config.kv_cache == "offload" and self._micro_batches is not None:
            self._micro_batches.offload()

    def _check(
        self, requests: Sequence[Request], sampling: SamplingConfig, seed: int, version: int, tick: Callable[[], None]
    ) -> GenerationCall:
        """Return the call on ``requests``, whose ``stats`` are the generator's. Raises ValueError for rows that cannot be generated.

        Collective over the replica, the first time: every rank of it must call, in program order.
        """
        self._try_graphs()
        vocabulary = self.decoder.spec.vocab_size
        stop = build_stop_criteria(sampling, self.eos_ids, self.decoding, "sampling")
        for overrides, row_id in {r.overrides: r.row_id for r in requests if r.overrides}.items():
            check_section(sampling.with_overrides(overrides), f"sampling of row {row_id}")
        rows_have_minimum = any(request.min_new_tokens for request in requests)
        sampling.check_ids(vocabulary, self.num_drawable, stop.token_ids, rows_have_minimum, "sampling")
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"row {request.row_id}: the prompt is empty; at least one token is needed")
            if request.max_new_tokens < 1:
                raise ValueError(f"row {request.row_id}: max_new_tokens={request.max_new_tokens} must be at least 1")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
                raise ValueError(f"row {request.row_id}: prompt ids must lie in 0 .. {vocabulary - 1}, the model's vocabulary")
        if len({request.row_id for request in requests}) < len(requests):
            raise ValueError("row ids must differ: they key the random draws")
        self.stats = GenerationStats()
        return GenerationCall(
            self.decoder, self.mesh, self.config, sampling, stop, self.num_drawable, seed, version, tick, self.stats
        )

    def _try_graphs(self) -> None:
        """Turn CUDA graphs off if they cannot have the sums over tp.

        Collective over tp, the first time: every rank of it must call, in program order.
        """
        tp = self.decoder.tp
        if self._has_tried_graphs or tp.size == 1 or not self.config.captures(self._device, self.decoder.pp):
            return
        self._has_tried_graphs = True
        if reason := reason_against_captured_sums(tp, self._device):
            self.config = replace(self.config, enforce_eager=True)
            if tp.rank == 0:
                print(f"warning: generation runs without CUDA graphs, up to four times as slow: {reason}", file=sys.stderr)

    def _usable(
        self, micro_batches: DecodeMicroBatches | None, rows: Sequence[SequenceState], version: int
    ) -> DecodeMicroBatches | None:
        """Return ``micro_batches`` if these rows fit, and ``version`` or, with ``kv_cache``, any weights filled their pages."""
        if micro_batches is None or (micro_batches.version != version and self.config.kv_cache == "free"):
            return None
        return micro_batches if micro_batches.fits(rows) else None

    def _advance(
        self, rows: Sequence[SequenceState], micro_batches: DecodeMicroBatches | None, call: GenerationCall
    ) -> DecodeMicroBatches:
        """Draw tokens for ``rows`` in ``micro_batches``, or in new ones for None. Returns these."""
        started = time.perf_counter()
        if micro_batches is None:
            micro_batches = DecodeMicroBatches(self._build_micro_batches(rows), call.version)
        with torch.no_grad():
            micro_batches.run(rows, call)
        self.stats.busy_seconds += time.perf_counter() - started
        return micro_batches

    def _build_micro_batches(self, rows: Sequence[SequenceState]) -> list[DecodeMicroBatch]:
        """Build as many micro-batches as there are pipeline stages.

        There are fewer where one would lack a group, a row in flight or pages for the longest row. Where pages are reserved, later
        calls bring groups.

        Together they have the pages that the rows which can run at once may need, as far as memory allows.
        Collective over the replica: every rank of it must call, in program order.
        """
        config = self.config
        num_rows = config.max_num_seqs if self.reserved else min(len(rows), config.max_num_seqs)
        num_affordable, total_pages = (num_rows, config.num_pages) if config.num_pages else self._affordable(num_rows)
        if num_affordable < num_rows:
            config = replace(config, max_num_seqs=num_affordable)
        pages_of = {row: -(-(row.limit - 1) // config.page_size) for row in rows}
        num_groups = config.max_num_seqs if self.reserved else len({row.request.group_id for row in rows})
        number = min(self.mesh.layout.pp, num_groups, config.max_num_seqs, total_pages // max(pages_of.values()))
        number = max(number, 1)
        num_seqs = config.max_num_seqs // number
        page_share = total_pages // number
        recurrent = self.decoder.spec.delta_rule is not None
        self._graphs += [Graphs() for _ in range(number - len(self._graphs))]
        micro_batches = []
        for members, graphs in zip(partition_groups(rows, [()] * number), self._graphs, strict=False):
            num_needed = sum(sorted((pages_of[row] for row in members), reverse=True)[:num_seqs])
            num_pages = page_share if config.num_pages else self._num_pages(num_needed, page_share)
            num_slots = num_seqs if self.reserved or not recurrent else min(num_seqs, len(members))
            part = replace(config, num_pages=num_pages, max_num_seqs=num_seqs)
            micro_batches.append(DecodeMicroBatch(part, self._build_cache(num_pages, num_slots), graphs, num_slots, recurrent))
        return micro_batches

    def _num_pages(self, num_needed: int, page_share: int) -> int:
        """Return the number of pages of a micro-batch whose rows may need ``num_needed``; at most ``page_share``."""
        # few sizes, so that the next call's cache may have this one's addresses and keep its graphs
        if capabilities(self._device).graphs:
            num_needed = round_up(num_needed, 1 << max(num_needed.bit_length() - 4, 0))
        return max(min(num_needed, page_share), 1)

    def _build_cache(self, num_pages: int, num_slots: int) -> KVCache:
        """Return an empty cache with this many pages, and with states of linear attention for ``num_slots`` rows and for prompts."""
        num_states = num_slots + SPARE_SLOTS * self.config.enable_prefix_caching
        states = RecurrentStates(self.decoder, num_states, self._device) if self.decoder.num_linear else None
        full_shape, *global_shapes = [(*shape, num_pages, self.config.page_size) for shape in self._cache_shapes]
        storage = self.decoder.dtype, self._device, self._backend, self._value_dim
        global_cache = KVCache(*global_shapes[0], *storage) if global_shapes else None
        experts = ExpertPages(self.decoder, *full_shape[-2:], self._device) if self.records_experts else None
        return KVCache(*full_shape, *storage, states, global_cache, experts)

    @property
    def _cache_shapes(self) -> list[tuple[int, int, int]]:
        """Return layers with attention (at least one, so that there are pages), KV heads and head size, by kind of heads."""
        decoder = self.decoder
        shapes = [cache_shape(spec, decoder.tp.rank, decoder.tp.size) for spec in decoder.spec.kinds_of_heads()]
        counts = Counter(map(decoder.spec.attention_kind, decoder.layer_ids))
        numbers = [counts["full"], counts["global"]] if len(shapes) > 1 else [counts["full"] + counts["global"]]
        return [(max(number, 1), *shape) for number, shape in zip(numbers, shapes, strict=True)]

    @property
    def _value_dim(self) -> int | None:
        """Return how many elements of the cache's keys are values; None: values are kept beside keys."""
        latent = self.decoder.spec.latent
        return None if latent is None else latent.kv_rank

    def _affordable(self, num_rows: int) -> tuple[int, int]:
        """Return how many rows may be in flight, and the number of pages: the least over the replica's ranks.

        There are at most ``num_rows`` rows. Their states take at most half of the cache's memory; the rest is for pages.

        Collective over the replica: every rank of it must call, in program order.
        """
        memory = room = cache_room(self.config, self.decoder, self._device, self.local_size)
        max_rows = num_rows
        state_bytes = slot_bytes(self.decoder)
        if state_bytes:
            num_rows = max(min(num_rows, int(room / 2) // state_bytes), 1)
            num_spare = SPARE_SLOTS * self.config.enable_prefix_caching * self.mesh.layout.pp
            room -= (num_rows + num_spare) * state_bytes
        page_form = self.config.page_size, self.decoder.dtype, kv_tensors_per_page(self._backend.ops, self._value_dim)
        page_bytes = sum(KVCache.page_bytes(*shape, *page_form) for shape in self._cache_shapes)
        page_bytes += self.config.page_size * ExpertPages.token_bytes(self.decoder) if self.records_experts else 0
        counts = torch.tensor([num_rows, max(int(room) // page_bytes, 1)])
        num_rows, num_pages = self.mesh.replica.all_reduce(counts, "generation:pages", "min").tolist()
        if num_rows < max_rows and not self._has_warned and self.mesh.replica.rank == self.mesh.dp.rank == 0:
            self._has_warned = True
            print(
                f"warning: generation has {num_rows} rows in flight, not {max_rows}: half of the cache's {memory / 2**30:.2f} GiB is "
                f"for states of linear attention, {state_bytes / 2**20:.2f} MiB a row; raise gpu_memory_utilization or generation.tp",
                file=sys.stderr,
            )
        return num_rows, num_pages

    @cached_property
    def _backend(self) -> Backend:
        """Return the attention, which the first call chooses: before it the decoder may have no memory."""
        dtype, device = self.decoder.dtype, self._device
        name = choose_backend(self.config.attention, "auto", dtype, device, "generation.attention")
        return build_backend(name, dtype, device, self.decoder.ops.chunk_invariant)

    @property
    def _device(self) -> torch.device:
        return next(self.decoder.parameters()).device
