"""The plan of every layout covers every tensor, and configurations that do not fit say so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.sharding import plan_params, tensor_shapes, vocab_range
from rlhf_spmd.models.spec import ModelSpec
from small_models import CONFIGS, SHORT_FAMILIES
from tiers import tiers

LAYOUTS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (3, 4), (5, 8), (4, 2)]


def make_spec(family: str, **changes: Any) -> ModelSpec:
    sizes = {
        "vocab_size": 103,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 16 if "kv_lora_rank" in CONFIGS[family] else 4,
        "num_global_key_value_heads": 4,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "partial_rotary_factor": 1,  # factors of rotary embeddings would fit one head_dim alone
        "rope_scaling": None,
        "rope_parameters": None,
    }
    return spec_from_config({**CONFIGS[family], **sizes, **changes}, "test")


@pytest.mark.parametrize("family", tiers(CONFIGS, SHORT_FAMILIES))
def test_boxes_of_all_ranks_cover_every_tensor_once(family: str) -> None:
    for head in ("lm", "value", "none") if family == "qwen3-tied" else ("lm",):
        check_cover(family, head)


def check_cover(family: str, head: str) -> None:
    spec = make_spec(family, hidden_size=16, intermediate_size=8, head_dim=2, num_hidden_layers=5)
    shapes = tensor_shapes(spec, head)
    for pp, tp in LAYOUTS:
        copies = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        per_tensor: Counter[str] = Counter()
        for stage in range(pp):
            for rank in range(tp):
                for shard in plan_params(spec, head, stage, pp, rank, tp).values():
                    local = torch.zeros(shard.shape, dtype=torch.int64)
                    for box in shard.boxes:
                        assert box.shape == shapes[box.name]
                        assert all(at + n <= size for at, n, size in zip(box.start, box.size, box.shape, strict=True))
                        copies[box.name][box.global_slices] += 1
                        local[box.local_slices] += 1
                        per_tensor[box.name] += shard.replicated_on_tp
                    assert bool((local == 1).all()), "boxes do not tile the parameter"
        for name, count in copies.items():
            assert bool(count.all()), f"{name} has elements that no rank of pp({pp}) * tp({tp}) holds"
            tied = 2 if name == spec.names.embed and spec.tie_word_embeddings and pp > 1 and head == "lm" else 1
            kv = any(part in name for part in ("k_proj", "v_proj", "qkv_proj", "k_norm"))
            shared = tp // 4 if tp > 4 and kv else 1
            expected = {tp if per_tensor[name] else tied * shared} | ({1} if "qkv_proj" in name else set())
            assert set(count.flatten().tolist()) == expected, (name, pp, tp)


@settings(deadline=None, max_examples=200)
@given(vocab=st.integers(1, 5000), small=st.integers(1, 8), factor=st.integers(1, 8))
def test_vocabulary_cuts_nest(vocab: int, small: int, factor: int) -> None:
    cuts = {vocab_range(vocab, rank, small * factor)[0] for rank in range(small * factor)}
    assert {vocab_range(vocab, rank, small)[0] for rank in range(small)} <= cuts
    sizes = [b - a for a, b in (vocab_range(vocab, rank, small) for rank in range(small))]
    assert sum(sizes) == vocab and max(sizes) - min(sizes) <= 1
