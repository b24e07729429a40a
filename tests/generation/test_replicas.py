"""Micro-batches over pipeline stages, and rows that move between replicas: the rows of one rank, bit for bit, with less waiting."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tasks
from generate_runs import ROWS, arguments, read_output, run_program_on_rank, write_rows
from generators import SMALL, LastDigits, alone, load, ragged_requests
from overrides import layout as layout_of
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, GenerationStats, Generator, Request, SamplingConfig
from rlhf_spmd.generation.balancing import plan_moves
from rlhf_spmd.generation.decode_micro_batches import partition_groups
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

STOPPING = SamplingConfig(
    temperature=0.8, allowed_token_ids=[2, 5, 6, 7, 15, 27], stop=["757"], stop_token_ids=[15], logprobs=2
)
PENALISED = SamplingConfig(temperature=0.9, repetition_penalty=1.2, min_response_length=3)
CASES: dict[str, tuple[SamplingConfig, dict[str, Any]]] = {  # name -> sampling, generation settings
    "preemption": (PENALISED, {"num_pages": 54, "max_num_seqs": 18}),
    "chunked prefill": (PENALISED, {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "stops": (STOPPING, {}),
    "guesses": (STOPPING, {"speculative_tokens": 3}),
    "whole prompts": (PENALISED, {"enable_chunked_prefill": False, "enable_prefix_caching": False}),
    "pieces": (PENALISED, {"max_num_seqs": 9}),
}
Found = dict[str, tuple[list[Completion], GenerationStats]]


def generate_cases(world: World, path: str, layout: Layout) -> Found:
    mesh = build_mesh(world, list(range(world.size)), layout) if world.size > 1 else alone()[1]
    decoder = load(path, mesh)
    found: Found = {}
    for name, (sampling, changes) in CASES.items():
        generator = Generator(decoder, mesh, replace(SMALL, **changes), {2}, LastDigits(None))
        requests = ragged_requests()
        if name == "pieces":
            completions, waiting = [], [requests[:9], requests[9:]]
            while waiting or generator.kept:
                new = waiting.pop(0) if waiting else []
                completions += generator.generate_until(new, sampling, 3, 5, GenerationLimits(tokens=60), 1)
            completions.sort(key=lambda completion: completion.row_id)
        else:
            completions = generator.generate(requests, sampling, 3, 5)
        found[name] = completions, generator.stats
    return found


@pytest.fixture(scope="module")
def wanted(path: str) -> Found:
    return generate_cases(alone()[0], path, Layout())


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(pp=2, tp=2)], ids=str)
def test_micro_batches_draw_the_rows_of_one_rank(path: str, wanted: Found, layout: Layout) -> None:
    for found in run_ranks(layout.size, generate_cases, path, layout):
        for name, (completions, stats) in found.items():
            reference, plain = wanted[name]
            assert (plain.micro_batches, stats.micro_batches) == (1, layout.pp), name
            for a, b in zip(completions, reference, strict=True):
                assert (a.row_id, a.token_ids, a.finish_reason) == (b.row_id, b.token_ids, b.finish_reason), name
                for ours, theirs in ((a.log_probs, b.log_probs), (a.log_probs_t1, b.log_probs_t1)):
                    torch.testing.assert_close(ours, theirs, atol=2e-5 if layout.tp > 1 else 0.0, rtol=0)
            assert stats.decode_tokens == plain.decode_tokens or name == "pieces"
            assert (stats.preemptions > 0) == (name == "preemption")
            assert (stats.accepted_tokens > 0) == (name == "guesses")
            if name == "stops":  # all samples of a prompt were in one micro-batch: it was computed once
                assert stats.prefill_tokens <= sum(
                    {tuple(r.prompt_ids): len(r.prompt_ids) - 1 for r in ragged_requests()}.values()
                )
            assert stats.stage_seconds > 0


def time_stages(world: World, path: str, micro_batches: int) -> list[tuple[float, float]]:
    """When this rank's stage was busy, by a clock that both ranks share, where it takes 1 ms per token."""
    mesh = build_mesh(world, list(range(world.size)), Layout(pp=2))
    generator = Generator(load(path, mesh), mesh, replace(SMALL, micro_batches=micro_batches), ())
    busy = []

    def work(_: Any, inputs: Any) -> None:
        began = time.monotonic()
        time.sleep(1e-3 * len(inputs[0]))
        busy.append((began, time.monotonic()))

    generator.decoder.register_forward_pre_hook(work)
    generator.generate([Request(i, i, [3 + i], 12) for i in range(16)], SamplingConfig(), 0, 0)
    assert generator.stats.seconds > generator.stats.stage_seconds > 0
    return busy


