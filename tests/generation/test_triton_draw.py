"""The Triton draws against float64 and against themselves, bit for bit; on GPUs the kernels are compiled.

A token may differ from the reference only where its uniform number lies within a distance of a boundary between two tokens, as a share
of the kept weight. In the interpreter weights have the reference's bits where the row is one tile or filtered, so the distance is that
of fp64 sums. Else weights are fp32 numbers of another rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from generators import MODELS, alone, load
from launches import counted_launches
from ranks import run_ranks
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import build_sampling_tensors, draw_rows, row_keys, sample, uniform
from rlhf_spmd.kernels import triton_draw, triton_filter
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.sampling_tensors import Drawn
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from sampler_statistics import kept_weights
from tiers import tiers
from triton_device import DEVICE

COMPILED = DEVICE.type == "cuda"
ROWS = 4096 if COMPILED else 21  # the interpreter takes 0.1 s a row
OPTIONS = [  # settings that fp32 holds exactly
    SamplingConfig(),
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.625),
    SamplingConfig(top_k=5),
    SamplingConfig(top_p=0.75),
    SamplingConfig(min_p=0.125),
    SamplingConfig(temperature=1.5, top_p=0.875, top_k=30, min_p=2.0**-10),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies have several tiles, blocks and chunks."""
    monkeypatch.setattr(triton_draw, "TILE", 512)
    monkeypatch.setattr(triton_filter, "TILE", 512)
    monkeypatch.setattr(triton_filter, "CHUNK", 128)


def numbers(rows: int) -> tuple[Tensor, Tensor]:
    """Keys and positions of the draws."""
    at = torch.arange(rows, device=DEVICE)
    return row_keys(3, at % 3, at), at % 5


def normal(rows: int, vocabulary: int, spread: float = 2.0) -> Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread).to(DEVICE)


def drawn(logits: Tensor, samplings: SamplingConfig | Sequence[SamplingConfig], scores: Tensor | None = None) -> Drawn:
    """By a batch whose row i follows setting i, or all the one."""
    each = [samplings] * len(logits) if isinstance(samplings, SamplingConfig) else list(samplings)
    settings = build_sampling_tensors(each, np.arange(len(logits)), DEVICE)
    return GpuOps().draw_rows(logits if scores is None else scores, logits, settings, *numbers(len(logits)))


def is_filtered(s: SamplingConfig) -> bool:
    return s.top_p < 1 or s.top_k > 0 or s.min_p > 0


def check_tokens(tokens: Tensor, scores: Tensor, samplings: Sequence[SamplingConfig], exact_rows: bool = False) -> None:
    """``exact_rows``: filtered rows, and all rows of one tile, have the reference's weights if the kernels are interpreted."""
    draws = uniform(*numbers(len(scores))).tolist()
    excused = 0
    rows = zip(tokens.tolist(), scores.cpu().numpy(), samplings, draws, strict=True)
    for row, (token, x, s, u) in enumerate(rows):
        if s.greedy:
            assert token == int(x.argmax()), row
            continue
        weights = kept_weights(x, s)
        cumulative = weights.cumsum() / weights.sum()
        expected = int(np.searchsorted(cumulative, u, side="right"))
        assert weights[token] > 0, (row, s)
        if token != expected:
            excused += 1
            slack = 1e-12 if exact_rows and not COMPILED and (is_filtered(s) or len(x) <= triton_draw.TILE) else 1e-6
            assert np.abs(cumulative - u).min() < slack, (row, s, token, expected)
    assert excused <= 1 + len(scores) // 100


def check_log_probs(draws: Drawn, logits: Tensor, samplings: Sequence[SamplingConfig]) -> None:
    temperatures = torch.tensor([s.log_prob_temperature for s in samplings], device=DEVICE, dtype=torch.float64)[:, None]
    for log_probs, t in zip(draws[1:], (temperatures, torch.ones_like(temperatures)), strict=True):
        expected = (logits.double() / t).log_softmax(1).gather(1, draws[0][:, None])[:, 0]
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs.double(), expected, atol=1e-6, rtol=0)


def mixed(rows: int) -> list[SamplingConfig]:
    return [OPTIONS[i % len(OPTIONS)] for i in range(rows)]


