"""Generates ``sampling.n`` responses to each prompt. After ``scripts/quickstart.sh``, which makes a model and prompts:

rlhf-spmd generate --nproc-per-node 2 model.path=runs/quickstart/ppo/export \\
    data.path=runs/quickstart/task/val.jsonl out=answers.jsonl

Input: one row per prompt with ``prompt`` (text or chat messages) or ``prompt_ids``. Optional: ``id`` (else the row's number),
``answer``, ``max_response_length`` (else ``sampling.max_response_length``, else what the context leaves) and
``min_response_length``.

Output, in input order, ``sampling.n`` rows per prompt: ``id``, ``prompt`` (text), ``answer``, ``prompt_ids``, ``response_ids``
(with the stop token), ``log_probs`` (temperature 1), ``text`` (null without a tokenizer) and ``finish_reason`` (``stop``, or
``length`` at the limit or the end of the model's context). ``reward.function`` adds ``score``. ``sampling.logprobs`` adds
``top_log_probs``: [id, log-prob] of the likeliest tokens. ``environment.cls`` adds ``response_mask`` (1: the model's token, 0:
the environment's), ``environment_reward`` and ``num_turns``; where it failed these rows have no score, and
``environment_failure`` says why. A prompt without room in the model's context has ``error`` in place of a response.

With ``keep`` the output is a data set instead: the best responses, or pairs. A job that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.data.files import list_paths
from rlhf_spmd.data.prompts import has_ids
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.environments.config import EnvironmentConfig, check_rows, environment_key, named_environments, tools_of
from rlhf_spmd.generation import StopStrings
from rlhf_spmd.generation.stopping import special_stops
from rlhf_spmd.inference.inference_engine import read_generating_model
from rlhf_spmd.inference.inference_program import inference_program, read_config, say_warnings
from rlhf_spmd.inference.output_files import Journal, check_out, write_rows
from rlhf_spmd.inference.prompt_sets import AnswerConfig, InferJob, answer, check_set, job_of
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World


@dataclass(frozen=True)
class GenerateConfig(AnswerConfig):
    """Everything that ``generate`` takes.

    - out: jsonl file to write. Until the job is done, finished rows are in `<out>.part`, from which it goes on after a kill
    - environments: environments by name, each with the keys of `environment`; a row's column `environment` names its own
    - keep: which of a prompt's responses: `all`; `best`, or a number of the best, as rows for SFT; `pairs`: the best and the
      worst, as `chosen` and `rejected`. All but `all` need `reward.function`
    """

    rules: ClassVar[Rules] = (
        Rule(
            ("keep", "sampling.n"),
            lambda s: isinstance(s.keep, int) and s.keep > s.sampling.n,
            "a prompt has no more responses than the second",
            "lower the first or raise the second",
        ),
        Rule(
            ("keep", "reward.function"),
            lambda s: s.keep != "all" and s.reward.function is None,
            "responses are chosen by score",
            "give reward.function",
        ),
        Rule(
            ("keep", "sampling.n"),
            lambda s: s.keep == "pairs" and s.sampling.n < 2,
            "a pair is two responses to a prompt",
            "set sampling.n to at least 2",
        ),
    )

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    environments: dict[str, EnvironmentConfig] = field(default_factory=dict)
    keep: Literal["all", "best", "pairs"] | PositiveInt = "all"

    def check(self, where: str) -> None:
        super().check(where)
        for name, environment in named_environments(self.environment, self.environments).items():
            environment.check_together(environment_key(name), self.timeout_s)


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> InferJob[GenerateConfig]:
    """Return the checked input. Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config = read_config(GenerateConfig, path, overrides)
    if launch.rank == 0:
        check_out(Path(config.out), *list_paths(config.data.path))
    rows = config.data.read()
    has_text = not all(has_ids(row, config.data) for row in rows)
    environments = named_environments(config.environment, config.environments)
    config = replace(config, data=replace(config.data, tools=tools_of(environments, config.data.tools)))
    needed = has_text or bool(config.sampling.stop or environments) or config.reward.function is not None
    loaded = read_generating_model(config, launch, needed, read_template(config.data.chat_template, "data.chat_template"))
    say_warnings(launch, config.data.warnings("data", loaded.tokenizer))
    prompts = check_set("", "reward", rows, config, config.sampling, config.reward, loaded)
    check_rows(environments, prompts.rows, [row.where for row in rows], has_other_reward=True)
    name = job_of(loaded.config, loaded.checkpoint, [prompts])
    journal = Journal(Path(f"{config.out}.part"), name, config.out, checks=launch.rank == 0)
    return InferJob(**vars(loaded), sets=[prompts], journal=journal, environments=environments)


