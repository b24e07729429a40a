"""Runs the steps of one lane on this rank: forward pass of its pipeline stage, draws, and the tokens' way to every stage.

All tokens of a call, prompts and drawn ones, lie in one buffer [rows, longest] on the device, beside their log-probs. A step
gathers its inputs from it, draws a token behind each row's last one (and behind each guess), and writes it there. So a step that
computes one token of each row can be repeated at once: the host looks at the tokens after the last repetition, and drops what was
drawn after a stop. A row that has come to its limit stays where it is: it computes and writes its last token again, the same one.
Nothing of such a step depends on the host, so it can be captured as a CUDA graph, one for each size of batch, and replayed.
Batches are then padded with copies of their first row, whose tokens go to a line that nobody reads.

Legend: B rows of a step, ``state`` int64 [8, B]: what a draw needs of them, see :meth:`Runner._state`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.episodes import Environments
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.logit_rules import build_rules
from rlhf_spmd.generation.portions import Portions
from rlhf_spmd.generation.sampler import row_keys, sample, uniform
from rlhf_spmd.generation.scheduler import Step, Work
from rlhf_spmd.generation.sequence import NotFinite, Row
from rlhf_spmd.generation.stages import Stages
from rlhf_spmd.generation.step_pages import fill_lines
from rlhf_spmd.generation.stopping import Ends
from rlhf_spmd.kernels import can, on_device
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.parallel.mesh import Mesh

NOT_FINITE = -1  # sent in place of a drawn token whose log-prob is not finite, so that every rank's host hears of it
Alike = list[tuple[SamplingConfig, Tensor | None]]  # which of a step's draws follow which settings; None: all of them


def padded_size(num_rows: int) -> int:
    """Rows of the graph that serves so many: powers of two up to 16, then multiples of 16."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 16 else -(-num_rows // 16) * 16


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


@cache
def _say_not_captured(rank: int) -> None:
    if rank == 0:
        logging.getLogger(__name__).warning(
            "enforce_eager=false: no CUDA graphs with attention=torch, top_p below 1, experts, tp above 1, logprobs, penalties, masks, "
            "minimal lengths, guesses, pp above 1, or rows that draw otherwise than others; steps run without"
        )


class _Captured(NamedTuple):
    """A step of decoding, and the tensors that it reads and goes on from: see :meth:`Runner._decode_once`."""

    graph: torch.cuda.CUDAGraph
    state: Tensor
    table: Tensor


@dataclass(frozen=True)
class Call:
    """What a call of the generator was asked for, and works with. ``version``: of the weights."""

    decoder: Decoder
    mesh: Mesh
    config: GenerationConfig
    sampling: SamplingConfig
    ends: Ends
    seed: int
    version: int
    tick: Callable[[], None]
    environments: Environments | None = None
    portions: Portions | None = None


