"""Guessing ahead changes no bit; where texts repeat themselves it saves steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generators import MODELS, SMALL, LastDigits, alone, load, ragged_requests
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, SamplingConfig
from rlhf_spmd.generation.sequence import Request, SequenceState
from rlhf_spmd.generation.speculation import Speculation
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

# few tokens to choose from, so that three in a row often come again
REPEATING = SamplingConfig(temperature=0.8, allowed_token_ids=[2, 5, 6, 7])
CASES = {
    "greedy": SamplingConfig(temperature=0.0),
    "sampled": REPEATING,
    "penalties and a minimum": replace(
        REPEATING, frequency_penalty=0.02, repetition_penalty=1.05, min_response_length=9, logprobs=2
    ),
    "stop string": replace(REPEATING, stop=["75"], ignore_eos=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(root, MODELS["qwen3"], seed=7)
    return str(root)


def generate(
    world: World, path: str, layout: Layout, sampling: SamplingConfig, changes: dict[str, Any]
) -> tuple[list[Completion], Any]:
    mesh = build_mesh(world, list(range(world.size)), layout) if world.size > 1 else alone()[1]
    generator = Generator(load(path, mesh), mesh, replace(SMALL, **changes), {2}, LastDigits(None))
    return generator.generate(ragged_requests(samples=3, max_new_tokens=60), sampling, 3, 5), generator.stats


def assert_same(found: list[Completion], wanted: list[Completion], tolerance: float = 0.0) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.row_id, a.token_ids, a.finish_reason) == (b.row_id, b.token_ids, b.finish_reason)
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=tolerance, rtol=0)
        if a.top_log_probs is not None and b.top_log_probs is not None:
            assert torch.equal(a.top_log_probs[0], b.top_log_probs[0])


@pytest.mark.parametrize("name", CASES)
def test_guesses_change_no_bit_and_save_steps(path: str, name: str) -> None:
    world = alone()[0]
    wanted, plain = generate(world, path, Layout(), CASES[name], {})
    assert plain.draft_tokens == plain.accepted_tokens == 0
    for changes in ({}, {"num_pages": 22}, {"max_num_batched_tokens": 24}, {"page_size": 3}):
        found, stats = generate(world, path, Layout(), CASES[name], {**changes, "speculative_tokens": 4})
        assert_same(found, wanted)
        assert stats.decode_tokens == plain.decode_tokens and 0 < stats.accepted_tokens < stats.draft_tokens
        assert (stats.preemptions > 0) == ("num_pages" in changes)
        if not changes:
            assert stats.steps < plain.steps


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_guesses_through_ranks(path: str, layout: Layout) -> None:
    sampling = CASES["penalties and a minimum"]
    wanted, _ = generate(alone()[0], path, Layout(), sampling, {})
    for found, stats in run_ranks(2, generate, path, layout, sampling, {"speculative_tokens": 3}):
        assert_same(found, wanted, tolerance=2e-5 if layout.tp > 1 else 0.0)
        assert stats.accepted_tokens > 0


def test_guesses_and_interruptions(path: str) -> None:
    wanted, _ = generate(alone()[0], path, Layout(), REPEATING, {})
    mesh = alone()[1]
    generator = Generator(load(path, mesh), mesh, replace(SMALL, speculative_tokens=4), {2})
    requests, found = ragged_requests(samples=3, max_new_tokens=60), []
    while requests or generator.kept:
        found += generator.generate_until(requests, REPEATING, 3, 5, GenerationLimits(tokens=50), 1)
        requests = []
    assert_same(sorted(found, key=lambda c: c.row_id), wanted)


def test_a_guess_is_what_followed_last_time_in_the_group() -> None:
    row, other, alone = rows = [
        SequenceState(Request(0, 7, [1, 2, 3, 4, 5, 1], 9), index=0),
        SequenceState(Request(1, 7, [1, 2, 3, 4, 5, 1], 9), index=1),
        SequenceState(Request(2, 8, [9, 9, 9, 9], 9), index=2),
    ]
    speculation = Speculation(rows, 3)

    def draw(of: SequenceState, tokens: list[int]) -> None:
        of.tokens += tokens
        speculation.note(of, len(tokens))

    assert speculation.guess(row) == []  # 4, 5, 1 has been seen, but nothing behind it
    draw(row, [2, 3])
    assert speculation.guess(row) == [4, 5, 1]
    assert speculation.guess(other) == [2, 3]
    draw(other, [2, 3, 8])
    assert speculation.guess(row) == [8]
    draw(row, [8, 1, 2, 3, 4, 5])
    assert speculation.guess(row) == []  # one token is left, which needs no guess
    assert speculation.guess(alone) == [9]
