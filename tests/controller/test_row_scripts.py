"""Scripts that take, join, pair and keep rows: the same numbers on four ranks, however their roles are placed, as on one."""

from __future__ import annotations

import functools
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tasks
from tiers import tiers

STEPS, N = 2, 3
# script -> its roles beside actor and reward, and the rest of its configuration
SCRIPTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "greedy_baseline": (("judge",), {}),
    "greedy_baseline, one reward call": ((), {"together": True}),
    "filtered_groups": (("reference",), {}),
    "best_of_n": ((), {}),
    "pairs": (("reference",), {}),
    "one_step_late": (("reference",), {}),
    "two_streams": ((), {}),
}
# where -> pools, and for each role the pool and the layout (pp, tp, dp, zero)
PLACES: dict[str, dict[str, tuple[str | None, tuple[int, int, int, int]]]] = {
    "colocated": {
        "actor": (None, (1, 1, 2, 2)),
        "reference": (None, (2, 1, 1, 0)),
        "reward": (None, (1, 1, 2, 0)),
        "judge": (None, (1, 2, 1, 0)),
    },
    "split": {
        "actor": ("0,1", (1, 1, 2, 1)),
        "reference": ("2,3", (1, 2, 1, 0)),
        "reward": ("2,3", (1, 1, 2, 0)),
        "judge": ("2,3", (2, 1, 1, 0)),
    },
    "rewards on ranks of their own": {
        "actor": ("0,1", (1, 1, 2, 0)),
        "reference": ("2", (1, 1, 1, 0)),
        "reward": ("3", (1, 1, 1, 0)),
        "judge": ("2,3", (1, 1, 2, 0)),
    },
}


def config_of(script: str, directory: Path) -> Path:
    """The shared task, with this algorithm in place of PPO, in float64."""
    others, more = SCRIPTS[script]
    name = script.split(",")[0]
    config = json.loads((tasks.task() / "ppo.json").read_text())
    path = {role: config["models"][role]["path"] for role in ("actor", "critic", "reference")}
    config["algorithm"] = {"name": f"outside.{name}", "ppo_mini_batch_size": 4, "ppo_epochs": 2, **more}
    config["models"] = {"actor": {**config["models"]["actor"], "dtype": "float64"}, "reward": {"dtype": "float64"}}
    config["models"] |= {role: {"dtype": "float64", "path": path.get(role, path["critic"])} for role in others}
    config["sampling"] = {"n": N}
    if name == "two_streams":
        text = directory / "text.jsonl"
        rows = ["".join(tasks.VOCABULARY[1 + i * j % 36] for j in range(2, 2 + i % 9 + 2)) for i in range(1, 20)]
        text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        config["pretraining"] = {"path": str(text), "text_key": "text", "train_batch_size": 6}
    file = directory / f"{name}_{len(more)}.json"
    file.write_text(json.dumps(config))
    return file


def placed(script: str, where: str) -> list[str]:
    others, _ = SCRIPTS[script]
    overrides, pools = [], {}
    for role, (pool, layout) in PLACES[where].items():
        if pool == "3" and not others:  # no role is there for rank 2
            pool, layout = "2,3", (1, 1, 2, 0)
        if role in ("actor", "reward", *others):
            overrides += [f"models.{role}.layout.{a}={n}" for a, n in zip(("pp", "tp", "dp", "zero"), layout, strict=True)]
            if pool is not None:
                pools[f"on{pool.replace(',', '')}"] = pool
                overrides.append(f"models.{role}.pool=on{pool.replace(',', '')}")
    return [*overrides, *(f"placement.pools.{name}=[{ranks}]" for name, ranks in pools.items())]


@functools.cache
def run(directory: Path, script: str, where: str | None) -> tasks.Run:
    run_dir = directory / f"{list(SCRIPTS).index(script)}_{where}"
    overrides = [*(placed(script, where) if where else ()), f"run.log_samples={tasks.PROMPTS * (N + 1)}"]
    ranks = 1 if where is None else 2 if where == "colocated" else 4
    return tasks.train(ranks, run_dir, STEPS, *overrides, config=config_of(script, directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


IN_TURN = {
    (script, list(PLACES)[number % len(PLACES)]) for number, script in enumerate(SCRIPTS) if "one reward call" not in script
}


@pytest.mark.parametrize("case", tiers(product(SCRIPTS, PLACES), IN_TURN), ids=", ".join)
def test_the_same_numbers_wherever_the_roles_are(directory: Path, case: tuple[str, str]) -> None:
    script, where = case
    alone, placed_run = run(directory, script, None), run(directory, script, where)
    assert placed_run.responses == alone.responses
    difference, metric = tasks.worst_metric(alone, placed_run, floor=1e-2)
    weights, tensor = tasks.worst_tensor(alone, placed_run)
    print(f"{script}, {where}: metrics {difference:.1e} ({metric}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, metric
    assert weights < 1e-9, tensor
