"""Every configuration in the repository loads and passes its checks; every key has a row in the documents."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from places import ROOT
from rlhf_spmd import evaluate, generate, score, sft, train
from rlhf_spmd.algorithms.sft import Config as SftConfig
from rlhf_spmd.config.registry import available
from rlhf_spmd.data.preferences import SafetyPreferencesConfig, UnpairedConfig
from rlhf_spmd.data.prompts import DataConfig, PromptsConfig, ValidationPromptsConfig
from rlhf_spmd.data.sft import SftConfig as SftDataConfig
from rlhf_spmd.evaluate import EvaluateConfig
from rlhf_spmd.generate import GenerateConfig
from rlhf_spmd.score import ScoreConfig
from rlhf_spmd.train import TrainConfig, read_config
from rlhf_spmd.workers.config import RoleConfig

PROGRAMS = {"train": train, "sft": sft, "generate": generate, "evaluate": evaluate, "score": score}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PLACEMENTS = sorted((ROOT / "configs" / "placements").glob("*.yaml"))
PREFERENCES = ("reward_model", "cost_model", "dpo", "kto", "orpo", "simpo", "online_dpo", "safe_rlhf")
ALGORITHMS = available("rlhf_spmd.algorithms", exports="step")


def config_of(name: str) -> type:
    found: type = importlib.import_module(f"rlhf_spmd.algorithms.{name}").Config
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_config(name: str) -> None:
    assert any(read_config(str(path), [])[0].algorithm.name == name for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    config, algorithm = read_config(str(path), [])
    assert isinstance(config.algorithm, algorithm.Config)
    assert f"_{config.algorithm.name}_" in f"_{path.stem}_"
    assert set(config.models) <= set(config.algorithm.roles)


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4 and len(PLACEMENTS) >= 8


def test_presets_fit_and_are_as_their_script_writes_them() -> None:
    """GPUs of 80 GB; the page has each one's memory and seconds."""
    done = subprocess.run([sys.executable, "scripts/presets.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PLACEMENTS, ids=lambda path: path.stem)
def test_a_placement_is_that_of_the_quickstart(path: Path) -> None:
    """But for the placement, and the layouts that go with it."""
    config, usual = read_config(str(path), [])[0], read_config(str(ROOT / "configs" / "quickstart_ppo.yaml"), [])[0]
    assert set(config.models) <= set(config.algorithm.roles)
    for key in ("algorithm", "data", "sampling", "val_sampling", "reward"):
        assert getattr(config, key) == getattr(usual, key)
    assert f"placements/{path.name}" in path.read_text()


def test_every_strategy_has_a_placement() -> None:
    used = {read_config(str(path), [])[0].placement.strategy for path in PLACEMENTS}
    assert used == set(available("rlhf_spmd.planner.strategies", exports="place"))


def keys(section: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))  # also of one that may be null
        section = next((kind for kind in kinds[:2] if dataclasses.is_dataclass(kind)), None)
        if isinstance(section, type):
            yield from keys(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def expected(program: str) -> set[str]:
    """The keys that must have a row; sections that the text says to be another program's have none."""
    if program == "train":
        roles = {key.replace("<role>.generation", "actor.generation") for key in keys(RoleConfig, "models.<role>.")}
        of_algorithms = {key for name in set(ALGORITHMS) - {"sft", *PREFERENCES} for key in keys(config_of(name), "algorithm.")}
        calls = {f"models.<role>.calls.<method>.{key}" for key in ("pool", "delta")}
        whole = {*keys(TrainConfig), *of_algorithms, *keys(DataConfig, "data."), *roles, *calls}
        return whole - {"models", "data", "models.<role>.calls"}
    if program == "preferences":
        own = {key for name in PREFERENCES for key in keys(config_of(name), "algorithm.")}
        data = {key for config in (SafetyPreferencesConfig, UnpairedConfig) for key in keys(config, "data.")}
        return {*own, *data} - {*keys(config_of("ppo"), "algorithm.")}
    if program == "sft":
        own = {f"val_prompts.{key}" for key in set(keys(ValidationPromptsConfig)) - set(keys(PromptsConfig))}
        return {*keys(SftConfig, "algorithm."), *keys(SftDataConfig, "data."), *own} - {"algorithm.name"}
    if program == "score":
        return set(keys(ScoreConfig))
    refused = {"layout.zero", "layout.vpp", "layout.sequence_parallel"}  # which allow the defaults only
    return set(keys(GenerateConfig if program == "generate" else EvaluateConfig)) - refused


SHARED = {
    "train": ("val_sampling.",),
    "preferences": (),
    "sft": (),
    "generate": ("sampling.", "generation.", "environment.", "reward."),
    "evaluate": ("sampling.", "generation.", "reward."),
    "score": (),
}


def page_of(program: str) -> str:
    pages = re.split(r"^# (\w+)$", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE)
    return pages[pages.index(program) + 1]


@pytest.mark.parametrize("program", SHARED)
def test_every_key_is_documented_and_nothing_else(program: str) -> None:
    page = page_of(program)
    rows = set(re.findall(r"^\| `([\w.<>]+)` \|", page, flags=re.MULTILINE))
    assert rows == {key for key in expected(program) if not key.startswith(SHARED[program]) and key != "algorithm"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_documented_defaults_are_those_of_help(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PROGRAMS[program].main(["--help"])
    told = capsys.readouterr().out.replace("models.<name>", "models.<role>")
    defaults = dict(re.findall(r"^  ([\w.<>]+) = (.*) \([^()]*\)$", told, flags=re.MULTILINE))
    checked = 0
    for key, default in re.findall(r"^\| `([\w.<>]+)` \| `([^`]*)` \|", page_of(program), flags=re.MULTILINE):
        key = key.replace("models.actor.generation", "models.<role>.generation")
        if key in defaults:
            assert as_value(default) == as_value(defaults[key]), key
            checked += 1
    assert checked > 10


def as_value(text: str) -> Any:
    """A number by its value: 1e-6 is 1e-06."""
    try:
        return float(text)
    except ValueError:
        return json.loads(text) if text[:1] in '"[{' else text