@pytest.mark.parametrize("vocabulary", [7, 300, 1793])
def test_tokens_and_log_probs_are_those_of_float64(vocabulary: int) -> None:
    """Of rows of all settings together."""
    logits, samplings = normal(ROWS, vocabulary), mixed(ROWS)
    draws = drawn(logits, samplings)
    check_log_probs(draws, logits, samplings)
    check_tokens(draws[0], logits, samplings, exact_rows=True)
    uniforms = uniform(*numbers(ROWS))
    for options in OPTIONS:  # what CPUs draw
        lines = [row for row, s in enumerate(samplings) if s is options]
        tokens = sample(logits[lines].cpu(), options, uniforms[lines].cpu())
        assert int((draws[0][lines].cpu() != tokens).sum()) <= 1 + len(lines) // 100


def test_rows_draw_alone_what_they_draw_together() -> None:
    logits = normal(len(OPTIONS) * 2, 1793)
    together = drawn(logits, mixed(len(logits)))
    keys, positions = numbers(len(logits))
    for row, options in enumerate(mixed(len(logits))):
        settings = build_sampling_tensors([options], np.zeros(1, dtype=np.int64), DEVICE)
        line = logits[row : row + 1].clone()
        single = GpuOps().draw_rows(line, line, settings, keys[row : row + 1], positions[row : row + 1])
        for part, parts in zip(single, together, strict=True):
            assert torch.equal(part[0], parts[row]), (row, options)


def test_candidates_that_do_not_fit_are_found_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [*filter(is_filtered, OPTIONS)] * 2
    logits = normal(len(samplings), 1793, 0.5)
    roomy = drawn(logits, samplings)
    monkeypatch.setattr(triton_filter, "CANDIDATES", 16)
    narrow = drawn(logits, samplings)
    check_tokens(narrow[0], logits, samplings, exact_rows=True)
    assert all(map(torch.equal, roomy, narrow))


def test_of_equal_weights_the_nucleus_keeps_the_lower_ids() -> None:
    flat = torch.zeros(8, 1001, device=DEVICE)
    settings = [SamplingConfig(top_p=p) for p in (0.5, 0.25, 2.0**-20, 0.75)] + [
        SamplingConfig(top_k=3),  # ties with the third stay, so all
        SamplingConfig(top_k=3, top_p=0.5),
        SamplingConfig(min_p=1.0),
        SamplingConfig(temperature=0.0),
    ]
    check_tokens(drawn(flat, settings)[0], flat, settings, exact_rows=True)
    steps = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.125], device=DEVICE).log().expand(ROWS, 5).contiguous()
    samplings = [SamplingConfig(top_p=0.6875)] * ROWS  # 1.8 of 2.6: one of the three halves goes
    check_tokens(drawn(steps, samplings)[0], steps, samplings, exact_rows=True)


def test_forbidden_tokens_are_never_drawn_and_rules_do_not_enter_log_probs() -> None:
    logits = normal(14, 700)
    scores = logits.clone()
    scores[:, ::2] = -torch.inf
    scores[:, 512:] = -torch.inf  # a tile without any
    draws = drawn(logits, mixed(14), scores)
    check_tokens(draws[0], scores, mixed(14))
    check_log_probs(draws, logits, mixed(14))


@pytest.mark.parametrize("broken", tiers([torch.nan, torch.inf, -torch.inf], lambda value: value != torch.inf))
def test_rows_that_are_not_finite_say_so_and_harm_no_other(broken: float) -> None:
    logits = normal(len(OPTIONS), 700)
    before = drawn(logits, OPTIONS)
    rows, scores = logits[:4].clone(), logits[:4].clone()
    rows[1], rows[2, 600] = broken, broken
    scores[1] = broken
    bad = [1] if broken == -torch.inf else [1, 2]  # one token that cannot be drawn harms nothing
    for options in (OPTIONS[0], OPTIONS[1], OPTIONS[6]):
        draws = drawn(rows, options)
        assert bool(((draws[0] >= 0) & (draws[0] < 700)).all())
        assert [row for row in range(4) if not bool(draws[2][row].isfinite())] == bad, options
        assert not bool(drawn(logits[:4], options, scores)[2][1].isfinite())  # logits may be right where rules leave nothing
    logits[3] = broken
    for part, expected in zip(drawn(logits, OPTIONS), before, strict=True):
        assert torch.equal(torch.cat([part[:3], part[4:]]), torch.cat([expected[:3], expected[4:]]))


