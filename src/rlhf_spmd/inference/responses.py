"""Responses to the prompts of one set or several, scored where there is a reward: what ``generate`` and ``evaluate`` share.

A row's place is (set, row id), its row id ``prompt number * n + sample``. Draws are keyed by it, so a row is the same in every
layout, beside any other rows, and in a job that was killed and goes on. Rows that are scored are in the :class:`Journal`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.schema import counted
from rlhf_spmd.data.encoding import check_ids
from rlhf_spmd.data.files import DataError, Row
from rlhf_spmd.data.prompts import QuestionsConfig, encode_prompts, response_limits, reward_row
from rlhf_spmd.data.tokenizer import decode, decoding
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation import Completion, GenerationConfig, Generator, NotFinite, Request, SamplingConfig
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.stopping import build_ends
from rlhf_spmd.inference.job import InferenceConfig, LoadedModel, gather_records, not_finite, own_rows
from rlhf_spmd.inference.journal import Journal
from rlhf_spmd.inference.loading import build_generator, check_generation, generate_in_parts
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.rank_consistency import sample_of
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import check_failures
from rlhf_spmd.rewards.runner import RewardRunner

Record = tuple[tuple[int, int], dict[str, Any]]  # a row: its place, and what was made for it


@dataclass(frozen=True)
class AnswerConfig(InferenceConfig):
    """What ``generate`` and ``evaluate`` both take. The generation layout is ``layout``; ``generation`` holds the other knobs."""

    data: QuestionsConfig = field(default_factory=QuestionsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def check(self, where: str) -> None:
        super().check(where)
        check_generation(self.layout, self.generation)


@dataclass(frozen=True)
class PromptSet:
    """Checked prompts. ``given``: as the file has them; ``rows``: as rewards see them; ``limits``: least and most tokens of each
    prompt's responses; ``errors``: by number, those that are not answered. ``key``: of the reward, for messages."""

    name: str
    key: str
    sampling: SamplingConfig
    reward: RewardConfig
    given: list[Any]
    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    limits: list[tuple[int, int]]
    errors: dict[int, str]

    def requests(self, mesh: Mesh) -> list[list[Request]]:
        """This replica's rows, a list for each prompt, so that a prompt is computed once; token counts (at most) balanced over
        replicas. The longest come first: pages that were made for them have room for all that follow."""
        n = self.sampling.n
        longest = [len(prompt) + n * most for prompt, (_, most) in zip(self.prompts, self.limits, strict=True)]
        order = sorted(
            (i for i in own_rows(longest, mesh) if i not in self.errors),
            key=lambda i: -len(self.prompts[i]) - self.limits[i][1],
        )
        return [[Request(i * n + j, i, self.prompts[i], self.limits[i][1], self.limits[i][0]) for j in range(n)] for i in order]


@dataclass(frozen=True)
class InferJob(LoadedModel):
    """The checked input of a job. ``keeps_tokens``: rows keep their token ids and log-probs, and not only how many there are."""

    sets: list[PromptSet]
    journal: Journal
    environments: Mapping[str, EnvironmentConfig] = field(default_factory=dict)
    keeps_tokens: bool = True

    @property
    def alike(self) -> dict[str, str]:
        """See :class:`~rlhf_spmd.process.program.ProgramSettings`."""
        return {"model, set of prompts or setting": self.journal.job}


def check_set(
    name: str,
    key: str,
    rows: Sequence[Row],
    config: Any,
    sampling: SamplingConfig,
    reward: RewardConfig,
    model: tuple[ModelSpec, Any],
) -> PromptSet:
    """The rows of a set as what is asked of ``model`` (its architecture and tokenizer). Raises ValueError or DataError, one line.

    A prompt that leaves no room in the model's context becomes an error of its own; if all do, that is raised.
    """
    spec, tokenizer = model
    encoded = encode_prompts(rows, config.data, tokenizer, spec.vocab_size)
    prompts = [
        check_ids(ids, spec.vocab_size, row.where, config.data.prompt_key) for row, (ids, _) in zip(rows, encoded, strict=True)
    ]
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
    ends = build_ends(sampling, spec.eos_token_ids, decoding(tokenizer), where)
    sampling.check_ids(spec.vocab_size, ends.token_ids, any(least for least, _ in limits), where)
    longest = max(len(prompt) + most for prompt, (_, most) in zip(prompts, limits, strict=True))
    config.generation.check_row("generation", longest, f"the longest row may have {longest} tokens")
    seen = [reward_row(row, i, encoded[i][1], config.data) for i, row in enumerate(rows)]
    for setting, value in (("model", reward.model), ("judge", reward.judge)):
        if value is not None:
            raise ValueError(f"{key}.{setting}={value}: here responses are scored by a function; leave it out")
    reward.check_no_model(key)
    reward.check_rows(key, seen, [row.where for row in rows])
    given = [row.get(config.data.prompt_key, "") if config.data.prompt_key in row else None for row in rows]
    return PromptSet(name, key, sampling, reward, given, seen, prompts, limits, errors)


