"""Measures how good a model's responses are, on one or more sets of prompts. After ``scripts/quickstart.sh``, which makes both:

rlhf-spmd evaluate --nproc-per-node 2 model.path=runs/quickstart/ppo/export \\
    data.path=[runs/quickstart/task/val.jsonl] reward.function=exact_match sampling.n=4 out=runs/quickstart/evaluation

``model.path`` is a Hugging Face directory, a run's directory or one of its checkpoints. Each file of ``data.path`` is a set with
the file's name. ``sets.<name>`` are further sets, which may have a ``reward`` and ``sampling`` of their own.

``out`` gets two files. ``results.json`` has ``<set>/mean@k``, ``<set>/pass@k``, ``<set>/maj@k``, ``<set>/ci95`` and ``<set>/n``
(prompts); the same for each ``data_source`` of a set that has several; and ``job``, a hash of what decides the results.
``rows.jsonl`` has ``sampling.n`` rows per prompt in input order. See docs/evaluation.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_spmd.config.constraints import FiniteFloat, PositiveInt
from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.config.load import check_tree, to_dict
from rlhf_spmd.config.schema import PART_OF, ConfigError, read_section
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.data.files import list_paths, read_rows, set_names
from rlhf_spmd.data.prompts import QuestionsConfig
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.inference.inference_engine import read_generating_model
from rlhf_spmd.inference.inference_program import inference_program, read_config, say_warnings
from rlhf_spmd.inference.output_files import Journal, check_out, other_job, write_rows
from rlhf_spmd.inference.prompt_sets import AnswerConfig, InferJob, PromptSet, answer, check_set, job_of
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.eval_metrics import interval, measure
from rlhf_spmd.telemetry.run_dir import atomic_write_json

RESULTS_FILE, ROWS_FILE = "results.json", "rows.jsonl"


@dataclass(frozen=True)
class SetConfig:
    """``sets.<name>``.

    - path: file or data set
    - split: null: `data.split`
    - subset: null: `data.subset`
    - max_samples: read only the first rows; null: `data.max_samples`
    - reward: keys of `reward` that differ from the common ones
    - sampling: keys of `sampling` that differ from the common ones
    """

    path: str
    split: str | None = None
    subset: str | None = None
    max_samples: PositiveInt | None = None
    reward: dict[str, Any] = field(default_factory=dict, metadata={PART_OF: RewardConfig})
    sampling: dict[str, Any] = field(default_factory=dict, metadata={PART_OF: SamplingConfig})


@dataclass(frozen=True)
class EvaluationDataConfig(QuestionsConfig):
    """``data`` of ``evaluate``.

    - path: a file of prompts, or a list of files, each a set with the file's name
    - split: of data sets that are given by name
    - max_samples: read only the first rows of each file
    """

    max_samples: PositiveInt | None = None

    def check_path(self, where: str) -> None:
        if isinstance(self.path, dict):
            raise ValueError(f"{where}.path must be a file or a list of files, each a set; weights mean nothing here")


@dataclass(frozen=True)
class EvaluateConfig(AnswerConfig):
    """Everything that ``evaluate`` takes.

    - out: directory for `results.json` and `rows.jsonl`
    - sets: further sets by name
    - pass_score: the lowest score that passes, for pass@k
    """

    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    sets: dict[str, SetConfig] = field(default_factory=dict)
    pass_score: FiniteFloat = 1.0


def prepare(path: str | None, overrides: Sequence[str], launch: Launch) -> InferJob[EvaluateConfig]:
    """Return the checked input. Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config = read_config(EvaluateConfig, path, overrides)
    sets = named_sets(config)
    chosen: dict[str, tuple[SamplingConfig, RewardConfig]] = {}
    for name, section in sets.items():
        sampling = section_with_changes(config.sampling, section.sampling, f"sets.{name}.sampling")
        reward = section_with_changes(config.reward, section.reward, f"sets.{name}.reward")
        chosen[name] = sampling, reward
        if reward.function is None:
            raise ValueError(f"set {name!r} has nothing to be scored by: give reward.function, or sets.{name}.reward.function")
        if reward.weight != 1:
            raise ValueError(
                f"set {name!r} has reward.weight={reward.weight}: here a reward stands alone and has no weight; leave it out"
            )
    if launch.rank == 0:
        for file in (RESULTS_FILE, ROWS_FILE):
            check_out(Path(config.out) / file, *(section.path for section in sets.values()))
    loaded = read_generating_model(config, launch, True, read_template(config.data.chat_template, "data.chat_template"))
    say_warnings(launch, config.data.warnings("data", loaded.tokenizer))
    checked = []
    for name, section in sets.items():
        data = config.data
        rows = read_rows(
            section.path, section.split or data.split, section.subset or data.subset, section.max_samples or data.max_samples
        )
        key = f"sets.{name}.reward" if section.reward else "reward"
        checked.append(check_set(name, key, rows, config, *chosen[name], loaded))
    job = job_of(loaded.config, loaded.checkpoint, checked)
    if launch.rank == 0:
        check_results(Path(config.out) / RESULTS_FILE, job)
    journal = Journal(Path(config.out) / "part", job, config.out, checks=launch.rank == 0)
    return InferJob(**vars(loaded), sets=checked, journal=journal, keeps_tokens=False)


