"""docs/tasks.md and the script that does what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import tasks
import word_problems
from places import ROOT
from rlhf_spmd.train import prepare


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ten_tasks", ROOT / "scripts" / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["ten_tasks"] = importlib.util.module_from_spec(spec)  # dataclasses look theirs up
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_the_page_has_ten_tasks_that_each_do_and_promise_something() -> None:
    page = script.read_page()
    assert len(page) == 10
    for name, blocks in page.items():
        assert {block.language for block in blocks} <= {"sh", "text", "python", "yaml"}, name
        assert blocks[-1].language == "text" and any(block.language == "sh" for block in blocks), name
        for block in blocks:
            if block.language == "python":
                compile(block.text, block.file, "exec")
            if block.language == "yaml":
                assert yaml.safe_load(block.text)["run"]["dir"].startswith("runs/tasks/")
                assert block.file.startswith("runs/tasks/")


@pytest.mark.parametrize(
    ("promise", "output", "is_kept"),
    [
        ("reward <0.2 to 0.4> -> ... (done)", "  reward   0.3 -> 0.7 (done)", True),
        ("reward <0.2 to 0.4> -> ... (done)", "reward 0.5 -> 0.7 (done)", False),
        ("reward <0.2 to 0.4>", "reward 0.3 more", False),
        ("a <-1 to 1> b <2 to 3>", "a -2 b 2.5\na 1e-3 b 2.5", True),
        ("a <-1 to 1> b <2 to 3>", "a -2 b 2.5\na 0 b 3.5", False),
        ("one\ntwo", "two\none", True),
        ("one\ntwo", "one", False),
    ],
)
def test_a_promise_is_a_whole_line_with_numbers_in_their_bounds(promise: str, output: str, is_kept: bool) -> None:
    assert (script.missing(promise, output) == []) is is_kept


SERVER = script.OWN_TERMINAL + "exec python runs/tasks/x/it.py\n"
WAITS = "# runs/tasks/x/it.py\nimport time\nprint('ready', flush=True)\n"
WAITS += "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass\n"


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [
        ([("python", "# runs/tasks/x/it.py\nprint(2)\n"), ("sh", "python runs/tasks/x/it.py\n"), ("text", "<2 to 2>\n")], ""),
        ([("sh", "echo 1\n"), ("text", "<2 to 3>\n")], "promised: <2 to 3>\n  there is: 1"),
        ([("sh", "false\necho 1\n"), ("text", "1\n")], "exit status 1"),
        ([("python", WAITS), ("sh", SERVER), ("text", "ready\n"), ("sh", "echo asked\n"), ("text", "asked\n")], ""),
        ([("python", WAITS.replace("pass", "raise")), ("sh", SERVER), ("text", "ready\n")], "after Ctrl-C exit status"),
    ],
)
def test_blocks_are_done_in_order(blocks: list[tuple[str, str]], wrong: str, tmp_path: Path) -> None:
    complaints = script.Terminal(tmp_path, tmp_path / "log").follow([script.Block(*block) for block in blocks])
    assert "".join(complaints).startswith(wrong) and bool(complaints) is bool(wrong)


@pytest.mark.parametrize(("name", "file"), [("own-data-and-reward", "mine.yaml"), ("verls-gsm8k", "sft.yaml")])
def test_what_the_page_writes_can_be_trained_on(name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.quickstart(tmp_path)
    monkeypatch.chdir(tmp_path)
    word_problems.write_task(Path("runs/tasks/verl"), 0, 10, 10, 10)
    files = [block for block in script.read_page()[name] if block.language in ("python", "yaml")]
    script.Terminal(tmp_path, tmp_path / "log").follow(files)
    (rows,) = (block for block in files if block.file.endswith("rows.py"))
    exec(compile(rows.text, rows.file, "exec"), {})
    (config,) = (block.file for block in files if block.file.endswith(file))
    assert prepare(config, ["algorithm.name=sft"] if file == "sft.yaml" else [], 2)
