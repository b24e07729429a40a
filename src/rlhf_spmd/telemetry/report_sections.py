"""The parts of the report that are text: status, samples, files, configuration. Everything that comes from a run is escaped."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhf_spmd.telemetry.charts import number_text
from rlhf_spmd.telemetry.run_dir import CHECKPOINTS_DIR, EXPORT_DIR, ExitStatus, list_checkpoints

MAX_STEPS = 6  # columns of the validation samples
SAMPLES_PER_STEP = 6
MAX_TEXT = 4000
SHOWN_KEYS = {"step", "row_id", "prompt", "response", "score"}


def legend(colors: Mapping[str, str]) -> str:
    keys = "".join(f'<span class="key" style="--k:{value}">{escape(name)}</span>' for name, value in colors.items())
    return f'<div class="keys">{keys}</div>'


def status_badge(status: ExitStatus | None) -> str:
    if status is None:
        return '<span class="badge">not finished</span>'
    kind = {"done": "good", "preempted": "warn"}.get(status.class_, "bad")
    text = status.class_ if status.class_ in ("done", "preempted") else f"failed: {status.class_}"
    return f'<span class="badge {kind}">{escape(text)}</span>'


def status_message(status: ExitStatus | None) -> str:
    """Nothing for a run that is done; otherwise what stopped it, where, and what to resume from."""
    if status is None or status.class_ == "done":
        return ""
    where = [f"rank {status.rank}" if status.rank is not None else "", f"in {status.call}" if status.call else ""]
    where.append(f"after step {status.step}" if status.step is not None else "")
    head = " ".join(part for part in where if part)
    lines = [f"{head}: {status.message}" if head and status.message else head or status.message]
    if status.last_checkpoint:
        lines.append(f"Last checkpoint: {status.last_checkpoint}")
    kind = " warn" if status.class_ == "preempted" else ""
    return f'<div class="message{kind}">{escape(chr(10).join(line for line in lines if line))}</div>'


def samples_section(rollouts: Sequence[Mapping[str, Any]]) -> str:
    """Samples of the first and of the last step beside each other; the same prompts where both steps have them."""
    by_step: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in rollouts:
        if isinstance(sample.get("step"), int):
            by_step[sample["step"]].append(sample)
    if not by_step:
        return ""
    steps = sorted(by_step)
    first, last = by_step[steps[0]], by_step[steps[-1]]
    columns = [(steps[0], first)] if len(steps) == 1 else [(steps[0], first), (steps[-1], _same_prompts(first, last))]
    drawn = [
        f"<div><h3>Step {step}</h3>{''.join(_sample(sample) for sample in samples[:SAMPLES_PER_STEP])}</div>"
        for step, samples in columns
    ]
    caption = "What the actor wrote at the start and at the end. All that were kept are in rollouts.jsonl."
    return f'<h2>Samples</h2><p class="caption">{caption}</p><div class="columns">{"".join(drawn)}</div>'


def validation_section(samples: Sequence[Mapping[str, Any]]) -> str:
    """The responses to the same prompts at every validation, side by side; of many validations the first, the last and some between."""
    steps = sorted({sample["step"] for sample in samples if isinstance(sample.get("step"), int)})
    if not steps:
        return ""
    shown = sorted({steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)})
    by_prompt: dict[tuple[Any, Any], dict[Any, Mapping[str, Any]]] = defaultdict(dict)
    for sample in samples:
        by_prompt[sample.get("set"), sample.get("row_id")][sample.get("step")] = sample
    lines = []
    for (name, _), its in by_prompt.items():
        first = next(iter(its.values()))
        answer = "" if first.get("answer") is None else f'<div class="extra">answer {escape(_text(first["answer"]))}</div>'
        prompt = f'<pre>{escape(_text(first.get("prompt")))}</pre><div class="extra">{escape(str(name))}</div>{answer}'
        lines.append(f'<tr><td class="sample">{prompt}</td>{"".join(_validated(its.get(step)) for step in shown)}</tr>')
    head = "".join(f"<th>Step {step}</th>" for step in shown)
    caption = "Responses to the same prompts at every validation. All are in validation.jsonl."
    return (
        f'<h2>Validation samples</h2><p class="caption">{caption}</p><div class="card"><table class="validation"><tr><th>Prompt</th>'
        f"{head}</tr>{''.join(lines)}</table></div>"
    )


def _validated(sample: Mapping[str, Any] | None) -> str:
    if sample is None:
        return "<td></td>"
    score = sample.get("score")
    shown = f"score {number_text(score)}" if isinstance(score, (int, float)) else ""
    return f'<td class="sample"><div class="score">{shown}</div><pre>{escape(_text(sample.get("response")))}</pre></td>'


def artifacts_section(directory: Path) -> str:
    """Checkpoints (whole ones have a COMMIT file) and the export."""
    rows = []
    for path in list_checkpoints(directory):
        state = "whole" if (path / "COMMIT").exists() else "not committed"
        rows.append((f"{CHECKPOINTS_DIR}/{path.name}", state, _size(path)))
    export = directory / EXPORT_DIR
    if export.is_dir():
        rows.append((EXPORT_DIR, "Hugging Face directory", _size(export)))
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td class="mono">{escape(n)}</td><td>{escape(s)}</td><td class="number">{z}</td></tr>' for n, s, z in rows
    )
    head = "<tr><th>Directory</th><th>State</th><th></th></tr>"
    return f'<h2>Checkpoints</h2><div class="card"><table>{head}{cells}</table></div>'


def config_section(config: Mapping[str, str], text: str) -> str:
    """The resolved configuration, folded: tables by section, or the text where it could not be parsed."""
    if not text.strip():
        return ""
    if not config:
        body = f'<pre class="config">{escape(text)}</pre>'
    else:
        sections: dict[str, list[str]] = defaultdict(list)
        for key, value in config.items():
            section, _, rest = key.partition(".")
            title = ".".join(key.split(".")[:2]) if section == "models" and rest.count(".") else section
            short = key[len(title) + 1 :] or key
            sections[title].append(f'<tr><td class="mono">{escape(short)}</td><td class="mono">{escape(value)}</td></tr>')
        tables = [
            f'<table><tr><th colspan="2">{escape(title)}</th></tr>{"".join(rows)}</table>' for title, rows in sections.items()
        ]
        body = f'<div class="configs">{"".join(tables)}</div>'
    return f"<h2>Configuration</h2><details><summary>config.yaml, {len(config) or 'unparsed'} values</summary>{body}</details>"


def flatten_config(text: str) -> dict[str, str]:
    """Dotted keys of a YAML text; empty where the text is no mapping."""
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return dict(_leaves(tree, "")) if isinstance(tree, dict) else {}


def _leaves(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{where}.{key}" if where else str(key))
    elif isinstance(value, str):
        yield where, value
    else:
        yield where, json.dumps(value, default=str)


def _same_prompts(first: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    wanted = [sample.get("prompt") for sample in first]
    return sorted(
        last, key=lambda sample: wanted.index(sample.get("prompt")) if sample.get("prompt") in wanted else len(wanted)
    )


def _sample(sample: Mapping[str, Any]) -> str:
    score = sample.get("score")
    shown = f"score {number_text(score)}" if isinstance(score, (int, float)) and not isinstance(score, bool) else ""
    extra = ", ".join(f"{key} {_short(value)}" for key, value in sample.items() if key not in SHOWN_KEYS)
    row = f"row {sample['row_id']}" if "row_id" in sample else ""
    return (
        f'<div class="sample"><div class="head"><span>{escape(row)}</span><span class="score">{escape(shown)}</span></div>'
        f'<pre><span class="prompt">{escape(_text(sample.get("prompt")))}</span>{escape(_text(sample.get("response")))}</pre>'
        + (f'<div class="extra">{escape(extra)}</div>' if extra else "")
        + "</div>"
    )


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [{len(text) - MAX_TEXT} more characters]"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return number_text(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _size(directory: Path) -> str:
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    power = min((len(str(total)) - 1) // 3, 3)
    return f"{total / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}" if power else f"{total} B"
