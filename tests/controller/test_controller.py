"""The controller on real ranks with roles that compute little: who gets which rows, what moves, what overlaps, what diverges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from controllers import build, prompts
from ranks import run_ranks
from rlhf_spmd.controller.transport import LARGE, MAX_PARTS, Transport
from rlhf_spmd.data.batch import Batch, Field, Ragged, pack_in_pieces, ragged, unpack
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World


def ppo_like(world: World, pools: dict[str, tuple[list[int], Layout]]) -> Any:
    controller, toys = build(world, **pools)
    seen = {}

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
    seen["received"] = RECORDER.received["batch"] - before
    graph = controller.trace(script, controller.source(prompts(8, 2)))
    return controller.get(*calls) if calls else None, seen, graph.to_json()


POOLS = {
    "colocated": {"actor": ([0, 1, 2, 3], Layout(1, 2, 2)), "critic": ([0, 1, 2, 3], Layout(2, 1, 2))},
    "split": {"actor": ([0, 1], Layout(1, 2, 1)), "critic": ([2, 3], Layout(1, 1, 2))},
    "overlapping": {"actor": ([0, 1, 2], Layout(1, 1, 3)), "critic": ([2, 3], Layout(1, 2, 1))},
}


@pytest.mark.parametrize("placement", POOLS)
def test_every_row_reaches_every_consumer_once(placement: str) -> None:
    results = run_ranks(4, ppo_like, POOLS[placement])
    assert all(result[0] == results[0][0] for result in results), "get() must give every rank the same"
    critic_updates, actor_rows, actor_updates = results[0][0]
    for updates in (critic_updates, actor_updates):
        first, second = (sorted(row for member in updates for row in member[mini_batch]) for mini_batch in (0, 1))
        assert len(first) == len(second) == 8 and sorted(first + second) == list(range(16))
        assert {row // 2 for row in first}.isdisjoint(row // 2 for row in second), "mini-batches are of whole groups"
        assert first != list(range(8)), "groups are shuffled"
    assert sorted(row for member in actor_rows for row in member) == list(range(16))
    for member in actor_rows:  # groups of two rows stay together
        assert sorted(member) == sorted({2 * (row // 2) + j for row in member for j in range(2)})


def test_a_rank_that_is_neither_producer_nor_consumer_sees_no_byte() -> None:
    pools = {"actor": ([1, 2], Layout(1, 1, 2)), "critic": ([3], Layout())}
    results = run_ranks(4, ppo_like, pools)
    assert results[0][1]["received"] == 0
    assert results[3][1]["received"] > 0


def test_the_trace_is_the_dataflow_graph() -> None:
    graph = run_ranks(4, ppo_like, POOLS["split"])[0][2]
    assert [node["call"] for node in graph["nodes"]] == [
        "actor.generate",
        "critic.double",
        "critic.update",
        "actor.rows",
        "actor.update",
    ]
    edges = {(edge["from"], edge["to"]): edge["fields"] for edge in graph["edges"]}
    assert edges[0, 1] == ["response_ids"]
    assert edges[1, 4] == ["doubled"]
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
    return result, controller.decide(world.rank == 3), controller.decide(False)


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


def fewer_groups_than_replicas(world: World) -> Any:
    controller, toys = build(world, a=([0, 1], Layout(1, 1, 2)), b=([0, 1], Layout(1, 1, 2)))

    def script(rows: Any) -> Any:
        batch = rows.union(toys["a"].generate(rows))
        return toys["b"].rows(batch.union(toys["b"].double(batch)))

    return controller.get(controller.run(script, controller.source(prompts(1, 2))))


def test_a_replica_without_rows_takes_part() -> None:
    (rows,) = run_ranks(2, fewer_groups_than_replicas)[0]
    assert sorted(row for member in rows for row in member) == [0, 1]


def large_messages(world: World, num_fields: int) -> Any:
    """Fields above and below the size from which they are sent as they lie, one of them of no contiguous memory."""
    length = LARGE // 32
    values = torch.arange(num_fields * 8 * (length + 3), dtype=torch.float32).view(num_fields, 8, length + 3)
    fields: dict[str, Field] = {f"large{i}": values[i, :, : length + 3 - i % 2] for i in range(num_fields)}
    fields |= {"small": torch.arange(8), "tokens": ragged([list(range(i)) for i in range(8)], torch.int64)}
    batch = Batch(torch.arange(8), torch.arange(8) // 2, fields)
    transport = Transport(world.all)
    if world.rank == 0:
        pieces = pack_in_pieces(batch)
        transport.send(pieces, [1, 2], 5, 6, "a call")
        under_way = {tensor.data_ptr(): tensor.nbytes for _, tensor in transport._pending}
        transport.finish()
        return sum(under_way.values())
    before = RECORDER.received["batch"]
    (payload,) = transport.receive([0], 5, 6, "a call")
    got = unpack(payload)
    for name, field in batch.fields.items():
        mine, theirs = (x.values if isinstance(x, Ragged) else x for x in (field, got[name]))
        assert torch.equal(mine, theirs), name
    return RECORDER.received["batch"] - before - len(payload)


@pytest.mark.parametrize("num_fields", [0, 1, MAX_PARTS, 2 * MAX_PARTS])
def test_large_fields_arrive_as_they_were(num_fields: int) -> None:
    under_way, *beside = run_ranks(3, large_messages, num_fields)
    assert beside == [8 * (3 + MAX_PARTS)] * 2, "the payload and one header"
    assert under_way < LARGE * (num_fields + 1.5), "the receivers of a message have one copy in common"


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


def test_missing_field_is_named() -> None:
    with pytest.raises(AssertionError, match=r"a\.rows needs field 'response_ids'"):
        run_ranks(2, missing_field)


def missing_field(world: World) -> None:
    controller, toys = build(world, a=([0, 1], Layout(1, 1, 2)))
    toys["a"].rows(controller.source(prompts(2, 1)))
