"""Which samples are shown, and what of them is whose."""

from __future__ import annotations

import pytest

from rlhf_spmd.telemetry.progress import equal_runs, pick_samples


@pytest.mark.parametrize(
    ("groups", "most", "picked"),
    [
        ("aaaabbbbcccc", 2, [0, 4]),
        ("aaaabbbbcccc", 3, [0, 4, 8]),
        ("aaaabbbbcccc", 4, [0, 1, 4, 8]),
        ("abab", 9, [0, 1, 2, 3]),
        ("aaa", 2, [0, 1]),
        ("", 2, []),
        ("ab", 0, []),
    ],
)
def test_every_group_comes_before_a_second_row_of_one(groups: str, most: int, picked: list[int]) -> None:
    assert pick_samples(groups, most) == picked


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([True, True, False, True], [(True, 0, 2), (False, 2, 3), (True, 3, 4)]),
        ([False], [(False, 0, 1)]),
        ([], []),
    ],
)
def test_stretches_of_a_mask(mask: list[bool], found: list[tuple[bool, int, int]]) -> None:
    assert equal_runs(mask) == found
