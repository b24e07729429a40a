"""What ranks say to each other in a store that others can reach: signatures, the key of the job, and the limits of a start."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf_spmd.config.registry import resolve_function
from rlhf_spmd.parallel.launch import JOB_KEY, Launch, connect_store
from rlhf_spmd.process import exit as process_exit
from rlhf_spmd.process import launcher, messages, startup_checks
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.messages import ALL_ENDED, FAILURE, ForgedMessage, Messages, agree_on_key
from rlhf_spmd.telemetry.run_dir import read_exit_status

VERSIONS = startup_checks.versions()


def test_only_what_the_job_has_sealed_is_read() -> None:
    store = dist.HashStore()
    first, other = Messages(store, b"key"), Messages(store, b"another key")
    first.set("a", "text")
    assert first.get("a") == "text" and first.find("b") is None and first.get_all([]) == []
    assert first.put_first("c", "first") == first.put_first("c", "second") == "first"
    store.set("b", store.get("a"))  # under another name
    for name, reader in (("a", other), ("b", first)):
        with pytest.raises(ForgedMessage, match=f"message \\({name}\\) without the signature"):
            reader.get(name)


@pytest.mark.parametrize("text", ["", "ok", '{"class_": "done"}', "0" * 64 + '{"class_": "done"}'])
def test_a_strangers_word_ends_no_job_with_0(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    store.set(FAILURE, text)
    board = Board(Launch(0, 2, 0, 2), store, key=b"key")
    board.run_dir = tmp_path
    with pytest.raises(ForgedMessage):
        board._read_failure()
    board._post(board._failure_of_rank("error", "a stranger"))
    assert board.failure is not None and board.failure.code == 1
    status = read_exit_status(tmp_path)
    assert status is not None and status.code == 1 and capsys.readouterr().err == "a stranger\n"


def test_ranks_end_together_whatever_a_stranger_counts() -> None:
    store = dist.HashStore()
    first, second = (Board(Launch(rank, 2, rank, 2), store, key=b"key") for rank in range(2))
    store.add("board/ended", 1)  # as if a rank had ended
    with ThreadPoolExecutor(1) as others:
        ended = others.submit(first.finish)
        time.sleep(0.3)
        assert not ended.done()
        second.finish()
        ended.result(timeout=30)
    forged = dist.HashStore()
    forged.set(ALL_ENDED, "1")
    with pytest.raises(ForgedMessage):
        Board(Launch(1, 2, 1, 2), forged, key=b"key").finish()


def keys_of(store: dist.Store, place: Path | None, local_size: int) -> list[bytes]:
    with ThreadPoolExecutor(2) as ranks:
        agreed = list(ranks.map(lambda rank: agree_on_key(Launch(rank, 2, rank, local_size), store, place), range(2)))
    for its in agreed:  # as at the end of the agreement
        its.forget_key_file()
    return [its.key for its in agreed]


def test_ranks_get_the_key_of_the_job_through_a_file_that_is_gone_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_KEY, raising=False)
    monkeypatch.setattr(messages.tempfile, "tempdir", str(tmp_path))
    one, another = (keys_of(dist.HashStore(), None, 2) for _ in range(2))
    assert one[0] == one[1] != another[0] and len(one[0]) == 64
    apart = keys_of(dist.HashStore(), tmp_path / "run", 1)
    assert apart[0] == apart[1] and len(apart[0]) == 64
    assert keys_of(dist.HashStore(), None, 1) == [b"", b""]  # nodes that have nothing in common but the store
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setenv(JOB_KEY, "given")
    assert agree_on_key(Launch(1, 2, 0, 1, restart_count=3), dist.HashStore(), None).key == b"3 given"


@pytest.mark.parametrize(
    ("name", "mode", "refusal"),
    [
        ("", 0o600, "rank 0 has no file in .* all nodes must see the same directory"),
        ("../key", 0o600, "rank 0 has no file"),
        ("rlhf_spmd_key_absent", 0o600, "cannot be read .No such file"),
        ("rlhf_spmd_key_open", 0o644, "is not this user's own"),
    ],
)
def test_a_key_from_elsewhere_is_refused(name: str, mode: int, refusal: str, tmp_path: Path) -> None:
    (tmp_path / "rlhf_spmd_key_open").write_text("known to all")
    (tmp_path / "rlhf_spmd_key_open").chmod(mode)
    store = dist.HashStore()
    store.set("key/file", name)
    with pytest.raises(ValueError, match=refusal):
        agree_on_key(Launch(1, 2, 0, 1), store, tmp_path)


def test_the_launchers_store_listens_on_this_machine_alone() -> None:
    store, port = launcher._serve_store()
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    listening = [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
    client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    client.set("a", "b")
    assert store.get("a") == b"b"


def test_a_service_that_never_answers_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        variables = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        since = time.monotonic()
        with pytest.raises(ConnectionError, match=f"no store at 127.0.0.1:{port} within 1 s"):
            connect_store(Launch(1, 2, 1, 2), timeout_s=1.0)
        assert time.monotonic() - since < 20


def test_the_end_is_written_whatever_the_users_code_has_redirected_and_without_a_new_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a thread that starts finds no memory: then its starter would wait for ever."""
    closed, codes = io.StringIO(), list[int]()
    closed.close()
    monkeypatch.setattr(process_exit, "_exit", codes.append)
    with process_exit.ready_to_end(), contextlib.redirect_stderr(closed):
        monkeypatch.setattr(threading.Thread, "start", lambda _: threading.Event().wait())
        process_exit.announce("a\x1b]0;title\x07 b\x9b2J\n c\u202ed", "line\x1b[31m\n\tline")
        process_exit.free_spare_memory()
        process_exit.end_process(0)
    shown = "line\\x1b[31m\n\tline\na\\x1b]0;title\\x07 b\\x9b2J c\\u202ed\n"
    assert capsys.readouterr().err == shown and codes == [0], "nothing that a terminal would obey"


