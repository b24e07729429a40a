"""Wherever the name of a module or of what is in one is asked for, a file of the user's own may stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.plan import SearchConfig
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import read_config

MINE = '''
from dataclasses import dataclass
from rlhf_spmd.algorithms.base import AlgorithmConfig
@dataclass(frozen=True)
class Config(AlgorithmConfig): ...
class environment:
    def reset(self, row): ...
    def step(self, text): ...
def step(models, data, config, number): ...
def place(graph, cluster, roles): ...
def search(problem, limit, seed): ...
def score(response): return 0.0
def estimate(rewards): return rewards
def loss(log_prob): return log_prob
def tool(x: int) -> int:
    """Twice.

    Args:
        x: A number.
    """
    return 2 * x
'''


def check(section: object) -> None:
    check_tree(section, "section")


Use = Callable[[str], None]
# what takes the name, and what of the module is meant where it does not say; None: it must
FUNCTIONS: dict[str, tuple[Use, str | None]] = {
    "reward.function": (lambda name: check(RewardConfig(function=name)), "score"),
    "environment.cls": (lambda name: check(EnvironmentConfig(cls=name)), "environment"),
    "algorithm.adv_estimator": (lambda name: check(GroupAdvantageConfig(adv_estimator=name)), "estimate"),
    "algorithm.loss_mode": (lambda name: check(PolicyLossConfig(loss_mode=name)), "loss"),
    "tools": (lambda name: check(EnvironmentConfig(cls="tools", args={"tools": [name]})), None),
}
MODULES: dict[str, Use] = {
    "algorithm.name": lambda name: check(read_config(None, [f"algorithm.name={name}", "data.path=a"])),
    "placement.strategy": lambda name: check(PlacementConfig(strategy=name)),
    "plan.search": lambda name: check(SearchConfig(search=name)),
}
ALL = {key: use for key, (use, _) in FUNCTIONS.items()} | MODULES


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine.py", "18:30 mine.py"):
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "own" / name).write_text(MINE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("key", ALL)
def test_a_file_stands_for_a_module(key: str, tmp_path: Path) -> None:
    """One that is not there is one line with the nearest."""
    use, meant = FUNCTIONS.get(key, (ALL[key], ""))
    for file in ("own/mine.py", "./own/mine.py", "own/18:30 mine.py"):
        if meant is not None:
            use(file)
        if meant != "":
            use(f"{file}:{meant or 'tool'}")
    line = rf"'own/mien.py': the file does not exist in {tmp_path}; did you mean 'own/mine.py'[^\n]*\Z"
    with pytest.raises(ValueError, match=line):
        use("own/mien.py" + ("" if key in MODULES else ":tool"))


@pytest.mark.parametrize("key", MODULES)
def test_what_is_a_whole_module_takes_no_name_in_it(key: str) -> None:
    with pytest.raises(ValueError, match=r"'own/mine.py:step' stands for the whole module; leave :step out"):
        MODULES[key]("own/mine.py:step")
    with pytest.raises(ValueError, match=r"\(or your own module: its dotted name, or a file.py\)"):
        MODULES[key]("none_such")
