"""Transitions to a generation layout on ranks, checked weight by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard_cases import generation_shards_at, train_shards_at
from rlhf_spmd.models.attention import PackedAttention
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.weights import init_random
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.reshard.storages import held_bytes


class Model:
    """A role's training module and its generation module, with one copy of the weights, on one rank of all of ``world``."""

    def __init__(
        self,
        world: World,
        spec: ModelSpec,
        name: str,
        layout: GenerationLayout,
        buffers: str = "free",
        bucket_bytes: int = 256 << 20,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        train, pool = layout.train, list(range(world.size))
        mesh, generation_mesh = build_mesh(world, pool, train), build_mesh(world, pool, layout)
        method = choose_method(name, layout)
        group = world.group(sorted(method.gather_ranks(layout, world.rank)), "gather", channel="gather")
        assert group is not None
        group.connect()
        self.decoder = Decoder(spec, "lm", mesh.pp_rank, train.pp, mesh.tp, dtype, "cpu", ep=mesh.ep)
        init_random(self.decoder, 3)
        if train.zero:
            axis = "dp_shard" if train.dp_replicate > 1 else "dp"
            for module in [*self.decoder.layers, self.decoder]:
                fully_shard(module, mesh=mesh.device_mesh[axis], reshard_after_forward=train.zero == 3)
        options: dict[str, Any] = {
            "fused_slices": layout.fused_slices,
            "expert_parallel_generation": layout.expert_parallel_generation,
        }
        self.generation = Decoder(spec, "lm", generation_mesh.pp_rank, layout.pp, generation_mesh.tp, dtype, "meta", **options)
        self.hybrid = HybridWeights(
            train_shards_at(spec, train),
            self.parameters,
            self.generation,
            generation_shards_at(spec, layout),
            group,
            method,
            layout,
            world.rank,
            buffers,
            bucket_bytes,
        )
        self.mesh = generation_mesh

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.decoder.named_parameters())

    def held(self) -> int:
        return held_bytes([*map(local, self.parameters().values()), *self.generation.parameters()])


def local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def size(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def whole_tensors(spec: ModelSpec) -> tuple[Decoder, Callable[[], dict[str, Tensor]]]:
    """The same model on one rank, and its Hugging Face tensors."""
    reference = Decoder(spec, "lm", 0, 1, solo(), torch.float32, "cpu")
    init_random(reference, 3)

    def whole() -> dict[str, Tensor]:
        tensors = {box.name: torch.empty(box.shape) for s in reference.shards.values() for box in s.boxes}
        for name, parameter in reference.named_parameters():
            for box in reference.shards[name].boxes:
                tensors[box.name][box.global_slices] = parameter.data[box.local_slices]
        return tensors

    return reference, whole


def check_weights(decoder: Decoder, whole: dict[str, Tensor]) -> None:
    for name, parameter in decoder.named_parameters():
        for box in decoder.shards[name].boxes:
            assert torch.equal(parameter.data[box.local_slices], whole[box.name][box.global_slices]), name


def transitions(
    world: World, spec: ModelSpec, name: str, layout: GenerationLayout, buffers: str, bucket_bytes: int
) -> dict[str, Any]:
    """Three times to generation and back, with an update between. Returns what a test compares."""
    model = Model(world, spec, name, layout, buffers, bucket_bytes)
    reference, expected = whole_tensors(spec)
    hybrid, twice = model.hybrid, bool(not model.hybrid.plan.locations)
    objects = {key: id(parameter) for key, parameter in model.parameters().items()}
    result: dict[str, Any] = {"address": set(), "shared": hybrid.shared is not None}
    training = model.held()  # storages: FSDP pads uneven shards
    for version in range(3):
        before = {key: local(p).clone() for key, p in model.parameters().items()}
        hybrid.to_generation(version=version)
        assert hybrid.version == version, "the generation shard says which weights it holds"
        check_weights(model.generation, expected())
        generation = size(model.generation.parameters())
        stays = sum(p.nbytes for key, p in before.items() if key not in hybrid.plan.locations)  # experts that differ, or all
        beside = 0 if buffers == "offload" else training if twice else stays
        assert model.held() == generation + beside, "parameters that are held while generating"
        assert hybrid.in_generation
        result["bytes"] = hybrid.cost.bytes_received, hybrid.cost.bytes_sent
        whole = 4 * sum(map(math.prod, hybrid.gathered.values())) if hybrid.plan.from_whole else 0
        held = whole + (generation if buffers == "keep" else 0) if whole else generation
        together = twice or (buffers == "keep" and hybrid.shared is None)
        result["address"].add(model.generation.layers[0].out.weight.data_ptr())
        if not layout.train.zero and not twice:
            for key, parameter in model.parameters().items():
                assert not parameter.untyped_storage().nbytes() or torch.equal(parameter, before[key])
        hybrid.to_training()
        assert hybrid.version == (version if buffers == "keep" else None)
        for key, parameter in model.parameters().items():
            assert id(parameter) == objects[key], "parameter objects stay: optimizers and FSDP hold them"
            assert torch.equal(local(parameter), before[key]) and local(parameter).is_contiguous(), key
        result["transient"] = hybrid.cost.peak_bytes - held - (training if together or stays else 0)  # there and back
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


def generate_in_layout(world: World, spec: ModelSpec, name: str, layout: GenerationLayout) -> float:
    """Hidden states of a generation module against the single-rank forward, in fp64; distance relative to the largest."""
    model = Model(world, spec, name, layout, bucket_bytes=10_000, dtype=torch.float64)
    whole = Decoder(spec, "lm", 0, 1, solo(), torch.float64, "cpu")
    init_random(whole, 3)
    tokens, attention = torch.arange(12) * 5 % 50, PackedAttention([7, 5], torch.device("cpu"))
    hybrid = model.hybrid
    for _ in range(2):
        hybrid.to_generation()
        with torch.no_grad():
            a, b = model.generation(tokens, attention), whole(tokens, attention)
        distance = float((a - b).abs().max() / b.abs().max())
        hybrid.to_training()
        held = 8 * sum(map(math.prod, hybrid.gathered.values()))
        held += 0 if len(hybrid.plan.locations) == len(model.parameters()) else model.held()
        assert hybrid.cost.peak_bytes <= held + hybrid.bucket_bytes, "beyond the formula is one bucket at most"
    return distance
