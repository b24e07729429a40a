"""In every layout the rows of one rank, bit for bit where no sum is split; stages that work at the same time; rows that move."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks
from generators import (
    RULES,
    SMALL,
    LastDigits,
    alone,
    assert_same,
    generate_in_pieces,
    load,
    num_unequal,
    ragged_requests,
    with_overrides,
)
from overrides import layout as layout_of
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, GenerationStats, Generator, Request, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import partition_groups
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from tiers import tiers

TP_TOLERANCE = 2e-5  # sums over tp are rounded in another order
STOPPING = SamplingConfig(
    temperature=0.8, allowed_token_ids=[2, 5, 6, 7, 15, 27], stop=["757"], stop_token_ids=[15], logprobs=2
)
PENALISED = SamplingConfig(temperature=0.9, repetition_penalty=1.2, min_response_length=3)
CASES: dict[str, tuple[SamplingConfig, dict[str, Any]]] = {  # name -> sampling, generation settings
    "plain": (SamplingConfig(temperature=0.9), {}),
    "preemption": (PENALISED, {"num_pages": 54, "max_num_seqs": 18}),
    "chunked prefill": (PENALISED, {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "stops": (STOPPING, {}),
    "whole prompts": (PENALISED, {"enable_chunked_prefill": False, "enable_prefix_caching": False}),
    "pieces": (PENALISED, {"max_num_seqs": 9}),
    "rules": (RULES, {}),
    "rows with other settings": (replace(PENALISED, logprobs=2), {}),
    "several tokens at once": (STOPPING, {"steps_per_sync": 6}),
}
Results = dict[str, tuple[list[Completion], GenerationStats]]


def generate_cases(world: World, path: str, layout: Layout) -> Results:
    mesh = build_mesh(world, list(range(world.size)), layout) if world.size > 1 else alone()[1]
    decoder = load(path, mesh)
    results: Results = {}
    for name, (sampling, changes) in CASES.items():
        generator = Generator(decoder, mesh, replace(SMALL, **changes), {2}, LastDigits(None))
        requests = ragged_requests()
        if name == "rows with other settings":
            requests = with_overrides(requests)
        if name == "pieces":
            completions = generate_in_pieces(generator, requests, sampling, GenerationLimits(tokens=60))
        else:
            completions = generator.generate(requests, sampling, 3, 5)
        if name == "plain" and layout.pp == 1:
            assert num_unequal(decoder, requests, completions, sampling.temperature) == 0, "not those of a forward pass here"
        results[name] = completions, generator.stats
    return results


@pytest.fixture(scope="module")
def expected(path: str) -> Results:
    return generate_cases(alone()[0], path, Layout())


@pytest.mark.parametrize("layout", tiers([Layout(tp=2), Layout(pp=3), Layout(pp=2, tp=2)], lambda it: it.size < 4), ids=str)
def test_ranks_draw_the_rows_of_one_rank(path: str, expected: Results, layout: Layout) -> None:
    for results in run_ranks(layout.size, generate_cases, path, layout):
        for name, (completions, stats) in results.items():
            reference, plain = expected[name]
            assert_same(completions, reference, TP_TOLERANCE if layout.tp > 1 else 0.0)
            assert (plain.micro_batches, stats.micro_batches) == (1, layout.pp), name
            assert stats.decode_tokens == plain.decode_tokens or name == "pieces"
            assert (stats.preemptions > 0) == (name == "preemption") or name == "pieces"
            if name == "stops":  # all samples of a prompt were in one micro-batch: it was computed once
                prompts = {tuple(request.prompt_ids) for request in ragged_requests()}
                assert stats.prefill_tokens <= sum(len(prompt) - 1 for prompt in prompts)
            assert stats.seconds > stats.stage_seconds >= 0 and (layout.pp == 1 or stats.stage_seconds > 0)


def wait_for_other_stage(world: World, path: str, name: str) -> int:
    """The second stage computes a micro-batch only when the first has begun the next one. Returns how many forward passes it had."""
    mesh = build_mesh(world, list(range(world.size)), Layout(pp=2))
    generator = Generator(load(path, mesh), mesh, SMALL, ())
    tokens, passes = 12, 0

    def wait(_: Any, inputs: Any) -> None:
        nonlocal passes
        passes += 1
        if mesh.pp_rank == 0:
            world.store.add(name, 1)
        deadline = time.monotonic() + 60
        while mesh.pp_rank == 1 and passes < 2 * tokens and world.store.add(name, 0) <= passes:
            assert time.monotonic() < deadline, f"the first stage waits for the {passes}th pass of the second"
            time.sleep(0.001)

    generator.decoder.register_forward_pre_hook(wait)
    generator.generate([Request(i, i, [3 + i], tokens) for i in range(16)], SamplingConfig(), 0, 0)
    return passes


def test_stages_work_at_the_same_time(path: str) -> None:
    assert run_ranks(2, wait_for_other_stage, path, uuid.uuid4().hex) == [24, 24]


def micro_batches_of_calls(world: World, path: str) -> list[tuple[int, int]]:
    """Micro-batches, and those with rows, after calls over reserved pages that bring one row each, as of a server or an agent."""
    mesh = build_mesh(world, list(range(world.size)), Layout(pp=2))
    generator = Generator(load(path, mesh), mesh, SMALL, ())
    generator.reserve_pages(64)
    counts = []
    for row_id in range(2):
        generator.generate_until([Request(row_id, row_id, [3], 12)], SamplingConfig(), 0, 0, GenerationLimits(tokens=2), 0)
        assert generator._micro_batches is not None
        micro_batches = generator._micro_batches.micro_batches
        counts.append((len(micro_batches), sum(bool(each.rows) for each in micro_batches)))
    return counts


def test_a_first_call_of_one_row_leaves_later_rows_a_micro_batch(path: str) -> None:
    assert run_ranks(2, micro_batches_of_calls, path) == [[(2, 1), (2, 2)]] * 2


@given(groups=st.lists(st.integers(0, 9), max_size=40), number=st.integers(1, 4), data=st.data())
def test_groups_stay_together_and_where_they_were(groups: list[int], number: int, data: st.DataObject) -> None:
    rows = [SequenceState(Request(i, group, [1] * (1 + group), 1 + i % 5), 0) for i, group in enumerate(groups)]
    first = partition_groups(rows, [()] * number)
    places = {row.request.row_id: i for i, share in enumerate(first) for row in share}
    places_of_groups = {(row.request.group_id, places[row.request.row_id]) for row in rows}
    assert len(places) == len(rows) and len(places_of_groups) == len(set(groups))
    if len(set(groups)) >= number:
        assert all(first)
    left = [row for row in rows if data.draw(st.booleans())]
    known = [[row.request.row_id for row in share if row in left] for share in first]
    new = [SequenceState(Request(100 + i, 7 * i, [1], 3), 0) for i in range(5)]
    for i, share in enumerate(partition_groups([*new, *left], known)):
        assert all(places.get(row.request.row_id, i) == i for row in share)


def test_a_run_says_how_long_replicas_waited_for_each_other(tmp_path: Path) -> None:
    more = ("models.actor.generation.max_num_seqs=4",)
    overrides = tasks.settings(tmp_path, 2, "sampling.logit_bias={0: 2.0}", *layout_of("actor", dp=2), *more)
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), overrides)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert 0 <= row["generation/idle_fraction"] < 1
        assert row["generation/prefix_hit_rate"] > 0.2  # two samples of each prompt
        assert row["generation/prefix_hit_tokens"] < row["generation/prompt_tokens"]
        assert row["generation/stage_idle_fraction"] == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "actor.generate_sequences" and event["ph"] == "X"]
    assert len(spans) == 2 * len(rows)
    for span in spans:
        busy, idle = span["args"]["busy_seconds"], span["args"]["idle_seconds"]
        assert busy > 0 < idle and busy + idle < span["dur"] / 1e6
    fractions = [event["args"]["idle_fraction"] for event in events if event["name"] == "generation"]
    assert fractions == [pytest.approx(row["generation/idle_fraction"], abs=1e-4) for row in rows]
