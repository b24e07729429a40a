"""The reward for programs, and what its sandbox holds back."""

from __future__ import annotations

import gzip
import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from places import SHARED
from rlhf_spmd.rewards import code, sandbox
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.runner import RewardRunner
from rlhf_spmd.rewards.sandbox import SandboxLimits, run
from tiers import tiers

DATA = SHARED / "data"
ISOLATED = run("pass").isolated
SMALL = SandboxLimits(time_s=1.0, memory_mb=256, processes=8, file_mb=4)
FEW = [("humaneval/test", 40), ("mbpp/all", 160)]
namespaces = pytest.mark.skipif(not ISOLATED, reason="needs user namespaces")


def test_a_program_reads_and_writes_in_an_empty_directory_that_is_removed():
    outcome = run("print(int(input()) + int(input()))", stdin="2\n3\n")
    assert (outcome.output, outcome.exit_code, outcome.error) == ("5\n", 0, "")
    outcome = run("raise KeyError('x')")
    assert outcome.exit_code == 1 and "KeyError" in outcome.error
    program = "import os\nprint(os.getcwd())\nprint(os.listdir('.'))\nopen('left', 'w').write('x')\nprint(sorted(os.environ))"
    directory, listed, environment = run(program).output.splitlines()
    assert listed == "[]" and not Path(directory).exists()
    assert "SCORER" not in environment and "PYTHONPATH" not in environment


def test_tests_are_counted_one_by_one_after_the_program_has_ended():
    outcome = run("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3", "assert f(2) == 3"])
    assert outcome.passed == 2 and "AssertionError" in outcome.error
    for program in ("import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"):
        assert run(program, ["pass"], limits=SMALL).passed == 0


def test_time_memory_files_and_output_are_limited():
    outcome = run("while True: pass", ["pass"], limits=SMALL)
    assert outcome.error == "it used more than 1.0 s of CPU" and outcome.passed == 0
    both = "import os\nos.fork()\nos.fork()\nwhile True: pass"
    assert run(both, limits=SMALL).error == "it used more than 1.0 s of CPU", "of all of them together"
    assert "MemoryError" in run("x = bytearray(2**30)", limits=SMALL).error
    assert "File too large" in run("open('big', 'wb').write(b'x' * 2**24)", limits=SMALL).error
    many = "import itertools, time\nfor i in itertools.count():\n    open(str(i), 'wb').write(b'x' * 2**21)"
    assert "wrote more than 16 MiB" in run(many, limits=SMALL).error
    outcome = run("print('x' * 2**26)", limits=SMALL)
    assert outcome.exit_code != 0 and len(outcome.output) <= 2**22


def test_seconds_of_the_clock_say_nothing_of_the_program(monkeypatch):
    """As on a machine that has no time for it."""
    message = r"had not ended after 1.0 s, in which it got 0.\d s of CPU: it waits, or the machine is"
    with pytest.raises(TimeoutError, match=message):
        run("import time\ntime.sleep(60)", limits=SandboxLimits(wall_s=1.0))
    monkeypatch.setattr(code, "WALL_SECONDS_PER_CPU_SECOND", 0.2)
    slow = "    import time\n    time.sleep(1.5)\n    return 2 * x\n"
    with RewardRunner(RewardConfig(function="code", timeout_s=60.0)) as runner:
        assert runner.score([("", slow, HUMANEVAL)]).scores == [1.0], "1.5 s of which it uses next to nothing"
    with pytest.raises(TimeoutError):
        code.score(slow, HUMANEVAL)


def test_a_judge_that_cannot_start_says_nothing_of_the_program(tmp_path, monkeypatch):
    """As where the system starts no more processes."""
    (tmp_path / "judge.py").write_text("raise BlockingIOError(11, 'Resource temporarily unavailable')\n")
    monkeypatch.setattr(sandbox, "_TESTER", tmp_path / "judge.py")
    with pytest.raises(OSError, match=r"(?s)the judge of the program could not start: .*temporarily unavailable"):
        run("pass")


