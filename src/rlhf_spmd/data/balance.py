"""Rows to parts (data-parallel ranks, mini-batches) and to micro-batches by token count. Pure arithmetic.

The same input gives the same answer on every rank and every machine: ties are broken by the lower row index or group id.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

SHARE_UNITS = 1 << 16  # of a token: shares by speed are whole numbers of these, so that they are compared exactly


def partition_by_tokens(
    lengths: Sequence[int] | np.ndarray,
    num_parts: int,
    groups: np.ndarray | None = None,
    speeds: Sequence[float] = (),
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """The part of each row, int64 [rows], with token sums as equal as possible, or with ``speeds`` (one per part) in their proportion.

    Every part gets the same number of items, or one more than another where ``num_parts`` does not divide them. An item is
    a row, or with ``groups`` (one id per row) all rows of one group, which then stay together. Fewer items than parts leave
    the last parts empty.

    With ``speeds`` a part's tokens are within one item of its share, and a part may get none: each item goes to the part that
    lacks most of its share. ``counts`` says how many items each part gets, in all as many as there are.
    """
    weights = np.asarray(lengths, dtype=np.int64)
    assert num_parts >= 1 and (groups is None or len(groups) == len(weights)), f"{len(weights)} rows to {num_parts} parts"
    if groups is not None:
        _, items = np.unique(groups, return_inverse=True)
        weights = np.bincount(items, weights).astype(np.int64)
    order = np.argsort(-weights, kind="stable")
    parts = np.empty_like(order)
    room, extra, held = np.full(num_parts, len(weights) // num_parts), len(weights) % num_parts, np.zeros(num_parts, np.int64)
    if len(speeds):
        weights = np.maximum(weights, 1) * SHARE_UNITS  # rows without tokens are spread as well
        room, extra, held = np.full(num_parts, len(weights)), 0, -_shares(int(weights.sum()), speeds)
    if counts is not None:
        room, extra = counts, 0
    parts[order] = _deal(weights[order].tolist(), room.tolist(), extra, held.tolist())
    return parts if groups is None else parts[items]


def partition_sharing(
    lengths: np.ndarray, common: np.ndarray, num_parts: int, groups: np.ndarray, speeds: Sequence[float] = ()
) -> np.ndarray:
    """:func:`partition_by_tokens` of single rows or of whole groups, whichever leaves less to the part that has most (of its speed):
    rows of a group have their first ``common`` [rows] tokens in common, and a part computes these once."""
    apart = partition_by_tokens(lengths, num_parts, speeds=speeds)
    _, items, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if not (common * (sizes[items] > 1)).any():
        return apart

    def once(parts: np.ndarray) -> np.ndarray:
        """What each row adds to the tokens of its part."""
        _, firsts = np.unique(parts * len(sizes) + items, return_index=True)
        return lengths - np.where(np.isin(np.arange(len(items)), firsts), 0, common)

    def most(parts: np.ndarray) -> float:
        held = np.bincount(parts, once(parts), num_parts)
        return float(np.max(held / speeds if len(speeds) else held))

    together = partition_by_tokens(once(np.zeros_like(items)), num_parts, groups, speeds)
    return min(apart, together, key=most)


def share_out(number: int, speeds: Sequence[float] | np.ndarray, held: np.ndarray) -> np.ndarray:
    """``held`` int64 [parts], items of equal size, filled up to ``number`` in all: to each part in proportion to its speed, within
    one where none has more already."""
    lacks = _shares(number * SHARE_UNITS, speeds) - held * SHARE_UNITS
    parts = _deal([SHARE_UNITS] * (number - int(held.sum())), [number] * len(held), 0, (-lacks).tolist())
    return held + np.bincount(np.array(parts, dtype=np.int64), minlength=len(held))


def _shares(number: int, speeds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Whole numbers that add up to ``number``, int64 [parts]."""
    ends = np.cumsum(np.asarray(speeds, dtype=np.float64))
    return np.diff(np.rint(ends / ends[-1] * number).astype(np.int64), prepend=0)


