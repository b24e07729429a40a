"""Calls on rows that are still being generated: when they run, what they get, and what becomes of chunks that nobody takes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from controllers import Toy, prompts
from ranks import run_ranks
from rlhf_spmd.controller import MICRO_DP, THREE_D, Controller, GroupShape, ResourcePool, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.world import World

NUM_CHUNKS = 3


def responses(batch: Batch) -> Batch:
    """Of row i: i % 5 + 1 tokens of value i."""
    return batch.with_fields(response_ids=ragged([torch.full((int(i) % 5 + 1,), int(i)) for i in batch.row_ids], torch.int64))


class Handing(Toy):
    """Generates group by group, hands out the first half, and does not go on before ``awaited`` were seen (``<role> <rank>``)."""

    @register(MICRO_DP, inputs=("prompt_ids",), outputs=("response_ids",), kind="generate", lengths_of="response_ids")
    def hand_out(self, batch: Batch, awaited: tuple[str, ...]) -> Batch:
        if self.controller.rollout_streamer is not None:
            self.controller.rollout_streamer.send(responses(batch.take(range(len(batch) // 2))))
            self.store.wait(list(awaited), timedelta(seconds=60))
        return responses(batch)

    def _lengths(self, batch: Batch, made: Batch | None, noted: list[Any]) -> dict[str, Any]:
        total = int(made["seen"].sum()) if made is not None and len(made) else 0
        return {"rows": batch.row_ids.tolist(), "total": total, "noted": noted}

    @register(
        THREE_D, inputs=("response_ids", "prompt_ids"), outputs=("seen",), split_groups=True, streams=True, report=_lengths
    )
    def see(self, batch: Batch) -> tuple[Batch, int]:
        """``seen``: tokens of prompt and response; noted: the rows of this run."""
        for ids, response in zip(batch.row_ids, batch["response_ids"].rows() if len(batch) else (), strict=True):
            assert response.tolist() == [int(ids)] * (int(ids) % 5 + 1), "a row came with another one's response"
        if len(batch):
            self.store.set(f"{self.name} {self.controller.rank}", "")
            batch = batch.with_fields(seen=batch["response_ids"].lengths + batch["prompt_ids"].lengths)
        return batch, len(batch)


def build(world: World, **roles: tuple[list[int], Layout]) -> tuple[Controller, dict[str, Any]]:
    controller = Controller(world.all, num_chunks=NUM_CHUNKS)
    store = torch.distributed.PrefixStore(f"chunks {sorted(roles)}", world.store)
    toys = {}
    for name, (ranks, layout) in roles.items():
        toys[name] = Handing(
            controller, name, ResourcePool(name, tuple(ranks)), GroupShape(layout, GenerationLayout(layout, 1, 1))
        )
        toys[name].store = store
    return controller, toys


def all_wait_together(world: World) -> tuple[list[Any], list[float], list[tuple[str, Any]]]:
    others = {"one": ([2, 3], Layout(dp=2)), "two": ([2, 3], Layout(tp=2)), "late": ([3], Layout())}
    controller, toys = build(world, maker=([0, 1], Layout(dp=2)), **others)
    rows = controller.source(prompts(6, 2))

    def script() -> list[Any]:
        awaited = tuple(f"{role} {rank}" for role, rank in (("one", 2), ("one", 3), ("two", 2), ("two", 3), ("late", 3)))
        made = rows.union(toys["maker"].hand_out(rows, awaited))
        seen = [toys[role].see(batch) for role, batch in (("one", made), ("two", made), ("late", made.firsts()))]
        first = made.union(seen[0].rename(seen="doubled"))
        return [*seen, toys["late"].rows(first)]

    calls = controller.run(script)
    values, totals = controller.get(*calls), controller.get_field(calls[0], "seen").tolist()
    spans = [(event.name, event.args.get("chunk")) for event in controller.timeline.events() if event.category == "compute"]
    return values, totals, spans


def test_calls_run_on_what_has_ended_while_the_rest_is_generated() -> None:
    """The generator itself waits for it: two roles on the same ranks, and one on some of them that takes other rows."""
    results = run_ranks(4, all_wait_together)
    for (one, two, late, rows), totals, _ in results:
        assert sorted(row for value in one for row in value["rows"]) == list(range(12)) == two[0]["rows"]
        assert late[0]["rows"] == list(range(0, 12, 2)) and rows == [list(range(12))]
        lengths = {i: i % 5 + 1 + i // 2 + 2 for i in range(12)}
        assert totals == list(lengths.values())
        assert sum(value["total"] for value in one) == two[0]["total"] == sum(totals)
        assert late[0]["total"] == sum(lengths[i] for i in range(0, 12, 2))
        assert [len(value["noted"]) for value in (*one, *two, *late)] == [NUM_CHUNKS] * 4
    names = [span for span in results[3][2] if span[1] is not None]
    assert names == [(f"{role}.see", number) for number in range(NUM_CHUNKS) for role in ("one", "two", "late")]


def not_as_foreseen(world: World) -> tuple[list[list[int]], int]:
    """The rows that the consumer got, where it took all rows, some of them, none since it was not called, and all again."""
    controller, toys = build(world, maker=([0, 1], Layout(dp=2)), seer=([2, 3], Layout(dp=2)))
    rows, taken = controller.source(prompts(6, 2)), []

    def script(which: str) -> list[Any]:
        """A trace takes all rows."""
        rollout = rows.union(toys["maker"].hand_out(rows, ()))
        if controller.any_rank(which == "none"):
            return []
        return [toys["seer"].see(rollout.take([3, 4, 11]) if controller.any_rank(which == "some") else rollout)]

    for which in ("all", "some", "none", "all"):
        calls = controller.run(script, which)
        taken.append(sorted(row for value in controller.get(calls[0])[0] for row in value["rows"]) if calls else [])
    return taken, len(controller.router._pushed)


def test_chunks_that_the_script_does_not_take_are_dropped() -> None:
    everything = list(range(12))
    assert run_ranks(4, not_as_foreseen) == [([everything, [3, 4, 11], [], everything], 0)] * 4
