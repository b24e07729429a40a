"""Masks, bias and penalties that change logits before the temperature, in vLLM's order (see ``SamplingConfig``).

All of them depend only on the row's own tokens, so a row that was preempted, moved or continued gets the same result. A call
without such options has no rules and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sequence import SequenceState


class LogitRules:
    """The rules of one call for ``rows``, in the order of their ``buffer_line``. ``stop_ids``: the tokens that end a response."""

    def __init__(
        self,
        sampling: SamplingConfig,
        stop_ids: Collection[int],
        rows: Sequence[SequenceState],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self.uses_history = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        stop_ids = sorted(token for token in stop_ids if token < vocab_size)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        bias = _bias(sampling, vocab_size)
        self.has_bias = bool(bias.any())  # read on the host, so that it need not wait for a device
        self.bias = bias.to(device)
        self.has_minimum = any(row.min_new_tokens for row in rows)
        min_lengths = [row.prompt_length + row.min_new_tokens for row in rows]
        self.min_lengths = torch.tensor(min_lengths, device=device)  # tokens of a row before its response may end
        self.prompt_lengths = torch.tensor([row.prompt_length for row in rows], device=device)
        self.processors = {
            i: (row.prompt_length, row.request.processors) for i, row in enumerate(rows) if row.request.processors
        }

    def constants(self) -> tuple[float, ...]:
        """Return what a captured :meth:`apply` has fixed: its numbers, and the addresses of its tensors."""
        tensors = self.stop_ids, self.bias, self.min_lengths, self.prompt_lengths
        numbers = self.repetition, self.frequency, self.presence, self.has_bias, self.has_minimum, len(self.stop_ids)
        return *numbers, *(tensor.data_ptr() for tensor in tensors)

    def apply(self, logits: Tensor, buffer_lines: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Return new logits [B, V] for the next token of the rows in ``buffer_lines`` [B].

        ``tokens``: a line for each row of the call, at least as long as the longest of these. ``lengths`` [B]: tokens so far.
        """
        logits = logits + self.bias.to(logits.dtype) if self.has_bias else logits.clone()
        if self.has_minimum:
            early = lengths < self.min_lengths[buffer_lines]
            logits[:, self.stop_ids] = logits[:, self.stop_ids].masked_fill(early[:, None], -math.inf)
        if self.uses_history:
            self._penalise(logits, tokens[buffer_lines], self.prompt_lengths[buffer_lines, None], lengths[:, None])
        if self.processors:
            for scores, buffer_line, length in zip(logits, buffer_lines.tolist(), lengths.tolist(), strict=True):
                start, processors = self.processors.get(buffer_line, (0, ()))
                for processor in processors:
                    scores.copy_(processor(tokens[buffer_line, start:length].tolist(), scores))
        return logits

    def _penalise(self, logits: Tensor, history: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the penalties in place."""
        positions = torch.arange(history.shape[1], device=logits.device)
        if self.repetition != 1.0:
            seen = history.where(positions < lengths, history[:, :1])  # past the end: the first token, which is seen anyway
            scores = logits.gather(1, seen)
            logits.scatter_(1, seen, torch.where(scores < 0, scores * self.repetition, scores / self.repetition))
        if self.frequency or self.presence:
            drawn = (positions >= prompt_lengths) & (positions < lengths)
            counts = torch.zeros_like(logits).scatter_add_(1, history, drawn.to(logits.dtype))
            logits -= self.frequency * counts + self.presence * (counts > 0)


def _bias(sampling: SamplingConfig, vocab_size: int) -> Tensor:
    """Return what is added to every row's logits, fp64 [vocab_size]. Minus infinity keeps a token out."""
    bias = torch.zeros(vocab_size, dtype=torch.float64)
    if sampling.allowed_token_ids is not None:
        bias.fill_(-math.inf)
        bias[sampling.allowed_token_ids] = 0.0
    bias[[*sampling.logit_bias]] += torch.tensor([*sampling.logit_bias.values()], dtype=torch.float64)
    bias[sampling.forbidden_token_ids] = -math.inf
    return bias


def build_rules(
    sampling: SamplingConfig, stop_ids: Collection[int], rows: Sequence[SequenceState], vocab_size: int, device: torch.device
) -> LogitRules | None:
    """Return the rules of a call, or None if neither ``sampling`` nor a row asks for any."""
    rules = LogitRules(sampling, stop_ids, rows, vocab_size, device)
    return rules if rules.has_bias or rules.uses_history or rules.has_minimum or rules.processors else None
