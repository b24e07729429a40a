"""The generator: requests in, completions out, on every rank of a generation replica (pp * tp ranks that hold one model).

A call allocates its KV cache. ``generate`` frees it again; ``generate_until`` may keep it for the rows that it keeps. Every rank of
the replica passes the same requests and gets the same completions.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.balancing import ReplicaBalancer, exchange, pack, plan_moves, unpack
from rlhf_spmd.generation.call import FinishedGroups, GenerationCall, GenerationLimits, LimitWatch
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch, DecodeMicroBatches, partition_groups
from rlhf_spmd.generation.graphs import Graphs, sums_fail
from rlhf_spmd.generation.kv_cache import Backend, KVCache, cache_room, kv_tensors_per_page
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.page_allocator import SPARE_SLOTS
from rlhf_spmd.generation.recurrent_states import RecurrentStates, slot_bytes
from rlhf_spmd.generation.routed_experts import ExpertPages
from rlhf_spmd.generation.sampler import drawable_ids
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
    - drawable: as many ids, from 0 on, may be drawn
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
        self.decoder, self.mesh, self.config, self.decoding = decoder, mesh, config, decoding
        self.eos_ids = frozenset(eos_ids)
        self.drawable = drawable_ids(decoder.spec.vocab_size, self.eos_ids, decoding)
        self.stats = GenerationStats()
        self.reserved = False  # by :meth:`reserve_pages`: pages and the prompts in them stay, even without rows
        self.local_size, self.records_experts = local_size, records_experts
        self.kept: list[SequenceState] = []
        self._micro_batches: DecodeMicroBatches | None = None  # of the kept rows, if their pages are kept too
        self._warned = False  # of rows in flight that find no memory
        self._graphs: list[Graphs] = []  # by micro-batch; they outlive the calls
        self._tried_graphs = False

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
        - version: of the weights, noted with each token; None: ``step``
        - finished_groups: gets rows as they end. Neither these nor rows with environments may move between replicas

        Raises ValueError for rows that cannot be generated, NotFinite for a drawn token whose log-prob is not finite.
        Collective over the replica, with ``rebalance_steps`` over all replicas: every rank of it must call, in program order,
        the ranks of a replica with the same arguments.
        """
        started = time.perf_counter()
        call = self._check(requests, sampling, seed, step if version is None else version, tick)
        call = replace(call, environments=environments, finished_groups=finished_groups)
        rows = [SequenceState(request, step) for request in requests]
        if self.config.rebalance_steps and self.mesh.dp.size > 1:
            assert environments is finished_groups is None, "rows of environments and of finished groups do not move"
            rows = self._balance(rows, call)
        elif rows:
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
            before = [row.num_new for row in self.kept]
            try:
                self._micro_batches = self._advance(self.kept, micro_batches, call)
            except BaseException:
                for row, num_new in zip(self.kept, before, strict=True):
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

    def reserve_pages(self, longest: int) -> int:
        """Give every later cache room for ``max_num_seqs`` rows of ``longest`` tokens, as far as memory allows.

        Rows that come later thus find room, and the pages of equal prompts. Returns how many tokens a row may have.
        Collective over the replica: every rank of it must call, in program order.
        """
        self._try_graphs()
        self.reserved = True
        config, num_pages = self.config, self.config.num_pages
        if num_pages is None:
            at_once, pages = self._affordable(config.max_num_seqs)
            num_pages = min(at_once * -(-(longest - 1) // config.page_size), pages)
            self.config = replace(config, num_pages=num_pages, max_num_seqs=at_once)
        longest = min(longest, num_pages * config.page_size + 1)
        return longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)

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
        vocabulary, stop = self.decoder.spec.vocab_size, build_stop_criteria(sampling, self.eos_ids, self.decoding, "sampling")
        for overrides, row_id in {r.overrides: r.row_id for r in requests if r.overrides}.items():
            check_section(sampling.with_overrides(overrides), f"sampling of row {row_id}")
        sampling.check_ids(
            vocabulary, self.drawable, stop.token_ids, any(request.min_new_tokens for request in requests), "sampling"
        )
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
            self.decoder, self.mesh, self.config, sampling, stop, self.drawable, seed, version, tick, self.stats
        )

    def _try_graphs(self) -> None:
        """Turn CUDA graphs off if they cannot have the sums over tp.

        Collective over tp, the first time: every rank of it must call, in program order.
        """
        tp = self.decoder.tp
        tried = self._tried_graphs
        self._tried_graphs = True
        if tried or tp.size == 1 or not self.config.captures(self._device, self.decoder.pp):
            return
        if why := sums_fail(tp, self._device):
            self.config = replace(self.config, enforce_eager=True)
            if tp.rank == 0:
                print(f"warning: generation runs without CUDA graphs, up to four times as slow: {why}", file=sys.stderr)

    def _usable(
        self, micro_batches: DecodeMicroBatches | None, rows: Sequence[SequenceState], version: int
    ) -> DecodeMicroBatches | None:
        """Return ``micro_batches`` if these rows fit, and the same weights filled their pages or that does not matter."""
        if micro_batches is None or not (micro_batches.version == version or self.config.kv_cache != "free"):
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

    def _balance(self, rows: Sequence[SequenceState], call: GenerationCall) -> list[SequenceState]:
        """Return ``rows`` when they have ended. They may end on another replica, and this one helps with those of others.

        Collective over all replicas: every rank of them must call, in program order.
        """
        group, balancer = self.mesh.dp, ReplicaBalancer(self.mesh.dp, self.config.rebalance_steps)
        call = replace(call, interrupts=balancer.interrupts)
        dtype = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        live, ended = [(group.rank, row) for row in rows], []  # (the replica that was asked for it, row)
        micro_batches: DecodeMicroBatches | None = None
        while any(left := balancer.take(len(live))):
            if moves := plan_moves(left):
                live.sort(key=lambda item: item[1].num_computed)  # the rows with the least in their pages leave
                outgoing: dict[int, list[Any]] = {}
                for source, to, number in moves:
                    if source == group.rank:
                        leaving, live = live[:number], live[number:]
                        outgoing[to] = [pack(*item) for item in leaving]
                        self.stats.moved_rows += number
                        if micro_batches is not None:
                            micro_batches.forget([row for _, row in leaving])
                live += [unpack(item, dtype) for item in exchange(group, outgoing)]
            if live:
                balancer.begin(len(live))
                here = [row for _, row in live]
                micro_batches = self._usable(micro_batches, here, call.version)
                micro_batches = self._advance(here, micro_batches, call)
            else:
                call.tick()
            ended += [item for item in live if item[1].ended]
            live = [item for item in live if not item[1].ended]
        self.stats.busy_seconds -= balancer.waited
        back: dict[int, list[Any]] = {}
        for home, row in ended:
            if home != group.rank:
                back.setdefault(home, []).append(pack(home, row))
        mine = [row for home, row in ended if home == group.rank]
        mine += [unpack(item, dtype)[1] for item in exchange(group, back)]
        order = {row.request.row_id: i for i, row in enumerate(rows)}
        return sorted(mine, key=lambda row: order[row.request.row_id])

    def _build_micro_batches(self, rows: Sequence[SequenceState]) -> list[DecodeMicroBatch]:
        """Build as many micro-batches as there are pipeline stages.

        There are fewer where one would lack a group, a row in flight or pages for the longest row.

        Together they have the pages that the rows which can run at once may need, as far as memory allows.
        Collective over the replica: every rank of it must call, in program order.
        """
        config = self.config
        dtype = self.decoder.dtype
        shapes = self._cache_shapes
        at_once = config.max_num_seqs if self.reserved else min(len(rows), config.max_num_seqs)
        in_flight, total = (at_once, config.num_pages) if config.num_pages else self._affordable(at_once)
        if in_flight < at_once:
            config = replace(config, max_num_seqs=in_flight)
        needs = {row: -(-(row.limit - 1) // config.page_size) for row in rows}
        wanted, groups = self.mesh.layout.pp, {row.request.group_id for row in rows}
        number = max(min(wanted, len(groups), config.max_num_seqs, total // max(needs.values())), 1)
        num_seqs, share = config.max_num_seqs // number, total // number
        micro_batches = []
        self._graphs += [Graphs() for _ in range(number - len(self._graphs))]
        for members, graphs in zip(partition_groups(rows, [()] * number), self._graphs, strict=False):
            num_needed = sum(sorted((needs[row] for row in members), reverse=True)[:num_seqs])
            # few sizes, so that the next call's cache may have this one's addresses and keep its graphs
            if capabilities(self._device).graphs:
                num_needed = round_up(num_needed, 1 << max(num_needed.bit_length() - 4, 0))
            num_pages = share if config.num_pages else max(min(num_needed, share), 1)
            recurrent = self.decoder.spec.delta_rule is not None
            slots = num_seqs if self.reserved or not recurrent else min(num_seqs, len(members))
            num_states = slots + SPARE_SLOTS * config.enable_prefix_caching
            states = RecurrentStates(self.decoder, num_states, self._device) if self.decoder.num_linear else None
            full_shape, *global_shapes = [(*shape, num_pages, config.page_size) for shape in shapes]
            storage = dtype, self._device, self._backend, self._value_dim
            global_cache = KVCache(*global_shapes[0], *storage) if global_shapes else None
            experts = ExpertPages(self.decoder, *full_shape[-2:], self._device) if self.records_experts else None
            cache = KVCache(*full_shape, *storage, states, global_cache, experts)
            part = replace(config, num_pages=num_pages, max_num_seqs=num_seqs)
            micro_batches.append(DecodeMicroBatch(part, cache, graphs, slots, recurrent))
        return micro_batches

    @property
    def _cache_shapes(self) -> list[tuple[int, int, int]]:
        """Return layers with attention (at least one, so that there are pages), KV heads and head size, by kind of heads."""
        decoder, tp = self.decoder, self.decoder.tp
        shapes = [cache_shape(spec, tp.rank, tp.size) for spec in decoder.spec.kinds_of_heads()]
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
        wanted, state = num_rows, slot_bytes(self.decoder)
        if state:
            num_rows = max(min(num_rows, int(room / 2) // state), 1)
            spare = SPARE_SLOTS * self.config.enable_prefix_caching * self.mesh.layout.pp
            room -= (num_rows + spare) * state
        rest = self.config.page_size, self.decoder.dtype, kv_tensors_per_page(self._backend.ops, self._value_dim)
        page = sum(KVCache.page_bytes(*shape, *rest) for shape in self._cache_shapes)
        page += self.config.page_size * ExpertPages.token_bytes(self.decoder) if self.records_experts else 0
        pages = int(room) // page
        least = self.mesh.replica.all_reduce(torch.tensor([num_rows, max(pages, 1)]), "generation:pages", "min")
        if least[0] < wanted and not self._warned and self.mesh.replica.rank == self.mesh.dp.rank == 0:
            self._warned = True
            print(
                f"warning: generation has {int(least[0])} rows in flight, not {wanted}: half of the cache's {memory / 2**30:.2f} GiB "
                f"is for states of linear attention, {state / 2**20:.2f} MiB a row; raise gpu_memory_utilization or generation.tp",
                file=sys.stderr,
            )
        return int(least[0]), int(least[1])

    @cached_property
    def _backend(self) -> Backend:
        """Chosen in the first call, since before it the decoder may have no memory."""
        dtype, device = self.decoder.dtype, self._device
        name = choose_backend(self.config.attention, "auto", dtype, device, "generation.attention")
        return build_backend(name, dtype, device, self.decoder.ops.chunk_invariant)

    @property
    def _device(self) -> torch.device:
        return next(self.decoder.parameters()).device
