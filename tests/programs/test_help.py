"""``--help`` of the programs: every key of the configuration, an example that works, once for all ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import tasks
from places import ROOT
from rlhf_spmd import evaluate, generate, score, serve, sft, train
from rlhf_spmd.config.load import flatten_yaml, to_yaml
from rlhf_spmd.parallel.launch import Launch

PROGRAMS = {"train": train, "sft": sft, "generate": generate, "evaluate": evaluate, "score": score, "serve": serve}


def help_of(program: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ending:
        program.main(["--help"])
    assert ending.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty directory, what scripts/quickstart.sh makes, with random weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    tasks.quickstart(tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_example_works_and_every_key_of_it_is_listed(
    name: str, quickstart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(PROGRAMS[name], capsys)
    command = next(part for part in text.replace("\\\n", "").split("\n") if part.startswith("rlhf-spmd"))
    words = shlex.split(command)
    assert words[:4] == ["rlhf-spmd", name, "--nproc-per-node", "2"]
    arguments = words[4:]
    config = arguments[1] if arguments[0] == "--config" else None
    overrides = arguments[2 * (config is not None) :]
    if name in ("train", "sft"):
        ready: Any = train.prepare(config, overrides, 2, "ppo" if name == "train" else "sft")
    else:
        ready = PROGRAMS[name].prepare(config, overrides, Launch(size=2))

    keys = re.findall(r"^  ([\w.<>]+) ", text.partition("keys, their defaults and types:\n")[2], flags=re.MULTILINE)
    assert len(keys) == len(set(keys)) > 20
    tree = yaml.safe_load(to_yaml(ready.config))
    if "models" in tree:
        tree["models"] = {"<role>": next(iter(tree["models"].values()))}
    assert set(flatten_yaml(yaml.safe_dump(tree))) <= set(keys)

    with pytest.raises(SystemExit) as ending:
        PROGRAMS[name].main([*words[2:], "--dry-run"])
    assert ending.value.code == 0 and "2 ranks" in capsys.readouterr().out


def test_types_defaults_and_explanations_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = help_of(train, capsys).splitlines()
    for line in (
        "run.steps = 100 (an integer, at least 1, or null)",
        'data.answer_key = "answer" (text)',
        "algorithm.gamma = 1.0 (a number, at least 0, at most 1)",
        "models.<role>.layout.zero = 0 (0 or 1 or 2 or 3)",
        "models.<role>.optim.betas = [0.9, 0.999] (a list, each entry a number, at least 0, below 1)",
        "placement.pools = {} (a mapping, each value a list, each entry an integer)",
    ):
        assert f"  {line}" in lines
    number = lines.index("  models.<role>.layout.vpp = 1 (an integer, at least 1)")
    assert lines[number + 1] == "      chunks of layers per pipeline rank (interleaved 1F1B), see docs/parallelism.md"
    assert "| keys" not in lines and max(map(len, lines[number:])) < 200
    assert "  model.path must be given (text)" in help_of(generate, capsys).splitlines()


def test_a_word_chooses_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """With the algorithm's own defaults, also in sections."""
    with pytest.raises(SystemExit) as ending:
        train.main(["algorithm.name=rloo", "--help", "kl_ctrl"])
    text = capsys.readouterr().out
    keys = re.findall(r"^  ([\w.<>]+) ", text, flags=re.MULTILINE)
    assert ending.value.code == 0 and keys and all("kl_ctrl" in key for key in keys)
    assert "algorithm.kl_ctrl.kl_coef = 0.05 (a number, at least 0)" in text and "usage" not in text
    with pytest.raises(SystemExit) as ending:
        train.main(["--help", "zebra"])
    assert ending.value.code == 2 and "--help zebra: no key contains that" in capsys.readouterr().err


def test_the_first_rank_alone_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, usages in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert help_of(sft, capsys).count("usage: rlhf-spmd sft") == usages