def micro_batches_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    num_micro_batches: int | None = None,
    where: str = "ppo_max_token_len_per_gpu",
    item: str = "row",
) -> list[list[int]]:
    """Rows into micro-batches of at most ``max_tokens`` tokens each, largest first, rows ascending inside each.

    Their number is that of first-fit decreasing; their tokens are balanced where the budget allows. With
    ``num_micro_batches`` (ranks of one group agree on the largest of theirs) exactly that many come out: rows are spread
    further, and empty lists fill up at the end. Largest first, so that a budget that does not fit into memory fails at once.
    Raises ValueError if a row is longer than the budget (``where`` names the setting, ``item`` what is called a row here) or the
    number is too small.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        row = list(lengths).index(longest)
        raise ValueError(
            f"{where}={max_tokens} is less than the {longest} tokens of {item} {row}; "
            f"set it to at least max_prompt_length + max_response_length{' for each row of a group' if item == 'group' else ''}"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _first_fit(order, lengths, max_tokens)
    wanted = len(bins) if num_micro_batches is None else num_micro_batches
    if wanted < len(bins):
        raise ValueError(f"num_micro_batches={wanted} is too small: {where}={max_tokens} needs {len(bins)}")
    balanced: list[list[int]] = [[] for _ in range(min(wanted, len(lengths)))]
    weights = [max(lengths[row], 1) for row in order]  # an empty row weighs something, so that none of the lists stays empty
    for row, part in zip(order, _deal(weights, [len(lengths)] * len(balanced), 0, [0] * len(balanced)), strict=True):
        balanced[part].append(row)
    if all(sum(lengths[row] for row in rows) <= max_tokens for rows in balanced):
        bins = balanced
    while len(bins) < len(balanced):
        bins.append([max(bins, key=len).pop()])
    bins = sorted((sorted(rows) for rows in bins), key=lambda rows: (-sum(lengths[i] for i in rows), rows))
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


def cut_rows(
    lengths: Sequence[int],
    groups: np.ndarray,
    max_tokens: int,
    max_rows: int | None = None,
    keep_groups: bool = False,
    number: int | None = None,
    where: str = "ppo_max_token_len_per_gpu",
) -> list[list[int]]:
    """The rows of each micro-batch, ascending, by ``max_rows`` rows where it is given, or by tokens. ``groups``: one id per row.

    Those of a group come together with ``keep_groups``. Without, as many of them as fit, or half as many, where that takes no more
    micro-batches than rows one by one: they have a prompt in common, which is computed once.
    ``number`` and errors as in :func:`micro_batches_by_tokens`.
    """
    _, items = np.unique(groups, return_inverse=True)
    together = [
        rows.tolist() for rows in np.split(np.argsort(items, kind="stable"), np.bincount(items).cumsum()[:-1]) if len(rows)
    ]

    def cut(items: list[list[int]], number: int | None) -> list[list[int]]:
        weights, most = [sum(lengths[row] for row in item) for item in items], max(map(len, items), default=1)
        if max_rows is not None:
            chosen = micro_batches_by_count(weights, max(max_rows // most, 1), number)
        else:
            chosen = micro_batches_by_tokens(weights, max_tokens, number, where, "row" if most == 1 else "group")
        return [sorted(row for item in bin for row in items[item]) for bin in chosen]

    if keep_groups:
        return cut(together, number)
    apart = cut([[row] for row in range(len(lengths))], number)
    if max_rows is not None or len(together) == len(lengths):
        return apart
    for room in (max_tokens, max_tokens // 2):
        runs = [run for rows in together for run in _runs(rows, lengths, room)]
        if len(cut(runs, None)) <= len(apart):
            return cut(runs, len(apart))
    return apart


def _runs(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """``rows`` in their order, in runs of at most ``max_tokens`` tokens; a longer row is a run of its own."""
    runs: list[list[int]] = []
    tokens = max_tokens + 1
    for row in rows:
        tokens += lengths[row]
        if tokens > max_tokens:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs


def _deal(weights: Sequence[int], room: list[int], extra: int, held: Sequence[int]) -> list[int]:
    """The part of each weight, heaviest given first: always the part of fewest tokens that has room, of the lower number.

    Part ``i`` begins with ``held[i]`` tokens (below 0: what it lacks) and has room for ``room[i]`` weights, and any ``extra`` parts
    for one more. A heap entry is a part's tokens and its
    number in one integer, since integers compare fastest: thousands of rows are dealt several times in a step.
    """
    bits = len(room).bit_length()
    mask, heap, parts = (1 << bits) - 1, sorted((tokens << bits) + part for part, tokens in enumerate(held)), []
    for weight in weights:
        while room[part := heap[0] & mask] <= 0 and not extra:
            heapq.heappop(heap)
        parts.append(part)
        room[part] -= 1
        if room[part] >= 0:
            heapq.heapreplace(heap, heap[0] + (weight << bits))
        else:
            extra -= 1
            heapq.heappop(heap)
    return parts


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    free = [max_tokens] * len(order)
    bins: list[list[int]] = [[] for _ in order]
    for row in order:
        home = next(b for b, tokens in enumerate(free) if lengths[row] <= tokens)
        bins[home].append(row)
        free[home] -= lengths[row]
    return [rows for rows in bins if rows]
