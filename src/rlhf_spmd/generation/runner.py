"""Runs one step on this rank: pages, forward pass of its pipeline stage, sampling, and the tokens' way to every stage.

All tokens of a call, prompts and drawn ones, lie in one buffer [rows, longest] on the device: a step's inputs are one gather
from it and its draws one scatter into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.kv_cache import KVCache, on_device
from rlhf_spmd.generation.logit_rules import LogitRules
from rlhf_spmd.generation.progress import NotFinite, Progress
from rlhf_spmd.generation.sampler import sample, uniform
from rlhf_spmd.generation.scheduler import Step, Work
from rlhf_spmd.generation.sequence import Row
from rlhf_spmd.generation.stages import Stages
from rlhf_spmd.models.decoder import Attention, Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.parallel.mesh import Mesh

NOT_FINITE = -1  # sent in place of a drawn token whose log-prob is not finite, so that every rank's host hears of it


@dataclass(frozen=True)
class Draws:
    """How a call draws: what was asked, the seed, the rules for its logits, if there are any, and whether rows have drafts."""

    sampling: SamplingConfig
    seed: int
    rules: LogitRules | None
    speculates: bool = False


class Runner:
    """``progress[i]`` is the row with index i; ``stages`` is shared by the runners of a call."""

    def __init__(
        self, decoder: Decoder, mesh: Mesh, stages: Stages, cache: KVCache, progress: Sequence[Progress], draws: Draws
    ) -> None:
        self.decoder, self.mesh, self.stages, self.cache, self.draws = decoder, mesh, stages, cache, draws
        self._drawn: Tensor | None = None  # of the step under way, on the last stage
        self._sampled: list[Row] = []  # the rows of its tokens
        self._places: Tensor | None = None  # where they will lie
        self.speculates = draws.speculates
        requests = [row.request for row in progress]
        self.steps = np.array([row.step for row in progress], dtype=np.int64)
        self.device = cache.pages.device
        self.num_heads = decoder.spec.num_attention_heads // decoder.tp.size
        self.row_ids = np.array([request.row_id for request in requests], dtype=np.int64)
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        tokens = np.zeros((len(requests), longest), dtype=np.int64)
        for line, row in zip(tokens, progress, strict=True):
            prompt = row.request.prompt_ids
            line[: len(prompt)] = prompt
            line[len(prompt) : len(prompt) + len(row.token_ids)] = row.token_ids
        self.width = longest
        self.tokens = torch.from_numpy(tokens).to(self.device).view(-1)
        most = max(request.max_new_tokens for request in requests)
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        drawings = [request.drawing or draws.sampling.drawing for request in requests]
        number = {drawing: i for i, drawing in enumerate(dict.fromkeys(drawings))}
        self.samplings = [draws.sampling.drawn_by(drawing) for drawing in number]  # mostly there is one
        self._sampling_of = np.array([number[drawing] for drawing in drawings])
        tempered = any(sampling.log_prob_temperature != 1.0 for sampling in self.samplings)
        self.log_probs = torch.zeros(1 + tempered, len(requests), most, dtype=dtype, device=self.device)
        shape = len(requests), most, draws.sampling.logprobs
        self.top_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.top_log_probs = torch.zeros(shape, dtype=dtype, device=self.device)

    def start(self, step: Step) -> None:
        """This stage's part of a step. On GPUs the host does not wait for it.

        Collective over the replica: every rank of it must call, in program order, with the same step.
        """
        if step.copies:
            self.cache.copy_pages(step.copies)
        if self.speculates:
            self._write_drafts(step.work)
        attention = self.cache.backend.over(step.work, self.cache, self.num_heads)
        hidden = self._forward(step.work, attention)
        self._sampled = sampled = [work.row for work in step.work if work.samples]
        if self.speculates:
            self._sampled = sampled = [row for first in sampled for row in _ahead(first)]
        if not sampled:
            return
        self._places = on_device(np.array([row.index * self.width + row.length for row in sampled]), self.device)
        if self.decoder.is_last:
            self._drawn = self._draw(self._last_tokens(hidden, step.work), sampled)
            self.stages.send_tokens(self._drawn)
        else:
            self.stages.expect_tokens(len(sampled), self.device)

    def finish(self) -> list[int]:
        """Token ids that the started step drew for the work items that sample, in their order, of each 1 + the length of its
        row's draft; the same on every rank of the replica.

        Raises NotFinite. Collective over the replica: every rank of it must call, in program order.
        """
        if not self._sampled:
            return []
        assert self._places is not None, "the step is under way"
        drawn = self.stages.take_tokens() if self._drawn is None else self._drawn
        self.tokens.index_copy_(0, self._places, drawn)
        self._drawn = None
        return self.checked(drawn.tolist(), self._sampled)

    def checked(self, drawn: list[int], rows: Sequence[Row]) -> list[int]:
        """``drawn``, a token of each of ``rows``. Raises NotFinite."""
        if NOT_FINITE in drawn:
            raise NotFinite(int(self.row_ids[rows[drawn.index(NOT_FINITE)].index]))
        return drawn

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        """Tokens that were not drawn follow those of ``row``; their log-probs are 0, whatever was drawn there after a stop."""
        at = row.index * self.width + row.length
        self.tokens[at : at + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        new = slice(row.num_new, row.num_new + len(token_ids))
        self.log_probs[:, row.index, new] = 0.0
        self.top_ids[row.index, new], self.top_log_probs[row.index, new] = 0, 0.0

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the tokens that this runner drew, on the CPU of every rank of the replica: log-probs [rows, longest response] at
        the sampling temperature and at 1, the likeliest tokens' ids and log-probs [rows, longest response, logprobs].

        Collective over the replica: every rank of it must call, in program order.
        """
        for tensor in (self.log_probs, self.top_ids, self.top_log_probs):
            if tensor.numel():
                self.mesh.pp.broadcast(tensor, self.decoder.pp - 1, "generation:log_probs")
        log_probs = self.log_probs.cpu()
        return log_probs[0], log_probs[-1], self.top_ids.cpu(), self.top_log_probs.cpu()

    def _forward(self, work: Sequence[Work], attention: Attention) -> Tensor:
        """Hidden states [T, hidden] of this stage, which go on to the next."""
        num_tokens = len(attention.positions)
        if self.decoder.is_first:
            lines = np.repeat([item.row.index for item in work], [item.num_tokens for item in work])
            places = on_device(lines * self.width, self.device) + attention.positions
            inputs = self.tokens.index_select(0, places)
        else:
            inputs = torch.empty(num_tokens, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.device)
            inputs = self.stages.receive_hidden(inputs)
        hidden = self.decoder(inputs, attention)
        if not self.decoder.is_last:
            self.stages.hidden.send(hidden)
        return hidden

    def _write_drafts(self, work: Sequence[Work]) -> None:
        """Guesses are inputs like tokens that were drawn; those that fail are overwritten."""
        drafts = [(item.row.index * self.width + item.row.length, item.row.draft) for item in work if item.row.draft]
        places = [place + i for place, draft in drafts for i in range(len(draft))]
        tokens = [token for _, draft in drafts for token in draft]
        where, what = (on_device(np.array(values, dtype=np.int64), self.device) for values in (places, tokens))
        self.tokens.index_copy_(0, where, what)

    def _last_tokens(self, hidden: Tensor, work: Sequence[Work]) -> Tensor:
        """The hidden states that a token is drawn from."""
        if all(item.samples and item.num_tokens == 1 for item in work):
            return hidden
        ends = np.cumsum([item.num_tokens for item in work]) - 1
        chosen = ends[[item.samples for item in work]]
        if self.speculates:
            counts = [1 + len(item.row.draft) for item in work if item.samples]
            chosen = np.concatenate([np.arange(end - n + 1, end + 1) for end, n in zip(chosen, counts, strict=True)])
        return hidden.index_select(0, on_device(chosen, self.device))

    def _draw(self, hidden: Tensor, rows: Sequence[Row]) -> Tensor:
        """Token ids [rows], NOT_FINITE where that holds; notes their log-probs.

        Collective over tp: every rank of it must call, in program order.
        """
        logits = local_logits(self.decoder, hidden)
        index = np.array([row.index for row in rows], dtype=np.int64)
        position = np.array([row.num_new for row in rows], dtype=np.int64)
        scores = whole = gather_logits(self.decoder, logits)
        if self.draws.rules is not None:
            scores = self.draws.rules.apply(whole, rows, self.tokens.view(-1, self.width))
        places = on_device(index * self.log_probs.shape[2] + position, self.device)
        kinds = self._sampling_of[index]
        if (kinds == kinds[0]).all():
            drawn, log_probs = self._draw_alike(self.samplings[kinds[0]], logits, scores, index, position, places)
        else:  # rows do not see each other, so those that draw alike are drawn as if they were alone
            drawn, log_probs = torch.empty_like(places), logits.new_empty(len(rows))
            for kind in np.unique(kinds):
                alike = np.flatnonzero(kinds == kind)
                at = on_device(alike, self.device)
                parts = logits[at], logits[at] if scores is logits else scores[at], index[alike], position[alike], places[at]
                drawn[at], log_probs[at] = self._draw_alike(self.samplings[kind], *parts)
        if self.top_ids.numel():
            top = whole.topk(self.top_ids.shape[2]).indices
            at_one = [log_probs_of(self.decoder, logits, label) for label in top.unbind(1)]
            self.top_ids.view(-1, top.shape[1]).index_copy_(0, places, top)
            self.top_log_probs.view(-1, top.shape[1]).index_copy_(0, places, torch.stack(at_one, 1))
        return drawn.masked_fill(~log_probs.isfinite(), NOT_FINITE)

    def _draw_alike(
        self,
        sampling: SamplingConfig,
        logits: Tensor,
        scores: Tensor,
        index: NDArray[np.int64],
        position: NDArray[np.int64],
        places: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens of rows that share ``sampling``, and their log-probs at temperature 1, which are noted at ``places`` as are those
        at the sampling temperature. ``logits``: this rank's slice; ``scores``: of all the vocabulary, as the rules left them.

        Collective over tp: every rank of it must call, in program order.
        """
        greedy = sampling.greedy
        draws = np.empty(0) if greedy else uniform(self.draws.seed, self.steps[index], self.row_ids[index], position)
        drawn = sample(scores, sampling, on_device(draws, self.device))
        if drawn.is_cuda:  # its cumulative sums may differ between ranks in the last bit, and then the schedules would
            self.mesh.tp.broadcast(drawn, 0, "generation:tokens")
        log_probs = torch.empty(0)
        for kept, temperature in self.notes(self.log_probs, sampling):
            log_probs = log_probs_of(self.decoder, logits, drawn, temperature)
            for line in kept:
                line.view(-1).index_copy_(0, places, log_probs)
        return drawn, log_probs

    @staticmethod
    def notes(log_probs: Tensor, sampling: SamplingConfig) -> list[tuple[Tensor, float]]:
        """The parts of ``log_probs`` [1 or 2, ...], at the sampling temperature and at 1, and the temperature of each."""
        if sampling.log_prob_temperature == 1.0:
            return [(log_probs, 1.0)]
        return [(log_probs[:1], sampling.log_prob_temperature), (log_probs[1:], 1.0)]


def _ahead(row: Row) -> Iterator[Row]:
    """``row``, and as it will stand after each token of its draft."""
    yield row
    for number in range(1, len(row.draft) + 1):
        later = copy(row)
        later.length += number
        yield later
