"""The documents' code runs, and what they say of files is so."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import sort_digits
import tasks
from cells import run_cell
from outside.protocol import LAST_FIRST
from places import ROOT
from ranks import run_ranks
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.world import World
from rlhf_spmd.telemetry.run_dir import EXIT_CODES

SOURCE = ROOT / "src" / "rlhf_spmd"
GENERATED = "configuration.md"  # scripts/configuration_page.py makes it for whoever wants it
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != GENERATED)]
APART = ("README.md", "tasks.md")  # their code is trained below, and run by tests/project/test_tasks.py


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def own_algorithm(language: str, first: str) -> str:
    """The block of docs/own_algorithm.md that begins with ``first``."""
    (text,) = (block for block in blocks(ROOT / "docs" / "own_algorithm.md", language) if block.startswith(first))
    return text


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in APART], ids=lambda page: page.stem)
def test_every_block_of_python_runs_and_every_block_of_yaml_can_be_read(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.stem == "python":  # which says that it runs after the quickstart
        tasks.quickstart(tmp_path)
        monkeypatch.chdir(tmp_path)
        request.addfinalizer(tasks.leave_world)
    for block in blocks(page, "python"):
        module = sys.modules["a_document"] = ModuleType("a_document")  # dataclasses look theirs up
        names = vars(module)
        run_cell(block, names)
        if "LAST_FIRST" in names:
            shape: Any = type("Shape", (), {"size": 3})()
            assert names["LAST_FIRST"].collect(shape) == LAST_FIRST.collect(shape) == [2, 1, 0]
    for block in blocks(page, "yaml"):
        assert yaml.safe_load(block)


def test_code_that_is_said_to_be_a_file_s_is() -> None:
    assert own_algorithm("python", '"""GRPO') == (SOURCE / "algorithms" / "grpo.py").read_text()


def test_the_readme_s_file_is_ppo(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "my_ppo.py").write_text(text)
    built_in = tasks.train(1, tmp_path / "ppo", 2)
    tasks.assert_bit_equal(built_in, tasks.train(1, tmp_path / "mine", 2, f"algorithm.name={tmp_path / 'my_ppo.py'}"))


def test_the_table_of_files_of_a_step_tells_their_length() -> None:
    """In all, to a twentieth. Each file exists, and has what it says to start at."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    step = page[page.index("## From the command line") : page.index("## One program")]
    rows = re.findall(r"^\| (`[\w/.]+`(?:, `[\w/.]+`)*) \| (`.+?`) \|", step, flags=re.MULTILINE)
    (total,) = re.findall(r"about ([\d,]+) lines", step)
    length = 0
    for files, starts in rows:
        text = "".join((SOURCE / file).read_text() for file in re.findall(r"`([^`]+)`", files))
        length += len(text.splitlines())
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", starts):
            assert re.search(rf"\b(?:def|class) {name}\b", text), f"{name} is not in {files}"
    assert len(rows) > 20 and length == pytest.approx(int(total.replace(",", "")), rel=0.05)


STEMS = "call order differs|stopped answering|no rank went on for|lost the store that all ranks share|did not finish checking"
STEMS += "|cannot reach the store|preempted at step|interrupted in|failed in|would need|is in use by|is of another experiment"


def test_what_ends_a_run_is_explained() -> None:
    """Lines have a row in troubleshooting, classes in clusters."""
    page, sources = (
        (ROOT / "docs" / "troubleshooting.md").read_text(),
        "".join(path.read_text() for path in SOURCE.rglob("*.py")),
    )
    assert [stem for stem in STEMS.split("|") if stem not in page or stem not in sources] == []
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert [name for name, code in EXIT_CODES.items() if f"| `{name}` | {code} |" not in page] == []


def test_the_site_has_every_page() -> None:
    listed = yaml.safe_load((ROOT / "scripts" / "mkdocs.yml").read_text())["nav"]
    pages = [page for section in listed for group in section.values() for page in group]
    assert sorted(pages) == [page.name for page in PAGES if page.name != "README.md"]


def test_links_lead_to_files_and_headings() -> None:
    """Those of keys too, which docstrings have."""
    generator = runpy.run_path(str(ROOT / "scripts" / "configuration_page.py"))
    for page in PAGES:
        check_links(page, page.read_text())
    check_links(ROOT / "docs" / GENERATED, generator["page"]())


def check_links(page: Path, text: str) -> None:
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text if file == page else file.read_text(), flags=re.MULTILINE)
            names = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in names, f"{page.name}: {target}#{anchor}"


def test_tables_are_those_of_the_figures() -> None:
    done = subprocess.run([sys.executable, "scripts/results/figures.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_programs_and_tests_that_are_named_exist() -> None:
    texts = [page.read_text() for page in PAGES]
    commands = [json.loads(figures.read_text())["command"] for figures in (ROOT / "docs" / "figures").glob("*.json")]
    texts += [command for command in commands if not command.startswith("at commit ")]
    paths = re.findall(r"\b(?:scripts|tests|examples)/[\w/]+\.(?:py|sh)\b", "\n".join(texts))
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.long
def test_the_algorithm_with_all_of_it_learns_on_two_ranks(tmp_path: Path) -> None:
    module, config = own_algorithm("python", "# my_project/mixed.py"), own_algorithm("yaml", "# my_project/mixed.yaml")
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "mixed.py").write_text(module)
    (tmp_path / "my_project" / "mixed.yaml").write_text(config)
    with contextlib.chdir(tmp_path):
        sort_digits.main(["--out", "runs/quickstart/task", "--sft", "200", "--train", "100", "--val", "10"])
        size = json.loads(Path("runs/quickstart/task/model/config.json").read_text())
        write_random_model(Path("runs/quickstart/sft/export"), size, seed=1)
        for file in Path("runs/quickstart/task/model").glob("tokenizer*"):
            Path("runs/quickstart/sft/export", file.name).write_bytes(file.read_bytes())
    # a random model is never right, so the reward is one that differs
    more = ["run.steps=3", "run.test_freq=0", "run.export=false", "data.train_batch_size=8", "sampling.n=2"]
    more += ["reward.function=tasks:even_share", "algorithm.ppo_mini_batch_size=4", "texts.train_batch_size=8"]
    run_ranks(2, train_there, str(tmp_path), more)
    rows = [json.loads(line) for line in (tmp_path / "runs" / "mixed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["actor/text_loss"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    # the first step learns from its own rollout, the second from the same again: another policy by then
    assert rows[0]["actor/ppo_kl_first"] == 0.0 and rows[1]["actor/ppo_kl_first"] != 0.0


def train_there(world: World, directory: str, overrides: list[str]) -> None:
    sys.path.insert(0, directory)
    try:
        with contextlib.chdir(directory):
            tasks.train_here(world, "my_project/mixed.yaml", overrides)
    finally:
        sys.path.remove(directory)
