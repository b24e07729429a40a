"""Runs one step on this rank: pages, forward pass of its pipeline stage, sampling, and the tokens' way to every stage.

All tokens of a call, prompts and drawn ones, lie in one buffer [rows, longest] on the device: a step's inputs are one gather
from it and its draws one scatter into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.paged_attention import KVCache, PagedAttention
from rlhf_spmd.generation.sampler import sample, uniform
from rlhf_spmd.generation.scheduler import Step, Work
from rlhf_spmd.generation.sequence import Request, Row
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, local_logits, log_probs_of
from rlhf_spmd.parallel.collectives import wait_all
from rlhf_spmd.parallel.mesh import Mesh


@dataclass(frozen=True)
class Draws:
    """What keys the random numbers of a call, beside the row and the position."""

    sampling: SamplingConfig
    seed: int
    step: int


class Runner:
    """``requests[i]`` is the row with index i."""

    def __init__(self, decoder: Decoder, mesh: Mesh, cache: KVCache, requests: Sequence[Request], draws: Draws) -> None:
        self.decoder, self.mesh, self.cache, self.draws = decoder, mesh, cache, draws
        self.device = cache.pages.device
        self.num_heads = decoder.spec.num_attention_heads // decoder.tp.size
        self.row_ids = np.array([request.row_id for request in requests], dtype=np.int64)
        prompts = [np.asarray(request.prompt_ids, dtype=np.int64) for request in requests]
        longest = max(len(p) + r.max_new_tokens for p, r in zip(prompts, requests, strict=True))
        tokens = np.zeros((len(requests), longest), dtype=np.int64)
        for line, prompt in zip(tokens, prompts, strict=True):
            line[: len(prompt)] = prompt
        self.width = longest
        self.tokens = torch.from_numpy(tokens).to(self.device).view(-1)
        most = max(request.max_new_tokens for request in requests)
        dtype = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        temperature = draws.sampling.log_prob_temperature
        self.temperatures = [1.0] if temperature == 1.0 else [temperature, 1.0]
        self.log_probs = torch.zeros(len(self.temperatures), len(requests), most, dtype=dtype, device=self.device)

    def run(self, step: Step) -> list[int]:
        """Token ids drawn for the work items that sample, in their order; the same on every rank of the replica.

        Collective over the replica: every rank of it must call, in program order, with the same step.
        """
        if step.copies:
            self.cache.copy_pages(step.copies)
        attention = PagedAttention(step.work, self.cache, self.num_heads)
        hidden = self._forward(step.work, attention)
        sampled = [work.row for work in step.work if work.samples]
        if not sampled:
            return []
        drawn = torch.empty(len(sampled), dtype=torch.int64, device=self.device)
        if self.decoder.is_last:
            drawn = self._draw(self._last_tokens(hidden, step.work), sampled)
        self.mesh.pp.broadcast(drawn, self.decoder.pp - 1, "generation:tokens")
        places = torch.tensor([row.index * self.width + row.length for row in sampled], device=self.device)
        self.tokens.index_copy_(0, places, drawn)
        return drawn.tolist()

    def results(self) -> tuple[Tensor, Tensor]:
        """Log-probs [rows, longest response] at the sampling temperature and at 1, on the CPU of every rank of the replica.

        Collective over the replica: every rank of it must call, in program order.
        """
        self.mesh.pp.broadcast(self.log_probs, self.decoder.pp - 1, "generation:log_probs")
        log_probs = self.log_probs.cpu()
        return log_probs[0], log_probs[-1]

    def _forward(self, work: Sequence[Work], attention: PagedAttention) -> Tensor:
        """Hidden states [T, hidden] of this stage, which go on to the next."""
        pp, stage = self.mesh.pp, self.decoder.stage
        num_tokens = len(attention.positions)
        if self.decoder.is_first:
            lines = np.repeat([item.row.index for item in work], [item.num_tokens for item in work])
            places = torch.from_numpy(lines * self.width).to(self.device) + attention.positions
            inputs = self.tokens.index_select(0, places)
        else:
            inputs = torch.empty(num_tokens, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.device)
            wait_all([pp.irecv(inputs, stage - 1, "generation:hidden")])
        hidden = self.decoder(inputs, attention)
        if not self.decoder.is_last:
            wait_all([pp.isend(hidden.contiguous(), stage + 1, "generation:hidden")])
        return hidden

    def _last_tokens(self, hidden: Tensor, work: Sequence[Work]) -> Tensor:
        """The hidden states that a token is drawn from."""
        if all(item.samples and item.num_tokens == 1 for item in work):
            return hidden
        ends = np.cumsum([item.num_tokens for item in work]) - 1
        chosen = ends[[item.samples for item in work]]
        return hidden.index_select(0, torch.from_numpy(chosen).to(self.device))

    def _draw(self, hidden: Tensor, rows: Sequence[Row]) -> Tensor:
        """Token ids [rows]; notes their log-probs. Collective over tp: every rank of it must call, in program order."""
        logits = local_logits(self.decoder, hidden)
        index = np.array([row.index for row in rows], dtype=np.int64)
        position = np.array([row.num_new for row in rows], dtype=np.int64)
        draws = uniform(self.draws.seed, self.draws.step, self.row_ids[index], position)
        drawn = sample(gather_logits(self.decoder, logits), self.draws.sampling, torch.from_numpy(draws).to(self.device))
        if drawn.is_cuda:  # its cumulative sums may differ between ranks in the last bit, and then the schedules would
            self.mesh.tp.broadcast(drawn, 0, "generation:tokens")
        places = torch.from_numpy(index * self.log_probs.shape[2] + position).to(self.device)
        for kept, temperature in zip(self.log_probs, self.temperatures, strict=True):
            kept.view(-1).index_copy_(0, places, log_probs_of(self.decoder, logits, drawn, temperature))
        return drawn
