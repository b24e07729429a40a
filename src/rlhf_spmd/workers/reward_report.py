"""What a reward reports of its rows: statistics, failures of its function, samples for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller import CallRecord
from rlhf_spmd.data.batch import Batch, decode_json
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.rewards.results import RewardError, check_failures, merge_sums, source_metric
from rlhf_spmd.rewards.row_values import RewardRow, chat_messages, right_answer
from rlhf_spmd.telemetry.progress import say
from rlhf_spmd.telemetry.run_dir import equal_runs, pick_samples
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import MASK, num_model_tokens

# counts that each run of ``compute_reward`` returns
COUNTS = ("calls", "failures", "timeouts", "clipped", "unclosed", "answered", "no_answer", "declined")


@dataclass
class RunNote:
    """What one run of ``compute_reward`` reports, on one rank of each replica; empty on the others.

    - counts: number of rows or calls by each name of :data:`COUNTS`
    - first_error: why the first call failed, with its row; None if none failed
    - extras: metric -> (sum, count) of the numbers that the function returns beside scores
    - texts: row id -> prompt, response and row
    - extracted: row id -> the answer that the function read in the response; None if it found none
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    first_error: str | None = None
    extras: dict[str, tuple[float, int]] = field(default_factory=dict)
    texts: dict[int, RewardRow] = field(default_factory=dict)
    extracted: dict[int, str | None] = field(default_factory=dict)


