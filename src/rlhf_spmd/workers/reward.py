"""Rewards of whole responses: a Python function, a reward model, or the weighted sum of both."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.controller import THREE_D, Production, register
from rlhf_spmd.data.batch import Batch, decode_json
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.rewards.binding import Row
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.rewards.runner import RewardRunner, check_failures
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import last_token_value, model_tokens


class RewardWorker(ModelWorker):
    """A named reward, ``build.rewards[name]``, which reports under its name. The first of them also reports what is the same for
    all (lengths, samples) and adds the environment's reward.

    With a model its layout is the model's; without one every rank of the pool scores some rows.
    """

    head = "value"

    def build_more(self) -> None:
        self.reward = self.build.rewards[self.name]
        self.first = self.name == next(iter(self.build.rewards))
        one_for_each_replica = self.member and self.mesh.last_stage and self.mesh.tp_rank == 0
        self.answers = one_for_each_replica and self.serves("compute_reward")
        self.called = False  # the function, by any rank
        self.told = False  # of the first call that failed
        scores_text = self.answers and self.reward.function is not None
        self.runner = RewardRunner(self.reward, reward_key(self.name)) if scores_text else None

    def enter(self, call: Production) -> None:
        super().enter(call)
        rows = call.rows if self.first else None
        self.shown = frozenset() if rows is None else frozenset(rows.row_ids[: self.build.num_samples].tolist())

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "row", "response_mask?", "environment_reward?", "rollout_versions?"),
        outputs=("scores",),
    )
    def compute_reward(self, batch: Batch) -> tuple[Batch | None, dict[str, Any]]:
        """``scores`` [rows]: weight * function + model_weight * model, 0 for rows that this reward does not score; of the first
        reward + environment.weight * environment's reward. Statistics of the global batch's scored rows, and as samples the texts
        of the call's first rows.

        Raises RewardError if more calls failed than ``max_failure_rate`` allows, or all in the first step.
        Collective over the pool: every rank of it must call, in program order.
        """
        # sums of weighted scores: at least float32, also for a model in bfloat16
        dtype = torch.promote_types(self.config.torch_dtype(torch.device("cpu")), torch.float32)
        scores = torch.zeros(len(batch), dtype=dtype)
        if self.spec is not None:
            by_model = self.infer(batch, last_token_value, torch.ones(len(batch), dtype=torch.int64))
            scores += self.reward.model_weight * by_model.values.cpu() if by_model is not None else 0.0
        report, texts, scored = self._score_text(batch, scores)
        if self.first and "environment_reward" in batch:
            scores += self.build.environment.weight * batch["environment_reward"]
            scored = torch.ones_like(scored)
        report |= self._statistics(batch, scores[scored], report)
        report |= {"score_sum": float(scores[scored].double().sum()), "rows": int(scored.sum())}
        report["samples"] = [
            self._sample(batch, i, texts[i], scores) for i in range(len(texts)) if int(batch.row_ids[i]) in self.shown
        ]
        return (batch.with_fields(scores=scores) if self.mesh.last_stage and len(batch) else None), report

    def _sample(self, batch: Batch, i: int, text: Row, scores: Tensor) -> dict[str, Any]:
        """The i-th row for people to read."""
        sample = {"row_id": int(batch.row_ids[i]), "prompt": text[0], "response": text[1], "score": float(scores[i])}
        if "rollout_versions" in batch:
            versions = batch["rollout_versions"].rows()[i]
            if versions.min() < versions.max():
                sample |= {"version_min": int(versions.min()), "version_max": int(versions.max())}
        return sample

    def _statistics(self, batch: Batch, scores: Tensor, report: dict[str, Any]) -> dict[str, float]:
        """Of the global batch, summed in float64; ``scores`` of the rows that are scored.

        Raises RewardError on every rank of the pool if too many calls failed.
        Collective over the pool: every rank of it must call, in program order.
        """
        sums = torch.zeros(8, dtype=torch.float64)
        largest = torch.full((5,), -torch.inf, dtype=torch.float64)
        if self.answers and len(batch):
            x, lengths = scores.double(), model_tokens(batch).double()
            counts = [report["calls"], report["failures"], report["timeouts"], len(batch), len(x)]
            sums = torch.cat([torch.tensor(counts).double(), torch.stack([lengths.sum(), x.sum(), x.square().sum()])])
            largest[:2] = torch.stack([lengths.max(), -lengths.min()])
            if len(x):
                largest[2:4] = torch.stack([x.max(), -x.min()])
            if report["first_error"]:
                largest[4] = -self.mesh.pool.rank
        calls, failures, timeouts, rows, scored, tokens, score, squares = self.mesh.pool.all_reduce(sums, "control").tolist()
        longest, shortest, highest, lowest, first = self.mesh.pool.all_reduce(largest, "control", "max").tolist()
        if failures + timeouts:
            self._judge_failures(int(failures + timeouts), int(calls), int(-first), report["first_error"])
        self.called = self.called or calls > 0
        found = {"failures": failures, "timeouts": timeouts}
        if scored:
            mean = score / scored
            found |= {"mean": mean, "std": max(squares / scored - mean**2, 0.0) ** 0.5, "max": highest, "min": -lowest}
        found = {f"{self.name}/{key}": value for key, value in found.items()}
        if self.first and rows:
            lengths_of_all = {"mean": tokens / rows, "max": longest, "min": -shortest}
            found |= {f"response_length/{key}": value for key, value in lengths_of_all.items()}
        return found

    def _judge_failures(self, failed: int, calls: int, source: int, error: str | None) -> None:
        """End the run, or tell once. ``source``: the first rank of the pool with an ``error``.

        Collective over the pool: every rank of it must call, in program order.
        """
        said = self.mesh.pool.broadcast_bytes((error or "").encode(errors="replace"), "control", source).decode()
        where = reward_key(self.name)
        check_failures(self.reward, where, failed, calls, said, first_step=not self.called)
        if not self.told and source == self.mesh.pool.rank:
            print(
                f"{where}.function {self.reward.function!r} failed; such rows get {where}.default={self.reward.default} and count "
                f"in {self.name}/failures or {self.name}/timeouts: {said}",
                file=sys.stderr,
            )
        self.told = True

    def _score_text(self, batch: Batch, scores: Tensor) -> tuple[dict[str, Any], list[Row], Tensor]:
        """Add the function's scores to ``scores`` in place, the same on all tp ranks of the last stage; the report, and on tp 0
        (prompt, response, row) of each row, without special tokens in the response, and which rows are scored, bool [rows]."""
        report: dict[str, Any] = {"calls": 0, "failures": 0, "timeouts": 0, "first_error": None, "extras": {}}
        texts: list[Row] = []
        scored = torch.ones(len(batch), dtype=torch.bool)
        if not self.mesh.last_stage or not len(batch):
            return report, texts, scored
        if self.answers:
            ids = [response.tolist() for response in batch["response_ids"].rows()]
            rows = decode_json(batch["row"])
            texts = [(row["prompt"], text, row) for row, text in zip(rows, decode(self.build.tokenizer, ids), strict=True)]
            scored = torch.tensor([self.reward.chooses(row) for row in rows])
            scores[~scored] = 0.0
        if self.runner is not None:
            chosen = scored.nonzero()[:, 0]
            if self.runner.bound.takes_ids:
                rows = [row | {"completion_ids": response} for row, response in zip(rows, ids, strict=True)]
            result = self.runner.score([(*texts[i][:2], rows[i]) for i in chosen.tolist()])
            given = torch.tensor([torch.nan if score is None else score for score in result.scores], dtype=scores.dtype)
            scores[chosen] += self.reward.weight * given.nan_to_num(0.0)
            if self.spec is None:
                scored[chosen] = ~given.isnan()
            report |= {"calls": len(chosen), "failures": result.failures, "timeouts": result.timeouts}
            extras = {f"{self.name}/extra/{name}": sums for name, sums in result.extra_sums().items()}
            report |= {"first_error": result.first_error, "extras": extras}
        if self.reward.function is not None or self.reward.data_sources is not None:
            self.mesh.tp.broadcast(scores, 0, "batch")
        return report, texts, scored
