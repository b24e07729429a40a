"""Cached keys of programs, answered without torch; and output whose reader has gone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tasks
from rlhf_spmd import __main__ as command
from rlhf_spmd import generate, plan
from rlhf_spmd.config.keys import check_names
from rlhf_spmd.config.load import read_tree
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.inference.inference_program import read_config
from rlhf_spmd.process import arguments

SLIPS = [
    "run.nme=3",
    "zzz=1",
    "models.actor.lr=1",
    "models.a.generation.pagesize=1",
    "models.a.calls.f.layout.x=1",
    "algorithm.kl_coef=1",
    "rewards.b.judge.x=1",
    "trainer.total_epochs=3",
    "sampling={n: 1, num: 2}",
]
TORCHLESS = """
import sys
from rlhf_spmd.__main__ import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "transformers", "numpy"} & {*sys.modules}, "imported"
"""

train = importlib.import_module("rlhf_spmd.train")  # the package's attribute is the function


@pytest.mark.parametrize("override", SLIPS)
def test_a_slip_is_refused_in_the_program_s_words(override: str) -> None:
    with pytest.raises(ConfigError) as late:
        train.read_config(None, [override])
    with pytest.raises(ConfigError) as early:
        check_names(list(train.keys()), read_tree(None, [override]))
    assert str(early.value) == str(late.value)


def test_what_a_mapping_to_values_has_is_no_key() -> None:
    overrides = ["data.path={a.jsonl: 1}", "reward.kwargs={x: 1}", "placement.pools={a: [0]}", "models.a.path=x", "plan=f"]
    check_names(list(train.keys()), read_tree(None, overrides))
    check_names(
        list(plan.keys()), read_tree(None, ["models.a.spec.vocab_size=1", "cluster.groups=[{nodes: 1}]", "plan.seed=1"])
    )
    with pytest.raises(ConfigError, match=r"'model\.pth'; did you mean 'model\.path'"):
        read_config(generate.GenerateConfig, None, ["model.pth=x"])
    with pytest.raises(ConfigError, match=r"'model\.pth'; did you mean 'model\.path'"):
        check_names(list(generate.keys()), read_tree(None, ["model.pth=x"]))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


SLIP = "config error: unknown key 'run.nme'; did you mean 'run.name'?"


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ("train --help", 0, "  run.steps = 100 "),
        ("train algorithm.name=grpo --help", 0, "  algorithm.norm_adv_by_std_in_grpo "),
        ("plan --help", 0, "  plan.search "),
        ("train --print-config run.nme=3", 2, SLIP),
        ("plan --json run.nme=3", 2, SLIP),
        ("train --config x.yaml", 2, "config error: unknown key 'algorithm.nam'; did you mean 'algorithm.name'?"),
        ("train --config none.yaml", 2, "config error: config file 'none.yaml' does not exist"),
        ("train --nproc-per-node", 2, "config error: argument --nproc-per-node/--nproc_per_node: expected one argument"),
    ],
)
def test_answers_without_torch(home: Path, words: str, status: int, line: str) -> None:
    command.remember_keys("train", train)
    command.remember_keys("plan", plan)
    (home / "x.yaml").write_text("algorithm: {name: grpo, nam: x}")
    run = [sys.executable, "-c", TORCHLESS, *words.split()]
    ended = subprocess.run(run, env={**tasks.environment(), "HOME": str(home)}, cwd=home, capture_output=True, text=True)
    text = ended.stderr if status else ended.stdout
    assert (ended.returncode, line in text, "Traceback" in ended.stderr) == (status, True, False), ended
    assert status == 0 or len(text.splitlines()) == 1


def test_the_cache_is_of_these_files_and_of_one_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command.remember_keys("train", train)
    monkeypatch.setenv("RANK", "1")
    command.answer_early("train", ["run.nme=3"])  # ranks ask the program
    source = home / "package" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(arguments, "PACKAGE", source.parent)
    keys = arguments.ProgramKeys("about", "ppo", {"ppo": list(train.keys())})
    arguments.save_keys("train", keys)
    assert arguments.load_keys("train") == keys and arguments.load_keys("sft") is None
    source.write_text("11")
    assert arguments.load_keys("train") is None
    (home / ".cache/rlhf_spmd/keys/train.json").write_text("{")
    assert arguments.load_keys("train") is None
    monkeypatch.setenv("HOME", "/dev/null")  # cannot be written to
    command.remember_keys("train", train)
    assert arguments.load_keys("train") is None


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
