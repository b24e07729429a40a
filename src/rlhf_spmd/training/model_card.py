"""The model card of an export: ``model_card.md`` filled in with base model, settings, curves and how to load it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.models.hub import NAME
from rlhf_spmd.telemetry.progress import reward_of
from rlhf_spmd.telemetry.run_dir import METRICS_FILE, read_jsonl

ROWS, COLUMNS = 6, 4  # of the table, at most

LOAD = """from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".", dtype="auto")  # the directory of this file"""
LOAD_ADAPTERS = """from peft import PeftModel
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(model, "adapter")  # beside this file"""
CARD = Path(__file__).with_suffix(".md")


def model_card(run_dir: Path, config: Any, base: Path, checkpoint: str, head: str, whole: bool) -> str:
    """Return README.md as the Hub reads it.

    ``config``: the whole configuration. ``checkpoint``: its name, step_N. ``head``: the role's. ``whole``: the export has the
    whole model, not only adapters.
    """
    kind = "AutoModelForSequenceClassification" if head == "value" else "AutoModelForCausalLM"
    last = int(checkpoint.removeprefix("step_"))
    rows = [row for row in read_jsonl(run_dir / METRICS_FILE) if row["step"] <= last]
    trained = config.models[config.algorithm.exported].lora.rank
    source, family = base_names(base)
    beside = " Its low-rank adapters alone are in `adapter`, as PEFT loads them beside the model that they were trained on."
    return CARD.read_text(encoding="utf-8").format(
        base=source,
        base_model=f"base_model: {family}\n" if family else "",
        algorithm=config.algorithm.name,
        name=config.run.name,
        checkpoint=checkpoint,
        adapters=beside if trained and whole else "",
        load=(LOAD if whole else LOAD_ADAPTERS).format(kind=kind, base=source),
        curves=curves(rows),
        config=to_yaml(config),
    )


def base_names(base: Path) -> tuple[str, str | None]:
    """Return how the model in the directory ``base`` is loaded, and the hub's model that it comes from, or None.

    It is loaded by its hub name if it is in the client's cache, else by its path. The hub's model is known from the cache's
    path, or from the directory's own card.
    """
    cached = next((part for part in base.parts if part.startswith("models--")), None)
    if cached is not None and base.parent.name == "snapshots":
        name = cached.removeprefix("models--").replace("--", "/", 1)
        return name, name
    card = base / "README.md"
    head = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2) if card.is_file() else []
    named = re.search(r"^base_model: *(\S+) *$", head[1], flags=re.MULTILINE) if len(head) == 3 and not head[0] else None
    return str(base), named[1] if named and NAME.fullmatch(named[1]) and not Path(named[1]).exists() else None


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a short table of the most telling metrics, of validated steps if there are any. Pure."""
    names = dict.fromkeys(name for row in rows for name in row)
    validation = [name for name in names if name.startswith("val/")]
    shown = [*validation, reward_of(list(names)), *(name for name in names if name.endswith("/loss")), "response_length/mean"]
    columns = [name for name in dict.fromkeys(shown) if name in names][:COLUMNS]
    rows = [row for row in rows if any(name in row for name in validation or columns)]
    picked = sorted({round(i * (len(rows) - 1) / (ROWS - 1)) for i in range(ROWS)}) if rows else []
    lines = [["step", *columns], ["---:"] * (1 + len(columns))]
    for row in map(rows.__getitem__, picked):
        values = [row.get(name) for name in columns]
        lines.append([str(row["step"]), *("" if value is None else f"{value:.4g}" for value in values)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
