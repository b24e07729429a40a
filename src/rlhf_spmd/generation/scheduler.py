"""Which rows compute which tokens in the next step: continuous batching over a paged cache. Pure and deterministic.

Every rank of a generation replica runs this same scheduler on the same rows, so no scheduling message is ever sent.

There is one kind of work: a row has ``length`` tokens of which ``num_computed`` are in the cache, and a step computes some of
the rest. Prefill, a chunk of a prefill, decode, and the recomputation after a preemption are all that. A row that catches up
with its length gets its next token sampled.

Pages run out: the youngest running row gives all of its pages back and waits at the head of the queue. The oldest row can
always go on (of those that are not held for an environment), since a row that could not fit in the whole pool is refused at once,
so every row ends.

Prompts are computed once: a row that finds its prompt's pages in the cache shares the full ones, copies the tail (or takes it
over if nobody uses it) and computes only its last prompt token. While a row computes a prompt page, rows that need the same
page wait for it (a *claim*) and others overtake them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from rlhf_spmd.generation.block_allocator import BlockAllocator
from rlhf_spmd.generation.sequence import SequenceState

if TYPE_CHECKING:
    from rlhf_spmd.generation.config import GenerationConfig

GROWING_ROWS_PER_SPARE_PAGE = 4  # an admission leaves a page free for so many running rows that will need more


class Work(NamedTuple):
    """Compute ``num_tokens`` tokens of ``row`` from ``start`` on, the last of them its draft; sample the next one (and one after
    each token of the draft) if ``samples``."""

    row: SequenceState
    start: int
    num_tokens: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether it computes one token and draws the next, which can be repeated without a look of the host."""
        return self.samples and self.num_tokens == 1 and not self.row.draft


