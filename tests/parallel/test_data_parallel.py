"""Gradient sums in buckets, who answers for which part of a model, and the norm of the whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.parallel import data_parallel
from rlhf_spmd.parallel.boxes import Box, ParamShard, shard_rows, zero_rows
from rlhf_spmd.parallel.data_parallel import owned_boxes, partial_boxes, squared_norm, sum_in_buckets


def whole(name: str, *shape: int, replicated: bool = False) -> ParamShard:
    zeros = (0,) * len(shape)
    return ParamShard(shape, (Box(name, shape, zeros, shape, zeros),), replicated_on_tp=replicated)


def kv_rank(tp_rank: int) -> dict[str, ParamShard]:
    """q rows of this rank's own, over one K head that all ranks share; a norm that is replicated."""
    q = Box("q", (8, 3), (2 * tp_rank, 0), (2, 3), (0, 0))
    k = Box("k", (2, 3), (0, 0), (2, 3), (2, 0))
    return {"qkv": ParamShard((4, 3), (q, k)), "norm": whole("norm", 3, replicated=True)}


def test_only_shared_heads_are_partial() -> None:
    plans = [kv_rank(rank) for rank in range(2)]
    partial = partial_boxes(plans[0], plans[1:])
    assert [box.name for box in partial["qkv"].boxes] == ["k"] and list(partial) == ["qkv"]


@pytest.mark.parametrize("dp", [1, 3, 5])
def test_the_norm_counts_owned_rows_once(dp: int) -> None:
    plans = [kv_rank(rank) for rank in range(4)]
    whole_grads = {
        name: torch.randn(shape, dtype=torch.float64) for name, shape in {"q": (8, 3), "k": (2, 3), "norm": (3,)}.items()
    }
    total = torch.zeros((), dtype=torch.float64)
    for rank, plan in enumerate(plans):
        owned = owned_boxes(plan, plans[:rank])
        for dp_rank in range(dp):
            rows = {name: zero_rows(shard.shape[0], dp_rank, dp) for name, shard in plan.items()}
            grads = {}
            for name, shard in plan.items():
                local = torch.empty(shard.shape, dtype=torch.float64)
                for box in shard.boxes:
                    local[box.local_slices] = whole_grads[box.name][box.global_slices]
                grads[name] = local[slice(*rows[name])]
            total += squared_norm(grads, {name: shard_rows(shard, *rows[name]) for name, shard in owned.items()})
    expected = torch.cat([grad.flatten() for grad in whole_grads.values()]).square().sum()
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)


SHAPES: dict[str, tuple[int, ...]] = {"a": (2, 2), "b": (3,), "large": (3, 4), "c": (1,), "d": (4,), "none": (0, 2)}


def sum_small_buckets(world: Any) -> tuple[list[tuple[float, float]], int]:
    grads = {name: torch.full(shape, float(world.rank + i)) for i, (name, shape) in enumerate(SHAPES.items())}
    with mock.patch.object(data_parallel, "BUCKET_ELEMENTS", 5):
        sum_in_buckets(grads, world.all, "test")
        num_buckets = len(list(data_parallel.buckets({name: grad.numel() for name, grad in grads.items()})))
    return [(float(grad.min()), float(grad.max())) for grad in grads.values() if grad.numel()], num_buckets


def test_sums_do_not_depend_on_the_buckets() -> None:
    for ends, num_buckets in run_ranks(2, sum_small_buckets):
        assert ends == [(1.0 + 2 * i, 1.0 + 2 * i) for i in range(5)]
        assert num_buckets == 4
