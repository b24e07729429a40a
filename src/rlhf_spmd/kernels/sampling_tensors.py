"""Sampling settings of a batch as tensors, and the protocol of ops that sample rows of different settings in one pass."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class SamplingTensors(NamedTuple):
    """Sampling settings of the rows of a step, [B] each, and what the host knows about them.

    - temperature: fp32; 0 is greedy
    - top_p, min_p: fp32; 1 and 0 turn them off
    - top_k: int32; 0 and less turn it off
    - filters: some row has top_p below 1, top_k above 0 or min_p above 0
    - greedy: every row is greedy
    - tempered: the temperature of some row's log-prob is not 1; it is the row's temperature, but 1 for a greedy row
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
class RowSampler(Protocol):
    """Ops that sample rows of different settings in one pass.

    The host waits for nothing and no shape depends on values, so a CUDA graph can contain a draw. Each row's result
    depends on that row alone, bit for bit.
    """

    def draw_rows(self, scores: Tensor, logits: Tensor, settings: SamplingTensors, keys: Tensor, positions: Tensor) -> Drawn:
        """Return tokens drawn from ``scores``, and their log-probs from ``logits``: fp32 [B, V] each, or the same memory. ``scores``
        may have fewer columns, of the tokens that may be drawn.

        ``keys`` and ``positions`` int64 [B] determine the uniform random numbers. A row with numbers that are not finite
        gets an arbitrary token id and NaN as log-probs.
        """

    def tile_sums(self, scores: Tensor, logits: Tensor, settings: SamplingTensors, width: int) -> Tensor:
        """Return maxima and sums of exponentials per tile of the vocabulary, fp64 [5, B, tiles].

        ``width``: most tokens of a rank's slice of the vocabulary.
        """

    def draw_from_tiles(
        self,
        tiles: Tensor,
        rank: int,
        first: int,
        scores: Tensor,
        logits: Tensor,
        settings: SamplingTensors,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Draws, without filters, the rows whose token lies in the slice of ``rank``, which begins at ``first``.

        ``tiles`` [tp, 5, B, tiles]: the :meth:`tile_sums` of all ranks. Returns fp64 [3, B]: token ids and the two
        log-probs of these rows, zeros for other rows.
        """
