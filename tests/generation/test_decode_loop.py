"""Several tokens per look of the host, also in captured steps: the bits of the generator that looks at each token.

In place of a CUDA graph stands what a graph is: the launches of the first step, with every number that the host gave them, over the
same memory.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from generators import RULES, SMALL, alone, assert_same, load, ragged_requests, with_overrides
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, Request, SamplingConfig, config, graphs, model_runner
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.call import FinishedGroups
from rlhf_spmd.generation.graphs import Graphs, padded_size
from rlhf_spmd.generation.model_runner import ModelRunner
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.devices import DeviceCapabilities
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS, make_model

STOPS = range(4)  # rows end early, within bursts
SAMPLED = SamplingConfig(temperature=0.8, top_k=40)
NARROW = 1e-3  # in float32, of linear attention's log-probs between other orders of sums, with these weights


def generate(
    path: str,
    sampling: SamplingConfig,
    requests: list[Request] | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[list[Completion], Generator]:
    generator = Generator(load(path, alone()[1], dtype), alone()[1], replace(SMALL, **changes), STOPS)
    return generator.generate(ragged_requests() if requests is None else requests, sampling, 3, 5), generator


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("torch", {"steps_per_sync": 4}),
        ("cpp", {"steps_per_sync": 7, "page_size": 5, "max_num_seqs": 3}),
        ("torch", {"steps_per_sync": 16, "num_pages": 17}),
        ("cpp", {"steps_per_sync": 5, "num_pages": 30, "max_num_batched_tokens": 33, "enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_tokens_and_log_probs_keep_their_bits(path: str, attention: str, changes: dict[str, Any]) -> None:
    expected, stepwise = generate(path, SAMPLED, attention=attention)
    assert {c.finish_reason for c in expected} == {"stop", "length"}
    completions, generator = generate(path, SAMPLED, attention=attention, **changes)
    assert_same(completions, expected)
    assert generator.stats.decode_tokens == sum(len(c.token_ids) for c in completions)
    if "num_pages" in changes:
        assert generator.stats.preemptions > 0
    else:
        assert generator.stats.steps < stepwise.stats.steps or changes["max_num_seqs"] == 3


def test_rows_of_a_single_page(path: str) -> None:
    """The table of pages then has one column, a slice with gaps; rows of one token stand still while others go on."""
    limits = [1, 10, 30, 1, 1, 1, 30, 30, 1, 1, 40, 10, 1]
    requests = [Request(i, 0, [3, 4, 5, 6, 7], limit) for i, limit in enumerate(limits)]
    completions, generator = generate(path, SAMPLED, requests, max_num_seqs=6, steps_per_sync=8, num_pages=8)
    assert_same(completions, generate(path, SAMPLED, requests, max_num_seqs=6)[0])
    assert generator.stats.preemptions > 0


@pytest.mark.parametrize(
    ("sampling", "mixed"),
    [
        (SamplingConfig(temperature=0.0), False),
        (SamplingConfig(min_p=0.02, top_p=0.9), False),
        (RULES, True),
        (replace(SAMPLED, logprobs=3), True),
    ],
    ids=["greedy", "filtered", "rules", "logprobs"],
)
def test_rules_likeliest_tokens_and_rows_with_other_settings(path: str, sampling: SamplingConfig, mixed: bool) -> None:
    """All that follows from the rows' own tokens is found on the device."""
    requests = ragged_requests()
    if mixed:
        requests = [replace(request, min_new_tokens=3 * (i % 4)) for i, request in enumerate(with_overrides(requests))]
    (expected, stepwise), (completions, generator) = (
        generate(path, sampling, requests, steps_per_sync=repeats) for repeats in (1, 8)
    )
    assert_same(completions, expected)
    assert generator.stats.steps < stepwise.stats.steps / 2
    assert all((each.top_log_probs is None) == (not sampling.logprobs) for each in expected)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("linear") / "model", {**CONFIGS["qwen3-next"], "vocab_size": 301}))


