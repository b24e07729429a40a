"""What a transition costs by the papers' formulas, for the ways from training to generation that there are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.reshard.methods import Method


@dataclass(frozen=True)
class Costs:
    """In multiples of M, the bytes of the tensors that the layout splits; the mean over ranks where stages differ.

    received: per rank and transition; None: it differs from rank to rank, see :func:`missing_elements`. peak: most parameter
    memory, buckets aside. twice: what is held a second time while generating.
    """

    received: Fraction | None
    peak: Fraction
    twice: Fraction


def costs_of(method: Method, layout: GenerationLayout) -> Costs:
    """(t p - t_g p_g) / (t_g p_g * t p) received by ``zero_redundancy`` without ZeRO."""
    part, own = Fraction(1, layout.pp * layout.tp), Fraction(1, num_shards(layout))
    if not method.consecutive:
        return Costs(part - own, part, Fraction(0))
    if not method.whole:
        return Costs(None, part + own, own)
    answers = Fraction(1, layout.train.size) if method.everyone and layout.train.dp_shard == 1 else own
    return Costs(1 - answers, 1 + own, own)


def num_shards(layout: GenerationLayout) -> int:
    """Distinct training shards: p * t, and with ZeRO times the ranks of a shard group."""
    train = layout.train
    return train.pp * train.tp * train.dp_shard
