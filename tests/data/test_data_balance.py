"""Balancing of token counts: every row once, equal counts, close sums, the budget kept, the same answer each time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.data.balance import (
    cut_micro_batches,
    fill_by_speed,
    micro_batches_by_count,
    micro_batches_by_tokens,
    partition_by_tokens,
    partition_with_prefixes,
)

LENGTHS = st.lists(st.integers(0, 300), max_size=60)


def sums_of(lengths: Sequence[int] | np.ndarray, parts: np.ndarray, num_parts: int) -> list[int]:
    return np.bincount(parts, lengths, num_parts).astype(int).tolist()


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 9))
def test_partition_covers_with_equal_counts(lengths: list[int], num_parts: int) -> None:
    parts = partition_by_tokens(lengths, num_parts)
    assert parts.dtype == np.int64 and parts.shape == (len(lengths),)
    counts = np.bincount(parts, minlength=num_parts).tolist()
    assert len(counts) == num_parts
    assert max(counts) - min(counts) <= (1 if len(lengths) % num_parts else 0)
    assert len(lengths) >= num_parts or counts == sorted(counts, reverse=True)
    assert parts.tolist() == partition_by_tokens(np.array(lengths, dtype=np.int64), num_parts).tolist()


def test_ties_go_to_the_lower_row_and_the_lower_part() -> None:
    assert partition_by_tokens([5, 5, 9, 5, 5, 5], 3).tolist() == [1, 2, 0, 1, 2, 0]
    assert partition_by_tokens([3, 3], 4).tolist() == [0, 1]
    assert partition_by_tokens([7, 7, 2, 2], 2, np.array([8, 8, 1, 1])).tolist() == [0, 0, 1, 1]


def test_partition_is_close_to_even() -> None:
    """Beside the mean stands the longest row with the shortest ones, which no cut of equal counts can undercut."""
    rng = np.random.default_rng(0)
    for num_parts, drawn in (
        (8, rng.exponential(200, 256)),
        (64, rng.uniform(0, 1000, 2048)),
        (2, np.minimum(rng.pareto(1.2, 512) * 100, 4096)),
    ):
        lengths = np.sort(drawn.astype(np.int64) + 16)
        least = max(lengths.sum() / num_parts, lengths[-1] + lengths[: len(lengths) // num_parts - 1].sum())
        assert max(sums_of(lengths, partition_by_tokens(lengths, num_parts), num_parts)) <= 1.03 * least


SPEEDS = st.lists(st.floats(0.01, 4.0), min_size=1, max_size=12)


@settings(max_examples=60)
@given(LENGTHS, SPEEDS, st.integers(1, 5))
def test_with_speeds_every_part_has_its_share_within_one_item(lengths: list[int], speeds: list[float], group_size: int) -> None:
    groups = np.arange(len(lengths)) // group_size
    items = np.bincount(groups, lengths).astype(int) if lengths else np.zeros(1, dtype=int)
    parts = partition_by_tokens(lengths, len(speeds), groups, speeds)
    assert all(len(set(parts[groups == group])) <= 1 for group in range(len(items)))
    shares = sum(lengths) * np.array(speeds) / sum(speeds)
    held = np.array(sums_of(lengths, parts, len(speeds)))
    assert (np.abs(held - shares) <= items.max() + 0.01 + (items == 0).sum()).all()


def test_with_speeds_the_slowest_part_is_done_when_the_others_are() -> None:
    assert np.bincount(partition_by_tokens([10] * 8, 4, speeds=(1, 1, 0.5, 0.5))).tolist() == [3, 3, 1, 1]
    lengths = np.random.default_rng(0).exponential(400, 8192).astype(np.int64) + 16
    speeds = np.random.default_rng(1).uniform(0.3, 1.0, 64)
    seconds = np.array(sums_of(lengths, partition_by_tokens(lengths, 64, None, speeds), 64)) / speeds
    alike = np.array(sums_of(lengths, partition_by_tokens(lengths, 64), 64)) / speeds
    assert seconds.max() < 1.01 * lengths.sum() / speeds.sum() and alike.max() > 1.8 * seconds.max()
    assert (np.bincount(partition_by_tokens([0, 0, 0], 3, speeds=(1, 1, 0.9))) == 1).all(), "rows without tokens, too"


@settings(max_examples=40)
@given(st.integers(0, 200), st.integers(0, 200), SPEEDS)
def test_items_are_shared_out_by_speed_and_nobody_loses_what_it_holds(first: int, more: int, speeds: list[float]) -> None:
    held = fill_by_speed(first, speeds, np.zeros(len(speeds), dtype=np.int64))
    assert held.sum() == first and (np.abs(held - first * np.array(speeds) / sum(speeds)) <= 1).all()
    filled = fill_by_speed(first + more, speeds, held)
    assert filled.sum() == first + more and (filled >= held).all()
    parts = partition_by_tokens([7] * first, len(speeds), speeds=speeds, counts=held)
    assert np.bincount(parts, minlength=len(speeds)).tolist() == held.tolist()
    assert fill_by_speed(8, (1, 1, 0.1, 0.1), np.ones(4, dtype=np.int64)).tolist() == [3, 3, 1, 1]


def test_groups_stay_together() -> None:
    rng = random.Random(1)
    groups = [g for g in range(12) for _ in range(4)]
    rng.shuffle(groups)
    lengths = [rng.randint(1, 100) for _ in groups]
    parts = partition_by_tokens(lengths, 3, np.array(groups))
    assert np.bincount(parts).tolist() == [16, 16, 16]
    assert len({(group, part) for group, part in zip(groups, parts.tolist(), strict=True)}) == 12
    sums = sums_of(lengths, parts, 3)
    assert max(sums) <= 1.05 * sum(sums) / 3


@settings(max_examples=40)
@given(LENGTHS, st.integers(300, 900), st.integers(0, 7))
def test_micro_batches_keep_the_budget(lengths: list[int], budget: int, extra: int) -> None:
    bins = micro_batches_by_tokens(lengths, budget)
    forced = micro_batches_by_tokens(lengths, budget, len(bins) + extra)
    assert len(forced) == len(bins) + extra
    for result in (bins, forced):
        assert sorted(row for rows in result for row in rows) == list(range(len(lengths)))
        sums = [sum(lengths[i] for i in rows) for rows in result]
        assert max(sums, default=0) <= budget
        assert sums == sorted(sums, reverse=True)
    assert all(bins)
    assert all(forced[: min(len(forced), len(lengths))])
    assert len(bins) <= 2 * -(-sum(lengths) // budget) + 1


def test_micro_batches_by_count_and_what_is_refused() -> None:
    assert micro_batches_by_count([9] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert micro_batches_by_count([9] * 3, 2, 4) == [[0, 1], [2], [], []]
    assert micro_batches_by_count([], 2) == [] and micro_batches_by_tokens([], 2, 2) == [[], []]
    with pytest.raises(ValueError, match="ppo_max_token_len_per_gpu=10 is less than the 11 tokens of row 1"):
        micro_batches_by_tokens([3, 11], 10)
    with pytest.raises(ValueError, match=r"num_micro_batches=1 is too small: ppo_max_token_len_per_gpu=10 needs 2"):
        micro_batches_by_tokens([10, 10], 10, 1)
    with pytest.raises(ValueError, match="num_micro_batches=1 is too small: 5 rows by 2 need 3"):
        micro_batches_by_count([1] * 5, 2, 1)


def computed(parts: np.ndarray, lengths: np.ndarray, common: np.ndarray, groups: np.ndarray, num_parts: int) -> list[int]:
    """Tokens of each part, by hand."""
    held = [0] * num_parts
    for part, group in {*zip(parts.tolist(), groups.tolist(), strict=True)}:
        mine = (parts == part) & (groups == group)
        held[part] += int((lengths - common)[mine].sum() + common[mine][0])
    return held


def parts_of(bins: list[list[int]], number: int) -> np.ndarray:
    return np.array([next(i for i, rows in enumerate(bins) if row in rows) for row in range(number)], dtype=np.int64)


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), max_size=40)


@settings(max_examples=60)
@given(ROWS, st.integers(60, 120), st.booleans(), st.integers(0, 2), st.integers(0, 30))
def test_rows_are_cut_so_that_little_is_computed(
    rows: list[tuple[int, int]], budget: int, keep: bool, extra: int, prompt: int
) -> None:
    groups, lengths = (np.array([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
    lengths, common = lengths + prompt, np.full(len(rows), prompt)
    if keep:
        budget = max([budget, *(int(lengths[groups == group].sum()) for group in groups)])
    bins = cut_micro_batches(lengths, common, groups, budget, keep_groups=keep)
    parts = parts_of(bins, len(rows))
    assert sorted(itertools.chain(*bins)) == list(range(len(rows))) and all(bins)
    assert all(rows == sorted(rows) and lengths[rows].sum() <= budget for rows in bins)
    own = computed(parts, lengths, common, groups, len(bins))
    assert own == sorted(own, reverse=True), "those that compute most come first"
    if keep:
        assert all(len(np.unique(parts[groups == group])) == 1 for group in groups)
    else:
        apart = micro_batches_by_tokens(lengths.tolist(), budget)
        alone = sum(computed(parts_of(apart, len(rows)), lengths, common, groups, len(apart)))
        assert sum(own) + len(bins) * budget / 32 <= alone + len(apart) * budget / 32
    padded = cut_micro_batches(lengths, common, groups, budget, keep_groups=keep, number=len(bins) + extra)
    assert len(padded) == len(bins) + extra and sorted(itertools.chain(*padded)) == list(range(len(rows)))


def test_rows_of_a_group_come_together_where_they_fit() -> None:
    fours, fives, prompts = np.arange(8) % 2, np.full(8, 5), np.full(8, 3)
    assert cut_micro_batches(fives, prompts, fours, 20) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert cut_micro_batches(np.full(4, 9), np.full(4, 3), np.zeros(4), 20) == [[0, 2], [1, 3]]
    assert cut_micro_batches(fives, prompts, fours, 20, max_rows=3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert cut_micro_batches(fives, prompts, fours, 20, max_rows=5, keep_groups=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    none = np.zeros(0, dtype=np.int64)
    assert cut_micro_batches(none, none, none, 10) == [] and cut_micro_batches(none, none, none, 10, number=2) == [[], []]
    with pytest.raises(ValueError, match="20 tokens of group 0"):
        cut_micro_batches(fives, prompts, fours, 19, keep_groups=True)


def test_a_micro_batch_more_is_taken_where_it_saves_prompts() -> None:
    """A rank's rows in groups of 8: 1,024 + 512 tokens, so 10 of them in a budget; rows one by one share next to nothing."""
    lengths, common, groups = np.full(256, 1536), np.full(256, 1023), np.arange(256) // 8
    bins = cut_micro_batches(lengths, common, groups, 16384)
    assert [np.unique(groups[rows]).tolist() for rows in bins] == [[group] for group in range(32)]
    assert len(cut_micro_batches(lengths, common * 0, groups, 16384)) == 26
    # the ranks have agreed on more than rows one by one need, and on less than groups do
    assert len(cut_micro_batches(lengths, common, groups, 16384, number=28)) == 28


