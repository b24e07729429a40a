"""Rows in flight as micro-batches, so that every pipeline stage has work: while one stage computes a step of one lane, the next
one computes a step of another.

A lane is a set of whole groups with a scheduler and pages of its own. Lanes take turns (:func:`take_turns`): before its next
step a lane waits for the tokens of its last one, and meanwhile the steps of the others go through the stages. Every rank runs
the same schedulers in the same order. One lane is plain continuous batching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.generation.balancing import Look
from rlhf_spmd.generation.decode_loop import DecodeLoop
from rlhf_spmd.generation.episodes import Episodes
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.progress import Drawn, Progress
from rlhf_spmd.generation.runner import Runner
from rlhf_spmd.generation.scheduler import Scheduler, Step
from rlhf_spmd.generation.sequence import Interner, Row
from rlhf_spmd.generation.speculation import Speculation
from rlhf_spmd.generation.stopping import Ends
from rlhf_spmd.generation.until import Watch


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


@dataclass
class Lane:
    """``rows`` by row id. Kept between interrupted calls."""

    scheduler: Scheduler
    cache: KVCache
    interner: Interner
    rows: dict[int, Row]

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

    def forget_all_but(self, staying: Collection[int]) -> None:
        """Drop the rows that are not in ``staying`` (row ids)."""
        for row_id in [row_id for row_id, row in self.rows.items() if not row.ended and row_id not in staying]:
            self.scheduler.remove(self.rows.pop(row_id))


@dataclass
class Cached:
    """What calls leave behind for the next one: the lanes, and the ``version`` of the weights that filled their pages."""

    version: int
    lanes: list[Lane]

    def share(self, progress: Sequence[Progress]) -> list[list[Progress]]:
        return share_out(progress, [lane.rows for lane in self.lanes])

    def fits(self, progress: Sequence[Progress]) -> bool:
        """Whether each of these rows could run alone in its lane."""
        return all(
            limit_of(row) - 1 <= lane.scheduler.limits.num_pages * lane.scheduler.limits.page_size
            for lane, rows in zip(self.lanes, self.share(progress), strict=True)
            for row in rows
        )

    def cost_of_moving(self, item: tuple[int, Progress]) -> int:
        """Tokens of a row (the second of ``item``) that lie in pages, which stay behind."""
        return sum(row.num_computed for lane in self.lanes if (row := lane.rows.get(item[1].request.row_id)))

    def forget_all_but(self, progress: Iterable[Progress]) -> None:
        """Drop the rows that are not in ``progress``."""
        staying = {done.request.row_id for done in progress}
        for lane in self.lanes:
            lane.forget_all_but(staying)

    def offload(self) -> None:
        """Give the memory of the pages back; those of rows in flight wait in host memory."""
        for lane in self.lanes:
            lane.scheduler.forget_prompts()
            lane.cache.offload(lane.scheduler.pages.used)

    def reload(self, version: int) -> None:
        """Go on, with weights that may be new: what other weights have computed serves only the rows that lie there."""
        for lane in self.lanes:
            lane.cache.reload()
            if version != self.version:
                lane.scheduler.forget_prompts()
        self.version = version

    @property
    def counts(self) -> tuple[int, int, int]:
        """Prompt tokens, those of them found in the cache, and preemptions, so far."""
        all_of = [(s.num_prompt_tokens, s.num_hit_tokens, s.num_preemptions) for s in (lane.scheduler for lane in self.lanes)]
        prompts, hits, preemptions = map(sum, zip(*all_of, strict=True))
        return prompts, hits, preemptions


def limit_of(row: Progress) -> int:
    """Tokens of a row at most, prompt included."""
    return len(row.request.prompt_ids) + row.request.max_new_tokens


def share_out(progress: Sequence[Progress], known: Sequence[Collection[int]]) -> list[list[Progress]]:
    """Rows of each lane, whole groups: a lane goes on with those groups of which it knows a row (``known``: row ids), and the
    others go, in their order, where there are the fewest tokens. Pure."""
    home = {row.request.group_id: i for row in progress for i, rows in enumerate(known) if row.request.row_id in rows}
    groups: dict[int, list[Progress]] = {}
    for row in progress:
        groups.setdefault(row.request.group_id, []).append(row)
    shares: list[list[Progress]] = [[] for _ in known]
    tokens = [0] * len(known)
    for group, rows in sorted(groups.items(), key=lambda item: item[0] not in home):  # known ones first
        lane = home.get(group, tokens.index(min(tokens)))
        shares[lane] += rows
        tokens[lane] += sum(map(limit_of, rows))
    return shares


class LaneRun:
    """A lane during one call. ``progress[i]`` is the row with index i."""

    def __init__(
        self,
        lane: Lane,
        progress: Sequence[Progress],
        rows: Sequence[Row],
        runner: Runner,
        ends: Ends,
        most: int,
        loop: DecodeLoop | None,
    ) -> None:
        """``most``: guessed tokens. ``loop``: takes the steps that only draw a token of each row."""
        self.lane, self.progress, self.rows, self.runner, self.ends = lane, progress, rows, runner, ends
        self.loop, self._steps = loop, 0  # of the loop, under way
        self.speculation = Speculation(progress, most) if most else None
        self.plan: Step | None = None  # under way
        self._firsts = [len(done.token_ids) for done in progress]

    def start(self) -> None:
        """Collective over the replica, as :meth:`finish` and :meth:`note`: every rank of it must call, in program order."""
        plan = self.lane.scheduler.schedule()
        if plan.work:  # otherwise its rows wait for environments
            self.plan = plan
            self._steps = self.lane.scheduler.look_ahead(plan, self.loop.most) if self.loop else 0
            if self.loop and self._steps:
                self.loop.start(plan.work, self._steps)
            else:
                self.runner.start(plan)

    def finish(self, stats: GenerationStats, episodes: Episodes | None) -> Step:
        """Take the tokens of the step under way; returns the step."""
        plan, self.plan = self.plan, None
        assert plan is not None, "no step is under way"
        drawn: list[int]
        plan, drawn = self.loop.finish(plan.work) if self.loop and self._steps else (plan, self.runner.finish())
        self._record(plan, drawn, stats)
        if episodes is not None:
            episodes.record(self, plan)
        self.lane.scheduler.complete(plan)
        return plan

    def note(self, version: int) -> None:
        """Append to the rows' progress what the runner knows of the tokens of this call."""
        results = self.runner.results()
        for row, done, first in zip(self.rows, self.progress, self._firsts, strict=True):
            _note(row, done, first, results, version)

    def _record(self, plan: Step, drawn: list[int], stats: GenerationStats) -> None:
        """Append the drawn tokens to their rows: all up to the first that a row's draft did not foresee."""
        ends, speculation = self.ends, self.speculation
        tokens = iter(drawn)
        computed = 0
        for row, _, count, samples in plan.work:
            computed += count
            if not samples:
                continue
            token_ids = self.progress[row.index].token_ids
            before, going = len(token_ids), True
            for guess in (*row.draft, None):
                token = next(tokens)
                if not going:
                    continue  # drawn after a guess that failed
                token_ids.append(token)
                row.length += 1
                row.stopped = token in ends.token_ids
                if ends.strings is not None and not row.stopped and row.num_new >= row.min_new:
                    row.stopped = ends.strings.completed_by_last(self.progress[row.index].turn)
                going = token == guess and not row.stopped
            new = len(token_ids) - before
            stats.decode_tokens += new
            if speculation is not None:
                stats.draft_tokens += len(row.draft)
                stats.accepted_tokens += new - 1
                speculation.note(row.index, token_ids[before:])
                row.draft = [] if row.stopped else speculation.guess(row)
            else:
                row.draft = []
        stats.steps += 1
        stats.prefill_tokens += computed - len(drawn)


