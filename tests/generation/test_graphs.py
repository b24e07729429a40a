"""Captured decode steps, their graphs replaced by what a graph is: the launches of the first step, with every number that the host
gave them, over the same memory. The tokens and log-probs of the generator that captures nothing, bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from generators import MODELS, SMALL, alone, load, ragged_requests, tokens_of
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, SamplingConfig, config, runner
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.finished_groups import FinishedGroups
from rlhf_spmd.generation.graphs import Graphs, padded_size
from rlhf_spmd.generation.runner import Runner
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained, write_random_model

STOPS = range(4)
SAMPLED = SamplingConfig(temperature=0.8, top_k=40)
RULES = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.1, min_response_length=7, logit_bias={5: 1.0})


@dataclass
class Frozen:
    """In place of a graph."""

    replay: Callable[[], None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graphs") / "qwen3"
    write_random_model(path, MODELS["qwen3"], seed=7)
    return str(path)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys of the graphs that are captured from now on, on this machine, as if it were a GPU."""
    keys: list[Any] = []

    def capture(self: Graphs, step: Callable[[], None]) -> Frozen:
        keys.append(step)
        step()
        return Frozen(step)

    monkeypatch.setattr(Graphs, "_capture", capture)
    for module in (runner, config):
        monkeypatch.setattr(module, "capabilities", lambda device: replace(capabilities(device), graphs=True, streams=True))
    return keys


def build(path: str, **changes: Any) -> Generator:
    decoder = load(path, alone()[1])
    generator = Generator(decoder, alone()[1], replace(SMALL, **changes), STOPS)
    backend = build_backend("torch", decoder.dtype, torch.device("cpu"))
    generator.__dict__["_backend"] = replace(backend, capturable=changes.get("enforce_eager") is not True)
    return generator


