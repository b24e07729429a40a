"""Decoders over the arithmetic of GPUs against those over torch's, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from generators import SMALL, alone, load, ragged_requests, tokens_of
from ranks import run_ranks
from rlhf_spmd.generation import Generator, SamplingConfig
from rlhf_spmd.kernels import Ops
from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.stored import read_eos_ids
from rlhf_spmd.models.weights import init_random, write_random_model
from rlhf_spmd.parallel.collectives import Group, solo
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS, SHORT_FAMILIES
from tiers import tiers
from triton_device import DEVICE

TOKENS = [5, 1, 9]


def results_of(
    ops: Ops,
    name: str,
    tp: Group,
    checkpointing: str = "none",
    sequence_parallel: bool = False,
    lora: LoraConfig | None = None,
    fused_slices: int = 1,
    device: torch.device = DEVICE,
    ep: Group | None = None,
) -> dict[str, Tensor]:
    """Log-probs with and without gradients, and gradients of all parameters."""
    spec = spec_from_config({**CONFIGS[name], "num_hidden_layers": 2}, "test")
    decoder = Decoder(spec, "lm", 0, 1, tp, torch.float32, device, fused_slices, sequence_parallel, ops, lora, ep=ep)
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


SAME = ("llama", "llama3", "qwen2", "mistral", "phi3", "seed-oss", "olmo3", "qwen3-5-moe")  # as others to these kernels


@pytest.mark.parametrize("name", tiers([name for name in CONFIGS if name not in SAME], ("qwen3-tied", "gpt-oss")))
def test_log_probs_and_gradients_are_those_of_torch(name: str) -> None:
    expected = results_of(Ops(), name, solo())
    for checkpointing in CHECKPOINTING if name == "qwen3-tied" else ("none",):
        assert_near(results_of(GpuOps(), name, solo(), checkpointing), expected)


@pytest.mark.parametrize("checkpointing", tiers(CHECKPOINTING, ["selective"]))
def test_exact_arithmetic_has_the_gradients_of_torch(checkpointing: str) -> None:
    """With biases and tied ends."""
    expected = results_of(Ops(), "llama-tied-bias", solo())
    assert_near(results_of(BatchInvariantGpuOps(), "llama-tied-bias", solo(), checkpointing), expected)


def test_adapters_and_fused_blocks() -> None:
    lora = LoraConfig(rank=2)
    assert_near(results_of(GpuOps(), "llama", solo(), lora=lora), results_of(Ops(), "llama", solo(), lora=lora))
    expected = results_of(Ops(), "qwen3-tied", solo(), fused_slices=2)
    assert_near(results_of(GpuOps(), "qwen3-tied", solo(), "selective", fused_slices=2), expected)


def on_rank(world: World, name: str, sequence_parallel: bool, axis: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    group, options = world.group([0, 1], axis), {"device": torch.device("cpu"), "sequence_parallel": sequence_parallel}
    assert group is not None, "both ranks are in it"
    tp, ep = (group, None) if axis == "tp" else (solo(), group)
    ours, torchs = (results_of(ops, name, tp, "selective", ep=ep, **options) for ops in (GpuOps(), Ops()))
    return ours, torchs


RANKS = [("gemma3", True, "tp"), ("gpt-oss", False, "ep"), ("olmo3", True, "tp"), ("deepseek-v3", False, "ep")]


@pytest.mark.parametrize("case", tiers(RANKS, RANKS[:2]), ids=str)
def test_on_two_ranks(case: tuple[str, bool, str]) -> None:
    """Of tensor parallelism, or with experts in parallel."""
    for ours, torchs in run_ranks(2, on_rank, *case):
        assert_near(ours, torchs)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with the CPU's numbers")
@pytest.mark.parametrize("name", tiers(["deepseek-v3", "deepseek-v2"], SHORT_FAMILIES))
def test_generation_of_latent_attention_draws_the_same_tokens(tmp_path: Path, name: str) -> None:
    changes = {"page_size": 5, "max_num_batched_tokens": 24} if name == "deepseek-v2" else {}
    write_random_model(tmp_path / name, {**CONFIGS[name], "vocab_size": 301, "num_hidden_layers": 2}, seed=7)
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
