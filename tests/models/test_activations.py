"""What the backward pass is left with: the same numbers, fewer bytes, and no more products than promised.

Shapes: T tokens; h hidden, f intermediate; D head_dim of Hq query and Hkv key heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from live_memory import LiveMemory
from ranks import run_ranks
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.kernels import CppOps, choose_ops
from rlhf_spmd.models.activations import CHECKPOINTING, save_on_host
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.workers.config import RoleConfig
from small_models import CONFIGS, SHORT_FAMILIES
from tiers import tiers

LENGTHS = [150, 3, 70, 97]
WIDE = {**CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 300}


def build(config: dict[str, Any], head: str = "none", dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(spec_from_config(config, "test"), head, 0, 1, solo(), dtype, "cpu")
    init_random(decoder, 3)
    return decoder


def ids_of(decoder: Decoder) -> Tensor:
    return torch.randint(decoder.spec.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))


def run(decoder: Decoder, checkpointing: str, offload: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and all gradients of a loss in which every output has another weight."""
    decoder.keep_activations(checkpointing, offload)
    out = decoder(ids_of(decoder), PackedAttention(LENGTHS))
    names, params = zip(*((name, x) for name, x in decoder.named_parameters() if x.requires_grad), strict=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return out, dict(zip(names, torch.autograd.grad((out * weights).sum(), params), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", tiers(CONFIGS, SHORT_FAMILIES))
def test_outputs_and_gradients_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    decoder = build(CONFIGS[name], dtype=dtype)
    out, grads = run(decoder, "none", False)
    for checkpointing in CHECKPOINTING:
        for offload in (False, True):
            again, same = run(decoder, checkpointing, offload)
            assert torch.equal(out, again)
            assert all(torch.equal(same[key], grad) for key, grad in grads.items()), (checkpointing, offload)


def kept_bytes(decoder: Decoder, checkpointing: str) -> tuple[int, int]:
    """Bytes that live between the forward and the backward pass, and at the worst moment of both."""
    decoder.keep_activations(checkpointing)
    ids, attention = ids_of(decoder), PackedAttention(LENGTHS)
    decoder(ids, attention)  # what is made once, such as the attention's indices, does not count
    with LiveMemory() as memory:
        loss = decoder(ids, attention).sum()
        kept = memory.live
        loss.backward()
    return kept, memory.peak


def products(decoder: Decoder, checkpointing: str) -> tuple[int, int]:
    """FLOPs of the matrix products of a forward and of a forward and a backward pass."""
    decoder.keep_activations(checkpointing)
    with FlopCounterMode(display=False) as counter:
        loss = decoder(ids_of(decoder), PackedAttention(LENGTHS)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def test_less_is_kept_for_as_many_products_as_promised() -> None:
    """Kept per layer: all; or 2 h + (Hq + 2 Hkv) D + 2 f numbers per token; or h. Recomputed: nothing; the attention's products;
    all but the last product."""
    decoder = build(WIDE, dtype=torch.float64)  # in torch, whatever kernels there are
    spec, tokens = decoder.spec, sum(LENGTHS)
    heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
    selective = 2 * spec.hidden_size + heads * spec.head_dim + 2 * spec.intermediate_size
    per_token = {"selective": selective, "full": spec.hidden_size}
    once = tokens * (spec.hidden_size + spec.head_dim + 3)  # input and scale of the final norm, cos and sin, positions
    found = {mode: (*kept_bytes(decoder, mode), *products(decoder, mode)) for mode in CHECKPOINTING}
    layers = spec.num_hidden_layers
    for mode, numbers in per_token.items():
        assert found[mode][0] == pytest.approx(8 * (layers * tokens * numbers + once), rel=0.02), mode
    assert found["selective"][0] < 0.5 * found["none"][0]
    assert found["selective"][1] < 0.6 * found["none"][1] and found["full"][1] < found["selective"][1]
    matrices = sum(2 * tokens * p.numel() for name, p in decoder.named_parameters() if "layers" in name and p.ndim == 2)
    forward, both = found["none"][2:]
    attention = forward - matrices
    assert both == 3 * matrices + 3 * attention  # the backward pass has twice the products of the forward pass
    assert found["selective"][3] - both == attention
    last = layers * 2 * tokens * spec.hidden_size * spec.intermediate_size
    assert found["full"][3] - both == forward - last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_cpp_are_not_computed_again(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build(WIDE, dtype=dtype)
    if not decoder.ops.is_batch_invariant(dtype, 2):
        pytest.skip("no product in C++ for this dtype here")
    calls = []
    product = CppOps.product
    monkeypatch.setattr(CppOps, "product", lambda *args: calls.append(args[1].shape) or product(*args))
    decoder.keep_activations("selective")
    loss = decoder(ids_of(decoder), PackedAttention(LENGTHS)).sum()
    assert len(calls) == 4 * decoder.spec.num_hidden_layers
    loss.backward()
    assert len(calls) == 4 * decoder.spec.num_hidden_layers


def test_what_is_on_the_host_is_a_copy_and_parameters_stay() -> None:
    x, norm = torch.ones(4, requires_grad=True), torch.nn.LayerNorm(4)
    with save_on_host(norm):
        square = x * x
        scaled = norm.weight.view(2, 2) * x.view(2, 2)
    with torch.no_grad():
        x.fill_(5.0)
        norm.weight.fill_(7.0)
    square.sum().backward(retain_graph=True)
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4, "the values at the time of the forward pass"
    x.grad = None
    scaled.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [7.0] * 4, "not copied"


def test_unknown_values_are_refused() -> None:
    check_section(RoleConfig(activation_checkpointing="selective"), "models.actor")
    with pytest.raises(ValueError, match="activation_checkpointing='true' is not known; allowed: auto, none, selective"):
        check_section(RoleConfig(activation_checkpointing="true"), "models.actor")


def head_memory(world: Any, tokens: int, entropy: bool) -> tuple[int, int]:
    """Peak bytes of token_log_probs, forward and backward, beyond the gradients that it returns; rows of a chunk are 64."""
    config = {**CONFIGS["llama"], "vocab_size": 4096}
    decoder = Decoder(spec_from_config(config, "test"), "lm", 0, 1, world.all, torch.float32, "cpu")
    init_random(decoder, 3)
    hidden = torch.randn(tokens, config["hidden_size"], requires_grad=True)
    labels = torch.randint(4096, (tokens,))
    peaks = []
    for _ in range(4):  # gloo's threads may hold a tensor a moment longer
        peaks.append(head_peak(decoder, hidden, labels, entropy))
    return min(peaks), decoder.vocab_range[1] - decoder.vocab_range[0]


def head_peak(decoder: Decoder, hidden: Tensor, labels: Tensor, entropy: bool) -> int:
    with LiveMemory() as memory:
        log_probs, entropies = token_log_probs(decoder, hidden, labels, 0.7, entropy, chunk_rows=64)
        loss = log_probs.sum() if entropies is None else (log_probs + entropies).sum()
        weight = decoder.head_weight
        torch.autograd.grad(loss, [hidden, weight])
    return memory.peak - hidden.nbytes - weight.nbytes


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_head_needs_a_chunk_of_logits_and_those_kept_whatever_the_tokens(tp: int, entropy: bool) -> None:
    ops = choose_ops(torch.float32, torch.device("cpu"))
    for tokens in (256, 6144):
        for peak, width in run_ranks(tp, head_memory, tokens, entropy):
            kept = tokens if ops.keeps_logits and tokens * width <= ops.small_head else 0
            logits = 4 * width * (kept + 64 * (2 if entropy else 1))
            numbers = 48 * tokens  # statistics and gradients of tokens, a few each
            assert 0.75 * logits < peak < 1.05 * logits + numbers, (tokens, peak, logits)


def test_the_head_of_a_large_vocabulary_has_no_wide_copies_of_its_weight_and_gradient() -> None:
    config = {**CONFIGS["llama"], "vocab_size": 32768, "hidden_size": 256, "tie_word_embeddings": False}
    decoder = Decoder(spec_from_config(config, "test"), "lm", 0, 1, solo(), torch.bfloat16, "cpu")
    init_random(decoder, 3)
    tokens, logits = decoder.ops.small_head // 32768 + 1024, 4 * 64 * 32768
    hidden = torch.randn(tokens, 256).bfloat16().requires_grad_()
    peak = head_peak(decoder, hidden, torch.randint(32768, (tokens,)), False)
    in_fp32 = 2 * hidden.nbytes
    rows = 0 if decoder.ops.is_batch_invariant(torch.bfloat16, 2) else in_fp32  # torch's products want those in fp32, too
    assert peak < 1.5 * logits + in_fp32 + rows + hidden.nbytes < 2 * decoder.head_weight.nbytes