def codes_of_two_nodes(monkeypatch: pytest.MonkeyPatch, places: list[Path | None], signal_number: int = 0) -> list[object]:
    """Returns how the only ranks of two nodes end their agreement, 0: well. ``places``: where each looks for the job's key.
    ``signal_number``: of the signal that came before."""
    store = dist.HashStore()

    def leave(launch: Launch, code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(startup_checks, "connect_store", lambda launch, on_wait: store)
    monkeypatch.setattr(startup_checks, "end_rank", leave)
    monkeypatch.setattr(startup_checks.signal, "signal", lambda *_: None)

    def agree(rank: int) -> object:
        signals = startup_checks.EarlySignals()
        signals.number = signal_number
        try:
            startup_checks.agree_on_input(Launch(rank, 2, 0, 1), dict, dict, places[rank], signals)
        except SystemExit as ending:
            return ending.code
        return 0

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(agree, range(2)))


def test_ranks_with_another_version_are_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch_versions = iter(["2.13", "2.14"])
    monkeypatch.setattr(startup_checks, "versions", lambda: {"version of torch": next(torch_versions)})
    monkeypatch.setenv(JOB_KEY, "key")
    assert codes_of_two_nodes(monkeypatch, [None, None]) == [2, 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"rank . on \S+ has another version of torch than rank . on \S+ \(2.1[34], not 2.1[34]\): .*", line)
    assert {"version of torch", "version of Python", "version of rlhf_spmd (its code)", "kind of device"} == {*VERSIONS}