@pytest.mark.parametrize(
    ("changes", "least", "dtype"),
    [
        ({"steps_per_sync": 8}, 0.8, torch.float32),
        ({"max_num_seqs": 3, "steps_per_sync": 64}, 0.99, torch.float64),
        ({"max_num_batched_tokens": 33}, 0.9, torch.float32),
        ({"num_pages": 22, "steps_per_sync": 5}, 0.9, torch.float64),
    ],
    ids=str,
)
def test_linear_attention_shares_prompts(linear: str, changes: dict[str, Any], least: float, dtype: torch.dtype) -> None:
    """Five rows of a prompt compute all but its last token once, also where they start one by one: ``least`` of what could be shared
    is shared. Rows stop and reach their limits within windows; prompts of one token begin in one."""
    requests = ragged_requests(samples=5)
    expected, single = generate(linear, SAMPLED, requests, dtype, enable_prefix_caching=False)
    completions, shared = generate(linear, SAMPLED, requests, dtype, **changes)
    assert_same(completions, expected, 1e-10 if dtype == torch.float64 else NARROW)
    shareable = sum(len(request.prompt_ids) - 1 for request in requests) * 4 / 5
    assert single.stats.hit_tokens == 0 and shared.stats.hit_tokens >= least * shareable
    assert (shared.stats.preemptions > 0) == ("num_pages" in changes)
    assert shared.stats.preemptions or shared.stats.prefill_tokens < single.stats.prefill_tokens


@dataclass
class Frozen:
    """In place of a graph."""

    replay: Callable[[], None]


@contextmanager
def capturing() -> Iterator[list[Any]]:
    """The steps that are captured from now on, on this machine, as if it were a GPU."""
    steps: list[Any] = []

    def capture(self: Graphs, step: Callable[[], None]) -> Frozen:
        steps.append(step)
        step()
        return Frozen(step)

    def able(device: torch.device) -> DeviceCapabilities:
        return replace(capabilities(device), graphs=True, streams=True)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Graphs, "_capture", capture))
        for module in (model_runner, config):
            stack.enter_context(mock.patch.object(module, "capabilities", able))
        yield steps


@pytest.fixture
def captured() -> Iterator[list[Any]]:
    with capturing() as steps:
        yield steps


def build(path: str, mesh: Mesh | None = None, **changes: Any) -> Generator:
    mesh = mesh or alone()[1]
    decoder = load(path, mesh)
    generator = Generator(decoder, mesh, replace(SMALL, **changes), STOPS)
    backend = build_backend("torch", decoder.dtype, torch.device("cpu"))
    generator.__dict__["_backend"] = replace(backend, capturable=changes.get("enforce_eager") is not True)
    return generator


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        (SAMPLED, {"steps_per_sync": 3, "num_pages": 17}),
        (SamplingConfig(temperature=0.0), {"page_size": 5, "max_num_batched_tokens": 33, "max_num_seqs": 7}),
        (replace(RULES, top_p=1.0), {"steps_per_sync": 3, "num_pages": 17}),
        (replace(SAMPLED, logprobs=3), {}),
    ],
    ids=["sampled", "greedy", "rules", "logprobs"],
)
def test_captured_steps_keep_the_bits(
    path: str, sampling: SamplingConfig, changes: dict[str, Any], captured: list[Any]
) -> None:
    """Prompts come while others decode, rows stop within windows, and two windows are under way."""
    expected = build(path, enforce_eager=True, **changes).generate(ragged_requests(), sampling, 3, 5)
    assert not captured and {c.finish_reason for c in expected} == {"stop", "length"}
    generator = build(path, **changes)
    assert_same(generator.generate(ragged_requests(), sampling, 3, 5), expected)
    assert 1 < len(captured) <= len({padded_size(n + 1) for n in range(20)})
    assert generator.stats.decode_tokens == sum(len(c.token_ids) for c in expected)
    # other weights, lengths and seeds: nothing of the first call may be left in what a graph has fixed
    with torch.no_grad():
        generator.decoder.layers[0].gate_up.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    other = build(path, enforce_eager=True, **changes)
    other.decoder.load_state_dict(generator.decoder.state_dict())
    requests = [replace(request, row_id=request.row_id + 50) for request in ragged_requests(max_new_tokens=9)]
    assert_same(generator.generate(requests, sampling, 4, 6), other.generate(requests, sampling, 4, 6))


def raise_(error: Exception) -> None:
    raise error


TRIALS: dict[str, Callable[[Callable[[], None]], Callable[[], None]]] = {
    "right": lambda step: step,
    "a captured sum is 0, not 6": lambda step: lambda: None,  # nothing is replayed
    "RuntimeError: no graphs": lambda step: partial(raise_, RuntimeError("no\ngraphs")),
}


