"""``rlhf_spmd.train(config)``: a run in a process that goes on afterwards."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from cells import run_cell
from reward_functions import length
from rlhf_spmd import train
from rlhf_spmd.config.registry import resolve_function
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.notebook import write_objects
from rlhf_spmd.parallel.device_setup import choose_cpu_matmul
from rlhf_spmd.process.program import ProgramSettings
from rlhf_spmd.rewards.runner import RewardError
from rlhf_spmd.training.train_config import read_config

NOTEBOOK = sys.modules["rlhf_spmd.notebook"]


def configuration(run_dir: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((tasks.task() / "ppo.json").read_text())
    return {**config, "run": {"name": "mine", "dir": f"{run_dir}/${{run.name}}", "steps": 2, "export": False}}


def test_it_trains_as_the_program_does_and_the_process_goes_on(tmp_path: Path) -> None:
    run = train(configuration(tmp_path / "notebook"))
    assert run == tmp_path / "notebook" / "mine"
    tasks.train_alone(tmp_path / "program", 2)
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (run, tmp_path / "program")]
    norms = [[row["actor/grad_norm"] for row in metrics] for metrics in rows]
    assert norms[0] == norms[1] and len(norms[0]) == 2
    assert json.loads((run / "exit_status.json").read_text())["class"] == "done"


def test_the_input_is_checked_with_the_products_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are exact is asked before there is a world."""
    precisions: list[str] = []

    def note(*_: object, **__: object) -> None:
        precisions.append(torch.get_float32_matmul_precision())
        raise ZeroDivisionError

    precision = choose_cpu_matmul()
    monkeypatch.setattr(NOTEBOOK, "prepare", note)
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError):
        train(configuration(tmp_path))
    assert precisions == [precision]


def test_what_is_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'run\.step'; did you mean 'run\.steps'\?"):
        train({"run": {"step": 3}})
    with pytest.raises(ConfigError, match="run"):
        train({"run": object()})
    with pytest.raises(RewardError, match="always_fails"):
        train(configuration(tmp_path) | {"reward": {"function": "outside.rewards:always_fails"}})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one rank; under torchrun start the program"):
        train({})


def test_code_that_leaves_does_not_end_the_caller_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NOTEBOOK, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(NOTEBOOK, "settings_of", lambda _: ProgramSettings(tmp_path))
    monkeypatch.setattr(NOTEBOOK, "run_training", lambda _: sys.exit(0))
    with pytest.raises(RuntimeError, match="the run was left before its end by SystemExit: 0"):
        train({})
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "lost"


def test_the_package_imports_nothing_heavy_and_train_is_the_same_however_it_is_imported() -> None:
    code = "import sys, rlhf_spmd; assert not {'torch', 'numpy', 'omegaconf'} & {*sys.modules}; rlhf_spmd.SamplingParams(n=2); "
    code += "import rlhf_spmd.train; from rlhf_spmd import train; from rlhf_spmd.train import main; "
    code += "assert train is rlhf_spmd.train and train.__doc__.startswith('Run on this process alone')"
    subprocess.run([sys.executable, "-c", code], env=tasks.environment(), check=True, timeout=120)


def cell(text: str, **names: Any) -> dict[str, Any]:
    """What a notebook's cell defines; ``names``: of the cells before."""
    scope = dict(names)
    run_cell(textwrap.dedent(text), scope)
    return scope


def written(run_dir: Path, **config: Any) -> dict[str, Any]:
    return dict(write_objects({"run": {"name": "one", "dir": f"{run_dir}/${{run.name}}"}, **config}))


BEFORE = r"""
    import math
    import re as regex
    import xml.etree.ElementTree
    from dataclasses import dataclass
    from collections import Counter as Tally

    NUMBER = regex.compile(r"(\d+)\n", regex.IGNORECASE)
    LIMIT = {"most": 3}

    @dataclass
    class Parts:
        text: str
        count: int = 0

        def counted(self) -> int:
            return len(Tally(self.text)) + self.count
"""
CELL = """
    import functools

    def twice(number):
        return 2 * number

    doubled = twice

    @functools.cache
    def score(response: str, limit: int = LIMIT["most"]) -> float:
        found = xml.etree.ElementTree.fromstring("<a/>").tag + str(NUMBER.pattern)
        return math.floor(doubled(Parts(response).counted())) + len(found) + limit
"""


def test_a_function_of_a_notebook_is_written_with_all_that_it_uses(tmp_path: Path) -> None:
    """Also decorated, from other cells, by other names; another process finds the same."""
    names = cell(CELL, **cell(BEFORE))
    config = written(tmp_path, reward={"function": names["score"], "weight": 2.0})
    function = config["reward"]["function"]
    assert function.startswith(f"{tmp_path}/one/objects/score-") and config["reward"]["weight"] == 2.0
    assert resolve_function(function)("abca") == names["score"]("abca") == 6 + 8 + 3
    assert written(tmp_path, reward={"function": names["score"]})["reward"]["function"] == function, "a second time it is there"


