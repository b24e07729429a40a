"""Every configuration in the repository loads and passes its checks; every key has a text."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from places import ROOT
from rlhf_spmd.config.keys import Key, help_lines, refusals_of
from rlhf_spmd.config.load import sections_of
from rlhf_spmd.config.registry import available
from rlhf_spmd.train import read_config

generator = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "configuration_page.py")))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PLACEMENTS = sorted((ROOT / "configs" / "placements").glob("*.yaml"))


def test_every_algorithm_and_every_strategy_has_a_config() -> None:
    names = {read_config(str(path), [])[0].algorithm.name for path in CONFIGS}
    assert names == set(available("rlhf_spmd.algorithms", required_attribute="step"))
    strategies = {read_config(str(path), [])[0].placement.strategy for path in PLACEMENTS}
    assert strategies == set(available("rlhf_spmd.planner.strategies", required_attribute="place"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    config, algorithm = read_config(str(path), [])
    assert isinstance(config.algorithm, algorithm.Config)
    assert f"_{config.algorithm.name}_" in f"_{path.stem}_"
    assert set(config.models) <= set(config.algorithm.roles)


@pytest.mark.long
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


def test_the_page_of_keys_has_a_row_for_each_key_with_its_text() -> None:
    """``python scripts/configuration_page.py`` prints it; a key without a text is an error."""
    page = generator.page()
    rows = re.findall(r"^\| `([\w.<>]+)` \| (.*?) \| (.+) \|$", page, flags=re.MULTILINE)
    documented = {(name, text.replace("\\|", "|")) for name, _, text in rows}
    for name in [*generator.algorithms(), *generator.PROGRAMS]:
        for key in generator.keys_of(name):
            assert (key.name, key.text) in documented, f"{name}: {key.name}"
    assert ("run.steps", "`100`") in {row[:2] for row in rows}
    with pytest.raises(ValueError, match=r"a\.b: the docstring of its dataclass has no line '- b: \.\.\.'"):
        generator.row(Key("a.b", "1", "an integer", ""))


def test_help_and_the_page_of_keys_print_what_a_section_refuses() -> None:
    programs = {name: generator.keys_of(name) for name in (*generator.algorithms(), *generator.PROGRAMS)}
    helped = {name: " ".join("\n".join(help_lines(keys, 10_000)).split()) for name, keys in programs.items()}
    page = generator.page()
    for name, keys in programs.items():
        for refusal in (refusal for key in keys for refusal in key.refusals):
            assert f"{refusal.keys}: {' '.join(refusal.why.split())}" in helped[name]
            assert f"` | {refusal.why} |" in page
    assert "refused: sampling.temperature, sampling.n: greedy responses to a prompt are all the same; set n=1" in helped["ppo"]
    assert "| `sampling.temperature, sampling.n` | greedy responses to a prompt are all the same; set n=1" in page
    assert "| `algorithm.kl_ctrl.target_kl, algorithm.kl_ctrl.horizon` | do nothing without type=adaptive |" in page
    for path in CONFIGS:
        config = read_config(str(path), [])[0]
        printed = {refusal.why for key in programs[config.algorithm.name] for refusal in key.refusals}
        for where, section in sections_of(config):
            absent = {refusal.why for refusal in refusals_of(type(section))} - printed
            assert not absent, f"{where}: a rule's first key must be a key of its section: {absent}"


def test_what_a_docstring_says_is_a_key_s() -> None:
    """A line of another name would be about nothing."""
    for path in sorted((ROOT / "src" / "rlhf_spmd").rglob("*.py")):
        for section in ast.walk(ast.parse(path.read_text())):
            if isinstance(section, ast.ClassDef) and re.search("Config$", section.name):
                names = re.findall(r"^- (\w+(?:, \w+)*): ", ast.get_docstring(section) or "", flags=re.MULTILINE)
                assert names == [] or {*", ".join(names).split(", ")} <= fields_of(path, section.name), (
                    f"{path.name} {section.name}"
                )


def fields_of(path: Path, name: str) -> set[str]:
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    return {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