@pytest.mark.long
def test_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((triton_filter, "TILE", 4096), (triton_filter, "CHUNK", 512), (triton_draw, "TILE", 4096)):
        monkeypatch.setattr(module, name, value)
    logits = normal(3, 151_936, 3.0)
    samplings = [SamplingConfig(), SamplingConfig(top_p=0.9375, top_k=2000), SamplingConfig(temperature=0.75, top_p=0.875)]
    draws = drawn(logits, samplings)
    check_tokens(draws[0], logits, samplings)
    check_log_probs(draws, logits, samplings)


@pytest.mark.parametrize(("options", "launches"), [(OPTIONS[0], 2), (OPTIONS[1], 2), (OPTIONS[6], 5)], ids=str)
def test_a_draw_takes_few_launches_and_never_waits(options: SamplingConfig, launches: int, model: str) -> None:
    """Triton's launches, and torch's: the counts of weights begin as zeros."""
    logits, decoder = normal(2, 301), load(model, alone()[1])
    settings, (keys, positions) = build_sampling_tensors([options], np.zeros(2, dtype=np.int64), DEVICE), numbers(2)
    with counted_launches() as counted:
        draw_rows(GpuOps(), logits, logits, settings, keys, positions, decoder, [])
    assert len(counted.names) == launches + (launches > 2) and not counted.waits, counted.names


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("draws") / "qwen3"
    write_random_model(path, {**MODELS["qwen3"], "num_hidden_layers": 1}, seed=7)
    return str(path)


@pytest.mark.parametrize("drawable", [3, 512, 700])
def test_only_the_first_ids_are_drawn(drawable: int) -> None:
    """What is drawn from the first columns alone; log-probs are of all."""
    logits, samplings = normal(len(OPTIONS) * 2, 1793), mixed(len(OPTIONS) * 2)
    logits[:, drawable:] += 5
    for scores in (logits[:, :drawable], logits.clone()[:, :drawable]):
        draws = drawn(logits, samplings, scores)
        assert torch.equal(draws[0], drawn(logits[:, :drawable].contiguous(), samplings)[0])
        check_log_probs(draws, logits, samplings)


def draw_on_rank(world: World, path: str, ruled: bool, drawable: int, samplings: Sequence[SamplingConfig]) -> list[Tensor]:
    import triton_device  # noqa: F401

    triton_draw.TILE = triton_filter.TILE = 64
    decoder = load(path, build_mesh(world, [0, 1], Layout(tp=2)))
    all_logits, (first, last) = normal(len(samplings), 301), decoder.vocab_range
    logits = all_logits[:, first:last].contiguous()
    scores = logits if not ruled else all_logits.masked_fill(torch.arange(301) % 3 == 0, -torch.inf)
    settings = build_sampling_tensors(samplings, np.arange(len(samplings)), DEVICE)
    return list(draw_rows(GpuOps(), scores, logits, settings, *numbers(len(samplings)), decoder, [], drawable))


@pytest.mark.skipif(COMPILED, reason="gloo ranks, in the interpreter")
@pytest.mark.parametrize(
    ("ruled", "filtered", "drawable"), [(True, False, 301), (False, True, 301), (False, False, 100), (False, True, 170)]
)
def test_slices_of_the_vocabulary_draw_what_the_whole_draws(model: str, ruled: bool, filtered: bool, drawable: int) -> None:
    settings = OPTIONS if filtered else OPTIONS[:3]
    samplings = [*settings, *settings]
    first, second = run_ranks(2, draw_on_rank, model, ruled, drawable, samplings)
    assert all(map(torch.equal, first, second))
    all_logits = normal(len(samplings), 301)
    scores = all_logits.masked_fill(torch.arange(301) % 3 == 0, -torch.inf) if ruled else all_logits
    check_tokens(first[0], scores[:, :drawable], samplings)
    check_log_probs((first[0], first[1], first[2]), all_logits, samplings)
