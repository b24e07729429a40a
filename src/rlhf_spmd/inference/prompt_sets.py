"""Sets of prompts that are answered, and scored if there is a reward: what ``generate`` and ``evaluate`` share.

A row's place is (set, row id), and its row id is ``prompt number * n + sample``. Draws are keyed by the row id, so a row is the
same in every layout, beside any other rows, and in a job that was killed and goes on. Finished rows are in the
:class:`Journal`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.words import counted
from rlhf_spmd.data.encoding import check_ids, read_template
from rlhf_spmd.data.files import DataError, Row, named_row
from rlhf_spmd.data.prompts import QuestionsConfig, encode_prompts, response_limits, reward_row
from rlhf_spmd.data.reasoning import strip_reasoning
from rlhf_spmd.data.tokenizer import decode, decoding
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.environments.runner import check_failed_rows, failures_by_name
from rlhf_spmd.generation import Completion, NotFinite, Request, SamplingConfig
from rlhf_spmd.generation.multi_turn import Environments, turn_messages
from rlhf_spmd.generation.sampler import num_drawable_ids
from rlhf_spmd.generation.stopping import build_stop_criteria
from rlhf_spmd.inference.inference_engine import GeneratingConfig, InferenceEngine, gather_records
from rlhf_spmd.inference.inference_program import InferenceConfig
from rlhf_spmd.inference.loaded_model import CheckedModel, not_finite
from rlhf_spmd.inference.output_files import Journal
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.input_digests import sample_digest
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import check_failures
from rlhf_spmd.rewards.row_values import TURNS
from rlhf_spmd.rewards.runner import RewardRunner

Place = tuple[int, int]  # number of the set, row id
Record = tuple[Place, dict[str, Any]]  # a row's place and its result
Results = list[list[dict[str, Any]]]  # for each set, the results of its rows


@dataclass(frozen=True)
class AnswerConfig(GeneratingConfig, InferenceConfig):
    """The common configuration of ``generate`` and ``evaluate``."""

    data: QuestionsConfig = field(default_factory=QuestionsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


Config = TypeVar("Config", bound=AnswerConfig, covariant=True)


@dataclass(frozen=True)
class PromptSet:
    """Checked prompts.

    - key: the configuration key of the reward, for messages
    - source_prompts: the prompts as the file has them; rows: as rewards see them; prompts: as token ids
    - limits: least and most tokens of each prompt's responses
    - errors: by number, the prompts that are not answered and why
    """

    name: str
    key: str
    sampling: SamplingConfig
    reward: RewardConfig
    source_prompts: list[Any]
    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    limits: list[tuple[int, int]]
    errors: dict[int, str]

    def requests(self) -> list[list[Request]]:
        """Return ``n`` requests for each prompt that is answered, in order."""
        n = self.sampling.n
        return [
            [Request(i * n + j, i, prompt, longest, shortest) for j in range(n)]
            for i, (prompt, (shortest, longest)) in enumerate(zip(self.prompts, self.limits, strict=True))
            if i not in self.errors
        ]


@dataclass(frozen=True)
class InferJob(CheckedModel[Config]):
    """The checked input of ``generate`` and ``evaluate``. ``keeps_tokens``: rows keep their token ids and log-probs."""

    sets: list[PromptSet]
    journal: Journal
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    keeps_tokens: bool = True

    @property
    def must_match(self) -> dict[str, str]:
        """Return values that must be equal on all ranks, see :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        return {"model, set of prompts or setting": self.journal.job}


