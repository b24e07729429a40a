"""Runs the steps of one micro-batch on this rank: the forward pass of its pipeline stage, the draws, and the transfer of tokens.

All tokens of a call, prompts and drawn ones, lie in one buffer [rows, longest] on the device, beside their log-probs. A step
gathers its inputs from the buffer, draws a token after each row's last one, and writes it there.

Rows that decode can therefore repeat without the host. It looks at the tokens after the last repetition, and drops what was drawn
after a stop. A row at its limit computes and writes its last token again. As nothing depends on the host, such a step is
captured as a CUDA graph, one for each batch size, and replayed (``graphs``). Batches are then padded with copies of their first
row, whose tokens go to a line that nobody reads.

Legend: B rows of a step; ``state`` int64 [8, B]: what a draw needs of them, see :meth:`ModelRunner._state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.graphs import Arena, Graphs, padded_size
from rlhf_spmd.generation.kv_cache import KVCache, fill_lines, slot_mapping
from rlhf_spmd.generation.logit_rules import build_rules
from rlhf_spmd.generation.pipeline_channels import PipelineChannels
from rlhf_spmd.generation.recurrent_states import DecodeMixing
from rlhf_spmd.generation.sampler import (
    SamplingGroups,
    SamplingTensors,
    build_sampling_tensors,
    draw_rows,
    group_by_sampling,
    row_keys,
)
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState, SequenceWork
from rlhf_spmd.generation.stopping import StopCriteria
from rlhf_spmd.kernels import HasDeltaRuleStep, capabilities, on_device
from rlhf_spmd.kernels.devices import HostCopy
from rlhf_spmd.kernels.sampling_tensors import RowSampler
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.parallel.mesh import Mesh

NOT_FINITE = -1  # replaces a drawn token whose log-prob is not finite, so that the host of every rank learns of it
GRAPH_STEPS_PER_SYNC = 8  # default of steps_per_sync where steps are captured


class LaunchedStep(NamedTuple):
    """A step that is queued on the device.

    ``number``: tokens that it draws; ``places`` int64: where these go in the token buffer; ``drawn``: the tokens on their way
    to the host, on the last stage.
    """

    number: int
    places: Tensor
    drawn: HostCopy | None


@dataclass(frozen=True)
class GenerationCall:
    """The arguments of a call of the generator that its runners need.

    ``stop``: what ends a response; ``drawable``: as many ids, from 0 on, may be drawn; ``version``: of the weights.
    """

    decoder: Decoder
    mesh: Mesh
    config: GenerationConfig
    sampling: SamplingConfig
    stop: StopCriteria
    drawable: int
    seed: int
    version: int
    tick: Callable[[], None]


class ModelRunner:
    """Runs steps of ``rows``, which are in the order of their index.

    The runners of a call share ``channels``; those of a micro-batch, one per call, share ``graphs``.

    - max_repeats: tokens that a row which decodes may draw before the host looks at them; 0: it looks at each token
    - captures: the rows of a step that decode run as a CUDA graph, padded and apart from the other rows
    - runs_ahead: a step may be launched before the tokens of the last one are read
    """

    def __init__(
        self, call: GenerationCall, rows: Sequence[SequenceState], cache: KVCache, channels: PipelineChannels, graphs: Graphs
    ) -> None:
        self.decoder, self.mesh, self.cache, self.channels, self.graphs = call.decoder, call.mesh, cache, channels, graphs
        decoder, sampling, config, self.device = call.decoder, call.sampling, call.config, cache.pages.device
        self.num_heads = decoder.spec.num_attention_heads // decoder.tp.size
        self.drawable = call.drawable
        self.rules = build_rules(sampling, call.stop.token_ids, rows, decoder.spec.vocab_size, self.device)
        overrides = [row.request.overrides or sampling.overrides for row in rows]
        number = {each: i for i, each in enumerate(dict.fromkeys(overrides))}
        self.samplings = [sampling.with_overrides(each) for each in number]  # mostly there is one
        self._sampling_of = np.array([number[each] for each in overrides])
        processors = self.rules is not None and self.rules.processors
        # with other stages or users' functions the next step depends on the host
        repeatable = decoder.pp == 1 and not processors
        self._in_one_pass = isinstance(decoder.ops, RowSampler)
        self.captures = repeatable and self._can_capture(config)
        each = config.steps_per_sync or (GRAPH_STEPS_PER_SYNC if self.captures else 1)
        self.max_repeats = each if repeatable and (each > 1 or self.captures) else 0
        self._most_rows = padded_size(config.max_num_seqs)
        self.runs_ahead = repeatable and capabilities(self.device).streams
        self._allocate(rows, sampling.logprobs)
        self.row_ids = [row.request.row_id for row in rows]
        seeds, numbers = zip(*(row.request.draw_key or (call.seed, row.request.row_id) for row in rows), strict=True)
        keys = row_keys(seeds, torch.tensor([row.step for row in rows]), torch.tensor(numbers)).tolist()
        prompts, limits = [row.prompt_length for row in rows], [row.limit for row in rows]
        firsts = [(i * self.width, i * self.most - length) for i, length in enumerate(prompts)]
        self._constants = np.array([*zip(*firsts, strict=True), prompts, limits, keys], dtype=np.int64)  # by line, see _state

    def _allocate(self, rows: Sequence[SequenceState], num_top: int) -> None:
        """Make the buffers of the call, with a line for each row and one for padding. Graphs use those of earlier calls again."""
        lines, width, most = len(rows) + 1, max(row.limit for row in rows), max(row.request.max_new_tokens for row in rows)
        num_kinds = 1 + any(each.log_prob_temperature != 1.0 for each in self.samplings)
        arena = self.graphs.arena if self.captures else Arena()
        take, num_kinds = partial(arena.take, device=self.device), 2 if self.captures else num_kinds
        num_tokens, num_log_probs = arena.size("tokens", lines * width), arena.size("log_probs", lines * most)
        dtype = torch.float64 if self.decoder.dtype == torch.float64 else torch.float32
        self.width, self.most = width, most
        self.tokens = take("tokens", (num_tokens,), torch.int64)
        self.history = self.tokens[: lines * width].view(lines, width)
        filled = fill_lines([row.tokens for row in rows], width, np.int64)
        self.tokens[: filled.size] = torch.from_numpy(filled).view(-1)
        # by line and place in the response: at the sampling temperature, and at 1 where that differs
        self.log_probs = take("log_probs", (num_kinds, num_log_probs), dtype).zero_()
        num_tops = arena.size(f"top {num_top}", lines * most) if num_top else 0
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
        lines, ends = _draws(step.work, repeats)
        places, log_prob_places = (self._constants[:2, lines] + ends).astype(np.int64)
        tokens_at = on_device(places, self.device)
        if others:
            hidden = self._forward(others)
            some, lengths = _draws(others, 0)
            if self.decoder.is_last and len(some):
                history = self.history[:, : int(lengths.max())]
                self._draw(self._last_tokens(hidden, others), self._state(some, lengths), *self._settings(some), history)
        if decoding:
            self._decode(decoding, repeats)
        drawn = None
        if self.decoder.is_last and len(lines):
            finite = self.log_probs[-1].index_select(0, on_device(log_prob_places, self.device)).isfinite()
            values = torch.where(finite, self.tokens.index_select(0, tokens_at), NOT_FINITE)
            self.channels.send_tokens(values)
            drawn = HostCopy(values)
        elif len(lines):
            self.channels.expect_tokens(len(lines), self.device)
        return LaunchedStep(len(lines), tokens_at, drawn)

    def finish(self, launched: LaunchedStep) -> list[int]:
        """The token ids that a started step drew, in the order of its work and of each row's draws; the same on every rank.

        NOT_FINITE replaces a token whose log-prob is not finite. Steps are finished in the order of their starts.
        Collective over the replica: every rank of it must call, in program order.
        """
        if not launched.number:
            return []
        if launched.drawn is None:
            taken = self.channels.take_tokens()
            self.tokens.index_copy_(0, launched.places, taken)
            token_ids: list[int] = taken.tolist()
        else:
            token_ids = launched.drawn.tolist()
        return token_ids

    def extend(self, row: SequenceState, token_ids: Sequence[int]) -> None:
        """Put tokens that the model did not draw after those of ``row``. Their log-probs become 0."""
        at = row.index * self.width + row.length
        self.tokens[at : at + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        first = row.index * self.most + row.num_new
        new = slice(first, first + len(token_ids))
        self.log_probs[:, new] = 0.0
        self.top_ids[new], self.top_log_probs[new] = 0, 0.0

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is known of the drawn tokens, on the CPU of every rank of the replica.

        Returns log-probs [rows, longest response] at the sampling temperature and at 1, and the likeliest tokens' ids and log-probs
        [rows, longest response, logprobs].

        Collective over the replica: every rank of it must call, in program order.
        """
        for tensor in (self.log_probs, self.top_ids, self.top_log_probs):
            if tensor.numel():
                self.mesh.pp.broadcast(tensor, self.decoder.pp - 1, "generation:log_probs")
        shape = len(self.row_ids), self.most
        used = math.prod(shape)
        log_probs = self.log_probs[:, :used].cpu()
        tops = (self.top_ids, self.top_log_probs)
        top_ids, top_log_probs = (top[:used].cpu().view(*shape, top.shape[1]) for top in tops)
        return log_probs[0].view(shape), log_probs[-1].view(shape), top_ids, top_log_probs

    def row_results(self, row: SequenceState) -> list[Tensor]:
        """The :meth:`results` of one row so far (last stage only, between two steps)."""
        first = row.index * self.most
        parts = self.log_probs[0], self.log_probs[-1], self.top_ids, self.top_log_probs
        return [part[first : first + row.num_new].cpu() for part in parts]

    def _forward(self, work: Sequence[SequenceWork]) -> Tensor:
        """The hidden states of all tokens of ``work`` after this stage's layers."""
        attention = self.cache.for_step(work, self.num_heads)
        if self.decoder.is_first:
            lines = np.repeat([item.row.index * self.width for item in work], [item.num_tokens for item in work])
            inputs = self.tokens.index_select(0, on_device(lines, self.device) + attention.positions)
        else:
            num_tokens = sum(item.num_tokens for item in work)
            inputs = torch.empty(num_tokens, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.device)
            inputs = self.channels.receive_hidden(inputs)
        states, experts = self.cache.states, self.cache.experts
        routers = None if experts is None else experts.of_step(slot_mapping(work, self.cache).slots)
        delta_rule = None if states is None else states.of_step(work, attention.positions)
        hidden = self.decoder(inputs, attention, routers=routers, delta_rule=delta_rule)
        if routers is not None:
            routers.write()
        if not self.decoder.is_last:
            self.channels.hidden.send(hidden)
        return hidden

    def _last_tokens(self, hidden: Tensor, work: Sequence[SequenceWork]) -> Tensor:
        """The hidden states after which a token is drawn."""
        if all(item.decodes for item in work):
            return hidden
        ends = np.cumsum([item.num_tokens for item in work])
        last = ends[np.array([item.samples for item in work])] - 1
        return hidden.index_select(0, on_device(last, self.device))

    def _state(self, lines: NDArray[np.int64], lengths: NDArray[np.int64], num_padding: int = 0) -> Tensor:
        """What a draw needs of its rows, int64 [8, B].

        In order: ``lines`` in the buffer; ``lengths``, tokens so far; where a row's tokens go in the flat buffer; where its
        log-probs would begin if prompts had some; prompt lengths; limits; keys of the draws; where a row's tokens are read
        from. The last ``num_padding`` columns write to the line of padding.
        """
        constants = self._constants[:, lines]
        state = np.empty((8, len(lines)), dtype=np.int64)  # one line per quantity: kernels read contiguous lines
        state[0], state[1], state[2:7], state[7] = lines, lengths, constants, constants[0]
        padding = slice(len(lines) - num_padding, len(lines))
        state[2, padding] = len(self.row_ids) * self.width
        state[3, padding] = len(self.row_ids) * self.most - state[4, padding]
        return on_device(state, self.device)

    def _draw(self, hidden: Tensor, state: Tensor, settings: SamplingTensors, groups: SamplingGroups, history: Tensor) -> None:
        """Draw a token after each of ``hidden`` [B, hidden], and write it and its log-probs to the buffers.

        ``history``: the buffer's tokens, as far as these rows have any. ``groups``: the rows by their settings, if those are
        needed.

        Collective over tp: every rank of it must call, in program order.
        """
        lines, lengths, tokens_from, log_probs_from, prompts, _, keys, _ = state
        scores = logits = local_logits(self.decoder, hidden)
        whole = gather_logits(self.decoder, logits) if self.rules is not None or self.top_ids.numel() else logits
        if self.rules is not None:
            scores = self.rules.apply(whole, lines, lengths, history)
        ops, numbers = self.decoder.ops, lengths - prompts
        drawn, log_probs, at_one = draw_rows(ops, scores, logits, settings, keys, numbers, self.decoder, groups, self.drawable)
        self.tokens.index_copy_(0, tokens_from + lengths, drawn)
        places = log_probs_from + lengths
        self.log_probs[-1].index_copy_(0, places, at_one)
        if len(self.log_probs) > 1:
            self.log_probs[0].index_copy_(0, places, log_probs)
        if self.top_ids.numel():
            top = whole[:, : self.drawable].topk(self.top_ids.shape[1]).indices
            self.top_ids.index_copy_(0, places, top)
            self.top_log_probs.index_copy_(0, places, log_probs_of(self.decoder, logits, top))

    def _settings(self, lines: NDArray[np.int64]) -> tuple[SamplingTensors, SamplingGroups]:
        """How these rows are sampled. Groups are made only for ops that do not draw all rows in one pass."""
        kinds = self._sampling_of[lines]
        groups = [] if self._in_one_pass else group_by_sampling(self.samplings, kinds, self.device)
        return build_sampling_tensors(self.samplings, kinds, self.device), groups

    def _decode(self, rows: Sequence[SequenceState], repeats: int) -> None:
        """Run ``repeats`` steps of one token per row."""
        num_padding = padded_size(len(rows)) - len(rows) if self.captures else 0
        padded = [*rows, *[rows[0]] * num_padding]
        width = max(len(row.pages) for row in rows)
        lines = np.array([row.index for row in padded])
        state = self._state(lines, np.array([row.length for row in padded]), num_padding)
        settings, groups = self._settings(lines)
        page_table = on_device(fill_lines([row.pages for row in padded], width, np.int32), self.device)
        slots = on_device(np.array([row.slot for row in rows] + [-1] * num_padding), self.device)
        if not self.captures:
            history = self.history[:, : max(row.length for row in rows) + repeats]
            for _ in range(repeats):
                self._decode_once(state, page_table, slots, settings, groups, history)
            return
        n, most, take = len(padded), self._most_rows, partial(self.graphs.arena.take, device=self.device)
        width = self.graphs.arena.size("pages", -(-(self.width - 1) // self.cache.page_size))
        held, table = take("state", (len(state), most), torch.int64)[:, :n], take("table", (most, width), torch.int32)[:n]
        held.copy_(state)
        static_slots = take("slots", (most,), torch.int64)[:n].copy_(slots)
        table.zero_()
        table[:, : page_table.shape[1]] = page_table
        static = settings._replace(
            temperature=take("temperature", (most,), torch.float32)[:n].copy_(settings.temperature),
            top_p=take("top_p", (most,), torch.float32)[:n].copy_(settings.top_p),
            min_p=take("min_p", (most,), torch.float32)[:n].copy_(settings.min_p),
            top_k=take("top_k", (most,), torch.int32)[:n].copy_(settings.top_k),
        )
        step = partial(self._decode_once, held, table, static_slots, static, groups, self.history)
        flags = settings.filters, settings.greedy, settings.tempered
        key = n, flags, groups[0][0].overrides if groups else None
        self.graphs.run(step, repeats, key, self._addresses())

    def _addresses(self) -> tuple[object, ...]:
        """What a captured step has fixed outside the arena: addresses, shapes and rules."""
        rules = () if self.rules is None else (self.history.shape, *self.rules.constants())
        weights = tuple(tensor.data_ptr() for tensor in (*self.decoder.parameters(), *self.decoder.buffers()))
        caches, states = (cache.pages for cache in (self.cache, self.cache.of_global) if cache is not None), self.cache.states
        experts = None if self.cache.experts is None else self.cache.experts.values.data_ptr()
        of_states = () if states is None else (states.inputs.data_ptr(), states.memory.data_ptr())
        return *((pages.data_ptr(), pages.shape) for pages in caches), experts, of_states, weights, rules

    def _decode_once(
        self,
        state: Tensor,
        page_table: Tensor,
        slots: Tensor,
        settings: SamplingTensors,
        groups: SamplingGroups,
        history: Tensor,
    ) -> None:
        """Draw the next token of each row and add 1 to the lengths in ``state``. The host reads no tensor here.

        ``slots`` [B]: of the rows' states, -1 for copies of the first row.
        """
        _, lengths, _, _, _, limits, _, tokens_from = state
        positions, states, experts = lengths - 1, self.cache.states, self.cache.experts
        inputs = self.tokens.index_select(0, tokens_from + positions)
        attention = self.cache.decoding(positions, page_table, self.num_heads)
        routers = None if experts is None else experts.of_step(self.cache.slots_of(positions, page_table))
        delta_rule = None if states is None else DecodeMixing(states, slots, positions)
        hidden = self.decoder(inputs, attention, routers=routers, delta_rule=delta_rule)
        if routers is not None:
            routers.write()
        self._draw(hidden, state, settings, groups, history)
        lengths += lengths + 1 < limits

    def _can_capture(self, config: GenerationConfig) -> bool:
        """Whether decode steps can be CUDA graphs: no host reads and no changing memory.

        Experts may read counts on the host, and torch's paged attention allocates anew each time. Rows that are drawn group by
        group form other groups in each step, and their top_p reads numbers on the host.
        """
        wanted = config.captures(self.device, self.decoder.pp) and self.cache.backend.capturable
        same_draws = self._in_one_pass or (len(self.samplings) == 1 and self.samplings[0].top_p == 1.0)
        # torch would change the first row's state for each copy of it
        same_states = self.cache.states is None or isinstance(self.decoder.ops, HasDeltaRuleStep)
        return wanted and same_draws and same_states and not self.decoder.moe_syncs_host


def _draws(work: Sequence[SequenceWork], repeats: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The line of each token that ``work`` draws, and the row's length before it."""
    counts = [item.num_draws(repeats) for item in work]
    lines = np.repeat(np.array([item.row.index for item in work], dtype=np.int64), counts)
    ends = [item.row.length + number for item, count in zip(work, counts, strict=True) for number in range(count)]
    return lines, np.array(ends, dtype=np.int64)
