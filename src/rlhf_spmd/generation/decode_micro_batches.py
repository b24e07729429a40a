"""The decode loop: rows go from the scheduler's queue to their last token.

A *micro-batch* is a set of whole groups of rows with a scheduler and pages of its own. One micro-batch is plain continuous
batching. With pipeline stages there are several, so that every stage has work: they take turns, and while one stage computes a
step of one micro-batch, the next stage computes a step of another. A micro-batch plans its next step when it has the tokens of
its last one. Every rank of a replica runs the same schedulers in the same order.

A step has two halves. :meth:`DecodeMicroBatch.start` lets the scheduler plan which rows compute which tokens, and launches
them. :meth:`DecodeMicroBatch.finish` takes the drawn tokens, and rows may end with them. On devices whose work is queued, the
next step is started before the last one is finished. Until then placeholders stand for the tokens at the end of a row. What
such a step draws after a stop is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.data.balance import greedy_partition
from rlhf_spmd.generation.call import GenerationCall
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.graphs import Graphs
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.model_runner import NOT_FINITE, LaunchedStep, ModelRunner
from rlhf_spmd.generation.multi_turn import MultiTurnRollouts
from rlhf_spmd.generation.page_allocator import SPARE_SLOTS, PrefixTable
from rlhf_spmd.generation.pipeline_channels import PipelineChannels
from rlhf_spmd.generation.routed_experts import RowExperts
from rlhf_spmd.generation.scheduler import Scheduler
from rlhf_spmd.generation.sequence import Completion, NotFinite, ScheduledStep, SequenceState, TokenLogprobs

PENDING = -1  # stands in a row's tokens for a token that is drawn and not read yet


class StepInFlight(NamedTuple):
    """A started step. ``drawn``: (row, position of its first new token, number of new tokens) of each row that draws."""

    step: ScheduledStep
    launched: LaunchedStep
    drawn: list[tuple[SequenceState, int, int]]


class CallInProgress(NamedTuple):
    """What a micro-batch has during a call. ``num_new_before``: for each row, the length of its response when the call began."""

    call: GenerationCall
    runner: ModelRunner
    experts: RowExperts | None
    num_new_before: list[int]


class DecodeMicroBatch:
    """Rows, by row id, with their scheduler and pages. An interrupted call leaves them to the next one.

    - in_flight: the started steps, the oldest first
    - num_slots: rows that may run at once, the same on all stages, whether they have states of linear attention or not
    """

    def __init__(self, config: GenerationConfig, cache: KVCache, graphs: Graphs, num_slots: int, recurrent: bool) -> None:
        spare_slots = range(num_slots, num_slots + SPARE_SLOTS) if recurrent and config.enable_prefix_caching else ()
        self.scheduler = Scheduler(config, recurrent, spare_slots)
        self.cache = cache
        self.prefix_table = PrefixTable(config.page_size)
        self.graphs = graphs
        self.num_slots = num_slots
        self.rows: dict[int, SequenceState] = {}
        self.in_flight: deque[StepInFlight] = deque()
        self._in_progress: CallInProgress | None = None

    @property
    def in_progress(self) -> CallInProgress:
        """Return what lasts from :meth:`enter` to :meth:`leave`."""
        assert self._in_progress is not None, "the micro-batch is in no call"
        return self._in_progress

    def enter(self, rows: Sequence[SequenceState], call: GenerationCall, channels: PipelineChannels) -> None:
        """Begin a call on ``rows``. Those that are new here wait in the scheduler's queue."""
        self.prefix_table.forget(self.scheduler.needed_prefixes)
        for buffer_line, row in enumerate(rows):
            row.buffer_line = buffer_line
            if row.request.row_id not in self.rows:
                row.leave_pages()
                request = row.request
                row.prefix_ids = self.prefix_table.prefix_ids(request.prompt_ids, request.cache_salt)
                row.continued_id = self.prefix_table.part_id(
                    row.prefix_ids, request.prompt_ids, request.num_continued, request.cache_salt
                )
                row.min_new_tokens = max(call.sampling.min_response_length, row.request.min_new_tokens)
                self.scheduler.add(row)
        self.rows = {row.request.row_id: row for row in rows}
        runner = ModelRunner(call, rows, self.cache, channels, self.graphs)
        if call.environments is not None and self.scheduler.recurrent:
            # states cannot go back to the end of a turn, so nothing is drawn behind it
            runner.max_repeats = min(runner.max_repeats, 1)
        experts = None if self.cache.experts is None else RowExperts(self.cache.experts)
        self.scheduler.before_release = None if experts is None else experts.collect
        self._in_progress = CallInProgress(call, runner, experts, [row.num_new for row in rows])

    def leave(self) -> None:
        """End the call: its rows get the log-probs of the tokens that it drew, and the experts that are recorded.

        Collective over the replica, as :meth:`start` and :meth:`finish`: every rank of it must call, in program order.
        """
        _, runner, experts, num_new_before = self.in_progress
        rows = [*self.rows.values()]
        for row, results in zip(rows, runner.results(rows, num_new_before), strict=True):
            if len(results[0]):
                row.logprob_parts.append(self._token_logprobs(results))
        if experts is not None:
            for row in self.rows.values():
                experts.collect(row)
            experts.finish(self.rows.values(), runner.mesh.pp)
        self.scheduler.before_release = None
        self._in_progress = None

    def completion(self, row: SequenceState) -> Completion:
        """Return the completion of a row that began and ended in this call, before :meth:`leave`. Only on a last stage."""
        _, runner, experts, _ = self.in_progress
        token_logprobs = self._token_logprobs(runner.row_results(row))
        return row.completion(token_logprobs, None if experts is None else experts.of_ended(row))

    def _token_logprobs(self, results: Sequence[Tensor]) -> TokenLogprobs:
        log_probs, log_probs_t1, *tops = results
        versions = torch.full((len(log_probs),), self.in_progress.call.version)
        return TokenLogprobs(log_probs, log_probs_t1, versions, *tops)

    def start(self) -> bool:
        """Launch the next step. Return False if nothing can start before started steps are finished or environments answer."""
        step = self.scheduler.schedule()
        runner = self.in_progress.runner
        if not step.work:
            return False
        all_decode = not step.copies and all(item.decodes for item in step.work)
        if runner.max_repeats and (runner.captures or all_decode):
            self.scheduler.reserve_multi_step(step, runner.max_repeats)
        drawn = [(item.row, item.row.length, count) for item in step.work if (count := item.num_draws(step.repeats))]
        self.in_flight.append(StepInFlight(step, runner.start(step), drawn))
        for row, _, count in drawn:
            row.tokens += [PENDING] * count
        self.scheduler.advance(step)
        return True

    def finish(self, multi_turn: MultiTurnRollouts | None) -> ScheduledStep:
        """Take the tokens of the oldest started step. Returns the step with the work of rows that had not ended before it."""
        step, launched, drawn = self.in_flight.popleft()
        stats = self.in_progress.call.stats
        tokens = self.in_progress.runner.finish(launched)
        stats.steps += 1
        stats.prefill_tokens += sum(item.num_tokens - item.samples for item in step.work)
        # the other rows ended in a step whose tokens were read after this one started
        live_work = [item for item in step.work if not item.row.ended]
        for row, first, count in drawn:
            new, tokens = tokens[:count], tokens[count:]
            if not row.ended:
                self._fill(row, first, new)
        if multi_turn is not None:
            for row in multi_turn.end_turns(step):
                self.scheduler.hold(row)
        for row, first, count in drawn:
            if not row.ended and not row.on_hold and (row.stopped or first + count >= row.limit):
                if row.request.is_continued:
                    self.scheduler.share_response(row, self.prefix_table.prefix_ids(row.tokens, row.request.cache_salt))
                self.scheduler.end(row)
        return ScheduledStep(live_work, step.copies)

    def _fill(self, row: SequenceState, first: int, drawn: Sequence[int]) -> None:
        """Put ``drawn`` in place of the placeholders from ``first`` on, up to a token that ends the row.

        Raises NotFinite.
        """
        call = self.in_progress.call
        stop = call.stop
        for position, token in enumerate(drawn, first):
            if token == NOT_FINITE:  # only here: tokens behind a stop do not count
                raise NotFinite(row.request.row_id)
            row.tokens[position : position + 1] = [token]
            row.stopped = token in stop.token_ids
            if stop.strings is not None and not row.stopped and position + 1 - row.prompt_length >= row.min_new_tokens:
                row.stopped = stop.strings.completed_by_last(row.tokens[: position + 1], row.turn_start)
            if row.stopped:
                break
        call.stats.decode_tokens += position + 1 - first
        if row.stopped:  # what was computed behind the stop does not count, in case an environment goes on with the row
            del row.tokens[position + 1 :]
            row.num_computed = min(row.num_computed, position)

    def resume(self, row: SequenceState, token_ids: list[int]) -> None:
        """Go on with a held row after its environment's answer."""
        self.in_progress.runner.extend(row, token_ids)
        row.tokens += token_ids
        self.scheduler.resume(row)

    def begin_again(self, row: SequenceState) -> None:
        """Hold a row at its prompt until its new environment has answered. It gets other draws."""
        if not row.ended:
            self.scheduler.remove(row)
        _, runner, experts, _ = self.in_progress
        if experts is not None:
            experts.forget(row)
        row.begin_again()
        runner.change_draws(row)
        self.scheduler.add(row)
        self.scheduler.hold(row)