def limits_of(row: Row, room: int, sampling: SamplingConfig) -> tuple[int, int]:
    """Least and most tokens: the row's own limits or the common ones, cut at the end of the model's context."""
    least, own = response_limits(row)
    most = min(room, own or sampling.max_response_length or room)
    if least > most:
        raise DataError(
            f"{row.where}: min_response_length={least} must be at most {most}, which max_response_length (the row's, else "
            "sampling's) and the model's context leave"
        )
    return least, most


def job_of(config: Any, checkpoint: Path | None, sets: Sequence[PromptSet]) -> str:
    """What makes rows the same: the weights, as far as samples of their files tell, the prompts, the settings and the reward
    function's file. Copies of a model on several nodes give the same."""
    source = checkpoint or Path(config.model.path)
    files = [[path.name, path.stat().st_size, sample_of(path)] for path in sorted(source.glob("*.safetensors"))]
    said = ("model", "sampling", "reward", "environment", "environments", "pass_score")
    settings = {key: value for key, value in to_dict(config).items() if key in said}
    asked = [[s.name, s.prompts, s.limits, s.rows, to_dict(s.sampling), to_dict(s.reward), code_of(s)] for s in sets]
    return hashlib.sha256(json.dumps([settings, files, asked]).encode()).hexdigest()


def code_of(asked: PromptSet) -> str | None:
    """A hash of the file that the set's reward function is in; None without one."""
    if asked.reward.function is None:
        return None
    function = inspect.unwrap(asked.reward.bind(asked.key).function)
    function = getattr(function, "func", function)  # of a partial
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def answer(
    ready: InferJob, world: World, tick: Callable[[], None], write: Callable[[list[list[dict[str, Any]]]], None]
) -> str | None:
    """All responses. On rank 0 ``write`` gets for each set its rows, ``n`` for each prompt in order, as :class:`Answerer` made them
    (empty for prompts that are not answered); returns there what to tell of the work, elsewhere None.

    Collective over the world: every rank of it must call. Raises FloatingPointError where a log-prob is not finite.
    """
    config, started = ready.config, time.perf_counter()
    generator = build_generator(ready, world)
    mesh, backend = generator.mesh, generator.config.attention
    loaded = time.perf_counter()
    answerers = [Answerer(ready, number, mesh, generator, tick) for number in range(len(ready.sets))]
    places = {(a.number, request.row_id) for a in answerers if a.leads for group in a.requests for request in group}
    there = ready.journal.read(places) if places else {}
    records = [record for answerer in answerers for record in answerer.answer(there)]
    before = int(world.all.all_reduce(torch.tensor(sum(answerer.num_before for answerer in answerers)), "generate:before"))
    gathered = gather_records(world, records, "generate:results")
    said = None
    if gathered is not None:
        rows: list[list[dict[str, Any]]] = [[{} for _ in s.prompts for _ in range(s.sampling.n)] for s in ready.sets]
        for (number, row_id), row in gathered:
            rows[number][row_id] = row
        write(rows)
        num_tokens = sum(row["length"] for _, row in gathered)
        seconds = time.perf_counter() - loaded
        missing = sum(len(s.errors) for s in ready.sets)
        said = f"{counted(len(gathered), 'response')}, {counted(num_tokens, 'token')} in {seconds:.1f} s "
        said += f"({num_tokens / seconds:.0f} tokens/s; {loaded - started:.1f} s to load) on {ready.layout}, "
        said += f"{counted(config.threads, 'thread')}, attention {backend}: {config.out}"
        said += f"; {before} of them were there from an earlier start" if before else ""
        first = next((error for s in ready.sets for error in s.errors.values()), "")
        said += f"; {counted(missing, 'prompt')} not answered, the first: {first}" if missing else ""
    world.all.barrier("generate:written")
    if world.rank == 0:
        ready.journal.remove()
    return said


