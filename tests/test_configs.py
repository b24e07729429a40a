"""Every configuration in the repository loads and passes its checks; every key has a row in the documents."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_spmd.algorithms.ppo import PPOConfig
from rlhf_spmd.config import check_tree, load
from rlhf_spmd.sft import SftTrainConfig
from rlhf_spmd.train import TrainConfig, read_config
from rlhf_spmd.workers.config import RoleConfig

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    if "sft" in path.stem:
        check_tree(load(SftTrainConfig, path))
    else:
        config, algorithm = read_config(str(path), [])
        assert isinstance(config.algorithm, algorithm.Config)
        assert set(config.models) <= set(config.algorithm.roles)


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4


def keys(section: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        if dataclasses.is_dataclass(default):
            yield from keys(type(default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_every_key_is_documented() -> None:
    shared = ("algorithm", "models", "val_sampling")  # the first two depend on the algorithm, the last is as sampling
    expected = [key for key in keys(TrainConfig) if not key.startswith(shared)]
    expected += keys(PPOConfig, "algorithm.")
    expected += [key.replace("<role>.generation", "actor.generation") for key in keys(RoleConfig, "models.<role>.")]
    rows = set(re.findall(r"^\| `([\w.<>]+)` \|", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE))
    rows.add("models.<role>.calls")  # its rows are of what it holds
    assert set(expected) - rows == set()
