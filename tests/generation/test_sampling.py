"""Draws are keyed by (seed, step, row, position) alone and distributed as the options say.

A row draws the same tokens beside rows with other settings, and where its tokens were guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from generators import SMALL, LastDigits, alone, load, ragged_requests
from ranks import run_ranks
from rlhf_spmd.config.schema import check_section
from rlhf_spmd.generation import Completion, GenerationConfig, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.decode_micro_batches import Speculation
from rlhf_spmd.generation.sampler import filter_weights, row_keys, sample, uniform
from rlhf_spmd.generation.sequence import SamplingOverrides, SequenceState
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from sampler_statistics import chi_square_z, draws, exact_probabilities

OPTIONS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.6),
    SamplingConfig(temperature=2.0),
    SamplingConfig(top_k=4),
    SamplingConfig(top_p=0.7),
    SamplingConfig(min_p=0.1),
    SamplingConfig(temperature=1.3, top_k=8, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_follow_the_exact_distribution(options: SamplingConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, generator=generator)
    p = exact_probabilities(logits.numpy(), options)
    tokens = sample(logits.expand(40_000, -1), options, draws(40_000))
    counts = np.bincount(tokens.numpy(), minlength=20)
    assert counts[p == 0].sum() == 0
    assert chi_square_z(counts, p) < 4.0


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_filters_keep_what_transformers_keeps(options: SamplingConfig) -> None:
    from transformers.generation import logits_process as hf

    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)) * 3
    kept = logits / options.temperature
    if options.min_p > 0:
        kept = hf.MinPLogitsWarper(options.min_p)(None, kept)
    if options.top_k > 0:
        kept = hf.TopKLogitsWarper(options.top_k)(None, kept)
    if options.top_p < 1:
        kept = hf.TopPLogitsWarper(options.top_p)(None, kept)
    scaled = logits / options.temperature
    weights = filter_weights((scaled - scaled.amax(-1, keepdim=True)).exp(), options)
    assert torch.equal(weights > 0, torch.isfinite(kept))


def test_nucleus_wider_than_the_first_try_and_with_ties() -> None:
    flat = filter_weights(torch.ones(2, 1000), SamplingConfig(top_p=0.5))
    assert (flat > 0).sum(-1).tolist() == [500, 500] and bool((flat[:, :500] > 0).all())
    steps = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1]])
    assert (filter_weights(steps, SamplingConfig(top_p=0.7)) > 0).tolist() == [[True, True, True, False, False]]
    assert (filter_weights(steps, SamplingConfig(top_k=2)) > 0).tolist() == [[True, True, True, True, False]]
    tiny = filter_weights(torch.tensor([[1.0, 0.2]]), SamplingConfig(top_p=1e-9))
    assert (tiny > 0).tolist() == [[True, False]]  # one token always stays


def test_greedy_and_extreme_draws() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    assert sample(logits, SamplingConfig(temperature=0.0), draws(2)).tolist() == [1, 0]
    peaked = torch.tensor([[-200.0, 0.0, -200.0]])  # fp32 weights 0, 1, 0
    for u in (0.0, 1 - 2.0**-53):
        assert sample(peaked, SamplingConfig(), torch.tensor([u], dtype=torch.float64)).tolist() == [1]
    cold = sample(torch.randn(4, 50), SamplingConfig(temperature=1e-3), draws(4))
    assert cold.shape == (4,)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_draws_from_broken_logits_lie_in_the_vocabulary(broken: float) -> None:
    largest = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = torch.randn(4, 300, dtype=dtype)
        logits[1], logits[2, 7] = broken, broken
        for options in (SamplingConfig(temperature=0.0), *OPTIONS):
            drawn = sample(logits, options, largest)
            assert int(drawn.min()) >= 0 and int(drawn.max()) < 300, options


def numbers(seed: int, steps: Any, row_ids: Any, positions: Any) -> torch.Tensor:
    return uniform(row_keys(seed, torch.as_tensor(steps), torch.as_tensor(row_ids)), torch.as_tensor(positions))


def splitmix(seed: int, step: int, row_id: int, position: int) -> float:
    """The definition, in whole numbers modulo 2^64."""
    whole, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & whole
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & whole
        return x ^ (x >> 31)

    state = seed & whole
    for counter in (step, row_id, position):
        state = mix(mix(state + golden & whole) ^ (counter + golden & whole))
    return float((state >> 11) * 2.0**-53)


def test_uniform_numbers_are_those_of_the_definition() -> None:
    random = np.random.default_rng(0)
    steps, rows, positions = (random.integers(0, 2**62, 1000) for _ in range(3))
    for seed in (0, 7, -3, 2**64 - 1):
        wanted = [splitmix(seed, *map(int, key)) for key in zip(steps, rows, positions, strict=True)]
        assert numbers(seed, steps, rows, positions).tolist() == wanted


def test_uniform_numbers() -> None:
    rows = np.arange(200_000)
    u = numbers(1, 2, rows, rows % 7).numpy()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    grid = np.abs(np.sort(u) - (rows + 0.5) / len(rows)).max()
    assert grid * len(rows) ** 0.5 < 1.95  # Kolmogorov-Smirnov at 0.1 percent
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


def test_uniform_depends_on_each_counter_and_on_nothing_else() -> None:
    def one(seed: int, step: int, row: int, position: int) -> float:
        return float(numbers(seed, step, [row], [position])[0])

    grid = [(s, t, r, p) for s in (0, 1, -5) for t in (0, 1, 2) for r in (0, 1, 2**40) for p in (0, 1, 2)]
    values = {one(*key) for key in grid}
    assert len(values) == len(grid)  # also no symmetry between the counters
    together = numbers(1, 2, [0, 1, 2**40], [2, 1, 0])
    assert together.tolist() == [one(1, 2, 0, 2), one(1, 2, 1, 1), one(1, 2, 2**40, 0)]


def test_chunks_of_rows_do_not_change_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, options = torch.randn(33, 300), SamplingConfig(top_p=0.9, top_k=50)
    whole = sample(logits, options, draws(33))
    monkeypatch.setattr("rlhf_spmd.generation.sampler.CHUNK_ELEMENTS", 1000)
    assert torch.equal(sample(logits, options, draws(33)), whole)


def check(config: SamplingConfig | GenerationConfig) -> None:
    check_section(config, "sampling")
    if isinstance(config, GenerationConfig):
        config.check_device("sampling")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SamplingConfig(n=0), r"sampling\.n=0"),
        (SamplingConfig(temperature=-1.0), r"sampling\.temperature=-1\.0"),
        (SamplingConfig(temperature=float("nan")), r"sampling\.temperature=nan"),
        (SamplingConfig(top_p=0.0), r"sampling\.top_p=0\.0"),
        (SamplingConfig(top_k=-2), r"sampling\.top_k=-2"),
        (SamplingConfig(min_p=1.5), r"sampling\.min_p=1\.5"),
        (SamplingConfig(max_response_length=0), r"sampling\.max_response_length=0"),
        (GenerationConfig(page_size=0), r"sampling\.page_size=0"),
        (GenerationConfig(num_pages=0), r"sampling\.num_pages=0"),
        (GenerationConfig(attention="flash"), r"attention='flash': allowed are auto, torch"),
        (GenerationConfig(gpu_memory_utilization=0.0), r"gpu_memory_utilization=0\.0"),
        (
            GenerationConfig(max_num_seqs=100, max_num_batched_tokens=50),
            r"max_num_batched_tokens=50 is less than max_num_seqs=100",
        ),
        (GenerationConfig(steps_per_sync=0), r"steps_per_sync=0"),
        (GenerationConfig(steps_per_sync=4, speculative_tokens=2), r"steps_per_sync=4 has no effect with speculative_tokens=2"),
    ],
)
def test_bad_settings_are_named(config: SamplingConfig | GenerationConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config)


MIXED_SAMPLING = SamplingConfig(temperature=0.8, logprobs=2, repetition_penalty=1.2)
OVERRIDES = (
    None,
    SamplingOverrides(0.0),
    SamplingOverrides(1.4, top_p=0.7),
    SamplingOverrides(1.0, top_k=3),
    SamplingOverrides(0.8, min_p=0.2),
    SamplingOverrides(0.8),
)


def mixed() -> list[Request]:
    return [replace(request, overrides=OVERRIDES[i % len(OVERRIDES)]) for i, request in enumerate(ragged_requests())]


def generate_by_id(generator: Generator, requests: list[Request], sampling: SamplingConfig = MIXED_SAMPLING) -> dict[int, Any]:
    completions = generator.generate(requests, sampling, 3, 5)
    return {c.row_id: (c.token_ids, c.log_probs.tolist(), c.log_probs_t1.tolist()) for c in completions}


def one_by_one(path: str, dtype: torch.dtype = torch.float32) -> dict[int, Any]:
    """Each kind of rows in a call of its own, whose settings are theirs."""
    generator = Generator(load(path, alone()[1], dtype), alone()[1], SMALL, {2})
    rows: dict[int, Any] = {}
    for own in OVERRIDES:
        alike = [replace(request, overrides=None) for request in mixed() if request.overrides == own]
        rows |= generate_by_id(generator, alike, MIXED_SAMPLING if own is None else MIXED_SAMPLING.with_overrides(own))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("changes", [{}, {"num_pages": 20}, {"speculative_tokens": 3}, {"steps_per_sync": 4}], ids=str)
def test_a_mixed_batch_is_the_batches_of_each_kind(path: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    generator = Generator(load(path, alone()[1], dtype), alone()[1], replace(SMALL, **changes), {2})
    together, wanted = generate_by_id(generator, mixed()), one_by_one(path, dtype)
    if dtype == torch.float32:
        assert together == wanted
    for row, (tokens, *log_probs) in together.items():  # products in float64 depend on the batch
        assert tokens == wanted[row][0]
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(wanted[row][1:]), atol=1e-12, rtol=0)
    greedy = [request.row_id for request in mixed() if request.overrides == SamplingOverrides(0.0)]
    assert all(together[row][1] == together[row][2] for row in greedy)  # log-probs at temperature 1
    others = [row for row in together if mixed()[row].overrides in (None, OVERRIDES[2]) and len(together[row][0]) > 2]
    assert others and all(together[row][1] != together[row][2] for row in others)


def test_the_same_settings_in_every_row_are_those_of_the_call(path: str) -> None:
    generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, steps_per_sync=4), {2})
    plain = SamplingConfig(temperature=1.3, top_k=9)
    own = [replace(request, overrides=plain.overrides) for request in ragged_requests()]
    assert generate_by_id(generator, own, SamplingConfig()) == generate_by_id(generator, ragged_requests(), plain)


def generate_mixed(world: World, path: str, layout: Layout, config: GenerationConfig) -> dict[int, Any]:
    mesh = build_mesh(world, list(range(world.size)), layout)
    requests = [request for request in mixed() if mesh.dp_rank == 0 or request.group_id == 1]
    requests = [request for request in requests if layout.dp == 1 or (request.group_id == 1) == (mesh.dp_rank == 1)]
    return generate_by_id(Generator(load(path, mesh), mesh, config, {2}), requests)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [(Layout(tp=2), {}), (Layout(pp=2), {"num_pages": 40}), (Layout(dp=2), {"rebalance_steps": 3, "max_num_seqs": 4})],
    ids=str,
)
def test_in_every_layout_and_wherever_a_row_moves(path: str, layout: Layout, changes: dict[str, Any]) -> None:
    wanted = one_by_one(path)
    results = run_ranks(2, generate_mixed, path, layout, replace(SMALL, **changes))
    assert set(wanted) == {row for rows in results for row in rows}
    for rows in results:
        for row, (tokens, log_probs, _) in rows.items():
            assert tokens == wanted[row][0]
            assert log_probs == pytest.approx(wanted[row][1], abs=2e-5 if layout.tp > 1 else 0)


def test_settings_that_cannot_be_are_named(path: str) -> None:
    generator = Generator(load(path, alone()[1]), alone()[1], SMALL, {2})
    with pytest.raises(ValueError, match=r"sampling of row 5\.top_p=0.0: must be above 0 and at most 1"):
        generator.generate(
            [Request(4, 0, [3], 4), Request(5, 0, [3], 4, overrides=SamplingOverrides(top_p=0.0))], MIXED_SAMPLING, 0, 0
        )


# few tokens to choose from, so that three in a row often come again
REPEATING = SamplingConfig(temperature=0.8, allowed_token_ids=[2, 5, 6, 7])
GUESSED = {
    "greedy": SamplingConfig(temperature=0.0),
    "sampled": REPEATING,
    "penalties and a minimum": replace(
        REPEATING, frequency_penalty=0.02, repetition_penalty=1.05, min_response_length=9, logprobs=2
    ),
    "stop string": replace(REPEATING, stop=["75"], ignore_eos=True),
}


def generate_guessing(
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


@pytest.mark.parametrize("name", GUESSED)
def test_guesses_change_no_bit_and_save_steps(path: str, name: str) -> None:
    world = alone()[0]
    wanted, plain = generate_guessing(world, path, Layout(), GUESSED[name], {})
    assert plain.draft_tokens == plain.accepted_tokens == 0
    for changes in ({}, {"num_pages": 22}, {"max_num_batched_tokens": 24}, {"page_size": 3}):
        found, stats = generate_guessing(world, path, Layout(), GUESSED[name], {**changes, "speculative_tokens": 4})
        assert_same(found, wanted)
        assert stats.decode_tokens == plain.decode_tokens and 0 < stats.accepted_tokens < stats.draft_tokens
        assert (stats.preemptions > 0) == ("num_pages" in changes)
        if not changes:
            assert stats.steps < plain.steps


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_guesses_through_ranks(path: str, layout: Layout) -> None:
    sampling = GUESSED["penalties and a minimum"]
    wanted, _ = generate_guessing(alone()[0], path, Layout(), sampling, {})
    for found, stats in run_ranks(2, generate_guessing, path, layout, sampling, {"speculative_tokens": 3}):
        assert_same(found, wanted, tolerance=2e-5 if layout.tp > 1 else 0.0)
        assert stats.accepted_tokens > 0


def test_guesses_and_interruptions(path: str) -> None:
    wanted, _ = generate_guessing(alone()[0], path, Layout(), REPEATING, {})
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
