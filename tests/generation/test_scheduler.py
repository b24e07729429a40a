"""Random schedules: no page leaks, none is freed twice, every row ends, prompts are computed once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from generators import row_of
from rlhf_spmd.generation import page_allocator
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.page_allocator import SPARE_SLOTS, PageAllocator, PrefixTable
from rlhf_spmd.generation.scheduler import Scheduler
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState


class FakeCache:
    """Remembers which token of which text each cache slot holds, as the runner would write it, and since when: ``epoch`` counts
    how often prompts were forgotten. ``states``: the tokens behind which the state in each slot is."""

    def __init__(self, limits: GenerationConfig, texts: list[list[int]], recurrent: bool) -> None:
        self.page_size, self.texts, self.recurrent = limits.page_size, texts, recurrent
        self.slots: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.epoch = 0
        self.begun: dict[int, int] = {}  # the epoch in which each row was admitted last

    def run(self, step: ScheduledStep) -> None:
        assert {source for source, _ in step.copies}.isdisjoint(to for _, to in step.copies)
        for source, to in step.copies:
            self.slots.update({(to, i): self.slots[source, i] for i in range(self.page_size) if (source, i) in self.slots})
        known = {}
        self.states |= {to: self.states[source] for source, to in step.state_copies}
        # rows that decode several tokens compute all of these but the last, which are those of their texts
        counts = {item.row.buffer_line: max(item.num_tokens, item.num_draws(step.repeats)) for item in step.work}
        for row, start, _, _ in step.work:
            count = counts[row.buffer_line]
            known[row.buffer_line] = now = tuple(self.texts[row.buffer_line][: max(row.length, start + count)])
            for position in range(start, start + count):
                self.slots[row.pages[position // self.page_size], position % self.page_size] = (self.epoch, now[: position + 1])
        if self.recurrent:
            for row, start, _, _ in step.work:
                now, count = known[row.buffer_line], counts[row.buffer_line]
                assert not start or self.states[row.state_slot] == now[:start], (
                    f"row {row.buffer_line} goes on from a foreign state"
                )
                self.states[row.state_slot] = now[: start + count]
        for row, start, _, _ in step.work:  # what attention reads is the row's own history
            now, begun = known[row.buffer_line], self.begun[row.buffer_line]
            for position in range(start + counts[row.buffer_line]):
                epoch, content = self.slots[row.pages[position // self.page_size], position % self.page_size]
                assert content == now[: position + 1], f"row {row.buffer_line} reads a foreign token"
                assert epoch >= begun, f"row {row.buffer_line} reads what was forgotten before it began"


def check_pages(scheduler: Scheduler) -> None:
    references = Counter(page for row in scheduler.running for page in row.pages)
    pages = scheduler.pages
    for page in range(pages.num_pages):
        assert pages.references(page) == references[page]
    assert pages.num_free == sum(references[page] == 0 for page in range(pages.num_pages))
    assert not any(row.pages for rows in (scheduler.waiting, scheduler.paused) for row in rows)


class Chaos:
    """What others do to a scheduler between its steps, each with probability ``often``: environments hold rows and let them go
    on with more tokens, rows leave for other replicas, weights change, and several tokens are drawn at once."""

    def __init__(self, rng: random.Random, often: float) -> None:
        self.rng, self.often = rng, often
        self.done = Counter[str]()

    def act(
        self, scheduler: Scheduler, rows: list[SequenceState], texts: list[list[int]], lasts: list[int], cache: FakeCache
    ) -> None:
        """``lasts``: length of each row at its end."""
        rng = self.rng
        if rng.random() < self.often:
            scheduler.forget_prefixes()
            cache.epoch += 1
            self.done["forget"] += 1
        for row in [row for row in rows if not row.ended and rng.random() < self.often]:
            if row.on_hold:
                self.let_go(scheduler, row, texts[row.buffer_line], lasts[row.buffer_line])
            elif rng.random() < 0.2:
                scheduler.remove(row)
                rows.remove(row)
                self.done["remove"] += 1
            elif rng.random() < 0.5:
                scheduler.hold(row)
                self.done["hold"] += 1

    def let_go(self, scheduler: Scheduler, row: SequenceState, text: list[int], last: int) -> None:
        self.done["pause"] += row in scheduler.paused
        more = self.rng.randint(0, max(min(3, last - 1 - row.length), 0))
        row.tokens += text[row.length : row.length + more]
        scheduler.resume(row)

    def reserve_multi_step(self, scheduler: Scheduler, step: ScheduledStep) -> None:
        if self.rng.random() < self.often:
            scheduler.reserve_multi_step(step, self.rng.randint(2, 5))
        self.done["look ahead"] += step.repeats > 1


QUIET = Chaos(random.Random(0), 0.0)


def draw(row: SequenceState, text: list[int], last: int, stops: bool, count: int) -> None:
    """The next ``count`` tokens, or those up to the row's end."""
    for _ in range(count):
        row.tokens.append(text[row.length])
        row.stopped = stops and row.length == last
        if row.stopped:
            break