def take_turns(
    runs: Iterable[LaneRun],
    stats: GenerationStats,
    tick: Callable[[], None],
    watch: Watch | Look | None,
    episodes: Episodes | None,
) -> None:
    """Steps of all lanes in turn until their rows have ended, or ``watch`` says so; then no step is under way any more.

    Collective over the replica: every rank of it must call, in program order.
    """
    waiting, interrupted = deque(runs), False
    while waiting:
        run = waiting.popleft()
        if run.plan is not None:
            plan = run.finish(stats, episodes)
            tick()
            interrupted = interrupted or (watch is not None and watch.reached(plan, run.progress, stats.decode_tokens))
        if not interrupted and not run.lane.scheduler.finished:
            run.start()
            waiting.append(run)
            if episodes is not None:
                episodes.take_in(wait=all(run.plan is None for run in waiting))


def _note(row: Row, done: Progress, first: int, results: tuple[Tensor, Tensor, Tensor, Tensor], version: int) -> None:
    """What the runner knows of a row's tokens from number ``first`` on."""
    count = len(done.token_ids) - first
    if count:
        sampled, at_one, *top = (part[row.index, first : len(done.token_ids)].clone() for part in results)
        done.parts.append(Drawn(sampled, at_one, torch.full((count,), version), *top))
    if row.ended:
        done.finish_reason = "stop" if row.stopped else "length"
