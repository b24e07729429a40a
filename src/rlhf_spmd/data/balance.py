"""Rows to parts (data-parallel ranks, mini-batches) and to micro-batches by token count. Pure arithmetic.

The same input gives the same answer on every rank and every machine: ties are broken by the lower row index.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from itertools import count

Part = tuple[int, list[int]]  # (tokens, items)


def partition_by_tokens(lengths: Sequence[int], num_parts: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Rows into ``num_parts`` lists of ascending row indices with token sums as equal as possible.

    Karmarkar-Karp largest differencing with equal counts, then swaps between the heaviest and the lightest part. Every
    part gets the same number of items, or one more than another where ``num_parts`` does not divide them. An item is a
    row, or with ``groups`` (one id per row) all rows of one group, which then stay together. Fewer items than parts leave
    parts empty.
    """
    assert num_parts >= 1, f"{num_parts} parts"
    members = _members(len(lengths), groups)
    weights = [sum(lengths[row] for row in rows) for rows in members]
    parts = _swap_until_even(_largest_differencing(weights, num_parts, equal_counts=True), weights)
    rows = [sorted(row for item in items for row in members[item]) for items in parts]
    return sorted(rows, key=lambda part: (not part, part))


def micro_batches_by_tokens(
    lengths: Sequence[int], max_tokens: int, num_micro_batches: int | None = None, where: str = "ppo_max_token_len_per_gpu"
) -> list[list[int]]:
    """Rows into micro-batches of at most ``max_tokens`` tokens each, largest first, rows ascending inside each.

    Their number is that of first-fit decreasing; balanced by largest differencing where the budget allows. With
    ``num_micro_batches`` (ranks of one group agree on the largest of theirs) exactly that many come out: rows are spread
    further, and empty lists fill up at the end. Largest first, so that a budget that does not fit into memory fails at once.
    Raises ValueError if a row is longer than the budget (``where`` names the setting) or the number is too small.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        row = list(lengths).index(longest)
        raise ValueError(
            f"{where}={max_tokens} is less than the {longest} tokens of row {row}; "
            f"set it to at least max_prompt_length + max_response_length"
        )
    bins = _first_fit_decreasing(lengths, max_tokens)
    wanted = len(bins) if num_micro_batches is None else num_micro_batches
    if wanted < len(bins):
        raise ValueError(f"num_micro_batches={wanted} is too small: {where}={max_tokens} needs {len(bins)}")
    used = min(wanted, len(lengths))
    if used:
        balanced = _largest_differencing(list(lengths), used, equal_counts=False)
        if all(items and sum(lengths[i] for i in items) <= max_tokens for items in balanced):
            bins = balanced
        else:
            bins = _split_further(bins, lengths, used)
    bins = sorted((sorted(items) for items in bins), key=lambda items: (-sum(lengths[i] for i in items), items))
    return bins + [[] for _ in range(wanted - len(bins))]


def micro_batches_by_count(
    lengths: Sequence[int], rows_per_micro_batch: int, num_micro_batches: int | None = None
) -> list[list[int]]:
    """Rows in order, ``rows_per_micro_batch`` at a time, the last one shorter; empty lists up to ``num_micro_batches``."""
    assert rows_per_micro_batch >= 1, f"{rows_per_micro_batch} rows per micro-batch"
    num_rows = len(lengths)
    bins = [list(range(i, min(i + rows_per_micro_batch, num_rows))) for i in range(0, num_rows, rows_per_micro_batch)]
    wanted = len(bins) if num_micro_batches is None else num_micro_batches
    if wanted < len(bins):
        raise ValueError(f"num_micro_batches={wanted} is too small: {num_rows} rows by {rows_per_micro_batch} need {len(bins)}")
    return bins + [[] for _ in range(wanted - len(bins))]


def _members(num_rows: int, groups: Sequence[int] | None) -> list[list[int]]:
    """The rows of each item, items in order of their first row."""
    if groups is None:
        return [[row] for row in range(num_rows)]
    if len(groups) != num_rows:
        raise ValueError(f"{len(groups)} group ids for {num_rows} rows")
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(int(group), []).append(row)
    return list(members.values())


def _largest_differencing(weights: Sequence[int], num_parts: int, equal_counts: bool) -> list[list[int]]:
    """Karmarkar and Karp 1982, k-way: merge the two partial partitions of the widest spread, heavy onto light.

    With ``equal_counts`` a partial partition starts as k items of similar weight, one per part; weight-0 items with
    negative numbers fill the last one up, so no part gets two of them. Otherwise it starts as one item and k - 1 empty parts.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    serial = count()
    heap: list[tuple[int, int, list[Part]]] = []

    def push(parts: list[Part]) -> None:
        parts = sorted(parts, key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(serial), parts))

    if equal_counts:
        padded = list(range(-(-len(weights) % num_parts), 0)) + order
        for start in range(0, len(padded), num_parts):
            push([(weights[i] if i >= 0 else 0, [i]) for i in padded[start : start + num_parts]])
    else:
        for i in order:
            push([(weights[i], [i])] + [(0, []) for _ in range(num_parts - 1)])
    if not heap:
        return [[] for _ in range(num_parts)]
    while len(heap) > 1:
        (_, _, heavy), (_, _, light) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, items + more) for (a, items), (b, more) in zip(heavy, reversed(light), strict=True)])
    parts = [sorted(i for i in items if i >= 0) for _, items in heap[0][2]]
    return sorted(parts, key=lambda items: (not items, items))


def _swap_until_even(parts: list[list[int]], weights: Sequence[int]) -> list[list[int]]:
    """Swap one item of the heaviest part with one of the lightest as long as that narrows their gap.

    Equal counts leave the differencing little freedom where one item outweighs all others; swaps keep the counts.
    """
    parts = [sorted(part, key=lambda i: (weights[i], i)) for part in parts]
    sums = [sum(weights[i] for i in part) for part in parts]
    for _ in range(10 * len(parts)):
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[heavy] - sums[light]
        best = (gap, -1, -1)  # (gap afterwards, position in heavy, position in light)
        for a, item in enumerate(parts[heavy]):
            near = bisect.bisect_left(parts[light], weights[item] - gap / 2, key=lambda i: weights[i])
            for b in range(max(near - 1, 0), min(near + 1, len(parts[light]))):
                best = min(best, (abs(gap - 2 * (weights[item] - weights[parts[light][b]])), a, b))
        if best[0] >= gap:
            break
        a, b = best[1:]
        moved = weights[parts[heavy][a]] - weights[parts[light][b]]
        parts[heavy][a], parts[light][b] = parts[light][b], parts[heavy][a]
        sums[heavy] -= moved
        sums[light] += moved
        for part in (heavy, light):
            parts[part].sort(key=lambda i: (weights[i], i))
    return parts


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[row] <= free:
                bins[b].append(row)
                room[b] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(max_tokens - lengths[row])
    return bins


def _split_further(bins: list[list[int]], lengths: Sequence[int], wanted: int) -> list[list[int]]:
    """Halve the bin of most tokens that has two rows until there are ``wanted``; a bin only becomes lighter."""
    bins = list(bins)
    while len(bins) < wanted:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: (sum(lengths[i] for i in b), -b[0]))
        bins.remove(heaviest)
        halves = _largest_differencing([lengths[i] for i in heaviest], 2, equal_counts=True)
        bins += [[heaviest[i] for i in half] for half in halves]
    return bins
