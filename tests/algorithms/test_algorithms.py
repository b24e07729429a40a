"""Every algorithm, from its file in configs/, is the same run on one rank and in other layouts: responses, metrics, weights."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import tasks
from algorithm_cases import CASES, CONFIGS
from overrides import layout
from ranks import run_ranks

LAYOUTS = ("tp2 dp2 -> tp1", "pp2 dp2", "cp2 dp2")
ON_CP = ("grpo", "dpo", "kto")  # groups that share their prompts, pairs, rows of unequal length
# What differs from an algorithm that is named here in functions of log-probs alone. All ranks of tp have those whole.
AS_OTHERS_ON_TP = {
    *(
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gspo",
        "cispo",
        "sapo with opo",
        "gmpo",
    ),
    *("cost_model", "dpo, robust, by token", "simpo"),
}
RUNS = [(name, where) for name in CASES for where in LAYOUTS[:2] if where != LAYOUTS[0] or name not in AS_OTHERS_ON_TP]
RUNS += [(name, LAYOUTS[2]) for name in ON_CP]


@functools.cache
def run(directory: Path, name: str, where: str) -> tasks.Run:
    case = CASES[name]
    placed: tuple[str, ...] = ()
    if where == LAYOUTS[0]:
        placed = tuple(key for role in case.roles for key in layout(role, tp=2, dp=2))
    elif where == LAYOUTS[1]:
        placed = (
            *(key for role in case.roles for key in layout(role, pp=2, dp=2, zero=1)),
            *case.cut,
            *case.split,
        )
    elif where == LAYOUTS[2]:
        placed = tuple(key for role in case.roles for key in layout(role, cp=2, dp=2, zero=3))
    run_dir = directory / f"{name.replace(' ', '_')}_{LAYOUTS.index(where) if where else 'one_rank'}"
    overrides = tasks.settings(run_dir, case.steps, *case.overrides(), *placed)
    run_ranks(4 if where else 1, tasks.train_here, str(CONFIGS / f"{case.config}.yaml"), overrides)
    return tasks.read_run(run_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.mark.parametrize(("name", "where"), RUNS)
def test_the_same_run(directory: Path, name: str, where: str) -> None:
    """fp64. Sums in another order round differently: 1e-16 of a number, magnified by a loss of digits in differences."""
    one, other = run(directory, name, ""), run(directory, name, where)
    assert sum(row["step"] > 0 for row in one.metrics) == CASES[name].steps and other.responses == one.responses
    difference, what = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}, {where}: metrics {difference:.1e} ({what}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, what
    assert weights < 1e-9, tensor


@pytest.mark.parametrize("name", CASES)
def test_it_learns_something(directory: Path, name: str) -> None:
    """The exported role has moved in every step, so that the comparison above compares more than a start."""
    norms = [row[key] for row in run(directory, name, "").metrics for key in row if key.endswith("/grad_norm")]
    assert len(norms) >= CASES[name].steps and min(norms) > 1e-6