def generate_on_slices(world: World, path: str, name: str) -> tuple[list[Completion], list[Completion], int, str]:
    """Of eager and of captured steps, the number of these, and what is printed. The first graph is the trial's."""
    mesh, printed = build_mesh(world, [0, 1], Layout(tp=2)), io.StringIO()
    expected = build(path, mesh, enforce_eager=True).generate(ragged_requests(), SAMPLED, 3, 5)
    with capturing() as steps, redirect_stderr(printed), mock.patch.object(graphs, "TRIAL_S", 1.0):
        capture = Graphs._capture

        def capture_trial(self: Graphs, step: Callable[[], None]) -> Frozen:
            graph, first = capture(self, step), len(steps) == 1
            return Frozen(TRIALS[name](step)) if first else graph  # type: ignore[return-value]

        with mock.patch.object(Graphs, "_capture", capture_trial):
            generator = build(path, mesh)
            completions = generator.generate(ragged_requests(), SAMPLED, 3, 5)
            generator.generate(ragged_requests()[:2], SAMPLED, 4, 5)  # tried once
    return expected, completions, len(steps), printed.getvalue()


@pytest.mark.parametrize("name", TRIALS)
def test_steps_with_sums_over_ranks_are_captured_where_a_trial_succeeds(path: str, name: str) -> None:
    for rank, (expected, completions, number, printed) in enumerate(run_ranks(2, generate_on_slices, path, name)):
        assert_same(completions, expected)
        assert (number > 2) == (name == "right") and number >= 1
        assert printed.count("\n") == (name != "right" and rank == 0) and (name == "right" or rank or name in printed)


def try_sums(world: World, name: str) -> str:
    """What the trial returns or raises, and then that sums are right: a rank that fails leaves none behind."""
    group = build_mesh(world, [0, 1], Layout(tp=2)).tp

    with capturing(), mock.patch.object(graphs, "TRIAL_S", 1.0):
        capture = Graphs._capture

        def capture_trial(self: Graphs, step: Callable[[], None]) -> Frozen:
            if name == "one rank" and not group.rank:
                raise RuntimeError("no capture here")
            graph = capture(self, step)
            return Frozen(lambda: time.sleep(3)) if name == "stands" else graph  # type: ignore[return-value]

        with mock.patch.object(Graphs, "_capture", capture_trial):
            try:
                why = graphs.reason_against_captured_sums(group, torch.device("cpu"))
            except graphs.CapturedSumTimeout as error:
                return str(error)
    total = group.all_reduce(torch.full((1 << 14,), 100.0), "test")
    assert bool((total == 200).all()), float(total[0])
    return why


def test_a_trial_that_fails_on_one_rank_leaves_no_sum_behind() -> None:
    assert run_ranks(2, try_sums, "one rank") == ["RuntimeError: no capture here", "it fails on another rank"]
    assert all("a captured sum over tp has not ended in 1 s" in line for line in run_ranks(2, try_sums, "stands"))


def test_graphs_stay_while_nothing_moves(path: str, captured: list[Any]) -> None:
    """Calls over reserved pages, as a server's, capture each size once."""
    generator, counts = build(path), []
    generator.reserve_pages(64)
    for seed in range(3):
        requests = [replace(request, row_id=request.row_id + 100 * seed) for request in ragged_requests()]
        while generator.kept or requests:
            generator.generate_until(requests, SAMPLED, seed, 5, GenerationLimits(), 0)
            requests = []
        counts.append(len(captured))
    assert counts[0] == counts[1] == counts[2] > 1


FILTERED = SamplingConfig(temperature=0.9, top_p=0.8, top_k=40)


