"""Which responses of many people get to see, and who says what in them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def pick(groups: Iterable[Hashable], most: int) -> list[int]:
    """Positions of ``most`` rows at most, ascending: the first row of every group goes before a second one of any.

    ``groups``: of each row, what it answers.
    """
    seen: Counter[Hashable] = Counter()
    order = []
    for at, group in enumerate(groups):
        order.append((seen[group], at))
        seen[group] += 1
    return sorted(at for _, at in sorted(order)[:most])


def stretches(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Value, begin and end of each longest run of equal values."""
    ends = [at for at in range(1, len(mask)) if mask[at] != mask[at - 1]]
    return [(mask[begin], begin, end) for begin, end in zip([0, *ends], [*ends, len(mask)], strict=True) if end > begin]
