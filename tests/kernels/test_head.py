"""The head's kernels against float64: statistics, gradients, and all of it inside a decoder's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from launches import counted_launches
from rlhf_spmd.kernels import Ops
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.ops import LogitTransform
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS
from tiers import pairwise
from triton_device import DEVICE
from wide_products import wide_products_on_cpus

SHAPES = [LogitTransform(), LogitTransform(0.7), LogitTransform(1.0, 5.0), LogitTransform(1.3, 30.0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (1, 2048), (3, 101), (5, 2049), (2, 5000), (0, 17)]


@pytest.fixture(autouse=True)
def wide_products() -> Iterator[None]:
    with wide_products_on_cpus():
        yield


def draw(rows: int, width: int, scale: float = 8.0) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width)) * scale).to(DEVICE)


def some_labels(rows: int, width: int, first: int) -> Tensor:
    """Some before this slice of the vocabulary, some in it, some behind."""
    return (torch.arange(rows) * (width // 2 + 1) + first - width // 3).to(DEVICE)


@pytest.mark.parametrize("case", pairwise({"size": SIZES, "shape": SHAPES, "entropy": [False, True]}), ids=str)
def test_statistics_equal_float64(case: dict[str, Any]) -> None:
    size, shape, entropy = case.values()
    logits, first = draw(*size), 1000
    labels, before = some_labels(*size, first), logits.clone()
    found = GpuOps().logit_statistics(logits, labels, first, entropy, shape)
    assert torch.equal(logits, before) and found.shape == (4, size[0]) and found.dtype == torch.float32
    exact = Ops()
    wanted = exact.logit_statistics(exact.transform_logits(before.double(), shape), labels, first, entropy, shape)
    if not entropy:
        assert not found[3].any()
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", pairwise({"size": SIZES, "shape": SHAPES, "entropy": [False, True], "dtype": DTYPES}), ids=str)
def test_gradients_equal_float64(case: dict[str, Any]) -> None:
    """Autograd in fp64 through softcap, temperature, log-softmax and entropy, of a vocabulary that goes on behind this slice."""
    (rows, width), shape, entropy, dtype = case.values()
    first = 50
    whole = torch.cat([draw(rows, first), draw(rows, width), draw(rows, 3)], 1).double().requires_grad_()
    labels = some_labels(rows, width, first).clamp(0, first + width + 2)
    weight = [draw(rows, 1, 1.0)[:, 0], draw(rows, 2, 1.0)[:, 0]]
    bent = whole if shape.softcap is None else shape.softcap * torch.tanh(whole / shape.softcap)
    log_p = torch.log_softmax(bent / shape.temperature, -1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    loss = (log_p.gather(1, labels[:, None])[:, 0] * weight[0]).sum() + (entropies * weight[1]).sum() * entropy
    (wanted,) = torch.autograd.grad(loss, whole)
    log_z = (bent / shape.temperature).logsumexp(-1)
    told = (entropies.detach().float()[:, None], weight[1][:, None]) if entropy else None
    logits = whole.detach()[:, first : first + width].float().contiguous()
    numbers = labels, first, log_z.detach().float()[:, None], weight[0][:, None], told
    found = GpuOps().head_gradients(logits, *numbers, shape, dtype)
    assert found.dtype == dtype and found.shape == logits.shape
    assert (found.data_ptr() == logits.data_ptr()) == (dtype == torch.float32) or not rows
    tolerance = max(torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(found.double(), wanted[:, first : first + width], atol=2e-5, rtol=tolerance)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, labels = draw(7, 4099), torch.arange(7, device=DEVICE) * 600
    whole = GpuOps().logit_statistics(logits, labels, 0, True)
    for row in range(7):
        alone = GpuOps().logit_statistics(logits[row : row + 1].clone(), labels[row : row + 1], 0, True)
        assert torch.equal(alone[:, 0], whole[:, row])


def test_logits_of_minus_infinity_have_no_part() -> None:
    """As of tokens that are not allowed: plain sums of exp(l) * l would be no number."""
    logits = draw(2, 100)
    short = logits[:, :60].clone()
    logits[:, 60:] = -torch.inf
    labels = torch.tensor([3, 59], device=DEVICE)
    found, wanted = (GpuOps().logit_statistics(x, labels, 0, True) for x in (logits, short))
    assert torch.equal(found, wanted)


SPLITS = [(1 << 13, 1 << 28, 50), (16, 32 * 101, 50), (16, 16 * 24, 50), (16, 16 * 24, 16), (8, 64, 1)]  # rows, chunk, tokens
HEADS = [("llama", 1.0, False), ("gemma2", 0.8, True), ("qwen2", 1.0, True)]  # temperature, entropy


@pytest.mark.parametrize("case", pairwise({"split": SPLITS, "head": HEADS, "dtype": DTYPES[:2]}), ids=str)
def test_log_probs_of_a_decoder(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    """Whole chunks and blocks of the vocabulary, kept logits and computed ones, several chunks of rows and one."""
    (rows, chunk, tokens), (name, temperature, entropy), dtype = case.values()
    monkeypatch.setattr(GpuOps, "backward_rows", rows)
    if chunk < 1 << 20:
        monkeypatch.setattr(GpuOps, "small_head", 0)
    spec = spec_from_config(CONFIGS[name], name)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, spec.hidden_size, generator=generator).to(DEVICE, dtype)
    matrix = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator).to(DEVICE, dtype)
    labels = torch.randint(spec.vocab_size, (tokens,), generator=generator).to(DEVICE)
    weights = torch.randn(2, tokens, generator=generator).to(DEVICE)
    results: list[list[Tensor]] = []
    for ops, kind in ((Ops(), torch.float64), (GpuOps(), dtype)):
        decoder = Decoder(spec, "lm", 0, 1, solo(), kind, DEVICE, ops=ops)
        decoder.head_weight.data.copy_(matrix)
        x: Any = hidden.to(kind, copy=True).requires_grad_()
        rows_at_once = None if chunk >= 1 << 20 else max(chunk // spec.vocab_size, 1)
        log_probs, entropies = token_log_probs(decoder, x, labels, temperature, entropy, rows_at_once)
        loss = (log_probs * weights[0]).sum() + (0 if entropies is None else (entropies * weights[1]).sum())
        loss.backward()
        grad = decoder.head_weight.grad
        assert grad is not None and x.grad is not None and x.grad.dtype == grad.dtype == kind
        results.append([log_probs, x.grad, grad, *([] if entropies is None else [entropies])])
    for want, got in zip(*results, strict=True):
        small = got.dtype == torch.float32
        # in fp32 the order of a product's sums moves the norm by up to 1.4e-6
        assert (got.double() - want).norm() <= (3e-6 if small else 6e-3) * want.norm() + 1e-6, (
            f"{(got.double() - want).norm() / want.norm()}"
        )


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot count addmm with an out_dtype on meta tensors")
def test_launches_and_bytes_of_8192_tokens() -> None:
    """Hidden 2,048 and 151,936 logits in bf16, with a reported entropy.

    5.0 GB of fp32 logits are written by a product and read once, forward and again backward, 20 GB; 2.5 GB of bf16 gradients are
    written and read by two products, 7.5 GB. The weight is read 5 + 1 + 1 times, its gradient written once, and the hidden gradient
    of 67 MB is added to 5 times: 6.6 GB. Less than 27.4 GB would take products of our own, which reduce logits that they do not
    write."""
    device, config = torch.device("meta"), CONFIGS["llama"] | {"vocab_size": 151936, "hidden_size": 2048, "head_dim": 512}
    spec = spec_from_config({**config, "num_hidden_layers": 1}, "llama")
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.bfloat16, device, ops=GpuOps())
    hidden = torch.empty(8192, 2048, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.empty(8192, dtype=torch.int64, device=device)
    with counted_launches(run=False) as work:
        log_probs, _ = token_log_probs(decoder, hidden, labels, 0.9, True)
        torch.autograd.grad(log_probs, (hidden, decoder.head_weight), torch.empty_like(log_probs))
    assert len(work.names) <= 50 and not work.waits, work.names
    assert 0 < work.bytes_of("_statistics", "_gradients") <= 12.6e9 and sum(work.bytes) <= 34.1e9, work.bytes
