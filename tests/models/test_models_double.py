"""Log-probs and gradients equal transformers' in float64, where only the formula can differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from double_transformers import double_model, whole_gradients, wide
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import token_log_probs
from rlhf_spmd.models.sharding import cache_shape
from rlhf_spmd.models.spec import read_spec
from rlhf_spmd.models.weights import load_pretrained
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.planner.shapes import shape_of
from rlhf_spmd.workers.flops import forward_flops
from small_models import CONFIGS, LENGTHS, make_batch, make_model

MOST = 1e-9
LINEAR = ["qwen3-5"]  # and two among EXPERTS
GREEDY = {"deepseek-v2-lite": {**CONFIGS["deepseek-v2"], "topk_method": "greedy"}}  # which does without its groups
EXPERTS = [name for name, config in CONFIGS.items() if "num_experts_per_tok" in config]
DENSE = ["gemma4", "phi4-mini", "seed-oss", "olmo2", "olmo3", "exaone4", "smollm3", "granite", "glm4", "ministral3"]


@pytest.mark.parametrize("name", [*EXPERTS, *DENSE, *LINEAR, *GREEDY])
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, {**{**CONFIGS, **GREEDY}[name], "vocab_size": 301})
    ids, labels = make_batch(301)
    ids, weights = ids.clamp(min=1), torch.linspace(-1, 1, len(ids), dtype=torch.float64)  # 0 is padding, without a gradient
    model, rows = double_model(path), []
    with wide():
        for some, targets in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
            rows.append(model(some[None]).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
        want = torch.cat(rows)
        (want * weights).sum().backward()
        theirs = whole_gradients(model)
    decoder = Decoder(read_spec(path), "lm", 0, 1, solo(), torch.float64, "cpu")
    load_pretrained(decoder, path)
    got, _ = decoder(ids, PackedAttention(LENGTHS), lambda d, hidden: token_log_probs(d, hidden, labels))
    (got * weights).sum().backward()
    assert got.dtype == want.dtype == torch.float64 and (got - want).abs().max() < MOST
    scale = max(float(grad.abs().max()) for grad in theirs.values())
    for key, parameter in decoder.named_parameters():
        for box in decoder.shards[key].boxes if parameter.requires_grad else ():
            assert parameter.grad is not None
            off = (parameter.grad[box.local_slices] - theirs[box.name][box.global_slices]).abs().max()
            assert off < MOST * scale, f"{box.name}: {off / scale}"
            theirs[box.name][box.global_slices] = 0
    assert not any(grad.any() for grad in theirs.values()), "a gradient that no parameter has"


@pytest.mark.parametrize("name", DENSE)
def test_the_planner_counts_what_transformers_has(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, CONFIGS[name])
    model, spec = double_model(path), read_spec(path)
    scalars = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("layer_scalar"))
    assert shape_of(spec, "lm").params == pytest.approx(sum(p.numel() for p in model.parameters()) + scalars)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size  # which is looked up
    assert forward_flops(spec, 10, 0) == 10 * 2 * (matrices - embedding)
    for tp in (1, 2, 4):  # heads and their sizes of each layer's cache
        each = [2 * math.prod(cache_shape(spec.of_layer(layer), 0, tp)) for layer in range(spec.num_hidden_layers)]
        assert shape_of(spec, "lm").cached(tp) * spec.num_hidden_layers == pytest.approx(sum(each), rel=0.01)
