"""Random schedules: no page leaks, none is freed twice, every row ends, prompts are computed once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.generation.block_manager import BlockManager
from rlhf_spmd.generation.scheduler import Limits, Scheduler, Step
from rlhf_spmd.generation.sequence import Interner, Row


class FakeCache:
    """Remembers which token of which text each cache slot holds, as the runner would write it."""

    def __init__(self, limits: Limits, texts: list[list[int]]) -> None:
        self.page_size, self.texts = limits.page_size, texts
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: Step) -> None:
        for source, to in step.copies:
            self.slots.update({(to, i): self.slots[source, i] for i in range(self.page_size) if (source, i) in self.slots})
        for row, start, count, _ in step.work:
            for position in range(start, start + count):
                prefix = tuple(self.texts[row.index][: position + 1])
                self.slots[row.pages[position // self.page_size], position % self.page_size] = prefix
        for row, start, count, _ in step.work:  # what attention reads is the row's own history
            for position in range(start + count):
                held = self.slots[row.pages[position // self.page_size], position % self.page_size]
                assert held == tuple(self.texts[row.index][: position + 1]), f"row {row.index} reads a foreign token"


def check_pages(scheduler: Scheduler) -> None:
    references = Counter(page for row in scheduler.running for page in row.pages)
    pages = scheduler.pages
    for page in range(pages.num_pages):
        assert pages.references(page) == references[page]
    assert pages.num_free == sum(references[page] == 0 for page in range(pages.num_pages))
    assert not any(row.pages for row in scheduler.waiting)


def run_to_the_end(limits: Limits, prompts: list[list[int]], response_lengths: list[int], stops: list[bool]) -> Scheduler:
    interner = Interner(limits.page_size)
    responses = [[1000 * (i + 1) + j for j in range(n)] for i, n in enumerate(response_lengths)]
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    scheduler = Scheduler(limits)
    rows = []
    for i, (prompt, n, stop) in enumerate(zip(prompts, response_lengths, stops, strict=True)):
        rows.append(Row(i, len(prompt), len(prompt) + n + (3 if stop else 0), interner.contents(prompt)))
        scheduler.add(rows[-1])
    cache = FakeCache(limits, texts)
    num_steps = 0
    while not scheduler.finished:
        step = scheduler.schedule()
        check_pages(scheduler)
        assert len({work.row.index for work in step.work}) == len(step.work) <= limits.max_num_seqs
        assert sum(work.num_tokens for work in step.work) <= limits.max_num_batched_tokens
        assert all(work.start == work.row.num_computed and work.num_tokens > 0 for work in step.work)
        cache.run(step)
        for row, _, _, samples in step.work:
            if samples:
                row.length += 1
                row.stopped = stops[row.index] and row.num_new == response_lengths[row.index]
        scheduler.complete(step)
        check_pages(scheduler)
        num_steps += 1
        # the oldest row is never preempted and gains a token in every step
        assert num_steps <= sum(row.limit for row in rows), "starvation"
    assert scheduler.pages.num_free == limits.num_pages
    assert [row.num_new for row in rows] == response_lengths
    assert not scheduler._claimed
    return scheduler


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_schedules(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 9))
    stems = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4))
    row = st.tuples(st.integers(0, len(stems) - 1), st.integers(0, 12), st.integers(1, 20), st.booleans())
    rows = data.draw(st.lists(row, max_size=16))
    prompts = [stems[stem] + [7] * (extra if extra < 4 else 0) for stem, extra, _, _ in rows]
    longest = max([-(-(len(p) + n + 3) // page_size) for p, (_, _, n, _) in zip(prompts, rows, strict=True)], default=1)
    max_num_seqs = data.draw(st.integers(1, 8))
    limits = Limits(
        page_size,
        num_pages=longest + data.draw(st.integers(0, 20)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + data.draw(st.integers(0, 60)),
        prefix_caching=data.draw(st.booleans()),
    )
    run_to_the_end(limits, prompts, [n for _, _, n, _ in rows], [stop for _, _, _, stop in rows])


def random_schedule(rng: random.Random) -> Scheduler:
    """A few rows on a small pool; some share their prompts' beginnings, some stop before their limit."""
    page_size, max_num_seqs = rng.randint(1, 4), rng.randint(1, 5)
    stems = [[rng.randint(0, 1) for _ in range(rng.randint(1, 9))] for _ in range(2)]
    count = rng.randint(1, 6)
    prompts = [rng.choice(stems) + [7] * rng.choice((0, 0, 1, 3)) for _ in range(count)]
    lengths = [rng.randint(1, 7) for _ in range(count)]
    longest = max(-(-(len(prompt) + n + 3) // page_size) for prompt, n in zip(prompts, lengths, strict=True))
    limits = Limits(
        page_size,
        num_pages=longest + rng.choice((0, 0, 1, 2, 5, 20)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 12),
        prefix_caching=rng.random() < 0.8,
    )
    return run_to_the_end(limits, prompts, lengths, [rng.random() < 0.3 for _ in range(count)])


def test_ten_thousand_random_schedules() -> None:
    rng = random.Random(0)
    counts = Counter[str]()
    for _ in range(10_000):
        scheduler = random_schedule(rng)
        counts["preempted"] += scheduler.num_preemptions > 0
        counts["shared"] += scheduler.num_hit_tokens > 0
    assert min(counts["preempted"], counts["shared"]) > 1000, counts  # the schedules are not all easy


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12), extra=st.integers(0, 10))
def test_whole_prompts_without_chunking(lengths: list[tuple[int, int]], extra: int) -> None:
    limits = Limits(4, num_pages=14 + extra, max_num_seqs=5, max_num_batched_tokens=55, chunked_prefill=False)
    prompts = [list(range(n)) for n, _ in lengths]
    run_to_the_end(limits, prompts, [n for _, n in lengths], [False] * len(lengths))


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 16, 17, 50])
def test_a_prompt_is_computed_once(prompt_length: int) -> None:
    limits = Limits(8, num_pages=200, max_num_seqs=3, max_num_batched_tokens=64)
    prompts = [list(range(prompt_length))] * 6 + [[99] * prompt_length] * 6
    scheduler = run_to_the_end(limits, prompts, [5] * 12, [False] * 12)
    # all rows but the first of each prompt; the last prompt token is every row's own
    assert scheduler.num_hit_tokens == (prompt_length - 1) * 10
    assert scheduler.num_preemptions == 0


