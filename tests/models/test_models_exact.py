"""Exactness: a token's bits do not depend on its batch, so incremental decoding equals the packed forward bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from generators import matmul_precision as matmul_precision  # a fixture
from generators import skip_unless_exact
from ranks import run_ranks
from rlhf_spmd.kernels import AttentionRule
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.packing import KEY_BLOCK, round_up, visible
from rlhf_spmd.models import heads
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec, spec_from_config
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import RECORDER, solo
from rlhf_spmd.parallel.world import World

SHAPES: dict[str, dict[str, object]] = {
    "llama-odd": {
        "model_type": "llama",
        "vocab_size": 517,
        "hidden_size": 40,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
    },
    "llama-tiny": {
        "model_type": "llama",
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen2-wide": {
        "model_type": "qwen2",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma2-odd": {
        "model_type": "gemma2",
        "vocab_size": 517,
        "hidden_size": 40,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "sliding_window": 37,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
    },
    "glm4-odd": {
        "model_type": "glm4",
        "vocab_size": 300,
        "hidden_size": 40,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
    },
    "olmo2-odd": {
        "model_type": "olmo2",
        "vocab_size": 300,
        "hidden_size": 40,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": 14,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 20,
        "partial_rotary_factor": 0.3,
        "n_routed_experts": 14,
        "num_experts_per_tok": 3,
        "n_group": 7,
        "topk_group": 3,
    },
}


class CacheAttention:
    """Several sequences, each with its new tokens after those in its cache: what a generator does, without pages."""

    def __init__(self, spec: ModelSpec, kv_heads: int, num_sequences: int, dtype: torch.dtype) -> None:
        shape = (spec.num_hidden_layers, kv_heads, 0, spec.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype) for _ in range(num_sequences)]
        self.values = [torch.empty(shape, dtype=dtype) for _ in range(num_sequences)]

    def schedule(self, work: list[tuple[int, int]]) -> None:
        """(sequence, number of new tokens) in the order in which they are packed."""
        self.work = work
        self.positions = torch.cat([self.keys[i].shape[2] + torch.arange(n) for i, n in work])
        for i, n in work:
            room = self.keys[i].new_zeros(self.keys[i].shape[0], self.keys[i].shape[1], n, self.keys[i].shape[3])
            self.keys[i], self.values[i] = torch.cat([self.keys[i], room], 2), torch.cat([self.values[i], room], 2)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Sequences with equally many new tokens share one padded call of BatchInvariantOps.attend."""
        out = torch.empty_like(q)
        starts, groups, at = {}, {}, 0
        for i, n in self.work:
            starts[i] = at
            self.keys[i][layer_index, :, -n:] = k[at : at + n].transpose(0, 1)
            self.values[i][layer_index, :, -n:] = v[at : at + n].transpose(0, 1)
            groups.setdefault(n, []).append(i)
            at += n
        group_size = q.shape[1] // k.shape[1]
        for n, members in groups.items():
            longest = round_up(max(self.keys[i].shape[2] for i in members), KEY_BLOCK)
            batch_k = k.new_zeros(len(members), k.shape[1], longest, k.shape[2])
            batch_v = torch.full_like(batch_k, 3.0)
            allowed = torch.zeros(len(members), 1, n * group_size, longest, dtype=torch.bool)
            for row, i in enumerate(members):
                length = self.keys[i].shape[2]
                batch_k[row, :, :length] = self.keys[i][layer_index]
                batch_v[row, :, :length] = self.values[i][layer_index]
                query = (length - n + torch.arange(n)).repeat_interleave(group_size)
                allowed[row, 0] = visible(query, torch.arange(longest), rule.window)
            rows = torch.stack([q[starts[i] : starts[i] + n] for i in members])
            rows = rows.view(len(members), n, k.shape[1], group_size, -1).transpose(1, 2).flatten(2, 3)
            mixed = (
                BatchInvariantOps().attend(rows, batch_k, batch_v, rule, allowed).unflatten(2, (n, group_size)).transpose(1, 2)
            )
            for row, i in enumerate(members):
                out[starts[i] : starts[i] + n] = mixed[row].reshape(n, q.shape[1], -1)
        return out


def build(config: dict[str, object], dtype: torch.dtype, tp: object = None) -> Decoder:
    decoder = Decoder(spec_from_config(config, "test"), "lm", 0, 1, tp or solo(), dtype, "cpu")
    init_random(decoder, 7)
    return decoder


