"""The worker processes of reward functions: order, failures, crashes, time limits, functions that attack their process, clean ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.config import registry
from rlhf_spmd.rewards import runner as rewards_runner
from rlhf_spmd.rewards import sandbox, worker
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.runner import RewardError, RewardRunner


def rows(*actions: Any) -> list[Any]:
    """One row per action: a number to return, the name of an action, or a complete row."""
    named = [
        {"value": action} if isinstance(action, int | float) else {"do": action} if isinstance(action, str) else action
        for action in actions
    ]
    return [("prompt", "response", row) for row in named]


def texts(*responses: Any, **columns: Any) -> list[Any]:
    return [("p", str(response), dict(columns)) for response in responses]


def runner(name: str = "by_row", **settings: Any) -> RewardRunner:
    """Workers whose time limit is one that only rows that hang exceed."""
    return RewardRunner(RewardConfig(function=f"reward_functions:{name}", **{"timeout_s": 20.0, "default": -9.0, **settings}))


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardRunner]:
    """Workers shared by the tests that neither time out nor count processes."""
    with runner(num_workers=2) as shared:
        yield shared


def test_results_come_in_the_order_of_the_rows_however_large_these_are(patient: RewardRunner) -> None:
    values = [float(i) for i in range(300)]
    result = patient.score(rows(*[{"value": v, "sleep": 0.2 if i == 0 else 0} for i, v in enumerate(values)]))
    assert result.scores == values
    assert (result.failures, result.timeouts, result.first_error) == (0, 0, None)
    assert patient.score([]).scores == []
    text = "x" * 200_000  # more than a pipe takes
    assert patient.score([(text, text, {"value": i}) for i in range(12)]).scores == [float(i) for i in range(12)]


DIED = "the worker process ended during the call"
OUTCOMES: list[tuple[Any, float | None, str | None]] = [  # what the function does, its row's score, and why it has failed
    (1, 1.0, None),
    ("raise", -9.0, r"RuntimeError: broken on purpose \(\S*/reward_functions.py:\d+ in by_row\)$"),
    ("exit", -9.0, "SystemExit: 3"),
    ("die", -9.0, rf"{DIED} \(exit code 7\)"),
    (2, 2.0, None),
    ("kill", -9.0, rf"{DIED} \(signal 9\)"),
    ("fork", -9.0, rf"{DIED} \(exit code 7\)"),  # the child lives on with copies of all pipes
    ("twice", 1.0, None),
    ("twice", 1.0, None),
    ("print", -9.0, "KeyError: 'value'.*"),
    ("read", 0.0, None),
    ("none", None, None),  # the function does not apply
    ("nan", -9.0, "ValueError: nan is not finite"),
    ({"do": "power", "value": 39}, -9.0, r"ValueError: 1e\+39 is not finite in float32"),
    ({"do": "power", "value": 400}, -9.0, "OverflowError: .*"),
    ({"do": "power", "value": 38}, 1e38, None),
    ({"do": "return", "value": "5"}, -9.0, "TypeError: '5', a str, is not a number.*"),
    ({"do": "return", "value": {"length": 3}}, -9.0, ".*no 'score', only .'length'..*"),
    ({"do": "return", "value": {"score": 1, "length": 4, "note": "text", "ok": True}}, 1.0, None),
    ({"do": "return", "value": {"score": 0.5, "length": float("inf")}}, 0.5, None),
    ("huge", 1.0, None),
    (3, 3.0, None),
]


def test_a_call_that_fails_costs_its_own_row(patient: RewardRunner) -> None:
    result = patient.score(rows(*(action for action, _, _ in OUTCOMES)))
    assert result.scores == [score for _, score, _ in OUTCOMES], result.errors
    for number, (action, _, reason) in enumerate(OUTCOMES):
        assert (number in result.errors) == (reason is not None), action
        assert reason is None or re.match(rf"{reason}( \(|$)", result.errors[number]), (action, result.errors[number])
    assert (result.failures, result.timeouts) == (sum(reason is not None for _, _, reason in OUTCOMES), 0)
    assert result.first_error == f"row 1: {result.errors[1]}"
    extras = {number: values for number, values in enumerate(result.extras) if values}
    assert list(extras.values()) == [{"length": 4.0, "ok": 1.0}, {"small": 2.0}]
    assert result.extra_sums() == {"length": (4.0, 1), "ok": (1.0, 1), "small": (2.0, 1)}
    named = [(prompt, response, row | {"id": f"aime-{i}"}) for i, (prompt, response, row) in enumerate(rows(1, 2, "raise"))]
    assert patient.score(named[1:], keys=[8, 9]).first_error.startswith("row aime-2: RuntimeError"), "as the data call it"


def test_workers_are_small_and_hash_alike(patient: RewardRunner) -> None:
    result = patient.score(rows(*["modules", "hash"] * 8))
    assert all(extra == {"torch": 0.0, "main": 0.0} for extra in result.extras[::2])
    assert len(set(result.scores[1::2])) == 1


def test_calls_that_overrun_are_killed_and_the_others_go_on() -> None:
    with runner(timeout_s=1.5, num_workers=2) as limited:
        limited.score(rows(1))
        before = set(limited.worker_pids)
        result = limited.score(rows(*range(20), "sleep", *range(20), "hang", 5))
        assert result.scores == [*map(float, range(20)), -9.0, *map(float, range(20)), -9.0, 5.0]
        assert (result.failures, result.timeouts) == (0, 2)
        assert result.first_error == "row 20: no score within reward.timeout_s = 1.5"
        assert len(limited.worker_pids) == 2 and not before & set(limited.worker_pids)
        assert all(_gone(pid) for pid in before)
        # a call of its own: the time limit is not that of the step
        result = limited.score(rows(*[{"value": 1, "sleep": 0.2}] * 20))
        assert result.timeouts == 0 and result.scores == [1.0] * 20
    with runner(timeout_s=1.5) as limited:
        big = "y" * 500_000  # a worker that hangs does not read, and must not block the rank
        result = limited.score([("p", big, {"do": "sleep"}), *[("p", big, {"value": 1})] * 4])
        assert result.scores == [-9.0, 1.0, 1.0, 1.0, 1.0] and result.timeouts == 1


def test_a_call_that_a_worker_has_not_got_completely_has_not_begun() -> None:
    """A pipe takes 64 KB; the rest is written when the rank comes to it again, which may be later than the limit."""
    large = texts(*["x" * 200_000] * 4)
    with runner("length", timeout_s=1.0) as limited:
        assert limited.score(texts("a")).timeouts == 0  # the worker has started
        limited.begin(range(4), large)
        time.sleep(1.5)
        assert limited.score(large, keys=range(4)).timeouts == 0


def test_async_rows_are_awaited_together_and_have_the_time_limit_each() -> None:
    with runner("later", timeout_s=3.0) as shared:
        rows = [*texts(*range(60), together=60), *texts(7, do="raise"), *texts(7, do="cancel"), *texts(7, do="exit")]
        result = shared.score([*rows[:60], *rows[60:], *texts(8)])
        assert result.scores == [*map(float, range(60)), -9.0, -9.0, -9.0, 8.0]
        assert (result.failures, result.timeouts) == (3, 0)
        assert result.first_error.startswith("row 60: RuntimeError: broken on purpose (")
        assert "cancelled from within" in result.errors[61] and "ended by SystemExit: 0" in result.errors[62]
        result = shared.score([*texts(1, 2), *texts(3, do="forever"), *texts(4)])
        assert result.scores == [1.0, 2.0, -9.0, 4.0] and (result.failures, result.timeouts) == (0, 1)
        assert result.first_error == "row 2: no score within reward.timeout_s = 3.0"
        for deaf in ("block", "stubborn"):  # the process is killed, and with it the call's other rows
            result = shared.score([*texts(1), *texts(3, do=deaf)])
            assert result.scores == [-9.0, -9.0] and result.timeouts == 2
        assert shared.score(texts(5)).scores == [5.0]


def test_a_batched_function_gets_a_share_of_the_rows_from_each_worker_or_one_group_at_a_time() -> None:
    with runner("trl_one_bad", num_workers=2) as shared:
        result = shared.score(texts(*range(6), "a"))
        assert result.scores == [*map(float, range(6)), -9.0] and result.failures == 1
    with runner("trl_short", num_workers=2) as shared:
        assert "1 scores were returned for 2 completions" in shared.score(texts(*"abcd")).first_error
    responses = [(prompt, "x" * size, {}) for prompt, size in [("a", 1), ("b", 5), ("a", 2), ("b", 4), ("a", 2)]]
    for workers in (1, 2):
        with runner("best_of_group", by_group=True, num_workers=workers) as shared:
            assert shared.score(responses, groups=[7, 3, 7, 3, 7]).scores == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_the_rank_shows_a_sign_of_life_while_it_waits() -> None:
    beats: list[float] = []
    with runner("later") as shared:
        shared.score(texts(1, sleep=1.6), tick=lambda: beats.append(time.monotonic()))
    assert len(beats) >= 3


def test_a_row_that_is_not_json_is_named() -> None:
    message = r"row 1 for reward.function 'reward_functions:by_row' is not JSON"
    with runner() as shared, pytest.raises(ValueError, match=message):
        shared.score([("p", "r", {"value": 1}), ("p", "r", {"value": object()})])


# -- functions that attack their process

ATTACKS = {  # what their row gets, and whether it counts as a time-out
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


def test_an_attack_costs_its_own_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    with runner("attack", max_memory_gb=1.0, max_file_gb=0.01, timeout_s=4.0) as shared:
        for attack, (score, timeouts) in ATTACKS.items():
            harmless = texts(0, 0, do="none"), [*texts(2, do="where", path=os.getcwd()), *texts(3, do="none")]
            result = shared.score([*harmless[0], *texts(1, do=attack, path=str(path)), *harmless[1]])
            assert result.scores == [0.0, 0.0, score, 1.0, 3.0], (attack, result.first_error)
            assert (result.failures, result.timeouts) == (int(score < 0) - timeouts, timeouts), attack
    assert path.stat().st_size <= 0.01 * 2**30


def test_what_a_function_prints_is_cut_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    with runner("attack") as shared:
        assert shared.score(texts(1, do="lines")).scores == [1.0]
        output = capfd.readouterr().err
        shown = output.count(" of many")
        assert len(output) < 70_000 and output.startswith("line 0 of many") and 2_000 < shown < 4_000
        left = int(output.rpartition("... and ")[2].split()[0])
        assert output.endswith(f"{left} more lines of output of reward.function 'reward_functions:attack'\n")
        assert 199_999 <= shown + left <= 200_000
        shared.score(texts(1, do="lines"))
        assert "line 0 of many" in capfd.readouterr().err, "each step has its own limit"


def test_errors_have_their_line_one_traceback_and_no_control_characters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "def helper(x):\n    raise RuntimeError('\\x1b[2J' + x)\n\n\ndef f(response):\n    return helper(response)\n"
    (tmp_path / "mine.py").write_text(code)
    with RewardRunner(RewardConfig(function=f"{tmp_path}/mine.py:f")) as shared:
        result = shared.score([("p", "\x07\nok", {"id": "\x1b]0;title\x07"}), *texts(2, 3)])
    place = f"({tmp_path}/mine.py:2 in helper)"
    assert result.first_error == rf"row \x1b]0;title\x07: RuntimeError: \x1b[2J\x07\nok {place}"
    output = capfd.readouterr().err
    assert output.count("Traceback") == 1 and f'{tmp_path}/mine.py", line 6, in f' in output and "\x1b" not in output


# -- files that cannot be imported


def test_a_function_in_a_file_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from dataclasses import dataclass\n@dataclass\nclass Right:\n    score: float = 0.75\n"
    (tmp_path / "json.py").write_text(code + "def right(response):\n    return Right().score\n")  # a module of the library
    with RewardRunner(RewardConfig(function=f"{tmp_path}/json.py:right")) as shared:
        assert shared.score(texts("a")).scores == [0.75]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "IMPORT_LIMIT_S", 0.3)
    patient = "import time\ntry:\n    time.sleep(100)\nexcept Exception:\n    time.sleep(100)\n"
    for content, function, message in (
        ("", "jsn.py:right", r"reward.function 'jsn.py': the file does not exist in .*; did you mean 'json.py'"),
        ("", "json.py:rihgt", r"has no function 'rihgt'; did you mean 'right'\?"),
        ("1 / 0", "bad.py:f", r"\Areward.function 'bad.py' cannot be imported: ZeroDivisionError[^\n]*\Z"),
        ("import sys\nsys.exit(0)", "bad.py:f", r"\Areward.function 'bad.py' cannot be imported: SystemExit: 0\Z"),
        ("raise SystemExit", "bad.py:f", r"\Areward.function 'bad.py' cannot be imported: SystemExit: SystemExit\Z"),
        (patient, "bad.py:f", r"bad.py' cannot be imported: TimeoutError: it has not ended after 0.3 s"),
    ):
        (tmp_path / "bad.py").write_text(content)
        with pytest.raises(ValueError, match=message):
            RewardConfig(function=function).check()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("os._exit(0)", r"ended before it was ready .exit code 0."),
        ("raise ImportError('gone')", "ImportError: gone"),
        ("time.sleep(100)", "was not ready after 3 s"),
    ],
)
def test_a_file_that_only_a_worker_cannot_import_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str
) -> None:
    code = f"import os, sys, time\nif {os.getpid()} != os.getpid():\n    {end}\ndef f(response): return 1.0\n"
    (tmp_path / "ends.py").write_text(code)
    if "sleep" in end:
        for module in (rewards_runner, worker):
            monkeypatch.setattr(module, "START_LIMIT_S", 3.0)
    config = RewardConfig(function=f"{tmp_path}/ends.py:f")
    with pytest.raises(RewardError, match=rf"(?s)ends.py.*{message}"), RewardRunner(config) as shared:
        shared.score(texts(1))


# -- ends


def test_workers_survive_signals_between_steps_and_end_with_close() -> None:
    with runner() as shared:
        shared.score(rows(1))
        pids = shared.worker_pids
        for number in (signal.SIGTERM, signal.SIGINT):  # as a scheduler does to all processes of a job
            os.kill(pids[0], number)
        assert shared.score(rows(1, 2)).failures == 0 and shared.worker_pids == pids
        (child,) = sandbox.descendants(pids[0], 10)
        os.kill(child, signal.SIGKILL)
        _wait_until(lambda: _state(pids[0]) == "Z")
        result = shared.score(rows(1, 2, 3))
        assert result.scores == [1.0, 2.0, 3.0] and result.failures == 0, (
            "a worker that died between steps is no call's failure"
        )
        pids = shared.worker_pids
        shared.close()
        assert all(_gone(pid) for pid in pids)
        with pytest.raises(AssertionError, match="closed"):
            shared.score(rows(1))


def test_an_answer_that_a_signal_interrupts_arrives_in_full() -> None:
    """The rank is held up, so that the pipe is full, and a scheduler signals all processes of the job."""

    def hold_up() -> None:
        time.sleep(0.4)
        for keeper in shared.worker_pids:
            for process in sandbox.descendants(keeper, 10):
                os.kill(process, signal.SIGTERM)

    with runner("large_answers") as shared:
        assert shared.score(texts(*range(512)), None, hold_up).scores == [1.0] * 512


RANK = """
from rlhf_spmd.rewards.runner import RewardConfig, RewardRunner
runner = RewardRunner(RewardConfig(function="reward_functions:attack", num_workers=2, timeout_s=600.0))
assert runner.score([("p", "1", {{"do": "orphan", "path": {path!r}}})]).scores == [1.0]
print(*runner.worker_pids, flush=True)
runner.score([("p", "1", {{"do": action}}) for action in ("hang", "block signals")])
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_workers_end_with_the_rank_and_what_a_function_leaves_behind_with_its_worker(tmp_path: Path) -> None:
    """Even during calls that hang; what is left behind is a daemon."""
    paths = [str(tmp_path / name) for name in ("rank", "worker", "runner")]
    command = [sys.executable, "-c", RANK.format(path=paths[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        pids.append(_daemon(paths[0]))
        assert len(pids) == 3 and not any(_gone(pid) for pid in pids)
        rank.kill()
    _wait_until(lambda: all(_gone(pid) for pid in pids))
    with runner("attack") as shared:
        for path in paths[1:]:
            assert shared.score(texts(1, do="orphan", path=path)).scores == [1.0]
            daemon = _daemon(path)
            assert not _gone(daemon)
            if path == paths[1]:
                assert shared.score(texts(1, do="exit later")).failures == 1
                _wait_until(lambda daemon=daemon: _gone(daemon))
    _wait_until(lambda: _gone(daemon))


def _daemon(path: str) -> int:
    _wait_until(lambda: os.path.exists(path) and bool(Path(path).read_text()))
    return int(Path(path).read_text())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _gone(pid: int) -> bool:
    return _state(pid) in ("", "Z")


def _wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "still waiting after the limit"
        time.sleep(0.01)