class Answerer:
    """One set's rows on one replica: asked for, made, scored and written down as they end."""

    def __init__(self, ready: InferJob, number: int, mesh: Mesh, generator: Generator, tick: Callable[[], None]) -> None:
        self.ready, self.number, self.mesh, self.generator, self.tick = ready, number, mesh, generator, tick
        self.set = ready.sets[number]
        self.requests = self.set.requests(mesh)
        self.leads = mesh.replica.rank == 0
        self.runner: RewardRunner | None = None
        self.told = False  # of the first call of the reward that failed
        self.num_before = 0  # responses that were there from an earlier start

    def answer(self, before: Mapping[tuple[int, int], dict[str, Any]]) -> list[Record]:
        """((set, row id), row) of this replica's rows, on its first rank; nothing elsewhere. ``before``: those of earlier starts.

        Collective over the replica: every rank of it must call, in program order.
        """
        n = self.set.sampling.n
        there = [group for group in self.requests if all((self.number, request.row_id) in before for request in group)]
        self.num_before = n * len(there)
        done = set(self.mesh.replica.broadcast_json([group[0].group_id for group in there], "generate:done"))
        records = [((self.number, request.row_id), before[self.number, request.row_id]) for group in there for request in group]
        waiting = deque(group for group in self.requests if group[0].group_id not in done)
        begun: dict[int, list[Completion]] = {}  # responses to a prompt go together: rewards may compare them
        scored: Future[list[Record]] | None = None
        try:
            with ThreadPoolExecutor(1) as pool:  # rewards take their time: the next rows are made meanwhile
                for completions in self._generate(waiting):
                    for completion in completions:
                        begun.setdefault(completion.row_id // n, []).append(completion)
                    ended = [begun.pop(number) for number in [number for number, its in begun.items() if len(its) == n]]
                    if self.leads and ended:
                        records += scored.result() if scored else []
                        taken = [completion for its in ended for completion in sorted(its, key=lambda c: c.row_id)]
                        scored = pool.submit(self._write_down, taken)
                records += scored.result() if scored else []
                if self.runner is not None:
                    self.runner.close()  # its processes end with the thread that started them
        except NotFinite as error:
            row = error.row_id // self.set.sampling.n
            raise not_finite(row, self.set.rows[row]["id"], self.ready.config.model) from error
        return records if self.leads else []

    def _generate(self, waiting: deque[list[Request]]) -> Iterator[list[Completion]]:
        """The completions as they end. Rows that environments extend or that change replicas end together."""
        sampling, config = self.set.sampling, self.ready.config.generation
        known = self.ready.environments
        if known or (config.rebalance_steps and self.ready.layout.dp > 1):
            requests = [request for group in waiting for request in group]
            environments = None
            if known and requests:
                rows = {request.row_id: self.set.rows[request.group_id] for request in requests}
                environments = Environments(known, rows, self.ready.tokenizer, self.ready.config.data)
            yield self.generator.generate(requests, sampling, sampling.seed, 0, self.tick, environments)
            return
        yield from generate_in_parts(self.generator, waiting, sampling, sampling.seed, self.tick)

    def _write_down(self, completions: Sequence[Completion]) -> list[Record]:
        """Scored and in the journal; on the thread that the reward's processes belong to."""
        rows = [record(completion, self.ready.keeps_tokens) for completion in completions]
        if self.set.reward.function is not None:
            prompts = [self.set.rows[completion.row_id // self.set.sampling.n] for completion in completions]
            ids = [completion.token_ids for completion in completions]
            texts = decode(self.ready.tokenizer, ids)
            for row, text, score in zip(rows, texts, self._score(prompts, texts, ids), strict=True):
                row |= {"response": text, "score": score}
        made = [((self.number, completion.row_id), row) for completion, row in zip(completions, rows, strict=True)]
        self.ready.journal.append(made)
        return made

    def _score(self, prompts: Sequence[dict[str, Any]], texts: Sequence[str], ids: Sequence[list[int]]) -> list[float | None]:
        """None for rows that the reward does not score. Raises RewardError as training does, taking these rows for a step."""
        reward = self.set.reward
        scores: list[float | None] = [None] * len(texts)
        chosen = [i for i, row in enumerate(prompts) if reward.chooses(row)]
        if not chosen:
            return scores
        first_step = self.runner is None
        self.runner = self.runner or RewardRunner(reward, self.set.key)
        more = [{"completion_ids": ids[i]} if self.runner.bound.takes_ids else {} for i in chosen]
        result = self.runner.score(
            [(prompts[i]["prompt"], texts[i], prompts[i] | extra) for i, extra in zip(chosen, more, strict=True)],
            [i // self.set.sampling.n for i in chosen],
            self.tick,
        )
        failed, error = result.failures + result.timeouts, result.first_error or ""
        rows = f"the set {self.set.name!r}" if self.set.name else "the rows"
        rows = f"{rows} so far" if first_step else rows
        check_failures(reward, self.set.key, failed, len(chosen), error, first_step, rows=rows)
        if failed and not self.told:
            told = f"{self.set.key}.function {reward.function!r} failed; {self.set.key}.{reward.after_failure}"
            print(f"{told}: {error}", file=sys.stderr)
            self.told = True
        for i, score in zip(chosen, result.scores, strict=True):
            scores[i] = None if score is None else reward.weight * score
        return scores


def record(completion: Completion, keeps_tokens: bool) -> dict[str, Any]:
    """What only the replica knows of a row."""
    row: dict[str, Any] = {"length": len(completion.token_ids), "finish_reason": completion.finish_reason}
    if not keeps_tokens:
        return row
    row |= {"response_ids": completion.token_ids, "log_probs": completion.log_probs_t1.tolist()}
    if completion.top_log_probs is not None:
        pairs = zip(*(part.tolist() for part in completion.top_log_probs), strict=True)
        row["top_log_probs"] = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    if completion.mask is not None:
        mask = list(map(int, completion.mask))
        row |= {"response_mask": mask, "environment_reward": completion.reward, "num_turns": completion.num_turns}
    return row
