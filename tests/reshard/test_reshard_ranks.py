"""Transitions on real ranks: weights exact to the bit both ways, bytes and memory exact to the byte."""

from __future__ import annotations

import math

import pytest
import torch

from ranks import run_ranks
from reshard_cases import SPECS, fits, generation_shards_at, layout_of, train_shards_at
from reshard_generation import Model, check_weights, generate_in_layout, local, size, transitions, whole_tensors
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import METHODS, HybridWeights
from rlhf_spmd.reshard import hybrid as hybrid_module
from tiers import tiers

CASES = [  # training layout, p_g, t_g, method or None for all
    (Layout(dp=4), 1, 1, None),
    (Layout(tp=2, dp=2), 1, 1, None),
    (Layout(tp=4), 1, 2, None),
    (Layout(tp=4), 1, 4, "zero_redundancy"),
    (Layout(pp=2, dp=2), 1, 1, "zero_redundancy"),
    (Layout(pp=2, tp=2), 1, 1, None),
    (Layout(pp=2, tp=2), 2, 1, None),
    (Layout(dp=4, zero=3), 1, 1, None),
    (Layout(dp=4, zero=3), 1, 2, None),
    (Layout(dp=4, zero=3), 2, 2, "zero_redundancy"),
    (Layout(dp=4, zero=3), 4, 1, "zero_redundancy"),
    (Layout(tp=2, dp=2, zero=3), 1, 1, "zero_redundancy"),
    (Layout(pp=2, dp=2, zero=3), 1, 4, "zero_redundancy"),
    (Layout(tp=2, dp=2, zero=1), 1, 2, "zero_redundancy"),
    (Layout(dp=4, zero=3, zero_size=2), 1, 1, None),
    (Layout(dp=4, zero=3, zero_size=2), 1, 4, "zero_redundancy"),
]
RUNS = [(train, pp, tp, name) for train, pp, tp, only in CASES for name in METHODS if only in (None, name)]


SHORT = {0, 4, 9, 10, 13, 14, 19, 20, 24, 27, 30, 31}  # every method, buffer policy and bucket size, each kind of layout


@pytest.mark.parametrize("number", tiers(range(len(RUNS)), SHORT), ids=lambda number: " ".join(map(str, RUNS[number])))
def test_transitions(number: int) -> None:
    """Of every three runs in a row each has another buffer policy, of every two another size of buckets."""
    train, pp, tp, name = RUNS[number]
    layout = layout_of(name, train, pp, tp)
    specs = [spec for spec, head in SPECS.values() if head == "lm" and fits(spec, train, layout)]
    buffers, bucket_bytes = ("free", "keep", "offload")[number % 3], 5000 if number % 2 else 256 << 20
    results = run_ranks(4, transitions, specs[number % len(specs)], name, layout, buffers, bucket_bytes)
    assert sum(result["bytes"][0] for result in results) == sum(result["bytes"][1] for result in results)
    for result in results:
        same = name == "zero_redundancy" and not layout.consecutive and layout.micro_dp == 1 and not train.zero
        assert result["shared"] == same
        assert result["bytes"][0] == (0 if same else result["planned"])
        lowest = 0 if buffers != "offload" else -math.inf  # then training shards leave while buckets come
        print(f"{train} -> {pp}, {tp}: {result['transient']} of {result['bound']} bytes beside the parameters")
        assert lowest <= result["transient"] <= result["bound"]
        assert buffers != "keep" or len(result["address"]) == 1


def replicated_kv_heads(world: World) -> int:
    """Two training ranks share a KV head, so [q0; k; v] is no slice of [q0; q1; k; v]: it is released and restored."""
    layout = layout_of("zero_redundancy", Layout(tp=4), 1, 2)
    model = Model(world, SPECS["odd vocabulary, 2 KV heads"][0], "zero_redundancy", layout)
    before = {key: p.detach().clone() for key, p in model.parameters().items()}
    model.hybrid.to_generation()
    empty = [key for key, p in model.parameters().items() if not p.untyped_storage().nbytes()]
    assert all("qkv" in key for key in empty)
    model.hybrid.to_training()
    assert all(torch.equal(p, before[key]) for key, p in model.parameters().items())
    return len(empty)


def test_replicated_kv_heads() -> None:
    assert run_ranks(4, replicated_kv_heads) == [4, 0, 4, 0]  # [q1; k; v] is one


