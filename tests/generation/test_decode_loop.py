"""Several tokens per look of the host, also in captured steps: the bits of the generator that looks at each token.

In place of a CUDA graph stands what a graph is: the launches of the first step, with every number that the host gave them, over the
same memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from generators import SMALL, alone, load, ragged_requests, tokens_of
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, Request, SamplingConfig, config, model_runner
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.finished_groups import FinishedGroups
from rlhf_spmd.generation.graphs import Graphs, padded_size
from rlhf_spmd.generation.model_runner import ModelRunner
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS, make_model

STOPS = range(4)  # rows end early, within bursts
SAMPLED = SamplingConfig(temperature=0.8, top_k=40)


def check_equal(found: list[Completion], wanted: list[Completion]) -> None:
    assert tokens_of(found) == tokens_of(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.log_probs, b.log_probs) and torch.equal(a.log_probs_t1, b.log_probs_t1)
        assert a.finish_reason == b.finish_reason and (a.top_log_probs is None) == (b.top_log_probs is None)
        if a.top_log_probs is not None and b.top_log_probs is not None:
            assert all(map(torch.equal, a.top_log_probs, b.top_log_probs))


def generate(path: str, sampling: SamplingConfig, **changes: Any) -> tuple[list[Completion], Generator]:
    generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, **changes), STOPS)
    return generator.generate(ragged_requests(), sampling, 3, 5), generator


@pytest.mark.parametrize("attention", ["torch", "cpp"])
@pytest.mark.parametrize(
    "changes",
    [
        {"steps_per_sync": 4},
        {"steps_per_sync": 7, "page_size": 5, "max_num_seqs": 3},
        {"steps_per_sync": 64, "page_size": 64, "max_num_seqs": 20},
        {"steps_per_sync": 16, "num_pages": 17},
        {"steps_per_sync": 5, "num_pages": 30, "max_num_batched_tokens": 33, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_and_log_probs_keep_their_bits(
    path: str, attention: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, stepwise = generate(path, SAMPLED, attention=attention)
    assert {c.finish_reason for c in wanted} == {"stop", "length"}
    sizes = []
    decode = ModelRunner._decode

    def noted(self: ModelRunner, rows: Any, repeats: int) -> None:
        sizes.append((len(rows), repeats))
        decode(self, rows, repeats)

    monkeypatch.setattr(ModelRunner, "_decode", noted)
    found, generator = generate(path, SAMPLED, attention=attention, **changes)
    check_equal(found, wanted)
    assert len({size for size, _ in sizes}) > 1 and max(steps for _, steps in sizes) > 1
    assert generator.stats.decode_tokens == sum(len(c.token_ids) for c in found)
    if "num_pages" in changes:
        assert generator.stats.preemptions > 0
    else:
        assert generator.stats.steps < stepwise.stats.steps or changes["max_num_seqs"] == 3


def test_rows_of_a_single_page(path: str) -> None:
    """The table of pages then has one column, a slice with gaps; rows of one token stand still while others go on."""
    limits = [1, 10, 30, 1, 1, 1, 30, 30, 1, 1, 40, 10, 1]
    requests = [Request(i, 0, [3, 4, 5, 6, 7], limit) for i, limit in enumerate(limits)]

    def tokens(**changes: Any) -> tuple[list[list[int]], int]:
        generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, max_num_seqs=6, **changes), ())
        return tokens_of(generator.generate(requests, SAMPLED, 3, 5)), generator.stats.preemptions

    found, preemptions = tokens(steps_per_sync=8, num_pages=8)
    assert found == tokens()[0] and preemptions > 0


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.0), SamplingConfig(min_p=0.02, top_p=0.9)], ids=str)
def test_other_ways_to_draw(path: str, sampling: SamplingConfig) -> None:
    check_equal(generate(path, sampling, steps_per_sync=8)[0], generate(path, sampling)[0])


RULES = SamplingConfig(
    temperature=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.1,
    min_response_length=7,
    logit_bias={5: 1.0},
)


@pytest.mark.parametrize("sampling", [RULES, replace(SAMPLED, logprobs=3)], ids=["rules", "logprobs"])
@pytest.mark.parametrize("own", [False, True])
def test_rules_likeliest_tokens_and_rows_that_draw_by_themselves(path: str, sampling: SamplingConfig, own: bool) -> None:
    """All that follows from the rows' own tokens is found on the device."""
    requests = ragged_requests()
    if own:
        kinds = (None, SamplingOverrides(0.0), SamplingOverrides(1.4, top_p=0.7), SamplingOverrides(1.0, top_k=3))
        requests = [replace(request, overrides=kinds[i % 4], min_new_tokens=3 * (i % 4)) for i, request in enumerate(requests)]
    made, steps = [], []
    for repeats in (1, 8):
        generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, steps_per_sync=repeats), STOPS)
        made.append(generator.generate(requests, sampling, 3, 5))
        steps.append(generator.stats.steps)
    check_equal(made[1], made[0])
    assert steps[1] < steps[0] / 2
    assert all((each.top_log_probs is None) == (not sampling.logprobs) for each in made[0])


def test_interrupted_rows_go_on(path: str) -> None:
    wanted = generate(path, SAMPLED)[0]
    generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, steps_per_sync=6), STOPS)
    found, requests = [], ragged_requests()
    while generator.kept or requests:
        found += generator.generate_until(requests, SAMPLED, 3, 5, GenerationLimits(steps=2), 0)
        requests = []
    check_equal(sorted(found, key=lambda c: c.row_id), wanted)


