"""The same programs on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import tasks
from generators import MODELS, alone, ragged_requests, tokens_of
from rlhf_spmd.generation import GenerationConfig, Generator, SamplingConfig
from rlhf_spmd.kernels.devices import unavailable
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained, write_random_model
from rlhf_spmd.workers.optimizer import OptimConfig, Optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def float32_products(as_on_a_rank: None) -> None:
    """As in programs on GPUs; what CPU ranks choose would be TF32 here."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("dtype", "tolerance", "offload"), [("float32", 1e-3, "false"), ("bfloat16", 0.1, "true")])
def test_ppo_runs_on_a_gpu(tmp_path: Path, dtype: str, tolerance: float, offload: str) -> None:
    """Three steps with nccl; generation and training agree within what the kernels differ by. Also with all weights in host memory
    between calls."""
    roles = ("actor", "critic", "reference")
    overrides = [f"models.{role}.{key}" for role in roles for key in (f"dtype={dtype}", f"offload={offload}")]
    process = tasks.start_torchrun(tmp_path, tasks.settings(tmp_path, 3, *overrides), *tasks.one_node(1))
    assert tasks.finish(process, tmp_path) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert row["rollout/log_prob_diff_max"] < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_states_on_the_host_change_no_bit(dtype: torch.dtype) -> None:
    """They lie in pinned host memory, come to the device bucket by bucket, and give the same steps."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (300, 70), "b": (2000, 3000), "c": (7,), "d": (4000, 4000)}  # two buckets
    runs = []
    for offload in (False, True):
        generator.manual_seed(1)
        params = {name: torch.randn(shape, generator=generator).to("cuda", dtype) for name, shape in shapes.items()}
        optimizer = Optimizer(OptimConfig(lr=1e-2, offload=offload), params, 3)
        for _ in range(3):
            grads = {name: torch.randn(shape, generator=generator).cuda() for name, shape in shapes.items()}
            optimizer.step(params, grads)
        runs.append((params, optimizer.state_tensors()))
    (params, states), (others, on_host) = runs
    for name, param in params.items():
        assert torch.equal(param, others[name])
        for key, state in on_host[name].items():
            assert state.is_pinned() and torch.equal(state, states[name][key].cpu()), f"{key} of {name}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gpu") / "qwen3"
    write_random_model(path, {**MODELS["qwen3"], "head_dim": 64, "hidden_size": 256}, seed=7)
    return str(path)


def generate(
    path: str, dtype: torch.dtype, sampling: SamplingConfig, **changes: object
) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of all rows, and their log-probs, one after the other."""
    mesh = alone()[1]
    decoder = Decoder(read_spec(path), "lm", 0, 1, mesh.tp, dtype, "cuda")
    load_pretrained(decoder, path)
    settings = {"page_size": 256, "max_num_seqs": 16, "max_num_batched_tokens": 512, **changes}
    completions = Generator(decoder, mesh, GenerationConfig(**settings), [0, 1]).generate(ragged_requests(), sampling, 3, 5)
    return tokens_of(completions), torch.cat([c.log_probs for c in completions])


def test_triton_draws_what_torch_draws_and_batches_change_no_bit(path: str) -> None:
    sampling = SamplingConfig(temperature=0.9)
    (tokens, log_probs), (torchs, others) = (
        generate(path, torch.float32, sampling, attention=name) for name in ("triton", "torch")
    )
    assert tokens == torchs
    torch.testing.assert_close(log_probs, others, atol=1e-4, rtol=0)
    for changes in ({"page_size": 16, "max_num_batched_tokens": 33}, {"page_size": 7, "num_pages": 60}):
        assert generate(path, torch.float32, sampling, attention="triton", **changes)[0] == tokens


@pytest.mark.parametrize("attention", ["triton", "flash_attn"])
@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.9, top_k=20), SamplingConfig(temperature=0.0)], ids=str)
def test_cuda_graphs_draw_what_steps_draw(path: str, attention: str, sampling: SamplingConfig) -> None:
    """Other sizes of batch may round otherwise in cuBLAS, so log-probs are close and tokens the same but for ties."""
    if why := unavailable(attention, torch.device("cuda"), torch.bfloat16):
        pytest.skip(why)
    wanted, log_probs = generate(path, torch.bfloat16, sampling, attention=attention)
    for changes in ({"steps_per_sync": 8}, {"steps_per_sync": 8, "enforce_eager": False}, {"enforce_eager": False}):
        tokens, others = generate(path, torch.bfloat16, sampling, attention=attention, **changes)
        same = [a == b for a, b in zip(tokens, wanted, strict=True)]
        assert sum(same) >= 0.8 * len(same)
        if all(same):
            torch.testing.assert_close(others, log_probs, atol=0.1, rtol=0)


def test_flash_attn_draws_about_what_triton_draws(path: str) -> None:
    if why := unavailable("flash_attn", torch.device("cuda"), torch.bfloat16):
        pytest.skip(why)
    greedy = SamplingConfig(temperature=0.0)
    ours, theirs = (generate(path, torch.bfloat16, greedy, attention=name)[0] for name in ("triton", "flash_attn"))
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 0.8 * len(ours)