def end_rows(scheduler: Scheduler, step: ScheduledStep) -> None:
    for row in (item.row for item in step.work if item.samples):
        if row.stopped or row.length >= row.limit:
            scheduler.end(row)


def spare_slots(limits: GenerationConfig, recurrent: bool) -> range:
    return range(limits.max_num_seqs, limits.max_num_seqs + SPARE_SLOTS * recurrent)


def run_to_the_end(
    limits: GenerationConfig,
    prompts: list[list[int]],
    response_lengths: list[int],
    stops: list[bool],
    chaos: Chaos = QUIET,
    recurrent: bool = False,
) -> Scheduler:
    prefix_table = PrefixTable(limits.page_size)
    responses = [[1000 * (i + 1) + j for j in range(n + 3)] for i, n in enumerate(response_lengths)]
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    lasts = [len(text) - 3 for text in texts]
    scheduler = Scheduler(limits, recurrent, spare_slots(limits, recurrent))
    rows = []
    for i, (prompt, n, stop) in enumerate(zip(prompts, response_lengths, stops, strict=True)):
        rows.append(row_of(i, prompt, n + (3 if stop else 0), prefix_ids=prefix_table.prefix_ids(prompt)))
        scheduler.add(rows[-1])
    cache = FakeCache(limits, texts, recurrent)
    num_steps = 0
    while not scheduler.finished:
        if chaos.often:
            before = sum(chaos.done.values())
            chaos.act(scheduler, rows, texts, lasts, cache)
            check_pages(scheduler)
            num_steps = 0 if sum(chaos.done.values()) > before else num_steps
            if scheduler.finished:
                break
        here = set(scheduler.running)
        step = scheduler.schedule()
        cache.begun |= {row.buffer_line: cache.epoch for row in scheduler.running if row not in here}
        check_pages(scheduler)
        if not step.work:
            waiting = [row for row in rows if row.on_hold]
            assert waiting, "nothing runs, and nobody is waited for"
            for row in waiting:
                chaos.let_go(scheduler, row, texts[row.buffer_line], lasts[row.buffer_line])
            continue
        assert len({work.row.buffer_line for work in step.work}) == len(step.work) <= limits.max_num_seqs
        assert sum(work.num_tokens for work in step.work) <= limits.max_num_batched_tokens
        assert all(work.start == work.row.num_computed and work.num_tokens > 0 and not work.row.on_hold for work in step.work)
        assert limits.enable_chunked_prefill or recurrent or all(work.samples for work in step.work), "part of a prompt"
        chaos.reserve_multi_step(scheduler, step)
        check_pages(scheduler)
        cache.run(step)
        for item in step.work:
            row = item.row
            draw(row, texts[row.buffer_line], lasts[row.buffer_line], stops[row.buffer_line], item.num_draws(step.repeats))
        scheduler.advance(step)
        end_rows(scheduler, step)
        check_pages(scheduler)
        num_steps += 1
        # left alone, the oldest row is never preempted and gains a token in every step
        assert num_steps <= sum(row.limit for row in rows), "starvation"
    assert scheduler.pages.num_free == limits.num_pages
    assert [row.length for row in rows] == [lasts[row.buffer_line] for row in rows] and all(row.ended for row in rows)
    assert not scheduler._pending_prefixes
    return scheduler


