"""What may be called as a reward, how rows come together in calls, and functions that attack their process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_spmd.config import registry
from rlhf_spmd.config.schema import check_section
from rlhf_spmd.rewards import runner as rewards_runner
from rlhf_spmd.rewards import worker
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.runner import RewardError, RewardRunner


def runner(name, **settings):
    return RewardRunner(RewardConfig(function=f"reward_functions:{name}", **{"timeout_s": 20.0, "default": -9.0, **settings}))


def texts(*responses, **columns):
    return [("p", str(response), dict(columns)) for response in responses]


def test_a_function_in_a_file_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text(  # a name that a module of the library has
        "from dataclasses import dataclass\n@dataclass\nclass Right:\n    score: float = 0.75\n"
        "def right(response):\n    return Right().score\n"
    )
    with RewardRunner(RewardConfig(function=f"{tmp_path}/json.py:right")) as shared:
        assert shared.score(texts("a")).scores == [0.75]
    monkeypatch.chdir(tmp_path)
    RewardConfig(function="json.py:right").check()
    with pytest.raises(ValueError, match=r"reward.function 'jsn.py': the file does not exist in .*; did you mean 'json.py'"):
        RewardConfig(function="jsn.py:right").check()
    with pytest.raises(ValueError, match=r"has no function 'rihgt'; did you mean 'right'\?"):
        RewardConfig(function="json.py:rihgt").check()
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"\Areward.function 'broken.py' cannot be imported: ZeroDivisionError[^\n]*\Z"):
        RewardConfig(function="broken.py:f").check()


@pytest.mark.parametrize(
    ("code", "reason"),
    [("import sys\nsys.exit(0)\n", "SystemExit: 0"), ("raise SystemExit\n", "SystemExit: SystemExit")],
)
def test_a_file_that_ends_its_process_when_it_is_imported_is_refused(tmp_path, code, reason):
    (tmp_path / "ends.py").write_text(code)
    with pytest.raises(ValueError, match=rf"\Areward.function '\S*/ends.py' cannot be imported: {reason}\Z"):
        RewardConfig(function=f"{tmp_path}/ends.py:f").check()


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_file_that_ends_a_worker_when_it_is_imported_ends_the_run(tmp_path, end):
    (tmp_path / "ends.py").write_text(
        f"import os, sys\nif {os.getpid()} != os.getpid():\n    {end}\ndef f(response): return 1.0\n"
    )
    ended = r"(?s)ends.py.*(SystemExit: 0|ended before it was ready .exit code 0.)"
    config = RewardConfig(function=f"{tmp_path}/ends.py:f")
    with pytest.raises(RewardError, match=ended), RewardRunner(config) as shared:
        shared.score(texts(1))


def test_a_file_that_hangs_when_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text(
        "import time\ntry:\n    time.sleep(100)\nexcept Exception:\n    time.sleep(100)\ndef f(response): return 1.0\n"
    )
    config = RewardConfig(function=f"{tmp_path}/hangs.py:f")
    monkeypatch.setattr(registry, "IMPORT_LIMIT_S", 0.3)
    with pytest.raises(ValueError, match=r"hangs.py' cannot be imported: TimeoutError: it has not ended after 0.3 s"):
        config.check()
    monkeypatch.setattr(registry, "IMPORT_LIMIT_S", 60.0)
    (tmp_path / "hangs.py").write_text(
        f"import os, time\nif {os.getpid()} != os.getpid():\n    time.sleep(100)\ndef f(response): return 1.0\n"
    )
    for module in (rewards_runner, worker):
        monkeypatch.setattr(module, "START_LIMIT_S", 3.0)
    with pytest.raises(RewardError, match=r"hangs.py:f' was not ready after 3 s"), RewardRunner(config) as shared:
        shared.score(texts(1))


def test_sys_exit_in_user_code_costs_its_own_row():
    with runner("later") as shared:
        result = shared.score([*texts(1), *texts(2, do="exit"), *texts(3)])
        assert result.scores == [1.0, -9.0, 3.0] and "the function ended by SystemExit: 0" in result.first_error
        assert shared.score(texts(4)).scores == [4.0]
    with pytest.raises(RewardError, match="its constructor failed: SystemExit: 0"), runner("Ends") as shared:
        shared.score(texts(1))


def test_async_functions_are_awaited_together():
    with runner("later", num_workers=2) as shared:
        shared.score(texts(0))
        started = time.monotonic()
        result = shared.score([*texts(*range(60), sleep=0.5), *texts(7, do="raise")])
        assert time.monotonic() - started < 15  # one after the other: 30 s
        assert result.scores == [*map(float, range(60)), -9.0]
        assert (result.failures, result.timeouts) == (1, 0)
        assert result.first_error.startswith("row 60: RuntimeError: broken on purpose (")
        result = shared.score([*texts(1), *texts(7, do="cancel"), *texts(2)])
        assert result.scores == [1.0, -9.0, 2.0] and "cancelled from within" in result.first_error
    with runner("later_batched") as shared:
        assert shared.score(texts(1, 2)).scores == [1.0, 2.0]
    with runner("AsyncScaled") as shared:
        assert shared.score(texts(1, 2)).scores == [1.0, 2.0]


def test_async_rows_have_the_time_limit_each():
    with runner("later", timeout_s=1.0) as shared:
        result = shared.score([*texts(1, 2), *texts(3, do="forever"), *texts(4)])
        assert result.scores == [1.0, 2.0, -9.0, 4.0] and (result.failures, result.timeouts) == (0, 1)
        assert result.first_error == "row 2: no score within reward.timeout_s = 1.0"
        for deaf in ("block", "stubborn"):  # the process is killed, and with it the call's other rows
            result = shared.score([*texts(1), *texts(3, do=deaf)])
            assert result.scores == [-9.0, -9.0] and result.timeouts == 2
        assert shared.score(texts(5)).scores == [5.0]


def test_classes_are_made_once_in_each_process():
    with runner("Scaled", kwargs={"scale": 3.0, "shift": 1.0}) as shared:
        result = shared.score(texts(1, 2))
        assert result.scores == [4.0, 7.0] and [extra["made"] for extra in result.extras] == [
            2.0,
            2.0,
        ]  # one is the module's own
    with runner("scaled") as shared:
        assert shared.score(texts(4)).scores == [8.0]
    with (
        pytest.raises(RewardError, match=r"its constructor failed: ValueError: a scale of 0"),
        runner("Scaled", kwargs={"scale": 0}) as shared,
    ):
        shared.score(texts(1))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Scaled", {}, r"its constructor, with reward.kwargs=\{\}: missing a required argument: 'scale'"),
        ("Scaled", {"kwargs": {"scale": 1, "scal": 2}}, r"its constructor, .*unexpected keyword argument 'scal'"),
        ("NoCall", {}, r"it is a class without __call__"),
        ("generator", {}, r"it is a generator"),
        ("with_settings", {"kwargs": {"bonsu": 1}}, r"kwargs.bonsu is not one of its settings; did you mean 'bonus'\?"),
        (
            "with_settings",
            {"kwargs": {"response": "a"}},
            r"kwargs.response is not one of its settings; its settings are answer, bonus, malus",
        ),
        ("with_settings", {"by_group": True}, r"with reward.by_group it must take lists over rows"),
        (None, {"kwargs": {"a": 1}}, r"reward.kwargs is for a function"),
        (None, {"retokenize": "yes"}, r"reward.retokenize='yes' must be true or false or auto"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(name, settings, message):
    config = RewardConfig(function=name and f"reward_functions:{name}", **settings)
    with pytest.raises(ValueError, match=message) as refused:
        check_section(config, "reward")
    assert "\n" not in str(refused.value)


def test_arguments_from_the_configuration():
    with runner("with_settings", kwargs={"bonus": 2.0}) as shared:
        rows = [("p", "a", {"answer": "a", "bonus": 5.0}), ("p", "b", {"answer": "a"})]
        assert shared.score(rows).scores == [2.0, -0.5]  # before a column of that name
    with pytest.raises(ValueError, match="no row has bonus"):
        RewardConfig(function="reward_functions:with_settings").check_rows("reward", [{"answer": "a"}])
    RewardConfig(function="reward_functions:with_settings", kwargs={"bonus": 1}).check_rows("reward", [{"answer": "a"}])


def test_a_batched_function_gets_one_group_at_a_time():
    rows = [(prompt, "x" * length, {}) for prompt, length in [("a", 1), ("b", 5), ("a", 2), ("b", 4), ("a", 2)]]
    for workers in (1, 2):
        with runner("best_of_group", by_group=True, num_workers=workers) as shared:
            assert shared.score(rows, groups=[7, 3, 7, 3, 7]).scores == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_the_rank_shows_a_sign_of_life_while_it_waits():
    beats = []
    with runner("later") as shared:
        shared.score(texts(1, sleep=1.6), tick=lambda: beats.append(time.monotonic()))
    assert len(beats) >= 3 and max(b - a for a, b in itertools.pairwise(beats)) < 1.2


ATTACKS = {  # what the row gets, and whether it counts as a time-out
    "fill disk": (-9.0, 0),
    "eat memory": (-9.0, 0),
    "close": (-9.0, 0),
    "garbage": (-9.0, 0),
    "block signals": (-9.0, 1),
    "chdir": (1.0, 0),
    "megabytes": (1.0, 0),
    "limits": (1.0, 0),
    "exit later": (-9.0, 0),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_its_own_row(attack, tmp_path, capfd):
    limits = {"max_memory_gb": 1.0, "max_file_gb": 0.01, "timeout_s": 2.0 if attack == "block signals" else 20.0}
    columns = {"path": str(tmp_path / "file")}
    with runner("attack", **limits) as shared:
        rows = [
            *texts(0, 0, do="none"),
            *texts(1, do=attack, **columns),
            *texts(2, do="where", path=os.getcwd()),
            *texts(3, do="none"),
        ]
        result = shared.score(rows)
        score, timeouts = ATTACKS[attack]
        assert result.scores == [0.0, 0.0, score, 1.0, 3.0], result.first_error
        assert (result.failures, result.timeouts) == (int(score < 0) - timeouts, timeouts)
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size <= 0.01 * 2**30


KILLED = """
import os, time
from rlhf_spmd.rewards.runner import RewardConfig, RewardRunner
with RewardRunner(RewardConfig(function="reward_functions:attack")) as runner:
    print(runner.score([("p", "1", {{"do": "orphan", "path": {path!r}}})]).scores, flush=True)
    while not os.path.exists({path!r}) or not os.path.getsize({path!r}):  # else the daemon may end before it has begun
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("end", ["the runner's", "the worker's", "the rank's"])
def test_daemons_that_a_function_leaves_behind_end_with_its_process(tmp_path, end):
    path = str(tmp_path / "pid")
    if end == "the rank's":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        rank = [sys.executable, "-c", KILLED.format(path=path)]
        assert subprocess.run(rank, env=environment, stdout=subprocess.PIPE, text=True).stdout == "[1.0]\n"
        pid = _written(path)
    else:
        with runner("attack") as shared:
            assert shared.score(texts(1, do="orphan", path=path)).scores == [1.0]
            pid = _written(path)
            os.kill(pid, 0)
            if end == "the worker's":
                assert shared.score(texts(1, do="exit later")).failures == 1
                _await_end(pid)
    _await_end(pid)


