"""What an update learns from: mini-batches of whole groups, the same in every layout; rows dealt by all of their tokens; groups kept
together, also where a replica has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overrides import layout
from ranks import run_ranks
from rlhf_spmd.algorithms.sft import likelihood
from rlhf_spmd.controller.rows import PartitionSpec, RowIndex
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.world import World
from rlhf_spmd.training.recorder import merge_values
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import Objective, sequence_lengths
from role_workers import batch_of, build


def mini_batches(rows: RowIndex, spec: PartitionSpec, tokens: np.ndarray) -> list[set[int]]:
    """Row ids of each mini-batch of each epoch, from what all parts have of it."""
    placement = rows.partition(spec, "tokens", lambda: np.stack([tokens, np.zeros_like(tokens)]))
    parts = [placement.part(index) for index in range(spec.num_parts)]
    group_of = dict(zip(rows.row_ids.tolist(), rows.group_ids.tolist(), strict=True))
    updates = []
    for number in range(spec.num_mini_batches * spec.epochs):
        of_parts = [part.row_ids[part.updates[number]].tolist() for part in parts]
        update = set().union(*of_parts)
        assert sum(map(len, of_parts)) == len(update), "a row is on two parts"
        groups = [{group_of[row] for row in part} for part in of_parts]
        assert not spec.keep_groups or sum(map(len, groups)) == len(set().union(*groups)), "a group is on two parts"
        updates.append(update)
    return updates


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(0, 2**40))
def test_mini_batches_have_the_same_rows_in_every_layout(
    groups: int, samples: int, chunks: int, epochs: int, keep_groups: bool, seed: int
) -> None:
    """Whole groups, every row once in an epoch, as many groups in each or one more."""
    chunks = min(chunks, groups)
    row_ids = np.arange(groups * samples) + 7
    group_ids = 100 * (np.arange(groups * samples) // samples)
    tokens = np.random.default_rng(seed).integers(1, 100, len(row_ids))
    specs = [PartitionSpec(parts, keep_groups, chunks, epochs, seed) for parts in (1, 2, 3, 8)]
    one, *others = (mini_batches(RowIndex(row_ids, group_ids), spec, tokens) for spec in specs)
    assert all(other == one for other in others)
    for epoch in range(epochs):
        of_epoch = one[epoch * chunks : (epoch + 1) * chunks]
        assert set().union(*of_epoch) == set(row_ids.tolist()) and sum(map(len, of_epoch)) == len(row_ids)
        sizes = [len({(row - 7) // samples for row in mini_batch}) for mini_batch in of_epoch]
        assert [samples * size for size in sizes] == [len(mini_batch) for mini_batch in of_epoch], (
            "a group is in two mini-batches"
        )
        assert max(sizes) - min(sizes) <= 1


def test_each_epoch_groups_anew_from_the_seed() -> None:
    rows = RowIndex(np.arange(32), np.arange(32) // 2)

    def epochs(seed: int) -> list[tuple[frozenset[int], ...]]:
        updates = mini_batches(rows, PartitionSpec(2, True, 4, 2, seed), np.ones(32, dtype=np.int64))
        return [tuple(map(frozenset, updates[at : at + 4])) for at in (0, 4)]

    first, second = epochs(0)
    assert set(first) != set(second), "another grouping, not only another order"
    assert epochs(0) == [first, second] and epochs(1)[0] != first
    assert first[0] != frozenset(range(8)), "not the order of the data"
    later = RowIndex(np.arange(32, 64), np.arange(32, 64) // 2)
    moved = mini_batches(later, PartitionSpec(2, True, 4, 1, 0), np.ones(32, dtype=np.int64))
    assert [{row - 32 for row in mini_batch} for mini_batch in moved] != [set(mini_batch) for mini_batch in first], (
        "nor the same places in every step"
    )


# -- one update on ranks


def tokens_per_replica(world: World) -> int:
    """Of an SFT step whose long prompts have short responses."""
    seen: list[int] = []
    micro_batches = ModelWorker.micro_batches

    def watched(self: ModelWorker, batch: Batch, *args: Any) -> Any:
        seen.append(sum(sequence_lengths(batch)))
        return micro_batches(self, batch, *args)

    controller, models = build(world)
    ModelWorker.micro_batches = watched  # type: ignore[method-assign]
    try:
        rows = controller.source(batch_of([(50, 2), (2, 12), (40, 2), (3, 10), (45, 2), (2, 9), (38, 2), (2, 8)]))
        controller.run(lambda: models.actor.update(rows, likelihood("token-mean")))
    finally:
        ModelWorker.micro_batches = micro_batches  # type: ignore[method-assign]
    return sum(seen)


def test_updates_are_balanced_by_prompts_and_responses() -> None:
    tokens = run_ranks(2, tokens_per_replica)
    assert sum(tokens) == 229 and max(tokens) < 1.05 * sum(tokens) / 2, tokens


def log_prob_difference(world: World) -> float:
    """Of a long and a short row, each on a replica of its own if there are two, from a rollout that says 0 of every token."""
    controller, models = build(world, "models.actor.dtype=float64")
    batch = batch_of([(3, 30), (3, 2)])
    zeros = ragged([torch.zeros(n, dtype=torch.float64) for n in batch["response_ids"].lengths.tolist()])
    rows = controller.source(Batch(batch.row_ids, batch.group_ids, {**batch.fields, "rollout_log_probs": zeros}))
    call = controller.run(lambda: models.actor.compute_log_prob(rows))
    return merge_values(controller.get(call))[0]["rollout/log_prob_diff_mean"]


def test_a_mean_over_tokens_is_none_of_replicas_means() -> None:
    one, (other, _) = run_ranks(1, log_prob_difference)[0], run_ranks(2, log_prob_difference)
    assert other == pytest.approx(one, rel=1e-12) and one > 0.1


def update_unevenly(world: World, where: tuple[str, ...]) -> tuple[dict[str, float], int]:
    controller, models = build(world, "models.actor.dtype=float64", "models.actor.optim.eps=1e-3", *where)
    rows = controller.source(batch_of([(3, 5), (7, 2), (2, 9), (6, 6), (4, 4), (5, 3), (9, 1), (1, 12)]))
    report = controller.run(lambda: models.actor.update(rows, likelihood("token-mean"), mini_batch_size=3, epochs=2))
    values, progress = (values_of_ranks[0] for values_of_ranks in controller.get(report, models.actor.progress()))
    return values, progress["optimizer_steps"]


def test_a_mini_batch_size_that_does_not_divide_the_groups() -> None:
    """8 in mini-batches of 3: three optimizer steps in each of two epochs, the same on every layout."""
    one, steps = run_ranks(1, update_unevenly, ())[0]
    assert steps == 6 and one["actor/loss"] > 0
    for where in (layout("actor", dp=4, zero=2), layout("actor", dp=2, tp=2)):
        other, steps = run_ranks(4, update_unevenly, where)[0]
        assert steps == 6
        for key in ("actor/loss", "actor/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-10), (where, key)


def update_pairs(world: World) -> tuple[dict[str, float], list[list[int]]]:
    """One optimizer step on 3 groups of 2 rows, by a loss that compares the rows of a group."""
    seen: list[list[int]] = []

    def loss(fields: dict[str, Any], rows: Any, totals: Any) -> Any:
        seen.append(rows.group_ids.tolist())
        sums = torch.zeros(len(rows), dtype=fields["log_probs"].dtype).index_add_(
            0, torch.repeat_interleave(torch.arange(len(rows)), rows.lengths), fields["log_probs"]
        )
        same = rows.group_ids[:, None] == rows.group_ids[None, :]
        value = (sums[:, None] - sums[None, :]).square().mul(same).sum() / totals.rows
        return value, {"actor/apart": value.detach().double()}

    controller, models = build(world, "models.actor.dtype=float64", f"models.actor.layout.dp={world.size}")
    rows = controller.source(batch_of([(3, 5), (7, 2), (2, 9), (6, 6), (4, 4), (5, 3)], group_size=2))
    report = controller.run(lambda: models.actor.update(rows, Objective(loss, keep_groups=True)))
    return controller.get(report)[0][0], [groups for groups in seen if groups]


def test_groups_are_kept_together_where_a_replica_has_none() -> None:
    """3 groups on 4 replicas, of which one has no rows: the loss and the gradient of one rank."""
    ((one, _),) = run_ranks(1, update_pairs)
    results = run_ranks(4, update_pairs)
    assert sorted(len(groups) for _, groups in results) == [0, 1, 1, 1]
    assert all(micro_batch[0] == micro_batch[1] for _, groups in results for micro_batch in groups)
    for key in ("actor/apart", "actor/grad_norm"):
        assert results[0][0][key] == pytest.approx(one[key], rel=1e-12) and one[key] > 0
