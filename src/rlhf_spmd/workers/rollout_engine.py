"""The engine that generates with a role that is trained: its weights in the generation layout, and a generator on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.pipeline_channels import connect_channels
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.lora import is_adapter
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.parallel.boxes import zero_rows
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.data_parallel import sum_in_buckets
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.reshard.reshard_methods import Method
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.rank_shards import named_by_chunk, rank_shards
from rlhf_spmd.workers.train_engine import TrainEngine
from rlhf_spmd.workers.weight_sync import AsyncWeightReplica


@dataclass(eq=False)
class RolloutEngine:
    """The generator of a role on this rank, and its weights in the generation layout (``hybrid``).

    ``merged``: matrices with their adapters added, which ``hybrid`` takes in place of the plain ones.
    """

    worker: ModelWorker
    hybrid: HybridWeights
    generator: Generator
    merged: dict[str, Tensor]

    @contextmanager
    def generation_weights(self) -> Iterator[None]:
        """Open a context in which the weights are in the generation layout.

        Collective over the pool: every rank of it must call, in program order.
        """
        timeline = self.worker.controller.timeline
        with timeline.span(f"{self.worker.name}.to_generation", category="reshard"):
            merge_adapters(self.worker.engine, self.merged)
            self.hybrid.to_generation(self.worker.weights.version)
        yield
        with timeline.span(f"{self.worker.name}.to_training", category="reshard"):
            self.hybrid.to_training()
        # else they are the generation parameters, at fixed addresses
        if not (self.hybrid.keeps_buffers and self.hybrid.shared):
            self.merged.clear()

    def tick_together(self) -> None:
        """Tick, and receive weights that arrive. All ranks of a replica must call it equally often.

        Collective over the replica: every rank of it must call, in program order.
        """
        self.worker.controller.tick()
        if isinstance(self.worker.weights, AsyncWeightReplica):
            self.worker.weights.poll(self.generator.mesh.replica)

    def report(self) -> dict[str, Any]:
        """Return metrics of the generator's last call.

        Add its busy and idle seconds (waits for other stages and replicas) to the trace.
        """
        stats = self.generator.stats
        span = self.worker.controller.span
        cost = self.hybrid.cost
        assert cost.version is not None, "no weights have been moved"
        idle = stats.seconds - stats.busy_seconds + stats.stage_seconds
        span |= {"busy_seconds": round(stats.seconds - idle, 6), "idle_seconds": round(idle, 6)}
        counts = ("steps", "prompt_tokens", "preemptions")
        return {
            "generation/seconds": stats.busy_seconds,
            "generation/seconds_max": stats.seconds,
            "generation/stage_idle_fraction": [stats.stage_seconds, stats.busy_seconds],
            "generation/prefix_hit_tokens": float(stats.hit_tokens),
            "generation/prefix_hit_rate": [stats.hit_tokens, stats.prompt_tokens],
            "generation/weights_version": float(cost.version),
            "reshard/peak_bytes": float(cost.peak_bytes),
            **{f"generation/{name}": float(getattr(stats, name)) for name in counts},
        }


def build_rollout_engine(worker: ModelWorker, tokenizer: Any) -> RolloutEngine | None:
    """Return a new rollout engine of a worker; None on ranks outside the pool.

    ``tokenizer``: the tokenizer of the worker's model, for stop strings.

    Collective over the pool: every rank of it must call, in program order.
    """
    world = worker.context.world
    mesh = build_mesh(world, worker.pool.ranks, worker.shape.generating)
    # a replica generates in the layout in which it receives its weights, so there is nothing to choose
    name = "zero_redundancy" if worker.method else worker.config.generation.reshard_method
    method = choose_method(name, worker.shape.generating)
    if not worker.member:
        return None
    # a channel of its own: its messages go from rank to rank
    gather_ranks = [worker.pool.ranks[i] for i in method.gather_ranks(worker.shape.generating, mesh.index)]
    gather = world.group(gather_ranks, "gather", channel="gather")
    assert gather is not None
    gather.connect(worker.device)
    mesh.tp.connect_nccl(worker.device)
    connect_channels(mesh, worker.device)
    decoder = _build_decoder(worker, mesh)
    merged: dict[str, Tensor] = {}
    hybrid = _build_hybrid(worker, mesh, decoder, method, gather, merged)
    return RolloutEngine(worker, hybrid, _build_generator(worker, mesh, decoder, tokenizer), merged)


def _build_decoder(worker: ModelWorker, mesh: Mesh) -> Decoder:
    """Return the decoder in the generation layout, without storage. Generation has no use for a second head."""
    engine = worker.engine
    layout = worker.shape.generating
    options: dict[str, Any] = {"ops": engine.ops, "expert_parallel_generation": layout.expert_parallel_generation}
    stage = mesh.pp_rank, layout.pp, mesh.tp
    decoder = Decoder(engine.spec, "lm", *stage, engine.dtype, "meta", layout.fused_slices, **options)
    decoder.requires_grad_(False)
    return decoder


def _build_hybrid(
    worker: ModelWorker, mesh: Mesh, decoder: Decoder, method: Method, gather: Group, merged: dict[str, Tensor]
) -> HybridWeights:
    """Return what moves the engine's weights into ``decoder`` and back. ``merged``: see :class:`RolloutEngine`."""
    engine = worker.engine
    layout = worker.shape.generating
    options: dict[str, Any] = {"expert_parallel_generation": layout.expert_parallel_generation}
    train_shards = partial(rank_shards, engine.spec, "lm", worker.shape.layout)
    rank_plan = train_shards(worker.mesh.pp_rank, worker.mesh.tp_rank)
    parameters = engine.parameters()
    # quantized matrices are only shapes until they are merged
    shapes = {name: shard.shape for name, shard in engine.param_shards().items() if name not in parameters}
    quantized = {name: torch.empty(shape, dtype=engine.dtype, device="meta") for name, shape in shapes.items()}
    local_size = worker.context.world.launch.local_size
    return HybridWeights(
        train_shards,
        lambda: {name: tensor for name, tensor in {**parameters, **quantized, **merged}.items() if name in rank_plan},
        decoder,
        lambda pp, tp: plan_params(engine.spec, "lm", pp, layout.pp, tp, layout.tp, layout.fused_slices, **options),
        gather,
        method,
        layout,
        mesh.index,
        worker.config.generation.buffers,
        host_of=lambda i: worker.pool.ranks[i] // local_size,
        temporary=frozenset(merged_names(engine)),
    )


