"""What changes logits before the temperature: masks, bias, penalties, in vLLM's order (``SamplingConfig`` lists it).

Everything follows from the row's own tokens, so a row that was preempted, moved or continued comes out the same. A call without
such options has no rules and pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sequence import Row


class LogitRules:
    """The rules of one call; ``stop_ids``: the tokens that end a response."""

    def __init__(self, sampling: SamplingConfig, stop_ids: Collection[int], vocab_size: int, device: torch.device) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency, self.presence = sampling.frequency_penalty, sampling.presence_penalty
        self.uses_history = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        known = sorted(token for token in stop_ids if token < vocab_size)
        self.stop_ids = torch.tensor(known, dtype=torch.int64, device=device)
        self.bias = _bias(sampling, vocab_size).to(device)
        self.has_bias = bool(self.bias.any())

    def apply(self, logits: Tensor, rows: Sequence[Row], tokens: Tensor) -> Tensor:
        """New logits [B, V] for the next token of ``rows``, whose tokens so far lie in ``tokens`` [all rows, width]."""
        logits = logits + self.bias.to(logits.dtype) if self.has_bias else logits.clone()
        early = [i for i, row in enumerate(rows) if row.num_new < row.min_new]
        if early and len(self.stop_ids):
            lines = torch.tensor(early, device=logits.device)
            logits[lines[:, None], self.stop_ids] = -math.inf
        if self.uses_history:
            self._penalise(logits, rows, tokens)
        return logits

    def _penalise(self, logits: Tensor, rows: Sequence[Row], tokens: Tensor) -> None:
        """In place."""
        device = logits.device
        bounds = torch.tensor([(row.index, row.prompt_length, row.length) for row in rows], device=device)
        index, prompt_lengths, lengths = bounds[:, 0], bounds[:, 1:2], bounds[:, 2:]
        positions = torch.arange(max(row.length for row in rows), device=device)
        history = tokens[index, : len(positions)]
        if self.repetition != 1.0:
            seen = history.where(positions < lengths, history[:, :1])  # past the end: a token that is seen anyway
            scores = logits.gather(1, seen)
            logits.scatter_(1, seen, torch.where(scores < 0, scores * self.repetition, scores / self.repetition))
        if self.frequency or self.presence:
            drawn = (positions >= prompt_lengths) & (positions < lengths)
            counts = torch.zeros_like(logits).scatter_add_(1, history, drawn.to(logits.dtype))
            logits -= self.frequency * counts + self.presence * (counts > 0)


def _bias(sampling: SamplingConfig, vocab_size: int) -> Tensor:
    """fp64 [vocab_size]: what is added to every row's logits; minus infinity keeps a token out."""
    bias = torch.zeros(vocab_size, dtype=torch.float64)
    if sampling.allowed_token_ids is not None:
        bias.fill_(-math.inf)
        bias[sampling.allowed_token_ids] = 0.0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    bias[sampling.forbidden_token_ids] = -math.inf
    return bias


def build_rules(
    sampling: SamplingConfig, stop_ids: Collection[int], rows: Sequence[Row], vocab_size: int, device: torch.device
) -> LogitRules | None:
    """None where neither ``sampling`` nor a row's minimum asks for any."""
    rules = LogitRules(sampling, stop_ids, vocab_size, device)
    return rules if rules.has_bias or rules.uses_history or any(row.min_new for row in rows) else None