def _written(path):
    limit = time.monotonic() + 20
    while not os.path.exists(path) or not Path(path).read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    return int(Path(path).read_text())


def _await_end(pid):
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the daemon lives on")


def test_what_a_function_prints_is_cut_and_counted(capfd):
    with runner("attack") as shared:
        assert shared.score(texts(1, do="lines")).scores == [1.0]
        said = capfd.readouterr().err
        shown = said.count(" of many")
        assert len(said) < 70_000 and said.startswith("line 0 of many") and 2_000 < shown < 4_000
        left = int(said.rpartition("... and ")[2].split()[0])
        assert said.endswith(f"{left} more lines of output of reward.function 'reward_functions:attack'\n")
        assert 199_999 <= shown + left <= 200_000
        shared.score(texts(1, do="lines"))
        assert "line 0 of many" in capfd.readouterr().err, "each step has its own limit"


def test_a_mistake_in_the_function_is_shown_with_its_line_and_one_traceback(tmp_path, capfd):
    (tmp_path / "mine.py").write_text("def helper(x):\n    return 1 / 0\n\n\ndef f(response):\n    return helper(response)\n")
    with RewardRunner(RewardConfig(function=f"{tmp_path}/mine.py:f")) as shared:
        result = shared.score(texts(1, 2, 3))
    assert result.first_error == f"row 0: ZeroDivisionError: division by zero ({tmp_path}/mine.py:2 in helper)"
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1 and f'{tmp_path}/mine.py", line 6, in f' in said


def test_errors_of_user_code_do_not_reach_the_terminal_raw(tmp_path, capfd):
    (tmp_path / "mine.py").write_text("def f(response):\n    raise RuntimeError('\\x1b[2J' + response)\n")
    with RewardRunner(RewardConfig(function=f"{tmp_path}/mine.py:f")) as shared:
        result = shared.score([("p", "\x07\nok", {"id": "\x1b]0;title\x07"})])
    assert result.first_error.startswith(r"row \x1b]0;title\x07: RuntimeError: \x1b[2J\x07\nok (")
    assert "\x1b" not in capfd.readouterr().err


def test_a_call_that_a_worker_has_not_got_whole_has_not_begun():
    """A pipe takes 64 KB; the rest is written when the rank comes to it again, which may be later than the limit."""
    rows = texts(*["x" * 200_000] * 4)
    with runner("length", timeout_s=1.0) as scored:
        assert scored.score(texts("a")).timeouts == 0  # the worker has started
        scored.begin(range(4), rows)
        time.sleep(1.5)
        assert scored.score(rows, keys=range(4)).timeouts == 0
