"""Rewards of whole responses: a Python function, a reward model, or the weighted sum of both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from rlhf_spmd.rewards.binding import TURNS, RewardRow, chat_messages, right_answer
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.rewards.eval_metrics import answer_code
from rlhf_spmd.rewards.results import RewardError, check_failures, merge_sums, source_metric
from rlhf_spmd.rewards.runner import RewardRunner
from rlhf_spmd.telemetry.progress import equal_runs, pick_samples, say
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import MASK, last_token_value, model_tokens
from rlhf_spmd.workers.retokenize import Retokenizer, build_retokenizer
from rlhf_spmd.workers.rollout_engine import build_generating

# counts that each run of the body returns
COUNTS = ("calls", "failures", "timeouts", "clipped", "unclosed", "answered", "no_answer", "declined")


@dataclass
class RunNote:
    """What a run of the body returns for the report, on one rank of each replica; empty on the others.

    - counts: number of rows or calls by each name of :data:`COUNTS`
    - first_error: why the first call failed, with its row; None if none failed
    - extras: metric -> (sum, count) of the numbers that the function returns beside scores
    - texts: row id -> prompt, response and row
    - extracted: row id -> the answer that the function read in the response; None: none
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    first_error: str | None = None
    extras: dict[str, tuple[float, int]] = field(default_factory=dict)
    texts: dict[int, RewardRow] = field(default_factory=dict)
    extracted: dict[int, str | None] = field(default_factory=dict)


@dataclass
class TextScores:
    """Scores of a batch by its texts.

    - scores [rows]: nan for rows that are not scored
    - failed bool [rows]: calls that failed
    - codes float64 [rows]: field ``answer_codes`` of :meth:`RewardWorker.compute_reward`
    """

    scores: Tensor
    failed: Tensor
    codes: Tensor
    note: RunNote = field(default_factory=RunNote)


