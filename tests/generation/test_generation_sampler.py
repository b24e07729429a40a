"""Draws: keyed by (seed, step, row, position) alone, and distributed as the options say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampler_statistics import chi_square_z, draws, exact_probabilities

from rlhf_spmd.config.schema import check_section
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.sampler import filter_weights, row_keys, sample, uniform

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
    ],
)
def test_bad_settings_are_named(config: SamplingConfig | GenerationConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config)
