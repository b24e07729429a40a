"""The actor generates with its training weights, scores what it generated, and learns. One copy of the weights does all three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.agents.config import CALL_SHARE
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.controller import MICRO_DP, THREE_D, CallRecord, InputSpec, Reference, Signature, register
from rlhf_spmd.controller.reference import FieldShard
from rlhf_spmd.data.batch import Batch, Field, decode_json, encode_json, pack, ragged, unpack
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.environments.config import environment_key
from rlhf_spmd.environments.runner import EnvironmentFailure, check_failed_rows, failures_by_name
from rlhf_spmd.generation.call import FinishedGroups
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.sequence import Completion, Request
from rlhf_spmd.objectives.rollout_correction import mismatch_sums
from rlhf_spmd.telemetry.progress import say
from rlhf_spmd.workers.agent_rollouts import AgentRollouts, agent_row
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import (
    LEARNT,
    MASK,
    ROUTED_EXPERTS,
    ROW_INPUTS,
    log_prob_metrics,
    model_token_values,
    num_model_tokens,
)
from rlhf_spmd.workers.partial_rollouts import PartialRollouts
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.rollout_engine import build_rollout_engine
from rlhf_spmd.workers.router_replay import ExpertRecords

SamplingOverrides = Sequence[tuple[Reference, SamplingConfig]]  # rows, and the sampling that they use instead of the common one


class ActorWorker(ModelWorker):
    trained = True
    warned = False  # that environments or agents failed

    def build_role(self) -> None:
        context = self.context
        if not (context.environments or context.agent.is_on):
            self.ignored_inputs = frozenset({"row"})
            self.omitted_outputs = frozenset({MASK, "environment_reward", "observations"})
        records_experts = self.config.router_replay == "R3"
        if not records_experts:
            self.omitted_outputs |= {ROUTED_EXPERTS}
        if not context.agent.is_on:
            self.omitted_outputs |= {"agent_node"}
        if not (context.partial_rollouts or self.controller.versions.ahead or context.agent.is_on):
            self.omitted_outputs |= {"rollout_versions"}
        if context.max_staleness is None:
            self.omitted_outputs |= {LEARNT}
        # rows whose experts lie on several stages leave together, at the end
        self.streams_rollouts = not (records_experts and self.shape.generating.pp > 1)
        if not self.runs("generate_sequences"):
            return
        self.rollout_engine = build_rollout_engine(self, context.tokenizer)
        if self.rollout_engine is not None:
            self.generator = self.rollout_engine.generator
            self.partial_rollouts = PartialRollouts(self.generator)
            if context.agent.is_on:
                dialect = Dialect(context.tokenizer, context.encoding or EncodingConfig(), self.engine.spec.eos_token_ids)
                longest = len(dialect.first_ids) + context.max_response_length
                limit_s = CALL_SHARE * context.world.timeout_s
                self.agents = AgentRollouts(context.agent, self.generator, dialect, longest, limit_s, context.run_dir)

    def close(self) -> None:
        super().close()
        if hasattr(self, "agents"):
            self.agents.close()

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        shards = call.inputs[0].fields.get("old_log_probs", ()) if call.inputs else ()
        is_exact = bool(shards) and all(self._is_exact(shard, call.version) for shard in shards)
        self.compares_rollout_log_probs = is_exact and not self.config.lora.dropout

    def _is_exact(self, shard: FieldShard, version: int) -> bool:
        """Return True if these log-probs of a generate call equal those of a training forward with these weights, bit for bit."""
        producer = shard.producer
        if not (self.context.exact_rollouts and isinstance(producer, CallRecord) and producer.spec.kind == "generate"):
            return False
        sampling, overrides, _ = generation_args(producer)
        samplings = [sampling, *(other for rows, other in overrides if _has_rows(rows, shard.ids))]
        is_current = producer.role.name == self.name and producer.version == version
        return is_current and all(s.log_prob_temperature == self.context.temperature for s in samplings)

    @register(
        MICRO_DP,
        inputs=("prompt_ids", "row?", "min_response_length?", "max_response_length?"),
        outputs=(
            *("response_ids", "rollout_log_probs", "stopped", "rollout_versions?", f"{LEARNT}?"),
            *(f"{ROUTED_EXPERTS}?", "response_mask?", "environment_reward?", "observations?", "agent_node?"),
        ),
        kind="generate",
        lengths_of="response_ids",
        tokens=("prompt_ids",),
    )
    def generate_sequences(
        self,
        batch: Batch,
        sampling: SamplingConfig,
        global_step: int,
        num_groups: Sequence[int] | None = None,
        sampling_overrides: SamplingOverrides = (),
    ) -> tuple[Batch, dict[str, Any]]:
        """Return a response to each row, and metrics.

        - ``response_ids``: ragged int64, with the stop token
        - ``rollout_log_probs``: ragged, at the sampling temperature; greedy rows have those of temperature 1
        - ``stopped``: bool [rows], false if the response was cut at its limit
        - ``rollout_versions``: ragged int64, the step whose weights drew each token; if rows may cross steps, or generation may be
          ahead of training
        - ``learnt_tokens``, with prompts in flight and ``rollout.max_staleness``: ragged bool, false for tokens of older weights
        - ``routed_experts``, with ``router_replay=R3``: see :mod:`~rlhf_spmd.workers.router_replay`
        - with an environment, ``response_mask``: ragged bool, false for its tokens, whose log-probs are 0;
          ``environment_reward``: float64 [rows], nan where it failed; and ``observations``: ragged uint8, JSON of
          ``Completion.observations``; with agents also ``agent_node``, JSON of the row's place in its episode

        A sample depends on seed, ``global_step``, row id and position. ``sampling_overrides``: rows of each of these references use
        temperature, top_p, top_k and min_p of its sampling, in the same batch as all others. ``num_groups`` (per replica): the call
        ends when every replica has that many complete groups, and returns only their rows; the value ``groups`` names them.
        Unfinished rows continue in the next call that has them.

        Collective over the pool: every rank of it must call, in program order.
        """
        requests = _requests(batch, sampling, sampling_overrides)
        version = self.controller.versions.generating_step(self.name, global_step)
        rollout_engine = self.rollout_engine
        assert rollout_engine is not None
        with rollout_engine.generation_weights():
            num_complete = None if num_groups is None else num_groups[self.members(MICRO_DP).part_of[self.controller.rank]]
            if self.context.agent.is_on:
                completions, report = self._run_agents(batch, sampling, global_step, version, num_complete)
            elif num_complete is None:
                # with environments, a replica's first rank waits for their answers and ticks meanwhile
                environments = self._environments(batch)
                tick = rollout_engine.tick_together if environments is None else self.controller.tick
                options = environments, version, self._finished_groups(batch, requests, global_step)
                completions = self.generator.generate(requests, sampling, sampling.seed, global_step, tick, *options)
                report = {}
            else:
                completions, groups = self.partial_rollouts.advance(
                    requests, sampling, global_step, version, num_complete, rollout_engine.tick_together
                )
                report = {"groups": groups}
        if "rollout_versions" not in self.omitted_outputs:
            stale = sum(int((completion.versions < global_step).sum()) for completion in completions)
            report["rollout/stale_fraction"] = [stale, sum(len(completion.token_ids) for completion in completions)]
        report |= rollout_engine.report() | self._count_failures(batch, completions)
        if not completions:
            return Batch(batch.row_ids[:0], batch.group_ids[:0], {}) if len(batch) else batch, report
        rows = self._completed_rows(batch, completions, global_step)
        if LEARNT in rows:
            learnt = rows[LEARNT].values
            report["rollout/masked_fraction"] = [int((~learnt).sum()), len(learnt)]
        return rows, report | _episode_report(completions)

    def _run_agents(
        self, batch: Batch, sampling: SamplingConfig, global_step: int, version: int, num_groups: int | None
    ) -> tuple[list[Completion], dict[str, Any]]:
        """Return rows of the batch's episodes, and their groups, ids and metrics. Raises EnvironmentFailure if too many failed.

        ``num_groups``: of this replica that end in this call; None: all of them.

        Collective over the pool: every rank of it must call, in program order.
        """
        config = self.context.agent
        assert self.rollout_engine is not None
        columns = decode_json(batch["row"]) if len(batch) else []
        ids = zip(batch.row_ids.tolist(), batch.group_ids.tolist(), columns, strict=True)
        rows = {row: agent_row(group, values) for row, group, values in ids if row % config.max_rows == 0}
        tick = self.rollout_engine.tick_together
        ended = self.agents.run(rows, sampling, global_step, version, tick, num_groups)
        failures = [row.failure for row in ended.rows if row.failure is not None]
        sums = torch.tensor([len(failures), len(ended.episodes)])
        sums *= self.generator.mesh.replica.rank == 0  # all ranks of a replica have its rows
        num_failed, num_rows = self.mesh.pool.all_reduce(sums, "control").tolist()
        if num_failed > config.max_failure_rate * num_rows:
            limit = f"more than agent.max_failure_rate={config.max_failure_rate}"
            reasons = Counter(failures).most_common(1)
            main_reason = "".join(f"; {number} of {len(failures)} here: {reason}" for reason, number in reasons)
            raise EnvironmentFailure(f"{num_failed} of {num_rows} episodes failed, {limit}{main_reason}")
        if num_failed and not self.warned:
            self._warn_of_failures("agent", "agents/failed, agents/timeouts", failures)
        metrics = {f"agents/{name}": [number] for name, number in ended.counts.items()}
        return ended.rows, {"groups": ended.groups, "rows": [row.row_id for row in ended.rows], **metrics}

    def _completed_rows(self, batch: Batch, completions: Sequence[Completion], global_step: int) -> Batch:
        """Return the rows of ``batch`` that ``completions`` answer, at least one, with the fields of generation.

        Step ``global_step`` learns them.
        """
        fields: dict[str, Field] = {
            "response_ids": ragged([c.token_ids for c in completions], torch.int64),
            "rollout_log_probs": ragged([c.log_probs for c in completions]),
            "stopped": torch.tensor([c.finish_reason == "stop" for c in completions]),
        }
        if "rollout_versions" not in self.omitted_outputs:
            fields["rollout_versions"] = ragged([c.versions for c in completions])
        if LEARNT not in self.omitted_outputs:
            oldest = global_step - (self.context.max_staleness or 0)
            fields[LEARNT] = ragged([c.versions >= oldest for c in completions], torch.bool)
        experts = [completion.experts for completion in completions if completion.experts is not None]
        if experts:
            fields[ROUTED_EXPERTS] = ragged(experts)
        masks = [completion.mask for completion in completions if completion.mask is not None]
        if masks:
            fields[MASK] = ragged(masks, torch.bool)
            fields["environment_reward"] = torch.tensor([c.reward for c in completions], dtype=torch.float64)
            fields["observations"] = encode_json(c.observations for c in completions)
        if self.context.agent.is_on:
            fields["agent_node"] = encode_json(self.agents.nodes[c.row_id] for c in completions)
        ids = torch.tensor([c.row_id for c in completions])
        rows = batch if torch.equal(ids, batch.row_ids) else batch.reorder(ids)  # rows that leave early come as they end
        return rows.with_fields(**fields)

    def _finished_groups(self, batch: Batch, requests: Sequence[Request], global_step: int) -> FinishedGroups | None:
        rollout_streamer = self.controller.rollout_streamer
        if rollout_streamer is None or not self.streams_rollouts:
            return None

        def send(completions: Sequence[Completion]) -> None:
            rollout_streamer.send(self._completed_rows(batch, completions, global_step))

        def begin(completions: Sequence[Completion]) -> None:
            rollout_streamer.begin(self._completed_rows(batch, completions, global_step))

        return FinishedGroups(requests, rollout_streamer.num_chunks, send, begin if rollout_streamer.early else None)

    def _environments(self, batch: Batch) -> Environments | None:
        if not self.context.environments or not len(batch):
            return None
        rows = dict(zip(batch.row_ids.tolist(), decode_json(batch["row"]), strict=True))
        return Environments(self.context.environments, rows, self.context.tokenizer, self.context.encoding)

    def _count_failures(self, batch: Batch, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the metrics of rows whose environment failed, and of those that began again; {} without environments.

        Raises EnvironmentFailure if they are too many.

        Collective over the pool: every rank of it must call, in program order.
        """
        configs = self.context.environments
        if not configs:
            return {}
        failure_of_row = {completion.row_id: completion.failure for completion in completions}
        rows = decode_json(batch["row"]) if len(batch) else []
        failures = failures_by_name(configs, rows, [failure_of_row[row] for row in batch.row_ids.tolist()])
        texts_by_name = {name: [failure for failure in failures.get(name, ()) if failure is not None] for name in configs}
        counts = torch.tensor([[len(texts_by_name[name]), len(failures.get(name, ()))] for name in configs])
        counts *= self.generator.mesh.replica.rank == 0  # all ranks of a replica have its rows
        totals = self.mesh.pool.all_reduce(counts.clone(), "control").tolist()
        for (name, texts), (failed, num_rows) in zip(texts_by_name.items(), totals, strict=True):
            if texts:  # ranks where some failed end the run
                check_failed_rows(configs[name], name, failed, num_rows, texts[0])
        failing = [name for name, (failed, _) in zip(configs, totals, strict=True) if failed]
        if failing and not self.warned:
            self._warn_of_failures(environment_key(failing[0]), "rollout/environment_failures", texts_by_name[failing[0]])
        retries = sum(completion.retries for completion in completions) * (self.generator.mesh.replica.rank == 0)
        return {"rollout/environment_failures": [int(counts[:, 0].sum())], "rollout/environment_retries": [retries]}

    def _warn_of_failures(self, where: str, metric: str, failures: Sequence[str]) -> None:
        """Print the first of the ``failures`` of what the key ``where`` names, on the first rank of the pool that has some.

        Collective over the pool: every rank of it must call, in program order.
        """
        self.warned = True
        pool = self.mesh.pool
        sources = torch.tensor([pool.rank if failures else pool.size])
        if int(pool.all_reduce(sources, "control", "min")) == pool.rank:
            say(f"{where} failed; such rows are left out ({metric}): {failures[0]}")

    def rollout_state(self) -> dict[str, Tensor]:
        """Return the rows in flight on this replica as one tensor of bytes, for a checkpoint; {} except on a replica's first rank."""
        worker = self.worker_of("generate_sequences")
        assert isinstance(worker, ActorWorker)
        members = worker.members(MICRO_DP)
        index = members.part_sent_by(self.controller.rank)
        if index is None or not worker.context.partial_rollouts or worker.context.agent.is_on:
            return {}  # episodes of agents begin again
        return {f"{self.name}.{index}": pack(worker.partial_rollouts.state())}

    def restore_rollouts(self, states: Iterable[Tensor]) -> None:
        """Restore the rows that were in flight on all replicas. Each replica continues those of its next call."""
        worker = self.worker_of("generate_sequences")
        assert isinstance(worker, ActorWorker)
        if worker.member:
            worker.partial_rollouts.restore([unpack(state) for state in states])

    def _reusable_log_probs(self, batch: Reference) -> Reference | None:
        """Return the rollout's own log-probs, if they are wanted, or if a training forward would give the same bits. Else None.

        The next update then compares them with its own.
        """
        shards = batch.fields.get("rollout_log_probs", ())
        version = self.controller.versions.newest(self.name)
        if not shards or not (self.context.rollout_log_probs or all(self._is_exact(shard, version) for shard in shards)):
            return None
        return Reference(batch.rows, {"old_log_probs": shards})

    def _compare_log_probs(self, batch: Batch, result: Batch | None, notes: list[Any]) -> dict[str, Any]:
        if result is None or "rollout_log_probs" not in batch:
            return {}
        old = model_token_values(batch.union(result), "old_log_probs")
        rollout = model_token_values(batch, "rollout_log_probs")
        return log_prob_metrics((old - rollout).abs()) | mismatch_sums(old, rollout, num_model_tokens(batch))

    def _describe_log_probs(self) -> Signature:
        """Return the signature. With router replay the pass records the experts that updates take, or takes those of generation."""
        mode = self.config.router_replay
        fields = *ROW_INPUTS, "rollout_log_probs?", *(self.replayed if mode == "R3" else ())
        outputs = (ROUTED_EXPERTS,) if mode == "R2" else ()
        return Signature("compute_log_prob", (InputSpec(fields, keep_groups=False),), ("old_log_probs", *outputs))

    @register(
        THREE_D,
        describe=_describe_log_probs,
        known=_reusable_log_probs,
        streams=True,
        report=_compare_log_probs,
    )
    def compute_log_prob(self, batch: Batch) -> Batch | None:
        """Return ``old_log_probs``: ragged [response tokens], from a training forward. Reports their distance from the generator's.

        With ``router_replay=R2`` also ``routed_experts``, see :mod:`~rlhf_spmd.workers.router_replay`.

        Nothing is computed if generation with these weights is exact. Then the generator's log-probs are the result.
        """
        records = ExpertRecords(self.engine) if self.config.router_replay == "R2" else None
        result = self.log_probs(batch, self.context.temperature, records)
        chosen = {} if records is None else {ROUTED_EXPERTS: records.field(batch)}
        return None if result is None else batch.with_fields(old_log_probs=result, **chosen)

    compute_ref_log_prob = ReferenceWorker.compute_ref_log_prob  # an actor with adapters contains its reference

    @register(THREE_D, inputs=ROW_INPUTS, split_groups=True)
    def compute_loss(self, batch: Batch) -> dict[str, float]:
        """Return the sum of the negative log-likelihood over this replica's response tokens (nats), and their number."""
        log_probs = self.log_probs(batch, 1.0)
        if log_probs is None:
            return {"sum": 0.0, "tokens": 0}
        return {"sum": -float(log_probs.values.double().sum()), "tokens": int(num_model_tokens(batch).sum())}


