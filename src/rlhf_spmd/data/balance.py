"""Assigns rows to parts (data-parallel ranks, mini-batches) and to micro-batches by token count. Pure arithmetic.

Every rank and every machine computes the same result: ties go to the lower row index or group id.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from functools import partial

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
        _, group_index = np.unique(groups, return_inverse=True)
        weights = np.bincount(group_index, weights).astype(np.int64)
    order = np.argsort(-weights, kind="stable")
    parts = np.empty_like(order)
    room = np.full(num_parts, len(weights) // num_parts)
    num_extra = len(weights) % num_parts if counts is None and not len(speeds) else 0
    loads = np.zeros(num_parts, np.int64)
    if len(speeds):
        weights = np.maximum(weights, 1) * SHARE_UNITS  # rows without tokens are spread as well
        room = np.full(num_parts, len(weights))
        loads = -_shares(int(weights.sum()), speeds)
    if counts is not None:
        room = counts
    parts[order] = _deal(weights[order].tolist(), room.tolist(), num_extra, loads.tolist())
    return parts if groups is None else parts[group_index]


def partition_with_prefixes(
    lengths: np.ndarray,
    prefix_lengths: np.ndarray,
    groups: np.ndarray,
    num_parts: int,
    keep_groups: bool = False,
    speeds: Sequence[float] = (),
    limits: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Return parts as :func:`partition_by_tokens`, for groups whose rows begin with the same tokens, such as a prompt.

    ``prefix_lengths`` [rows] counts these tokens. A part computes a shared prefix once for as many rows as fit into
    ``limits``, the tokens and rows of a micro-batch (0: no limit). Whole groups or single rows are assigned, whichever
    gives the slowest part less work; ``keep_groups`` forbids single rows.
    """
    if prefix_lengths.any():
        _, group_index, group_sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if not prefix_lengths.any() or not prefix_lengths[group_sizes[group_index] > 1].any():
        return partition_by_tokens(lengths, num_parts, groups if keep_groups else None, speeds)
    max_tokens, max_rows = limits
    mean_lengths = np.bincount(group_index, lengths) / group_sizes
    rows_that_fit = np.maximum(max_tokens // np.maximum(mean_lengths, 1), 1) if max_tokens else group_sizes
    rows_per_prefix = (np.minimum(rows_that_fit, max_rows) if max_rows else rows_that_fit)[group_index]

    def heaviest_load(parts: np.ndarray) -> float:
        tokens = computed_tokens(parts, group_index, lengths, prefix_lengths, rows_per_prefix)
        loads = np.bincount(parts, tokens, num_parts)
        return float(np.max(loads / speeds if len(speeds) else loads))

    weights = computed_tokens(np.zeros_like(group_index), group_index, lengths, prefix_lengths, rows_per_prefix)
    by_group = partition_by_tokens(weights, num_parts, groups, speeds)
    if keep_groups:
        return by_group
    return min(partition_by_tokens(lengths, num_parts, speeds=speeds), by_group, key=heaviest_load)


def computed_tokens(
    parts: np.ndarray,
    group_index: np.ndarray,
    lengths: np.ndarray,
    prefix_lengths: np.ndarray,
    rows_per_prefix: np.ndarray | int,
) -> np.ndarray:
    """Return the tokens that each row adds to the work of its part, int64 [rows].

    If a part has several rows of a group, only the first of each ``rows_per_prefix`` adds its prefix.
    """
    order = np.lexsort((group_index, parts))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(parts[order]) != 0) | (np.diff(group_index[order]) != 0)
    position = np.empty_like(order)  # of a row among those of its group and part
    position[order] = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    return lengths - np.where(position % rows_per_prefix == 0, 0, prefix_lengths)


def greedy_partition(sizes: Sequence[int], num_parts: int, decided: Sequence[int | None] = ()) -> list[int]:
    """Return the part of each item. In order, each goes to the part with the smallest load, unless its part is ``decided``."""
    loads = [0] * num_parts
    parts: list[int] = []
    for size, part in itertools.zip_longest(sizes, decided):
        parts.append(loads.index(min(loads)) if part is None else part)
        loads[parts[-1]] += size
    return parts


