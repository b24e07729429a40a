"""Transitions on real ranks: weights exact to the bit both ways, bytes and memory exact to the byte."""

from __future__ import annotations

import math

import pytest
import torch

from ranks import run_ranks
from reshard_cases import SPECS, fits, generation_shards_at, layout_of, train_shards_at
from reshard_generation import Model, check_weights, generate_in_layout, local, size, whole_tensors
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import METHODS, HybridWeights
from rlhf_spmd.reshard import hybrid as hybrid_module


def transitions(world: World, spec: ModelSpec, name: str, layout: GenerationLayout, buffers: str, bucket_bytes: int) -> dict:
    model = Model(world, spec, name, layout, buffers, bucket_bytes)
    reference, expected = whole_tensors(spec)
    hybrid, twice = model.hybrid, bool(not model.hybrid.plan.locations)
    objects = {key: id(parameter) for key, parameter in model.parameters().items()}
    result: dict = {"address": set(), "shared": hybrid.shared is not None}
    training = model.held()  # storages: FSDP pads uneven shards
    for version in range(3):
        before = {key: local(p).clone() for key, p in model.parameters().items()}
        hybrid.to_generation(version=version)
        assert hybrid.version == version, "the generation shard says which weights it holds"
        check_weights(model.generation, expected())
        generation = size(model.generation.parameters())
        beside = training if twice and buffers != "offload" else 0
        assert model.held() == generation + beside, "parameters that are held while generating"
        assert hybrid.transition is not None and hybrid.in_generation
        result["bytes"] = hybrid.transition.bytes_received, hybrid.transition.bytes_sent
        whole = 4 * sum(map(math.prod, hybrid.gathered.values())) if hybrid.plan.from_whole else 0
        held = whole + (generation if buffers == "keep" else 0) if whole else generation
        together = twice or (buffers == "keep" and hybrid.shared is None)
        result["address"].add(model.generation.layers[0].down.weight.data_ptr())
        if not layout.train.zero and not twice:
            for key, parameter in model.parameters().items():
                assert not parameter.untyped_storage().nbytes() or torch.equal(parameter, before[key])
        hybrid.to_training()
        assert hybrid.version == (version if buffers == "keep" else None)
        for key, parameter in model.parameters().items():
            assert id(parameter) == objects[key], "parameter objects stay: optimizers and FSDP hold them"
            assert torch.equal(local(parameter), before[key]) and local(parameter).is_contiguous(), key
        result["transient"] = hybrid.transition.peak_bytes - held - (training if together else 0)  # there and back
        kept = generation if buffers == "keep" and hybrid.shared is None else 0
        assert model.held() == training + kept
        with torch.no_grad():  # an update, the same in every layout
            for module in (model.decoder, reference):
                for parameter in module.parameters():
                    local(parameter).mul_(1.5)
    result["bound"] = hybrid.bucket_bytes
    result["planned"] = 4 * hybrid.plan.transfer.received(hybrid.index)
    if layout.train.zero:  # FSDP still works on the storage that it got back
        inputs = torch.arange(12) % 50 if model.decoder.is_first else torch.ones(12, spec.hidden_size)
        out = model.decoder(inputs, PackedAttention([7, 5], torch.device("cpu")))
        out.square().sum().backward()
    return result


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


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda n: " ".join(map(str, RUNS[n])))
def test_transitions(number: int) -> None:
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


@pytest.mark.parametrize("on_gpu", [False, True])
def test_heads_that_several_training_ranks_hold(on_gpu: bool) -> None:
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
    assert hybrid.transition is not None
    assert hybrid.transition.bytes_received == 4 * hybrid.plan.transfer.received(hybrid.index)
    assert hybrid.transition.peak_bytes <= size(model.generation.parameters()) + hybrid.bucket_bytes
    hybrid.to_training()
    assert all(torch.equal(local(p), before[key]) for key, p in model.parameters().items())
    steps = [step for step in hybrid._steps.values() if step.messages]
    return {"whole" if step.into else "flat" if step.gathers else "messages" for step in steps}


@pytest.mark.parametrize("train", [Layout(tp=4), Layout(pp=2, tp=2), Layout(dp=4, zero=3)], ids=str)
def test_ways_of_a_gpu(train: Layout) -> None:
    ways = run_ranks(4, ways_of_a_gpu, train)
    assert ways[0] == ways[1] == ways[2] == ways[3] == ({"flat", "messages"} if train.pp > 1 else {"whole", "flat"})


@pytest.mark.parametrize("spec", [spec for spec, head in SPECS.values() if head == "lm"], ids=list(SPECS)[:3])
@pytest.mark.parametrize(
    ("name", "train", "tp"),
    [
        ("zero_redundancy", Layout(tp=4), 1),
        ("zero_redundancy", Layout(tp=4), 2),
        ("full_gather", Layout(tp=4), 2),
        ("zero_redundancy", Layout(dp=4, zero=3), 2),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_forward_in_the_generation_layout(spec: ModelSpec, name: str, train: Layout, tp: int, wait: bool) -> None:
    """Also where the gather goes on during the forward pass, and where a rank makes none."""
    assert max(run_ranks(4, generate_in_layout, spec, name, layout_of(name, train, 1, tp), wait)) < 1e-12


def test_another_dtype_is_a_copy_and_stays() -> None:
    """Training in fp32, generation in bf16: the training parameters are not a second copy of the same values."""
    for buffers in ("free", "offload"):
        check_two_dtypes(buffers)


def check_two_dtypes(buffers: str) -> None:
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
    assert hybrid.shared is None and hybrid.transition is not None and hybrid.transition.bytes_received == 0
    for (key, a), b in zip(decoder.named_parameters(), generation.parameters(), strict=True):
        assert torch.equal(before[key].bfloat16(), b)
        assert a.untyped_storage().nbytes() == (0 if buffers == "offload" else a.nbytes)
    hybrid.to_training()
    assert all(torch.equal(p, before[key]) for key, p in decoder.named_parameters())
    assert not generation.layers[0].out.weight.numel()
