"""Decoders over the arithmetic of GPUs against those over torch's, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from generators import MODELS, SMALL, alone, load, ragged_requests, tokens_of
from ranks import run_ranks
from rlhf_spmd.generation import Generator, SamplingConfig
from rlhf_spmd.kernels import Ops
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.spec import read_eos_ids, spec_from_config
from rlhf_spmd.models.weights import init_random, write_random_model
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS
from triton_device import DEVICE

TOKENS = [5, 1, 9]


def results_of(
    ops: Ops,
    name: str,
    tp: Group,
    checkpointing: str = "none",
    sequence_parallel: bool = False,
    lora: LoraConfig | None = None,
    blocks: int = 1,
    device: torch.device = DEVICE,
    ep: Group | None = None,
) -> dict[str, Tensor]:
    """Log-probs with and without gradients, and gradients of all parameters."""
    spec = spec_from_config({**CONFIGS[name], "num_hidden_layers": 2}, "test")
    decoder = Decoder(spec, "lm", 0, 1, tp, torch.float32, device, blocks, sequence_parallel, ops, lora, ep=ep)
    init_random(decoder, 3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(drawn + (parameter.ndim == 1))
    decoder.keep_activations(checkpointing)
    ids, labels = torch.randint(0, spec.vocab_size, (2, sum(TOKENS)), generator=generator).to(device)
    attention = PackedAttention(TOKENS, device, ops)
    with torch.no_grad():
        found = {"scored": token_log_probs(decoder, decoder(ids, attention), labels, 1.0)[0]}
    found["log_probs"], _ = token_log_probs(decoder, decoder(ids, attention), labels, 1.0)
    found["log_probs"].sum().backward()
    for parameter_name, parameter in decoder.named_parameters():
        if parameter.grad is not None:
            found[parameter_name] = parameter.grad
    return {key: value.detach().cpu() for key, value in found.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        off = (found[key] - value).abs().max().item() / max(value.abs().max().item(), 1)
        assert off < 2e-5, f"{key}: {off}"


LINEAR = ["qwen3-5", "qwen3-next"]
DENSE = [
    "llama-tied-bias",
    "qwen3-tied",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi4-mini",
    "olmo2",
    "exaone4",
    "smollm3",
    "granite",
    "glm4",
    "ministral3",
]


EXPERTS = ["qwen3-moe", "mixtral", "qwen2-moe", "olmoe", "glm4-moe", "gpt-oss", "deepseek-v3", "deepseek-v2"]


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, *LINEAR])
def test_log_probs_and_gradients_are_those_of_torch(name: str) -> None:
    expected = results_of(Ops(), name, solo())
    for checkpointing in CHECKPOINTING if name == "qwen3-tied" else ("none",):
        assert_near(results_of(GpuOps(), name, solo(), checkpointing), expected)


def test_adapters_and_fused_blocks() -> None:
    lora = LoraConfig(rank=2)
    assert_near(results_of(GpuOps(), "llama", solo(), lora=lora), results_of(Ops(), "llama", solo(), lora=lora))
    expected = results_of(Ops(), "qwen3-tied", solo(), blocks=2)
    assert_near(results_of(GpuOps(), "qwen3-tied", solo(), "selective", blocks=2), expected)


def _of_shared_experts(world: World, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ep, cpu = world.group([0, 1], "ep"), torch.device("cpu")
    ours, torchs = (results_of(ops, name, solo(), "selective", device=cpu, ep=ep) for ops in (GpuOps(), Ops()))
    return ours, torchs


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_in_parallel(name: str) -> None:
    for ours, torchs in run_ranks(2, _of_shared_experts, name):
        assert_near(ours, torchs)


def _on_rank(world: World, name: str, sequence_parallel: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tp, cpu = world.group([0, 1], "tp"), torch.device("cpu")
    assert tp is not None, "both ranks are in it"
    ours, torchs = (results_of(ops, name, tp, "selective", sequence_parallel, device=cpu) for ops in (GpuOps(), Ops()))
    return ours, torchs


@pytest.mark.parametrize(("name", "sequence_parallel"), [("qwen3-tied", False), ("gemma3", True), ("olmo3", True)])
def test_on_two_ranks(name: str, sequence_parallel: bool) -> None:
    for ours, torchs in run_ranks(2, _on_rank, name, sequence_parallel):
        assert_near(ours, torchs)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with the CPU's numbers")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        ("qwen3-5", {}),
        ("deepseek-v3", {}),
        ("deepseek-v2", {"page_size": 5, "max_num_batched_tokens": 24, "speculative_tokens": 2}),
    ],
    ids=str,
)
def test_generation_that_writes_pages_from_the_heads_draws_the_same_tokens(
    tmp_path: Path, name: str, changes: dict[str, int]
) -> None:
    config = MODELS[name] if name in MODELS else {**CONFIGS[name], "vocab_size": 301}
    write_random_model(tmp_path / name, {**config, "num_hidden_layers": 2}, seed=7)
    path, mesh = str(tmp_path / name), alone()[1]
    requests, results = ragged_requests(num_prompts=3, samples=1, max_new_tokens=4), []
    for attention in ("torch", "triton"):
        decoder = load(path, mesh)
        if attention == "triton":
            trained, decoder = decoder, Decoder(decoder.spec, "lm", 0, 1, mesh.tp, torch.float32, "cpu", ops=GpuOps())
            decoder.load_state_dict(trained.state_dict())
        generator = Generator(decoder, mesh, replace(SMALL, attention=attention, **changes), read_eos_ids(path))
        results.append(generator.generate(requests, SamplingConfig(temperature=0.9), 3, 5))
    assert tokens_of(results[0]) == tokens_of(results[1])
    for ours, torchs in zip(*results[::-1], strict=True):
        torch.testing.assert_close(ours.log_probs, torchs.log_probs, atol=2e-5, rtol=0)