def heads_of_several(world: World, on_gpu: bool) -> None:
    """Of four training ranks two hold each KV head and take turns in giving it, so what they send differs from peer to peer."""
    spec = ModelSpec("llama", 61, 256, 512, 4, 8, 2, 32, tie_word_embeddings=True)
    model = Model(world, spec, "zero_redundancy", layout_of("zero_redundancy", Layout(tp=4), 1, 1))
    plan_bucket = hybrid_module.plan_bucket
    hybrid_module.plan_bucket = lambda *args: plan_bucket(*args[:-1], on_gpu=on_gpu)
    model.hybrid.to_generation()
    hybrid_module.plan_bucket = plan_bucket
    check_weights(model.generation, whole_tensors(spec)[1]())
    model.hybrid.to_training()


def test_heads_that_several_training_ranks_hold() -> None:
    for on_gpu in (False, True):
        run_ranks(4, heads_of_several, on_gpu)


def ways_of_a_gpu(world: World, train: Layout) -> set[str]:
    """The routes that a GPU takes, over gloo: whole parameters and flat buffers by one all-gather, the rest by messages."""
    model = Model(world, SPECS["gqa"][0], "zero_redundancy", layout_of("zero_redundancy", train, 1, 1))
    hybrid, (_, expected), plan_bucket = model.hybrid, whole_tensors(SPECS["gqa"][0]), hybrid_module.plan_bucket
    hybrid_module.plan_bucket = lambda *args: plan_bucket(*args[:-1], on_gpu=True)
    before = {key: local(p).clone() for key, p in model.parameters().items()}
    assert not hybrid._steps, "steps are made when a bucket is first needed"
    hybrid.to_generation()
    hybrid_module.plan_bucket = plan_bucket
    check_weights(model.generation, expected())
    assert hybrid.cost.bytes_received == 4 * hybrid.plan.transfer.received(hybrid.index)
    assert hybrid.cost.peak_bytes <= size(model.generation.parameters()) + hybrid.bucket_bytes
    hybrid.to_training()
    assert all(torch.equal(local(p), before[key]) for key, p in model.parameters().items())
    steps = [step for step in hybrid._steps.values() if step.messages]
    return {"whole" if step.gathered_parameter else "flat" if step.gathers else "messages" for step in steps}


@pytest.mark.parametrize("train", [Layout(tp=4), Layout(pp=2, tp=2), Layout(dp=4, zero=3)], ids=str)
def test_ways_of_a_gpu(train: Layout) -> None:
    ways = run_ranks(4, ways_of_a_gpu, train)
    assert ways[0] == ways[1] == ways[2] == ways[3] == ({"flat", "messages"} if train.pp > 1 else {"whole", "flat"})


FORWARD = [  # model, method, training layout, t_g
    ("gqa", "zero_redundancy", Layout(tp=4), 1),
    ("tied, biases, qk norm", "zero_redundancy", Layout(tp=4), 2),
    ("odd vocabulary, 2 KV heads", "zero_redundancy", Layout(tp=4), 2),
    ("tied, biases, qk norm", "full_gather", Layout(tp=4), 2),
    ("odd vocabulary, 2 KV heads", "zero_redundancy", Layout(dp=4, zero=3), 2),
]


@pytest.mark.parametrize(("model", "name", "train", "tp"), FORWARD, ids=str)
def test_forward_in_the_generation_layout(model: str, name: str, train: Layout, tp: int) -> None:
    layout = layout_of(name, train, 1, tp)
    assert max(run_ranks(4, generate_in_layout, SPECS[model][0], name, layout)) < 1e-12


@pytest.mark.parametrize("buffers", ["free", "offload"])
def test_another_dtype_is_a_copy_and_stays(buffers: str) -> None:
    """Training in fp32, generation in bf16: the training parameters are not a second copy of the same values."""
    spec, layout = SPECS["gqa"][0], layout_of("zero_redundancy", Layout(), 1, 1)
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    init_random(decoder, 0)
    generation = Decoder(spec, "lm", 0, 1, solo(), torch.bfloat16, "meta")
    parameters = lambda: dict(decoder.named_parameters())  # noqa: E731
    method = METHODS["zero_redundancy"]
    sides = train_shards_at(spec, layout.train), generation_shards_at(spec, layout)
    hybrid = HybridWeights(sides[0], parameters, generation, sides[1], solo(), method, layout, 0, buffers)
    before = {key: p.detach().clone() for key, p in decoder.named_parameters()}
    hybrid.to_generation()
    with pytest.raises(AssertionError, match="already in the generation layout"):
        hybrid.to_generation()
    assert hybrid.shared is None and hybrid.cost.bytes_received == 0
    for (key, a), b in zip(decoder.named_parameters(), generation.parameters(), strict=True):
        assert torch.equal(before[key].bfloat16(), b)
        assert a.untyped_storage().nbytes() == (0 if buffers == "offload" else a.nbytes)
    hybrid.to_training()
    assert all(torch.equal(p, before[key]) for key, p in decoder.named_parameters())
    assert not generation.layers[0].out.weight.numel()
