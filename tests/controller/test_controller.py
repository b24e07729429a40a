"""The controller on real ranks with roles that compute little: who gets which rows, what moves, what overlaps, what diverges."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from controllers import Toy, build, prompts
from ranks import run_ranks
from rlhf_spmd.controller import MICRO_DP, THREE_D, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World


def ppo_like(world: World, pools: dict[str, tuple[list[int], Layout]]) -> Any:
    controller, toys = build(world, **pools)

    def script(rows: Any) -> Any:
        batch = rows.union(toys["actor"].generate(rows))
        batch = batch.union(toys["critic"].double(batch))
        return [
            toys["critic"].update(batch, mini_batch_size=4),
            toys["actor"].rows(batch),
            toys["actor"].update(batch, mini_batch_size=4),
        ]

    before = RECORDER.received["batch"]
    calls = controller.run(script, controller.source(prompts(8, 2)))
    received = RECORDER.received["batch"] - before
    graph = controller.trace(script, controller.source(prompts(8, 2)))
    return controller.get(*calls), received, graph.to_json()


POOLS = {
    "colocated": {"actor": ([0, 1, 2, 3], Layout(1, 2, 2)), "critic": ([0, 1, 2, 3], Layout(2, 1, 2))},
    "split": {"actor": ([0, 1], Layout(1, 2, 1)), "critic": ([2, 3], Layout(1, 1, 2))},
    "overlapping": {"actor": ([0, 1, 2], Layout(1, 1, 3)), "critic": ([2, 3], Layout(1, 2, 1))},
    "one rank without a role": {"actor": ([1, 2], Layout(1, 1, 2)), "critic": ([3], Layout())},
}


@pytest.mark.parametrize("placement", POOLS)
def test_every_row_reaches_every_consumer_once(placement: str) -> None:
    results = run_ranks(4, ppo_like, POOLS[placement])
    assert all(result[0] == results[0][0] for result in results), "get() must give every rank the same"
    (critic_updates, actor_rows, actor_updates), received, graph = results[0]
    for updates in (critic_updates, actor_updates):
        first, second = (sorted(row for member in updates for row in member[mini_batch]) for mini_batch in (0, 1))
        assert len(first) == len(second) == 8 and sorted(first + second) == list(range(16))
        assert {row // 2 for row in first}.isdisjoint(row // 2 for row in second), "mini-batches are of whole groups"
        assert first != list(range(8)), "groups are shuffled"
    assert sorted(row for member in actor_rows for row in member) == list(range(16))
    for member in actor_rows:  # groups of two rows stay together
        assert sorted(member) == sorted({2 * (row // 2) + j for row in member for j in range(2)})
    if placement == "one rank without a role":
        assert received == 0 < results[3][1], "a rank that is neither producer nor consumer sees no byte"
    calls = ["actor.generate", "critic.double", "critic.update", "actor.rows", "actor.update"]
    assert [node["call"] for node in graph["nodes"]] == calls
    edges = {(edge["from"], edge["to"]): edge["fields"] for edge in graph["edges"]}
    assert edges[0, 1] == ["response_ids"] and edges[1, 4] == ["doubled"]
    assert all("secret" not in fields for fields in edges.values()), "a field that nobody declares must not move"


def protocols(world: World) -> Any:
    controller, toys = build(world, a=([0, 1, 2, 3], Layout(2, 1, 2)), b=([1, 2], Layout(2, 1, 1)))
    a, b = toys["a"], toys["b"]
    rows = controller.source(prompts(8, 1))
    echoed = a.dp(rows)
    calls = [
        a.everyone("r"),
        a.own([1, 2, 3, 4]),
        a.first(),
        b.first(),
        a.stages(),
        echoed,
        b.pp_as_dp(echoed),
        a.backwards(rows),
    ]
    result = controller.get(*calls)
    controller.settle()
    return result, controller.any_rank(world.rank == 3), controller.any_rank(False)


def test_all_protocols_and_one_of_the_users_own() -> None:
    results = run_ranks(4, protocols)
    everyone, own, first, first_b, stages, dp, pp_as_dp, backwards = results[2][0]
    assert everyone == ["r0", "r1", "r2", "r3"]
    assert own == [10, 20, 30, 40]
    assert first == [0] and first_b == [1]
    assert stages == [0, 2]  # (pp 0, dp 0), (pp 1, dp 0)
    assert sorted(row for part in dp for row in part) == list(range(8)) and all(len(part) == 2 for part in dp)
    assert sorted(row for part in pp_as_dp for row in part) == list(range(8)) and len(pp_as_dp) == 2
    assert [rank for rank, _ in backwards] == [3, 2, 1, 0]
    assert [result[1:] for result in results] == [(True, False)] * 4


def overlap(world: World) -> list[tuple[int, int]]:
    controller, toys = build(world, a=([0], Layout()), b=([1], Layout()))
    for toy in toys.values():
        toy.store = world.store

    def script(rows: Any) -> Any:
        first = toys["a"].hold(rows, "", "overlap/made")
        toys["a"].hold(rows, "overlap/consumed", "overlap/free")  # the producer is busy until the consumer has had what it made
        toys["b"].hold(rows.union(first), "overlap/made", "overlap/consumed")

    controller.run(script, controller.source(prompts(4, 1)))
    return [(e.start_ns, e.end_ns) for e in controller.timeline.events() if e.category == "compute" and e.end_ns]


def test_a_consumer_does_not_wait_for_a_producer_that_is_busy_with_its_next_call() -> None:
    (_, (_, busy_until)), ((start, _),) = run_ranks(2, overlap)
    assert start < busy_until


class Reuses(Toy):
    """Returns the same memory from each call, with other values."""

    @register(THREE_D, inputs=("prompt_ids",), outputs=("values",))
    def fill(self, batch: Batch, number: float) -> Batch:
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(len(batch), 1 << 18)  # 8 MiB
        return batch.with_fields(values=self.buffer.fill_(number))

    @register(THREE_D, inputs=("values",))
    def mean(self, batch: Batch, patience: float) -> float:
        time.sleep(patience)
        return float(batch["values"].mean())


def memory_used_again(world: World) -> Any:
    controller, toys = build(world, Reuses, a=([0], Layout()), b=([1], Layout()))

    def script(rows: Any) -> Any:
        first = rows.union(toys["a"].fill(rows, 1.0))
        means = [toys["b"].mean(first, 0.5)]
        second = rows.union(toys["a"].fill(rows, 2.0))
        return controller.get(*means, toys["b"].mean(second, 0.0))

    return controller.run(script, controller.source(prompts(8, 1)))


def test_what_was_sent_may_be_written_over() -> None:
    assert run_ranks(2, memory_used_again)[0] == [[1.0], [2.0]]


class Backwards(Toy):
    @register(MICRO_DP, inputs=("prompt_ids",), outputs=("response_ids",), kind="generate", lengths_of="response_ids")
    def generate(self, batch: Batch) -> Batch:
        turned = batch.take(torch.arange(len(batch)).flip(0))
        return turned.with_fields(response_ids=ragged([[int(i)] for i in turned.row_ids], torch.int64))


def equal_ids(world: World, consumer: list[int]) -> Any:
    """Rows of the trace and those of the run have the same ids, but stand for other prompts in other groups."""
    controller, toys = build(world, a=([0, 1], Layout(1, 1, 2)), b=(consumer, Layout(1, 1, 2)))
    whole, half = controller.source(prompts(8, 1)), controller.source(prompts(4, 1))

    def script() -> Any:
        rows = whole.take(half).repeat(2) if controller.any_rank(True) else whole
        return toys["b"].rows(rows.union(toys["a"].generate(rows)))

    return controller.get(controller.run(script))


def test_rows_with_the_ids_of_others_are_not_taken_for_them() -> None:
    (members,) = run_ranks(4, equal_ids, [2, 3])[0]
    assert sorted(row for member in members for row in member) == list(range(8))
    for member in members:  # groups of two stay together, which those of the trace were not
        assert {row ^ 1 for row in member} == set(member)


def branch_not_foreseen(world: World) -> Any:
    controller, toys = build(world, a=([0], Layout()), b=([1], Layout(1, 1, 1)))
    toy = {"traced": False}

    def script(rows: Any) -> Any:
        made = rows.union(toys["a"].generate(rows))
        made = made.union(toys["a"].double(made))
        take_it = not toy["traced"]
        toy["traced"] = True
        return toys["b"].update(made) if take_it else toys["b"].rows(made)

    call = controller.run(script, controller.source(prompts(4, 1)))
    return controller.get(call)


def test_what_was_pushed_to_a_branch_not_taken_is_drained() -> None:
    assert run_ranks(2, branch_not_foreseen)[0][0][0] == [0, 1, 2, 3]


def refusals(world: World) -> list[str]:
    controller, toys = build(world, Backwards, a=([0, 1], Layout(1, 1, 2)))
    a = toys["a"]

    def no_rows_left(rows: Any) -> Any:
        tokens = rows.select("prompt_ids")
        rows = rows.union(tokens.rename(prompt_ids="response_ids"), tokens.rename(prompt_ids="doubled"))
        return a.update(rows.take(controller.get_field(a.count(rows), "count").numpy() == 1))

    messages = []
    for script in (a.rows, lambda rows: a.rows(a.generate(rows)), no_rows_left):
        with pytest.raises((AssertionError, ValueError)) as refused:
            controller.get(controller.run(script, controller.source(prompts(8, 1))))
        messages.append(str(refused.value))
    return messages


def test_what_is_refused() -> None:
    for absent_field, other_order, no_rows in run_ranks(2, refusals):
        assert absent_field.startswith("a.rows needs field 'response_ids'")
        assert other_order.startswith("a.generate returned other rows than it got, or in another order")
        assert no_rows.startswith("a.update: no rows to train on")
