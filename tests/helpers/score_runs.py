"""Runs of ``rlhf_spmd.score``, and how far log-probs may be from transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from places import SHARED
from ranks import run_ranks
from rlhf_spmd.parallel.world import World
from rlhf_spmd.score import main, prepare, score

PRETRAINED = SHARED / "models"

TOLERANCE = 5e-5

LAYOUTS = {  # (pp, tp, dp, zero)
    "alone": (1, 1, 1, 0),
    "tp2": (1, 2, 1, 0),
    "pp2": (2, 1, 1, 0),
    "pp2-tp2": (2, 2, 1, 0),
    "dp2-zero3": (1, 1, 2, 3),
    "tp2-dp2-zero3": (1, 2, 2, 3),
    "pp2-dp2-zero1": (2, 1, 2, 1),
}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_here(world: World, overrides: list[str]) -> None:
    score(prepare(None, overrides, world.launch), world)
    world.all.barrier("test:written")


def run_program_in(
    layout: tuple[int, int, int, int], model: Path, data: Path, out: Path, *more: str, cp: int = 1
) -> list[dict[str, Any]]:
    pp, tp, dp, zero = layout
    overrides = [f"model.path={model}", f"data.path={data}", f"out={out}"]
    overrides += [f"layout.pp={pp}", f"layout.tp={tp}", f"layout.dp={dp}", f"layout.zero={zero}", f"layout.cp={cp}", *more]
    if pp * tp * dp * cp == 1:
        main(overrides)
    else:
        run_ranks(pp * tp * dp * cp, run_here, overrides)
    return read_lines(out)


def largest_difference(found: Sequence[dict[str, Any]], expected: Sequence[Sequence[float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for row, wanted in pairs for a, b in zip(row["log_probs"], wanted, strict=True))
