"""Budgets: how many launches a layer takes on a GPU, and how many bytes a token moves beside the matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launches import DEVICE, Launches, counted_launches
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.recurrent_states import DecodeMixing, RecurrentStates
from rlhf_spmd.generation.triton_attention import TritonAttention
from rlhf_spmd.kernels import AttentionRule, triton_layers, triton_qkv
from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.models.activations import CHECKPOINTING
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.rope import Rope, rope_tables
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS

SIZES_1_7B = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
}


def decoder_of(name: str, ops: GpuOps | None = None, **changes: Any) -> tuple[Decoder, tuple[Tensor, Rope]]:
    """A decoder of one layer, and for 8 tokens what the layer takes: hidden state and rotary tables."""
    config = {**CONFIGS[name], "num_hidden_layers": 1, **changes}
    decoder = Decoder(spec_from_config(config, "test"), "none", 0, 1, solo(), torch.bfloat16, DEVICE, ops=ops or GpuOps())
    init_random(decoder, 3)
    x = torch.randn(8, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    frequency = torch.rand(decoder.spec.head_dim // 2, device=DEVICE)
    return decoder, (x, rope_tables(decoder.spec, frequency, torch.arange(8, device=DEVICE), torch.bfloat16))


def layer_of(decoder: Decoder) -> Block:
    block = decoder.layers[0]
    assert isinstance(block, Block)
    return block


class Free:
    """An attention without launches."""

    positions = torch.arange(8)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return differentiable(lambda q, k, v: (q.view_as(q), (k, v)), lambda _, grad, k, v: (grad, k, v), q, k, v)


@pytest.mark.parametrize("ops", [GpuOps(), BatchInvariantGpuOps()], ids=["any", "exact"])
@pytest.mark.parametrize(("name", "most"), [("qwen3-tied", 9), ("phi3", 9), ("gemma2", 11)])
def test_a_decode_step_of_a_layer(name: str, most: int, ops: GpuOps) -> None:
    """Beside the attention: norm, qkv, heads, which write the pages, out, add and norm, gate_up, gate, down, add; Gemma norms what its
    parts give. With the attention 12 at most."""
    decoder, (x, rope) = decoder_of(name, ops)
    block = layer_of(decoder)
    backend = build_backend("triton", x.dtype, DEVICE)
    for pages in (1, 40):
        cache = KVCache(1, block.num_kv_heads, block.head_dim, 8 * pages, 16, x.dtype, DEVICE, backend)
        table = torch.arange(8 * pages, dtype=torch.int32, device=DEVICE).view(8, pages)
        context = TritonAttention.decoding(torch.arange(8, device=DEVICE), table, cache, block.num_heads)
        with torch.no_grad(), counted_launches() as launches:
            block(x, rope, context, 8)
        own = [each for each in launches.names if "attend" not in each and "parts" not in each]
        assert len(own) <= most, own
        assert len(launches.names) <= most + 2, launches.names


def test_a_decode_step_of_linear_attention() -> None:
    """Norm, the first product, all of the linear attention, the last product, add and norm, gate_up, gate, down, add: 9."""
    decoder, (x, rope) = decoder_of("qwen3-5", layer_types=["linear_attention"])
    states, rows = RecurrentStates(decoder, 10, DEVICE), torch.arange(8, device=DEVICE)
    with torch.no_grad(), counted_launches() as launches:
        layer_of(decoder)(x, rope, DecodeMixing(states, rows, rows), 8)
    assert len(launches.names) == 9 and "_delta_rule_step" in launches.names, launches.names


@pytest.mark.parametrize(("name", "most"), [("deepseek-v2", 13), ("deepseek-v3", 15)])
def test_a_decode_step_of_a_layer_with_latent_attention(name: str, most: int) -> None:
    """Norm, two products (three and a norm where queries have a short vector), the product that fits queries to the cache's keys, one
    launch for keys and rotation, attention, the values' product, out; then five as above."""
    decoder, (x, _) = decoder_of(name, first_k_dense_replace=1, attention_bias=False)  # as published
    block, frequency = layer_of(decoder), torch.rand(decoder.spec.rotated_dims // 2, device=DEVICE)
    rope = rope_tables(decoder.spec, frequency, torch.arange(8, device=DEVICE), x.dtype)
    latent, backend = decoder.spec.latent, build_backend("triton", x.dtype, DEVICE)
    assert latent is not None and block.experts is None
    cache = KVCache(1, *cache_shape(decoder.spec, 0, 1), 320, 16, x.dtype, DEVICE, backend, latent.kv_rank)
    table = torch.arange(320, dtype=torch.int32, device=DEVICE).view(8, 40)
    context = TritonAttention.decoding(torch.arange(8, device=DEVICE), table, cache, block.num_heads)
    with torch.no_grad(), counted_launches() as launches:
        block(x, rope, context, 8)
    assert context.sharing > 1 and len(launches.names) <= most, launches.names
    assert not launches.waits


def train(decoder: Decoder, inputs: tuple[Tensor, Rope], rows: int = 8) -> tuple[Launches, Launches]:
    """Launches of the forward and the backward pass but the attention's, where no gradient is there to add to."""
    x, rope = inputs[0][:rows], Rope(inputs[1].cos[:rows], inputs[1].sin[:rows])
    x, grad, block = x.detach().requires_grad_(), x.detach().clone(), layer_of(decoder)
    with counted_launches() as forward:
        out = decoder._run_layer(block, x, rope, Free(), rows)
    decoder.zero_grad()
    with counted_launches() as backward:
        out.backward(grad)
    return forward, backward


TRAINING = [("qwen3-tied", 9, (16, 20, 23)), ("llama", 9, (15, 19, 22)), ("gemma3", 11, (20, 24, 30))]


@pytest.mark.parametrize(("name", "most", "most_backward"), TRAINING)
def test_a_training_step_of_a_layer(name: str, most: int, most_backward: tuple[int, int, int]) -> None:
    """Of 40 with an attention of 6: 25 in Qwen3. Selective checkpointing computes two norms, the heads and the gate again."""
    decoder, inputs = decoder_of(name)
    for checkpointing, limit in zip(CHECKPOINTING, most_backward, strict=True):
        decoder.keep_activations(checkpointing)
        forward, backward = train(decoder, inputs)
        assert len(forward.names) <= most, forward.names
        assert len(backward.names) <= limit, backward.names


def test_the_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a layer of Qwen3-1.7B, without products and attention: what 8 tokens move more than 4. Parts of the norms' gradients are of a
    number of programs, not of tokens."""
    monkeypatch.setattr(triton_layers, "PROGRAMS", 1)
    monkeypatch.setattr(triton_qkv, "PROGRAMS", 1)
    decoder, inputs = decoder_of("qwen3-tied", **SIZES_1_7B)
    more, less = train(decoder, inputs), train(decoder, inputs, 4)
    forward, backward = ((a.elementwise_bytes() - b.elementwise_bytes()) / 4 for a, b in zip(more, less, strict=True))
    # kB forward: norm 8.2, heads 14.5 (values, which are not read, counted), add and norm 16.4, gate 36.9, add 12.3;
    # backward: 12.3, 24.8, 16.4, 61.4, and 12.3 to add both gradients of the layer's input
    assert forward <= 88.4e3 and backward <= 127.3e3, f"{forward} and {backward} bytes"