def fill_by_speed(number: int, speeds: Sequence[float] | np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Add equal items to ``counts`` int64 [parts] until there are ``number``; each part ends near its share by speed.

    A part that already holds more than its share gets nothing.
    """
    deficits = _shares(number * SHARE_UNITS, speeds) - counts * SHARE_UNITS
    parts = _deal([SHARE_UNITS] * (number - int(counts.sum())), [number] * len(counts), 0, (-deficits).tolist())
    return counts + np.bincount(np.array(parts, dtype=np.int64), minlength=len(counts))


def _shares(number: int, speeds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Split ``number`` into integers proportional to ``speeds``, int64 [parts]."""
    cumulative = np.cumsum(np.asarray(speeds, dtype=np.float64))
    return np.diff(np.rint(cumulative / cumulative[-1] * number).astype(np.int64), prepend=0)


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
    number = len(bins) if num_micro_batches is None else num_micro_batches
    if number < len(bins):
        raise ValueError(f"num_micro_batches={number} is too small: {where}={max_tokens} needs {len(bins)}")
    balanced: list[list[int]] = [[] for _ in range(min(number, len(lengths)))]
    weights = [max(lengths[row], 1) for row in order]  # an empty row still weighs 1, so no list stays empty
    for row, part in zip(order, _deal(weights, [len(lengths)] * len(balanced), 0, [0] * len(balanced)), strict=True):
        balanced[part].append(row)
    if all(sum(lengths[row] for row in rows) <= max_tokens for rows in balanced):
        bins = balanced
    while len(bins) < len(balanced):
        bins.append([max(bins, key=len).pop()])
    bins = sorted((sorted(rows) for rows in bins), key=lambda rows: (-sum(lengths[i] for i in rows), rows))
    return bins + [[] for _ in range(number - len(bins))]


def micro_batches_by_count(
    lengths: Sequence[int], rows_per_micro_batch: int, num_micro_batches: int | None = None
) -> list[list[int]]:
    """Cut rows in order into micro-batches of ``rows_per_micro_batch``; empty lists fill up to ``num_micro_batches``."""
    assert rows_per_micro_batch >= 1, f"{rows_per_micro_batch} rows per micro-batch"
    num_rows = len(lengths)
    bins = [list(range(i, min(i + rows_per_micro_batch, num_rows))) for i in range(0, num_rows, rows_per_micro_batch)]
    number = len(bins) if num_micro_batches is None else num_micro_batches
    if number < len(bins):
        raise ValueError(f"num_micro_batches={number} is too small: {num_rows} rows by {rows_per_micro_batch} need {len(bins)}")
    return bins + [[] for _ in range(number - len(bins))]


def cut_micro_batches(
    lengths: np.ndarray,
    prefix_lengths: np.ndarray,
    groups: np.ndarray,
    max_tokens: int,
    max_rows: int | None = None,
    keep_groups: bool = False,
    number: int | None = None,
    where: str = "ppo_max_token_len_per_gpu",
) -> list[list[int]]:
    """Return the rows of each micro-batch, ascending, the most expensive micro-batch first.

    They are cut by ``max_rows`` rows if given, else by tokens. Rows of a group (``groups``, one id per row) begin with
    the same ``prefix_lengths`` tokens, which a micro-batch computes once. ``keep_groups`` keeps groups together.
    Otherwise three cuts are compared, and the one that costs least is used: row by row, as many rows of a group as fit,
    or group after group until a micro-batch is full. Each micro-batch adds MICRO_BATCH of its budget to the cost.
    ``number`` and errors are those of :func:`micro_batches_by_tokens`.
    """
    _, group_index = np.unique(groups, return_inverse=True)
    sizes = lengths.tolist()
    cut = partial(_cut_runs, lengths=sizes, max_tokens=max_tokens, max_rows=max_rows, where=where)
    loads = partial(_bin_tokens, group_index=group_index, lengths=lengths, prefix_lengths=prefix_lengths)
    candidates = _candidate_runs(group_index, sizes, max_tokens, keep_groups, max_rows is None)
    cuts = [(runs, cut(runs)) for runs in candidates]
    allowed = [(runs, bins) for runs, bins in cuts if number is None or len(bins) <= number] or cuts[:1]
    runs, bins = min(allowed, key=lambda pair: loads(pair[1]).sum() + len(pair[1]) * max_tokens * MICRO_BATCH)
    bins = bins if number is None else cut(runs, number=number)
    ordered = sorted(zip(loads(bins).tolist(), bins, strict=True), key=lambda pair: (not pair[1], -pair[0], pair[1]))
    return [rows for _, rows in ordered]


def _candidate_runs(
    group_index: np.ndarray, lengths: Sequence[int], max_tokens: int, keep_groups: bool, by_tokens: bool
) -> list[list[list[int]]]:
    """Return the ways to join rows into runs that stay together; :func:`cut_micro_batches` compares them."""
    bounds = np.bincount(group_index).cumsum()[:-1]
    order = np.argsort(group_index, kind="stable")
    group_rows = [rows.tolist() for rows in np.split(order, bounds)] if len(order) else []
    if keep_groups:
        return [group_rows]
    candidates = [[[row] for row in range(len(lengths))]]
    if by_tokens and len(group_rows) < len(lengths):
        candidates.append([run for rows in group_rows for run in _runs(rows, lengths, max_tokens)])
        candidates.append(_runs(order.tolist(), lengths, max_tokens))
    return candidates


def _cut_runs(
    runs: list[list[int]], lengths: Sequence[int], max_tokens: int, max_rows: int | None, where: str, number: int | None = None
) -> list[list[int]]:
    """Return the rows of each micro-batch, which has whole runs. Raises ValueError; see :func:`cut_micro_batches`."""
    weights = [sum(lengths[row] for row in run) for run in runs]
    rows_per_run = max(map(len, runs), default=1)
    if max_rows is not None:
        bins = micro_batches_by_count(weights, max(max_rows // rows_per_run, 1), number)
    else:
        bins = micro_batches_by_tokens(weights, max_tokens, number, where, "row" if rows_per_run == 1 else "group")
    return [sorted(row for run in bin for row in runs[run]) for bin in bins]


def _bin_tokens(bins: list[list[int]], group_index: np.ndarray, lengths: np.ndarray, prefix_lengths: np.ndarray) -> np.ndarray:
    """Return the tokens that each micro-batch computes, int64 [micro-batches]."""
    rows = np.fromiter(itertools.chain(*bins), dtype=np.int64)
    bin_of_row = np.repeat(np.arange(len(bins)), [len(rows) for rows in bins])
    tokens = computed_tokens(bin_of_row, group_index[rows], lengths[rows], prefix_lengths[rows], len(rows) + 1)
    return np.bincount(bin_of_row, tokens, len(bins))


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


def _deal(weights: Sequence[int], room: list[int], num_extra: int, loads: Sequence[int]) -> list[int]:
    """Return the part of each of the weights, which come heaviest first: the lightest part that has room, lower number first.

    Part ``i`` starts with ``loads[i]`` tokens; a negative number is what it still lacks. It has room for ``room[i]``
    weights; ``num_extra`` parts, whichever need it first, get room for one more. A heap entry packs tokens and part into
    one integer, because integers compare fastest and thousands of rows are assigned several times per step.
    """
    bits = len(room).bit_length()
    mask = (1 << bits) - 1
    heap = sorted((tokens << bits) + part for part, tokens in enumerate(loads))
    parts = []
    for weight in weights:
        while room[part := heap[0] & mask] <= 0 and not num_extra:
            heapq.heappop(heap)
        parts.append(part)
        room[part] -= 1
        if room[part] >= 0:
            heapq.heapreplace(heap, heap[0] + (weight << bits))
        else:
            num_extra -= 1
            heapq.heappop(heap)
    return parts


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return first-fit bins of the rows in ``order``."""
    free = np.full(len(order), max_tokens)
    bins: list[list[int]] = []
    for row in order:
        index = int(np.argmax(free[: len(bins) + 1] >= lengths[row]))
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        free[index] -= lengths[row]
    return bins
