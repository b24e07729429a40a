"""Runs the steps of one micro-batch on this rank: the forward pass of its pipeline stage, the draws, and the transfer of tokens.

All tokens of a call, prompts and drawn ones, lie in one buffer [rows, longest] on the device, beside their log-probs. A step
gathers its inputs from the buffer, draws a token after each row's last one, and writes it there.

Rows that decode can therefore repeat without the host. The host looks at the tokens after the last repetition, and drops what was
drawn after a stop. A row at its limit computes and writes its last token again. As nothing depends on the host, such a step is
captured as a CUDA graph, one for each batch size, and replayed (``graphs``). Batches are then padded with copies of their first
row, whose tokens go to a line that nobody reads.

``buffer_line``: the line of a row in the buffer (:class:`SequenceState`). Legend: B rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.call import GenerationCall
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.graphs import Arena, Graphs, padded_size
from rlhf_spmd.generation.kv_cache import KVCache, fill_lines, slot_mapping
from rlhf_spmd.generation.logit_rules import build_rules
from rlhf_spmd.generation.pipeline_channels import PipelineChannels
from rlhf_spmd.generation.recurrent_states import DecodeMixing
from rlhf_spmd.generation.sampler import SamplingGroups, build_sampling_tensors, draw_rows, group_by_sampling, row_keys
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState, SequenceWork
from rlhf_spmd.kernels import HasDeltaRuleStep, capabilities, on_device
from rlhf_spmd.kernels.devices import HostCopy
from rlhf_spmd.kernels.sampling_tensors import RowSampler, SamplingTensors
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of

NOT_FINITE = -1  # replaces a drawn token whose log-prob is not finite, so that the host of every rank learns of it
GRAPH_STEPS_PER_SYNC = 8  # default of steps_per_sync where steps are captured


class LaunchedStep(NamedTuple):
    """A step that is queued on the device.

    - num_drawn: the number of tokens that it draws
    - token_index: where these go in the token buffer, int64 [num_drawn]
    - drawn: on the last stage, the tokens on their way to the host
    """

    num_drawn: int
    token_index: Tensor
    drawn: HostCopy | None


class DrawState:
    """What a draw needs of its rows, as lines of one tensor, since kernels read contiguous lines. All int64 [B].

    - buffer_lines, prompt_lengths, limits: those of the rows
    - lengths: the rows' tokens so far
    - keys: the keys of the draws
    - tokens_to, log_probs_to: where a row's tokens and log-probs begin in the flat buffers, as if prompts had log-probs too
    - tokens_from: where a row's tokens are read. It differs from ``tokens_to`` for padding
    """

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed
        self.buffer_lines, self.lengths, self.tokens_to, self.log_probs_to = packed[:4]
        self.prompt_lengths, self.limits, self.keys, self.tokens_from = packed[4:]


class ModelRunner:
    """Runs steps of ``rows``, which are in the order of their ``buffer_line``.

    The runners of a call share ``channels``; those of a micro-batch, one per call, share ``graphs``.

    - max_repeats: tokens that a row which decodes may draw before the host looks at them; 0: it looks at each token
    - captures: the rows of a step that decode run as a CUDA graph, padded and apart from the other rows
    - runs_ahead: a step may be launched before the tokens of the last one are read
    """

    def __init__(
        self, call: GenerationCall, rows: Sequence[SequenceState], cache: KVCache, channels: PipelineChannels, graphs: Graphs
    ) -> None:
        self.decoder = decoder = call.decoder
        self.mesh, self.channels = call.mesh, channels
        self.cache, self.graphs = cache, graphs
        self.device = cache.pages.device
        sampling = call.sampling
        config = call.config
        self.num_heads = decoder.spec.num_attention_heads // decoder.tp.size
        self.num_drawable = call.num_drawable
        self.rules = build_rules(sampling, call.stop.token_ids, rows, decoder.spec.vocab_size, self.device)
        overrides = [row.request.overrides or sampling.overrides for row in rows]
        kinds = {each: i for i, each in enumerate(dict.fromkeys(overrides))}
        self.samplings = [sampling.with_overrides(each) for each in kinds]  # mostly there is one
        self._sampling_of = np.array([kinds[each] for each in overrides])
        processors = self.rules is not None and self.rules.processors
        # with other stages or users' functions the next step depends on the host
        repeatable = decoder.pp == 1 and not processors
        self._in_one_pass = isinstance(decoder.ops, RowSampler)
        self.captures = repeatable and self._can_capture(config)
        tokens_per_sync = config.steps_per_sync or (GRAPH_STEPS_PER_SYNC if self.captures else 1)
        self.max_repeats = tokens_per_sync if repeatable and (tokens_per_sync > 1 or self.captures) else 0
        self._max_padded_rows = padded_size(config.max_num_seqs)
        self.runs_ahead = repeatable and capabilities(self.device).streams
        self._allocate_buffers(rows, sampling.logprobs)
        seeds, row_ids = zip(*(row.request.draw_key or (call.seed, row.request.row_id) for row in rows), strict=True)
        keys = row_keys(seeds, torch.tensor([row.step for row in rows]), torch.tensor(row_ids))
        self._keys = keys.numpy()
        self._limits = np.array([row.limit for row in rows], dtype=np.int64)
        self._prompt_lengths = np.array([row.prompt_length for row in rows], dtype=np.int64)
        buffer_lines = np.arange(len(rows))
        self._first_tokens = buffer_lines * self.max_row_tokens
        self._first_log_probs = buffer_lines * self.max_new_tokens - self._prompt_lengths

    def _allocate_buffers(self, rows: Sequence[SequenceState], num_top: int) -> None:
        """Allocate the buffers of the call, with a line for each row and one for padding.

        Graphs use those of earlier calls again.
        """
        self.max_row_tokens = max(row.limit for row in rows)
        self.max_new_tokens = max(row.request.max_new_tokens for row in rows)
        num_lines = len(rows) + 1
        num_kinds = 2 if self.captures else 1 + any(each.log_prob_temperature != 1.0 for each in self.samplings)
        arena = self.graphs.arena if self.captures else Arena()
        take = partial(arena.take, device=self.device)
        num_tokens = arena.size("tokens", num_lines * self.max_row_tokens)
        num_log_probs = arena.size("log_probs", num_lines * self.max_new_tokens)
        dtype = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        self.tokens = take("tokens", (num_tokens,), torch.int64)
        self.history = self.tokens[: num_lines * self.max_row_tokens].view(num_lines, self.max_row_tokens)
        filled = fill_lines([row.tokens for row in rows], self.max_row_tokens, np.int64)
        self.tokens[: filled.size] = torch.from_numpy(filled).view(-1)
        # by line and position in the response: at the sampling temperature, and at 1 where that differs
        self.log_probs = take("log_probs", (num_kinds, num_log_probs), dtype).zero_()
        num_tops = arena.size(f"top {num_top}", num_lines * self.max_new_tokens) if num_top else 0
        self.top_ids = take("top_ids", (num_tops, num_top), torch.int64).zero_()
        self.top_log_probs = take("top_log_probs", (num_tops, num_top), dtype).zero_()

    def start(self, step: ScheduledStep) -> LaunchedStep:
        """Launch this stage's part of a step. On GPUs the host does not wait for it.

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        repeats = step.repeats
        if step.copies:
            self.cache.copy_pages(step.copies)
        if step.state_copies and self.cache.states is not None:
            self.cache.states.copy(step.state_copies)
        decoding = [item.row for item in step.work if item.decodes] if repeats else []
        others = [item for item in step.work if not (repeats and item.decodes)]
        buffer_lines, lengths = _draws(step.work, repeats)
        token_index = on_device(self._first_tokens[buffer_lines] + lengths, self.device)
        if others:
            hidden = self._forward(others)
            drawing, ends = _draws(others, 0)
            if self.decoder.is_last and len(drawing):
                history = self.history[:, : int(ends.max())]
                self._draw(self._last_tokens(hidden, others), self._state(drawing, ends), *self._settings(drawing), history)
        if decoding:
            self._decode(decoding, repeats)
        drawn = None
        if self.decoder.is_last and len(buffer_lines):
            log_prob_index = on_device(self._first_log_probs[buffer_lines] + lengths, self.device)
            finite = self.log_probs[-1].index_select(0, log_prob_index).isfinite()
            values = torch.where(finite, self.tokens.index_select(0, token_index), NOT_FINITE)
            self.channels.send_tokens(values)
            drawn = HostCopy(values)
        elif len(buffer_lines):
            self.channels.expect_tokens(len(buffer_lines), self.device)
        return LaunchedStep(len(buffer_lines), token_index, drawn)

    def finish(self, launched: LaunchedStep) -> list[int]:
        """Return the token ids that a started step drew, in the order of its work and of each row's draws; the same on every rank.

        NOT_FINITE replaces a token whose log-prob is not finite. Steps are finished in the order of their starts.
        Collective over the replica: every rank of it must call, in program order.
        """
        if not launched.num_drawn:
            return []
        if launched.drawn is not None:
            return launched.drawn.tolist()
        received = self.channels.take_tokens()
        self.tokens.index_copy_(0, launched.token_index, received)
        token_ids: list[int] = received.tolist()
        return token_ids

    def extend(self, row: SequenceState, token_ids: Sequence[int]) -> None:
        """Put tokens that the model did not draw after those of ``row``. Their log-probs become 0."""
        start = row.buffer_line * self.max_row_tokens + row.length
        self.tokens[start : start + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        first = row.buffer_line * self.max_new_tokens + row.num_new
        new = slice(first, first + len(token_ids))
        self.log_probs[:, new] = 0.0
        self.top_ids[new] = 0
        self.top_log_probs[new] = 0.0

    def change_draws(self, row: SequenceState) -> None:
        """Key the draws of ``row`` anew: it was begun again."""
        old_key = int(self._keys[row.buffer_line])
        self._keys[row.buffer_line] = row_keys([old_key], torch.tensor([row.retries]), torch.tensor([row.request.row_id]))[0]

    def results(self, rows: Sequence[SequenceState], begins: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Return for each row, on the CPU of every rank of the replica, what is known of its response's tokens from ``begins`` on.

        Those are their log-probs at the sampling temperature and at 1, [tokens], and the ids and log-probs of the likeliest tokens,
        [tokens, logprobs].

        Collective over the replica: every rank of it must call, in program order.
        """
        counts = np.array([row.num_new for row in rows], dtype=np.int64) - np.array(begins, dtype=np.int64)
        first = np.array([row.buffer_line for row in rows], dtype=np.int64) * self.max_new_tokens + np.array(begins)
        index = on_device(np.repeat(first - (counts.cumsum() - counts), counts) + np.arange(counts.sum()), self.device)
        parts = []
        for buffer in (self.log_probs[0], self.log_probs[-1], self.top_ids, self.top_log_probs):
            chosen = buffer.index_select(0, index) if buffer.numel() else buffer.new_empty(len(index), *buffer.shape[1:])
            if chosen.numel():
                self.mesh.pp.broadcast(chosen, self.decoder.pp - 1, "generation:log_probs")
            parts.append(chosen.cpu().split(counts.tolist()))
        return [*zip(*parts, strict=True)]

    def row_results(self, row: SequenceState) -> list[Tensor]:
        """Return the :meth:`results` of one row so far (last stage only, between two steps)."""
        first = row.buffer_line * self.max_new_tokens
        parts = self.log_probs[0], self.log_probs[-1], self.top_ids, self.top_log_probs
        return [part[first : first + row.num_new].cpu() for part in parts]

    def _forward(self, work: Sequence[SequenceWork]) -> Tensor:
        """Return the hidden states of all tokens of ``work`` after this stage's layers."""
        attention = self.cache.for_step(work, self.num_heads)
        if self.decoder.is_first:
            first_tokens = self._first_tokens[[item.row.buffer_line for item in work]]
            starts = np.repeat(first_tokens, [item.num_tokens for item in work])
            inputs = self.tokens.index_select(0, on_device(starts, self.device) + attention.positions)
        else:
            num_tokens = sum(item.num_tokens for item in work)
            inputs = torch.empty(num_tokens, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.device)
            inputs = self.channels.receive_hidden(inputs)
        states, experts = self.cache.states, self.cache.experts
        routers = None if experts is None else experts.of_step(slot_mapping(work, self.cache).cache_slots)
        delta_rule = None if states is None else states.of_step(work, attention.positions)
        hidden = self.decoder(inputs, attention, routers=routers, delta_rule=delta_rule)
        if routers is not None:
            routers.write()
        if not self.decoder.is_last:
            self.channels.hidden.send(hidden)
        return hidden

    def _last_tokens(self, hidden: Tensor, work: Sequence[SequenceWork]) -> Tensor:
        """Return the hidden states after which a token is drawn."""
        if all(item.decodes for item in work):
            return hidden
        ends = np.cumsum([item.num_tokens for item in work])
        last = ends[np.array([item.samples for item in work])] - 1
        return hidden.index_select(0, on_device(last, self.device))

    def _state(self, buffer_lines: NDArray[np.int64], lengths: NDArray[np.int64], num_padding: int = 0) -> DrawState:
        """Return the state of the rows in ``buffer_lines`` before a draw.

        The last ``num_padding`` write to the line of padding.
        """
        tokens_from = self._first_tokens[buffer_lines]
        tokens_to = tokens_from.copy()
        prompt_lengths = self._prompt_lengths[buffer_lines]
        log_probs_to = self._first_log_probs[buffer_lines]
        padding = slice(len(buffer_lines) - num_padding, len(buffer_lines))
        tokens_to[padding] = len(self._limits) * self.max_row_tokens
        log_probs_to[padding] = len(self._limits) * self.max_new_tokens - prompt_lengths[padding]
        constants = prompt_lengths, self._limits[buffer_lines], self._keys[buffer_lines]
        return DrawState(
            on_device(np.stack([buffer_lines, lengths, tokens_to, log_probs_to, *constants, tokens_from]), self.device)
        )

    def _draw(
        self, hidden: Tensor, state: DrawState, settings: SamplingTensors, groups: SamplingGroups, history: Tensor
    ) -> None:
        """Draw a token after each of ``hidden`` [B, hidden], and write it and its log-probs to the buffers.

        ``history``: the buffer's tokens, as far as these rows have any. ``groups``: the rows by their settings, if those are
        needed.

        Collective over tp: every rank of it must call, in program order.
        """
        scores = logits = local_logits(self.decoder, hidden)
        all_logits = gather_logits(self.decoder, logits) if self.rules is not None or self.top_ids.numel() else logits
        if self.rules is not None:
            scores = self.rules.apply(all_logits, state.buffer_lines, state.lengths, history)
        positions = state.lengths - state.prompt_lengths
        drawn, log_probs, log_probs_t1 = draw_rows(
            self.decoder.ops, scores, logits, settings, state.keys, positions, self.decoder, groups, self.num_drawable
        )
        self.tokens.index_copy_(0, state.tokens_to + state.lengths, drawn)
        index = state.log_probs_to + state.lengths
        self.log_probs[-1].index_copy_(0, index, log_probs_t1)
        if len(self.log_probs) > 1:
            self.log_probs[0].index_copy_(0, index, log_probs)
        if self.top_ids.numel():
            top = all_logits[:, : self.num_drawable].topk(self.top_ids.shape[1]).indices
            self.top_ids.index_copy_(0, index, top)
            self.top_log_probs.index_copy_(0, index, log_probs_of(self.decoder, logits, top))

    def _settings(self, buffer_lines: NDArray[np.int64]) -> tuple[SamplingTensors, SamplingGroups]:
        """Return how these rows are sampled. Groups are made only for ops that do not draw all rows in one pass."""
        kinds = self._sampling_of[buffer_lines]
        groups = [] if self._in_one_pass else group_by_sampling(self.samplings, kinds, self.device)
        return build_sampling_tensors(self.samplings, kinds, self.device), groups

    def _decode(self, rows: Sequence[SequenceState], repeats: int) -> None:
        """Run ``repeats`` steps of one token per row."""
        num_padding = padded_size(len(rows)) - len(rows) if self.captures else 0
        padded = [*rows, *[rows[0]] * num_padding]
        buffer_lines = np.array([row.buffer_line for row in padded])
        state = self._state(buffer_lines, np.array([row.length for row in padded]), num_padding)
        settings, groups = self._settings(buffer_lines)
        num_pages = max(len(row.pages) for row in rows)
        page_table = on_device(fill_lines([row.pages for row in padded], num_pages, np.int32), self.device)
        state_slots = on_device(np.array([row.state_slot for row in rows] + [-1] * num_padding), self.device)
        if not self.captures:
            history = self.history[:, : max(row.length for row in rows) + repeats]
            for _ in range(repeats):
                self._decode_once(state, page_table, state_slots, settings, groups, history)
            return
        inputs = self._static_inputs(state, page_table, state_slots, settings)
        step = partial(self._decode_once, *inputs, groups, self.history)
        flags = settings.filters, settings.greedy, settings.tempered
        key = len(padded), flags, groups[0][0].overrides if groups else None
        self.graphs.run(step, repeats, key, self._addresses())

    def _static_inputs(
        self, state: DrawState, page_table: Tensor, state_slots: Tensor, settings: SamplingTensors
    ) -> tuple[DrawState, Tensor, Tensor, SamplingTensors]:
        """Return copies of a step's inputs in the graphs' arena, where their addresses stay."""
        arena = self.graphs.arena
        num_rows, num_pages = page_table.shape

        def static(name: str, values: Tensor) -> Tensor:
            """Copy ``values`` [..., B] to the arena's tensor of this name."""
            shape = *values.shape[:-1], self._max_padded_rows
            return arena.take(name, shape, values.dtype, self.device)[..., :num_rows].copy_(values)

        max_pages = arena.size("pages", -(-(self.max_row_tokens - 1) // self.cache.page_size))
        table = arena.take("table", (self._max_padded_rows, max_pages), torch.int32, self.device)[:num_rows].zero_()
        table[:, :num_pages] = page_table
        columns: dict[str, Any] = {
            name: static(name, getattr(settings, name)) for name in ("temperature", "top_p", "min_p", "top_k")
        }
        static_state = DrawState(static("state", state.packed))
        return static_state, table, static("state slots", state_slots), settings._replace(**columns)

    def _addresses(self) -> tuple[object, ...]:
        """Return what a captured step has fixed outside the arena: addresses, shapes and rules."""
        rules = () if self.rules is None else (self.history.shape, *self.rules.constants())
        weights = tuple(tensor.data_ptr() for tensor in (*self.decoder.parameters(), *self.decoder.buffers()))
        caches = [cache.pages for cache in (self.cache, self.cache.global_head_cache) if cache is not None]
        states = self.cache.states
        experts = None if self.cache.experts is None else self.cache.experts.values.data_ptr()
        state_addresses = () if states is None else (states.inputs.data_ptr(), states.memory.data_ptr())
        return *((pages.data_ptr(), pages.shape) for pages in caches), experts, state_addresses, weights, rules

    def _decode_once(
        self,
        state: DrawState,
        page_table: Tensor,
        state_slots: Tensor,
        settings: SamplingTensors,
        groups: SamplingGroups,
        history: Tensor,
    ) -> None:
        """Draw the next token of each row and add 1 to the lengths in ``state``. The host reads no tensor here.

        ``state_slots`` [B]: the slots of the rows' states, -1 for copies of the first row.
        """
        positions = state.lengths - 1
        states = self.cache.states
        experts = self.cache.experts
        inputs = self.tokens.index_select(0, state.tokens_from + positions)
        attention = self.cache.decoding(positions, page_table, self.num_heads)
        routers = None if experts is None else experts.of_step(self.cache.cache_slots_of(positions, page_table))
        delta_rule = None if states is None else DecodeMixing(states, state_slots, positions)
        hidden = self.decoder(inputs, attention, routers=routers, delta_rule=delta_rule)
        if routers is not None:
            routers.write()
        self._draw(hidden, state, settings, groups, history)
        state.lengths += state.lengths + 1 < state.limits

    def _can_capture(self, config: GenerationConfig) -> bool:
        """Return True if decode steps can be CUDA graphs: no host reads and no changing memory.

        Experts may read counts on the host, and torch's paged attention allocates anew each time. Rows that are drawn group by
        group form other groups in each step, and their top_p reads numbers on the host.
        """
        capturable = config.captures(self.device, self.decoder.pp) and self.cache.backend.capturable
        same_draws = self._in_one_pass or (len(self.samplings) == 1 and self.samplings[0].top_p == 1.0)
        # torch would change the first row's state for each copy of it
        same_states = self.cache.states is None or isinstance(self.decoder.ops, HasDeltaRuleStep)
        return capturable and same_draws and same_states and not self.decoder.moe_syncs_host


def _draws(work: Sequence[SequenceWork], repeats: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the buffer line of each token that ``work`` draws, and the row's length before it, int64 each."""
    counts = [item.num_draws(repeats) for item in work]
    buffer_lines = np.repeat(np.array([item.row.buffer_line for item in work], dtype=np.int64), counts)
    lengths = [item.row.length + number for item, count in zip(work, counts, strict=True) for number in range(count)]
    return buffer_lines, np.array(lengths, dtype=np.int64)
