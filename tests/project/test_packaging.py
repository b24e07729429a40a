"""What is handed out: the wheel, the versions that it asks for, the notebook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tasks
from cells import run_cell
from places import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_package_and_starts_outside_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = ROOT / "src" / "rlhf_spmd"
    shutil.copytree(package, tmp_path / "src" / "rlhf_spmd", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"  # as pip and uv do
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        packed.extractall(tmp_path / "site")
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(package.parent)) for path in files}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); "]
    command[-1] += "import rlhf_spmd.__main__ as program; print(program.__file__); sys.exit(program.main(['--help']))"
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site")) and "rlhf-spmd train" in done.stdout


def test_versions_are_those_of_pyproject() -> None:
    """The table's oldest ones are its bounds; the constraints name every requirement in its range. Of torch only one build for CPUs
    could be had where the table was made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = json.loads((ROOT / "docs" / "figures" / "versions.json").read_text())
    oldest, newest = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    assert (oldest["set"], newest["set"]) == ("oldest", "newest")
    for line in project["dependencies"]:
        name, bound = line.split(">=")
        assert name == "torch" or re.fullmatch(rf"{re.escape(bound)}(\.0)*", oldest[name]), f"{line}, tested is {oldest[name]}"
    assert all("passed" in row["tests"] and "failed" not in row["tests"] for row in (oldest, newest))
    pins = [Requirement(line) for line in (ROOT / "launch" / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), str(requirement)


def test_the_image_s_stamp_is_the_one_that_the_scripts_look_for() -> None:
    (stamp,) = re.findall(r"^stamp=(.*)$", (ROOT / "scripts" / "environment.sh").read_text(), flags=re.MULTILINE)
    assert f'touch "{stamp}"' in (ROOT / "launch" / "Dockerfile").read_text()


BASE, DEV = "install -q -e .", "install -q -e .[dev]"


@pytest.mark.parametrize(
    ("sourced", "installed"),  # a dot: pyproject.toml changes
    [
        (["", "", "dev", "", "dev"], [BASE, DEV]),
        (["dev", ".", "", "dev", ""], [DEV, BASE, DEV]),
        (["", ".", "dev", ""], [BASE, DEV]),
    ],
)
def test_scripts_install_what_their_job_needs_once_in_any_order(
    tmp_path: Path, sourced: list[str], installed: list[str]
) -> None:
    """With a pip that writes down what it is asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs, log = tmp_path / ".venv" / "bin", tmp_path / "log"
    programs.mkdir(parents=True)
    for name, does in (("python", ""), ("pip", f'echo "$@" >> {log}')):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for extras in sourced:
        if extras == ".":
            with (tmp_path / "pyproject.toml").open("a") as file:
                file.write("# more\n")
            continue
        variable = f"EXTRAS={extras} " * bool(extras)
        command = f"set -euo pipefail; {variable}source scripts/environment.sh; command -v pip"
        ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (0, f"{programs / 'pip'}\n"), ended.stderr
    assert log.read_text().splitlines() == installed


@pytest.mark.long
def test_the_notebook_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path / "docs")
    request.addfinalizer(tasks.leave_world)
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), names)
    printed = capsys.readouterr()
    assert "warning" not in printed.err
    right = [int(percent) for percent in re.findall(r"(\d+)% of sampled validation answers", printed.out)]
    assert len(right) == 5 and 0 < right[0] < right[-1]
    assert printed.out.count("80142> ") == 2, "asked before and after"


def test_the_notebook_s_outputs_are_those_of_its_cells_in_order() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] == "stream" for cell in code for output in cell["outputs"]), "no error"
    assert all(cell["outputs"] for cell in code)
    for cell in notebook["cells"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", "".join(cell["source"])) if cell["cell_type"] == "markdown" else ():
            assert (NOTEBOOK.parent / target).exists(), target