def test_a_node_that_does_not_see_the_directory_of_the_key_ends_all_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It cannot sign what it says, and the others must not wait for it: half a second here, in place of 30."""
    monkeypatch.delenv(JOB_KEY, raising=False)
    wait = startup_checks.await_all
    monkeypatch.setattr(startup_checks, "await_all", lambda *known_by: wait(*known_by[:-1], known_by[-1] - 29.5))
    (tmp_path / "b").mkdir()
    assert codes_of_two_nodes(monkeypatch, [tmp_path / "a", tmp_path / "b"]) == [2, 2]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("all nodes must see the same directory" in line for line in lines)
    assert not list((tmp_path / "a").glob("rlhf_spmd_key_*")) and (tmp_path / "a" / "exit_status.json").is_file()


def test_a_signal_while_nothing_could_be_ended_ends_the_job_before_it_reads_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_KEY, "key")
    assert codes_of_two_nodes(monkeypatch, [None, None], signal_number=signal.SIGTERM) == [10, 10]


@pytest.mark.parametrize("catches", [False, True], ids=["import fails", "import goes on"])
def test_a_signal_during_an_import_is_no_error_of_the_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, catches: bool
) -> None:
    """The import makes a ValueError of whatever the module raises, and the module may catch it."""
    monkeypatch.setattr(startup_checks, "connect_store", lambda launch, on_wait: dist.HashStore())
    monkeypatch.setattr(startup_checks, "end_rank", lambda launch, code: sys.exit(code))
    signalled = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    caught = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept Exception:\n    pass"
    module = tmp_path / "agent.py"
    module.write_text(f"{caught if catches else signalled}\n\n\ndef run():\n    pass\n")
    prepare = partial(resolve_function, f"{module}:run", "agent")
    with startup_checks.EarlySignals() as signals, pytest.raises(SystemExit) as ending:
        startup_checks.agree_on_input(Launch(), prepare, lambda _: {}, tmp_path, signals)
    assert ending.value.code == 10 and capsys.readouterr().err == "ended by SIGTERM before the first step\n"
    status = read_exit_status(tmp_path)
    assert status is not None and status.class_ == "signal"


@pytest.mark.parametrize("key", ["", "key"])
def test_a_signal_ends_a_rank_that_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str
) -> None:
    """Without a key in the environment it waits for that of rank 0, with one for what the others find. Nobody else comes."""
    monkeypatch.setenv(JOB_KEY, key)
    monkeypatch.setattr(startup_checks, "connect_store", lambda launch, on_wait: dist.HashStore())
    monkeypatch.setattr(startup_checks, "end_rank", lambda launch, code: sys.exit(code))
    monkeypatch.setattr(startup_checks, "await_all", lambda *_: None)
    monkeypatch.setattr(startup_checks, "SIGNAL_GRACE_S", 0.05)
    monkeypatch.setattr(startup_checks, "ANNOUNCE_AFTER_S", 0.05)
    sent = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    sent.start()
    with startup_checks.EarlySignals() as signals, pytest.raises(SystemExit) as ending:
        startup_checks.agree_on_input(Launch(1, 2, 0, 1), dict, dict, tmp_path, signals)
    assert ending.value.code == 10
    *told, line = capsys.readouterr().err.splitlines()
    whom = "the other ranks to check their input" if key else "rank 0 to start"
    assert line.startswith(f"ended by SIGTERM before the first step, while it waited for {whom} [rank 1 on ")
    assert told == [] if key else [f"rank 1 waits for {whom}"]


def test_a_signal_ends_a_rank_that_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        signals, since = startup_checks.EarlySignals(), time.monotonic()
        signals.number = signal.SIGINT
        with pytest.raises(process_exit.EndedBySignal, match=f"SIGINT .* waited for the store at 127.0.0.1:{port}"):
            connect_store(Launch(1, 2, 1, 2), 3.0, lambda whom: signals.while_waiting(Launch(1, 2), whom))
        assert time.monotonic() - since < 20


def test_a_secret_in_the_environment_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/clusters.md has people set it on all machines, where a single process runs too."""
    monkeypatch.setenv(JOB_KEY, "key")
    monkeypatch.delenv("RANK", raising=False)
    assert isinstance(connect_store(Launch()), dist.HashStore)
