"""Runs of the scripts in ``scripts/bench``, as a user starts them, for the tests that say which one with ``pytest.mark.script``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

Ran = tuple[dict[str, Any], str]  # the report in JSON, and what was printed


def run_script(out: Path, name: str, *arguments: str, **environment: str) -> Ran:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(ROOT / "scripts" / "bench" / name), *arguments, "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ran]]]:
    """By test, the runs of all tests of this file, two side by side: alone, each leaves other cores idle most of the time. Not those of
    other files, which another worker of pytest may run."""
    directory = tmp_path_factory.mktemp("bench")
    own = [item for item in request.session.items if item.path == request.path]
    marks = {item.nodeid: mark for item in own if (mark := item.get_closest_marker("script"))}
    with ThreadPoolExecutor(2) as pool:
        outs = {test: directory / f"{number}.json" for number, test in enumerate(marks)}
        yield {test: pool.submit(run_script, outs[test], *mark.args[0].split(), **mark.kwargs) for test, mark in marks.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ran(request: pytest.FixtureRequest, scripts: dict[str, Future[Ran]]) -> Ran:
    """What the run of this test's script reports and prints."""
    return scripts[request.node.nodeid].result()
