"""Decides which rows compute which tokens in the next step: continuous batching over a paged KV cache.

The scheduler is deterministic and does not import torch. Every rank of a generation replica runs it on the same rows, so no
scheduling message is ever sent.

There is one kind of work. A row has ``length`` tokens, of which ``num_computed`` are in the cache, and a step computes some of
the others. This covers prefill, chunked prefill, decode, and recomputation after a preemption. A row whose tokens are all
computed has its next token drawn.

When no page is free, the youngest running row gives back all of its pages and waits at the head of the queue. A row that would
not fit in the whole cache is refused when it comes. So the oldest row that is not on hold can always go on, and every row ends.

The pages of a prompt are computed once. A row that finds them in the cache shares the full ones and copies the tail, or takes the
tail over if nobody uses it. It then computes only its last prompt token. A row that continues an earlier one does the same with the
page in which that one ended, and computes its last token and what follows. While one row computes a page (a *pending prefix*), rows
that need the same page wait, and others overtake them.

With linear attention only whole prompts are shared, with the state behind all but their last token (``PromptStates``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from rlhf_spmd.generation.page_allocator import PageAllocator, PromptStates
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState, SequenceWork

if TYPE_CHECKING:
    from rlhf_spmd.generation.config import GenerationConfig

GROWING_ROWS_PER_SPARE_PAGE = 4  # an admission leaves one page free for this many running rows that still grow


@dataclass
class GenerationStats:
    """Counts of one call on this replica.

    - steps: steps of all micro-batches together
    - prefill_tokens: computed tokens beyond one per drawn token: prompts, and what a preemption made to be computed again
    - decode_tokens: drawn tokens
    - prompt_tokens: prompt tokens of rows that started, again after a preemption
    - hit_tokens: those of the prompt tokens that were in the cache
    - num_pages: pages of the cache
    - micro_batches: number of micro-batches
    - seconds: duration of the call
    - busy_seconds: the same without waits for other replicas
    - stage_seconds: the part of ``busy_seconds`` in which this rank's host waited for other pipeline stages
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    num_pages: int = 0
    micro_batches: int = 0
    busy_seconds: float = 0.0
    stage_seconds: float = 0.0
    seconds: float = 0.0


