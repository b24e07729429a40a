"""Rewards of whole responses: a Python function, a reward model, the weighted sum of both, or a judge, which writes verdicts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.controller import THREE_D, CallRecord, register
from rlhf_spmd.data.batch import Batch, decode_json
from rlhf_spmd.data.reasoning import strip_reasoning
from rlhf_spmd.data.tokenizer import decode
from rlhf_spmd.environments.config import ChatMessage, environment_of
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.multi_turn import turn_messages
from rlhf_spmd.generation.sequence import Request
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.rewards.eval_metrics import answer_code
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.rewards.row_values import TURNS, RewardRow
from rlhf_spmd.rewards.runner import RewardRunner
from rlhf_spmd.workers.objective import MASK, last_token_value
from rlhf_spmd.workers.retokenize import Retokenizer, build_retokenizer
from rlhf_spmd.workers.reward_report import RewardReporter, RunNote
from rlhf_spmd.workers.rollout_engine import build_rollout_engine


@dataclass
class TextScores:
    """Scores of a batch by its texts.

    - scores [rows]: nan for rows that are not scored
    - failed bool [rows]: rows whose call failed, or that the model cannot read
    - codes float64 [rows]: field ``answer_codes`` of :meth:`RewardWorker.compute_reward`
    - note: what is reported of these rows
    """

    scores: Tensor
    failed: Tensor
    codes: Tensor
    note: RunNote = field(default_factory=RunNote)


class RewardWorker(RewardReporter):
    """A named reward, ``context.rewards[name]``, which reports under its name.

    The first reward also adds the environment's reward. With a model the layout is the model's; without one, every rank of the pool
    scores some rows.
    """

    head = "value"

    def build_role(self) -> None:
        super().build_role()
        if not self.context.agent.is_on:
            self.ignored_inputs |= {"rollout_log_probs"}
        scores_text = self.is_reporter and self.reward.function is not None
        self.runner = RewardRunner(self.reward, reward_key(self.name)) if scores_text else None
        by_rule = self.spec is None and self.reward.function is not None
        self.can_score_parts = by_rule and (self.reward.by_group or not self.reward.bind(reward_key(self.name)).batched)
        self.retokenizer: Retokenizer | None = None
        if self.member and self.spec is not None and self.context.tokenizer is not None:
            assert self.config.path is not None
            limits = self.max_row_tokens(self.spec.max_position_embeddings), self.spec.vocab_size
            self.retokenizer = build_retokenizer(
                self.reward, self.config.path, self.context.tokenizer, *limits, reward_key(self.name), self.context.encoding
            )

    def max_row_tokens(self, context: int) -> int:
        """Return the most tokens of a row that the model can read. ``context``: the most that its positions allow."""
        limits = self.context.limits
        return context if limits.rows is not None else min(context, limits.max_tokens * self.mesh.cp.size)

    def starts_early(self, method: str) -> bool:
        """Return True if calls of ``method`` can start with some of the rows."""
        return method == "compute_reward" and self.can_score_parts

    def start_early(self, rows: Batch, num_ranks: int) -> None:
        assert self.runner is not None, "rows were started on a rank that scores none"
        self.runner.grow(num_ranks * self.reward.num_workers)
        self.runner.begin(*self._call_inputs(rows, *self._texts(rows)))

    def continue_early(self) -> None:
        assert self.runner is not None
        self.runner.advance()

    def drop_early(self) -> None:
        assert self.runner is not None
        self.runner.abandon()

    @register(
        THREE_D,
        inputs=(
            *("prompt_ids", "response_ids", "row", "stopped?"),
            *("response_mask?", "environment_reward?", "observations?", "rollout_versions?"),
            *("agent_node?", "rollout_log_probs?"),
        ),
        outputs=("scores", "failed", "answer_codes"),
        streams=True,
        report=RewardReporter.report,
    )
    def compute_reward(self, batch: Batch, shown: frozenset[int] | None = None) -> tuple[Batch | None, RunNote]:
        """Return the score of each row.

        - ``scores`` [rows]: weight * function + model_weight * model; nan for rows that this reward does not score. The first reward
          adds weight * reward of the row's environment.
        - ``failed`` bool [rows]: a call or the environment failed, so the row has no score, whatever other rewards say.
        - ``answer_codes`` float64 [rows]: equal for responses in which the function read equal answers, -1 if it read none, nan if it
          reads no answers.

        ``shown``: ids of the rows that the first reward reports as samples; None: some of every step. Raises RewardError for a score
        beyond float32.

        Collective over the pool: every rank of it must call, in program order.
        """
        # weighted scores are summed at least in float32, also for a model in bfloat16
        dtype = torch.promote_types(self.config.torch_dtype(torch.device("cpu")), torch.float32)
        scores = torch.zeros(len(batch), dtype=dtype)
        failed = torch.zeros(len(batch), dtype=torch.bool)
        unreadable_rows: dict[int, str] = {}
        if self.spec is not None:
            by_model, unreadable_rows = self.score_by_model(batch)
            if by_model is not None:
                failed[list(unreadable_rows)] = True
                values = by_model.to(dtype)
                values[failed] = self.reward.default or 0.0
                scores += self.reward.model_weight * values
        result = self._score_text(batch, scores, failed, unreadable_rows)
        failed = result.failed & (self.reward.default is None)
        scores, failed = self._add_environment_rewards(batch, result.scores, failed)
        scores[failed] = torch.nan
        self._check_range(batch, scores)
        rows = batch.with_fields(scores=scores, failed=failed, answer_codes=result.codes)
        return (rows if self.mesh.last_stage and len(batch) else None), result.note

    def _add_environment_rewards(self, batch: Batch, scores: Tensor, failed: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and failures [rows] with those of the rows' environments; the first reward adds them."""
        if not self.is_first or "environment_reward" not in batch:
            return scores, failed
        configs = self.context.environments
        names = [environment_of(configs, row) for row in decode_json(batch["row"])]
        absent = 1.0 if self.context.agent.is_on else torch.nan  # the agent's reward has no weight
        weights = torch.tensor([absent if name is None else configs[name].weight for name in names], dtype=torch.float64)
        rewards = weights * batch["environment_reward"]
        sums = (scores.masked_fill(scores.isnan(), 0.0) + rewards).to(scores.dtype)
        return scores.where(rewards.isnan(), sums), failed | (rewards.isnan() & ~weights.isnan())

    def _check_range(self, batch: Batch, scores: Tensor) -> None:
        """Raise RewardError for a score beyond float32."""
        out_of_range = (scores.abs() > torch.finfo(torch.float32).max).nonzero()
        if len(out_of_range):
            row = decode_json(batch["row"])[int(out_of_range[0])].get("id")
            raise RewardError(
                f"{reward_key(self.name)}: the score of row {row} is beyond float32; lower the weights, or what the function returns"
            )

    def score_by_model(self, batch: Batch) -> tuple[Tensor | None, dict[int, str]]:
        """Return the model's value of each row [rows], and position of a row -> why the model cannot read it.

        There are no values except on the last stage, and none without rows.

        Collective over the pool: every rank of it must call, in program order.
        """
        rows, unreadable_rows = (batch, {}) if self.retokenizer is None else self.retokenizer(batch)
        scores = self.infer(rows, last_token_value, torch.ones(len(batch), dtype=torch.int64))
        return (None if scores is None else scores.values.cpu()), unreadable_rows

    def _texts(self, batch: Batch) -> tuple[list[RewardRow], Tensor]:
        """Return (prompt, response without special tokens, row) of each row, and which rows are scored, bool [rows]."""
        ids = [response.tolist() for response in batch["response_ids"].rows()]
        rows = decode_json(batch["row"])
        texts = [(row["prompt"], text, row) for row, text in zip(rows, decode(self.context.tokenizer, ids), strict=True)]
        return texts, torch.tensor([self.reward.applies_to(row) for row in rows])

    def _answers(self, batch: Batch) -> list[str | None]:
        """Return what follows the reasoning in each response; None if it is not closed."""
        ids = zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)
        tags = self.reward.reasoning_tags
        return [strip_reasoning(self.context.tokenizer, prompt.tolist(), response.tolist(), tags) for prompt, response in ids]

    def _turns(self, batch: Batch) -> list[list[ChatMessage]]:
        """Return each response of a batch with environments as messages."""
        names = "prompt_ids", "response_ids", MASK
        prompts, responses, masks = ([row.tolist() for row in batch[name].rows()] for name in names)
        tags = self.reward.reasoning_tags if self.reward.strip_reasoning else None
        rows = zip(prompts, responses, masks, decode_json(batch["observations"]), strict=True)
        return [turn_messages(self.context.tokenizer, *row, tags) for row in rows]

    def _call_inputs(
        self, batch: Batch, texts: list[RewardRow], scored: Tensor
    ) -> tuple[list[int], list[RewardRow], list[int]]:
        """Return the runner's arguments for the scored rows: their ids, the rows, their groups."""
        assert self.runner is not None
        positions = scored.nonzero()[:, 0]
        if self.reward.strip_reasoning:
            answers = zip(texts, self._answers(batch), strict=True)
            texts = [(prompt, answer or "", row) for (prompt, _, row), answer in answers]
        if "observations" in batch:
            pairs = zip(texts, self._turns(batch), strict=True)
            texts = [(prompt, text, row | {TURNS: messages}) for (prompt, text, row), messages in pairs]
        rows = [texts[i] for i in positions.tolist()]
        if self.runner.bound.takes_ids:
            ids = batch["response_ids"].rows()
            indexed = zip(rows, positions.tolist(), strict=True)
            rows = [(prompt, text, row | {"completion_ids": ids[i].tolist()}) for (prompt, text, row), i in indexed]
        return batch.row_ids[positions].tolist(), rows, batch.group_ids[positions].tolist()

    def _score_text(self, batch: Batch, model_scores: Tensor, failed: Tensor, unreadable_rows: dict[int, str]) -> TextScores:
        """Return ``model_scores`` [rows] with the function's scores added; the same on all ranks of the last stage.

        ``failed`` bool [rows]: rows that have failed before. ``unreadable_rows``: position of a row -> why the model cannot read it.
        """
        result = TextScores(model_scores.clone(), failed.clone(), torch.full((len(batch),), torch.nan, dtype=torch.float64))
        if not self.mesh.last_stage or not len(batch):
            return result
        if self.is_reporter:
            texts, scored = self._texts(batch)
            by_function = TextScores(torch.zeros_like(result.scores), torch.zeros_like(failed), result.codes)
            if self.runner is not None:
                by_function = self._call_function(batch, texts, scored, result.scores.dtype)
            scores = result.scores.masked_fill(~scored, torch.nan) + by_function.scores
            failed = (failed & scored) | by_function.failed
            counts = by_function.note.counts | self._count_rows(batch, texts, scored)
            counts["failures"] = int(failed.sum()) - counts["timeouts"]
            errors = [f"row {texts[i][2].get('id')}: {reason}" for i, reason in unreadable_rows.items() if scored[i]]
            first_error = next(iter(errors), by_function.note.first_error)
            text_of = dict(zip(batch.row_ids.tolist(), texts, strict=True))
            note = replace(by_function.note, counts=counts, first_error=first_error, texts=text_of)
            result = TextScores(scores, failed, by_function.codes, note)
        if self.reward.function is not None or self.reward.data_sources is not None:
            fields = torch.stack([result.scores.double(), result.failed.double(), result.codes])
            for group in (self.mesh.tp, self.mesh.cp):  # cp last: only its first rank has what tp sends
                group.broadcast(fields, 0, "batch")
            result = TextScores(fields[0].to(result.scores.dtype), fields[1] > 0, fields[2], result.note)
        return result

    def _count_rows(self, batch: Batch, texts: list[RewardRow], scored: Tensor) -> dict[str, int]:
        """Return counts that the rows themselves decide. ``scored``: see :meth:`_texts`."""
        limits = torch.tensor([row.get("max_response_length") or math.inf for _, _, row in texts])
        limits = limits.clamp(max=self.context.max_response_length or math.inf)
        counts = {"clipped": int((batch["response_ids"].lengths >= limits).sum())}
        if self.reward.strip_reasoning:
            answers = zip(self._answers(batch), scored.tolist(), strict=True)
            counts["unclosed"] = sum(is_scored and answer is None for answer, is_scored in answers)
        if self.retokenizer is not None or self.runner is not None:
            counts["calls"] = int(scored.sum())
        return counts

    def _call_function(self, batch: Batch, texts: list[RewardRow], scored: Tensor, dtype: torch.dtype) -> TextScores:
        """Return what the function says of the ``scored`` rows. Other rows get a score of 0."""
        assert self.runner is not None
        row_ids, rows, groups = self._call_inputs(batch, texts, scored)
        returned = self.runner.score(rows, groups, self.controller.tick, row_ids)
        positions = scored.nonzero()[:, 0]
        values = torch.tensor([torch.nan if score is None else score for score in returned.scores], dtype=dtype)
        scores = torch.zeros(len(batch), dtype=dtype)
        scores[positions] = self.reward.weight * (values if self.spec is None else values.nan_to_num(0.0))
        failed = torch.zeros(len(batch), dtype=torch.bool)
        failed[positions[list(returned.errors)]] = True
        codes = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        answers = returned.answers
        answer_codes = [answer_code(answer) for answer in answers.values()]
        codes[positions[list(answers)]] = torch.tensor(answer_codes, dtype=torch.float64)
        extras = {f"{self.name}/extra/{name}": sums for name, sums in returned.extra_sums().items()}
        extracted = {row_ids[i]: answer for i, answer in answers.items()}
        note = RunNote(first_error=returned.first_error, extras=extras, extracted=extracted)
        note.counts["no_answer"] = list(answers.values()).count(None)
        note.counts["answered"] = len(answers) - note.counts["no_answer"]
        note.counts["timeouts"] = returned.timeouts
        note.counts["declined"] = sum(score is None and i not in returned.errors for i, score in enumerate(returned.scores))
        return TextScores(scores, failed, codes, note)


