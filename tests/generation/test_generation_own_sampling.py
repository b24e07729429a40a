"""Rows that draw otherwise than others in one continuous batch: each is the row that it would be in a batch of its like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generators import MODELS, SMALL, alone, load, ragged_requests
from ranks import run_ranks
from rlhf_spmd.generation import GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World

COMMON = SamplingConfig(temperature=0.8, logprobs=2, repetition_penalty=1.2)
OWN = (
    None,
    SamplingOverrides(0.0),
    SamplingOverrides(1.4, top_p=0.7),
    SamplingOverrides(1.0, top_k=3),
    SamplingOverrides(0.8, min_p=0.2),
    SamplingOverrides(0.8),
)


def mixed() -> list[Request]:
    return [replace(request, drawing=OWN[i % len(OWN)]) for i, request in enumerate(ragged_requests())]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(root, MODELS["qwen3"], seed=7)
    return str(root)


def found(generator: Generator, requests: list[Request], sampling: SamplingConfig = COMMON) -> dict[int, Any]:
    completions = generator.generate(requests, sampling, 3, 5)
    return {c.row_id: (c.token_ids, c.log_probs.tolist(), c.log_probs_t1.tolist()) for c in completions}


def one_by_one(path: str, dtype: torch.dtype = torch.float32) -> dict[int, Any]:
    """Each kind of rows in a call of its own, whose settings are theirs."""
    generator = Generator(load(path, alone()[1], dtype), alone()[1], SMALL, {2})
    rows: dict[int, Any] = {}
    for own in OWN:
        alike = [replace(request, drawing=None) for request in mixed() if request.drawing == own]
        rows |= found(generator, alike, COMMON if own is None else COMMON.drawn_by(own))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("changes", [{}, {"num_pages": 20}, {"speculative_tokens": 3}, {"steps_per_sync": 4}], ids=str)
def test_a_mixed_batch_is_the_batches_of_each_kind(path: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    generator = Generator(load(path, alone()[1], dtype), alone()[1], replace(SMALL, **changes), {2})
    together, wanted = found(generator, mixed()), one_by_one(path, dtype)
    if dtype == torch.float32:
        assert together == wanted
    for row, (tokens, *log_probs) in together.items():  # products in float64 depend on the batch
        assert tokens == wanted[row][0]
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(wanted[row][1:]), atol=1e-12, rtol=0)
    greedy = [request.row_id for request in mixed() if request.drawing == SamplingOverrides(0.0)]
    assert all(together[row][1] == together[row][2] for row in greedy)  # log-probs at temperature 1
    others = [row for row in together if mixed()[row].drawing in (None, OWN[2]) and len(together[row][0]) > 2]
    assert others and all(together[row][1] != together[row][2] for row in others)


def test_the_same_settings_in_every_row_are_those_of_the_call(path: str) -> None:
    generator = Generator(load(path, alone()[1]), alone()[1], replace(SMALL, steps_per_sync=4), {2})
    plain = SamplingConfig(temperature=1.3, top_k=9)
    own = [replace(request, drawing=plain.drawing) for request in ragged_requests()]
    assert found(generator, own, SamplingConfig()) == found(generator, ragged_requests(), plain)


def generate_mixed(world: World, path: str, layout: Layout, config: GenerationConfig) -> dict[int, Any]:
    mesh = build_mesh(world, list(range(world.size)), layout)
    requests = [request for request in mixed() if mesh.dp_rank == 0 or request.group_id == 1]
    requests = [request for request in requests if layout.dp == 1 or (request.group_id == 1) == (mesh.dp_rank == 1)]
    return found(Generator(load(path, mesh), mesh, config, {2}), requests)


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
        generator.generate([Request(4, 0, [3], 4), Request(5, 0, [3], 4, drawing=SamplingOverrides(top_p=0.0))], COMMON, 0, 0)
