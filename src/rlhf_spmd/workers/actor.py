"""The actor: it generates with its training weights, scores what it generated, and learns. One copy of the weights does all three."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_spmd.controller import MICRO_DP, THREE_D, GroupShape, ResourcePool, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.parallel.mesh import build_group, build_mesh
from rlhf_spmd.reshard.execute import HybridEngine
from rlhf_spmd.reshard.plan import gather_ranks
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import Build, ModelWorker, Totals, field_on, response_log_probs

PolicyObjective = Callable[[dict[str, Tensor], Tensor, Totals], tuple[Tensor, dict[str, Tensor]]]


class ActorWorker(ModelWorker):
    trained = True

    def __init__(
        self,
        build: Build,
        name: str,
        pool: ResourcePool,
        shape: GroupShape,
        config: RoleConfig,
        spec: ModelSpec | None,
    ) -> None:
        super().__init__(build, name, pool, shape, config, spec)
        layout = shape.generation or GenerationLayout(shape.layout, shape.layout.pp, shape.layout.tp)
        self.generation_mesh = build_mesh(build.world, pool.ranks, layout)
        gather = build_group(build.world, pool.ranks, lambda index: gather_ranks(layout, index), "gather")
        if self.member:
            self._build_generator(gather)

    def _build_generator(self, gather: Group) -> None:
        mesh, spec, layout = self.generation_mesh, self.spec, self.generation_mesh.layout
        assert spec is not None
        # fused matrices keep one block per training rank, so that each training parameter is one slice of them
        blocks = self.mesh.layout.tp // layout.tp
        decoder = Decoder(spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, self.engine.dtype, torch.device("meta"), blocks=blocks)
        decoder.requires_grad_(False)
        self.hybrid = HybridEngine(
            self.engine.param_shards(),
            lambda: dict(self.engine.decoder.named_parameters()),
            decoder,
            decoder.shards,
            gather,
        )
        self.generator = Generator(decoder, mesh, self.config.generation, spec.eos_token_ids)

    @register(MICRO_DP, inputs=("prompt_ids",), outputs=("response_ids", "rollout_log_probs"), lengths_of="response_ids")
    def generate_sequences(self, batch: Batch, sampling: SamplingConfig, number: int) -> tuple[Batch, dict[str, float]]:
        """``response_ids``: ragged int64, stop token included; ``rollout_log_probs``: ragged, at the sampling temperature.

        ``number`` is the step, one of the things (with seed, row id and position) that a sample depends on.
        Collective over the pool: every rank of it must call, in program order.
        """
        with self.controller.timeline.span("actor.to_generation", category="reshard"):
            self.hybrid.to_generation()
        assert sampling.max_response_length is not None
        prompts = batch["prompt_ids"].rows() if len(batch) else []
        requests = [
            Request(int(row), int(group), ids.tolist(), sampling.max_response_length)
            for row, group, ids in zip(batch.row_ids, batch.group_ids, prompts, strict=True)
        ]
        completions = self.generator.generate(requests, sampling, sampling.seed, number, self.controller.tick)
        with self.controller.timeline.span("actor.to_training", category="reshard"):
            self.hybrid.to_training()
        stats = self.generator.stats
        report = {"reshard/bytes": float(self.hybrid.bytes_received), "generation/steps": float(stats.steps)}
        report |= {"generation/prefix_hit_tokens": float(stats.hit_tokens), "generation/preemptions": float(stats.preemptions)}
        if not completions:
            return batch, report
        responses = ragged([c.token_ids for c in completions], torch.int64)
        log_probs = ragged([c.log_probs for c in completions])
        return batch.with_fields(response_ids=responses, rollout_log_probs=log_probs), report

    @register(
        THREE_D, inputs=("prompt_ids", "response_ids", "rollout_log_probs?"), outputs=("old_log_probs",), split_groups=True
    )
    def compute_log_prob(self, batch: Batch) -> tuple[Batch | None, dict[str, float]]:
        """``old_log_probs``: ragged [response tokens], from a training forward; and their distance from the generator's."""

        def head(decoder: Decoder, hidden: Tensor, micro: Packed) -> Tensor:
            return response_log_probs(decoder, hidden, micro, self.build.temperature)[0]

        result = self.infer(batch, head)
        report = {}
        if result is not None and "rollout_log_probs" in batch:
            difference = (result.values - batch["rollout_log_probs"].values).abs()
            report = {
                "rollout/log_prob_diff_max": float(difference.max()),
                "rollout/log_prob_diff_mean": float(difference.mean()),
            }
        return (batch.with_fields(old_log_probs=result) if result is not None else None), report

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "old_log_probs", "advantages", "ref_log_prob?"),
        split_groups=True,
        mini_batches=lambda self: self.build.num_mini_batches,
    )
    def update_actor(self, batches: list[Batch], objective: PolicyObjective, epochs: int) -> dict[str, float]:
        """One optimizer step for each mini-batch and epoch; returns the mean statistics over them."""

        def loss(decoder: Decoder, hidden: Tensor, micro: Packed, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = response_log_probs(decoder, hidden, micro, self.build.temperature, entropy=True)
            assert entropy is not None
            fields = {"log_probs": log_probs, "entropy": entropy}
            for name in ("old_log_probs", "advantages", "ref_log_prob"):
                if name in micro.extra:
                    fields[name] = field_on(micro, name, hidden.device)
            return objective(fields, micro.extra["response_ids"].lengths, totals)

        reports = [self.train(batch, loss) for _ in range(epochs) for batch in batches]
        return self.summarise(reports, first=("actor/ppo_kl",))
