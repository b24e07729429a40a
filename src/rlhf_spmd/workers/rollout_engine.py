"""A role that generates: its weights in the generation layout, and the generator that runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.pipeline_channels import connect_ways
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.reshard import HybridWeights, choose_method
from rlhf_spmd.workers.adapters import merge_adapters, merged_names
from rlhf_spmd.workers.engine import rank_shards
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.weight_sync import AsyncWeightSync


class RolloutEngine:
    """``hybrid``: the weights of ``worker`` on this rank, a member of its pool, in the layout that it generates in; ``generator``.
    ``merged``: what ``hybrid`` takes in place of the matrices that have adapters."""

    def __init__(self, worker: ModelWorker, hybrid: HybridWeights, generator: Generator, merged: dict[str, Tensor]) -> None:
        self.worker, self.hybrid, self.generator, self._merged = worker, hybrid, generator, merged

    @contextmanager
    def generation_weights(self) -> Iterator[None]:
        """Collective over the pool: every rank of it must call, in program order."""
        timeline = self.worker.controller.timeline
        with timeline.span(f"{self.worker.name}.to_generation", category="reshard"):
            merge_adapters(self.worker.engine, self._merged)
            # a graph's replay runs no hooks, and where weights and pages lie where they lay the call may begin with one
            late = self.worker.config.generation.overlap and not (self.hybrid.keep and self.generator.kept)
            self.hybrid.to_generation(not late, self.worker.version)
            self.generator.reserved_bytes = self.hybrid.pending_bytes
        yield
        with timeline.span(f"{self.worker.name}.to_training", category="reshard"):
            self.hybrid.to_training()
        if not (self.hybrid.keep and self.hybrid.shared):  # else they are the generation parameters, at fixed addresses
            self._merged.clear()

    def tick(self) -> None:
        """After each step, and on a replica that waits for others: those may be waiting for this rank's weights."""
        self.hybrid.finish()
        self.worker.controller.tick()

    def tick_together(self) -> None:
        """As :meth:`tick`, where all ranks of a replica call it equally often: weights that arrive meanwhile are received from here.

        Collective over the replica: every rank of it must call, in program order.
        """
        self.tick()
        if isinstance(self.worker.loan, AsyncWeightSync):
            self.worker.loan.poll(self.generator.mesh.replica)

    def report(self) -> dict[str, Any]:
        """Of the last call of the generator, also into the trace, where idle are waits for other stages and replicas."""
        stats, span, transition = self.generator.stats, self.worker.controller.span, self.hybrid.transition
        assert transition is not None, "no weights have been taken"
        idle = stats.seconds - stats.busy_seconds + stats.stage_seconds
        span |= {"busy_seconds": round(stats.seconds - idle, 6), "idle_seconds": round(idle, 6)}
        counts = ("steps", "prompt_tokens", "preemptions", "moved_rows", "draft_tokens", "accepted_tokens")
        return {
            "generation/seconds": stats.busy_seconds,
            "generation/seconds_max": stats.seconds,
            "generation/stage_idle_fraction": [stats.stage_seconds, stats.busy_seconds],
            "generation/prefix_hit_tokens": float(stats.hit_tokens),
            "generation/prefix_hit_rate": [stats.hit_tokens, stats.prompt_tokens],
            "generation/weights_version": float(transition.version),
            "reshard/peak_bytes": float(transition.peak_bytes),
            **{f"generation/{name}": float(getattr(stats, name)) for name in counts},
        }


def build_generating(worker: ModelWorker, tokenizer: Any) -> RolloutEngine | None:
    """None on ranks outside the pool. ``tokenizer``: of the worker's model, for stop strings.

    Collective over the pool: every rank of it must call, in program order.
    """
    build, pool, layout, spec = worker.build, worker.pool, worker.shape.generating, worker.spec
    mesh = build_mesh(build.world, pool.ranks, layout)
    # a twin generates in the layout that its weights come in, so there is nothing to choose
    name = "zero_redundancy" if build.serves else worker.config.generation.engine
    method = choose_method(name, layout)
    if not worker.member:
        return None
    # a channel of its own: the next bucket is on its way while the ranks' other groups compute
    gather = build.world.group([pool.ranks[i] for i in method.gather_ranks(layout, mesh.index)], "gather", channel="gather")
    assert spec is not None and gather is not None
    gather.connect(worker.device)
    mesh.tp.meet(worker.device)
    connect_ways(mesh, worker.device)
    dtype, blocks, ops = worker.engine.dtype, layout.blocks, worker.engine.ops
    decoder = Decoder(spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, dtype, "meta", blocks, ops=ops)
    decoder.requires_grad_(False)
    shards = partial(rank_shards, spec, "lm", worker.shape.layout)  # generation has no use for a second head
    mine = shards(worker.mesh.pp_rank, worker.mesh.tp_rank)
    merged: dict[str, Tensor] = {}
    laid, held = worker.engine.param_shards(), worker.engine.parameters()
    # of quantized matrices there are only shapes until they are merged
    absent = {name: torch.empty(laid[name].shape, dtype=dtype, device="meta") for name in mine if name not in held}
    hybrid = HybridWeights(
        shards,
        lambda: {name: tensor for name, tensor in {**held, **absent, **merged}.items() if name in mine},
        decoder,
        lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, layout.blocks),
        gather,
        method,
        layout,
        mesh.index,
        worker.config.generation.buffers,
        host_of=lambda i: pool.ranks[i] // build.world.launch.local_size,
        passing=frozenset(merged_names(worker.engine)),
    )
    config, where = worker.config.generation, f"models.{worker.name}.generation.attention"
    backend = choose_backend(config.attention, worker.engine.attention.name, worker.engine.dtype, worker.device, where)
    config = replace(config, attention=backend)
    generator = Generator(decoder, mesh, config, spec.eos_token_ids, decoding(tokenizer), build.world.launch.local_size)
    return RolloutEngine(worker, hybrid, generator, merged)
