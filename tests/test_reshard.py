"""The hybrid engine: pure plans for many layouts, and transitions on real ranks, exact to the bit and the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import run_ranks
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.boxes import ParamShard, shard_rows, zero_rows
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.parallel.mesh import build_group, build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridEngine, gather_ranks, plan_gather, plan_homes, transition_bytes
from rlhf_spmd.reshard.plan import shards_from_json, shards_to_json

SPECS = {
    "gqa": ModelSpec("llama", 64, 32, 48, 4, 8, 4, 4),
    "tied, biases, qk norm": ModelSpec(
        "qwen3", 64, 32, 48, 4, 8, 8, 4, attention_bias=True, attention_out_bias=True, qk_norm=True, tie_word_embeddings=True
    ),
    "odd vocabulary, 2 KV heads": ModelSpec("llama", 61, 32, 48, 4, 8, 2, 4, tie_word_embeddings=True),
}
SHAPES = [  # training (p, t, d, zero) -> generation (p_g, t_g)
    ((1, 1, 1, 0), (1, 1)),
    ((1, 2, 2, 0), (1, 1)),
    ((1, 4, 1, 0), (1, 2)),
    ((1, 4, 1, 0), (1, 1)),
    ((1, 4, 2, 0), (1, 4)),
    ((2, 1, 2, 0), (1, 1)),
    ((4, 2, 1, 0), (2, 1)),
    ((2, 2, 1, 0), (1, 1)),
    ((2, 2, 1, 0), (2, 1)),
    ((2, 4, 3, 0), (1, 2)),
    ((1, 1, 4, 3), (1, 1)),
    ((1, 2, 2, 3), (1, 1)),
    ((1, 2, 2, 1), (1, 2)),
    ((2, 2, 3, 2), (1, 1)),
    ((2, 1, 2, 3), (2, 1)),
]


def train_shards(spec: ModelSpec, layout: Layout, index: int) -> dict[str, ParamShard]:
    pp, dp, tp = layout.coordinate(index)
    plan = plan_params(spec, "lm", pp, layout.pp, tp, layout.tp)
    if layout.zero and layout.dp > 1:
        return {name: shard_rows(shard, *zero_rows(shard.shape[0], dp, layout.dp)) for name, shard in plan.items()}
    return plan


def generation_shards(spec: ModelSpec, layout: GenerationLayout, index: int) -> dict[str, ParamShard]:
    pp, _, tp = layout.coordinate(index)
    return plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, layout.train.tp // layout.tp)


def global_value(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 31 + 7))


def filled(shards: dict[str, ParamShard]) -> dict[str, Tensor]:
    tensors = {}
    for name, shard in shards.items():
        tensors[name] = torch.full(shard.shape, torch.nan)
        for box in shard.boxes:
            tensors[name][box.local_slices] = global_value(box.name, box.shape)[box.global_slices]
    return tensors


def is_split(name: str) -> bool:
    return "norm" not in name and not name.endswith("o_proj.bias")


@pytest.mark.parametrize(("train", "generation"), SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("bucket_elements", [1, 1 << 30])
def test_plans(spec: ModelSpec, train: tuple[int, int, int, int], generation: tuple[int, int], bucket_elements: int) -> None:
    layout = GenerationLayout(Layout(*train[:3], zero=train[3]), *generation)
    for index in range(layout.train.size):
        ranks = gather_ranks(layout, index)
        assert index in ranks and len(ranks) == layout.micro_dp * (layout.train.dp if train[3] else 1)
        target = generation_shards(spec, layout, index)
        assert all(generation_shards(spec, layout, rank) == target for rank in ranks)
        members = [train_shards(spec, layout.train, rank) for rank in ranks]
        plan = plan_gather(members, target, bucket_elements)
        assert sorted(name for bucket in plan.buckets for name in bucket.targets) == sorted(target)
        values, got = [filled(shards) for shards in members], {n: torch.full(s.shape, torch.nan) for n, s in target.items()}
        me = ranks.index(index)
        for bucket in plan.buckets:
            pieces = [(m, p) for m, sent in enumerate(bucket.sends) for p in sent] + [(me, p) for p in bucket.copies[me]]
            for member, piece in pieces:
                part = got[piece.target][piece.target_box.local_slices]
                assert part.isnan().all()
                part.copy_(values[member][piece.source][piece.source_box.local_slices])
        assert all(torch.equal(got[name], expected) for name, expected in filled(target).items())
        homes = plan_homes(members[me], target)
        for name, home in homes.items():
            rebuilt = torch.full_like(values[me][name], torch.nan)
            for piece in home.pieces:
                rebuilt[piece.source_box.local_slices] = got[piece.target][piece.target_box.local_slices]
            assert torch.equal(rebuilt, values[me][name])
            if home.view is not None:
                assert torch.equal(got[home.view[0]][home.view[1]], values[me][name])
            kv_cut = "qkv" in name and spec.num_key_value_heads < layout.train.tp and layout.micro_dp > 1
            if not train[3]:
                assert (home.view is None) <= kv_cut, name  # literal views for all but KV heads that training replicates


@pytest.mark.parametrize(("train", "generation"), SHAPES, ids=str)
def test_bytes_are_the_papers_formula(train: tuple[int, int, int, int], generation: tuple[int, int]) -> None:
    """For the tensors that the layout splits: heads, KV heads, vocabulary and rows divisible, an untied model, norms aside."""
    spec = ModelSpec("llama", 96, 96, 96, 4, 24, 24, 4)
    p, t, d, zero = train
    layout = GenerationLayout(Layout(p, t, d, zero), *generation)
    split = [b for s in plan_params(spec, "lm", 0, 1, 0, 1).values() for b in s.boxes if is_split(b.name)]
    layers = 4 * sum(box.numel for box in split if ".layers." in box.name)
    ends = 4 * sum(box.numel for box in split if ".layers." not in box.name)
    held = p * t * (d if zero else 1)
    per_rank = []
    for index in range(layout.train.size):
        ranks = gather_ranks(layout, index)
        members = [{n: s for n, s in train_shards(spec, layout.train, rank).items() if "norm" not in n} for rank in ranks]
        target = {n: s for n, s in generation_shards(spec, layout, index).items() if "norm" not in n}
        plan = plan_gather(members, target)
        per_rank.append(4 * plan.elements_received(ranks.index(index)))
        layer_plan = plan_gather(
            [{n: s for n, s in shards.items() if n.startswith("layers.")} for shards in members],
            {n: s for n, s in target.items() if n.startswith("layers.")},
        )
        received = 4 * layer_plan.elements_received(ranks.index(index))
        pg, tg = generation
        assert received == transition_bytes(layers, layout)
        assert received == layers // (pg * tg) - layers // held
        if not zero:
            assert received * tg * pg * t * p == (t * p - tg * pg) * layers
        assert all(bucket.balanced for bucket in layer_plan.buckets)  # equal amounts: all-gathers, not broadcasts
    # embedding and head lie on single stages, so the formula holds for them on average over the ranks
    assert sum(per_rank) == layout.train.size * transition_bytes(layers + ends, layout)


def test_what_does_not_fit() -> None:
    spec = SPECS["gqa"]
    full = plan_params(spec, "lm", 0, 1, 0, 1)
    halves = [plan_params(spec, "lm", 0, 1, rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match=r"no training shard of its group holds model\.embed_tokens\.weight"):
        plan_gather(halves[1:], full)
    with pytest.raises(ValueError, match=r"training parameter embed\.weight .* is not part of this rank's generation shard"):
        plan_homes(full, halves[0])
    assert shards_from_json(shards_to_json(full)) == full


def shard_decoder(decoder: Decoder, world: World, mesh: object, zero: int) -> None:
    for module in [*decoder.layers, decoder]:
        fully_shard(module, mesh=mesh.dp_device_mesh(), reshard_after_forward=zero == 3)  # type: ignore[attr-defined]


def local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def check_weights(decoder: Decoder, whole: dict[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        for box in decoder.shards[name].boxes:
            assert torch.equal(parameter.data[box.local_slices], whole[box.name][box.global_slices]), name


def transitions(world: World, spec: ModelSpec, train: Layout, pp: int, tp: int, keep: bool, bucket_bytes: int) -> dict:
    layout = GenerationLayout(train, pp, tp)
    pool = list(range(world.size))
    mesh, gen_mesh = build_mesh(world, pool, train), build_mesh(world, pool, layout)
    group = build_group(world, pool, lambda i: gather_ranks(layout, i), "gather")
    decoder = Decoder(spec, "lm", mesh.pp_rank, train.pp, mesh.tp, torch.float32, "cpu")
    init_random(decoder, 3)
    reference = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    init_random(reference, 3)
    shards = train_shards(spec, train, world.rank)
    if train.zero:
        shard_decoder(decoder, world, mesh, train.zero)
    generation = Decoder(spec, "lm", gen_mesh.pp_rank, pp, gen_mesh.tp, torch.float32, "meta", blocks=train.tp // tp)

    def parameters() -> dict[str, Tensor]:
        return dict(decoder.named_parameters())

    objects = {name: id(p) for name, p in parameters().items()}
    engine = HybridEngine(shards, parameters, generation, generation.shards, group, bucket_bytes, keep)
    result: dict = {"bytes": [], "shared": engine.shared is not None, "address": []}
    for _ in range(3):
        before = {name: local(p).clone() for name, p in parameters().items()}
        whole = {box.name: torch.empty(box.shape) for s in reference.shards.values() for box in s.boxes}
        for name, parameter in reference.named_parameters():
            for box in reference.shards[name].boxes:
                whole[box.name].copy_(parameter.data[box.local_slices])
        engine.to_generation()
        check_weights(generation, whole)
        result["bytes"].append(engine.bytes_received)
        result["address"].append(generation.layers[0].down.weight.data_ptr())
        inside = [(g.data_ptr(), g.data_ptr() + g.nbytes) for g in generation.parameters()]
        views = 0
        for name, parameter in parameters().items():
            tensor = local(parameter)
            if train.zero and engine.shared is None:
                assert tensor.untyped_storage().nbytes() == 0, name
            elif tensor.numel():
                assert any(a <= tensor.data_ptr() < b for a, b in inside), name
                views += 1
                assert torch.equal(tensor, before[name])
        result["views"] = views
        engine.to_training()
        for name, parameter in parameters().items():
            assert id(parameter) == objects[name], "parameter objects stay: optimizers and FSDP hold them"
            tensor = local(parameter)
            assert torch.equal(tensor, before[name]) and tensor.is_contiguous(), name
            if engine.shared is None:
                assert not any(a <= tensor.data_ptr() < b for a, b in inside if a != b and keep), name
        held = sum(g.numel() for g in generation.parameters())
        assert (held > 0) == (keep or engine.shared is not None)
        with torch.no_grad():  # an update, the same in every layout
            for module in (decoder, reference):
                for parameter in module.parameters():
                    local(parameter).mul_(1.5)
    if train.zero:  # FSDP still works on the storage that it got back
        result["loss"] = float(train_once(decoder, whole))
    return result


def train_once(decoder: Decoder, whole: dict[str, Tensor]) -> Tensor:
    from rlhf_spmd.models.attention import PackedAttention

    out = decoder(torch.arange(12) % 50, PackedAttention([7, 5], torch.device("cpu")))
    out.square().sum().backward()
    return out.detach().square().sum()


CASES = [
    (Layout(dp=4), 1, 1),
    (Layout(tp=2, dp=2), 1, 1),
    (Layout(tp=4), 1, 2),
    (Layout(tp=4), 1, 4),
    (Layout(pp=2, dp=2), 1, 1),
    (Layout(pp=2, tp=2), 1, 1),
    (Layout(pp=2, tp=2), 2, 1),
    (Layout(dp=4, zero=3), 1, 1),
    (Layout(tp=2, dp=2, zero=3), 1, 1),
    (Layout(tp=2, dp=2, zero=1), 1, 2),
]


@pytest.mark.parametrize(("train", "pp", "tp"), CASES, ids=str)
@pytest.mark.parametrize("spec", ["gqa", "tied, biases, qk norm"])
def test_transitions_on_ranks(train: Layout, pp: int, tp: int, spec: str) -> None:
    layout = GenerationLayout(train, pp, tp)
    keep, bucket_bytes = train.pp == 2, 5000 if spec == "gqa" else 256 << 20
    results = run_ranks(4, transitions, SPECS[spec], train, pp, tp, keep, bucket_bytes)
    same = layout.micro_dp == 1 and not train.zero
    for index, result in enumerate(results):
        assert result["shared"] == same
        ranks = gather_ranks(layout, index)
        members = [train_shards(SPECS[spec], train, rank) for rank in ranks]
        plan = plan_gather(members, generation_shards(SPECS[spec], layout, index))
        expected = 0 if same else 4 * plan.elements_received(ranks.index(index))
        assert result["bytes"] == [expected] * 3
        if keep:
            assert len(set(result["address"])) == 1
        if not train.zero:
            assert result["views"] == len(members[0] if train.pp == 1 else train_shards(SPECS[spec], train, index))


def replicated_kv_heads(world: World) -> int:
    """Two training ranks share a KV head, so [q0; k; v] is no slice of [q0; q1; k; v]: it is released and restored."""
    spec, train = SPECS["odd vocabulary, 2 KV heads"], Layout(tp=4)
    layout = GenerationLayout(train, 1, 2)
    pool = list(range(4))
    mesh, gen_mesh = build_mesh(world, pool, train), build_mesh(world, pool, layout)
    group = build_group(world, pool, lambda i: gather_ranks(layout, i), "gather")
    decoder = Decoder(spec, "lm", 0, 1, mesh.tp, torch.float32, "cpu")
    init_random(decoder, 3)
    generation = Decoder(spec, "lm", 0, 1, gen_mesh.tp, torch.float32, "meta", blocks=2)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    engine = HybridEngine(decoder.shards, lambda: dict(decoder.named_parameters()), generation, generation.shards, group)
    engine.to_generation()
    empty = [name for name, p in decoder.named_parameters() if not p.numel()]
    assert all("qkv" in name for name in empty)
    engine.to_training()
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())
    return len(empty)


def test_replicated_kv_heads() -> None:
    assert run_ranks(4, replicated_kv_heads) == [4, 0, 4, 0]  # [q1; k; v] is one


def generate_in_layout(world: World, spec: ModelSpec, tp: int) -> Tensor:
    """Hidden states of a generation module with blocks against the single-rank forward, in fp64."""
    from rlhf_spmd.models.attention import PackedAttention

    train = Layout(tp=4)
    layout = GenerationLayout(train, 1, tp)
    pool = list(range(4))
    mesh, gen_mesh = build_mesh(world, pool, train), build_mesh(world, pool, layout)
    group = build_group(world, pool, lambda i: gather_ranks(layout, i), "gather")
    decoder = Decoder(spec, "lm", 0, 1, mesh.tp, torch.float64, "cpu")
    whole = Decoder(spec, "lm", 0, 1, solo(), torch.float64, "cpu")
    init_random(decoder, 3)
    init_random(whole, 3)
    generation = Decoder(spec, "lm", 0, 1, gen_mesh.tp, torch.float64, "meta", blocks=4 // tp)
    engine = HybridEngine(decoder.shards, lambda: dict(decoder.named_parameters()), generation, generation.shards, group)
    engine.to_generation()
    tokens, attention = torch.arange(12) * 5 % 50, PackedAttention([7, 5], torch.device("cpu"))
    with torch.no_grad():
        a, b = generation(tokens, attention), whole(tokens, attention)
    return (a - b).abs().max() / b.abs().max()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tp", [1, 2])
def test_forward_in_the_generation_layout(spec: ModelSpec, tp: int) -> None:
    assert max(map(float, run_ranks(4, generate_in_layout, spec, tp))) < 1e-12


def test_another_dtype_is_a_copy_and_stays() -> None:
    """Training in fp32, generation in bf16: the training parameters are not a second copy of the same values."""
    spec = SPECS["gqa"]
    decoder = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    init_random(decoder, 0)
    generation = Decoder(spec, "lm", 0, 1, solo(), torch.bfloat16, "meta")
    engine = HybridEngine(decoder.shards, lambda: dict(decoder.named_parameters()), generation, generation.shards, solo())
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in decoder.named_parameters()}
    engine.to_generation()
    with pytest.raises(AssertionError, match="already in the generation layout"):
        engine.to_generation()
    assert engine.shared is None and engine.bytes_received == 0
    for (name, a), b in zip(decoder.named_parameters(), generation.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b) and a.data_ptr() == before[name][0]
    engine.to_training()
    assert all(torch.equal(p, before[name][1]) for name, p in decoder.named_parameters())
    assert isinstance(generation.layers[0], nn.Module) and generation.layers[0].out.weight.numel() == 0