def check_set(
    name: str,
    key: str,
    rows: Sequence[Row],
    config: AnswerConfig,
    sampling: SamplingConfig,
    reward: RewardConfig,
    model: CheckedModel[AnswerConfig],
) -> PromptSet:
    """Return the prompts of a set for ``model``. Raises ValueError or DataError, one line.

    A prompt that leaves no room in the model's context gets an entry in ``errors``; if none leaves room, DataError is raised.
    """
    spec, tokenizer = model.spec, model.tokenizer
    encoded = encode_prompts(rows, config.data, tokenizer, spec.vocab_size)
    prompts = []
    for row, (ids, _) in zip(rows, encoded, strict=True):
        with named_row(row.where):
            prompts.append(check_ids(ids, spec.vocab_size, config.data.prompt_key))
    context = spec.max_position_embeddings
    errors = {
        i: f"{rows[i].where}: the prompt has {len(ids)} tokens, the model's context {context}"
        for i, ids in enumerate(prompts)
        if len(ids) >= context
    }
    if len(errors) == len(rows):
        raise DataError(errors[0])
    limits = [(0, 0) if i in errors else limits_of(row, context - len(prompts[i]), sampling) for i, row in enumerate(rows)]
    where = f"{key.rpartition('reward')[0]}sampling"
    stop = build_stop_criteria(sampling, spec.eos_token_ids, decoding(tokenizer), where)
    drawable = num_drawable_ids(spec.vocab_size, spec.eos_token_ids, decoding(tokenizer))
    sampling.check_ids(spec.vocab_size, drawable, stop.token_ids, any(shortest for shortest, _ in limits), where)
    longest = max(len(prompt) + max_length for prompt, (_, max_length) in zip(prompts, limits, strict=True))
    config.generation.check_row("generation", longest, f"the longest row may have {longest} tokens")
    reward_rows = [reward_row(row, i, encoded[i][1], config.data) for i, row in enumerate(rows)]
    for setting, value in (("model", reward.model), ("judge", reward.judge)):
        if value is not None:
            raise ValueError(f"{key}.{setting}={value}: here responses are scored by a function; leave it out")
    reward.check_no_model(key)
    reward.check_rows(key, reward_rows, [row.where for row in rows])
    source_prompts = [row.get(config.data.prompt_key, "") if config.data.prompt_key in row else None for row in rows]
    return PromptSet(name, key, sampling, reward, source_prompts, reward_rows, prompts, limits, errors)


def limits_of(row: Row, room: int, sampling: SamplingConfig) -> tuple[int, int]:
    """Return the least and most tokens of a response: the row's limits, else the common ones, at most ``room``. Raises DataError."""
    shortest, row_limit = response_limits(row)
    longest = min(room, row_limit or sampling.max_response_length or room)
    if shortest > longest:
        raise row.error(
            f"min_response_length={shortest} must be at most {longest}, which max_response_length (the row's, else "
            "sampling's) and the model's context leave"
        )
    return shortest, longest


def job_of(config: AnswerConfig, checkpoint: Path | None, sets: Sequence[PromptSet]) -> str:
    """Return a hash of what decides the rows: samples of the weight files, the prompts, the settings and the reward function's file.

    Copies of a model on several nodes give the same hash.
    """
    source = checkpoint or Path(config.model.path)
    files = [[path.name, path.stat().st_size, sample_digest(path)] for path in sorted(source.glob("*.safetensors"))]
    sections = ("model", "sampling", "reward", "environment", "environments", "pass_score")
    settings = {key: value for key, value in to_dict(config).items() if key in sections}
    settings["data"] = [config.data.chat_template_kwargs, read_template(config.data.chat_template, "data.chat_template")]
    contents = [[s.name, s.prompts, s.limits, s.rows, to_dict(s.sampling), to_dict(s.reward), code_of(s)] for s in sets]
    return hashlib.sha256(json.dumps([settings, files, contents]).encode()).hexdigest()


def code_of(prompt_set: PromptSet) -> str | None:
    """Return a hash of the file that defines the set's reward function; None without a reward."""
    if prompt_set.reward.function is None:
        return None
    function = inspect.unwrap(prompt_set.reward.bind(prompt_set.key).function)
    function = getattr(function, "func", function)  # a partial
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def answer(job: InferJob[AnswerConfig], world: World, tick: Callable[[], None], write: Callable[[Results], None]) -> str | None:
    """Generate all responses. Returns a line about the work on rank 0, and None elsewhere.

    On rank 0 ``write`` is called with the rows of each set, ``n`` per prompt in order, as :class:`PromptSetRun` made them. They
    are empty for prompts that are not answered. Collective over the world: every rank of it must call. Raises
    FloatingPointError if a log-prob is not finite.
    """
    start_time = time.perf_counter()
    engine = InferenceEngine(job, world, tick)
    load_time = time.perf_counter()
    runs = [PromptSetRun(job, number, engine) for number in range(len(job.sets))]
    places = {(run.number, request.row_id) for run in runs for group in run.groups for request in group}
    earlier_rows = job.journal.read(places) if engine.leads and places else {}
    records = [record for run in runs for record in run.answer(earlier_rows)]
    num_earlier = int(world.all.all_reduce(torch.tensor(sum(run.num_earlier for run in runs)), "generate:before"))
    gathered = gather_records(world, records, "generate:results")
    line = None
    if gathered is not None:
        results: Results = [[{} for _ in s.prompts for _ in range(s.sampling.n)] for s in job.sets]
        for (number, row_id), row in gathered:
            results[number][row_id] = row
        write(results)
        num_tokens = sum(row["length"] for _, row in gathered)
        seconds = time.perf_counter() - load_time
        line = f"{counted(len(gathered), 'response')}, {counted(num_tokens, 'token')} in {seconds:.1f} s "
        line += f"({num_tokens / seconds:.0f} tokens/s; {load_time - start_time:.1f} s to load) on {job.layout}, "
        line += f"{counted(job.config.threads, 'thread')}, attention {engine.generator.config.attention}: {job.config.out}"
        line += f"; {num_earlier} of them were there from an earlier start" if num_earlier else ""
        errors = [error for s in job.sets for error in s.errors.values()]
        line += f"; {counted(len(errors), 'prompt')} not answered, the first: {errors[0]}" if errors else ""
    world.all.barrier("generate:written")
    if world.rank == 0:
        job.journal.remove()
    return line


