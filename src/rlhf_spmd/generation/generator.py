"""The generator: rows in, completions out, on every rank of a generation replica (pp * tp ranks that hold one model).

A call allocates its KV cache; ``generate`` gives it back, ``generate_until`` may keep it for the rows that it keeps. Every rank of the
replica passes the same requests and gets the same completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.balancing import ReplicaBalancer, exchange, pack, plan_moves, unpack
from rlhf_spmd.generation.cache_room import cache_room
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch, DecodeMicroBatches, share_out
from rlhf_spmd.generation.finished_groups import FinishedGroups
from rlhf_spmd.generation.graphs import Graphs
from rlhf_spmd.generation.interruption import GenerationLimits, Interrupts, LimitWatch
from rlhf_spmd.generation.kv_cache import Backend, KVCache
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.runner import Call
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request, SequenceState
from rlhf_spmd.generation.stopping import StopCriteria, build_ends
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.packing import round_up
from rlhf_spmd.models.decoder import Block, Decoder
from rlhf_spmd.parallel.mesh import Mesh


class Generator:
    """Generates with ``decoder``, this rank's shard under ``mesh`` (generation axes). ``decoding``: for stop strings.
    ``local_size``: ranks of this host, which share its memory on CPUs.
    ``stats`` describes the last call; ``kept`` are the rows that :meth:`generate_until` has not ended yet."""

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        config: GenerationConfig,
        eos_ids: Collection[int],
        decoding: Decoding | None = None,
        local_size: int = 1,
    ) -> None:
        assert decoder.head_kind == "lm", f"generation needs a language-model head, this decoder has {decoder.head_kind!r}"
        self.decoder, self.mesh, self.config, self.decoding = decoder, mesh, config, decoding
        self.eos_ids = frozenset(eos_ids)
        self.stats = GenerationStats()
        # by :meth:`reserve_pages`: pages stay, with the prompts that lie there, also where no row is left
        self.reserved = False
        self.reserved_bytes = 0  # free memory that others will take before the first step has ended
        self.local_size = local_size
        self.kept: list[SequenceState] = []
        self._lanes: DecodeMicroBatches | None = None  # of the kept rows, if their pages are kept too
        self._graphs: list[Graphs] = []  # by lane; they outlive the calls

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        seed: int,
        step: int,
        tick: Callable[[], None] = lambda: None,
        environments: Environments | None = None,
        version: int | None = None,
        portions: FinishedGroups | None = None,
    ) -> list[Completion]:
        """One completion per request, in their order; ``seed`` and ``step`` key the draws (``sampling.seed`` and ``.n`` are the
        caller's business). ``version``: of the weights, noted with each token; by default the step. ``tick`` is called after each
        step: a replica of one rank shows no other sign of life. ``environments`` answer between turns. ``portions`` gets rows as they
        end, unless they move between replicas.

        Raises ValueError for rows that cannot be generated, NotFinite where a drawn token's log-prob is not. Collective over the
        replica, with ``rebalance_steps`` over all replicas: every rank of it must call, in program order, a replica's with the
        same arguments.
        """
        started = time.perf_counter()
        self.stats = GenerationStats()
        version = step if version is None else version
        ends = self._check(requests, sampling)
        call = Call(self.decoder, self.mesh, self.config, sampling, ends, seed, version, tick, environments, portions)
        rows = [SequenceState(request, step) for request in requests]
        if self.config.rebalance_steps and self.mesh.dp.size > 1:
            assert environments is portions is None, "the rows of environments, and of portions, do not move between replicas"
            rows = self._balance(rows, call)
        elif rows:
            self._advance(rows, None, call, None)
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
        """As :meth:`generate`, but returns when ``limits`` are reached, with the rows that have ended. The others are ``kept`` and go
        on in the next call. ``step`` keys the draws of the new ``requests``; kept rows keep the step that they began with.

        ``version`` names the weights. While it stays the same, kept rows keep their pages (see :meth:`before_training`) and come out
        as if never interrupted; under other weights their tokens are computed again, unless ``kv_cache`` says that what the
        old ones computed is good enough.
        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        ends = self._check([*(row.request for row in self.kept), *requests], sampling)
        call = Call(self.decoder, self.mesh, self.config, sampling, ends, seed, version, tick)
        self.kept += [SequenceState(request, step) for request in requests]
        self.stats = GenerationStats()
        if self.kept:
            lanes, self._lanes = self._usable(self._lanes, self.kept, version), None
            watch = LimitWatch(limits, self.kept, self.mesh.replica)
            self._lanes = self._advance(self.kept, lanes, call, watch.interrupts)
        self.stats.seconds = self.stats.busy_seconds
        ended = [row.completion() for row in self.kept if row.ended]
        self.kept = [row for row in self.kept if not row.ended]
        if not (self.kept or self.reserved):
            self._lanes = None
        return ended

    def drop(self, row_ids: Collection[int]) -> None:
        """Rows that nobody waits for any more. Every rank of the replica calls it with the same."""
        if self._lanes is not None:
            self._lanes.forget([row for row in self.kept if row.request.row_id in row_ids])
        self.kept = [row for row in self.kept if row.request.row_id not in row_ids]

    def reserve_pages(self, longest: int) -> int:
        """From now on every cache has the pages that ``max_num_seqs`` rows of ``longest`` tokens need, or those that memory has, so
        that rows which come later find room, and the pages of equal prompts. Returns how long a row may be.
        Collective over the replica: every rank of it must call, in program order.
        """
        self.reserved, config, num_pages = True, self.config, self.config.num_pages
        if num_pages is None:
            num_pages = min(config.max_num_seqs * -(-(longest - 1) // config.page_size), self._affordable_pages())
            self.config = replace(config, num_pages=num_pages)
        longest = min(longest, num_pages * config.page_size + 1)
        return longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)

    def before_training(self) -> None:
        """Training comes before the next call: give back the pages of kept rows, or what ``kv_cache`` says; their tokens stay."""
        if self.config.kv_cache == "free":
            self._lanes = None
        elif self.config.kv_cache == "offload" and self._lanes is not None:
            self._lanes.offload()

    def _check(self, requests: Sequence[Request], sampling: SamplingConfig) -> StopCriteria:
        """Raises ValueError for rows that cannot be generated; returns what ends them."""
        vocabulary, ends = self.decoder.spec.vocab_size, build_ends(sampling, self.eos_ids, self.decoding, "sampling")
        for drawing, row_id in {r.drawing: r.row_id for r in requests if r.drawing}.items():
            sampling.drawn_by(drawing).check(f"sampling of row {row_id}")
        sampling.check_ids(vocabulary, ends.token_ids, any(request.min_new_tokens for request in requests), "sampling")
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"row {request.row_id}: the prompt is empty; at least one token is needed")
            if request.max_new_tokens < 1:
                raise ValueError(f"row {request.row_id}: max_new_tokens={request.max_new_tokens} must be at least 1")
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
                raise ValueError(f"row {request.row_id}: prompt ids must lie in 0 .. {vocabulary - 1}, the model's vocabulary")
        if len({request.row_id for request in requests}) < len(requests):
            raise ValueError("row ids must differ: they key the random draws")
        return ends

    def _usable(
        self, lanes: DecodeMicroBatches | None, rows: Sequence[SequenceState], version: int
    ) -> DecodeMicroBatches | None:
        """``lanes`` if these rows fit, and the same weights filled their pages or that does not matter."""
        known = lanes is not None and (lanes.version == version or self.config.kv_cache != "free")
        return lanes if lanes is not None and known and lanes.fits(rows) else None

    def _advance(
        self, rows: Sequence[SequenceState], lanes: DecodeMicroBatches | None, call: Call, interrupts: Interrupts | None
    ) -> DecodeMicroBatches:
        """Draw tokens for ``rows`` until they end, or ``interrupts`` says so; returns the lanes that they are in: ``lanes``, if they
        are :meth:`_usable`. Adds to ``stats``."""
        started = time.perf_counter()
        if lanes is None:
            lanes = DecodeMicroBatches(self._build_lanes(rows), call.version)
        with torch.no_grad():
            lanes.run(rows, call, self.stats, interrupts)
        self.stats.busy_seconds += time.perf_counter() - started
        return lanes

    def _balance(self, rows: Sequence[SequenceState], call: Call) -> list[SequenceState]:
        """``rows`` at their end. They may end on another replica, and this one helps with those of others.

        Collective over all replicas: every rank of them must call, in program order.
        """
        group, counts = self.mesh.dp, ReplicaBalancer(self.mesh.dp, self.config.rebalance_steps)
        dtype = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        going, ended = [(group.rank, row) for row in rows], []  # (where it belongs, row)
        lanes: DecodeMicroBatches | None = None
        while any(left := counts.take(len(going))):
            if moves := plan_moves(left):
                going.sort(key=lambda item: item[1].num_computed)  # pages stay behind
                outgoing: dict[int, list[Any]] = {}
                for source, to, number in moves:
                    if source == group.rank:
                        leaving, going = going[:number], going[number:]
                        outgoing[to] = [pack(*item) for item in leaving]
                        self.stats.moved_rows += number
                        if lanes is not None:
                            lanes.forget([row for _, row in leaving])
                going += [unpack(item, dtype) for item in exchange(group, outgoing)]
            if going:
                counts.begin(len(going))
                here = [row for _, row in going]
                lanes = self._usable(lanes, here, call.version)
                lanes = self._advance(here, lanes, call, counts.interrupts)
            else:
                call.tick()
            ended += [item for item in going if item[1].ended]
            going = [item for item in going if not item[1].ended]
        self.stats.busy_seconds -= counts.waited
        back: dict[int, list[Any]] = {}
        for home, row in ended:
            if home != group.rank:
                back.setdefault(home, []).append(pack(home, row))
        mine = [row for home, row in ended if home == group.rank]
        mine += [unpack(item, dtype)[1] for item in exchange(group, back)]
        order = {row.request.row_id: i for i, row in enumerate(rows)}
        return sorted(mine, key=lambda row: order[row.request.row_id])

    def _build_lanes(self, rows: Sequence[SequenceState]) -> list[DecodeMicroBatch]:
        """As many as ``micro_batches`` says, but none without a group, without a row in flight, or with fewer pages than the
        longest row needs. Together they have the pages that the rows which can run at once may need, and that memory has.

        Collective over the replica: every rank of it must call, in program order.
        """
        config, dtype, shape = self.config, self.decoder.dtype, self._cache_shape
        total = config.num_pages or self._affordable_pages()
        needs = {row: -(-(row.limit - 1) // config.page_size) for row in rows}
        wanted, groups = config.micro_batches or self.mesh.layout.pp, {row.request.group_id for row in rows}
        number = max(min(wanted, len(groups), config.max_num_seqs, total // max(needs.values())), 1)
        num_seqs, share = config.max_num_seqs // number, total // number
        lanes = []
        self._graphs += [Graphs() for _ in range(number - len(self._graphs))]
        for its, graphs in zip(share_out(rows, [()] * number), self._graphs, strict=False):
            most = sum(sorted((needs[row] for row in its), reverse=True)[:num_seqs])
            if capabilities(
                self._device
            ).graphs:  # few sizes, so that the next call's cache may lie where this one's lay, with its graphs
                most = round_up(most, 1 << max(most.bit_length() - 4, 0))
            num_pages = share if config.num_pages else max(min(most, share), 1)
            cache = KVCache(*shape, num_pages, config.page_size, dtype, self._device, self._backend)
            lanes.append(DecodeMicroBatch(replace(config, num_pages=num_pages, max_num_seqs=num_seqs), cache, graphs))
        return lanes

    @property
    def _cache_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and their size, on this rank."""
        block = self.decoder.layers[0]
        assert isinstance(block, Block)
        return len(self.decoder.layers), block.num_kv_heads, block.head_dim

    def _affordable_pages(self) -> int:
        """What memory has room for; the least over the replica's ranks.

        Collective over the replica: every rank of it must call, in program order.
        """
        room = cache_room(self.config, self.decoder, self._device, self.local_size, self.reserved_bytes)
        pages = int(room) // KVCache.page_bytes(*self._cache_shape, self.config.page_size, self.decoder.dtype)
        return int(self.mesh.replica.all_reduce(torch.tensor([max(pages, 1)]), "generation:pages", "min"))

    @cached_property
    def _backend(self) -> Backend:
        """Chosen at the first call: before it the decoder may be without memory."""
        dtype, device = self.decoder.dtype, self._device
        name = choose_backend(self.config.attention, "auto", dtype, device, "generation.attention")
        return build_backend(name, dtype, device, self.decoder.ops.alike_chunks)

    @property
    def _device(self) -> torch.device:
        return next(self.decoder.parameters()).device
