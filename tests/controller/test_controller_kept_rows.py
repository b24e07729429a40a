"""The controller with rows of several calls and several scripts: loops, kept references, chains of generations, two generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controllers import build, prompts
from ranks import run_ranks
from rlhf_spmd.controller import Reference
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World

Pools = dict[str, tuple[list[int], Layout]]
DP2, TP2, PP2 = Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1)


def apart(actor: Layout, critic: Layout, **more: tuple[list[int], Layout]) -> Pools:
    return {"actor": ([0, 1], actor), "critic": ([2, 3], critic), **more}


def rows_of(updates: list[list[list[int]]]) -> list[int]:
    """All rows of an update's members, which each return their mini-batches."""
    return sorted(row for member in updates for mini_batch in member for row in mini_batch)


def second_round(world: World, pools: Pools) -> Any:
    controller, toys = build(world, **pools)
    traced: list[bool] = []

    def script(rows: Reference) -> list[Reference]:
        """Fills up in one round when it is traced, and in two when it runs: the first one's rows go elsewhere than foreseen."""
        traced.append(True)
        parts = []
        for number in range(len(traced)):
            part = rows.copy(number) if number else rows
            parts.append(part.union(toys["actor"].generate(part)))
        both = parts[0].concat(*parts[1:])
        both = both.union(toys["critic"].double(both))
        return [toys["critic"].rows(both), toys["actor"].update(both, mini_batch_size=2)]

    return controller.get(*controller.run(script, controller.source(prompts(4, 2))))


def keeps(world: World, pools: Pools, doubles_at_once: bool) -> Any:
    controller, toys = build(world, **pools)
    kept: dict[str, Reference] = {}

    def first(rows: Reference) -> None:
        kept["rows"] = rows.union(toys["actor"].generate(rows))
        if doubles_at_once:
            kept["rows"] = kept["rows"].union(toys["critic"].double(kept["rows"]))

    controller.run(first, controller.source(prompts(8, 2)))
    rows = kept["rows"]

    def later() -> list[Reference]:
        doubled = rows if doubles_at_once else rows.union(toys["critic"].double(rows))
        return [toys["actor"].rows(doubled), toys["actor"].update(doubled, mini_batch_size=4)]

    return controller.get(*controller.run(later))


def chain(world: World, pools: Pools) -> Any:
    controller, toys = build(world, **pools)

    def script(rows: Reference) -> list[Reference]:
        """Each generation answers the one before; a row's place follows from the token counts of all of them."""
        for role in ("actor", "critic", "actor"):
            rows = toys[role].generate(rows).select("response_ids").rename(response_ids="prompt_ids")
        rows = rows.rename(prompt_ids="response_ids")
        return [toys["third"].rows(rows), toys["third"].update(rows.union(toys["third"].double(rows), first(rows)))]

    def first(rows: Reference) -> Reference:
        return rows.select("response_ids").rename(response_ids="prompt_ids")

    return controller.get(*controller.run(script, controller.source(prompts(8, 2))))


def seen_one_of_two(world: World, pools: Pools) -> Any:
    controller, toys = build(world, **pools)

    def script(rows: Reference) -> list[Reference]:
        sampled, other = rows, rows.firsts().copy()
        sampled = sampled.union(toys["actor"].generate(sampled))
        other = other.union(toys["actor"].generate(other))
        judged = other.union(toys["critic"].double(other))
        both = sampled.union(toys["actor"].double(sampled)).concat(judged)
        return [toys["critic"].rows(other), toys["critic"].rows(both), toys["actor"].update(both.take(sampled))]

    return controller.get(*controller.run(script, controller.source(prompts(8, 2))))


def same_on_all(function: Callable[..., Any], *args: Any) -> Any:
    results = run_ranks(4, function, *args)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(
    "pools",
    [
        apart(PP2, DP2),
        {"actor": ([0, 1, 2], Layout(1, 1, 3)), "critic": ([2, 3], DP2)},
    ],
)
def test_a_second_round_that_the_trace_did_not_foresee(pools: Pools) -> None:
    rows, updates = same_on_all(second_round, pools)
    assert len(rows_of(updates)) == len(set(rows_of(updates))) == 16 == sum(map(len, rows))
    assert sum(row < 8 for row in rows_of(updates)) == 8, "half of them are copies"


@pytest.mark.parametrize(
    ("pools", "doubles_at_once"),
    [(apart(DP2, TP2), False), (apart(DP2, PP2), True), (apart(TP2, DP2), False), (apart(TP2, DP2), True)],
)
def test_rows_of_an_earlier_script(pools: Pools, doubles_at_once: bool) -> None:
    """Ranks that had no use for the token counts when the rows were made, and need them now: members, and those that send."""
    rows, updates = same_on_all(keeps, pools, doubles_at_once)
    assert sorted(row for member in rows for row in member) == rows_of(updates) == list(range(16))


@pytest.mark.parametrize("third", [[2, 3], [0, 3]])
def test_a_chain_of_generations(third: list[int]) -> None:
    pools = {"actor": ([0, 1], DP2), "critic": ([1, 2], DP2), "third": (third, DP2)}
    rows, updates = same_on_all(chain, pools)
    assert sorted(row for member in rows for row in member) == rows_of(updates) == list(range(16))


@pytest.mark.parametrize("pools", [apart(DP2, DP2), {"actor": ([0, 1, 2], Layout(1, 1, 3)), "critic": ([3], Layout())}])
def test_a_role_that_sees_one_of_two_generations(pools: Pools) -> None:
    one, both, updates = same_on_all(seen_one_of_two, pools)
    assert [sum(map(len, members)) for members in (one, both)] == [8, 24]
    assert rows_of(updates) == list(range(16))


def decided_rows(world: World, easy: int) -> Any:
    controller, toys = build(world, actor=([0], Layout()), critic=([1], Layout()))

    def script(first: Reference, second: Reference) -> Reference:
        rows = second if controller.any_rank(True) else first  # a trace takes the first
        return toys["critic"].rows(rows.union(toys["actor"].generate(rows)))

    batch = prompts(8, 1)
    return controller.get(
        controller.run(script, controller.source(batch.take(range(easy))), controller.source(batch.take([4, 5, 6, 7])))
    )


@pytest.mark.parametrize("easy", [4, 8])
def test_a_branch_that_takes_other_rows_than_the_trace(easy: int) -> None:
    assert run_ranks(2, decided_rows, easy)[1] == [[[4, 5, 6, 7]]]