def _build_generator(worker: ModelWorker, mesh: Mesh, decoder: Decoder, tokenizer: Any) -> Generator:
    """Return the generator, with the attention backend that suits it."""
    engine = worker.engine
    config = worker.config.generation
    where = f"models.{worker.name}.generation.attention"
    backend = choose_backend(config.attention, engine.attention.name, engine.dtype, worker.device, where)
    config = replace(config, attention=backend)
    records_experts = worker.config.router_replay == "R3"
    local_size = worker.context.world.launch.local_size
    return Generator(decoder, mesh, config, engine.spec.eos_token_ids, decoding(tokenizer), local_size, records_experts)


def merged_names(engine: TrainEngine) -> list[str]:
    """Return the names of the matrices that have adapters."""
    end = ".lora.a"
    return [f"{name.removesuffix(end)}.weight" for name in engine.parameters() if name.endswith(end)]


@torch.no_grad()
def merge_adapters(engine: TrainEngine, into: dict[str, Tensor]) -> None:
    """Store in ``into``, by name, the local shards of the matrices that have adapters, with the adapters added.

    The weights themselves do not change. On batch-invariant devices a forward pass multiplies by the same bits.

    Under ZeRO collective over dp_shard: every rank of it must call, in program order.
    """
    if engine.lora is None:
        return
    group = engine.mesh.dp_shard
    local = engine.local_tensors()
    shapes = named_by_chunk([chunk.shards for chunk in engine.chunks])
    halves = {name: local[name] for name in local if is_adapter(name)}
    if engine.zero:  # each rank's rows beside zeros: the sum is exact
        for name, rows in halves.items():
            halves[name] = rows.new_zeros(shapes[name].shape)
            halves[name][slice(*zero_rows(len(halves[name]), group.rank, group.size))] = rows
        sum_in_buckets(halves, group, "adapters")
    modules = named_by_chunk([dict(chunk.named_modules()) for chunk in engine.chunks])
    for name in merged_names(engine):
        module = name.removesuffix(".weight")
        adapter = modules[f"{module}.lora"]
        assert isinstance(adapter, Adapter)
        first, last = zero_rows(shapes[name].shape[0], group.rank, group.size) if engine.zero else (0, shapes[name].shape[0])
        rows = local[name] if adapter.base is None else adapter.base.values()[first:last]
        merged = adapter.merged(rows, halves[f"{module}.lora.a"], halves[f"{module}.lora.b"], first)
        if name in into:
            into[name].copy_(merged)
        else:
            into[name] = merged