@settings(max_examples=60)
@given(ROWS.filter(len), st.integers(1, 5), st.integers(0, 50))
def test_dealing_by_what_is_computed_is_never_worse(rows: list[tuple[int, int]], num_parts: int, prompt: int) -> None:
    groups, lengths = np.array([group for group, _ in rows]), np.array([prompt + response for _, response in rows])
    common = np.full_like(lengths, prompt)
    parts = partition_with_prefixes(lengths, common, groups, num_parts)
    apart = partition_by_tokens(lengths, num_parts)
    largest = [max(computed(way, lengths, common, groups, num_parts)) for way in (parts, apart)]
    assert largest[0] <= largest[1]
    whole = all(len(np.unique(parts[groups == group])) == 1 for group in np.unique(groups))
    assert whole or np.array_equal(parts, apart)
    kept = partition_with_prefixes(lengths, common, groups, num_parts, keep_groups=True)
    assert all(len(np.unique(kept[groups == group])) == 1 for group in np.unique(groups))


def test_groups_stay_whole_where_their_prompts_are_long() -> None:
    groups, common, even = np.arange(32) // 8, np.full(32, 64), np.full(32, 128)
    long = partition_with_prefixes(even, common, groups, 4)
    assert computed(long, even, common, groups, 4) == [64 + 8 * 64] * 4
    # one prompt's responses are long: apart, as prompts save less than that
    lengths = np.where(groups == 0, 1064, 128)
    assert np.array_equal(partition_with_prefixes(lengths, common, groups, 4), partition_by_tokens(lengths, 4))
    # a part of three times the speed takes three of the four groups
    assert np.bincount(partition_with_prefixes(even, common, groups, 2, speeds=(3.0, 1.0))).tolist() == [24, 8]


@pytest.mark.parametrize("limits", [(4096, 0), (16384, 1)], ids=str)
def test_prompts_that_no_micro_batch_shares_do_not_keep_groups_together(limits: tuple[int, int]) -> None:
    """Else half of the parts would have nothing to do."""
    lengths, common, groups = np.full(1024, 3500), np.full(1024, 2900), np.arange(1024) // 16
    together, apart = ([partition_with_prefixes(lengths, common, groups, 128, limits=each)] for each in ((0, 0), limits))
    assert sorted(np.bincount(together[0], minlength=128).tolist()) == [0] * 64 + [16] * 64
    assert np.bincount(apart[0], minlength=128).tolist() == [8] * 128
