"""Every configuration in the repository loads and passes its checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_spmd.config import check_tree, load
from rlhf_spmd.sft import SftTrainConfig
from rlhf_spmd.train import read_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


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
