"""Balancing of token counts: every row once, equal counts, close sums, the budget kept, the same answer each time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.data.balance import micro_batches_by_count, micro_batches_by_tokens, partition_by_tokens

LENGTHS = st.lists(st.integers(0, 300), max_size=60)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_partition_covers_with_equal_counts(lengths: list[int], num_parts: int) -> None:
    parts = partition_by_tokens(lengths, num_parts)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    counts = [len(part) for part in parts]
    assert len(parts) == num_parts
    assert max(counts) - min(counts) <= (1 if len(lengths) % num_parts else 0)
    assert all(part == sorted(part) for part in parts)
    assert parts == partition_by_tokens(list(lengths), num_parts)


def test_partition_is_close_to_even() -> None:
    rng = random.Random(0)
    lengths = [int(rng.expovariate(1 / 200)) + 16 for _ in range(256)]
    sums = [sum(lengths[i] for i in part) for part in partition_by_tokens(lengths, 8)]
    assert max(sums) - min(sums) <= 0.01 * max(sums)
    in_order = [sum(lengths[i : i + 32]) for i in range(0, 256, 32)]
    assert max(in_order) > 1.1 * max(sums)


def test_groups_stay_together() -> None:
    rng = random.Random(1)
    groups = [g for g in range(12) for _ in range(4)]
    rng.shuffle(groups)
    lengths = [rng.randint(1, 100) for _ in groups]
    parts = partition_by_tokens(lengths, 3, groups)
    assert [len(part) for part in parts] == [16, 16, 16]
    homes = [{groups[row] for row in part} for part in parts]
    assert sum(len(home) for home in homes) == 12
    with pytest.raises(ValueError, match="2 group ids for 3 rows"):
        partition_by_tokens([1, 2, 3], 1, [0, 0])


@settings(max_examples=60, deadline=None)
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


def test_micro_batches_refuse() -> None:
    with pytest.raises(ValueError, match="ppo_max_token_len_per_gpu=10 is less than the 11 tokens of row 1"):
        micro_batches_by_tokens([3, 11], 10)
    with pytest.raises(ValueError, match=r"num_micro_batches=1 is too small: ppo_max_token_len_per_gpu=10 needs 2"):
        micro_batches_by_tokens([10, 10], 10, 1)
    with pytest.raises(ValueError, match="num_micro_batches=1 is too small: 5 rows by 2 need 3"):
        micro_batches_by_count([1] * 5, 2, 1)


def test_micro_batches_by_count() -> None:
    assert micro_batches_by_count([9] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert micro_batches_by_count([9] * 3, 2, 4) == [[0, 1], [2], [], []]
    assert micro_batches_by_count([], 2) == []
    assert micro_batches_by_tokens([], 2, 2) == [[], []]