@pytest.mark.parametrize(
    ("family", "layer_launches", "sampling", "changes"),
    [
        (None, 10, FILTERED, {"page_size": 5, "max_num_batched_tokens": 33}),
        ("deepseek-v3", 16, SamplingConfig(temperature=0.9), {}),
        ("qwen3-5", 13, SAMPLED, {"num_pages": 9, "max_num_seqs": 5}),
        pytest.param(None, 10, SamplingConfig(temperature=0.9), {}, marks=pytest.mark.long),
        pytest.param("gemma4", 17, SamplingConfig(temperature=0.9), {}, marks=pytest.mark.long),  # two sizes of heads
        pytest.param("qwen3-5", 13, SAMPLED, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_that_a_gpu_runs_draws_the_same(
    path: str,
    family: str | None,
    layer_launches: int,
    sampling: SamplingConfig,
    changes: dict[str, Any],
    captured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Triton's kernels of layers, attention and draws, in its interpreter, in captured steps; rows of settings of their own. A step
    takes ``layer_launches`` a layer and 30 besides, at most, one a layer of linear attention. DeepSeek-V3 has its biases, and no
    experts. Padding changes no state."""
    gpu = pytest.importorskip("rlhf_spmd.kernels.gpu_ops", reason="triton is not installed: pip install 'rlhf_spmd[triton]'")
    if importlib.import_module("triton_device").DEVICE.type == "cuda":
        pytest.skip("compares with the CPU's numbers")
    if family is not None:
        path = str(make_model(tmp_path / "model", {**CONFIGS[family], "vocab_size": 301, "first_k_dense_replace": 4}))
    requests = [
        replace(request, overrides=SamplingOverrides(0.0) if request.row_id == 1 else None)
        for request in ragged_requests(num_prompts=3, samples=1, max_new_tokens=12 if family == "qwen3-5" else 4)
    ]
    expected = build(path, enforce_eager=True).generate(requests, sampling, 3, 5)
    mesh = alone()[1]
    counted_launches, counts, decode_once = importlib.import_module("launches").counted_launches, [], ModelRunner._decode_once

    def counted(self: ModelRunner, *arguments: Any) -> None:
        with counted_launches() as launches:
            decode_once(self, *arguments)
        counts.append(launches)

    monkeypatch.setattr(ModelRunner, "_decode_once", counted)
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=gpu.GpuOps())
    load_pretrained(decoder, path)
    generator = Generator(decoder, mesh, replace(SMALL, attention="triton", **changes), STOPS)
    completions = generator.generate(requests, sampling, 3, 5)
    assert_same(completions, expected, NARROW if decoder.num_linear else 2e-5)
    assert captured
    for launches in counts:
        assert len(launches.names) <= layer_launches * len(decoder.layers) + 30, " ".join(launches.names)
        assert launches.names.count("_delta_rule_step") == decoder.num_linear
        assert not launches.waits or family == "gemma4"  # which rounds a number of the host
        assert launches.names.count("attend_singles") == len(decoder.layers) - decoder.num_linear


@pytest.mark.parametrize("eager", [True, False])
def test_a_call_that_is_interrupted_or_fails_leaves_its_rows_as_they_were(path: str, eager: bool, captured: list[Any]) -> None:
    """No window is under way after it."""
    expected = build(path, enforce_eager=True).generate(ragged_requests(), SAMPLED, 3, 5)
    generator = build(path, enforce_eager=eager)
    generator.reserve_pages(64)
    completions = generator.generate_until(ragged_requests(), SAMPLED, 3, 5, GenerationLimits(steps=3), 0)
    before, steps = [row.token_ids for row in generator.kept], iter(range(2))

    def fail() -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate_until([], SAMPLED, 3, 5, GenerationLimits(), 0, fail)
    assert before and [row.token_ids for row in generator.kept] == before
    while generator.kept:
        completions += generator.generate_until([], SAMPLED, 3, 5, GenerationLimits(steps=3), 0)
        assert all(token >= 0 for row in generator.kept for token in row.tokens), "a placeholder is left"
    assert_same(sorted(completions, key=lambda completion: completion.row_id), expected)


@pytest.mark.parametrize("eager", [True, False])
def test_a_row_ends_once(path: str, eager: bool, captured: list[Any]) -> None:
    """Though a window that was launched before its end was read has it, too: in portions, and for a limit of whole groups."""
    begun: list[list[Completion]] = []
    requests = ragged_requests()
    finished_groups = FinishedGroups(requests, 2, lambda completions: None, begun.append)
    build(path, enforce_eager=eager).generate(requests, SAMPLED, 3, 5, finished_groups=finished_groups)
    assert sorted(each.row_id for part in begun for each in part) == sorted(request.row_id for request in requests)
    generator, requests = build(path, enforce_eager=eager), ragged_requests(samples=8, max_new_tokens=40)
    groups = len({request.group_id for request in requests})
    generator.generate_until(requests, SAMPLED, 3, 5, GenerationLimits(fraction=0.5), 0)
    assert groups - len({row.request.group_id for row in generator.kept}) >= groups / 2


@pytest.mark.parametrize("eager", [True, False])
def test_what_is_drawn_behind_a_stop_need_not_be_finite(path: str, eager: bool, captured: list[Any]) -> None:
    generator = build(path, enforce_eager=eager)
    with torch.no_grad():
        generator.decoder.embed.weight[: len(STOPS)] = torch.nan  # type: ignore[union-attr]  # a row ends before it reads one
    requests = [replace(each, prompt_ids=[max(token, 4) for token in each.prompt_ids]) for each in ragged_requests()]
    completions = generator.generate(requests, SAMPLED, 3, 5)
    assert any(each.finish_reason == "stop" for each in completions)
    assert all(each.log_probs.isfinite().all() for each in completions)


def test_sizes_of_graphs() -> None:
    sizes = sorted({padded_size(rows) for rows in range(1, 257)})
    assert len(sizes) == 20 and sizes[:6] == [1, 2, 4, 8, 16, 32] and sizes[-1] == 256
    assert all(rows <= padded_size(rows) < max(2 * rows, rows + 64) for rows in range(1, 2000))