def test_a_class_is_written_and_what_can_be_imported_is_named(tmp_path: Path) -> None:
    names = cell("""
        from __future__ import annotations
        class Base:
            def reset(self, row: Any) -> str: return "go"
        class Game(Base):
            turns = 3
            def __init__(self, most=2): super().__init__(); self.most = most
            def step(self, text): return Game.turns * self.most
    """)
    environment = {"cls": names["Game"], "args": {"tools": [length, math.sqrt]}}
    config = written(tmp_path, environment=environment, algorithm={"adv": Path("a")})
    game = resolve_function(config["environment"]["cls"])(most=5)
    assert (game.reset({}), game.step("")) == ("go", 15)
    assert config["environment"]["args"]["tools"] == ["reward_functions:length", "math:sqrt"]
    assert config["algorithm"] == {"adv": "a"}


OUTER = """
    limit = open
    class Scorer:
        def __call__(self, response): return 0.0
    scorer, table = Scorer(), object()
    def outer():
        shift = 1.0
        def score(response): return shift
        return score
    def uses(response): return table
    def lacks(response): return nowhere
    inner, short = outer(), lambda response: 0.0
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inner", "score uses shift of the function around it, which its source does not have; write it into a file and give "),
        ("short", "a lambda has no name by which other processes could find it; define it with def, or write it into a file"),
        ("scorer", "an object of type Scorer has no source of its own; give a function or a class, or write it"),
        ("part", "an object of type partial has no source of its own; give a function or a class, or write it"),
        ("uses", "uses uses table, an object of type object, which has no text; make it in uses, or write it into a file"),
        ("lacks", "lacks uses nowhere, which is not defined; write it"),
        ("unseen", "the source of unseen is not there; write it into a file and give FILE.py:unseen"),
    ],
)
def test_what_no_file_can_stand_for_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    names = cell(OUTER)
    names["part"] = functools.partial(names["uses"], 1)
    exec("def unseen(response): return 0.0", names)
    with pytest.raises(ConfigError, match=rf"\Arewards.one.function: {message}[^\n]*\Z"):
        written(tmp_path, rewards={"one": {"function": names[name]}})
    assert not list(tmp_path.iterdir())


def test_rows_are_written_where_data_have_a_path(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a\u2028", "score": math.nan, "more": {"x": [1]}}, {"prompt": "b"}]
    table = datasets.Dataset.from_list([{"prompt": "c"}, {"prompt": "d"}])
    sections = {"path": [rows, "other.jsonl"], "val_path": {"held out": table}, "template": [{"role": "user"}]}
    config = written(tmp_path, data=sections, texts={"path": tuple(rows)})
    data = config["data"]
    first, second = data["path"]
    lines = [
        [json.loads(line) for line in Path(file).read_bytes().splitlines()] for file in (first, data["val_path"]["held out"])
    ]
    assert lines == [[{**rows[0], "score": None}, rows[1]], [{"prompt": "c"}, {"prompt": "d"}]]
    assert second == "other.jsonl" and data["template"] == [{"role": "user"}]
    assert Path(config["texts"]["path"]).read_text() == Path(first).read_text()
    with pytest.raises(ConfigError, match=r"^data.path: a DatasetDict is several data sets; give one of them: 'train'$"):
        written(tmp_path, data={"path": datasets.DatasetDict(train=table)})


def test_a_run_of_objects_can_be_started_again_from_its_config(tmp_path: Path) -> None:
    config: Any = configuration(tmp_path)
    rows = [json.loads(line) for line in Path(config["data"]["path"]).read_text().splitlines()]
    names = cell("def fixed(response, row):\n    return 0.25 + VALUE\n", VALUE=0.5)
    config |= {"reward": {"function": names["fixed"]}, "data": {**config["data"], "path": rows}}
    run = train(config)
    (last, *_) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][::-1]
    assert last["reward/mean"] == 0.75
    again, _ = read_config(run / "config.yaml", ())
    assert Path(again.data.path).parent == run / "objects" and resolve_function(again.reward.function)("", {}) == 0.75


def test_a_file_that_was_edited_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NOTEBOOK, "prepare", lambda *_, **__: 1 / 0)
    name = f"{tmp_path}/mine.py:score"
    for value in (1, 2):
        (tmp_path / "mine.py").write_text(f"def score(response):\n    return {value}  {'#' * value}\n")
        with pytest.raises(ZeroDivisionError):
            train({})
        assert resolve_function(name)("") == value