class Runner:
    """For ``rows``, by their index; ``stages`` is shared by the runners of a call. ``max_repeats``: of a step; 0: it looks at each."""

    def __init__(self, call: Call, rows: Sequence[Row], cache: KVCache, stages: Stages) -> None:
        self.decoder, self.mesh, self.cache, self.stages = call.decoder, call.mesh, cache, stages
        decoder, sampling, config, self.device = call.decoder, call.sampling, call.config, cache.pages.device
        self.num_heads = decoder.spec.num_attention_heads // decoder.tp.size
        self.rules = build_rules(sampling, call.ends.token_ids, rows, decoder.spec.vocab_size, self.device)
        self.width, self.most = max(row.limit for row in rows), max(row.request.max_new_tokens for row in rows)
        tokens = fill_lines([*(row.tokens for row in rows), ()], self.width, np.int64)  # the last line is that of padding
        self.tokens = torch.from_numpy(tokens).to(self.device).view(-1)
        self.row_ids = [row.request.row_id for row in rows]
        seeds, numbers = zip(*(row.request.drawn_as or (call.seed, row.request.row_id) for row in rows), strict=True)
        keys = row_keys(seeds, torch.tensor([row.step for row in rows]), torch.tensor(numbers)).tolist()
        prompts, limits = [row.prompt_length for row in rows], [row.limit for row in rows]
        firsts = [(i * self.width, i * self.most - length) for i, length in enumerate(prompts)]
        self._constants = np.array([*zip(*firsts, strict=True), prompts, limits, keys], dtype=np.int64)  # by line, see _state
        drawings = [row.request.drawing or sampling.drawing for row in rows]
        number = {drawing: i for i, drawing in enumerate(dict.fromkeys(drawings))}
        self.samplings = [sampling.drawn_by(drawing) for drawing in number]  # mostly there is one
        self._sampling_of = np.array([number[drawing] for drawing in drawings])
        tempered = any(each.log_prob_temperature != 1.0 for each in self.samplings)
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        # by line and number in the response: at the sampling temperature, and at 1 where that differs
        self.log_probs = torch.zeros(1 + tempered, len(tokens) * self.most, dtype=dtype, device=self.device)
        shape = len(rows) * self.most, sampling.logprobs
        self.top_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.top_log_probs = torch.zeros(shape, dtype=dtype, device=self.device)
        repeatable = decoder.pp == 1 and not config.speculative_tokens  # else others decide what follows a step
        self.captures = self.pads = repeatable and not config.enforce_eager and self._can_capture()
        looks_ahead = repeatable and (config.steps_per_sync > 1 or not config.enforce_eager)
        self.max_repeats = config.steps_per_sync if looks_ahead else 0
        if not (config.enforce_eager or self.captures):
            _say_not_captured(call.mesh.replica.rank)
        self._graphs: dict[torch.Size, _Captured] = {}
        self._places: Tensor | None = None  # of the tokens of the step under way
        self._lines: list[int] = []  # of each of these
        self._drawn: Tensor | None = None  # the tokens themselves, on the last stage

    def start(self, step: Step, repeats: int = 0) -> None:
        """This stage's part of a step, or with ``repeats`` of so many: ``step`` then draws a token of each row, whose pages have room
        for so many more, and a row gets as many as its limit leaves. On GPUs the host does not wait for it.

        Collective over the replica: every rank of it must call, in program order, with the same arguments.
        """
        rows = [item.row for item in step.work if item.samples]
        counts = [min(repeats, row.limit - row.length) if repeats else 1 + len(row.draft) for row in rows]
        lines = np.repeat([row.index for row in rows], counts).astype(np.int64)
        ends = [row.length + number for row, count in zip(rows, counts, strict=True) for number in range(count)]
        state = self._state(lines, ends)
        self._lines, self._places, self._drawn = lines.tolist(), state[2] + state[1], None
        history = self.tokens.view(-1, self.width)[:, : max(ends, default=0)]
        if repeats:
            self._decode(rows, repeats, history)
        else:
            hidden = self._forward(step)
            if not rows:
                return
            if self.decoder.is_last:
                draws = None if all(sampling.greedy for sampling in self.samplings) else self._host_draws(lines, ends)
                self._draw(self._last_tokens(hidden, step.work), state, self._alike(lines), history, draws)
        if self.decoder.is_last:
            finite = self.log_probs[-1].index_select(0, state[3] + state[1]).isfinite()
            self._drawn = torch.where(finite, self.tokens.index_select(0, self._places), NOT_FINITE)
            self.stages.send_tokens(self._drawn)
        else:
            self.stages.expect_tokens(len(ends), self.device)

    def finish(self) -> list[int]:
        """Token ids that the started step drew, row by row: of each row that samples one, one more for each token of its draft, or as
        many as its repetitions gave. The same on every rank of the replica.

        Raises NotFinite. Collective over the replica: every rank of it must call, in program order.
        """
        if not self._lines:
            return []
        assert self._places is not None, "no step is under way"
        drawn = self._drawn
        if drawn is None:
            drawn = self.stages.take_tokens()
            self.tokens.index_copy_(0, self._places, drawn)
        token_ids: list[int] = drawn.tolist()
        if NOT_FINITE in token_ids:
            raise NotFinite(self.row_ids[self._lines[token_ids.index(NOT_FINITE)]])
        return token_ids

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        """Tokens that were not drawn follow those of ``row``; their log-probs are 0, whatever was drawn there after a stop."""
        at = row.index * self.width + row.length
        self.tokens[at : at + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        first = row.index * self.most + row.num_new
        new = slice(first, first + len(token_ids))
        self.log_probs[:, new] = 0.0
        self.top_ids[new], self.top_log_probs[new] = 0, 0.0

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the tokens that this runner drew, on the CPU of every rank of the replica: log-probs [rows, longest response] at
        the sampling temperature and at 1, the likeliest tokens' ids and log-probs [rows, longest response, logprobs].

        Collective over the replica: every rank of it must call, in program order.
        """
        for tensor in (self.log_probs, self.top_ids, self.top_log_probs):
            if tensor.numel():
                self.mesh.pp.broadcast(tensor, self.decoder.pp - 1, "generation:log_probs")
        shape = len(self.row_ids), self.most
        log_probs = self.log_probs.cpu()[:, : math.prod(shape)]
        top_ids, top_log_probs = (top.cpu().view(*shape, top.shape[1]) for top in (self.top_ids, self.top_log_probs))
        return log_probs[0].view(shape), log_probs[-1].view(shape), top_ids, top_log_probs

    def noted(self, row: Row) -> list[Tensor]:
        """On a last stage, between two steps: what :meth:`results` will have of a row."""
        first = row.index * self.most
        parts = self.log_probs[0], self.log_probs[-1], self.top_ids, self.top_log_probs
        return [part[first : first + row.num_new].cpu() for part in parts]

    def _forward(self, step: Step) -> Tensor:
        """Hidden states after this stage's layers, those of all tokens of the step in the order of its work."""
        if step.copies:
            self.cache.copy_pages(step.copies)
        drafts = [(item.row.index * self.width + item.row.length, item.row.draft) for item in step.work if item.row.draft]
        if drafts:  # guesses are inputs like tokens that were drawn; those that fail are overwritten
            places = [first + i for first, draft in drafts for i in range(len(draft))]
            tokens = [token for _, draft in drafts for token in draft]
            self.tokens.index_copy_(0, *(on_device(np.array(each, dtype=np.int64), self.device) for each in (places, tokens)))
        attention = self.cache.backend.for_step(step.work, self.cache, self.num_heads)
        if self.decoder.is_first:
            lines = np.repeat([item.row.index * self.width for item in step.work], [item.num_tokens for item in step.work])
            inputs = self.tokens.index_select(0, on_device(lines, self.device) + attention.positions)
        else:
            num_tokens = sum(item.num_tokens for item in step.work)
            inputs = torch.empty(num_tokens, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.device)
            inputs = self.stages.receive_hidden(inputs)
        hidden = self.decoder(inputs, attention)
        if not self.decoder.is_last:
            self.stages.hidden.send(hidden)
        return hidden

    def _last_tokens(self, hidden: Tensor, work: Sequence[Work]) -> Tensor:
        """The hidden states that a token is drawn from."""
        counts = [1 + len(item.row.draft) if item.samples else 0 for item in work]
        if counts == [item.num_tokens for item in work]:
            return hidden
        ends = np.cumsum([item.num_tokens for item in work])
        chosen = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        return hidden.index_select(0, on_device(chosen, self.device))

    def _state(self, lines: NDArray[np.int64], lengths: Sequence[int], num_padding: int = 0) -> Tensor:
        """What a draw needs of its rows, int64 [8, B]: ``lines`` (in the buffer), ``lengths`` (tokens so far), where a row's drawn
        tokens go, where its notes would begin if prompts had some, the prompts' lengths, the limits, the keys of the draws, where a
        row's tokens begin. The last ``num_padding`` columns write to the line of padding."""
        constants = self._constants[:, lines]
        state = np.concatenate([lines[None], np.array(lengths, dtype=np.int64)[None], constants, constants[:1]])
        padding = slice(len(lines) - num_padding, len(lines))
        state[2, padding] = len(self.row_ids) * self.width
        state[3, padding] = len(self.row_ids) * self.most - state[4, padding]
        return on_device(state, self.device)

    def _host_draws(self, lines: NDArray[np.int64], lengths: Sequence[int]) -> Tensor:
        """The numbers that tokens are drawn by, made on the host: on a GPU they are some thirty launches."""
        prompts, _, keys = self._constants[2:, lines]
        return on_device(uniform(torch.from_numpy(keys), torch.from_numpy(np.array(lengths) - prompts)).numpy(), self.device)

    def _alike(self, lines: NDArray[np.int64]) -> Alike:
        """Rows do not see each other, so those that draw alike are drawn as if they were alone."""
        kinds = self._sampling_of[lines]
        if (kinds == kinds[0]).all():
            return [(self.samplings[kinds[0]], None)]
        return [(self.samplings[kind], on_device(np.flatnonzero(kinds == kind), self.device)) for kind in np.unique(kinds)]

    def _draw(self, hidden: Tensor, state: Tensor, alike: Alike, history: Tensor, draws: Tensor | None = None) -> None:
        """Draw and note a token after each of ``hidden`` [B, hidden]. ``history``: as much of the tokens as these rows have. ``draws``:
        fp64 [B], the numbers to draw by; None: made here.

        Collective over tp: every rank of it must call, in program order.
        """
        logits = local_logits(self.decoder, hidden)
        scores = whole = gather_logits(self.decoder, logits)
        if self.rules is not None:
            scores = self.rules.apply(whole, state[0], state[1], history)
        for sampling, chosen in alike:
            if chosen is None:
                self._draw_alike(sampling, logits, scores, state, draws)
            else:
                some = logits[chosen]
                some_scores = some if scores is logits else scores[chosen]
                self._draw_alike(sampling, some, some_scores, state[:, chosen], None if draws is None else draws[chosen])
        if self.rules is not None and self.rules.processors:  # which may leave nothing to draw
            bad = ~scores.amax(1).isfinite()
            self.log_probs[-1].index_fill_(0, (state[3] + state[1])[bad], math.nan)
        if self.top_ids.numel():
            places, top = state[3] + state[1], whole.topk(self.top_ids.shape[1]).indices
            self.top_ids.index_copy_(0, places, top)
            self.top_log_probs.index_copy_(0, places, log_probs_of(self.decoder, logits, top))

    def _draw_alike(
        self, sampling: SamplingConfig, logits: Tensor, scores: Tensor, state: Tensor, draws: Tensor | None
    ) -> None:
        """Of rows that share ``sampling``. ``logits``: this rank's slice, from which log-probs come; ``scores``: of all the vocabulary,
        as the rules left them.

        Collective over tp: every rank of it must call, in program order.
        """
        _, lengths, tokens_from, notes_from, prompts, _, keys, _ = state
        if draws is None:
            draws = lengths if sampling.greedy else uniform(keys, lengths - prompts)
        drawn = sample(scores, sampling, draws)
        if not can(drawn.device).exact:  # cumulative sums may differ between ranks in the last bit, then schedules would
            self.mesh.tp.broadcast(drawn, 0, "generation:tokens")
        self.tokens.index_copy_(0, tokens_from + lengths, drawn)
        places, tempered = notes_from + lengths, sampling.log_prob_temperature != 1.0
        log_probs = log_probs_of(self.decoder, logits, drawn)
        for line in self.log_probs[tempered:]:
            line.index_copy_(0, places, log_probs)
        if tempered:
            self.log_probs[0].index_copy_(0, places, log_probs_of(self.decoder, logits, drawn, sampling.log_prob_temperature))

    def _decode(self, rows: Sequence[Row], repeats: int, history: Tensor) -> None:
        """``repeats`` steps of one token of each row."""
        num_padding = padded_size(len(rows)) - len(rows) if self.pads else 0
        padded = [*rows, *[rows[0]] * num_padding]
        width = max(len(row.pages) for row in rows)
        if self.captures:
            # few widths, so few graphs; a much wider table than the rows need would cost programs that do nothing
            width = min(1 << (width - 1).bit_length(), -(-(self.width - 1) // self.cache.page_size))
        lines = np.array([row.index for row in padded])
        state = self._state(lines, [row.length for row in padded], num_padding)
        pages = fill_lines([row.pages for row in padded], width, np.int32)
        table, alike = on_device(pages, self.device), self._alike(lines)
        if not self.captures:
            for _ in range(repeats):
                self._decode_once(state, table, alike, history)
            return
        if table.shape in self._graphs:
            captured = self._graphs[table.shape]
            captured.state.copy_(state)
            captured.table.copy_(table)
        else:
            captured = self._graphs[table.shape] = self._capture(state, table, alike, history)
            repeats -= 1
        for _ in range(repeats):
            captured.graph.replay()

    def _decode_once(self, state: Tensor, table: Tensor, alike: Alike, history: Tensor) -> None:
        """The next token of each row. ``state``: its lengths grow; ``table`` int32 [B, P]: pages. On device tensors only."""
        _, lengths, _, _, _, limits, _, tokens_from = state
        inputs = self.tokens.index_select(0, tokens_from + lengths - 1)
        attention = self.cache.backend.decoding(lengths - 1, table, self.cache, self.num_heads)
        self._draw(self.decoder(inputs, attention), state, alike, history)
        lengths += lengths + 1 < limits

    def _can_capture(self) -> bool:
        """top_p and experts look at numbers on the host; collectives and torch's paged attention take other memory each time; which
        rows draw alike, and how long histories are, changes from step to step. A row's own minimum is a rule too."""
        plain = len(self.samplings) == 1 and self.samplings[0].plain and self.decoder.spec.experts is None
        varies = self.rules is not None or self.decoder.tp.size > 1
        return plain and not varies and can(self.device).graphs and self.cache.backend.capturable

    def _capture(self, state: Tensor, table: Tensor, alike: Alike, history: Tensor) -> _Captured:
        """After a first step, which compiles kernels and fills caches."""
        stream = capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode_once(state, table, alike, history)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        # weights may be arriving in another thread, which takes memory
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._decode_once(state, table, alike, history)
        return _Captured(graph, state, table)
