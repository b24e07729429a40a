"""Cached keys of programs, answered without torch; and output whose reader has gone."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from rlhf_spmd import __main__ as command
from rlhf_spmd.process import arguments

TORCHLESS = """
import sys
from rlhf_spmd.__main__ import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "transformers", "numpy"} & {*sys.modules}, "imported"
"""

train = importlib.import_module("rlhf_spmd.train")  # the package's attribute is the function


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train --help", "  run.steps = 100 "),
        ("train algorithm.name=grpo --help", "  algorithm.norm_adv_by_std_in_grpo "),
        ("train --help sampling", "  sampling.temperature, sampling.n: "),
        ("plan --json --help", "  plan.search "),
    ],
)
def test_help_is_answered_without_torch_the_second_time(home: Path, words: str, line: str) -> None:
    name, *arguments = words.split()
    with contextlib.redirect_stdout(io.StringIO()) as first, contextlib.suppress(SystemExit):
        command.main([name, *arguments])
    run = [sys.executable, "-c", TORCHLESS, name, *arguments]
    ended = subprocess.run(run, env={**tasks.environment(), "HOME": str(home)}, cwd=home, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, first.getvalue(), ""), ended
    assert line.strip() in " ".join(ended.stdout.split())


def test_the_cache_is_of_these_files_and_of_one_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = home / "package" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(arguments, "PACKAGE", source.parent)
    keys = list(train.keys())
    arguments.cache_keys("train", "about", [], keys)
    text = arguments.cached_help("train", ["--help"])
    assert text == arguments.help_text(arguments.shared_parser("train", "about"), keys, [])
    assert arguments.cached_help("train", ["run.steps=1"]) is arguments.cached_help("sft", ["--help"]) is None
    arguments.cache_keys("train", "about", ["algorithm.name=my.own"], keys)  # any change of that module would be unseen
    assert arguments.cached_help("train", ["--help", "algorithm.name=my.own"]) is None
    monkeypatch.setenv("RANK", "1")  # ranks ask the program
    assert arguments.cached_help("train", ["--help"]) is None
    monkeypatch.delenv("RANK")
    source.write_text("11")
    assert arguments.cached_help("train", ["--help"]) is None
    (home / ".cache/rlhf_spmd/keys/train-usual.json").write_text("{")
    assert arguments.cached_help("train", ["--help"]) is None
    monkeypatch.setenv("HOME", "/dev/null")  # cannot be written to
    arguments.cache_keys("train", "about", [], keys)
    assert arguments.cached_help("train", ["--help"]) is None


PRINTS = """
import sys
from rlhf_spmd.process.arguments import ignore_closed_pipes
ignore_closed_pipes(); ignore_closed_pipes()
for number in range(3):
    print("x" * 100_000)
    print("y" * 10, file=sys.stderr)
sys.stdout.flush()
print("z")
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("program", "stream", "code"),
    [(["-c", PRINTS], "stdout", 3), (["-u", "-c", PRINTS], "stderr", 3), (["-m", "rlhf_spmd", "--help"], "stdout", 0)],
)
def test_a_program_goes_on_without_its_reader(program: list[str], stream: str, code: int) -> None:
    texts = {"stderr": ("x" * 100_000 + "\n") * 3 + "z\n", "stdout": ("y" * 10 + "\n") * 3 if code else ""}
    other = "stderr" if stream == "stdout" else "stdout"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *program], text=True, **{stream: writer, other: subprocess.PIPE})  # type: ignore[call-overload]
    os.close(writer)
    assert (ended.returncode, getattr(ended, other)) == (code, texts[stream])


def test_streams_of_others_are_left_alone() -> None:
    before = sys.stdout, sys.stderr
    arguments.ignore_closed_pipes()
    assert (sys.stdout, sys.stderr) == before