@dataclass
class Step:
    """``copies``: (source, destination) pages to copy before anything is written."""

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class GenerationStats:
    """Counts of one call on this replica. ``prompt_tokens``: of rows that began, or came back after a preemption; ``hit_tokens``: of
    these, found in the cache. ``prefill_tokens``: computed tokens beyond one per drawn token (prompts, and what preemption made to
    be computed again). ``num_pages``: size of the cache. ``draft_tokens``: guessed and computed, of which ``accepted_tokens`` came
    true. ``moved_rows``: that left for other replicas. ``seconds``: of the call; ``busy_seconds``: those without waits for other
    replicas; ``stage_seconds``: of these, the waits of this rank's host for other pipeline stages. ``steps``: of all ``lanes``."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    num_pages: int = 0
    lanes: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    moved_rows: int = 0
    busy_seconds: float = 0.0
    stage_seconds: float = 0.0
    seconds: float = 0.0


class Scheduler:
    """``config`` has the lane's share of pages and rows; to ``stats``, those of the call under way, it adds.

    A row that has not ended is in exactly one of ``waiting`` (no pages, in the order of admission), ``running`` (it may have pages,
    oldest admission first) and ``paused`` (held for its environment's answer, no pages).

    A step may be planned before the tokens of earlier ones are known: these then count as placeholders at the end of
    ``SequenceState.tokens``.
    A row that has placeholders up to its limit stays in ``running``, without work, until :meth:`end` is told of it."""

    def __init__(self, config: GenerationConfig) -> None:
        assert config.num_pages is not None, "pages are counted by the generator"
        self.config, self.stats = config, GenerationStats()
        self.pages = BlockAllocator(config.num_pages)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.paused: set[SequenceState] = set()
        self._claimed: set[int] = set()

    def add(self, row: SequenceState) -> None:
        """Raises ValueError if the row could never run, even alone."""
        self.config.check_row("generation", row.limit, f"a row may have up to {row.limit} tokens")
        self.waiting.append(row)

    @property
    def finished(self) -> bool:
        return not self.waiting and not self.running and not self.paused

    def hold(self, row: SequenceState) -> None:
        """Leave ``row`` out until :meth:`resume`. It keeps its pages unless others need them."""
        row.held = True
        if not row.pages:
            self.waiting.remove(row)
            self.paused.add(row)

    def resume(self, row: SequenceState) -> None:
        row.held = False
        if row in self.paused:
            self.paused.remove(row)
            (self.waiting.appendleft if row.num_new else self.waiting.append)(row)

    def schedule(self) -> Step:
        """The next step's work; it always makes progress while rows are left and none is held."""
        step = Step()
        budget = self._continue_running(step, self.config.max_num_batched_tokens)
        self._admit(step, budget)
        waits = self.paused or any(row.held or row.length >= row.limit for row in self.running)
        assert step.work or waits, "a step without work: the scheduler cannot make progress"
        return step

    def look_ahead(self, step: Step, most: int) -> int:
        """How many tokens, at most ``most``, each row that decodes in ``step`` may draw before the next one is planned; its pages
        then have room for them. 0: none decodes."""
        rows = [item.row for item in step.work if item.decodes]
        if not rows:
            return 0
        tokens = min(most, max(row.limit - row.length for row in rows))

        def missing(row: SequenceState) -> int:
            return max(self._pages_for(min(row.length + tokens, row.limit) - 1) - len(row.pages), 0)

        while sum(map(missing, rows)) > self.pages.num_free:
            tokens //= 2
        for row in rows:
            row.pages += [self.pages.allocate() for _ in range(missing(row))]
        return tokens

    def advance(self, step: Step) -> None:
        """``step`` runs, and its rows have the tokens that it draws, or placeholders for them: what it computes counts as done. Its
        work is queued before that of every later step, so pages that it fills can be shared at once."""
        for row, start, count, samples in step.work:
            row.num_computed = row.length - 1 if samples else start + count  # a draft that failed was computed in vain
            if row.claims:
                self._fulfil_claims(row)

    def end(self, row: SequenceState) -> None:
        """``row`` has stopped or come to its limit: free its pages. It may have been preempted meanwhile."""
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        self._release(row)
        row.ended = True

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _continue_running(self, step: Step, budget: int) -> int:
        position = 0
        while position < len(self.running) and budget > 0:
            row = self.running[position]
            if row.held or row.length >= row.limit:
                position += 1
                continue
            if row.draft:
                self._shorten_draft(row, budget - (len(self.running) - position))  # one token stays for each row behind
            count = min(row.length + len(row.draft) - row.num_computed, budget)
            if row.num_computed + count > len(row.pages) * self.config.page_size and not self._grow(row, count):
                break
            self._plan(step, row, count)
            budget -= count
            position += 1
        return budget

    def _shorten_draft(self, row: SequenceState, spare: int) -> None:
        """To ``spare`` tokens, and to its own and free pages. A draft follows one last token."""
        room = (len(row.pages) + self.pages.num_free) * self.config.page_size - row.length
        row.draft = row.draft[: max(min(spare, room), 0)] if row.num_computed == row.length - 1 else []

    def _grow(self, row: SequenceState, count: int) -> bool:
        """Pages for ``count`` more tokens, taken from younger rows if need be; False if the row itself had to be preempted."""
        missing = self._pages_for(row.num_computed + count) - len(row.pages)
        while missing > self.pages.num_free:
            youngest = self.running.pop()
            self._release(youngest)
            if youngest.held:
                self.paused.add(youngest)
            else:
                self.waiting.appendleft(youngest)
            self.stats.preemptions += 1
            if youngest is row:
                return False
        row.pages.extend(self.pages.allocate() for _ in range(missing))
        return True

    def forget_prompts(self) -> None:
        """Rows that start from now on share no page with those that run."""
        self.pages.forget()
        self._claimed.clear()
        for row in self.running:
            row.claims = []

    def remove(self, row: SequenceState) -> None:
        """Forget a row that has not ended."""
        next(rows for rows in (self.paused, self.running, self.waiting) if row in rows).remove(row)
        self._release(row)

    def _release(self, row: SequenceState) -> None:
        self._claimed.difference_update(row.claims)
        self.pages.release(reversed(row.pages))
        row.leave_pages()

    def _plan(self, step: Step, row: SequenceState, count: int) -> None:
        step.work.append(Work(row, row.num_computed, count, row.num_computed + count == row.length + len(row.draft)))

    def _admit(self, step: Step, budget: int) -> None:
        """First come, first served, but rows whose prompt is being computed by another are overtaken."""
        config = self.config
        skipped = 0
        growing = sum(len(row.pages) < self._pages_for(row.limit - 1) for row in self.running)
        while skipped < min(len(self.waiting), config.max_num_seqs) and len(self.running) < config.max_num_seqs and budget > 0:
            row = self.waiting[skipped]
            found = self._lookup(row)
            if found is None:
                skipped += 1
                continue
            shared, tail, claims = found
            # the last token of a prompt anew: its logits give the first draw, and rows that come back do as fresh ones
            tokens_at_hand = len(shared) * config.page_size if tail is None else row.prompt_length - 1
            start = min(tokens_at_hand, row.length - 1)
            count = min(row.length - start, budget)
            if not config.enable_chunked_prefill and count < row.length - start:
                break
            revived = sum(self.pages.references(page) == 0 for page in shared)
            take_over = tail is not None and self.pages.references(tail) == 0
            new = self._pages_for(start + count) - len(shared) - take_over
            # spare pages for rows that will grow, so that what is admitted now is not preempted in the next few steps
            if new + revived + take_over + growing // GROWING_ROWS_PER_SPARE_PAGE > self.pages.num_free:
                break
            del self.waiting[skipped]
            self._start(step, row, shared, tail, take_over, new)
            row.num_computed = start
            row.claims = claims
            self._claimed.update(claims)
            self.stats.prompt_tokens += row.prompt_length
            self.stats.hit_tokens += start
            self.running.append(row)
            self._plan(step, row, count)
            budget -= count
            growing += 1

    def _start(
        self, step: Step, row: SequenceState, shared: list[int], tail: int | None, take_over: bool, num_new: int
    ) -> None:
        for page in shared:
            self.pages.share(page)
        if take_over and tail is not None:
            self.pages.share(tail)
            shared = [*shared, tail]
        new = [self.pages.allocate() for _ in range(num_new)]
        if tail is not None and not take_over:
            step.copies.append((tail, new[0]))
        row.pages = shared + new

    def _lookup(self, row: SequenceState) -> tuple[list[int], int | None, list[int]] | None:
        """(full pages to share, tail page to copy, contents that this row will compute); None: it waits for another's claim."""
        if not self.config.enable_prefix_caching:
            return [], None, []
        shared: list[int] = []
        for content in islice(row.contents, len(row.contents) - 1):
            page = self.pages.find(content)
            if page is None:
                break
            shared.append(page)
        missing = row.contents[len(shared) :]
        if missing[0] in self._claimed:
            return None
        if len(missing) == 1 and (tail := self.pages.find(missing[0])) is not None:
            return shared, tail, []
        return shared, None, list(missing)

    def _fulfil_claims(self, row: SequenceState) -> None:
        """Register the prompt pages that are computed by now."""
        whole = row.num_computed >= row.prompt_length
        num_done = len(row.contents) if whole else row.num_computed // self.config.page_size
        first = len(row.contents) - len(row.claims)
        for number in range(first, num_done):
            content = row.claims.pop(0)
            self._claimed.discard(content)
            self.pages.register(row.pages[number], content)
