"""A row's way through a call, from the scheduler's queue to its last token.

A *lane* is a set of whole groups of rows with a scheduler and pages of its own. One lane is plain continuous batching. With pipeline
stages there are several, so that every stage has work: lanes take turns, and while one stage computes a step of one lane, the
next one computes a step of another. Before its next step a lane waits for the tokens of its last one, and meanwhile the steps
of the others go through the stages. Every rank of a replica runs the same schedulers in the same order.

A step of a lane: its scheduler plans which rows compute which tokens, and the runner launches them (:meth:`DecodeMicroBatch.start`).
The drawn
tokens come later (:meth:`DecodeMicroBatch.finish`): rows may end with them, and the scheduler frees what has ended. Until then
placeholders
stand for them at the end of a row's tokens, so that on devices whose work is queued the next step is planned and launched before
the tokens of the last one are read. What such a step draws after a stop is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.graphs import Graphs
from rlhf_spmd.generation.interruption import Interrupts
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.multi_turn import MultiTurnRollouts
from rlhf_spmd.generation.pipeline_channels import PipelineChannels
from rlhf_spmd.generation.runner import NOT_FINITE, Call, Launched, Runner
from rlhf_spmd.generation.scheduler import GenerationStats, Scheduler, Step
from rlhf_spmd.generation.sequence import Completion, NotFinite, PrefixTable, SequenceState, TokenLogprobs
from rlhf_spmd.generation.speculation import Speculation

PENDING = -1  # in a row's tokens: one that is drawn and not yet read


class Window(NamedTuple):
    """A step under way. ``drawn``: (row, where its first new token stands, how many it gets) of each row that draws some."""

    step: Step
    launched: Launched
    drawn: list[tuple[SequenceState, int, int]]


class DecodeMicroBatch:
    """``rows``: by row id. Interrupted calls keep it for the next one; ``runner`` and what it draws by last from :meth:`enter` to
    :meth:`leave`."""

    runner: Runner

    def __init__(self, config: GenerationConfig, cache: KVCache, graphs: Graphs) -> None:
        self.scheduler, self.cache, self.interner = Scheduler(config), cache, PrefixTable(config.page_size)
        self.graphs = graphs
        self.rows: dict[int, SequenceState] = {}
        self.windows: deque[Window] = deque()  # under way, the oldest first

    def enter(self, rows: Sequence[SequenceState], call: Call, stages: PipelineChannels) -> None:
        """``rows`` are at work in ``call``; those that the scheduler does not know yet wait there."""
        for index, row in enumerate(rows):
            row.index = index
            if row.request.row_id not in self.rows:
                row.leave_pages()
                row.contents = self.interner.contents(row.request.prompt_ids)
                row.min_new = max(call.sampling.min_response_length, row.request.min_new_tokens)
                self.scheduler.add(row)
        self.rows = {row.request.row_id: row for row in rows}
        self.runner = Runner(call, rows, self.cache, stages, self.graphs)
        guesses = call.config.speculative_tokens
        self.speculation = Speculation(rows, guesses) if guesses else None
        self.ends, self.version, self._before = call.ends, call.version, [row.num_new for row in rows]

    def leave(self, version: int) -> None:
        """Note what the runner knows of the tokens of this call.

        Collective over the replica, as :meth:`start` and :meth:`finish`: every rank of it must call, in program order.
        """
        results = self.runner.results()
        for row, first in zip(self.rows.values(), self._before, strict=True):
            if count := row.num_new - first:
                log_probs, at_one, *top = (part[row.index, first : row.num_new].clone() for part in results)
                new = TokenLogprobs(log_probs, at_one, torch.full((count,), version), *top)
                row.notes = new if row.notes is None else TokenLogprobs(*map(torch.cat, zip(row.notes, new, strict=True)))
        del self.runner, self.speculation

    def completion(self, row: SequenceState) -> Completion:
        """Of a row that began and has ended in this call, before :meth:`leave`; on a last stage."""
        log_probs, at_one, *top = self.runner.noted(row)
        return row.completion(TokenLogprobs(log_probs, at_one, torch.full((row.num_new,), self.version), *top))

    def start(self) -> bool:
        """Launch the next step. False: there is none until the tokens of those under way are read, or environments answer."""
        step = self.scheduler.schedule()
        if not step.work:
            return False
        repeats, alone = 0, not step.copies and all(item.decodes for item in step.work)
        if self.runner.max_repeats and (self.runner.captures or alone):
            repeats = self.scheduler.look_ahead(step, self.runner.max_repeats)
        drawn = []
        for item in step.work:
            row = item.row
            if item.samples:
                count = min(repeats, row.limit - row.length) if repeats and item.decodes else 1 + len(row.draft)
                drawn.append((row, row.length, count))
        self.windows.append(Window(step, self.runner.start(step, repeats), drawn))
        if self.speculation is None:  # otherwise how many tokens a row gets is not known yet
            for row, _, count in drawn:
                row.tokens += [PENDING] * count
            self.scheduler.advance(step)
        return True

    def finish(self, stats: GenerationStats, episodes: MultiTurnRollouts | None) -> Step:
        """Take the tokens of the oldest step under way; returns the step, with the work of rows that had not ended before it."""
        step, launched, drawn = self.windows.popleft()
        tokens = self.runner.finish(launched)
        stats.steps += 1
        stats.prefill_tokens += sum(item.num_tokens - item.samples for item in step.work)
        live = [item for item in step.work if not item.row.ended]  # others ended in a step that was read after this one began
        for row, first, count in drawn:
            stats.prefill_tokens -= len(row.draft)
            new, tokens = tokens[:count], tokens[count:]
            if not row.ended:  # by a stop in a step that was read after this one was launched
                self._fill(row, first, new, stats)
        if episodes is not None:
            episodes.record(self, step)
        if self.speculation is not None:
            self.scheduler.advance(step)
        for row, first, count in drawn:
            last = first + count if self.speculation is None else row.length
            if not row.ended and not row.held and (row.stopped or last >= row.limit):
                self.scheduler.end(row)
        return Step(live, step.copies)

    def _fill(self, row: SequenceState, first: int, drawn: Sequence[int], stats: GenerationStats) -> None:
        """Put the tokens where their placeholders are, from ``first`` on: all up to the first that the row's draft did not foresee,
        or that ends the row. Raises NotFinite."""
        guesses, ends = row.draft, self.ends
        for number, token in enumerate(drawn):
            at = first + number
            if token == NOT_FINITE:  # what was drawn behind a stop may be
                raise NotFinite(row.request.row_id)
            row.tokens[at : at + 1] = [token]
            row.stopped = token in ends.token_ids
            if ends.strings is not None and not row.stopped and at + 1 - row.prompt_length >= row.min_new:
                row.stopped = ends.strings.completed_by_last(row.tokens[: at + 1], row.turn_start)
            if row.stopped or (self.speculation is not None and guesses[number : number + 1] != [token]):
                break
        new = at + 1 - first
        stats.decode_tokens += new
        if row.stopped:  # what was computed behind it counts for nothing, should an environment go on with the row
            del row.tokens[at + 1 :]
            row.num_computed = min(row.num_computed, at)
        if self.speculation is not None:
            stats.draft_tokens += len(guesses)
            stats.accepted_tokens += new - 1
            self.speculation.note(row, new)
            row.draft = [] if row.stopped else self.speculation.guess(row)


class DecodeMicroBatches:
    """The lanes of a replica, with the rows in flight and their pages. ``version``: of the weights that filled these."""

    def __init__(self, lanes: Sequence[DecodeMicroBatch], version: int) -> None:
        self.lanes, self.version = lanes, version

    def run(self, rows: Sequence[SequenceState], call: Call, stats: GenerationStats, interrupts: Interrupts | None) -> None:
        """Draw tokens for ``rows`` until they end, or ``interrupts`` says so. Adds to ``stats``.

        Collective over the replica: every rank of it must call, in program order.
        """
        for lane in self.lanes:
            lane.cache.reload()
            if call.version != self.version:  # what other weights have computed serves only the rows that lie there
                lane.scheduler.forget_prompts()
            lane.scheduler.stats = stats
        self.version, stages = call.version, PipelineChannels(call.mesh)
        busy = []
        for lane, share in zip(self.lanes, self._share(rows), strict=True):
            if share:
                lane.enter(share, call, stages)
                busy.append(lane)
        with MultiTurnRollouts(call.environments, call, busy) if call.environments is not None else nullcontext() as episodes:
            self._take_turns(busy, call, stats, interrupts, episodes)
        stages.finish()
        for lane in busy:
            lane.leave(call.version)
        stats.stage_seconds += stages.waited
        stats.lanes = len(self.lanes)
        stats.num_pages = sum(lane.cache.num_pages for lane in self.lanes)

    def fits(self, rows: Sequence[SequenceState]) -> bool:
        """Whether each of these rows could run alone in its lane."""
        return all(
            row.limit - 1 <= lane.cache.num_pages * lane.cache.page_size
            for lane, share in zip(self.lanes, self._share(rows), strict=True)
            for row in share
        )

    def forget(self, rows: Iterable[SequenceState]) -> None:
        """Rows in flight that go on elsewhere."""
        for lane, row in ((lane, row) for row in rows for lane in self.lanes if row.request.row_id in lane.rows):
            lane.scheduler.remove(lane.rows.pop(row.request.row_id))

    def offload(self) -> None:
        """Give the memory of the pages back; those of rows in flight wait in host memory."""
        for lane in self.lanes:
            lane.scheduler.forget_prompts()
            lane.cache.offload(lane.scheduler.pages.used)

    def _take_turns(
        self,
        busy: Iterable[DecodeMicroBatch],
        call: Call,
        stats: GenerationStats,
        interrupts: Interrupts | None,
        episodes: MultiTurnRollouts | None,
    ) -> None:
        """When it ends no step is under way any more."""
        turns, interrupted = deque(busy), False

        def finish(lane: DecodeMicroBatch) -> None:
            nonlocal interrupted
            step = lane.finish(stats, episodes)
            call.tick()
            if call.portions is not None:
                for row in (item.row for item in step.work if item.row.ended):
                    if episodes is None or row.request.row_id not in episodes.rows:  # otherwise its last answer is to come
                        call.portions.note(lane, row)
                call.portions.hand_out()
            interrupted = interrupted or (interrupts is not None and interrupts(step, stats.decode_tokens))

        while turns:
            lane = turns.popleft()
            ahead = lane.runner.runs_ahead and episodes is None
            while lane.windows and (len(lane.windows) > ahead or interrupted or lane.scheduler.finished):
                finish(lane)
            if not interrupted and not lane.scheduler.finished:
                if not lane.start() and lane.windows:
                    finish(lane)
                turns.append(lane)
                if episodes is not None:
                    episodes.take_in(wait=not any(lane.windows for lane in turns))
                    if call.portions is not None:
                        call.portions.hand_out()

    def _share(self, rows: Sequence[SequenceState]) -> list[list[SequenceState]]:
        return share_out(rows, [lane.rows for lane in self.lanes])


def share_out(rows: Sequence[SequenceState], known: Sequence[Collection[int]]) -> list[list[SequenceState]]:
    """Rows of each lane, whole groups: a lane goes on with those groups of which it knows a row (``known``: row ids), and the
    others go, in their order, where there are the fewest tokens. Pure."""
    home = {row.request.group_id: i for row in rows for i, ids in enumerate(known) if row.request.row_id in ids}
    groups: dict[int, list[SequenceState]] = {}
    for row in rows:
        groups.setdefault(row.request.group_id, []).append(row)
    shares: list[list[SequenceState]] = [[] for _ in known]
    tokens = [0] * len(known)
    for group, its in sorted(groups.items(), key=lambda item: item[0] not in home):  # known ones first
        lane = home.get(group, tokens.index(min(tokens)))
        shares[lane] += its
        tokens[lane] += sum(row.limit for row in its)
    return shares
