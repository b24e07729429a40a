"""Several steps between two looks of the host: the tokens and log-probs of the generator that looks at each, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from generators import MODELS, SMALL, alone, load, ragged_requests, tokens_of
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, Generator, Request, SamplingConfig
from rlhf_spmd.generation.runner import Runner
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

STOPS = range(4)  # rows end early, within bursts
SAMPLED = SamplingConfig(temperature=0.8, top_k=40)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("loop") / "qwen3"
    write_random_model(path, MODELS["qwen3"], seed=7)
    return str(path)


def generate(path: str, sampling: SamplingConfig, **changes: Any) -> tuple[list[Completion], Generator]:
    generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, **changes), STOPS)
    return generator.generate(ragged_requests(), sampling, 3, 5), generator


def check_equal(found: list[Completion], wanted: list[Completion]) -> None:
    assert tokens_of(found) == tokens_of(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.log_probs, b.log_probs) and torch.equal(a.log_probs_t1, b.log_probs_t1)
        assert a.finish_reason == b.finish_reason


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
    decode = Runner._decode

    def noted(self: Runner, rows: Any, repeats: int) -> None:
        sizes.append((len(rows), repeats))
        decode(self, rows, repeats)

    monkeypatch.setattr(Runner, "_decode", noted)
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
        requests = [replace(request, drawing=kinds[i % 4], min_new_tokens=3 * (i % 4)) for i, request in enumerate(requests)]
    made, steps = [], []
    for repeats in (1, 8):
        generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, steps_per_sync=repeats), STOPS)
        made.append(generator.generate(requests, sampling, 3, 5))
        steps.append(generator.stats.steps)
    check_equal(made[1], made[0])
    assert steps[1] < steps[0] / 2
    for a, b in zip(*made, strict=True):
        assert (a.top_log_probs is None) == (b.top_log_probs is None) == (not sampling.logprobs)
        if a.top_log_probs is not None and b.top_log_probs is not None:
            assert all(map(torch.equal, a.top_log_probs, b.top_log_probs))


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
    for config in (SMALL, replace(SMALL, steps_per_sync=6)):
        found = Generator(decoder, mesh, config, STOPS).generate(ragged_requests(), SAMPLED, 3, 5)
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
