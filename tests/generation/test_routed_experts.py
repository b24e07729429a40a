"""The experts that completions have are those of a forward pass over the whole row, however its tokens were computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from generators import (
    SMALL,
    LastDigits,
    alone,
    assert_recorded,
    assert_same,
    chosen_by,
    generate_in_pieces,
    load,
    ragged_requests,
)
from ranks import run_ranks
from rlhf_spmd.generation import Completion, GenerationLimits, GenerationStats, Generator, Request, SamplingConfig
from rlhf_spmd.generation.call import FinishedGroups
from rlhf_spmd.generation.routed_experts import ExpertPages
from rlhf_spmd.kernels import Ops
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.partial_rollouts import PartialRollouts
from small_models import CONFIGS
from triton_device import DEVICE

SIZES = {"vocab_size": 301, "max_position_embeddings": 512, "num_hidden_layers": 3, "initializer_range": 0.2, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen": {**CONFIGS["qwen3-moe"], **SIZES, "mlp_only_layers": [0]},  # with pp=3 a stage without experts
    "deepseek": {**CONFIGS["deepseek-v3"], **SIZES},
    "wide": {**CONFIGS["qwen3-moe"], **SIZES, "num_experts": 260},  # which no byte can number
}
SAMPLING = SamplingConfig(temperature=0.9, repetition_penalty=1.2, min_response_length=3)
STOPPING = SamplingConfig(temperature=0.5, allowed_token_ids=[5, 6, 7], stop=["5757"])
CASES: dict[str, tuple[SamplingConfig, dict[str, Any]]] = {
    "shared prompts": (SAMPLING, {}),
    "preemption": (SAMPLING, {"num_pages": 54, "max_num_seqs": 18}),
    "chunked prefill": (SAMPLING, {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "whole prompts": (SAMPLING, {"enable_chunked_prefill": False, "enable_prefix_caching": False}),
    "several tokens at once": (STOPPING, {"steps_per_sync": 5}),
    "pieces": (SAMPLING, {"max_num_seqs": 9}),
    "offloaded pieces": (SAMPLING, {"max_num_seqs": 9, "kv_cache": "offload", "num_pages": 300}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_random_model(base / name, config, seed=7)
    write_random_model(base / "other", MODELS["qwen"], seed=8)
    return {name: str(base / name) for name in (*MODELS, "other")}


def generate(decoder: Decoder, mesh: Mesh, case: str, records_experts: bool = True) -> tuple[list[Completion], GenerationStats]:
    sampling, changes = CASES[case]
    config = replace(SMALL, **changes)
    generator = Generator(decoder, mesh, config, {2}, LastDigits(None), records_experts=records_experts)
    if "pieces" in case:
        limits = GenerationLimits(tokens=60)
        completions = generate_in_pieces(generator, ragged_requests(), sampling, limits, Generator.before_training)
    else:
        completions = generator.generate(ragged_requests(), sampling, 3, 5)
    return completions, generator.stats


@pytest.mark.parametrize(("case", "kind"), [(case, ("deepseek", "qwen", "wide")[i % 3]) for i, case in enumerate(CASES)])
def test_recorded_are_those_of_a_forward_pass(models: dict[str, str], kind: str, case: str) -> None:
    """fp32."""
    mesh = alone()[1]
    decoder = load(models[kind], mesh)
    completions, stats = generate(decoder, mesh, case)
    assert_recorded(decoder, ragged_requests(), completions)
    assert (stats.preemptions > 0) == (case == "preemption")
    plain, _ = generate(decoder, mesh, case, records_experts=False)
    assert_same(completions, plain)
    assert all(completion.experts is None for completion in plain)
    if kind == "wide":
        assert max(int(done.experts.max()) for done in completions if done.experts is not None) > 255
        assert ExpertPages.token_bytes(decoder) == 2 * 2 * 3  # two layers, three experts, two bytes


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with the CPU's numbers")
def test_the_arithmetic_of_gpus_records_the_same(models: dict[str, str]) -> None:
    """In Triton's interpreter: its routing, its attention, and steps that the host does not look at."""
    mesh, requests = alone()[1], ragged_requests(num_prompts=3, samples=2, max_new_tokens=6)
    results = list[list[Completion]]()
    for attention, ops in (("torch", Ops()), ("triton", GpuOps())):
        decoder = Decoder(read_spec(models["qwen"]), "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=ops)
        decoder.load_state_dict(load(models["qwen"], mesh).state_dict())
        config = replace(SMALL, attention=attention, steps_per_sync=3, max_num_batched_tokens=20)
        generator = Generator(decoder, mesh, config, {2}, records_experts=True)
        results.append(generator.generate(requests, SamplingConfig(temperature=0.9), 3, 5))
    for torchs, ours in zip(*results, strict=True):
        assert ours.token_ids == torchs.token_ids and torch.equal(ours.experts, torchs.experts)


def same(ours: Tensor | None, reference: Tensor | None) -> bool:
    return ours is not None and reference is not None and torch.equal(ours, reference)


def on_ranks(world: World, path: str, layout: Layout) -> dict[str, list[Tensor | None]]:
    mesh = build_mesh(world, list(range(world.size)), layout) if world.size > 1 else alone()[1]
    decoder = load(path, mesh, torch.float64)
    return {case: [done.experts for done in generate(decoder, mesh, case)[0]] for case in ("preemption", "pieces")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen", Layout(pp=3)),
        ("deepseek", Layout(tp=2)),
        pytest.param("qwen", Layout(tp=2), marks=pytest.mark.long),
        pytest.param("deepseek", Layout(pp=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_rank_has_the_experts_of_all_stages(models: dict[str, str], kind: str, layout: Layout) -> None:
    expected = on_ranks(alone()[0], models[kind], Layout())
    for experts_of in run_ranks(layout.size, on_ranks, models[kind], layout):
        for case, experts in expected.items():
            assert all(map(same, experts_of[case], experts)), case


@pytest.mark.parametrize(("kv_cache", "saved"), [("free", False), ("keep", False), ("free", True)])
def test_tokens_keep_the_experts_that_drew_them(models: dict[str, str], kv_cache: Literal["free", "keep"], saved: bool) -> None:
    """A row goes on with other weights, maybe from a checkpoint: its first tokens have the experts of the first weights."""
    mesh, row, steps = alone()[1], Request(0, 0, [5, 6, 7, 8, 9] * 5, 12), 4
    first, second = load(models["qwen"], mesh), load(models["other"], mesh)
    rollouts = PartialRollouts(Generator(first, mesh, replace(SMALL, kv_cache=kv_cache), (), records_experts=True))
    assert rollouts.generator.generate_until([row], SAMPLING, 3, 5, GenerationLimits(steps=steps), 1) == []
    rollouts.generator.before_training()
    if saved:
        state = rollouts.state()
        rollouts = PartialRollouts(Generator(first, mesh, SMALL, (), records_experts=True))
        rollouts.restore([state])
    rollouts.groups = {} if saved else {0: [0]}
    rollouts.generator.decoder = second
    (done,), _ = rollouts.advance([row], SAMPLING, 6, 2, 1, lambda: None)
    tokens, computed = [*row.prompt_ids, *done.token_ids], len(row.prompt_ids) + steps - 1
    assert done.experts is not None and len(done.experts) == len(tokens)
    assert torch.equal(done.experts[:computed].long(), chosen_by(first, tokens)[:computed])
    assert not torch.equal(done.experts[:computed].long(), chosen_by(second, tokens)[:computed])
    if saved or kv_cache == "free":  # all keys are those of the second weights
        assert torch.equal(done.experts[computed:-1].long(), chosen_by(second, tokens)[computed:-1])


def test_rows_that_leave_early_have_their_experts(models: dict[str, str]) -> None:
    mesh, requests, early = alone()[1], ragged_requests(), list[Completion]()
    generator = Generator(load(models["qwen"], mesh), mesh, SMALL, {2}, records_experts=True)
    groups = FinishedGroups(requests, 3, early.extend)
    completions = generator.generate(requests, SAMPLING, 3, 5, finished_groups=groups)
    assert 0 < len(early) < len(requests)
    assert all(same(done.experts, completions[done.row_id].experts) for done in early)
