"""The actor: it generates with its training weights, scores what it generated, and learns. One copy of the weights does all three."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.controller import MICRO_DP, THREE_D, MethodSpec, register
from rlhf_spmd.data.batch import Batch, Field, decode_json, ragged
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.episodes import Environments
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.generation.progress import Completion
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.parallel.mesh import build_group, build_mesh
from rlhf_spmd.reshard import Engine, HybridEngine, choose_engine
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import MASK, ModelWorker, Objective, Totals, drawn, model_tokens, response_log_probs
from rlhf_spmd.workers.rollouts import HeldRollouts


class ActorWorker(ModelWorker):
    trained = True
    held_seed: int | None = None  # of the draws of the rows that are in flight; None: none ever were
    companions: ClassVar[Mapping[str, str]] = {"advance_rollouts": "generate_sequences", "rollout_state": "generate_sequences"}

    def build_more(self) -> None:
        build, pool, shape = self.build, self.pool, self.shape
        self.exact_rollouts = build.exact_rollouts  # rollout_log_probs are what compute_log_prob would give, bit for bit
        if build.environment.cls is None:
            self.unused = frozenset({"row", "response_mask", "environment_reward"})
        if not build.partial_rollouts:
            self.unused |= {"rollout_versions"}
        if not self.serves("generate_sequences"):
            return
        layout = shape.generating
        self.generation_mesh = build_mesh(build.world, pool.ranks, layout)
        # a twin generates in the layout that its weights come in, so there is nothing to choose
        name = "zero_redundancy" if build.serves else self.config.generation.engine
        engine = choose_engine(name, layout, lambda i: pool.ranks[i] // build.world.launch.local_size)
        # a channel of its own: the next bucket is on its way while the ranks' other groups compute
        gather = build_group(build.world, pool.ranks, lambda i: engine.gather_ranks(layout, i), "gather", channel="gather")
        if self.member:
            self._build_generator(engine, layout, gather)

    def _build_generator(self, engine: Engine, layout: GenerationLayout, gather: Group) -> None:
        mesh, spec, meta = self.generation_mesh, self.spec, torch.device("meta")
        assert spec is not None
        decoder = Decoder(spec, "lm", mesh.pp_rank, layout.pp, mesh.tp, self.engine.dtype, meta, blocks=layout.blocks)
        decoder.requires_grad_(False)
        self.hybrid = HybridEngine(
            self.shards(spec),
            self.engine.parameters,
            decoder,
            lambda pp, tp: plan_params(spec, "lm", pp, layout.pp, tp, layout.tp, layout.blocks),
            gather,
            engine,
            layout,
            mesh.index,
            self.config.generation.buffers,
        )
        decode = decoding(self.build.tokenizer)
        generation, where = self.config.generation, "models.actor.generation.attention"
        backend = choose_backend(generation.attention, self.engine.attention, self.engine.dtype, self.device, where)
        generation = replace(generation, attention=backend)
        self.generator = Generator(decoder, mesh, generation, spec.eos_token_ids, decode)
        self.held = HeldRollouts(self.generator)

    @register(
        MICRO_DP,
        inputs=("prompt_ids", "row?", "min_response_length?", "max_response_length?"),
        outputs=("response_ids", "rollout_log_probs", "rollout_versions?", "response_mask?", "environment_reward?"),
        lengths_of="response_ids",
    )
    def generate_sequences(self, batch: Batch, sampling: SamplingConfig, number: int) -> tuple[Batch, dict[str, float]]:
        """``response_ids``: ragged int64, stop token included; ``rollout_log_probs``: ragged, at the sampling temperature.

        Where rows may cross steps, ``rollout_versions``: ragged int64, the step whose weights drew the token.
        With an environment also ``response_mask``: ragged bool, false for its tokens, whose log-probs are 0; and
        ``environment_reward`` float64 [rows].
        ``number`` is the step, one of the things (with seed, row id and position) that a sample depends on.
        Collective over the pool: every rank of it must call, in program order.
        """
        requests = _requests(batch, sampling)
        if self.held_seed == sampling.seed:  # advance_rollouts has made these rows
            completions = self.held.take([request.row_id for request in requests])
            stale = torch.cat([completion.versions for completion in completions]) < number
            report = {"rollout/stale_fraction": float(stale.double().mean())}
        else:
            with self._generating():
                environments = self._environments(batch)
                completions = self.generator.generate(requests, sampling, sampling.seed, number, self._tick, environments)
            report = self._generation_report()
        if not completions:
            return batch, report
        responses = ragged([c.token_ids for c in completions], torch.int64)
        log_probs = ragged([c.log_probs for c in completions])
        fields, told = _episodes(completions)
        if self.build.partial_rollouts:
            fields["rollout_versions"] = ragged([c.versions for c in completions])
        return batch.with_fields(response_ids=responses, rollout_log_probs=log_probs, **fields), report | told

    @register(MICRO_DP, inputs=("prompt_ids", "min_response_length?", "max_response_length?"))
    def advance_rollouts(self, batch: Batch, sampling: SamplingConfig, number: int, num_groups: int) -> dict[str, Any]:
        """Generate for these new rows and those held until this replica has ``num_groups`` whole groups: ``groups`` names those.
        ``generate_sequences`` then gives the rows of such groups at once.

        Collective over the pool: every rank of it must call, in program order.
        """
        with self._generating():
            self.held.advance(_requests(batch, sampling), sampling, number, num_groups, self._tick)
        return {"groups": self.held.whole_groups(), **self._generation_report()}

    @register(MICRO_DP)
    def rollout_state(self) -> list[tuple[int, dict[str, Any]]]:
        """What a checkpoint must know of the rows that this replica holds."""
        return self.held.state()

    def restore_rollouts(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
        worker = self.serving("generate_sequences")
        assert isinstance(worker, ActorWorker)
        if worker.member:
            worker.held.saved = dict(rows)

    def _environments(self, batch: Batch) -> Environments | None:
        if self.build.environment.cls is None or not len(batch):
            return None
        rows = dict(zip(batch.row_ids.tolist(), decode_json(batch["row"]), strict=True))
        return Environments(self.build.environment, rows, self.build.tokenizer)

    def needs_weights(self, spec: MethodSpec, args: Sequence[Any]) -> bool:
        seed = next((value.seed for value in args if isinstance(value, SamplingConfig)), None)
        if spec.name == "advance_rollouts":
            self.held_seed = seed
        # rows that are held are only handed out
        return super().needs_weights(spec, args) and not (spec.name == "generate_sequences" and self.held_seed == seed)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Collective over the pool: every rank of it must call, in program order."""
        with self.controller.timeline.span("actor.to_generation", category="reshard"):
            self.hybrid.to_generation(wait=not self.config.generation.overlap)
            self.generator.reserved_bytes = self.hybrid.pending_bytes
        yield
        with self.controller.timeline.span("actor.to_training", category="reshard"):
            self.hybrid.to_training()

    def _tick(self) -> None:
        """After each step, and on a replica that waits for others: those may be waiting for this rank's weights."""
        self.hybrid.finish()
        self.controller.tick()

    def _generation_report(self) -> dict[str, float]:
        """Of the last call of the generator, also into the trace, where idle are waits for other stages and replicas."""
        stats, span = self.generator.stats, self.controller.span
        idle = stats.seconds - stats.busy_seconds + stats.stage_seconds
        span |= {"busy_seconds": round(stats.seconds - idle, 6), "idle_seconds": round(idle, 6)}
        counts = ("steps", "prompt_tokens", "preemptions", "moved_rows", "draft_tokens", "accepted_tokens")
        return {
            "generation/seconds": stats.busy_seconds,
            "generation/seconds_max": stats.seconds,
            "generation/stage_idle_fraction": stats.stage_seconds / max(stats.busy_seconds, 1e-9),
            "generation/prefix_hit_tokens": float(stats.hit_tokens),
            "generation/prefix_hit_rate": stats.hit_tokens / max(stats.prompt_tokens, 1),
            "reshard/peak_bytes": float(self.hybrid.peak_bytes),
            **{f"generation/{name}": float(getattr(stats, name)) for name in counts},
        }

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "response_mask?", "rollout_log_probs?"),
        outputs=("old_log_probs",),
        split_groups=True,
    )
    def compute_log_prob(self, batch: Batch) -> tuple[Batch | None, dict[str, float]]:
        """``old_log_probs``: ragged [response tokens], from a training forward; and their distance from the generator's."""
        result = self.log_probs(batch, self.build.temperature)
        report = {}
        if result is not None and "rollout_log_probs" in batch:
            difference = (result.values - batch["rollout_log_probs"].values).abs()
            report = _differences(difference[batch[MASK].values] if MASK in batch else difference)
        return (batch.with_fields(old_log_probs=result) if result is not None else None), report

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "response_mask?", "old_log_probs", "advantages", "ref_log_prob?"),
        split_groups=True,
        mini_batches=lambda self: self.build.num_mini_batches,
    )
    def update_actor(self, batches: list[Batch], objective: Objective, epochs: int) -> dict[str, float]:
        """One optimizer step for each mini-batch and epoch; returns the mean statistics over them."""

        def loss(decoder: Decoder, hidden: Tensor, micro: Packed, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = response_log_probs(decoder, hidden, micro, self.build.temperature, entropy=True)
            assert entropy is not None
            fields = {"log_probs": log_probs, "entropy": entropy}
            for name in ("old_log_probs", "advantages", "ref_log_prob"):
                if name in micro.extra:
                    fields[name] = drawn(micro.extra, name).to(hidden.device)
            if not reports:
                differences.append((log_probs.detach() - fields["old_log_probs"]).abs())
            return objective(fields, model_tokens(micro.extra), totals)

        reports: list[dict[str, float]] = []
        differences: list[Tensor] = []  # before the first update, from the log-probs of the same weights
        for batch in batches * epochs:
            reports.append(self.train(batch, loss))
        report = self.summarise(reports, first=("actor/ppo_kl",))
        if self.exact_rollouts and differences:
            report |= _differences(torch.cat(differences))
        return report


def _differences(difference: Tensor) -> dict[str, float]:
    """Of generation's log-probs from training's."""
    return {"rollout/log_prob_diff_max": float(difference.max()), "rollout/log_prob_diff_mean": float(difference.mean())}


def _episodes(completions: Sequence[Completion]) -> tuple[dict[str, Field], dict[str, float]]:
    """Fields and metrics of rows that environments have extended; empty without."""
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    if not episodes:
        return {}, {}
    mask = ragged([episode.mask for episode in episodes], torch.bool)
    rewards = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
    report = {
        "rollout/num_turns_mean": sum(episode.num_turns for episode in episodes) / len(episodes),
        "rollout/environment_tokens_mean": float((~mask.values).sum()) / len(episodes),
        "rollout/environment_reward_mean": float(rewards.mean()),
    }
    return {MASK: mask, "environment_reward": rewards}, report


def _requests(batch: Batch, sampling: SamplingConfig) -> list[Request]:
    """A row's own limits count up to the common one; 0: it has none."""
    limit = sampling.max_response_length
    assert limit is not None
    columns = [batch.row_ids, batch.group_ids]
    for name in ("max_response_length", "min_response_length"):
        columns.append(batch[name] if name in batch else torch.zeros(len(batch), dtype=torch.int64))
    prompts = batch["prompt_ids"].rows() if len(batch) else []
    return [
        Request(row, group, ids.tolist(), min(most or limit, limit), least)
        for row, group, most, least, ids in zip(*(column.tolist() for column in columns), prompts, strict=True)
    ]