def run_turns(limits: GenerationConfig, rng: random.Random, shares: bool) -> tuple[Scheduler, int]:
    """Conversations of three turns at the same time, of which the second one branches: the prompt of a turn is all of the turn before
    and a few tokens more. Returns also how many tokens could be found."""
    prefix_table = PrefixTable(limits.page_size)
    texts: list[list[int]] = []
    turns: list[tuple[list[int], int, int]] = []  # prompt, response length and continued tokens of each row
    num_findable = 0
    for conversation in range(rng.randint(1, 4)):
        text = [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
        num_continued = 0
        stem: list[int] = []
        for turn in range(4):
            if turn == 3:  # a branch: it continues what the third does
                text, num_continued = [*stem, *[8] * rng.randint(1, 4)], len(stem)
            number = rng.randint(1, 9)
            turns.append((list(text), number, num_continued if shares else 0))
            num_findable += max(num_continued - 1, 0)
            text += [1000 * conversation + 100 * turn + j for j in range(number)]
            texts.append([*text, 0, 0, 0])
            num_continued = len(text)
            stem = list(text) if turn == 1 else stem
            text += [7] * rng.randint(1, 4)
    scheduler, cache = Scheduler(limits), FakeCache(limits, texts, False)
    rows = [row_of(i, *turn, prefix_ids=prefix_table.prefix_ids(turn[0])) for i, turn in enumerate(turns)]
    for row in rows:
        row.continued_id = prefix_table.part_id(row.prefix_ids, row.request.prompt_ids, row.request.num_continued)
    cache.begun = dict.fromkeys(range(len(rows)), 0)
    for row in rows[::4]:
        scheduler.add(row)
    while not scheduler.finished:
        step = scheduler.schedule()
        check_pages(scheduler)
        cache.run(step)
        drawn = [item.row for item in step.work if item.samples]
        for row in drawn:
            draw(row, texts[row.buffer_line], row.limit, False, 1)
        scheduler.advance(step)
        for row in (row for row in drawn if row.length >= row.limit):
            if shares:
                scheduler.share_response(row, prefix_table.prefix_ids(row.tokens))
            scheduler.end(row)
            for following in ([1], [2, 3], [], [])[row.buffer_line % 4]:
                scheduler.add(rows[row.buffer_line - row.buffer_line % 4 + following])
        check_pages(scheduler)
    assert all(row.ended for row in rows) and scheduler.pages.num_free == limits.num_pages
    return scheduler, num_findable


def test_turns_find_the_pages_of_the_turns_before() -> None:
    """What they read is their own history; with few pages too, when what was shared is handed out again."""
    shares: dict[bool, list[float]] = {False: [], True: []}  # of what could be found, with enough pages
    for seed in range(300):
        rng = random.Random(seed)
        page_size, num_pages = rng.randint(4, 9), rng.choice((40, 400))
        limits = GenerationConfig(
            page_size=page_size, num_pages=num_pages, max_num_seqs=rng.randint(1, 6), max_num_batched_tokens=rng.choice((8, 64))
        )
        for is_continued in (False, True):
            scheduler, num_findable = run_turns(limits, random.Random(seed), is_continued)
            if num_pages == 400:
                shares[is_continued].append(scheduler.stats.hit_tokens / num_findable)
    assert sum(shares[True]) / len(shares[True]) > 0.9 and sum(shares[False]) / len(shares[False]) < 0.7


def draw_prompts(rng: random.Random, wide: bool = False) -> list[list[int]]:
    """A few prompts; some share their beginnings."""
    stems = [[rng.randint(0, 1 + wide) for _ in range(rng.randint(1, 30 if wide else 9))] for _ in range(4 if wide else 2)]
    return [rng.choice(stems) + [7] * rng.choice((0, 0, 1, 3)) for _ in range(rng.randint(1, 16 if wide else 6))]


def draw_limits(rng: random.Random, longest: int, wide: bool = False) -> GenerationConfig:
    """A small pool that holds a row of ``longest`` tokens, for a few rows and few tokens at once."""
    page_size, max_num_seqs, chunked = rng.randint(1, 9 if wide else 4), rng.randint(1, 8 if wide else 5), rng.random() < 0.9
    max_num_batched_tokens = max_num_seqs + rng.randint(0, 60 if wide else 12)
    return GenerationConfig(
        page_size=page_size,
        num_pages=-(-longest // page_size) + rng.choice((0, 0, 1, 2, 5, 20)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens if chunked else max(max_num_batched_tokens, longest),
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=chunked,
    )


def random_schedule(rng: random.Random, chaos: Chaos, recurrent: bool = False, wide: bool = False) -> Scheduler:
    """Some rows stop before their limit."""
    prompts = draw_prompts(rng, wide)
    lengths = [rng.randint(1, 20 if wide else 7) for _ in prompts]
    limits = draw_limits(rng, max(len(prompt) + n + 3 for prompt, n in zip(prompts, lengths, strict=True)), wide)
    return run_to_the_end(limits, prompts, lengths, [rng.random() < 0.3 for _ in prompts], chaos, recurrent)


def test_random_schedules() -> None:
    """Half of them disturbed, and some larger than the others."""
    rng = random.Random(0)
    chaos = Chaos(rng, 0.1)
    counts = Counter[str]()
    for number in range(6000):
        scheduler = random_schedule(rng, chaos if number % 2 else QUIET, wide=number % 20 == 0)
        counts["preempted"] += scheduler.stats.preemptions > 0
        counts["shared"] += scheduler.stats.hit_tokens > 0
    assert min(counts["preempted"], counts["shared"]) > 500, counts  # the schedules are not all easy
    assert len(chaos.done) == 5 and min(chaos.done.values()) > 250, chaos.done


def run_ahead(rng: random.Random, most: int, recurrent: bool = False) -> Scheduler:
    """As on a device: up to ``most`` steps are planned before the tokens of the first are read, placeholders stand for these, and
    rows that have stopped go on till it is known."""
    prompts = draw_prompts(rng)
    news = [rng.randint(1, 9) for _ in prompts]
    ends = [len(prompt) + rng.randint(1, new) for prompt, new in zip(prompts, news, strict=True)]  # some stop at their limit
    texts = [prompt + [1000 * (i + 1) + j for j in range(news[i])] for i, prompt in enumerate(prompts)]
    limits = draw_limits(rng, max(map(len, texts)))
    scheduler = Scheduler(limits, recurrent, spare_slots(limits, recurrent))
    prefix_table, cache = PrefixTable(limits.page_size), FakeCache(limits, texts, recurrent)
    rows = [row_of(i, prompt, news[i], prefix_ids=prefix_table.prefix_ids(prompt)) for i, prompt in enumerate(prompts)]
    for row in rows:
        scheduler.add(row)
    launched: list[list[tuple[SequenceState, int, int]]] = []
    while not scheduler.finished:
        here = set(scheduler.running)
        step = scheduler.schedule()
        cache.begun |= {row.buffer_line: 0 for row in scheduler.running if row not in here}
        check_pages(scheduler)
        if step.work:
            if rng.random() < 0.7:
                scheduler.reserve_multi_step(step, rng.randint(1, 4))
            drawn = [(item.row, item.row.length, item.num_draws(step.repeats)) for item in step.work if item.samples]
            cache.run(step)
            for row, _, number in drawn:
                row.tokens += [-1] * number
            scheduler.advance(step)
            launched.append(drawn)
        for _ in range(max(len(launched) - most, 0) if step.work else 1):
            for row, first, number in launched.pop(0):
                last = ends[row.buffer_line]
                if not row.ended and first < last <= first + number:
                    del row.tokens[last:]
                    scheduler.end(row)
            check_pages(scheduler)
    assert scheduler.pages.num_free == limits.num_pages and not scheduler._pending_prefixes
    assert [row.length for row in rows] == ends and all(row.ended for row in rows)
    return scheduler


def test_schedules_that_are_planned_before_tokens_are_read() -> None:
    rng, preempted = random.Random(1), 0
    for number in range(2000):
        preempted += run_ahead(rng, number % 3).stats.preemptions > 0
    assert preempted > 150


def test_states_of_linear_attention_are_those_of_the_rows_tokens() -> None:
    """Whatever is preempted, shared, or planned before tokens are read."""
    rng, counts = random.Random(2), Counter[str]()
    for number in range(2000):
        scheduler = run_ahead(rng, number % 3, True) if number % 2 else random_schedule(rng, QUIET, True)
        counts["preempted"] += scheduler.stats.preemptions > 0
        counts["shared"] += scheduler.stats.hit_tokens > 0
    assert min(counts["preempted"], counts["shared"]) > 150, counts


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prompt_is_computed_once(recurrent: bool) -> None:
    limits = GenerationConfig(page_size=8, num_pages=200, max_num_seqs=3, max_num_batched_tokens=64)
    for prompt_length in (1, 7, 8, 9, 17, 50):
        prompts = [list(range(prompt_length))] * 6 + [[99] * prompt_length] * 6
        scheduler = run_to_the_end(limits, prompts, [5] * 12, [False] * 12, recurrent=recurrent)
        # all rows but the first of each prompt; the last prompt token is every row's own
        assert scheduler.stats.hit_tokens == (prompt_length - 1) * 10
        assert scheduler.stats.preemptions == 0


def test_rows_that_cannot_fit_are_refused() -> None:
    scheduler = Scheduler(GenerationConfig(page_size=4, num_pages=2, max_num_seqs=8, max_num_batched_tokens=64))
    scheduler.add(row_of(0, [0] * 5, 4, prefix_ids=(0, 1)))  # the last token is never written
    unchunked = Scheduler(
        GenerationConfig(page_size=4, num_pages=20, max_num_seqs=8, max_num_batched_tokens=16, enable_chunked_prefill=False)
    )
    with pytest.raises(ValueError, match="max_num_batched_tokens=16"):
        unchunked.add(row_of(0, [0] * 15, 2, prefix_ids=(0, 1, 2, 3)))


def test_free_pages_are_revived_and_evicted_oldest_first() -> None:
    manager = PageAllocator(2)
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


def test_prefixes_that_no_page_holds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never get a number that another prefix has had."""
    monkeypatch.setattr(page_allocator, "MIN_PREFIXES", 8)
    scheduler = Scheduler(GenerationConfig(page_size=4, num_pages=6, max_num_seqs=1, max_num_batched_tokens=64))
    table = PrefixTable(4)
    numbers: set[int] = set()
    for number in range(50):
        prompt = [number % 90, *range(8)]
        row = row_of(number, prompt, 10, prefix_ids=table.prefix_ids(prompt))
        assert numbers.isdisjoint(row.prefix_ids)
        numbers |= {*row.prefix_ids}
        scheduler.add(row)
        step = scheduler.schedule()
        row.tokens.append(7)
        row.stopped = True
        scheduler.advance(step)
        end_rows(scheduler, step)
        table.forget(scheduler.needed_prefixes)
        assert len(table._ids) <= 14
    assert table.prefix_ids(prompt)[:2] == row.prefix_ids[:2], "pages hold the last one's"


def test_a_row_that_comes_back_computes_the_last_token_of_its_prompt_anew() -> None:
    """As a fresh one does: in a cached page that nobody holds, a row of one token may have written over that position."""
    scheduler = Scheduler(GenerationConfig(page_size=4, num_pages=8, max_num_seqs=4, max_num_batched_tokens=64))
    table = PrefixTable(4)
    prompt = [1, 2, 3, 4, 5, 6]
    first, second = (row_of(i, prompt, 14, prefix_ids=table.prefix_ids(prompt)) for i in range(2))
    scheduler.add(first)
    step = scheduler.schedule()
    first.tokens.append(7)
    first.stopped = True
    scheduler.advance(step)
    end_rows(scheduler, step)
    second.tokens += [7, 8, 9]  # it was preempted with three tokens
    scheduler.add(second)
    (work,) = scheduler.schedule().work
    assert (work.start, work.num_tokens) == (5, 4) and scheduler.stats.hit_tokens == 5
