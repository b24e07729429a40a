"""The exact arithmetic of GPUs: bits of a row alone and in company, of generation and of training; in Triton's interpreter where there
is no GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_definition import attend
from flash_definition import flash_on_cpus
from generators import SMALL, alone, ragged_requests
from launches import counted_launches
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, Request, SamplingConfig
from rlhf_spmd.generation.sequence import SamplingOverrides
from rlhf_spmd.kernels import AttentionRule, Packing, triton_paged_attention, triton_products
from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps, _packed
from rlhf_spmd.kernels.flash_attention import TorchFlash
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.sampling_tensors import SamplingTensors
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS
from tiers import tiers
from triton_device import DEVICE

HALF_ULP = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
PLAIN = AttentionRule(0.25)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows have several blocks and splits."""
    monkeypatch.setattr(triton_paged_attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_paged_attention, "BLOCK_BYTES", 1 << 9)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(48, 64), (301, 80), (33, 200), (5, 7)])
def test_a_row_of_a_product_is_the_same_alone_and_in_company(columns: int, inner: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(300, inner, dtype=dtype), drawn(columns, inner, dtype=dtype, seed=4), drawn(columns, dtype=dtype)
    tiles = {triton_products.choose_tile(rows, columns, dtype.itemsize) for rows in (1, 7, 64, 300)}
    for wide in (False, True):
        whole = triton_products.product(x, weight, bias, wide)
        expected = x.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(whole.double(), expected, atol=2e-5, rtol=2e-6 if wide else HALF_ULP[dtype])
        for first, last in ((0, 1), (17, 24), (100, 164), (299, 300)):
            assert torch.equal(triton_products.product(x[first:last], weight, bias, wide), whole[first:last]), (first, tiles)


def test_every_tile_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of programs would choose."""
    for dtype, tiles in ((torch.bfloat16, triton_products.HALF_TILES), (torch.float32, triton_products.WIDE_TILES)):
        x, weight, found = drawn(130, 200, dtype=dtype), drawn(70, 200, dtype=dtype, seed=4), []
        for tile in tiles:
            monkeypatch.setattr(triton_products, "choose_tile", lambda *_, tile=tile: tile)
            found.append(triton_products.product(x, weight, wide=True))
        assert all(torch.equal(each, found[0]) for each in found)


def test_products_of_many_programs_take_large_tiles() -> None:
    choose = triton_products.choose_tile
    assert choose(8192, 4096, 2).rows == 128 and choose(8192, 4096, 2).columns == 256
    assert choose(64, 1024, 2) == triton_products.HALF_TILES[-1] and choose(1, 151936, 2).rows == 64
    steps = {tile.inner for tile in triton_products.HALF_TILES}, {tile.inner for tile in triton_products.WIDE_TILES}
    assert [len(each) for each in steps] == [1, 1], "one order of sums"


@pytest.mark.parametrize("dtype", HALF_ULP, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rule"),
    [
        (2, 2, 16, PLAIN),
        (1, 3, 24, replace(PLAIN, window=37)),
        (2, 1, 64, replace(PLAIN, softcap=5.0)),
        (1, 20, 16, replace(PLAIN, softcap=2.0, window=64)),
    ],
    ids=str,
)
def test_packed_attention_equals_float64(kv_heads: int, group: int, dim: int, rule: AttentionRule, dtype: torch.dtype) -> None:
    lengths, heads = [1, 0, 70, 33, 2], kv_heads * group
    qkv = drawn(sum(lengths), heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = (x.detach().requires_grad_() for x in qkv.split([heads, kv_heads, kv_heads], 1))
    packing = Packing(lengths, DEVICE)
    out, (*_, log_sums) = _packed(packing, rule, q.detach(), k.detach(), v.detach())
    expected, of_logs = attend(q, k, v, lengths, rule)
    torch.testing.assert_close(out.double(), expected, atol=2 * HALF_ULP[dtype], rtol=HALF_ULP[dtype])
    torch.testing.assert_close(log_sums.double(), of_logs, atol=2e-5, rtol=0)
    grad = drawn(*out.shape, dtype=dtype, seed=9)
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    with contextlib.nullcontext() if DEVICE.type == "cuda" else flash_on_cpus():
        for ops in (BatchInvariantGpuOps(), BatchInvariantGpuOps(TorchFlash())):  # whose backward pass takes our log-sum-exps
            found = ops.attend_packed(q, k, v, packing, rule)
            assert torch.equal(found, out)
            for ours, theirs in zip(torch.autograd.grad(found, (q, k, v), grad), wanted, strict=True):
                torch.testing.assert_close(ours, theirs.to(dtype), atol=8 * HALF_ULP[dtype], rtol=4 * HALF_ULP[dtype])
    with torch.no_grad():
        for i, length in enumerate(lengths):
            rows = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
            alone = ops.attend_packed(q[rows], k[rows], v[rows], Packing([length], DEVICE), rule)
            assert torch.equal(alone, out[rows]), length


def build(name: str, dtype: torch.dtype, ops: GpuOps | None = None) -> Decoder:
    spec = spec_from_config({**CONFIGS[name], "num_hidden_layers": 2}, "test")
    decoder = Decoder(spec, "lm", 0, 1, solo(), dtype, DEVICE, ops=ops or BatchInvariantGpuOps())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    return decoder


def trained(decoder: Decoder, prompts: list[list[int]], done: list[Completion], temperature: float) -> list[Tensor]:
    """Log-probs of the responses by one training forward over all rows."""
    rows = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, done, strict=True)]
    lengths = [len(row) for row in rows]
    ids = torch.tensor([token for row in rows for token in row], device=DEVICE)
    attention = PackedAttention(lengths, DEVICE, decoder.ops)
    with torch.enable_grad():
        found, _ = token_log_probs(decoder, decoder(ids, attention), ids.roll(-1), temperature)
    parts = found.detach().cpu().split(lengths)
    return [part[len(prompt) - 1 : -1] for part, prompt in zip(parts, prompts, strict=True)]


def generate(decoder: Decoder, config: GenerationConfig, requests: list[Request], sampling: SamplingConfig) -> list[Completion]:
    generator = Generator(decoder, alone()[1], replace(config, attention="triton"), ())
    return generator.generate(requests, sampling, 3, 5)


CASES: dict[str, tuple[str, torch.dtype, dict[str, int], float]] = {
    "llama": ("llama", torch.bfloat16, {}, 1.0),
    "gemma2": ("gemma2", torch.bfloat16, {"page_size": 7, "max_num_batched_tokens": 20}, 0.9),
    "llama with biases": ("llama-tied-bias", torch.float32, {"page_size": 5, "max_num_batched_tokens": 24}, 0.7),
    "large pages": ("qwen3-tied", torch.bfloat16, {"page_size": 64, "max_num_batched_tokens": 24}, 0.7),
    "gemma3": ("gemma3", torch.bfloat16, {}, 1.0),
    "glm4": ("glm4", torch.bfloat16, {}, 0.7),
    "olmo2": ("olmo2", torch.bfloat16, {}, 1.0),
    "ministral3": ("ministral3", torch.float32, {}, 0.9),
}


@pytest.mark.parametrize("case", tiers(CASES, ("llama", "gemma2")))
def test_generation_has_the_log_probs_of_training(case: str) -> None:
    """Bit for bit, of prompts in chunks and of other company, at a temperature that fp32 does not hold."""
    name, dtype, changes, temperature = CASES[case]
    decoder, config = build(name, dtype), replace(SMALL, **{"page_size": 16, **changes})
    made = ragged_requests(num_prompts=7, samples=1, max_new_tokens=3, vocabulary=decoder.spec.vocab_size)
    requests = [made[i] for i in (1, 3, 5)]
    sampling = SamplingConfig(temperature=temperature)
    done = generate(decoder, config, requests, sampling)
    prompts = [list(request.prompt_ids) for request in requests]
    for completion, expected in zip(done, trained(decoder, prompts, done, temperature), strict=True):
        assert torch.equal(completion.log_probs, expected), completion.log_probs - expected
    (lonely,) = generate(decoder, replace(config, page_size=32, max_num_batched_tokens=512), requests[1:2], sampling)
    assert lonely.token_ids == done[1].token_ids and torch.equal(lonely.log_probs, done[1].log_probs)


@pytest.mark.long
def test_rows_of_several_temperatures_have_the_log_probs_of_theirs() -> None:
    decoder = build("llama", torch.bfloat16)
    made = ragged_requests(num_prompts=3, samples=1, max_new_tokens=3, vocabulary=decoder.spec.vocab_size)
    temperatures = (0.0, 0.3, 1.7)
    requests = [replace(request, overrides=SamplingOverrides(t)) for request, t in zip(made, temperatures, strict=True)]
    done = generate(decoder, SMALL, requests, SamplingConfig())
    prompts = [list(request.prompt_ids) for request in requests]
    for i, temperature in enumerate(temperatures):
        assert torch.equal(done[i].log_probs, trained(decoder, prompts, done, temperature or 1.0)[i]), temperature


def test_a_row_that_is_not_finite_has_a_log_prob_that_is_not() -> None:
    logits = drawn(3, 101, dtype=torch.float32)
    logits[1, 7] = torch.nan
    ones, zeros = torch.ones(3, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for tempered in (False, True):
        settings = SamplingTensors(0.7 * ones, ones, 0 * ones, zeros.int(), filters=False, greedy=False, tempered=tempered)
        found = BatchInvariantGpuOps().draw_rows(logits, logits, settings, zeros, zeros)
        assert [each.isfinite().tolist() for each in found[1:]] == [[True, False, True]] * 2


def test_launches_of_a_draw() -> None:
    """The head's statistics and four small operations more than where rows may depend on others."""
    logits = drawn(8, 101, dtype=torch.float32)
    ones, zeros = torch.ones(8, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    settings = SamplingTensors(ones, ones, 0 * ones, zeros.int(), filters=False, greedy=False, tempered=False)
    draws = []
    for ops in (GpuOps(), BatchInvariantGpuOps()):
        with counted_launches() as launches:
            ops.draw_rows(logits, logits, settings, zeros, zeros)
        draws.append(launches.names)
    assert "_statistics" in draws[1] and len(draws[1]) == len(draws[0]) + 5, draws
