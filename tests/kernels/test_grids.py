"""Grids of Triton's kernels in the largest models, on meta tensors: CUDA takes 2**31 - 1 programs along x, 65,535 along y and z."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launches import Launches, counted_launches
from rlhf_spmd.generation.backends import build_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.recurrent_states import DecodeMixing, RecurrentStates
from rlhf_spmd.generation.triton_attention import TritonAttention
from rlhf_spmd.kernels import AttentionRule, Packing, batch_invariant_gpu, triton_experts
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.sampling_tensors import SamplingTensors
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.heads import local_logits, token_log_probs
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.parallel.collectives import solo
from small_models import CONFIGS

META, MOST = torch.device("meta"), (2**31 - 1, 65_535, 65_535)
TOKENS, ROWS = 1 << 18, 4096  # of a micro-batch, and of a decode step

# as published
LARGEST: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    | {"num_key_value_heads": 8},
    "gemma3": {"vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32}
    | {"num_key_value_heads": 16, "head_dim": 128},
    "mixtral": {"vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48}
    | {"num_key_value_heads": 8, "num_local_experts": 8},
    "deepseek-v3": {"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128}
    | {"num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8},
    "qwen3-5": {"vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24}
    | {"num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 64}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": ["linear_attention"]},
}


def check(launches: Launches, *kernels: str) -> None:
    assert {*kernels} <= {name for name, _ in launches.grids}
    for name, grid in launches.grids:
        assert all(0 < size <= most for size, most in zip(grid, MOST, strict=False)), (name, grid)


def decoder_of(name: str) -> Decoder:
    config = {**CONFIGS[name], **LARGEST[name], "num_hidden_layers": 1, "first_k_dense_replace": 0}
    return Decoder(spec_from_config(config, name), "lm", 0, 1, solo(), torch.bfloat16, "meta", ops=GpuOps())


@pytest.mark.parametrize("name", [name for name in LARGEST if name != "qwen3-5"])
def test_a_micro_batch(name: str) -> None:
    decoder, ids = decoder_of(name), torch.empty(TOKENS, dtype=torch.int64, device=META)
    attention = PackedAttention([TOKENS // 512] * 512, META, GpuOps())
    with counted_launches(run=False) as launches:
        log_probs, _ = decoder(ids, attention, lambda decoder, hidden: token_log_probs(decoder, hidden, ids))
        log_probs.sum().backward()
    check(launches, "_norm", "_norm_backward", "_statistics", "_gradients")


@pytest.mark.parametrize("name", LARGEST)
def test_a_decode_step(name: str) -> None:
    decoder, ids = decoder_of(name), torch.empty(ROWS, dtype=torch.int64, device=META)
    latent, spec = decoder.spec.latent, decoder.spec
    backend, shape = build_backend("triton", torch.bfloat16, META), cache_shape(spec, 0, 1)
    cache = KVCache(1, *shape, 1, 64, torch.bfloat16, META, backend, None if latent is None else latent.kv_rank)
    table = torch.empty(ROWS, 2048, dtype=torch.int32, device=META)
    wide, whole = (torch.empty(ROWS, dtype=dtype, device=META) for dtype in (torch.float32, torch.int32))
    with torch.no_grad(), counted_launches(run=False) as launches:
        states = RecurrentStates(decoder, ROWS, META) if decoder.num_linear else None
        delta_rule = None if states is None else DecodeMixing(states, ids, ids)
        context = TritonAttention.decoding(ids, table, cache, spec.num_attention_heads)
        logits = local_logits(decoder, decoder(ids, context, delta_rule=delta_rule))
        for filters in (False, True):
            settings = SamplingTensors(wide, wide, wide, whole, filters, False, True)
            decoder.ops.draw_rows(logits, logits, settings, ids, ids)  # type: ignore[attr-defined]
    check(launches, "locate_rows", "_delta_rule_step" if decoder.num_linear else "attend_singles")


def test_attention_of_long_rows_and_experts_without_rows() -> None:
    """64 query heads share a KV head, so that a tile of rows has one query."""
    q, k = (torch.empty(TOKENS, heads, 128, dtype=torch.bfloat16, device=META) for heads in (64, 1))
    ends, gradients = torch.empty(8, dtype=torch.int32, device=META), torch.empty(8, 2 * 16384, 6144, device=META)
    with torch.no_grad(), counted_launches(run=False) as launches:
        batch_invariant_gpu.BatchInvariantGpuOps().attend_packed(q, k, k, Packing([TOKENS], META), AttentionRule(1.0))
        triton_experts.clear_idle(ends, gradients)
    check(launches, "attend_chunks", "_clear_idle")


def test_a_head_that_fits_no_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = pytest.importorskip("rlhf_spmd.kernels.triton_paged_attention")
    monkeypatch.setattr(tiles.devices, "shared_memory", lambda: 99 << 10)
    assert tiles.TileShape.of_chunks(256, 4, 16, 1).rows >= tiles.MIN_ROWS
    with pytest.raises(ValueError, match="head_dim=576 in 4 bytes needs more shared memory than this GPU's 99 KiB"):
        tiles.TileShape.of_chunks(576, 4, 16, 1)