class PromptSetRun:
    """One set's rows on one replica: generated, scored and written to the journal as they end.

    ``groups``: the requests of each prompt that this replica answers; ``num_earlier``: responses of earlier starts of the job.
    """

    def __init__(self, job: InferJob[AnswerConfig], number: int, engine: InferenceEngine) -> None:
        self.job = job
        self.number = number
        self.engine = engine
        self.set = job.sets[number]
        groups = self.set.requests()
        self.groups = [groups[i] for i in engine.groups_of_replica(groups)]
        self.scorer = RewardScorer(self.set, engine.tick)
        self.num_earlier = 0

    def answer(self, earlier_rows: Mapping[Place, dict[str, Any]]) -> list[Record]:
        """Return the records of this replica's rows on its first rank, and none elsewhere. ``earlier_rows``: those of earlier starts.

        Collective over the replica, with environments over the world: every rank of it must call, in program order.
        """
        engine = self.engine
        n = self.set.sampling.n
        finished = [group for group in self.groups if all((self.number, request.row_id) in earlier_rows for request in group)]
        self.num_earlier = n * len(finished)
        finished_ids = set(engine.mesh.replica.broadcast_json([group[0].group_id for group in finished], "generate:done"))
        places = [(self.number, request.row_id) for group in finished for request in group]
        records = [(place, earlier_rows[place]) for place in places]
        waiting = [group for group in self.groups if group[0].group_id not in finished_ids]
        incomplete: dict[int, list[Completion]] = {}  # responses to a prompt go together: rewards may compare them
        scored: Future[list[Record]] | None = None
        environments = None
        if self.job.environments:
            rows = {request.row_id: self.set.rows[request.group_id] for group in waiting for request in group}
            environments = Environments(self.job.environments, rows, self.job.tokenizer, self.job.config.data)
        try:
            with ThreadPoolExecutor(1) as pool:  # rewards take their time: the next rows are generated meanwhile
                for completions in engine.complete(waiting, self.set.sampling, self.set.sampling.seed, environments):
                    if environments is not None:  # whose rows end together
                        self._check_failures(completions, records)
                    for completion in completions:
                        incomplete.setdefault(completion.row_id // n, []).append(completion)
                    complete = [prompt for prompt, responses in incomplete.items() if len(responses) == n]
                    groups = [sorted(incomplete.pop(prompt), key=lambda completion: completion.row_id) for prompt in complete]
                    if engine.leads and groups:
                        records += scored.result() if scored else []
                        scored = pool.submit(self._write_down, [completion for group in groups for completion in group])
                records += scored.result() if scored else []
                self.scorer.close()  # its processes end with the thread that started them
        except NotFinite as error:
            row = error.row_id // n
            raise not_finite(row, self.set.rows[row]["id"], self.job.config.model) from error
        return records if engine.leads else []

    def _check_failures(self, completions: Sequence[Completion], earlier: Sequence[Record]) -> None:
        """Raise EnvironmentFailure on rank 0 if the environment failed in too many rows of the set; other ranks then wait for the end.

        ``completions`` and ``earlier``, the records of earlier starts, are all rows of this replica.

        Collective over the world: every rank of it must call, in program order.
        """
        world, configs = self.engine.world, self.job.environments
        failures = {row_id: row.get("environment_failure") for (_, row_id), row in earlier}
        failures |= {completion.row_id: completion.failure for completion in completions}
        gathered = gather_records(world, [*failures.items()] if self.engine.leads else [], "generate:failures")
        if gathered is not None:
            rows = [self.set.rows[row_id // self.set.sampling.n] for row_id, _ in gathered]
            for name, failures_of_name in failures_by_name(configs, rows, [failure for _, failure in gathered]).items():
                texts = [failure for failure in failures_of_name if failure is not None]
                check_failed_rows(configs[name], name, len(texts), len(failures_of_name), next(iter(texts), None))
        world.all.barrier("generate:judged")  # before any rank writes rows to the journal

    def _reward_row(self, completion: Completion) -> dict[str, Any]:
        """Return the completion's row as the reward sees it."""
        number = completion.row_id // self.set.sampling.n
        if completion.mask is None:
            return self.set.rows[number]
        tags = self.set.reward.reasoning_tags if self.set.reward.strip_reasoning else None
        turns = (completion.token_ids, completion.mask, completion.observations)
        return self.set.rows[number] | {TURNS: turn_messages(self.job.tokenizer, self.set.prompts[number], *turns, tags)}

    def _write_down(self, completions: Sequence[Completion]) -> list[Record]:
        """Score ``completions`` and write them to the journal, on the thread that the reward's processes belong to."""
        rows = [record(completion, self.job.keeps_tokens) for completion in completions]
        if self.set.reward.function is not None:
            prompts = [self._reward_row(completion) for completion in completions]
            ids = [completion.token_ids for completion in completions]
            texts = decode(self.job.tokenizer, ids)
            answers: list[str | None] = [*texts]
            if self.set.reward.strip_reasoning:
                prompt_ids = [self.set.prompts[completion.row_id // self.set.sampling.n] for completion in completions]
                tags = self.set.reward.reasoning_tags
                answers = [strip_reasoning(self.job.tokenizer, *pair, tags) for pair in zip(prompt_ids, ids, strict=True)]
                for row, stripped in zip(rows, answers, strict=True):
                    row["stripped"] = stripped
            scored = self.scorer.score(prompts, [answer or "" for answer in answers], ids)
            for row, text, verdict, completion in zip(rows, texts, scored, completions, strict=True):
                row |= {"response": text, **verdict} | ({"score": None} if completion.failure else {})
        written = [((self.number, completion.row_id), row) for completion, row in zip(completions, rows, strict=True)]
        self.job.journal.append(written)
        return written


class RewardScorer:
    """Scores the responses of ``prompt_set`` as training does, taking those of one call for a step."""

    def __init__(self, prompt_set: PromptSet, tick: Callable[[], None]) -> None:
        self.set = prompt_set
        self.tick = tick
        self.runner: RewardRunner | None = None
        self.reported = False  # the first failure of the reward

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()

    def score(self, prompts: Sequence[dict[str, Any]], texts: Sequence[str], ids: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Return for each response its ``score``, None if the reward does not score the row, and, if the reward reads answers, the one
        that it has ``extracted``, None for none. Raises RewardError."""
        reward = self.set.reward
        scores: list[dict[str, Any]] = [{"score": None} for _ in texts]
        chosen = [i for i, row in enumerate(prompts) if reward.applies_to(row)]
        if not chosen:
            return scores
        first_step = self.runner is None
        self.runner = self.runner or RewardRunner(reward, self.set.key)
        rows = [prompts[i] | ({"completion_ids": ids[i]} if self.runner.bound.takes_ids else {}) for i in chosen]
        responses = [(row["prompt"], texts[i], row) for i, row in zip(chosen, rows, strict=True)]
        result = self.runner.score(responses, [i // self.set.sampling.n for i in chosen], self.tick)
        num_failed = result.failures + result.timeouts
        error = result.first_error or ""
        subject = f"the set {self.set.name!r}" if self.set.name else "the rows"
        subject = f"{subject} so far" if first_step else subject
        check_failures(reward, self.set.key, num_failed, len(chosen), error, first_step, rows=subject)
        if num_failed and not self.reported:
            action = f"{self.set.key}.function {reward.function!r} failed; {self.set.key}.{reward.after_failure}"
            print(f"{action}: {error}", file=sys.stderr)
            self.reported = True
        for place, (i, score) in enumerate(zip(chosen, result.scores, strict=True)):
            scores[i]["score"] = None if score is None else reward.weight * score
            scores[i] |= {"extracted": result.answers[place]} if place in result.answers else {}
        return scores


def record(completion: Completion, keeps_tokens: bool) -> dict[str, Any]:
    """Return a completion as JSON. ``keeps_tokens``: with its token ids and log-probs, not only their number.

    A failure of its environment is kept in any case, for the verdict of a later start."""
    row: dict[str, Any] = {"length": len(completion.token_ids), "finish_reason": completion.finish_reason}
    row |= {"environment_failure": completion.failure} if completion.failure else {}
    if not keeps_tokens:
        return row
    row |= {"response_ids": completion.token_ids, "log_probs": completion.log_probs_t1.tolist()}
    if completion.top_log_probs is not None:
        pairs = zip(*(part.tolist() for part in completion.top_log_probs), strict=True)
        row["top_log_probs"] = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    if completion.mask is not None:
        mask = list(map(int, completion.mask))
        reward = None if completion.failure else completion.reward
        row |= {"response_mask": mask, "environment_reward": reward, "num_turns": completion.num_turns}
    return row
