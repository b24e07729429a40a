"""Every file in configs/placements, which are all strategies and the papers' baselines, gives the numbers of one rank."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

import tasks
from algorithm_cases import CASES, CONFIGS, Case
from ranks import run_ranks

STEPS = 2
PLACEMENTS = sorted(path.stem for path in (CONFIGS / "placements").glob("*.yaml"))
ALGORITHMS = ("ppo", "grpo", "remax", "safe_rlhf")
# three ranks and one
UNEQUAL = {
    "split 1 + 3": "{strategy: split, ratios: {actor: 0.25}}",
    "separate 1 + 3": "{strategy: separate, ratios: {actor.generate_sequences: 0.25}}",
    "interleave 3 + 1": "{strategy: interleave, ratios: {actor: 0.75}}",
}
FIVE_MODELS = (  # of which two share ranks with others
    "placement.pools={last: [3]}",
    *(f"models.{role}.pool=last" for role in ("reference", "cost", "cost_critic")),
)


def overrides_of(name: str, case: Case) -> list[str]:
    """What the file says of placement and layouts, for the roles of ``case``; with another's name the text in UNEQUAL."""
    if name in UNEQUAL:
        return [f"placement={UNEQUAL[name]}"]
    config = yaml.safe_load((CONFIGS / "placements" / f"{name}.yaml").read_text())
    found = [f"placement.strategy={config['placement']['strategy']}"]
    found += [f"placement.ratios={{{call}: {ratio}}}" for call, ratio in config["placement"].get("ratios", {}).items()]
    for role in (*case.roles, *case.frozen):
        layouts = config["models"].get("critic" if role == "cost_critic" else role, {})
        for section in ("layout", "generation"):
            found += [f"models.{role}.{section}.{key}={value}" for key, value in layouts.get(section, {}).items()]
    return found + list(FIVE_MODELS if name == "openrlhf" and "cost_critic" in case.roles else ())


@functools.cache
def run(directory: Path, algorithm: str, placement: str) -> tasks.Run:
    case = CASES[algorithm]
    run_dir = directory / f"{algorithm}_{placement.replace(' ', '_') or 'one_rank'}"
    more = overrides_of(placement, case) if placement else []
    overrides = tasks.settings(run_dir, STEPS, *case.overrides(), *more)
    run_ranks(4 if placement else 1, tasks.train_here, str(CONFIGS / f"{case.config}.yaml"), overrides)
    return tasks.read_run(run_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placements")


# Of the algorithms with other roles or calls than PPO's: where generation has ranks or a layout of its own, and where roles share them.
OWN_GENERATION = {
    "grpo": ["app_separate", "hybridflow_v", "real_heuristic"],
    "remax": ["app_separate", "hybridflow_v", "real_heuristic"],
    "safe_rlhf": ["app_separate", "hybridflow_v", "openrlhf", "nemo_aligner"],
}
PAIRS = [(name, placement) for name in ALGORITHMS for placement in OWN_GENERATION.get(name, PLACEMENTS)]


@pytest.mark.parametrize(("algorithm", "placement"), PAIRS)
def test_the_same_run(directory: Path, algorithm: str, placement: str) -> None:
    compare(directory, algorithm, placement)


@pytest.mark.parametrize("placement", UNEQUAL)
def test_the_same_run_on_unequal_pools(directory: Path, placement: str) -> None:
    compare(directory, "ppo", placement)


def compare(directory: Path, algorithm: str, placement: str) -> None:
    """fp64."""
    one, other = run(directory, algorithm, ""), run(directory, algorithm, placement)
    assert sum(row["step"] > 0 for row in other.metrics) == STEPS and other.responses == one.responses
    difference, what = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{algorithm}, {placement}: metrics {difference:.1e} ({what}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, what
    assert weights < 1e-9, tensor
