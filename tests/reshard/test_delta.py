"""What travels of a message of which some elements have changed: the smallest form, and every bit arrives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.reshard.delta import apply_encoded, differs, encode, encoded_bytes

DTYPES = torch.bfloat16, torch.float32, torch.float64


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_every_bit_arrives(numel: int, share: float, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    before, now = (torch.randn(numel, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    now = torch.where(torch.rand(numel, generator=draw) < share, now, before)
    now[seed % numel] = (0.0, -0.0, math.nan, math.inf)[seed % 4]
    changed = int(differs(now, before).sum())
    payload, held = encode(now, before, changed), before.clone()
    assert payload.dtype == torch.uint8 and len(payload) == encoded_bytes(numel, changed, dtype.itemsize)[1]
    apply_encoded(held, payload, changed)
    assert torch.equal(held.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_compared_and_not_values(dtype: torch.dtype) -> None:
    a = torch.tensor([0.0, math.nan, 1.0, -0.0], dtype=dtype)
    b = torch.tensor([-0.0, math.nan, 1.0, -0.0], dtype=dtype)
    assert differs(a, b).tolist() == [True, False, False, False]


def test_the_smallest_form_is_chosen() -> None:
    for itemsize in (2, 4, 8):
        whole = 1000 * itemsize
        assert encoded_bytes(1000, 0, itemsize) == ("list", 0)
        assert encoded_bytes(1000, 31, itemsize) == ("list", 31 * (4 + itemsize))
        assert encoded_bytes(1000, 32, itemsize) == ("mask", 125 + 32 * itemsize)
        assert encoded_bytes(1000, 1000, itemsize) == ("all", whole)
        assert all(
            encoded_bytes(1000, n, itemsize)[1] <= min(whole, 125 + n * itemsize, n * (4 + itemsize)) for n in range(1001)
        )