def check_equal(found: list[Completion], wanted: list[Completion]) -> None:
    assert tokens_of(found) == tokens_of(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.log_probs, b.log_probs) and torch.equal(a.log_probs_t1, b.log_probs_t1)
        assert a.finish_reason == b.finish_reason and (a.top_log_probs is None) == (b.top_log_probs is None)
        if a.top_log_probs is not None and b.top_log_probs is not None:
            assert all(map(torch.equal, a.top_log_probs, b.top_log_probs))


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps_per_sync": 3, "num_pages": 17}, {"page_size": 5, "max_num_batched_tokens": 33, "max_num_seqs": 7}],
    ids=str,
)
@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, SamplingConfig(temperature=0.0), RULES, replace(SAMPLED, logprobs=3)],
    ids=["sampled", "greedy", "rules", "logprobs"],
)
def test_captured_steps_keep_the_bits(
    path: str, sampling: SamplingConfig, changes: dict[str, Any], captured: list[Any]
) -> None:
    """Prompts come while others decode, rows stop within windows, and two windows are under way."""
    wanted = build(path, enforce_eager=True, **changes).generate(ragged_requests(), sampling, 3, 5)
    assert not captured and {c.finish_reason for c in wanted} == {"stop", "length"}
    generator = build(path, **changes)
    check_equal(generator.generate(ragged_requests(), sampling, 3, 5), wanted)
    assert 1 < len(captured) <= len({padded_size(n + 1) for n in range(20)})
    assert generator.stats.decode_tokens == sum(len(c.token_ids) for c in wanted)
    # other weights, lengths and seeds: nothing of the first call may be left in what a graph has fixed
    with torch.no_grad():
        generator.decoder.layers[0].gate_up.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    other = build(path, enforce_eager=True, **changes)
    other.decoder.load_state_dict(generator.decoder.state_dict())
    requests = [replace(request, row_id=request.row_id + 50) for request in ragged_requests(max_new_tokens=9)]
    check_equal(generator.generate(requests, sampling, 4, 6), other.generate(requests, sampling, 4, 6))


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


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(temperature=0.9), SamplingConfig(temperature=0.9, top_p=0.8, top_k=40)],
    ids=["plain", "filtered"],
)
def test_all_that_a_gpu_runs_draws_the_same(
    path: str, sampling: SamplingConfig, captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels of layers, attention and draws, in its interpreter, in captured steps; rows of settings of their own. A step
    takes 10 launches a layer and 30 besides, at most."""
    gpu = pytest.importorskip("rlhf_spmd.kernels.gpu", reason="triton is not installed: pip install 'rlhf_spmd[triton]'")
    if importlib.import_module("triton_device").DEVICE.type == "cuda":
        pytest.skip("compares with the CPU's numbers")
    requests = [
        replace(request, drawing=SamplingOverrides(0.0) if request.row_id == 1 else None)
        for request in ragged_requests(num_prompts=3, samples=1, max_new_tokens=4)
    ]
    wanted = build(path, enforce_eager=True).generate(requests, sampling, 3, 5)
    mesh = alone()[1]
    counted_launches, counts, decode_once = importlib.import_module("launches").counted_launches, [], Runner._decode_once

    def counted(self: Runner, *arguments: Any) -> None:
        with counted_launches() as launches:
            decode_once(self, *arguments)
        counts.append(launches.names)

    monkeypatch.setattr(Runner, "_decode_once", counted)
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=gpu.GpuOps())
    load_pretrained(decoder, path)
    found = Generator(decoder, mesh, replace(SMALL, attention="triton"), STOPS).generate(requests, sampling, 3, 5)
    assert tokens_of(found) == tokens_of(wanted) and captured
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=2e-5, rtol=0)
    assert counts and all(len(names) <= 10 * len(decoder.layers) + 30 for names in counts), " ".join(max(counts, key=len))


@pytest.mark.parametrize("eager", [True, False])
def test_a_call_that_is_interrupted_leaves_no_window_under_way(path: str, eager: bool, captured: list[Any]) -> None:
    def run(limits: GenerationLimits) -> list[Completion]:
        generator, found, requests = build(path, enforce_eager=eager), [], ragged_requests()
        generator.reserve_pages(64)
        while generator.kept or requests:
            found += generator.generate_until(requests, SAMPLED, 3, 5, limits, 0)
            requests = []
            assert all(token >= 0 for row in generator.kept for token in row.tokens), "a placeholder is left"
        return sorted(found, key=lambda completion: completion.row_id)

    check_equal(run(GenerationLimits(steps=3)), run(GenerationLimits()))


@pytest.mark.parametrize("eager", [True, False])
def test_a_row_ends_once(path: str, eager: bool, captured: list[Any]) -> None:
    """Though a window that was launched before its end was read has it, too: in portions, and for a limit of whole groups."""
    begun: list[list[Completion]] = []
    requests = ragged_requests()
    portions = FinishedGroups(requests, 2, lambda completions: None, begun.append)
    build(path, enforce_eager=eager).generate(requests, SAMPLED, 3, 5, portions=portions)
    assert sorted(each.row_id for part in begun for each in part) == sorted(request.row_id for request in requests)
    generator, requests = build(path, enforce_eager=eager), ragged_requests(samples=8, max_new_tokens=40)
    groups = len({request.group_id for request in requests})
    generator.generate_until(requests, SAMPLED, 3, 5, GenerationLimits(fraction=0.5), 0)
    assert groups - len({row.request.group_id for row in generator.kept}) >= groups / 2


@pytest.mark.parametrize("eager", [True, False])
def test_what_is_drawn_behind_a_stop_need_not_be_finite(path: str, eager: bool, captured: list[Any]) -> None:
    def run(steps: int | None) -> list[Completion]:
        generator = build(path, enforce_eager=eager, steps_per_sync=steps)
        with torch.no_grad():
            generator.decoder.embed.weight[: len(STOPS)] = torch.nan  # type: ignore[union-attr]  # a row ends before it reads one
        return generator.generate(
            [replace(each, prompt_ids=[max(token, 4) for token in each.prompt_ids]) for each in ragged_requests()],
            SAMPLED,
            3,
            5,
        )

    found = run(None)
    assert any(each.finish_reason == "stop" for each in found) and all(each.log_probs.isfinite().all() for each in found)


def test_sizes_of_graphs() -> None:
    sizes = sorted({padded_size(rows) for rows in range(1, 257)})
    assert len(sizes) == 20 and sizes[:6] == [1, 2, 4, 8, 16, 32] and sizes[-1] == 256
    assert all(rows <= padded_size(rows) < max(2 * rows, rows + 64) for rows in range(1, 2000))
