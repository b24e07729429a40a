"""What the package flash-linear-attention is told: its functions, by the definition that its documentation gives, on the CPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from generators import SMALL, alone, ragged_requests, tokens_of
from rlhf_spmd.generation import Generator, SamplingConfig
from rlhf_spmd.kernels import DeltaShape, DeltaStates, Packing, delta_rule, dispatch, flash_linear_attention
from rlhf_spmd.kernels.flash_linear_attention import FlashLinearAttention, choose_packed_delta
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS, LENGTHS, make_batch, make_model
from triton_device import DEVICE

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="stands in for kernels that a GPU may have")


def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """x [1, T, D], weight [D, W], initial_state [N, D, W]: the last W inputs of each sequence."""
    assert weight is not None and cu_seqlens is not None and activation == "silu" and cu_seqlens.dtype == torch.int64
    assert len(x) == 1 and x.is_contiguous() and bias is residual is None and not output_final_state
    outs, width = [], weight.shape[1]
    for n, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].t()
        seen = torch.cat([before, x[0, start:end]])
        for t in range(width, len(seen)):
            total = (seen[t - width + 1 : t + 1] * weight.t()).sum(0)
            outs.append(total * torch.sigmoid(total))
    return torch.stack(outs)[None], None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """q and k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV], states [N, HV, K, V]; key heads serve neighbouring value heads.
    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t - 1) + beta_t k_t v_t^T, and o_t = scale S_t^T q_t (arXiv 2412.06464)."""
    assert cu_seqlens is not None and cu_seqlens.dtype == torch.int64 and len(q) == len(k) == len(v) == len(g) == len(beta) == 1
    assert v.ndim == 4 and g.dtype == torch.promote_types(q.dtype, torch.float32) and q.dtype == k.dtype == v.dtype
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group, scale, outs, finals = v.shape[2] // q.shape[2], q.shape[-1] ** -0.5 if scale is None else scale, [], []
    q, k = (x[0].repeat_interleave(group, 1) for x in (q, k))
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    for n, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
        state = v.new_zeros(v.shape[2], k.shape[-1], v.shape[3]) if initial_state is None else initial_state[n].to(v.dtype)
        for t in range(start, end):
            key, b = k[t][:, :, None], beta[0, t][:, None, None]
            state = g[0, t].exp().to(v.dtype)[:, None, None] * (eye - b * key @ key.mT) @ state + b * key @ v[0, t][:, None]
            outs.append(scale * (state.mT @ q[t][:, :, None])[:, :, 0])
        finals.append(state)
    return torch.stack(outs)[None], torch.stack(finals) if output_final_state else None


STAND_INS = [("fla.modules.convolution", causal_conv1d), ("fla.ops.gated_delta_rule", chunk_gated_delta_rule)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.modules", "fla.ops", *(name for name, _ in STAND_INS)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in STAND_INS:
        setattr(sys.modules[name], function.__name__, function)


@pytest.mark.parametrize(("name", "function"), STAND_INS, ids=[name for name, _ in STAND_INS])
def test_the_package_takes_the_same_arguments(name: str, function: Callable[..., Any]) -> None:
    if find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    theirs = inspect.signature(getattr(__import__(name, fromlist=["fla"]), function.__name__)).parameters
    for argument, ours in inspect.signature(function).parameters.items():
        assert argument in theirs and theirs[argument].default == ours.default, argument


def inputs(tokens: int, shape: DeltaShape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (tokens, shape.channels), (tokens, shape.values), (tokens, shape.values), (shape.channels, 1, shape.kernel)
    x, decay, rate, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return [x, -decay.exp(), rate.sigmoid(), weight]


@pytest.mark.parametrize("shape", [DeltaShape(2, 6, 5, 4, 4), DeltaShape(4, 8, 3, 6, 2, 2)], ids=str)
def test_outputs_states_and_gradients(shape: DeltaShape, package: None) -> None:
    """Sequences of some tokens or none, and parts of sequences behind states."""
    lengths, kernels = [5, 0, 70, 1], FlashLinearAttention()
    given = [each.requires_grad_() for each in inputs(sum(lengths), shape)]
    x, decay, rate, weight = given
    parts = list(zip(*(each.split(lengths) for each in (x, decay, rate)), strict=True))
    wanted = [delta_rule(a[None], b[None], c[None], weight, shape, None, None) for a, b, c in parts if len(a)]
    out, none = kernels.mix(x, decay, rate, weight, shape, Packing(lengths, CPU))
    expected = torch.cat([one[0][0] for one in wanted])
    assert none is None and out.shape == expected.shape and (out - expected).abs().max() < 1e-12
    factor = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = zip(torch.autograd.grad(out, given, factor), torch.autograd.grad(expected, given, factor), strict=True)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in grads) < 1e-10
    with torch.no_grad():
        kept = shape.kernel - 1
        states = DeltaStates(torch.cat([one[1][:, -kept:] for one in wanted]), torch.cat([one[2] for one in wanted]))
        more, after = kernels.mix(x[:9], decay[:9], rate[:9], weight, shape, Packing([1, 6, 2], CPU), states)
        assert after is not None and after.shape == states.memory.shape
        for i, (start, end) in enumerate(((0, 1), (1, 7), (7, 9))):
            a, b, c = (each[None, start:end] for each in (x, decay, rate))
            before = DeltaStates(states.inputs[i : i + 1], states.memory[i : i + 1])
            alone_out, _, memory = delta_rule(a, b, c, weight, shape, None, before)
            assert (more[start:end] - alone_out[0]).abs().max() < 1e-12 and (after[i] - memory[0]).abs().max() < 1e-12


def test_a_model_and_its_generation(tmp_path: Path, package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, gradients, and sampled tokens of prompts in several parts, as without the package."""
    path, mesh = make_model(tmp_path, {**CONFIGS["qwen3-5"], "vocab_size": 301}), alone()[1]
    ids, labels = make_batch(301)
    found, behind_states = [], 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal behind_states
        behind_states += options["initial_state"] is not None
        return chunk_gated_delta_rule(*args, **options)

    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", counted)
    for kernels in (None, FlashLinearAttention()):
        decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float64, "cpu")
        monkeypatch.setattr(type(decoder.ops), "packed_delta", kernels)
        load_pretrained(decoder, path)
        got, _ = decoder(ids, PackedAttention(LENGTHS), lambda d, hidden: token_log_probs(d, hidden, labels))
        got.square().sum().backward()
        grads = {key: p.grad for key, p in decoder.named_parameters() if p.grad is not None}
        config = replace(SMALL, max_num_batched_tokens=21, max_num_seqs=6)
        generator, requests = Generator(decoder, mesh, config, ()), ragged_requests(samples=1, max_new_tokens=8)
        found.append((got.detach(), grads, generator.generate(requests, SamplingConfig(), 3, 5)))
    assert behind_states > 10
    (log_probs, grads, completions), (ours, our_grads, our_completions) = found
    assert (ours - log_probs).abs().max() < 1e-10 and tokens_of(our_completions) == tokens_of(completions)
    for a, b in zip(our_completions, completions, strict=True):
        assert (a.log_probs - b.log_probs).abs().max() < 1e-10
    for key, grad in grads.items():
        assert (our_grads[key] - grad).abs().max() < 1e-9 * grad.abs().max().clamp(min=1), key


def test_where_the_package_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, in half precision, from the version on whose value heads may outnumber key heads; never where rollouts are exact."""
    gpu_ops = pytest.importorskip("rlhf_spmd.kernels.gpu_ops")
    monkeypatch.setattr(flash_linear_attention, "model_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(flash_linear_attention, "find_spec", lambda name: name)
    capability, installed = (9, 0), "0.5.2"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(flash_linear_attention, "version", lambda name: installed)

    def chosen(dtype: torch.dtype = torch.bfloat16) -> bool:
        choose_packed_delta.cache_clear()
        return choose_packed_delta(dtype) is not None

    assert chosen() and not chosen(torch.float32)
    installed = "0.4.2"
    assert not chosen()
    capability, installed = (7, 5), "1.0"
    assert not chosen()
    monkeypatch.setattr(flash_linear_attention, "model_device", lambda: CPU)
    assert not chosen()
    choose_packed_delta.cache_clear()
    assert gpu_ops.GpuOps(None, FlashLinearAttention()).packed_delta.name == "fla"
    assert dispatch._load_batch_invariant_gpu(torch.bfloat16).packed_delta is None