def test_stages_work_at_the_same_time(path: str) -> None:
    for micro_batches in (1, 2):
        first, second = run_ranks(2, time_stages, path, micro_batches)
        assert sum(end - began for began, end in first) > 12 * 16e-3  # every token goes through the stage
        overlap = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
        if micro_batches == 1:
            assert overlap == 0  # one after the other
        else:
            assert overlap > 0.2 * 12 * 16e-3


@given(groups=st.lists(st.integers(0, 9), max_size=40), number=st.integers(1, 4), data=st.data())
def test_groups_stay_together_and_where_they_were(groups: list[int], number: int, data: st.DataObject) -> None:
    rows = [SequenceState(Request(i, group, [1] * (1 + group), 1 + i % 5), 0) for i, group in enumerate(groups)]
    first = partition_groups(rows, [()] * number)
    places = {row.request.row_id: i for i, share in enumerate(first) for row in share}
    assert len(places) == len(rows) and len({(row.request.group_id, places[row.request.row_id]) for row in rows}) == len(
        set(groups)
    )
    if len(set(groups)) >= number:
        assert all(first)
    left = [row for row in rows if data.draw(st.booleans())]
    known = [[row.request.row_id for row in share if row in left] for share in first]
    new = [SequenceState(Request(100 + i, 7 * i, [1], 3), 0) for i in range(5)]
    for i, share in enumerate(partition_groups([*new, *left], known)):
        assert all(places.get(row.request.row_id, i) == i for row in share)


MOVED = SamplingConfig(repetition_penalty=1.1, logprobs=2, ignore_eos=True)


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=7))
def test_moves_make_counts_equal_and_leave_small_differences_alone(counts: list[int]) -> None:
    after = list(counts)
    for source, target, number in plan_moves(counts):
        assert number > 0 and source != target
        after[source] -= number
        after[target] += number
    if 2 * min(counts) >= max(counts) or max(counts) - min(counts) < 2:
        assert after == counts
    else:
        assert max(after) - min(after) <= 1 and sum(after) == sum(counts)
        assert sum(abs(a - b) for a, b in zip(after, counts, strict=True)) == 2 * sum(n for *_, n in plan_moves(counts))