class JudgeWorker(RewardWorker):
    """A reward whose model generates a verdict on each response; the number in it is the score (``reward.judge``).

    It generates in the role's own layout. A row fails if its verdict cannot be read or its question is too long.
    """

    head = "lm"

    def build_role(self) -> None:
        super().build_role()
        self.verdicts: dict[int, str] = {}  # row id -> verdict of the last call
        if self.runs("compute_reward"):
            self.rollout_engine = build_rollout_engine(self, None if self.retokenizer is None else self.retokenizer.tokenizer)

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        self.verdicts = {}

    def max_row_tokens(self, context: int) -> int:
        config = self.config.generation
        cached = math.inf if config.num_pages is None else config.num_pages * config.page_size + 1
        return int(min(context, cached, math.inf if config.enable_chunked_prefill else config.max_num_batched_tokens))

    def score_by_model(self, batch: Batch) -> tuple[Tensor | None, dict[int, str]]:
        assert self.reward.judge is not None and self.retokenizer is not None and self.rollout_engine is not None
        judge = self.reward.judge
        questions, unreadable_rows = self.retokenizer.read(batch) if len(batch) else ([], {})
        scored = [self.reward.applies_to(row) for row in decode_json(batch["row"])] if len(batch) else []
        positions = [i for i, is_scored in enumerate(scored) if is_scored and i not in unreadable_rows]
        ids = batch.row_ids.tolist()
        requests = [Request(ids[i], ids[i], questions[i], judge.max_response_length) for i in positions]
        sampling = SamplingConfig(temperature=judge.temperature, max_response_length=judge.max_response_length)
        with self.rollout_engine.generation_weights():
            generate = self.rollout_engine.generator.generate
            completions = generate(requests, sampling, self.context.seed, 0, self.controller.tick)
        self.rollout_engine.report()
        scores = torch.zeros(len(batch), dtype=torch.float64)
        texts = decode(self.retokenizer.tokenizer, [completion.token_ids for completion in completions])
        for i, verdict, completion in zip(positions, texts, completions, strict=True):
            self.verdicts[ids[i]] = verdict
            try:
                scores[i] = judge.score(verdict, cut=completion.finish_reason == "length")
            except ValueError as error:
                unreadable_rows[i] = str(error)
        return (scores if self.mesh.last_stage and len(batch) else None), unreadable_rows

    def sample(self, batch: Batch, i: int, text: RewardRow, scores: Tensor) -> dict[str, Any]:
        return super().sample(batch, i, text, scores) | {"verdict": self.verdicts.get(int(batch.row_ids[i]))}
