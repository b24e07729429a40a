"""``rlhf-spmd``: one command for all programs, what it answers without a run, and ``--help`` of each."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tasks
from places import ROOT
from rlhf_spmd import __main__ as command
from rlhf_spmd import __version__, evaluate, generate, score, serve, sft
from rlhf_spmd.config.load import flatten_yaml, to_yaml
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.process import command_line
from rlhf_spmd.train import read_config

CONFIG = ("--config", str(tasks.task() / "ppo.json"))

train = importlib.import_module("rlhf_spmd.train")  # the package's attribute is the function


def run_here(*arguments: str) -> object:
    """The exit code in this process."""
    with pytest.raises(SystemExit) as ending:
        command.main(arguments)
    return ending.value.code


@pytest.mark.long  # test_serve starts two ranks by this command, test_launcher ranks that train
def test_it_trains_as_ranks_of_torchrun_do_bit_for_bit(tmp_path: Path) -> None:
    """docs/benchmarks.md names this test."""
    layout = ("models.actor.layout.tp=2", "models.critic.layout.dp=2")
    by_command, by_torchrun = tmp_path / "command", tmp_path / "torchrun"
    arguments = ["train", "--nproc-per-node", "2", *CONFIG, *tasks.settings(by_command, 2, *layout)]
    program = tasks.start_program(2, by_torchrun, tasks.settings(by_torchrun, 2, *layout))
    process = subprocess.run(
        [sys.executable, "-m", "rlhf_spmd", *arguments], env=tasks.environment(), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert tasks.finish(program, by_torchrun) == 0, (by_torchrun / "output.txt").read_text()
    assert "\n  2 ranks on cpu, 1 thread each, attention " in process.stderr
    tasks.assert_bit_equal(tasks.read_run(by_command), tasks.read_run(by_torchrun))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "--nproc-per-node=0"), "config error: --nproc-per-node=0: must be a whole number, at least 1"),
        (("train", "--nproc-per-node", "two"), "config error: --nproc-per-node=two: must be .*"),
        (("train", "--config", "x.yaml"), "config error: --config x.yaml and --config .*ppo.json: give one file, .*"),
        (("train", "--nproc-per-node"), "config error: argument --nproc-per-node/--nproc_per_node: expected one argument"),
        (("--config", "x.yaml", "sft"), "--config: the program comes first: rlhf-spmd sft --config .*"),
        (("report",), "config error: no run directory; give .*"),
        (("report", "--serve", "x", "out=y.html"), "config error: out=y.html: --serve writes nothing; .*"),
        (("report", "--porto", "x"), "config error: unrecognized arguments: --porto"),
        (("train", "trainer.total_epochs=3"), r"config error: .*'trainer\.total_epochs'; it is verl's; here: data\.epochs, .*"),
        (("train", "--dry-run", "--nproc-per-node=8", "data.train_batch_size=4"), "config error: .* 8 generation replicas.*"),
        (("plan", "--nproc-per-node", "2"), "config error: --nproc-per-node=2: plan is one process; leave it out"),
        (("plan", "--dry-run"), "config error: --dry-run: plan trains nothing; leave it out"),
        (("summary",), "config error: the following arguments are required: run_dir"),
        (("summary", "configs"), "config error: configs is no run's directory: it has none of .*"),
        (("reward-server",), "config error: the following arguments are required: --function"),
        (("convert", "none.yaml"), "config error: none.yaml: .*"),
        (("trian",), "unknown program 'trian'; did you mean 'train'\\? available: train, sft, generate, .*"),
        (("completion", "tcsh"), "completion tcsh: give a shell: bash, zsh or fish"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = (*CONFIG, f"run.dir={tmp_path}") if arguments[0] in ("train", "plan") else ()
    capfd.readouterr()
    assert run_here(*arguments, *more) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and re.fullmatch(line + r"\n", printed.err), printed.err


def test_one_s_own_modules_are_found_beside_it_as_by_python_m(tmp_path: Path) -> None:
    """A console script has its own directory on the path, not the one it is started in."""
    script, module = tmp_path / "bin" / "rlhf-spmd", tmp_path / "my_project" / "mixed.py"
    script.parent.mkdir(), module.parent.mkdir()
    script.write_text("from rlhf_spmd.__main__ import main\nmain()\n")
    module.write_text("from rlhf_spmd.algorithms.dpo import Config, step\n")
    arguments = [sys.executable, str(script), "train", "--help", "algorithm.name=my_project.mixed"]
    process = subprocess.run(arguments, env=tasks.environment(), capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "  algorithm.label_smoothing = 0.0 (a number, at least 0, below 0.5)" in process.stdout


@pytest.mark.parametrize("key", ["reward.function={}:score", "environment.cls={}:Game", "algorithm.name={}"])
def test_who_starts_ranks_does_not_import_the_users_code_which_could_end_it_well(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise KeyError('imported')\n")
    monkeypatch.setattr(command_line, "start_ranks", lambda ranks_command, size, run_dir: 7)
    assert run_here("train", "--nproc-per-node", "2", *CONFIG, key.format(tmp_path / "mine.py")) == 7


def test_a_file_that_leaves_is_no_good_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(0)\n")
    more = tasks.settings(tmp_path / "run", 1, f"reward.function={tmp_path}/mine.py:score")
    assert run_here("train", "--dry-run", *CONFIG, *more) == 2
    assert "mine.py' cannot be imported: SystemExit: 0" in capsys.readouterr().err


def test_under_torchrun_it_is_a_rank_and_starts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_here("train", "--nproc-per-node", "2", *CONFIG) == 2
    assert "torchrun has started the ranks; leave it out" in capsys.readouterr().err


def test_the_number_of_ranks_is_that_of_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    assert command.ranks_option("train", []) == ["--nproc-per-node", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert command.ranks_option("train", ["run.steps=1", "--dry-run"]) == ["--nproc-per-node", "8"]
    assert command.ranks_option("plan", ["profile"]) == ["--nproc-per-node", "8"]
    for arguments in (["--nproc-per-node=4"], ["--nproc_per_node", "4"], ["--help"], ["--print-config"]):
        assert command.ranks_option("sft", arguments) == []
    assert command.ranks_option("plan", []) == command.ranks_option("report", ["runs/x"]) == []
    assert command.ranks_option("serve", ["model.path=x", "layout.tp=2"]) == ["--nproc-per-node", "2"]
    config = tmp_path / "serve.yaml"
    config.write_text("{model: {path: x}, layout: {tp: 4}}")
    assert command.ranks_option("serve", ["--config", str(config)]) == ["--nproc-per-node", "4"]
    assert command.ranks_option("serve", ["layout.tp=many"]) == ["--nproc-per-node", "8"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert command.ranks_option("train", []) == []


def test_several_launchers_of_srun_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert command.ranks_option("train", ["--nproc-per-node", "2"]) == command.ranks_option("train", ["--help"]) == []
    with pytest.raises(SystemExit) as ending:
        command.ranks_option("train", [])
    assert ending.value.code == 2 and "started 4 of this command" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command.ranks_option("train", []) == []


def test_the_printed_configuration_is_the_one_that_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["sampling.n=3", "models.critic.dtype=bf16"]
    assert run_here("train", "--print-config", *CONFIG, *overrides) == 0
    text = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(text)
    assert read_config(str(tmp_path / "printed.yaml"), [])[0] == read_config(CONFIG[1], overrides)[0]
    assert flatten_yaml(text)["models.critic.dtype"] == "bfloat16"


def test_a_dry_run_says_what_would_run_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tasks.settings(tmp_path / "run", 1, "models.actor.layout.tp=2")
    assert run_here("train", "--dry-run", "--nproc_per_node", "4", *CONFIG, *settings) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for line in (
        r": ppo trains actor .* and critic .* on 20 prompts of .*\n  4 ranks on cpu, ",
        r"^  memory: at most \d+\.\d GiB of [\d.]+ on a rank",
        r"actor +pool all \[0 to 3\], pp\(1\) \* tp\(2\) \* dp\(2\)",
    ):
        assert re.search(line, printed.out, flags=re.MULTILINE), printed.out
    assert not (tmp_path / "run").exists()


def test_shells_complete_programs_and_keys() -> None:
    script = command.completion("bash")

    def complete(*words: str) -> list[str]:
        state = f"COMP_WORDS=(rlhf-spmd {' '.join(words)}); COMP_CWORD={len(words)}"
        text = f"compopt() {{ :; }}\n{script}\n{state}; _rlhf_spmd; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()

    for words, completions in (
        (("ev",), ["evaluate"]),
        (("train", "run.st"), ["run.steps="]),
        (("train", "algorithm.lambda_in"), ["algorithm.lambda_init="]),  # of one algorithm alone
        (("score", "max_tok"), ["max_token_len_per_gpu="]),
        (("train", "--dry"), ["--dry-run"]),
        (("report", "--s"), ["--serve"]),
    ):
        assert complete(*words) == completions
    assert "models.reference.optim.lr=" in complete("train", "models.ref")
    assert not any("<" in word for word in complete("train", ""))
    for shell in ("zsh", "fish"):
        text = command.completion(shell)
        assert "run.steps=" in text and "max_token_len_per_gpu=" in text
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=text, text=True).returncode == 0


def test_without_arguments_it_lists_the_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf-spmd"])
    with pytest.raises(SystemExit) as ending:
        command.main()
    assert ending.value.code == 2
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in command.PROGRAMS)
    for arguments in (["--help"], ["completion", "--help"]):
        assert run_here(*arguments) == 0
        assert "completion bash" in capsys.readouterr().out
    command.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


# -- ``--help``: every key of the configuration, an example that works, once for all ranks


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
