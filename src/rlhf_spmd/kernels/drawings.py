"""How each row of a batch is drawn, as tensors on its device, and what draws such rows in one pass."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Drawings(NamedTuple):
    """Settings of the rows of a step, [B] each, and what the host knows of them.

    - temperature: fp32; 0 is greedy
    - top_p, min_p: fp32; 1 and 0 turn them off
    - top_k: int32; 0 and less turn it off
    - filters: some row has top_p below 1, top_k above 0 or min_p above 0
    - greedy: all rows are
    - tempered: the log-prob temperature of some row differs from 1: the row's temperature, 1 where it is greedy
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    filters: bool
    greedy: bool
    tempered: bool


Drawn = tuple[Tensor, Tensor, Tensor]  # token ids int64 [B], log-probs [B] at the rows' temperatures and at 1


@runtime_checkable
class DrawsRows(Protocol):
    """Ops that draw rows of different settings in one pass. The host waits for nothing, and no shape depends on values, so a CUDA
    graph can hold a draw. A row's result depends on that row alone, bit for bit."""

    def draw_rows(self, scores: Tensor, logits: Tensor, drawings: Drawings, keys: Tensor, positions: Tensor) -> Drawn:
        """Tokens from ``scores`` and their log-probs from ``logits``, fp32 [B, V] each or the same tensor. ``keys`` and ``positions``
        int64 [B] give the uniform numbers. A row whose numbers are not finite gets some token id and log-probs that are NaN."""

    def tile_sums(self, scores: Tensor, logits: Tensor, drawings: Drawings, width: int) -> Tensor:
        """Maxima and sums of exponentials by tiles of the vocabulary, fp64 [5, B, tiles], of a slice of at most ``width`` tokens."""

    def draw_from_tiles(
        self,
        tiles: Tensor,
        rank: int,
        first: int,
        scores: Tensor,
        logits: Tensor,
        drawings: Drawings,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Draw by the :meth:`tile_sums` of all ranks [tp, 5, B, tiles], without filters, where the token lies in the slice of ``rank``,
        which begins at ``first``. Returns fp64 [3, B]: token ids and the two log-probs there, zeros for other rows."""
