"""What was drawn for a row so far, and what comes out in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.generation.sequence import Request


class NotFinite(FloatingPointError):
    """The model gave a token of a row a log-prob that is not finite."""

    def __init__(self, row_id: int) -> None:
        super().__init__(
            f"row {row_id}: the log-prob of a drawn token is not finite; look at the weights, or compute in float32"
        )
        self.row_id = row_id


@dataclass(eq=False)
class Episode:
    """What a row has been through with its environment. ``mask``: for each response token whether the model drew it."""

    mask: list[bool] = field(default_factory=list)
    reward: float = 0.0
    num_turns: int = 0


@dataclass(frozen=True, eq=False)
class Completion:
    """``token_ids`` with the stop token if there was one; log-probs on the CPU, one per token.

    ``log_probs``: fp32 (fp64 for an fp64 model) [tokens], under the sampling temperature, of the whole vocabulary (before
    penalties, masks, top-k, top-p and min-p), as training computes them; greedy decoding counts as temperature 1.
    ``log_probs_t1``: the same at temperature 1. ``versions`` int64 [tokens]: of the weights that drew each token.
    ``top_log_probs``: ids and log-probs at temperature 1, [tokens, logprobs] each, the likeliest first; None if not asked for.
    ``episode``: with an environment, whose tokens have 0 as log-probs.
    """

    row_id: int
    token_ids: list[int]
    log_probs: Tensor
    log_probs_t1: Tensor
    finish_reason: Literal["stop", "length"]
    versions: Tensor
    top_log_probs: tuple[Tensor, Tensor] | None = None
    episode: Episode | None = None


class Drawn(NamedTuple):
    """What one call notes of the tokens it drew for a row, beside their ids; fields as in ``Completion``."""

    log_probs: Tensor
    log_probs_t1: Tensor
    versions: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass(eq=False)
class Progress:
    """A request and what was drawn for it so far, by one call or several. ``step`` keys its draws in all of them."""

    request: Request
    step: int
    token_ids: list[int] = field(default_factory=list)
    parts: list[Drawn] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    episode: Episode | None = None

    @property
    def turn(self) -> list[int]:
        """The tokens since an environment spoke; without one all of them."""
        return self.token_ids[len(self.episode.mask) :] if self.episode else self.token_ids

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"row {self.request.row_id} has not ended"
        whole = Drawn(*map(torch.cat, zip(*self.parts, strict=True)))
        top = (whole.top_ids, whole.top_log_probs) if whole.top_ids.shape[1] else None
        return Completion(
            self.request.row_id, self.token_ids, *whole[:2], self.finish_reason, whole.versions, top, self.episode
        )

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, the same at temperature 1, and versions of the tokens so far, [tokens] each; float32 where there are none."""
        if not self.parts:
            return torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64)
        log_probs, log_probs_t1, versions, *_ = map(torch.cat, zip(*self.parts, strict=True))
        return log_probs, log_probs_t1, versions

    def to_json(self) -> dict[str, Any]:
        """All but the request, exactly."""
        parts = [[tensor.tolist() for tensor in part] for part in self.parts]
        return {"step": self.step, "token_ids": self.token_ids, "parts": parts, "finish_reason": self.finish_reason}

    @staticmethod
    def from_json(request: Request, state: dict[str, Any], dtype: torch.dtype) -> Progress:
        """``dtype``: of the log-probs."""
        kinds = (dtype, dtype, torch.int64, torch.int64, dtype)
        parts = [
            Drawn(*(torch.tensor(values, dtype=kind) for values, kind in zip(part, kinds, strict=True)))
            for part in state["parts"]
        ]
        return Progress(request, state["step"], state["token_ids"], parts, state["finish_reason"])