def check_results(file: Path, job: str) -> None:
    """Raise ValueError if there are results of another job, which this one would replace."""
    try:
        file_job = parse_json(file.read_text(encoding="utf-8")).get("job") if file.exists() else job
    except (ValueError, AttributeError):
        file_job = None
    if file_job != job:
        raise other_job(str(file.parent), f"its {file.name} is that")


def named_sets(config: EvaluateConfig) -> dict[str, SetConfig]:
    """Return all sets by name. A file of ``data.path`` is named by the shortest end of its path that is unique. Raises ValueError."""
    sets = dict(config.sets)
    for name, path in set_names(list_paths(config.data.path or [])).items():
        if name in sets:
            raise ValueError(f"data.path={path} is the set {name!r}, and so is sets.{name}; give one of them another name")
        sets[name] = SetConfig(path)
    if not sets:
        raise ValueError("data.path or sets.<name>.path must be given: a jsonl or parquet file, or the name of a data set")
    return sets


def section_with_changes(common: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return ``common`` with a set's own keys. Raises ConfigError, one line."""
    try:
        section = read_section(type(common), {**to_dict(common), **to_dict(changes)})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    check_tree(section, where)
    return section


def evaluate(job: InferJob[EvaluateConfig], world: World, tick: Callable[[], None] = lambda: None) -> None:
    """Answer all sets, write ``out`` on rank 0 and print the table there.

    Collective over the world: every rank of it must call. Raises FloatingPointError if a log-prob is not finite.
    """
    results: dict[str, Any] = {}

    def write(results_of_sets: list[list[dict[str, Any]]]) -> None:
        rows = [output_rows(prompts, row_results) for prompts, row_results in zip(job.sets, results_of_sets, strict=True)]
        for prompts, scored in zip(job.sets, rows, strict=True):
            results.update(measure_set(prompts, scored, job.config.pass_score))
        out = Path(job.config.out)
        write_rows(str(out / ROWS_FILE), (row for scored in rows for row in scored))
        atomic_write_json(out / RESULTS_FILE, {**results, "job": job.journal.job})

    line = answer(job, world, tick, write)
    if line is not None:
        print(table(results))
        print(line, file=sys.stderr)


def output_rows(prompts: PromptSet, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of ``rows.jsonl``. ``results``: the result of each row, empty for prompts that are not answered.

    These score 0, if the reward is for them.
    """
    rows = []
    for row_id, row in enumerate(results):
        number = row_id // prompts.sampling.n
        row_values = prompts.rows[number]
        prompt_columns = {"id": row_values["id"], "prompt": row_values["prompt"], "answer": row_values["answer"]}
        set_columns = {"set": prompts.name, "data_source": row_values["data_source"]}
        unanswered = {
            "response": "",
            "score": 0.0 if prompts.reward.applies_to(row_values) else None,
            "finish_reason": None,
            "length": 0,
        }
        result_columns = {key: row[key] for key in (*unanswered, "stripped", "extracted") if key in row} if row else unanswered
        error_columns = {} if row else {"error": prompts.errors[number]}
        rows.append({**prompt_columns, **result_columns, **set_columns, **error_columns})
    return rows


def measure_set(prompts: PromptSet, rows: Sequence[dict[str, Any]], pass_score: float) -> dict[str, Any]:
    """Return the results ``<set>/...`` of all prompts, and ``<set>/<data_source>/...`` if there are several sources.

    A prompt with a response that the reward does not score counts only in ``num_unscored``. ``num_unanswered`` counts prompts
    without room in the model's context.
    """
    n = prompts.sampling.n
    groups = [rows[start : start + n] for start in range(0, len(rows), n)]  # the responses to each prompt
    by_source: dict[str, list[Sequence[dict[str, Any]]]] = {}
    for group in groups:
        by_source.setdefault(str(group[0]["data_source"]), []).append(group)
    parts = {prompts.name: groups}
    if len(by_source) > 1:
        parts |= {f"{prompts.name}/{source}": by_source[source] for source in sorted(by_source)}
    measures: dict[str, Any] = {}
    for name, part in parts.items():
        part_measures = measure_part(part, pass_score, prompts.reward.strip_reasoning)
        measures |= {f"{name}/{key}": value for key, value in part_measures.items()}
    return measures


def measure_part(part: Sequence[Sequence[dict[str, Any]]], pass_score: float, strip_reasoning: bool) -> dict[str, Any]:
    """Return the measures of a part of a set, by name. ``part``: for each prompt the rows of its responses."""
    measures: dict[str, Any] = {}
    scored = [group for group in part if all(row["score"] is not None for row in group)]
    scored_rows = [row for group in scored for row in group]
    if scored:
        scores = np.array([[row["score"] for row in group] for group in scored], dtype=np.float64)
        has_answers = [any("extracted" in row for row in group) for group in scored]
        votes = [[row.get("extracted") for row in group] for group in scored]
        answers = [texts if has_answer else None for texts, has_answer in zip(votes, has_answers, strict=True)]
        measures |= measure(scores, answers, pass_score)
        if any(has_answers):
            measures["num_no_answer"] = [row["extracted"] for row in scored_rows if "extracted" in row].count(None)
        ci95 = interval(scores)
        measures["ci95"] = None if ci95 is None else list(ci95)
        measures["length_mean"] = float(np.mean([row["length"] for row in scored_rows]))
        measures["clip_ratio"] = float(np.mean([row["finish_reason"] == "length" for row in scored_rows]))
    measures["n"] = len(scored)
    if strip_reasoning:
        measures["num_unclosed_reasoning"] = sum(row.get("stripped", "") is None for row in scored_rows)
    measures["num_unscored"] = len(part) - len(scored)
    measures["num_unanswered"] = sum("error" in group[0] for group in part)
    return measures


def table(results: Mapping[str, Any]) -> str:
    """Return the results as text, with a line per set and a column per measure."""
    names = dict.fromkeys(key.rpartition("/")[0] for key in results)
    columns = sorted({key.rpartition("/")[2] for key in results}, key=_order)
    lines = [["set", *columns]]
    for name in names:
        values = [results.get(f"{name}/{column}") for column in columns]
        lines.append([name, *(_cell(value) for value in values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _order(column: str) -> tuple[int, int, str]:
    kind, _, k = column.partition("@")
    first_kinds = ("n", "mean", "ci95", "pass", "maj")
    return first_kinds.index(kind) if kind in first_kinds else len(first_kinds), int(k or 0), column


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.4f}..{value[1]:.4f}"
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else json.dumps(value)


# keys: the configuration's keys; main: the command line
keys, main = inference_program(
    "evaluate", __doc__, EvaluateConfig, prepare, lambda job, world, board: evaluate(job, world, board.tick)
)


if __name__ == "__main__":
    main()
