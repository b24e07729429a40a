"""Micro-batched pipeline decode: the rows of one rank, bit for bit, with less waiting between the stages."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generators import MODELS, SMALL, LastDigits, alone, load, ragged_requests
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, GenerationStats, Generator, Request, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import share_out
from rlhf_spmd.generation.sequence import SequenceState
from rlhf_spmd.models.weights import write_random_model
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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(root, MODELS["qwen3"], seed=7)
    return str(root)


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
def test_lanes_draw_the_rows_of_one_rank(path: str, wanted: Found, layout: Layout) -> None:
    for found in run_ranks(layout.size, generate_cases, path, layout):
        for name, (completions, stats) in found.items():
            reference, plain = wanted[name]
            assert (plain.lanes, stats.lanes) == (1, layout.pp), name
            for a, b in zip(completions, reference, strict=True):
                assert (a.row_id, a.token_ids, a.finish_reason) == (b.row_id, b.token_ids, b.finish_reason), name
                for ours, theirs in ((a.log_probs, b.log_probs), (a.log_probs_t1, b.log_probs_t1)):
                    torch.testing.assert_close(ours, theirs, atol=2e-5 if layout.tp > 1 else 0.0, rtol=0)
            assert stats.decode_tokens == plain.decode_tokens or name == "pieces"
            assert (stats.preemptions > 0) == (name == "preemption")
            assert (stats.accepted_tokens > 0) == (name == "guesses")
            if name == "stops":  # all samples of a prompt were in one lane: it was computed once
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
    first = share_out(rows, [()] * number)
    places = {row.request.row_id: lane for lane, share in enumerate(first) for row in share}
    assert len(places) == len(rows) and len({(row.request.group_id, places[row.request.row_id]) for row in rows}) == len(
        set(groups)
    )
    if len(set(groups)) >= number:
        assert all(first)
    left = [row for row in rows if data.draw(st.booleans())]
    known = [[row.request.row_id for row in share if row in left] for share in first]
    new = [SequenceState(Request(100 + i, 7 * i, [1], 3), 0) for i in range(5)]
    for lane, share in enumerate(share_out([*new, *left], known)):
        assert all(places.get(row.request.row_id, lane) == lane for row in share)