class Scheduler:
    """Schedules the rows of one micro-batch. ``config`` has this micro-batch's share of pages and rows.

    ``recurrent``: the model has layers with linear attention, see ``recurrent_states``. ``spare_slots``: those that hold states of
    prompts. Counts are added to ``stats``, which belong to the call in progress. A row that has not ended is in exactly one of

    - waiting: rows without pages, in the order of admission
    - running: rows that may have pages, the oldest admission first
    - paused: rows without pages that wait for their environment

    A step may be planned before the tokens of earlier steps are known. Placeholders at the end of ``SequenceState.tokens`` then
    stand for them. A row with placeholders up to its limit stays in ``running``, without work, until :meth:`end` is called.

    ``before_release`` is called with each row that is about to leave its pages.
    """

    def __init__(self, config: GenerationConfig, recurrent: bool = False, spare_slots: Iterable[int] = ()) -> None:
        assert config.num_pages is not None, "pages are counted by the generator"
        self.config = config
        self.recurrent = recurrent
        self.stats = GenerationStats()
        self.pages = PageAllocator(config.num_pages)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.before_release: Callable[[SequenceState], None] | None = None
        self.paused: set[SequenceState] = set()
        self.prompt_states = PromptStates(spare_slots)
        self._pending_prefixes: set[int] = set()
        # the lowest last: n rows at a time never have one beyond the first n
        self._free_state_slots = list(reversed(range(config.max_num_seqs)))

    def add(self, row: SequenceState) -> None:
        """Add ``row`` to the end of the queue. Raises ValueError if it could never run, even alone."""
        self.config.check_row("generation", row.limit, f"a row may have up to {row.limit} tokens")
        self.waiting.append(row)

    @property
    def finished(self) -> bool:
        return not self.waiting and not self.running and not self.paused

    def hold(self, row: SequenceState) -> None:
        """Do not schedule ``row`` until :meth:`resume`. It keeps its pages unless other rows need them."""
        row.on_hold = True
        if not row.pages:
            self.waiting.remove(row)
            self.paused.add(row)

    def resume(self, row: SequenceState) -> None:
        row.on_hold = False
        if row in self.paused:
            self.paused.remove(row)
            (self.waiting.appendleft if row.num_new else self.waiting.append)(row)

    def schedule(self) -> ScheduledStep:
        """Plan the next step. It has work while rows are left of which none is on hold."""
        step = ScheduledStep()
        budget = self._continue_running(step, self.config.max_num_batched_tokens)
        self._admit(step, budget)
        if self.prompt_states and step.work:
            step.state_copies += self.prompt_states.keep(self._prompts_to_start())
        waits = self.paused or any(row.on_hold or row.length >= row.limit for row in self.running)
        assert step.work or waits, "a step without work: the scheduler cannot make progress"
        return step

    def reserve_multi_step(self, step: ScheduledStep, max_repeats: int) -> None:
        """Set ``step.repeats``, at most ``max_repeats``, and give the rows that decode pages for so many tokens."""
        rows = [item.row for item in step.work if item.decodes]
        if not rows:
            return
        tokens_left = [row.limit - row.length for row in rows]
        # a row at its limit computes its last token again, which would change its state
        tokens = min(max_repeats, min(tokens_left) if self.recurrent else max(tokens_left))

        def missing(row: SequenceState) -> int:
            return max(self._pages_for(min(row.length + tokens, row.limit) - 1) - len(row.pages), 0)

        while sum(map(missing, rows)) > self.pages.num_free:
            tokens //= 2
        for row in rows:
            row.pages += [self.pages.allocate() for _ in range(missing(row))]
        step.repeats = tokens

    def advance(self, step: ScheduledStep) -> None:
        """Count what ``step`` computes as done. Its rows already have the tokens that it draws, or placeholders for them.

        Its work is queued before that of every later step, so the pages that it fills can be shared at once.
        """
        for row, start, count, samples in step.work:
            row.num_computed = row.length - 1 if samples else start + count
            if row.pending_prefixes:
                if self.recurrent and row.num_computed == row.prompt_length - 1:
                    self.prompt_states.note(row.prefix_ids[-1], row.state_slot)
                self._register_prefixes(row)

    def share_response(self, row: SequenceState, prefix_ids: Sequence[int]) -> None:
        """Let rows find the pages of a row that is about to end. ``prefix_ids``: of all its tokens."""
        if not self.recurrent and self.config.enable_prefix_caching:
            num_computed = min(row.num_computed, row.length - 1)
            # the last token is not computed: a page that it fills is not full, but a tail is one without its last token
            has_tail = num_computed == row.length - 1 and row.length % self.config.page_size > 1
            num_pages = num_computed // self.config.page_size + has_tail
            for page, prefix_id in zip(row.pages[:num_pages], prefix_ids, strict=False):
                self.pages.register(page, prefix_id)

    def end(self, row: SequenceState) -> None:
        """Free the pages of ``row``, which stopped or reached its limit. It may have been preempted meanwhile."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self._release(row)
        row.ended = True

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _continue_running(self, step: ScheduledStep, budget: int) -> int:
        position = 0
        while position < len(self.running) and budget > 0:
            row = self.running[position]
            if row.on_hold or row.length >= row.limit:
                position += 1
                continue
            count = self._before_last(row, row.num_computed, min(row.length - row.num_computed, budget))
            if row.num_computed + count > len(row.pages) * self.config.page_size and not self._grow(row, count):
                break
            self._plan(step, row, count)
            budget -= count
            position += 1
        return budget

    def _grow(self, row: SequenceState, count: int) -> bool:
        """Give ``row`` pages for ``count`` more tokens, from younger rows if need be. Return False if the row itself was preempted."""
        missing = self._pages_for(row.num_computed + count) - len(row.pages)
        while missing > self.pages.num_free:
            youngest = self.running.pop()
            self._release(youngest)
            if youngest.on_hold:
                self.paused.add(youngest)
            else:
                self.waiting.appendleft(youngest)
            self.stats.preemptions += 1
            if youngest is row:
                return False
        row.pages.extend(self.pages.allocate() for _ in range(missing))
        return True

    def needed_prefixes(self) -> set[int]:
        """Return the prefixes that pages hold, and those of rows."""
        prefixes = {*self.pages.prefixes, *self._pending_prefixes}
        for row in (*self.paused, *self.running, *self.waiting):
            prefixes.update(row.prefix_ids)
            if row.continued_id is not None:
                prefixes.add(row.continued_id)
        return prefixes

    def forget_prefixes(self) -> None:
        """Let rows that start from now on share no page with rows that run."""
        self.pages.forget_prefixes()
        self.prompt_states.clear()
        self._pending_prefixes.clear()
        for row in self.running:
            row.pending_prefixes = []

    def remove(self, row: SequenceState) -> None:
        """Remove a row that has not ended."""
        next(rows for rows in (self.paused, self.running, self.waiting) if row in rows).remove(row)
        self._release(row)

    def _release(self, row: SequenceState) -> None:
        if self.before_release is not None:
            self.before_release(row)
        self._pending_prefixes.difference_update(row.pending_prefixes)
        self.pages.release(reversed(row.pages))
        self._free_state_slots += [row.state_slot] if row.state_slot >= 0 else []
        row.leave_pages()

    def _plan(self, step: ScheduledStep, row: SequenceState, count: int) -> None:
        step.work.append(SequenceWork(row, row.num_computed, count, row.num_computed + count == row.length))

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Start waiting rows: first come, first served, except that rows which wait for a pending prefix are overtaken."""
        config = self.config
        skipped = 0
        growing = sum(len(row.pages) < self._pages_for(row.limit - 1) for row in self.running)
        while skipped < min(len(self.waiting), config.max_num_seqs) and len(self.running) < config.max_num_seqs and budget > 0:
            row = self.waiting[skipped]
            prefix = self._lookup(row)
            if prefix is None:
                skipped += 1
                continue
            shared, tail, pending = prefix
            # the last prompt token is computed again, since its logits give the first draw; preempted rows do the same
            last = row.request.num_continued if pending else row.prompt_length
            cached_tokens = len(shared) * config.page_size if tail is None else last - 1
            start = min(cached_tokens, row.length - 1)
            count = min(row.length - start, budget)
            if not config.enable_chunked_prefill and count < row.length - start:
                break
            count = self._before_last(row, start, count)
            revived = sum(self.pages.references(page) == 0 for page in shared)
            take_over = tail is not None and self.pages.references(tail) == 0
            num_new = self._pages_for(start + count) - len(shared) - take_over
            # keep pages for rows that will grow, so that this row is not preempted in the next few steps
            if num_new + revived + take_over + growing // GROWING_ROWS_PER_SPARE_PAGE > self.pages.num_free:
                break
            del self.waiting[skipped]
            self._start(step, row, shared, tail, take_over, num_new)
            if self.recurrent and start:
                source = self.prompt_states.find(row.prefix_ids[-1])
                assert source is not None, "pages are shared without their state"
                step.state_copies.append((source, row.state_slot))
            row.num_computed = start
            row.num_cached = start if row.num_cached is None else row.num_cached
            row.pending_prefixes = pending
            self._pending_prefixes.update(pending)
            self.stats.prompt_tokens += row.prompt_length
            self.stats.hit_tokens += start
            self.running.append(row)
            self._plan(step, row, count)
            budget -= count
            growing += 1

    def _start(
        self, step: ScheduledStep, row: SequenceState, shared: list[int], tail: int | None, take_over: bool, num_new: int
    ) -> None:
        for page in shared:
            self.pages.share(page)
        if take_over and tail is not None:
            self.pages.take_over(tail, (*row.prefix_ids, row.continued_id))
            shared = [*shared, tail]
        new = [self.pages.allocate() for _ in range(num_new)]
        if tail is not None and not take_over:
            step.copies.append((tail, new[0]))
        row.pages = shared + new
        row.state_slot = self._free_state_slots.pop()

    def _lookup(self, row: SequenceState) -> tuple[list[int], int | None, list[int]] | None:
        """Return (full pages to share, tail page to copy, prefixes to compute); None: another row is computing what this one needs."""
        if not self.config.enable_prefix_caching:
            return [], None, []
        if self.recurrent:
            return self._lookup_with_state(row)
        shared: list[int] = []
        for prefix_id in islice(row.prefix_ids, len(row.prefix_ids) - 1):
            page = self.pages.find(prefix_id)
            if page is None:
                break
            shared.append(page)
        missing = row.prefix_ids[len(shared) :]
        if missing[0] in self._pending_prefixes:
            return None
        if len(missing) == 1 and (tail := self.pages.find(missing[0])) is not None:
            return shared, tail, []
        continued = row.request.num_continued
        if row.continued_id is not None and len(shared) == continued // self.config.page_size:
            return shared, self.pages.find(row.continued_id), list(missing)
        return shared, None, list(missing)

    def _lookup_with_state(self, row: SequenceState) -> tuple[list[int], int | None, list[int]] | None:
        """Return what :meth:`_lookup` does: all pages up to the last prompt token, if the state is there too, or none."""
        prompt = row.prefix_ids[-1]
        before_last = row.prompt_length - 1
        if not before_last:
            return [], None, []
        if self.prompt_states.find(prompt) is not None:
            pages = [self.pages.find(prefix) for prefix in row.prefix_ids[: self._pages_for(before_last)]]
            cached = [page for page in pages if page is not None]
            if len(cached) == len(pages):
                return (cached[:-1], cached[-1], []) if before_last % self.config.page_size else (cached, None, [])
        elif prompt in self._pending_prefixes:
            return None
        return [], None, list(row.prefix_ids)

    def _before_last(self, row: SequenceState, start: int, count: int) -> int:
        """Return how many tokens to compute from ``start`` on: ``count``, or only those before the last prompt token if another row
        waits for the state there."""
        num_before = row.prompt_length - 1 - start
        may_share = self.recurrent and self.config.enable_prefix_caching and 0 < num_before < count
        return num_before if may_share and row.prefix_ids[-1] in self._prompts_to_start(excluded=row) else count

    def _prompts_to_start(self, excluded: SequenceState | None = None) -> set[int]:
        """Return the prompts of rows that may start soon, other than ``excluded``."""
        return {row.prefix_ids[-1] for row in islice(self.waiting, self.config.max_num_seqs) if row is not excluded}

    def _register_prefixes(self, row: SequenceState) -> None:
        """Let other rows find the prompt pages that ``row`` has computed by now."""
        prompt_done = row.num_computed >= row.prompt_length - self.recurrent  # the last token of a prompt is not shared
        num_done = min(len(row.prefix_ids), len(row.pages)) if prompt_done else row.num_computed // self.config.page_size
        first = len(row.prefix_ids) - len(row.pending_prefixes)
        for number in range(first, num_done):
            prefix_id = row.pending_prefixes.pop(0)
            self._pending_prefixes.discard(prefix_id)
            self.pages.register(row.pages[number], prefix_id)
