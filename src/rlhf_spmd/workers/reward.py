"""Rewards of whole responses: a Python function, a reward model, or the weighted sum of both."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch, decode_json
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import values
from rlhf_spmd.rewards.runner import RewardRunner, check_failure_rate
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import ModelWorker, model_tokens


class RewardWorker(ModelWorker):
    """With a model its layout is the model's; without one every rank of the pool scores some rows."""

    head = "value"
    model_of = None

    def build_more(self) -> None:
        self.reward = self.build.reward
        one_for_each_replica = self.member and self.mesh.last_stage and self.mesh.tp_rank == 0
        self.answers = one_for_each_replica and self.serves("compute_reward")
        self.told = False  # of the first call that failed
        self.runner = RewardRunner(self.reward) if self.answers and self.reward.function is not None else None

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "row", "response_mask?", "environment_reward?", "rollout_versions?"),
        outputs=("scores",),
    )
    def compute_reward(self, batch: Batch) -> tuple[Batch | None, dict[str, Any]]:
        """``scores`` [rows]: weight * function + model_weight * model + environment.weight * environment's reward;
        statistics of the global batch, and as samples the texts of this replica's first rows.

        Raises RewardError if more calls failed than ``reward.max_failure_rate`` allows.
        Collective over the pool: every rank of it must call, in program order.
        """
        # sums of weighted scores: at least float32, also for a model in bfloat16
        dtype = torch.promote_types(self.config.torch_dtype(torch.device("cpu")), torch.float32)
        scores = torch.zeros(len(batch), dtype=dtype)
        if self.spec is not None:
            by_model = self.infer(batch, last_token_value, torch.ones(len(batch), dtype=torch.int64))
            scores += self.reward.model_weight * by_model.values.cpu() if by_model is not None else 0.0
        if "environment_reward" in batch:
            scores += self.build.environment.weight * batch["environment_reward"]
        report, texts = self._score_text(batch, scores)
        report |= self._statistics(batch, scores, report)
        report |= {"score_sum": float(scores.double().sum()), "rows": len(batch)}
        report["samples"] = [
            {"row_id": int(batch.row_ids[i]), "prompt": texts[i][0], "response": texts[i][1], "score": float(scores[i])}
            for i in range(min(self.build.num_samples, len(texts)))
        ]
        if "rollout_versions" in batch:
            for sample, versions in zip(report["samples"], batch["rollout_versions"].rows(), strict=False):
                if versions.min() < versions.max():
                    sample |= {"version_min": int(versions.min()), "version_max": int(versions.max())}
        return (batch.with_fields(scores=scores) if self.mesh.last_stage and len(batch) else None), report

    def _statistics(self, batch: Batch, scores: Tensor, report: dict[str, Any]) -> dict[str, float]:
        """Of the global batch, summed in float64. Collective over the pool: every rank of it must call, in program order.

        Raises RewardError on every rank of the pool if too many calls failed.
        """
        sums = torch.zeros(7, dtype=torch.float64)
        largest = torch.full((5,), -torch.inf, dtype=torch.float64)
        if self.answers and len(batch):
            counts = [report["calls"], report["failures"], report["timeouts"], len(batch)]
            x, lengths = scores.double(), model_tokens(batch).double()
            sums = torch.cat([torch.tensor(counts).double(), torch.stack([lengths.sum(), x.sum(), x.square().sum()])])
            failing = torch.tensor(-self.mesh.pool.rank if report["first_error"] else -torch.inf, dtype=torch.float64)
            largest = torch.stack([x.max(), -x.min(), lengths.max(), -lengths.min(), failing])
        calls, failures, timeouts, rows, tokens, score, squares = self.mesh.pool.all_reduce(sums, "control").tolist()
        highest, lowest, longest, shortest, first = self.mesh.pool.all_reduce(largest, "control", "max").tolist()
        check_failure_rate(self.reward, int(failures + timeouts), int(calls), report["first_error"])
        if not self.told and -first == self.mesh.pool.rank:
            print(
                f"reward.function {self.reward.function!r} failed; such rows get reward.default={self.reward.default} and count in "
                f"reward/failures or reward/timeouts: {report['first_error']}",
                file=sys.stderr,
            )
        self.told = self.told or failures + timeouts > 0
        return {
            "reward/mean": score / rows,
            "reward/std": max(squares / rows - (score / rows) ** 2, 0.0) ** 0.5,
            "reward/max": highest,
            "reward/min": -lowest,
            "reward/failures": failures,
            "reward/timeouts": timeouts,
            "response_length/mean": tokens / rows,
            "response_length/max": longest,
            "response_length/min": -shortest,
        }

    def _score_text(self, batch: Batch, scores: Tensor) -> tuple[dict[str, Any], list[tuple[str, str, dict[str, Any]]]]:
        """Add the function's scores to ``scores`` in place, the same on all tp ranks of the last stage; the report, and on tp 0
        (prompt, response, row) of each row, without special tokens in the response."""
        report: dict[str, Any] = {"calls": 0, "failures": 0, "timeouts": 0, "first_error": None, "extras": {}}
        texts: list[tuple[str, str, dict[str, Any]]] = []
        if not self.mesh.last_stage or not len(batch):
            return report, texts
        if self.answers:
            responses = decode(self.build.tokenizer, [ids.tolist() for ids in batch["response_ids"].rows()])
            rows = decode_json(batch["row"])
            texts = [(row["prompt"], response, row) for row, response in zip(rows, responses, strict=True)]
        if self.runner is not None:
            result = self.runner.score(texts)
            scores += self.reward.weight * torch.tensor(result.scores, dtype=scores.dtype)
            report |= {"calls": result.calls, "failures": result.failures, "timeouts": result.timeouts}
            report |= {"first_error": result.first_error, "extras": result.extra_sums()}
        if self.reward.function is not None:
            self.mesh.tp.broadcast(scores, 0, "batch")
        return report, texts


def last_token_value(decoder: Decoder, hidden: Tensor, micro: Packed) -> Tensor:
    """The value head on each row's last token, [rows]."""
    ends = (micro.lengths.cumsum(0) - 1).to(hidden.device)
    return values(decoder, hidden[ends])