def requests_of(replica: int) -> list[Request]:
    """The first replica has nearly all of the work; the second, if there is one, two short rows."""
    prompts = [[3 + i, 5, 7 + i % 3] * (1 + i % 9) for i in range(14)]
    rows = [Request(i, i // 2, prompts[i // 2], 20 + i % 7) for i in range(14)]
    return rows[:12] if replica == 0 else [replace(row, max_new_tokens=3) for row in rows[12:]] if replica == 1 else []


def generate_skewed(world: World, path: str, layout: Layout, changes: dict[str, Any]) -> tuple[list[Any], int, int, int]:
    mesh = build_mesh(world, list(range(world.size)), layout)
    generator = Generator(load(path, mesh), mesh, replace(SMALL, **changes), {2})
    found = []
    for step in (0, 1):  # a second call starts from nothing
        for c in generator.generate(requests_of(mesh.dp_rank), MOVED, 3, step):
            assert c.top_log_probs is not None and len(c.versions) == len(c.token_ids) == len(c.top_log_probs[0])
            found.append((step, c.row_id, c.token_ids, c.log_probs.tolist()))
    stats = generator.stats
    assert stats.seconds >= stats.busy_seconds > 0
    return found, stats.decode_tokens, stats.moved_rows, stats.preemptions


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(dp=2), {"rebalance_steps": 4}),
        (Layout(dp=4), {"rebalance_steps": 3}),
        (Layout(dp=2), {"rebalance_steps": 6, "num_pages": 9, "page_size": 6}),
        (Layout(dp=2, pp=2), {"rebalance_steps": 5}),
        (Layout(dp=2, tp=2), {"rebalance_steps": 5}),
    ],
    ids=str,
)
def test_moved_rows_are_the_same_rows(path: str, layout: Layout, changes: dict[str, Any]) -> None:
    mesh = alone()[1]
    generator = Generator(load(path, mesh), mesh, SMALL, {2})
    everything = [request for replica in range(layout.dp) for request in requests_of(replica)]
    wanted = {(s, c.row_id): c for s in (0, 1) for c in generator.generate(everything, MOVED, 3, s)}
    results = run_ranks(layout.size, generate_skewed, path, layout, changes)
    seen = set()
    for found, _, _, preemptions in results:
        for step, row_id, token_ids, log_probs in found:
            assert token_ids == wanted[step, row_id].token_ids
            assert log_probs == pytest.approx(wanted[step, row_id].log_probs.tolist(), abs=2e-5 if layout.tp > 1 else 0)
            seen.add((step, row_id))
        assert (preemptions > 0) >= ("num_pages" in changes and len(found) > 4)
    assert seen == set(wanted) and sum(moved for *_, moved, _ in results) > 0
    drawn = [tokens for _, tokens, _, _ in results]
    assert max(drawn) < 0.75 * sum(drawn) / (layout.size / layout.dp)  # without moves 0.98
    assert sum(drawn) == layout.size / layout.dp * sum(len(c.token_ids) for (s, _), c in wanted.items() if s == 1)


def test_the_programs_move_rows(path: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", [row for row in ROWS if "prompt_ids" in row] * 5)
    common = ["sampling.max_response_length=30", "generation.max_num_seqs=4"]
    for name, more in (("one", []), ("two", ["layout.dp=2", "generation.rebalance_steps=2"])):
        argv = arguments(Path(path), rows, tmp_path / f"{name}.jsonl", *common, *more)
        run_ranks(1 + (name == "two"), run_program_on_rank, argv)
    assert read_output(tmp_path / "one.jsonl") == read_output(tmp_path / "two.jsonl")

    runs = []
    for name, steps in (("fixed", 0), ("moving", 1)):
        more = (f"models.actor.generation.rebalance_steps={steps}", "models.actor.generation.max_num_seqs=4")
        settings = tasks.settings(tmp_path / name, 3, "sampling.logit_bias={0: 2.0}", *layout_of("actor", dp=2), *more)
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), settings)
        runs.append(tasks.read_run(tmp_path / name))
    assert runs[0].responses == runs[1].responses and runs[0].metrics == runs[1].metrics
    assert [sum(row["generation/moved_rows"] for row in run.raw) > 0 for run in runs] == [False, True]
    assert all(0 <= row["generation/idle_fraction"] < 1 for run in runs for row in run.raw)
    for row in runs[0].raw:
        assert row["generation/prefix_hit_rate"] > 0.2  # two samples of each prompt
        assert row["generation/prefix_hit_tokens"] < row["generation/prompt_tokens"]
        assert row["generation/draft_tokens"] == row["generation/stage_idle_fraction"] == 0
    events = json.loads((tmp_path / "moving" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "actor.generate_sequences" and event["ph"] == "X"]
    assert len(spans) == 2 * 3
    for span in spans:
        busy, idle = span["args"]["busy_seconds"], span["args"]["idle_seconds"]
        assert busy > 0 < idle and busy + idle < span["dur"] / 1e6
    fractions = [event["args"]["idle_fraction"] for event in events if event["name"] == "generation"]
    assert fractions == [pytest.approx(row["generation/idle_fraction"], abs=1e-4) for row in runs[1].raw]