class RewardWorker(ModelWorker):
    """A named reward, ``context.rewards[name]``, which reports under its name.

    The first reward also reports what all share (lengths, samples) and adds the environment's reward. With a model the layout is the
    model's; without one, every rank of the pool scores some rows.
    """

    head = "value"

    def build_role(self) -> None:
        self.reward = self.context.rewards[self.name]
        self.is_first = self.name == next(iter(self.context.rewards))
        is_replica_first = self.member and self.mesh.last_stage and self.mesh.tp_rank == self.mesh.cp_rank == 0
        self.is_reporter = is_replica_first and self.runs("compute_reward")
        self.called = False  # whether any rank has called the function
        self.warned = False  # of the first call that failed
        self.failing_since: int | None = None  # the step since which all calls have failed
        scores_text = self.is_reporter and self.reward.function is not None
        self.runner = RewardRunner(self.reward, reward_key(self.name)) if scores_text else None
        by_rule = self.spec is None and self.reward.function is not None
        self.by_parts = by_rule and (self.reward.by_group or not self.reward.bind(reward_key(self.name)).batched)
        self.retokenizer: Retokenizer | None = None
        if self.member and self.spec is not None and self.context.tokenizer is not None:
            assert self.config.path is not None
            longest = self.longest(self.spec.max_position_embeddings)
            self.retokenizer = build_retokenizer(
                self.reward,
                self.config.path,
                self.context.tokenizer,
                longest,
                self.spec.vocab_size,
                reward_key(self.name),
                self.context.encoding,
            )

    def longest(self, context: int) -> int:
        """Return the most tokens of a row that the model can read."""
        limits = self.context.limits
        return context if limits.rows is not None else min(context, limits.max_tokens * self.mesh.cp.size)

    def starts_early(self, method: str) -> bool:
        """Return True if calls of ``method`` can start with some of the rows."""
        return method == "compute_reward" and self.by_parts

    def start_early(self, rows: Batch, num_ranks: int) -> None:
        assert self.runner is not None, "rows were started on a rank that scores none"
        self.runner.grow(num_ranks * self.reward.num_workers)
        self.runner.begin(*self._call_inputs(rows, *self._texts(rows)))

    def continue_early(self) -> None:
        assert self.runner is not None
        self.runner.pump()

    def drop_early(self) -> None:
        assert self.runner is not None
        self.runner.drop()

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        rows = call.rows if self.is_first else None
        shown = call.args[0] if call.args else None
        self.shown: frozenset[int] = shown or frozenset()
        self.extracted: dict[int, str | None] = {}
        if rows is not None and shown is None:
            self.shown = frozenset(rows.row_ids[pick_samples(rows.group_ids.tolist(), self.context.num_samples)].tolist())

    def _report(self, batch: Batch, result: Batch | None, notes: list[RunNote]) -> dict[str, Any]:
        """Return statistics of the scored rows of the global batch, and the texts of some rows as samples. ``notes``: of each run.

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
        report |= self._statistics(batch, scores[scored], report)
        report["extras"] = merge_sums([*(note.extras for note in notes), *self._by_source(texts, scores, scored)])
        report["samples"] = [
            self.sample(batch, i, texts[i], scores) for i in range(len(texts)) if int(batch.row_ids[i]) in self.shown
        ]
        return report

    @register(
        THREE_D,
        inputs=(
            *("prompt_ids", "response_ids", "row", "stopped?"),
            *("response_mask?", "environment_reward?", "observations?", "rollout_versions?"),
        ),
        outputs=("scores", "failed", "answer_codes"),
        streams=True,
        report=_report,
    )
    def compute_reward(self, batch: Batch, shown: frozenset[int] | None = None) -> tuple[Batch | None, RunNote]:
        """Return the score of each row.

        ``scores`` [rows]: weight * function + model_weight * model; nan for rows that this reward does not score. The first reward
        adds weight * reward of the row's environment. ``failed`` bool [rows]: a call or the environment failed, so the row has no
        score, whatever other rewards say. ``answer_codes`` float64 [rows]: equal for responses in which the function read equal
        answers, -1 if it read none, nan if it reads no answers. ``shown``: ids of the rows that the first reward reports as samples;
        None: some of every step. Raises RewardError for a score beyond float32.

        Collective over the pool: every rank of it must call, in program order.
        """
        # weighted scores are summed at least in float32, also for a model in bfloat16
        dtype = torch.promote_types(self.config.torch_dtype(torch.device("cpu")), torch.float32)
        scores = torch.zeros(len(batch), dtype=dtype)
        failed, refused = torch.zeros(len(batch), dtype=torch.bool), dict[int, str]()
        if self.spec is not None:
            by_model, refused = self.score_by_model(batch)
            if by_model is not None:
                failed[list(refused)] = True
                values = by_model.to(dtype)
                values[failed] = self.reward.default or 0.0
                scores += self.reward.model_weight * values
        result = self._score_text(batch, scores, failed, refused)
        scores, failed = result.scores, result.failed & (self.reward.default is None)
        if self.is_first and "environment_reward" in batch:
            configs = self.context.environments
            names = [environment_of(configs, row) for row in decode_json(batch["row"])]
            weights = torch.tensor([torch.nan if name is None else configs[name].weight for name in names], dtype=torch.float64)
            rewards = weights * batch["environment_reward"]
            failed |= rewards.isnan() & ~weights.isnan()
            scores = scores.where(rewards.isnan(), (scores.masked_fill(scores.isnan(), 0.0) + rewards).to(dtype))
        scores[failed] = torch.nan
        if len(beyond := (scores.abs() > torch.finfo(torch.float32).max).nonzero()):
            row = decode_json(batch["row"])[int(beyond[0])].get("id")
            raise RewardError(
                f"{reward_key(self.name)}: the score of row {row} is beyond float32; lower the weights, or what the function returns"
            )
        rows = batch.with_fields(scores=scores, failed=failed, answer_codes=result.codes)
        return (rows if self.mesh.last_stage and len(batch) else None), result.note

    def score_by_model(self, batch: Batch) -> tuple[Tensor | None, dict[int, str]]:
        """Return the model's value of each row [rows], and why it cannot read some rows.

        There are no values except on the last stage, and none without rows.

        Collective over the pool: every rank of it must call, in program order.
        """
        read, refused = (batch, {}) if self.retokenizer is None else self.retokenizer(batch)
        scores = self.infer(read, last_token_value, torch.ones(len(batch), dtype=torch.int64))
        return (None if scores is None else scores.values.cpu()), refused

    def _by_source(self, texts: list[RewardRow], scores: Tensor, scored: Tensor) -> Iterator[dict[str, tuple[float, int]]]:
        """Yield for each scored row with a ``data_source``: the source's metric -> (score, 1)."""
        for (_, _, row), score, is_scored in zip(texts, scores.tolist(), scored.tolist(), strict=False):
            source = row.get("data_source")
            if is_scored and source is not None:
                yield {source_metric(self.name, source): (score, 1)}

    def sample(self, batch: Batch, i: int, text: RewardRow, scores: Tensor) -> dict[str, Any]:
        """Return the i-th row for people to read.

        ``versions``: runs of tokens as [step whose weights drew them, length]. ``messages``: the prompt, if the data have it as a
        chat. ``turns``: who wrote which part of the response, if the model did not write all of it. ``answer``: the row's.
        ``extracted``: the answer that the reward read in the response (None: none), if it reads answers.
        """
        sample = {"row_id": int(batch.row_ids[i]), "prompt": text[0], "response": text[1], "score": float(scores[i])}
        sample["length"] = int(batch["response_ids"].lengths[i])
        if "stopped" in batch:
            sample["finish_reason"] = "stop" if batch["stopped"][i] else "length"
        if "rollout_versions" in batch:
            versions = batch["rollout_versions"].rows()[i]
            sample["versions"] = torch.stack(torch.unique_consecutive(versions, return_counts=True), 1).tolist()
        if messages := chat_messages(text[2], text[0]):
            sample["messages"] = messages
        if (answer := right_answer(text[2])) is not None:
            sample["answer"] = answer
        if sample["row_id"] in self.extracted:
            sample["extracted"] = self.extracted[sample["row_id"]]
        if MASK in batch:
            ids, mask = batch["response_ids"].rows()[i].tolist(), batch[MASK].rows()[i].tolist()
            parts = equal_runs(mask)
            texts = decode(self.context.tokenizer, [ids[begin:end] for _, begin, end in parts])
            names = ("model" if drawn else "environment" for drawn, *_ in parts)
            sample["turns"] = [list(turn) for turn in zip(names, texts, strict=True)]
        return sample

    def _statistics(self, batch: Batch, scores: Tensor, report: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's sums and extremes, which ``merge_values`` joins over ranks and calls. ``scores``: of the scored rows.

        Raises RewardError on every rank of the pool if too many calls failed.

        Collective over the pool: every rank of it must call, in program order.
        """
        pool, is_reporter = self.mesh.pool, self.is_reporter and len(batch) > 0
        local = {name: report[name] for name in COUNTS}
        local |= {"rows": len(batch) * self.is_reporter, "scored": len(scores) * self.is_reporter}
        sums = torch.tensor([*local.values()], dtype=torch.float64)
        total = {name: int(count) for name, count in zip(local, pool.all_reduce(sums, "control").tolist(), strict=True)}
        first_rank = torch.tensor([pool.rank if is_reporter and report["first_error"] else pool.size])
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
        if is_reporter and len(x):
            mean = [float(x.sum()), len(x)]
            metrics |= {"mean": mean, "std": [*mean, float(x.square().sum())], "max": float(x.max()), "min": float(x.min())}
        metrics = {f"{self.name}/{key}": value for key, value in metrics.items()}
        if is_reporter and self.is_first:
            limit, prompts = self.context.max_prompt_length, batch["prompt_ids"].lengths
            clipped = int((prompts >= limit).sum()) if limit else 0
            parts = ("response_length", model_tokens(batch), local["clipped"]), ("prompt_length", prompts, clipped)
            for name, lengths, num_clipped in parts:
                metrics[f"{name}/mean"] = [float(lengths.sum()), len(batch)]
                metrics[f"{name}/max"] = float(lengths.max())
                metrics[f"{name}/min"] = float(lengths.min())
                metrics[f"{name}/clip_ratio"] = [num_clipped, len(batch)]
        return metrics

    def _check_calls(self, total: dict[str, int], source: int, error: str | None) -> None:
        """Raise RewardError if too many calls failed, or if a reward that stands alone scored none of the first rows.

        ``total``: counts of the pool. ``source``: the first rank of the pool with an ``error``.

        Collective over the pool: every rank of it must call, in program order.
        """
        calls, declined = total["calls"], total["declined"]
        failed = total["failures"] + total["timeouts"]
        step = self.controller.timeline.step
        if failed:
            again = self.failing_since is not None and self.failing_since < step
            self._report_failures(failed, calls, source, error, again)
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

    def _report_failures(self, failed: int, calls: int, source: int, error: str | None, again: bool) -> None:
        """End the run, or warn once. ``source``: the first rank of the pool with an ``error``. ``again``: all calls of the last step
        failed too.

        Collective over the pool: every rank of it must call, in program order.
        """
        message = self.mesh.pool.broadcast_bytes((error or "").encode(errors="replace"), "control", source).decode()
        where = reward_key(self.name)
        check_failures(self.reward, where, failed, calls, message, not self.called, again)
        if not self.warned and source == self.mesh.pool.rank:
            say(
                f"{where}.{self.reward.scorer} failed; {where}.{self.reward.after_failure}, and they count in "
                f"{self.name}/failures or {self.name}/timeouts: {message}"
            )
        self.warned = True

    def _texts(self, batch: Batch) -> tuple[list[RewardRow], Tensor]:
        """Return (prompt, response without special tokens, row) of each row, and which rows are scored, bool [rows]."""
        ids, rows = [response.tolist() for response in batch["response_ids"].rows()], decode_json(batch["row"])
        texts = [(row["prompt"], text, row) for row, text in zip(rows, decode(self.context.tokenizer, ids), strict=True)]
        return texts, torch.tensor([self.reward.chooses(row) for row in rows])

    def _answers(self, batch: Batch) -> list[str | None]:
        """Return what follows the reasoning in each response; None if it is not closed."""
        ids = zip(*(batch[name].rows() for name in ("prompt_ids", "response_ids")), strict=True)
        tags, tokenizer = self.reward.reasoning_tags, self.context.tokenizer
        return [strip_reasoning(tokenizer, prompt.tolist(), response.tolist(), tags) for prompt, response in ids]

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
        chosen = scored.nonzero()[:, 0]
        if self.reward.strip_reasoning:
            answers = zip(texts, self._answers(batch), strict=True)
            texts = [(prompt, answer or "", row) for (prompt, _, row), answer in answers]
        if "observations" in batch:
            turns = self._turns(batch)
            pairs = zip(texts, turns, strict=True)
            texts = [(prompt, text, row | {TURNS: messages}) for (prompt, text, row), messages in pairs]
        rows = [texts[i] for i in chosen.tolist()]
        if self.runner.bound.takes_ids:
            ids = batch["response_ids"].rows()
            indexed = zip(rows, chosen.tolist(), strict=True)
            rows = [(prompt, text, row | {"completion_ids": ids[i].tolist()}) for (prompt, text, row), i in indexed]
        return batch.row_ids[chosen].tolist(), rows, batch.group_ids[chosen].tolist()

    def _score_text(self, batch: Batch, model_scores: Tensor, failed: Tensor, refused: dict[int, str]) -> TextScores:
        """Return ``model_scores`` [rows] with the function's scores added; the same on all ranks of the last stage.

        ``failed`` bool [rows]: rows that have failed before. ``refused``: position of a row -> why the model cannot read it.
        """
        result = TextScores(model_scores.clone(), failed.clone(), torch.full((len(batch),), torch.nan, dtype=torch.float64))
        if not self.mesh.last_stage or not len(batch):
            return result
        if self.is_reporter:
            texts, scored = self._texts(batch)
            result.scores[~scored], result.failed[~scored] = torch.nan, False
            self._note_texts(batch, texts, scored, refused, result.note)
            if self.runner is not None:
                self._call_function(batch, texts, scored, result)
            result.note.counts["failures"] = int(result.failed.sum()) - result.note.counts["timeouts"]
        if self.reward.function is not None or self.reward.data_sources is not None:
            fields = torch.stack([result.scores.double(), result.failed.double(), result.codes])
            for group in (self.mesh.tp, self.mesh.cp):  # cp last: only its first rank has what tp sends
                group.broadcast(fields, 0, "batch")
            result.scores.copy_(fields[0])
            result.failed.copy_(fields[1] > 0)
            result.codes.copy_(fields[2])
        return result

    def _note_texts(self, batch: Batch, texts: list[RewardRow], scored: Tensor, refused: dict[int, str], note: RunNote) -> None:
        """Write into ``note`` what the report needs of the rows themselves. ``scored``, ``refused``: as in :meth:`_score_text`."""
        note.texts = dict(zip(batch.row_ids.tolist(), texts, strict=True))
        limits = torch.tensor([row.get("max_response_length") or math.inf for _, _, row in texts])
        limits = limits.clamp(max=self.context.max_response_length or math.inf)
        note.counts["clipped"] = int((batch["response_ids"].lengths >= limits).sum())
        if self.reward.strip_reasoning:
            answers = zip(self._answers(batch), scored.tolist(), strict=True)
            note.counts["unclosed"] = sum(is_scored and answer is None for answer, is_scored in answers)
        if self.retokenizer is not None:
            errors = [f"row {texts[index][2].get('id')}: {reason}" for index, reason in refused.items() if scored[index]]
            note.counts["calls"] = int(scored.sum())
            note.first_error = next(iter(errors), None)

    def _call_function(self, batch: Batch, texts: list[RewardRow], scored: Tensor, result: TextScores) -> None:
        """Call the function for the ``scored`` rows, and add its scores, failures, answers and counts to ``result``."""
        assert self.runner is not None
        row_ids, rows, groups = self._call_inputs(batch, texts, scored)
        returned = self.runner.score(rows, groups, self.controller.tick, row_ids)
        note, positions = result.note, scored.nonzero()[:, 0]
        values = torch.tensor([torch.nan if score is None else score for score in returned.scores], dtype=result.scores.dtype)
        result.scores[scored] += self.reward.weight * (values if self.spec is None else values.nan_to_num(0.0))
        result.failed[positions[list(returned.errors)]] = True
        if returned.answers:
            codes = [answer_code(answer) for answer in returned.answers.values()]
            result.codes[positions[list(returned.answers)]] = torch.tensor(codes, dtype=torch.float64)
            note.extracted = {row_ids[i]: answer for i, answer in returned.answers.items()}
            note.counts["no_answer"] = list(returned.answers.values()).count(None)
            note.counts["answered"] = len(returned.answers) - note.counts["no_answer"]
        note.counts["calls"] = len(rows)
        note.counts["timeouts"] = returned.timeouts
        note.counts["declined"] = sum(score is None and i not in returned.errors for i, score in enumerate(returned.scores))
        note.first_error = note.first_error or returned.first_error
        note.extras = {f"{self.name}/extra/{name}": sums for name, sums in returned.extra_sums().items()}


class JudgeWorker(RewardWorker):
    """A reward whose model generates a verdict on each response; the number in it is the score (``reward.judge``).

    It generates in the role's own layout. A row fails if its verdict cannot be read or its question is too long.
    """

    head = "lm"

    def build_role(self) -> None:
        super().build_role()
        self.verdicts: dict[int, str] = {}  # of the last call, by row id
        if self.runs("compute_reward"):
            self.generating = build_generating(self, None if self.retokenizer is None else self.retokenizer.tokenizer)

    def enter(self, call: CallRecord) -> None:
        super().enter(call)
        self.verdicts = {}

    def longest(self, context: int) -> int:
        config = self.config.generation
        pages = math.inf if config.num_pages is None else config.num_pages * config.page_size + 1
        return int(min(context, pages, math.inf if config.enable_chunked_prefill else config.max_num_batched_tokens))

    def score_by_model(self, batch: Batch) -> tuple[Tensor | None, dict[int, str]]:
        assert self.reward.judge is not None and self.retokenizer is not None and self.generating is not None
        judge, generating = self.reward.judge, self.generating
        questions, refused = self.retokenizer.read(batch) if len(batch) else ([], {})
        chosen = [self.reward.chooses(row) for row in decode_json(batch["row"])] if len(batch) else []
        positions = [i for i, chooses in enumerate(chosen) if chooses and i not in refused]
        ids = batch.row_ids.tolist()
        requests = [Request(ids[i], ids[i], questions[i], judge.max_response_length) for i in positions]
        sampling = SamplingConfig(temperature=judge.temperature, max_response_length=judge.max_response_length)
        with generating.generation_weights():
            completions = generating.generator.generate(requests, sampling, self.context.seed, 0, self.controller.tick)
        generating.report()
        scores = torch.zeros(len(batch), dtype=torch.float64)
        texts = decode(self.retokenizer.tokenizer, [completion.token_ids for completion in completions])
        for i, verdict, completion in zip(positions, texts, completions, strict=True):
            self.verdicts[ids[i]] = verdict
            try:
                scores[i] = judge.score(verdict, cut=completion.finish_reason == "length")
            except ValueError as error:
                refused[i] = str(error)
        return (scores if self.mesh.last_stage and len(batch) else None), refused

    def sample(self, batch: Batch, i: int, text: RewardRow, scores: Tensor) -> dict[str, Any]:
        return super().sample(batch, i, text, scores) | {"verdict": self.verdicts.get(int(batch.row_ids[i]))}
