"""Exactness: a token's bits do not depend on its batch, so generation equals the packed forward bit for bit, at sizes that divide
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from generators import SMALL, alone, num_unequal, ragged_requests, skip_unless_exact
from generators import matmul_precision as matmul_precision  # a fixture
from ranks import run_ranks
from rlhf_spmd.generation import Generator, SamplingConfig
from rlhf_spmd.models import heads
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import RECORDER, solo
from rlhf_spmd.parallel.world import World
from small_models import CONFIGS

ODD = {"vocab_size": 517, "hidden_size": 40, "intermediate_size": 86, "num_hidden_layers": 2, "head_dim": 10}
MIXED = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 20, "num_hidden_layers": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-odd": CONFIGS["llama"] | ODD,
    "llama-tiny": CONFIGS["llama"] | ODD | {"vocab_size": 60, "hidden_size": 16, "num_key_value_heads": 1},
    "qwen3": CONFIGS["qwen3-tied"] | ODD | {"hidden_size": 64, "intermediate_size": 172, "num_key_value_heads": 4},
    "qwen2-wide": CONFIGS["qwen2"] | {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1},
    "gemma2-odd": CONFIGS["gemma2"] | ODD | {"sliding_window": 37, "attn_logit_softcapping": 0.5},
    "glm4-odd": CONFIGS["glm4"] | ODD | {"head_dim": 20},
    "olmo2-odd": CONFIGS["olmo2"] | ODD,
    "qwen3-moe": CONFIGS["qwen3-moe"] | MIXED | {"num_key_value_heads": 4, "num_experts": 14, "mlp_only_layers": []},
    "glm4-moe": CONFIGS["glm4-moe"] | MIXED | {"head_dim": 20, "n_routed_experts": 14, "n_group": 7, "topk_group": 3},
}
DTYPES, PRECISIONS = (torch.float32, torch.bfloat16), ("kernels", "highest", "medium")
TURNS = [  # each shape in both dtypes and at two precisions
    (shape, DTYPES[turn], PRECISIONS[(number + turn) % 3]) for number, shape in enumerate(SHAPES) for turn in range(2)
]


def build(config: dict[str, Any], dtype: torch.dtype, tp: Any = None) -> Decoder:
    decoder = Decoder(spec_from_config(config, "test"), "lm", 0, 1, tp or solo(), dtype, "cpu")
    init_random(decoder, 7)
    return decoder


def packed_log_probs(decoder: Decoder, sequences: list[Tensor], chunk_rows: int | None = None) -> list[Tensor]:
    """log p of each next token, one tensor per sequence, from one training forward over all of them."""
    ids = torch.cat(sequences)
    attention = PackedAttention([len(s) for s in sequences])
    labels = torch.cat([s.roll(-1) for s in sequences])

    def head(d: Decoder, hidden: Tensor) -> Tensor:
        return heads.token_log_probs(d, hidden, labels, 0.7, chunk_rows=chunk_rows)[0]

    with torch.no_grad():
        return list(decoder(ids, attention, head).split([len(s) for s in sequences]))


def make_sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in (1, 5, 70, 63, 64, 131, 2)]


@pytest.mark.parametrize(("shape", "dtype", "matmul_precision"), TURNS, indirect=["matmul_precision"], ids=str)
def test_generation_equals_the_packed_forward(shape: str, dtype: torch.dtype, matmul_precision: str) -> None:
    """Of prompts in parts and rows that come and go."""
    decoder = build(SHAPES[shape], dtype)
    skip_unless_exact(decoder.ops, dtype)
    generator = Generator(decoder, alone()[1], replace(SMALL, max_num_batched_tokens=50, max_num_seqs=5, page_size=64), ())
    requests = ragged_requests(samples=1, max_new_tokens=12, vocabulary=decoder.spec.vocab_size)
    sampled = generator.generate(requests, SamplingConfig(temperature=0.7), 3, 5)
    assert num_unequal(decoder, requests, sampled, 0.7) == 0


@pytest.mark.parametrize(
    ("shape", "matmul_precision"), [(shape, precision) for shape, _, precision in TURNS[::2]], indirect=["matmul_precision"]
)
def test_batch_composition_does_not_matter(shape: str, matmul_precision: str) -> None:
    decoder = build(SHAPES[shape], torch.float32)
    skip_unless_exact(decoder.ops, torch.float32)
    check_composition(decoder)


def check_composition(decoder: Decoder) -> Tensor:
    """Returns the log-probs of all sequences together."""
    sequences = make_sequences(decoder.spec.vocab_size)
    packed = packed_log_probs(decoder, sequences)
    for number, sequence in enumerate(sequences):
        assert torch.equal(packed_log_probs(decoder, [sequence])[0], packed[number])
    order = [4, 1, 6, 2, 0, 5, 3] * 2
    shuffled = packed_log_probs(decoder, [sequences[number] for number in order], chunk_rows=64)
    for number, log_probs in zip(order, shuffled, strict=True):
        assert torch.equal(log_probs, packed[number])
    return torch.cat(packed)


def check_several_labels(decoder: Decoder) -> None:
    """Each as if it were alone, by one reduction and one gather of what is reduced."""
    draw, vocabulary = torch.Generator().manual_seed(5), decoder.spec.vocab_size
    hidden = torch.randn(9, decoder.spec.hidden_size, generator=draw).to(decoder.dtype)
    labels = torch.randint(vocabulary, (9, 4), generator=draw)
    logits, whole = heads.local_logits(decoder, hidden), heads.gather_logits(decoder, heads.local_logits(decoder, hidden))
    for temperature in (1.0, 0.7):
        before = RECORDER.sequence
        together = heads.log_probs_of(decoder, logits, labels, temperature)
        assert RECORDER.sequence - before == (decoder.tp.size > 1)
        alone = [heads.log_probs_of(decoder, logits, column, temperature) for column in labels.unbind(1)]
        assert torch.equal(together, torch.stack(alone, 1))
        expected = (whole.double() / temperature).log_softmax(1).gather(1, labels)
        torch.testing.assert_close(together.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_log_probs_of_several_labels(dtype: torch.dtype) -> None:
    check_several_labels(build(SHAPES["llama-odd"], dtype))


def _exact_under_tp(world: World, config: dict[str, Any]) -> None:
    decoder = build(config, torch.float32, world.all)
    log_probs = check_composition(decoder)
    for part in world.all.all_gather(log_probs, "check"):
        assert torch.equal(part, log_probs)
    check_several_labels(decoder)


@pytest.mark.parametrize(("tp", "shape"), [(2, "qwen3"), (4, "qwen3"), (2, "gemma2-odd"), (4, "qwen3-moe")])
def test_exact_under_tensor_parallelism(tp: int, shape: str) -> None:
    run_ranks(tp, _exact_under_tp, SHAPES[shape])