def generate_on_rank(world: World, path: str) -> list[Any]:
    mesh = build_mesh(world, [0, 1], Layout(tp=2))
    decoder, results = load(path, mesh), []
    for settings in (SMALL, replace(SMALL, steps_per_sync=6)):
        found = Generator(decoder, mesh, settings, STOPS).generate(ragged_requests(), SAMPLED, 3, 5)
        results.append([(c.token_ids, c.log_probs.tolist()) for c in found])
    return results


def test_tensor_parallel_ranks_draw_the_same(path: str) -> None:
    ranks = run_ranks(2, generate_on_rank, path)
    assert ranks[0] == ranks[1] and ranks[0][0] == ranks[0][1]


def test_training_through_ranks_has_the_same_numbers(tmp_path: Path) -> None:
    """Two PPO steps on two ranks; bit-equal log-probs of rollout and training forward included."""
    losses = []
    for steps in (1, 3):
        run = tmp_path / str(steps)
        overrides = tasks.settings(run, 2, f"models.actor.generation.steps_per_sync={steps}")
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), overrides)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert all(row["rollout/log_prob_diff_max"] == 0 for row in rows)
        losses.append([(row["actor/pg_loss"], row["reward/mean"], row["response_length/mean"]) for row in rows])
        assert len(rows) == 2 and all(row["generation/steps"] > 1 for row in rows)
    assert losses[0] == losses[1]


GRAPH_RULES = replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.1, min_response_length=7, logit_bias={5: 1.0})


@dataclass
class Frozen:
    """In place of a graph."""

    replay: Callable[[], None]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys of the graphs that are captured from now on, on this machine, as if it were a GPU."""
    keys: list[Any] = []

    def capture(self: Graphs, step: Callable[[], None]) -> Frozen:
        keys.append(step)
        step()
        return Frozen(step)

    monkeypatch.setattr(Graphs, "_capture", capture)
    for module in (model_runner, config):
        monkeypatch.setattr(module, "capabilities", lambda device: replace(capabilities(device), graphs=True, streams=True))
    return keys


def build(path: str, **changes: Any) -> Generator:
    decoder = load(path, alone()[1])
    generator = Generator(decoder, alone()[1], replace(SMALL, **changes), STOPS)
    backend = build_backend("torch", decoder.dtype, torch.device("cpu"))
    generator.__dict__["_backend"] = replace(backend, capturable=changes.get("enforce_eager") is not True)
    return generator


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps_per_sync": 3, "num_pages": 17}, {"page_size": 5, "max_num_batched_tokens": 33, "max_num_seqs": 7}],
    ids=str,
)
@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, SamplingConfig(temperature=0.0), GRAPH_RULES, replace(SAMPLED, logprobs=3)],
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
    ("family", "a_layer", "sampling"),
    [
        (None, 10, SamplingConfig(temperature=0.9)),
        (None, 10, SamplingConfig(temperature=0.9, top_p=0.8, top_k=40)),
        ("deepseek-v3", 16, SamplingConfig(temperature=0.9)),
        ("gemma4", 17, SamplingConfig(temperature=0.9)),
    ],
    ids=["plain", "filtered", "latent attention", "two sizes of heads"],
)
def test_all_that_a_gpu_runs_draws_the_same(
    path: str,
    family: str | None,
    a_layer: int,
    sampling: SamplingConfig,
    captured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Triton's kernels of layers, attention and draws, in its interpreter, in captured steps; rows of settings of their own. A step
    takes ``a_layer`` launches a layer and 30 besides, at most. DeepSeek-V3 has its biases, and no experts."""
    gpu = pytest.importorskip("rlhf_spmd.kernels.gpu_ops", reason="triton is not installed: pip install 'rlhf_spmd[triton]'")
    if importlib.import_module("triton_device").DEVICE.type == "cuda":
        pytest.skip("compares with the CPU's numbers")
    if family is not None:
        path = str(make_model(tmp_path / "model", {**CONFIGS[family], "vocab_size": 301, "first_k_dense_replace": 4}))
    requests = [
        replace(request, overrides=SamplingOverrides(0.0) if request.row_id == 1 else None)
        for request in ragged_requests(num_prompts=3, samples=1, max_new_tokens=4)
    ]
    wanted = build(path, enforce_eager=True).generate(requests, sampling, 3, 5)
    mesh = alone()[1]
    counted_launches, counts, decode_once = importlib.import_module("launches").counted_launches, [], ModelRunner._decode_once

    def counted(self: ModelRunner, *arguments: Any) -> None:
        with counted_launches() as launches:
            decode_once(self, *arguments)
        counts.append(launches.names)

    monkeypatch.setattr(ModelRunner, "_decode_once", counted)
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=gpu.GpuOps())
    load_pretrained(decoder, path)
    found = Generator(decoder, mesh, replace(SMALL, attention="triton"), STOPS).generate(requests, sampling, 3, 5)
    assert tokens_of(found) == tokens_of(wanted) and captured
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=2e-5, rtol=0)
    most = max(counts, key=lambda names: len(names))
    assert len(most) <= a_layer * len(decoder.layers) + 30, " ".join(most)


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
def test_a_call_that_fails_leaves_its_rows_as_they_were(path: str, eager: bool, captured: list[Any]) -> None:
    wanted = build(path, enforce_eager=True).generate(ragged_requests(), SAMPLED, 3, 5)
    generator = build(path, enforce_eager=eager)
    found = generator.generate_until(ragged_requests(), SAMPLED, 3, 5, GenerationLimits(steps=3), 0)
    before, steps = [row.token_ids for row in generator.kept], iter(range(2))

    def fail() -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate_until([], SAMPLED, 3, 5, GenerationLimits(), 0, fail)
    assert before and [row.token_ids for row in generator.kept] == before
    found += generator.generate_until([], SAMPLED, 3, 5, GenerationLimits(), 0)
    check_equal(sorted(found, key=lambda completion: completion.row_id), wanted)


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