def generate(job: InferJob[GenerateConfig], world: World, tick: Callable[[], None] = lambda: None) -> None:
    """Answer all prompts and write the file on rank 0. ``tick`` is called after each step of the generator.

    Collective over the world: every rank of it must call. Raises FloatingPointError if a log-prob is not finite.
    """

    def write(sets: list[list[dict[str, Any]]]) -> None:
        rows = output_rows(job, sets[0]) if job.config.keep == "all" else kept_rows(job, sets[0], job.config.keep)
        keep_earlier(job.config.out)
        write_rows(job.config.out, rows)

    line = answer(job, world, tick, write)
    if line is not None:
        print(line, file=sys.stderr)


def keep_earlier(out: str) -> None:
    """Rename what another job left at ``out`` to ``<out>.before``: it may have taken hours."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(out, f"{out}.before")
        print(f"the earlier {out} is now {out}.before", file=sys.stderr)


def output_rows(job: InferJob[GenerateConfig], results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the output for all rows. ``results``: the result of each row, empty for prompts that are not answered."""
    prompts = job.sets[0]
    for row_id, row in enumerate(results):
        number = row_id // prompts.sampling.n
        row_values = prompts.rows[number]
        named = {
            "id": row_values["id"],
            "prompt": row_values["prompt"],
            "answer": row_values["answer"],
            "prompt_ids": prompts.prompts[number],
        }
        if row:
            text = response_text(job, row)
            yield {**named, **{key: value for key, value in row.items() if key not in ("response", "length")}, "text": text}
        else:
            empty: dict[str, Any] = {"response_ids": [], "log_probs": [], "text": None, "finish_reason": None}
            yield {**named, **empty, "error": prompts.errors[number]}


def kept_rows(job: InferJob[GenerateConfig], results: Sequence[dict[str, Any]], keep: str | int) -> list[dict[str, Any]]:
    """Return the best responses to each prompt, or the best and the worst, with the prompt as it was given.

    Of equal scores the first counts. A prompt whose responses all have the same score makes no pair. Prints how many prompts
    give nothing. Raises ValueError if all do.
    """
    prompts = job.sets[0]
    n = prompts.sampling.n
    rows = []
    num_without_rows = 0
    for number, source_prompt in enumerate(prompts.source_prompts):
        scored = [row for row in results[number * n : (number + 1) * n] if row and row["score"] is not None]
        ranked = sorted(scored, key=lambda row: -row["score"])
        columns = {key: prompts.rows[number][key] for key in ("id", "prompt", "answer")}
        if source_prompt is not None:
            columns["prompt"] = source_prompt
        prompt_rows = pair_rows(job, ranked) if keep == "pairs" else best_rows(job, ranked, 1 if keep == "best" else int(keep))
        num_without_rows += not prompt_rows
        rows += [{**columns, **row} for row in prompt_rows]
    reason = "have no two responses with different scores" if keep == "pairs" else "have no response with a score"
    if not rows:
        raise ValueError(f"keep={keep}: all {num_without_rows} prompts {reason}; there is nothing to write")
    if num_without_rows:
        left_out = f"{num_without_rows} of {len(prompts.source_prompts)} prompts {reason} and are left out"
        print(f"keep={keep}: {left_out}", file=sys.stderr)
    num_low_scores = 0 if keep == "pairs" else sum(row["score"] <= 0 for row in rows)
    if num_low_scores:
        low = f"{num_low_scores} of the {len(rows)} responses that are kept score 0 or less; leave them out by `score`"
        print(f"keep={keep}: {low}", file=sys.stderr)
    return rows


def best_rows(job: InferJob[GenerateConfig], ranked: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the columns of the best responses to a prompt. ``ranked``: those with a score, the best first."""
    return [{"response": response_text(job, row), "score": row["score"]} for row in ranked[:number]]


def pair_rows(job: InferJob[GenerateConfig], ranked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of the pair of the best and the worst response to a prompt; none if all have the same score."""
    if not ranked or ranked[0]["score"] == ranked[-1]["score"]:
        return []
    best = ranked[0]
    worst = next(row for row in ranked if row["score"] == ranked[-1]["score"])
    pair = {"chosen": response_text(job, best), "rejected": response_text(job, worst)}
    return [{**pair, "chosen_score": best["score"], "rejected_score": worst["score"]}]


def response_text(job: InferJob[GenerateConfig], row: dict[str, Any]) -> str | None:
    """Return the text of a response, without the stop string that ended it unless that is wanted. None without a tokenizer."""
    decode, sampling, token_ids = decoding(job.tokenizer), job.config.sampling, row["response_ids"]
    if decode is None:
        return None
    if row["finish_reason"] != "stop" or not sampling.stop:
        return decode(token_ids)
    if not sampling.include_stop_str_in_output:
        return StopStrings(sampling.stop, decode).cut(token_ids)[0]
    special = special_stops(sampling.stop, decode.special_ids, "sampling")
    return decode(token_ids) + "".join(stop for stop, token in special.items() if token == token_ids[-1])


# keys: the configuration's keys; main: the command line
keys, main = inference_program(
    "generate", __doc__, GenerateConfig, prepare, lambda job, world, board: generate(job, world, board.tick)
)


if __name__ == "__main__":
    main()