class RewardReporter(ModelWorker):
    """The part of a reward that reports. The first reward also reports what all share: lengths and samples.

    - called: whether any rank has called the function
    - warned: whether a failed call has been printed
    - failing_since: the step since which all calls have failed
    - shown: ids of the rows of the current call that are samples
    - extracted: see :class:`RunNote`
    """

    called = False
    warned = False
    failing_since: int | None = None

    def build_role(self) -> None:
        self.reward = self.context.rewards[self.name]
        self.is_first = self.name == next(iter(self.context.rewards))
        is_replica_first = self.member and self.mesh.last_stage and self.mesh.tp_rank == self.mesh.cp_rank == 0
        self.is_reporter = is_replica_first and self.runs("compute_reward")

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        self.extracted: dict[int, str | None] = {}
        rows = call.rows if self.is_first else None
        shown = call.args[0] if call.args else None
        self.shown: frozenset[int] = shown or frozenset()
        if rows is not None and shown is None:
            agent = self.context.agent
            episodes = rows.row_ids // (agent.max_rows if agent.is_on else 1)
            firsts = np.unique(episodes, return_index=True)[1]  # samples are whole episodes
            picked = firsts[pick_samples(rows.group_ids[firsts].tolist(), self.context.num_samples)]
            self.shown = frozenset(rows.row_ids[np.isin(episodes, episodes[picked])].tolist())

    def report(self, batch: Batch, result: Batch | None, notes: list[RunNote]) -> dict[str, Any]:
        """Return statistics of the scored rows of the global batch, and the texts of some rows as samples.

        ``notes``: one for each run of ``compute_reward`` on a part of the batch.

        Raises RewardError as :meth:`_check_calls` does.

        Collective over the pool: every rank of it must call, in program order.
        """
        report: dict[str, Any] = {name: sum(note.counts[name] for note in notes) for name in COUNTS}
        report["first_error"] = next((note.first_error for note in notes if note.first_error), None)
        text_of = {row: text for note in notes for row, text in note.texts.items()}
        self.extracted = {row: answer for note in notes for row, answer in note.extracted.items()}
        texts = [text_of[row] for row in batch.row_ids.tolist()] if text_of else []
        scores = torch.zeros(len(batch)) if result is None else result["scores"]
        scored = ~scores.isnan()
        if self.context.agent.is_on:  # the rows of an episode have one score
            scored &= batch.row_ids % self.context.agent.max_rows == 0
        report |= self._statistics(batch, scores[scored], report)
        report["extras"] = merge_sums([*(note.extras for note in notes), *self._scores_by_source(texts, scores, scored)])
        report["samples"] = [
            self.sample(batch, i, texts[i], scores) for i in range(len(texts)) if int(batch.row_ids[i]) in self.shown
        ]
        return report

    def _statistics(self, batch: Batch, scores: Tensor, report: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's sums and extremes, which ``merge_values`` joins over ranks and calls.

        ``scores``: the scores of the scored rows. ``report``: this rank's counts and first error.

        Raises RewardError on every rank of the pool if too many calls failed.

        Collective over the pool: every rank of it must call, in program order.
        """
        pool = self.mesh.pool
        reports_rows = self.is_reporter and len(batch) > 0
        local = {name: report[name] for name in COUNTS}
        local |= {"rows": len(batch) * self.is_reporter, "scored": len(scores) * self.is_reporter}
        sums = torch.tensor([*local.values()], dtype=torch.float64)
        total = {name: int(count) for name, count in zip(local, pool.all_reduce(sums, "control").tolist(), strict=True)}
        first_rank = torch.tensor([pool.rank if reports_rows and report["first_error"] else pool.size])
        source = int(pool.all_reduce(first_rank, "control", "min"))
        self._check_calls(total, source, report["first_error"])
        metrics: dict[str, Any] = {
            "failures": [local["failures"]],
            "timeouts": [local["timeouts"]],
            "unscored": [local["rows"] - local["scored"]],
        }
        if self.reward.strip_reasoning:
            metrics["unclosed_reasoning"] = [local["unclosed"]]
        if total["answered"] or total["no_answer"]:
            metrics |= {"answered": [local["answered"]], "no_answer": [local["no_answer"]]}
        x = scores.double()
        if reports_rows and len(x):
            mean = [float(x.sum()), len(x)]
            metrics |= {"mean": mean, "std": [*mean, float(x.square().sum())], "max": float(x.max()), "min": float(x.min())}
        metrics = {f"{self.name}/{key}": value for key, value in metrics.items()}
        if reports_rows and self.is_first:
            limit = self.context.max_prompt_length
            prompts = batch["prompt_ids"].lengths
            clipped = int((prompts >= limit).sum()) if limit else 0
            parts = ("response_length", num_model_tokens(batch), local["clipped"]), ("prompt_length", prompts, clipped)
            for name, lengths, num_clipped in parts:
                metrics[f"{name}/mean"] = [float(lengths.sum()), len(batch)]
                metrics[f"{name}/max"] = float(lengths.max())
                metrics[f"{name}/min"] = float(lengths.min())
                metrics[f"{name}/clip_ratio"] = [num_clipped, len(batch)]
        return metrics

    def _scores_by_source(
        self, texts: list[RewardRow], scores: Tensor, scored: Tensor
    ) -> Iterator[dict[str, tuple[float, int]]]:
        """Yield for each scored row with a ``data_source``: the source's metric -> (score, 1)."""
        for (_, _, row), score, is_scored in zip(texts, scores.tolist(), scored.tolist(), strict=False):
            source = row.get("data_source")
            if is_scored and source is not None:
                yield {source_metric(self.name, source): (score, 1)}

    def _check_calls(self, total: dict[str, int], source: int, error: str | None) -> None:
        """Raise RewardError if too many calls failed, or if a reward that stands alone scored none of the first rows.

        ``total``: counts of the pool. ``source``: the first rank of the pool with an ``error``.

        Collective over the pool: every rank of it must call, in program order.
        """
        calls = total["calls"]
        declined = total["declined"]
        failed = total["failures"] + total["timeouts"]
        step = self.controller.timeline.step
        if failed:
            failed_before = self.failing_since is not None and self.failing_since < step
            self._report_failures(failed, calls, source, error, failed_before)
        if calls and failed < calls:
            self.failing_since = None
        elif calls and self.failing_since is None:
            self.failing_since = step
        other_rewards = set(self.context.added_rewards) - {self.name} if self.name in self.context.added_rewards else ()
        none_scored = declined and declined + failed == calls  # before the environment's reward and failures
        if none_scored and not total["scored"] and not self.called and not other_rewards:  # other rewards may score them
            count = "all" if declined == calls else str(declined)
            raise RewardError(
                f"{reward_key(self.name)}.{self.reward.scorer} returned None for {count} of the first {calls} rows"
                + ", and failed in the others" * (declined < calls)
            )
        self.called = self.called or calls > 0

    def _report_failures(self, failed: int, calls: int, source: int, error: str | None, failed_before: bool) -> None:
        """End the run, or warn once.

        ``source``: the first rank of the pool with an ``error``. ``failed_before``: all calls of the last step failed too.

        Collective over the pool: every rank of it must call, in program order.
        """
        message = self.mesh.pool.broadcast_bytes((error or "").encode(errors="replace"), "control", source).decode()
        where = reward_key(self.name)
        check_failures(self.reward, where, failed, calls, message, not self.called, failed_before)
        if not self.warned and source == self.mesh.pool.rank:
            say(
                f"{where}.{self.reward.scorer} failed; {where}.{self.reward.after_failure}, and they count in "
                f"{self.name}/failures or {self.name}/timeouts: {message}"
            )
        self.warned = True

    def sample(self, batch: Batch, i: int, text: RewardRow, scores: Tensor) -> dict[str, Any]:
        """Return the i-th row for people to read.

        - versions: runs of tokens as [step whose weights drew them, length]
        - messages: the prompt, if the data have it as a chat
        - turns: who wrote which part of the response, if the model did not write all of it
        - episode, node, parent, ending, ids, mask, log_probs: with agents, the row's place in its episode, and its tokens
        - answer: the row's right answer
        - extracted: the answer that the reward read in the response (None if it found none), if it reads answers
        """
        prompt, response, row = text
        sample = {"row_id": int(batch.row_ids[i]), "prompt": prompt, "response": response, "score": float(scores[i])}
        sample["length"] = int(batch["response_ids"].lengths[i])
        if "stopped" in batch:
            sample["finish_reason"] = "stop" if batch["stopped"][i] else "length"
        if "rollout_versions" in batch:
            versions = batch["rollout_versions"].rows()[i]
            sample["versions"] = torch.stack(torch.unique_consecutive(versions, return_counts=True), 1).tolist()
        if messages := chat_messages(row, prompt):
            sample["messages"] = messages
        if (answer := right_answer(row)) is not None:
            sample["answer"] = answer
        if sample["row_id"] in self.extracted:
            sample["extracted"] = self.extracted[sample["row_id"]]
        if MASK in batch:
            ids = batch["response_ids"].rows()[i].tolist()
            turns = equal_runs(batch[MASK].rows()[i].tolist())
            texts = decode(self.context.tokenizer, [ids[begin:end] for _, begin, end in turns])
            authors = ("model" if by_model else "environment" for by_model, *_ in turns)
            sample["turns"] = [list(turn) for turn in zip(authors, texts, strict=True)]
        if "agent_node" in batch:
            sample_row = batch.take([i])
            sample |= decode_json(sample_row["agent_node"])[0]
            sample["ids"] = [*sample_row["prompt_ids"].values.tolist(), *sample_row["response_ids"].values.tolist()]
            prompt_length = len(sample_row["prompt_ids"].values)
            sample["mask"] = [0] * prompt_length + sample_row[MASK].values.int().tolist()
            sample["log_probs"] = [0.0] * prompt_length + sample_row["rollout_log_probs"].values.tolist()
        return sample