def test_pressure_preempts_and_still_ends() -> None:
    limits = Limits(4, num_pages=10, max_num_seqs=8, max_num_batched_tokens=64)
    scheduler = run_to_the_end(limits, [[i, i + 1, i + 2] for i in range(8)], [30] * 8, [False] * 8)
    assert scheduler.num_preemptions > 0


def test_rows_that_cannot_fit_are_refused() -> None:
    scheduler = Scheduler(Limits(4, num_pages=2, max_num_seqs=8, max_num_batched_tokens=64))
    with pytest.raises(ValueError, match="needs 3 pages of 4 tokens, but the KV cache has 2"):
        scheduler.add(Row(0, 5, 10, (0, 1)))
    scheduler.add(Row(0, 5, 9, (0, 1)))  # the last token is never written
    whole = Scheduler(Limits(4, num_pages=20, max_num_seqs=8, max_num_batched_tokens=16, chunked_prefill=False))
    with pytest.raises(ValueError, match="max_num_batched_tokens=16"):
        whole.add(Row(0, 15, 17, (0, 1, 2, 3)))


def test_free_pages_are_revived_and_evicted_oldest_first() -> None:
    manager = BlockManager(2)
    a, b = manager.allocate(), manager.allocate()
    manager.register(a, 10)
    manager.register(b, 11)
    manager.release([b])
    manager.release([a])
    manager.share(a)
    assert manager.references(a) == 1 and manager.num_free == 1
    manager.release([a])
    assert manager.allocate() == b  # freed before a's second release
    assert manager.find(11) is None and manager.find(10) == a
    with pytest.raises(AssertionError, match="released once too often"):
        manager.release([a])
