"""Assigns rows to parts (data-parallel ranks, mini-batches) and to micro-batches by token count. Pure arithmetic.

Every rank and every machine computes the same result: ties go to the lower row index or group id.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

MICRO_BATCH = 1 / 32  # fixed cost of a micro-batch (launches, gathers), as a share of its token budget
SHARE_UNITS = 1 << 16  # units per token: shares by speed are integers in these units, so comparisons are exact


def partition_by_tokens(
    lengths: Sequence[int] | np.ndarray,
    num_parts: int,
    groups: np.ndarray | None = None,
    speeds: Sequence[float] = (),
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the part of each row, int64 [rows], with token sums as equal as possible.

    An item is a row, or all rows of one group if ``groups`` (one id per row) is given; groups are never split. Every
    part gets the same number of items; if they do not divide evenly, some parts get one more. With fewer items than
    parts, the last parts stay empty.

    ``speeds`` (one per part) makes token sums proportional to them instead: each item goes to the part that is furthest
    below its share, and a part may get none. ``counts`` fixes the number of items of each part.
    """
    weights = np.asarray(lengths, dtype=np.int64)
    assert num_parts >= 1 and (groups is None or len(groups) == len(weights)), f"{len(weights)} rows to {num_parts} parts"
    if groups is not None:
        _, items = np.unique(groups, return_inverse=True)
        weights = np.bincount(items, weights).astype(np.int64)
    order = np.argsort(-weights, kind="stable")
    parts = np.empty_like(order)
    room, extra, loads = np.full(num_parts, len(weights) // num_parts), len(weights) % num_parts, np.zeros(num_parts, np.int64)
    if len(speeds):
        weights = np.maximum(weights, 1) * SHARE_UNITS  # rows without tokens are spread as well
        room, extra, loads = np.full(num_parts, len(weights)), 0, -_shares(int(weights.sum()), speeds)
    if counts is not None:
        room, extra = counts, 0
    parts[order] = _deal(weights[order].tolist(), room.tolist(), extra, loads.tolist())
    return parts if groups is None else parts[items]


def partition_with_prefixes(
    lengths: np.ndarray,
    common: np.ndarray,
    groups: np.ndarray,
    num_parts: int,
    keep_groups: bool = False,
    speeds: Sequence[float] = (),
    limits: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Return parts as :func:`partition_by_tokens`, for groups whose rows share their first ``common`` tokens [rows], such as a
    prompt.

    A part computes a shared prefix once for as many rows as fit into ``limits``, the tokens and rows of a micro-batch
    (0: no limit). Whole groups or single rows are assigned, whichever gives the slowest part less work; ``keep_groups``
    forbids single rows.
    """
    if common.any():
        _, items, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if not common.any() or not common[sizes[items] > 1].any():
        return partition_by_tokens(lengths, num_parts, groups if keep_groups else None, speeds)
    max_tokens, max_rows = limits
    of_group = np.bincount(items, lengths) / sizes
    fits = np.maximum(max_tokens // np.maximum(of_group, 1), 1) if max_tokens else sizes
    fits = (np.minimum(fits, max_rows) if max_rows else fits)[items]

    def heaviest(parts: np.ndarray) -> float:
        loads = np.bincount(parts, computed_tokens(parts, items, lengths, common, fits), num_parts)
        return float(np.max(loads / speeds if len(speeds) else loads))

    weights = computed_tokens(np.zeros_like(items), items, lengths, common, fits)
    together = partition_by_tokens(weights, num_parts, groups, speeds)
    return together if keep_groups else min(partition_by_tokens(lengths, num_parts, speeds=speeds), together, key=heaviest)


def computed_tokens(
    parts: np.ndarray, items: np.ndarray, lengths: np.ndarray, common: np.ndarray, fits: np.ndarray | int
) -> np.ndarray:
    """Return the tokens that each row adds to the work of its part, int64 [rows].

    If a part has several rows of one item, only every ``fits``-th row adds its ``common`` tokens.
    """
    order = np.lexsort((items, parts))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(parts[order]) != 0) | (np.diff(items[order]) != 0)
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    return lengths - np.where(place % fits == 0, 0, common)


def greedy_partition(sizes: Sequence[int], num_parts: int, decided: Sequence[int | None] = ()) -> list[int]:
    """Return the part of each item: in order, each goes to the part that has least so far, unless its part is ``decided``."""
    loads, parts = [0] * num_parts, list[int]()
    for size, part in itertools.zip_longest(sizes, decided):
        parts.append(loads.index(min(loads)) if part is None else part)
        loads[parts[-1]] += size
    return parts


def fill_by_speed(number: int, speeds: Sequence[float] | np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Add equal items to ``counts`` int64 [parts] until there are ``number``; each part ends near its share by speed.

    A part that already holds more than its share gets nothing.
    """
    lacks = _shares(number * SHARE_UNITS, speeds) - counts * SHARE_UNITS
    parts = _deal([SHARE_UNITS] * (number - int(counts.sum())), [number] * len(counts), 0, (-lacks).tolist())
    return counts + np.bincount(np.array(parts, dtype=np.int64), minlength=len(counts))


def _shares(number: int, speeds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Split ``number`` into integers proportional to ``speeds``, int64 [parts]."""
    ends = np.cumsum(np.asarray(speeds, dtype=np.float64))
    return np.diff(np.rint(ends / ends[-1] * number).astype(np.int64), prepend=0)


def micro_batches_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    num_micro_batches: int | None = None,
    where: str = "ppo_max_token_len_per_gpu",
    item: str = "row",
) -> list[list[int]]:
    """Pack rows into micro-batches of at most ``max_tokens`` tokens; the largest comes first, rows ascend inside each.

    First-fit decreasing gives their number; their tokens are balanced where the budget allows. Ranks of one group pass
    the largest of their numbers as ``num_micro_batches``: rows are then spread further, and empty lists fill up the
    end. A budget that exceeds memory fails at once, because the largest runs first.

    Raises ValueError if a row exceeds the budget or the number is too small; ``where`` names the setting and ``item``
    the row.
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
    weights = [max(lengths[row], 1) for row in order]  # an empty row still weighs 1, so no list stays empty
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
    """Cut rows in order into micro-batches of ``rows_per_micro_batch``; empty lists fill up to ``num_micro_batches``."""
    assert rows_per_micro_batch >= 1, f"{rows_per_micro_batch} rows per micro-batch"
    num_rows = len(lengths)
    bins = [list(range(i, min(i + rows_per_micro_batch, num_rows))) for i in range(0, num_rows, rows_per_micro_batch)]
    wanted = len(bins) if num_micro_batches is None else num_micro_batches
    if wanted < len(bins):
        raise ValueError(f"num_micro_batches={wanted} is too small: {num_rows} rows by {rows_per_micro_batch} need {len(bins)}")
    return bins + [[] for _ in range(wanted - len(bins))]


def cut_micro_batches(
    lengths: np.ndarray,
    common: np.ndarray,
    groups: np.ndarray,
    max_tokens: int,
    max_rows: int | None = None,
    keep_groups: bool = False,
    number: int | None = None,
    where: str = "ppo_max_token_len_per_gpu",
) -> list[list[int]]:
    """Return the rows of each micro-batch, ascending, the most expensive micro-batch first.

    They are cut by ``max_rows`` rows if given, else by tokens. Rows of a group (``groups``, one id per row) share
    ``common`` tokens, which a micro-batch computes once. ``keep_groups`` keeps groups together. Otherwise three cuts
    are compared, and the one that computes least is used: row by row, as many rows of a group as fit, or group after
    group until a micro-batch is full. Each micro-batch adds MICRO_BATCH of its budget to the cost. ``number`` and
    errors are those of :func:`micro_batches_by_tokens`.
    """
    _, items = np.unique(groups, return_inverse=True)
    bounds = np.bincount(items).cumsum()[:-1]
    group_rows = [rows.tolist() for rows in np.split(np.argsort(items, kind="stable"), bounds)] if len(items) else []
    sizes = lengths.tolist()

    def cut(way: list[list[int]], number: int | None) -> list[list[int]]:
        weights, rows_per_run = [sum(sizes[row] for row in run) for run in way], max(map(len, way), default=1)
        if max_rows is not None:
            chosen = micro_batches_by_count(weights, max(max_rows // rows_per_run, 1), number)
        else:
            chosen = micro_batches_by_tokens(weights, max_tokens, number, where, "row" if rows_per_run == 1 else "group")
        return [sorted(row for run in bin for row in way[run]) for bin in chosen]

    def computed(bins: list[list[int]]) -> np.ndarray:
        rows = np.fromiter(itertools.chain(*bins), dtype=np.int64)
        of = np.repeat(np.arange(len(bins)), [len(rows) for rows in bins])
        return np.bincount(of, computed_tokens(of, items[rows], lengths[rows], common[rows], len(rows) + 1), len(bins))

    ways = [group_rows] if keep_groups else [[[row] for row in range(len(lengths))]]
    if not keep_groups and max_rows is None and len(group_rows) < len(lengths):
        ways += [[run for rows in group_rows for run in _runs(rows, sizes, max_tokens)]]
        ways += [_runs([row for rows in group_rows for row in rows], sizes, max_tokens)]
    cuts = [(way, cut(way, None)) for way in ways]
    may = [(way, bins) for way, bins in cuts if number is None or len(bins) <= number] or cuts[:1]
    way, bins = min(may, key=lambda pair: computed(pair[1]).sum() + len(pair[1]) * max_tokens * MICRO_BATCH)
    bins = bins if number is None else cut(way, number)
    ordered = sorted(zip(computed(bins).tolist(), bins, strict=True), key=lambda pair: (not pair[1], -pair[0], pair[1]))
    return [rows for _, rows in ordered]


def _runs(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut ``rows`` in order into runs of at most ``max_tokens`` tokens; a longer row is a run of its own."""
    runs: list[list[int]] = []
    tokens = max_tokens + 1
    for row in rows:
        tokens += lengths[row]
        if tokens > max_tokens:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs


def _deal(weights: Sequence[int], room: list[int], extra: int, loads: Sequence[int]) -> list[int]:
    """Return the part of each weight, heaviest given first: always the lightest part that has room, lower number first.

    Part ``i`` starts with ``held[i]`` tokens (negative: it lacks so many) and has room for ``room[i]`` weights;
    ``extra`` parts, whichever need it first, get room for one more. A heap entry packs tokens and part into one
    integer, because integers compare fastest and thousands of rows are assigned several times per step.
    """
    bits = len(room).bit_length()
    mask, heap, parts = (1 << bits) - 1, sorted((tokens << bits) + part for part, tokens in enumerate(loads)), []
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
    """Return first-fit bins of the rows in ``order``."""
    free = np.full(len(order), max_tokens)
    bins: list[list[int]] = []
    for row in order:
        home = int(np.argmax(free[: len(bins) + 1] >= lengths[row]))
        if home == len(bins):
            bins.append([])
        bins[home].append(row)
        free[home] -= lengths[row]
    return bins