class LikelihoodWorker(ActorWorker):
    """An actor that learns responses which it has not drawn, by their likelihood."""

    lr = 1e-5


class ActorCriticWorker(ActorWorker, CriticWorker):
    """Actor and critic in one model (APP's AC-share): one trunk with two heads, and one update of both.

    The value head starts at zero. It is in checkpoints, not in exports.
    """

    head = "both"
    lr = ActorWorker.lr
    head_lr: ClassVar[float | None] = CriticWorker.lr


def _episode_report(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return metrics of rows that environments have extended; {} without environments."""
    masks = [completion.mask for completion in completions if completion.mask is not None]
    if not masks:
        return {}
    rewards = [completion.reward for completion in completions if completion.failure is None]
    return {
        "rollout/num_turns_mean": [sum(completion.num_turns for completion in completions), len(masks)],
        "rollout/environment_tokens_mean": [sum(mask.count(False) for mask in masks), len(masks)],
        "rollout/environment_reward_mean": [sum(rewards), len(rewards)],
    }


class GenerationArgs(NamedTuple):
    """Arguments of a call of :meth:`ActorWorker.generate_sequences`."""

    sampling: SamplingConfig
    sampling_overrides: SamplingOverrides
    num_groups: Sequence[int] | None


def generation_args(call: CallRecord) -> GenerationArgs:
    """Return arguments of a call of :meth:`ActorWorker.generate_sequences`.

    A record has its arguments without names, so they are told apart by type. ``num_groups`` is a sequence of integers.
    """
    sampling = next(value for value in call.args if isinstance(value, SamplingConfig))
    sequences = [value for value in call.args if isinstance(value, (list, tuple)) and value]
    overrides = next((value for value in sequences if isinstance(value[0], tuple)), ())
    return GenerationArgs(sampling, overrides, next((value for value in sequences if isinstance(value[0], int)), None))


def _has_rows(rows: Reference, row_ids: np.ndarray) -> bool:
    """Return True if some of ``row_ids`` are among the rows of a reference."""
    return rows.rows is not None and bool(np.isin(row_ids, rows.rows.row_ids).any())


def _requests(batch: Batch, sampling: SamplingConfig, sampling_overrides: SamplingOverrides = ()) -> list[Request]:
    """Return one request per row. A row's own limit counts only below the common limit; 0 means that it has none."""
    limit = sampling.max_response_length
    assert limit is not None
    overrides = {
        row: settings.overrides
        for rows, settings in sampling_overrides
        if rows.rows is not None
        for row in rows.rows.row_ids.tolist()
    }
    columns = [batch.row_ids, batch.group_ids]
    for name in ("max_response_length", "min_response_length"):
        columns.append(batch[name] if name in batch else torch.zeros(len(batch), dtype=torch.int64))
    prompts = batch["prompt_ids"].rows() if len(batch) else []
    return [
        Request(row, group, ids.tolist(), min(max_new_tokens or limit, limit), min_new_tokens, overrides.get(row))
        for row, group, max_new_tokens, min_new_tokens, ids in zip(
            *(column.tolist() for column in columns), prompts, strict=True
        )
    ]