@dataclass(eq=False)
class DecodeMicroBatches:
    """The micro-batches of a replica. ``version``: the version of the weights that filled their pages."""

    micro_batches: Sequence[DecodeMicroBatch]
    version: int

    def run(self, rows: Sequence[SequenceState], call: GenerationCall) -> None:
        """Draw tokens for ``rows`` until they end or the call is interrupted. Adds to its ``stats``.

        Collective over the replica: every rank of it must call, in program order.
        """
        for micro_batch in self.micro_batches:
            micro_batch.cache.reload()
            if call.version != self.version:  # what other weights computed serves only the rows that it belongs to
                micro_batch.scheduler.forget_prefixes()
            micro_batch.scheduler.stats = call.stats
        self.version = call.version
        channels = PipelineChannels(call.mesh)
        busy = []
        for micro_batch, share in zip(self.micro_batches, self._partition(rows), strict=True):
            if share:
                micro_batch.enter(share, call, channels)
                busy.append(micro_batch)
        if call.environments is None:
            self._take_turns(busy, call, None)
        else:
            call_rows = chain.from_iterable(micro_batch.rows.values() for micro_batch in busy)
            with MultiTurnRollouts(call.environments, call_rows, call.decoder.spec, call.mesh.replica, call.tick) as multi_turn:
                for row in multi_turn.rows.values():
                    self._of(row).scheduler.hold(row)
                self._take_turns(busy, call, multi_turn)
                while multi_turn.awaited:
                    self._take_answers(call, multi_turn, wait=True)
                    self._take_turns(busy, call, multi_turn)  # of rows that begin again
        channels.finish()
        for micro_batch in busy:
            micro_batch.leave()
        call.stats.stage_seconds += channels.waited
        call.stats.micro_batches = len(self.micro_batches)
        call.stats.num_pages = sum(micro_batch.cache.num_pages for micro_batch in self.micro_batches)

    def fits(self, rows: Sequence[SequenceState]) -> bool:
        """Return True if each of these rows could run alone in its micro-batch, and there are states for all that may run at once."""
        for micro_batch, share in zip(self.micro_batches, self._partition(rows), strict=True):
            if micro_batch.num_slots < min(len(share), micro_batch.scheduler.config.max_num_seqs):
                return False
            num_tokens = micro_batch.cache.num_pages * micro_batch.cache.page_size
            if any(row.limit - 1 > num_tokens for row in share):
                return False
        return True

    def forget(self, rows: Iterable[SequenceState]) -> None:
        """Remove rows that go on elsewhere or are dropped."""
        for row in rows:
            for micro_batch in self.micro_batches:
                if micro_batch.rows.pop(row.request.row_id, None) is not None:
                    micro_batch.scheduler.remove(row)

    def offload(self) -> None:
        """Free the memory of the pages. Those of rows in flight wait in host memory."""
        for micro_batch in self.micro_batches:
            micro_batch.scheduler.forget_prefixes()
            micro_batch.cache.offload(micro_batch.scheduler.pages.used)

    def _take_turns(self, busy: Iterable[DecodeMicroBatch], call: GenerationCall, multi_turn: MultiTurnRollouts | None) -> None:
        """Run the steps of ``busy`` in turn until all rows have ended or the call is interrupted. Every started step is finished."""
        turns = deque(busy)
        interrupted = False
        finished_groups = call.finished_groups

        def finish(micro_batch: DecodeMicroBatch) -> None:
            nonlocal interrupted
            step = micro_batch.finish(multi_turn)
            call.tick()
            if finished_groups is not None:
                for row in (item.row for item in step.work if item.row.ended):
                    if multi_turn is None or row.request.row_id not in multi_turn.awaited:  # else its last answer is to come
                        finished_groups.note(row)
                finished_groups.hand_out(self._completion)
            interrupted = interrupted or (call.interrupts is not None and call.interrupts(step, call.stats.decode_tokens))

        while turns:
            micro_batch = turns.popleft()
            scheduler = micro_batch.scheduler
            in_flight = micro_batch.in_flight
            num_ahead = int(micro_batch.in_progress.runner.runs_ahead and multi_turn is None)
            while in_flight and (len(in_flight) > num_ahead or interrupted or scheduler.finished):
                finish(micro_batch)
            if interrupted or scheduler.finished:
                continue
            if not micro_batch.start() and in_flight:
                finish(micro_batch)
            turns.append(micro_batch)
            if multi_turn is not None:
                self._take_answers(call, multi_turn, wait=not any(other.in_flight for other in turns))
                if finished_groups is not None:
                    finished_groups.hand_out(self._completion)

    def _take_answers(self, call: GenerationCall, multi_turn: MultiTurnRollouts, wait: bool) -> None:
        """Go on with the rows whose environments have answered; with ``wait`` there is at least one.

        Collective over the replica: every rank of it must call, in program order.
        """
        for row, token_ids in multi_turn.answers(wait):
            if token_ids is None:
                self._of(row).begin_again(row)
                continue
            if not row.ended:
                self._of(row).resume(row, token_ids)
                continue
            if row.on_hold:
                self._of(row).scheduler.remove(row)
            if call.finished_groups is not None:
                call.finished_groups.note(row)

    def _of(self, row: SequenceState) -> DecodeMicroBatch:
        return next(batch for batch in self.micro_batches if batch.rows.get(row.request.row_id) is row)

    def _completion(self, row: SequenceState) -> Completion:
        return self._of(row).completion(row)

    def _partition(self, rows: Sequence[SequenceState]) -> list[list[SequenceState]]:
        return partition_groups(rows, [micro_batch.rows for micro_batch in self.micro_batches])


def partition_groups(rows: Sequence[SequenceState], row_ids: Sequence[Collection[int]]) -> list[list[SequenceState]]:
    """Return the rows of each micro-batch, in whole groups.

    A micro-batch goes on with the groups of which it has a row (``row_ids``: those of each). Each other group, in order, goes to
    the micro-batch with the fewest tokens.
    """
    if len(row_ids) == 1:
        return [list(rows)]
    home = {row.request.group_id: i for row in rows for i, ids in enumerate(row_ids) if row.request.row_id in ids}
    groups: dict[int, list[SequenceState]] = {}
    for row in rows:
        groups.setdefault(row.request.group_id, []).append(row)
    order = sorted(groups, key=lambda group: group not in home)  # those with a home first
    tokens = [sum(row.limit for row in groups[group]) for group in order]
    shares: list[list[SequenceState]] = [[] for _ in row_ids]
    parts = greedy_partition(tokens, len(row_ids), [home.get(group) for group in order])
    for group, part in zip(order, parts, strict=True):
        shares[part] += groups[group]
    return shares