def test_directories_go_however_deep_and_when_the_worker_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    step = "    os.mkdir('d')\n    open('f', 'w').close()\n    os.chdir('d')\n"
    deep = f"import os\nfor _ in range({{}}):\n{step}os.chmod('.', 0)\n"
    assert run(deep.format(300)).exit_code == 0 and not list(tmp_path.iterdir())
    assert "too many files" in run(deep.format(1500) + "import time\ntime.sleep(60)").error and not list(tmp_path.iterdir())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = "    open('here', 'w').close()\n    while True: pass\n"
    with RewardRunner(RewardConfig(function="code", kwargs={"time_s": 60.0}, timeout_s=3.0)) as runner:
        runner.begin([0], [("", program, HUMANEVAL)])
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/*/here")) and time.monotonic() < deadline:
            runner.advance()
        assert list(tmp_path.glob("*/*/here"))
        runner.abandon()
    assert not list(tmp_path.iterdir())


SOCKETS = """
import asyncio, socket, subprocess, sys
one, other = socket.socketpair()
one.send(b"pair")
print(other.recv(4).decode(), asyncio.run(asyncio.sleep(0, 7)))
tries = [lambda: socket.socketpair(type=socket.SOCK_DGRAM), lambda: socket.socket(socket.AF_UNIX).connect({path!r})]
for each in tries:
    try: print(each())
    except OSError as error: print(error.errno)
code = "import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
print(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode)
"""