def packed_log_probs(decoder: Decoder, sequences: list[Tensor], chunk_rows: int | None = None) -> list[Tensor]:
    """log p of each next token, one tensor per sequence, from one training forward over all of them."""
    ids = torch.cat(sequences)
    attention = PackedAttention([len(s) for s in sequences], ops=BatchInvariantOps())
    labels = torch.cat([s.roll(-1) for s in sequences])

    def head(d: Decoder, hidden: Tensor) -> Tensor:
        return heads.token_log_probs(d, hidden, labels, 0.7, chunk_rows=chunk_rows)[0]

    with torch.no_grad():
        return list(decoder(ids, attention, head).split([len(s) for s in sequences]))


def decoded_log_probs(decoder: Decoder, sequences: list[Tensor], prompts: list[int], kv_heads: int) -> list[Tensor]:
    """The same from prefills in two chunks and then token by token, all sequences in one batch as long as they last."""
    dtype = decoder.dtype
    cache = CacheAttention(decoder.spec, kv_heads, len(sequences), dtype)
    results: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in range(10**6):
        work = []
        for i, s in enumerate(sequences):
            left = len(s) - done[i]
            n = min(left, max(prompts[i] // 2, 1)) if done[i] < prompts[i] else min(left, 1)
            if n and (step >= i):  # sequences join one by one
                work.append((i, n))
        if not work and step > len(sequences):
            break
        if not work:
            continue
        cache.schedule(work)
        ids = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in work])
        labels = torch.cat([sequences[i].roll(-1)[done[i] : done[i] + n] for i, n in work])
        with torch.no_grad():
            logits = heads.local_logits(decoder, decoder(ids, cache))
            log_probs = heads.log_probs_of(decoder, logits, labels, 0.7)
        for (i, n), part in zip(work, log_probs.split([n for _, n in work]), strict=True):
            results[i].append(part)
            done[i] += n
    return [torch.cat(r) for r in results]


def make_sequences(vocab_size: int) -> tuple[list[Tensor], list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths, prompts = [1, 5, 70, 63, 64, 131, 2], [1, 3, 66, 40, 61, 129, 1]
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths], prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_equals_packed_forward(shape: str, dtype: torch.dtype, matmul_precision: str) -> None:
    decoder = build(SHAPES[shape], dtype)
    skip_unless_exact(decoder.ops, dtype)
    sequences, prompts = make_sequences(decoder.spec.vocab_size)
    packed = packed_log_probs(decoder, sequences)
    decoded = decoded_log_probs(decoder, sequences, prompts, decoder.spec.num_key_value_heads)
    for a, b in zip(packed, decoded, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_composition_does_not_matter(shape: str, matmul_precision: str) -> None:
    decoder = build(SHAPES[shape], torch.float32)
    skip_unless_exact(decoder.ops, torch.float32)
    sequences, _ = make_sequences(decoder.spec.vocab_size)
    packed = packed_log_probs(decoder, sequences)
    for i, alone in enumerate(sequences):
        assert torch.equal(packed_log_probs(decoder, [alone])[0], packed[i])
    order = [4, 1, 6, 2, 0, 5, 3]
    shuffled = packed_log_probs(decoder, [sequences[i] for i in order] * 2, chunk_rows=64)
    for at, i in enumerate(order):
        assert torch.equal(shuffled[at], packed[i])
        assert torch.equal(shuffled[at + len(order)], packed[i])


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


def _exact_under_tp(world: World, config: dict[str, object]) -> None:
    decoder = build(config, torch.float32, world.all)
    sequences, prompts = make_sequences(decoder.spec.vocab_size)
    packed = packed_log_probs(decoder, sequences)
    decoded = decoded_log_probs(decoder, sequences, prompts, decoder.layers[0].num_kv_heads)
    for a, b in zip(packed, decoded, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()
    for part in world.all.all_gather(torch.cat(packed), "check"):
        assert torch.equal(part, torch.cat(packed))
    check_several_labels(decoder)


@pytest.mark.parametrize(("tp", "shape"), [(2, "qwen3"), (4, "qwen3"), (2, "gemma2-odd"), (4, "qwen3-moe")])
def test_exact_under_tensor_parallelism(tp: int, shape: str) -> None:
    run_ranks(tp, _exact_under_tp, SHAPES[shape])
