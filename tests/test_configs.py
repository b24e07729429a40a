"""Every configuration in the repository loads and passes its checks; every key has a row in the documents."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_spmd.algorithms.ppo import PPOConfig
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.score import ScoreConfig
from rlhf_spmd.sft import SftTrainConfig, ValidationPromptsConfig
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
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def expected(program: str) -> set[str]:
    """The keys that must have a row; sections that the text says to be another program's have none."""
    if program == "train":
        roles = {key.replace("<role>.generation", "actor.generation") for key in keys(RoleConfig, "models.<role>.")}
        calls = {"models.<role>.calls.<method>.pool"}
        return {*keys(TrainConfig), *keys(PPOConfig, "algorithm."), *roles, *calls} - {"models", "models.<role>.calls"}
    if program == "sft":
        own = set(keys(ValidationPromptsConfig)) - set(keys(DataConfig))
        return {*keys(SftTrainConfig), *(f"val_prompts.{key}" for key in own)} - {"val_prompts"}
    if program == "score":
        return set(keys(ScoreConfig))
    refused = {"layout.zero", "layout.vpp", "layout.sequence_parallel"}  # generate allows the defaults only
    return set(keys(GenerateConfig)) - refused


SHARED = {
    "train": ("val_sampling.",),
    "sft": ("run.", "val_sampling.", "reward.", "environment.", "logger.", "model."),
    "generate": ("sampling.", "generation.", "environment."),
    "score": (),
}


@pytest.mark.parametrize("program", SHARED)
def test_every_key_is_documented_and_nothing_else(program: str) -> None:
    pages = re.split(r"^# (\w+)$", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE)
    page = pages[pages.index(program) + 1]
    rows = set(re.findall(r"^\| `([\w.<>]+)` \|", page, flags=re.MULTILINE))
    assert rows == {key for key in expected(program) if not key.startswith(SHARED[program]) and key != "algorithm"}