def test_servers_are_out_of_reach(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()
        outcome = run(SOCKETS.format(path=str(tmp_path / "server")))
        assert outcome.output == "pair 7\n97\n97\n1\n", outcome.error
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        assert outcome.exit_code == 1 and "OSError" in outcome.error
        socket.create_connection(("127.0.0.1", port), 1).close()


def test_it_cannot_write_elsewhere(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("x")
    outcome = run(f"open('here', 'w').write('x')\nopen('/dev/null', 'w').write('x')\nprint(1)\nopen({str(mine)!r}, 'w')")
    if not ISOLATED and "PermissionError" not in outcome.error:
        pytest.skip("Landlock is not there")
    assert outcome.output == "1\n" and mine.read_text() == "x"
    assert "Error" in run(f"import os\nos.remove({str(mine)!r})").error


@namespaces
def test_it_hurts_no_other_process_and_no_file(tmp_path):
    outcome = run(f"import os\nprint(os.getpid())\nos.kill({os.getpid()}, 0)")
    assert outcome.output == "1\n" and "ProcessLookupError" in outcome.error
    mine = tmp_path / "mine"
    mine.write_text("x")
    before = mine.stat()
    for harm in ("truncate({!r}, 0)", "chmod({!r}, 0)", "utime({!r}, (0, 0))"):
        assert "Error" in run(f"import os\nos.{harm.format(str(mine))}").error, harm
    after = mine.stat()
    assert (after.st_size, after.st_mode, after.st_mtime) == (1, before.st_mode, before.st_mtime)


def test_forks_are_limited_and_end_with_the_program():
    outcome = run("import os, time\nwhile True:\n    os.fork()", limits=SandboxLimits(time_s=20.0, processes=8))
    assert outcome.passed == 0 and ("more than 8 processes" in outcome.error or "Resource temporarily" in outcome.error)
    child = "    os.setsid()\n    if not os.fork():\n        time.sleep(3597)\n    os._exit(0)\n"
    run(f"import os, time\nif not os.fork():\n{child}os.wait()")
    if ISOLATED:
        assert_all_ended()


def assert_all_ended():
    """The kernel ends what is left of a namespace with its first process, on a busy machine a moment later."""
    deadline = time.monotonic() + 20  # far below what the programs take by themselves
    while any(map(_state_of_sandboxed, Path("/proc").glob("[0-9]*"))):
        assert time.monotonic() < deadline, "what the program started lives on"
        time.sleep(0.1)


def _state_of_sandboxed(process):
    try:
        is_ours = b"rlhf_spmd_program_" in (process / "environ").read_bytes()
        return is_ours and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


CHEATS = {
    "globals of the process": """
import os, sys
main = sys.modules["__main__"]
for name in ("verdict", "payload"):
    os.write(getattr(main, name, 1), (getattr(main, "nonce", "1") + "\\n").encode() * 20)
os._exit(0)""",
    "every open file": """
import os
for number in range(3, 64):
    for text in (b"1\\n2\\n", b"[null, true, []]\\n"):
        try: os.write(number, text)
        except OSError: pass""",
    "equal to everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def double(x): return Any()""",
    "other built-in functions": """
import builtins
class same(int):
    pass
builtins.int = builtins.set = same
class Any(int):
    def __eq__(self, other): return True
def double(x): return Any(7)
def json(*a): pass
json.loads = json.dumps = double""",
    "what its process has of the tests": """
import gc
found = []
for thing in gc.get_objects():
    if isinstance(thing, dict):
        for value in list(thing.values()):
            if isinstance(value, (str, list)) and "=" + "= 4" in str(value)[:9999]: found.append(value)
def double(x): return 2 * x if found else None""",
    "memory of the tester": """
import os
def double(x):
    for judge in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"code_tester.py" in open(f"/proc/{judge}/cmdline", "rb").read() and int(judge) != int(os.readlink("/proc/self")):
                open(f"/proc/{judge}/mem", "rb").close()
                return 2 * x
        except OSError: pass""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_cannot_say_that_it_is_right(cheat):
    for row, truth in (
        (HUMANEVAL | {"prompt": "text, not Python:"}, None),
        ({"test_list": MBPP["test_list"]}, None),
        ({}, CALLS),
        ({}, STDIN),
    ):
        assert code.score(CHEATS[cheat], row, truth, partial=True)["score"] == 0.0, (row, truth)


def test_tests_reach_objects_changed_arguments_and_errors_of_the_program():
    program = """
import math
class Node:
    def __init__(self, value): self.value, self.next = value, None
def length(node): return 0 if node is None else 1 + length(node.next)
def push(items): items.append(4)
def fails(x): raise KeyError(x)
def pair(): return (1, {2, 3}), b"x", 1j
def each(): yield from (1, 2)
def drop(items, kind): return [i for i in items if not isinstance(i, kind)]
def sum(a, b): return a + b
root = Node(3)
root.next = Node(4)
math.isclose = lambda *a: True"""
    tests = [
        "assert length(root) == 2 and root.value == 3 and root.next.value == 4",
        "assert length(Node(1)) == 1",
        "items = [1]\npush(items)\nassert items == [1, 4]",
        "try:\n    fails('a')\n    assert False\nexcept KeyError:\n    pass",
        "assert pair() == ((1, {2, 3}), b'x', 1j)",
        "assert list(each()) == [1, 2]",
        "assert drop([1, 'a'], str) == [1]",
        "assert sum(10, 15) == 25",
        "root.value = 5\nassert root.value == 5",
    ]
    outcome = run(program, tests)
    assert outcome.passed == len(tests), outcome.error
    assert run(program, ["assert math.isclose(sum(1, 0), 2)", "assert root == 5", "nothing()"]).passed == 0


HUMANEVAL = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(f):\n    assert f(4) == 8",
}
MBPP = {
    "prompt": "Write a function.",
    "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
    "test_setup_code": "N = 2",
}
STDIN = json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8"]})
CALLS = {"inputs": [[1], [4]], "outputs": [2, 8], "fn_name": "double"}


STATIC = "class Two:\n    n = 2\ndef double(x): return x * Two.n"
FUTURE = "from __future__ import annotations\ndef double(x: No) -> No:\n    return x + x\n"
ADD = {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}
KEYED = {"fn_name": "f", "inputs": [[{"1": 5}]], "outputs": [[5, {"2": 3}]]}


@pytest.mark.parametrize(
    ("response", "row", "truth", "expected"),
    [
        ("    return 2 * x\n", HUMANEVAL, None, 1.0),
        ("    return 3 * x\n", HUMANEVAL, None, 0.0),
        ("Here:\n```python\ndef double(x):\n    return x + x\n```\nDone.", HUMANEVAL, None, 1.0),
        (FUTURE, HUMANEVAL, None, 1.0),
        ("```python\ndef double(x):\n    return N * x\n```", MBPP, None, 1.0),
        ("def double(x): return 2", MBPP, None, 0.0),
        (STATIC, {**MBPP, "test_setup_code": "N = Two.n"}, None, 1.0),
        ("not a program at all", MBPP, None, 0.0),
        ("print(2 * int(input()))", {}, STDIN, 1.0),
        ("print(2)", {}, STDIN, 0.0),
        ("def double(x): return 2 * x", {}, CALLS, 1.0),
        ("def double(x): return 2", {}, json.dumps(CALLS), 0.0),
        ("def double(x): return 2 * x", {}, {**CALLS, "outputs": [[2], [8]]}, 1.0),  # APPS
        ("def double(x): return [2 * x]", {}, {**CALLS, "outputs": [[2], [8]]}, 1.0),
        ("def double(x): return 2 * x", {}, {**CALLS, "outputs": [[2, 1], [8, 1]]}, 0.0),
        ("def add(a, b): return a + b", {}, ADD, 1.0),
        ("class Solution:\n    def double(self, x: int) -> List[int]: return 2 * x", {}, CALLS, 1.0),
        ("class Solution:\n    def triple(self, x): return 2 * x", {}, CALLS, 0.0),
        ("def f(x): return (x[1], {2: 3})", {}, KEYED, 1.0),
        ("print(int(input()) + int(input()))", {}, {"inputs": [["1", "2"]], "outputs": [["3"]]}, 1.0),
    ],
)
def test_rows_of_each_kind(response, row, truth, expected):
    result = code.score(response, row, truth)
    assert result["score"] == expected and result["isolated"] == float(ISOLATED)


def test_a_share_of_the_tests_and_rows_without_any():
    assert code.score("def double(x): return 2", MBPP, partial=True)["score"] == 0.5
    assert code.score("print(2)", {}, STDIN, partial=True)["score"] == 0.5
    with pytest.raises(ValueError, match="the row has no tests"):
        code.score("x", {}, "7")
    for truth, message in (
        ({"inputs": [{"a": 1}], "outputs": ["1"]}, "neither a text nor a list of lines"),
        ({"inputs": ["1 2"], "outputs": ["3"], "fn_name": "f"}, "not a JSON value per line"),
        ({"inputs": [7], "outputs": [3], "fn_name": "f"}, "neither a list of arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            code.score("x", {}, truth)
    with pytest.raises(ValueError, match="is not Python"):
        code.score("x", {"test_list": ["assert ("]})


def test_the_block_that_is_the_program():
    programs = {
        **{"```python\na\n```\nRun:\n```bash\nb\n```": "a\n", "```py\na\n```\nOutput:\n```\n2\n```\n": "a\n"},
        **{"```\na\n```\n```\nb\n```": "b\n", "```Python3\na\n```\n```python\nb\n```": "b\n", "```python\na": "a"},
        **{"````python\nx\n```\ny\n````": "x\n```\ny\n", "```cpp\na\n```": "", "a": "a"},
    }
    assert {response: code.extract(response) for response in programs} == programs


def test_programs_are_scored_in_the_workers_and_what_they_started_is_gone():
    rows = [("", "    return 2 * x\n", HUMANEVAL), ("", "    return 0\n", HUMANEVAL), ("", "x", {"prompt": "p"})]
    with RewardRunner(RewardConfig(function="code", default=-1.0, num_workers=2)) as runner:
        result = runner.score(rows)
        assert result.scores == [1.0, 0.0, -1.0] and result.extras[0] == {"passed": 1.0, "isolated": float(ISOLATED)}
    slow = RewardConfig(function="code", kwargs={"time_s": 60.0}, timeout_s=2.0)
    with RewardRunner(slow) as runner:
        assert runner.score([("", "    import time\n    time.sleep(50)\n", HUMANEVAL)]).timeouts == 1
        assert_all_ended()


def test_runs_side_by_side():
    outputs = {}
    threads = [threading.Thread(target=lambda i=i: outputs.__setitem__(i, run(f"print({i})").output)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(4)}


@pytest.mark.skipif(not DATA.exists(), reason="needs the data sets that lie beside the repository")
@pytest.mark.parametrize("share", tiers([("humaneval/test", 8), ("mbpp/all", 40), *FEW], FEW), ids=str)
def test_reference_solutions_pass_and_broken_ones_do_not(share):
    name, every = share
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][::every]
    assert len(rows) > 4
    for row in rows:
        solution = row.get("canonical_solution") or f"```python\n{row['code']}\n```"
        assert code.score(solution, row)["score"] == 1.0, row["task_id"]
        assert code.score("    return object()\n" if "entry_point" in row else "import os\nos._exit(0)", row)["score"] == 0.0
