"""The board without processes: judging heartbeats, the first failure wins, and what a call costs the main thread."""

import io
import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf_spmd.checkpoint.files import hash_tensor
from rlhf_spmd.controller import Controller
from rlhf_spmd.parallel.collectives import RECORDER, solo
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.process.board import JUDGES, Board, announce
from rlhf_spmd.process.failure_detector import Heartbeat, Watch, WatchLimits, group_places


def beat(rank: int, count: int = 1, seq: int = 0, name: str = "", inside: bool = True, **others: object) -> Heartbeat:
    fields = {"state": "running", "step": 3, "site": "ppo.py:31" if name else "", "progress": seq, "pid": 1, "host": "n1"}
    return Heartbeat(rank, count, seq=seq, name=name, inside=inside, **(fields | others))  # type: ignore[arg-type]


def boards(size: int) -> list[Board]:
    store = dist.HashStore()
    return [Board(Launch(rank, size, rank, size), store) for rank in range(size)]


def look(all_boards: list[Board], watch: Watch) -> str | None:
    for board in all_boards:
        board._publish()
    finding = all_boards[watch.self_rank]._look(watch)
    return None if finding is None else finding.message


def test_beat_survives_the_store():
    original = beat(3, seq=17, name="critic.compute_values", calls=[[16, 5], [17, 9]])
    assert Heartbeat.decode(original.encode()) == original


def test_divergence_names_both_call_sites():
    pair = boards(4)
    watch = Watch(0, range(4), WatchLimits())
    for seq in range(1, 17):
        for board in pair:
            board.enter_call(seq, "actor.update_actor", "ppo.py:40")
    assert look(pair, watch) is None
    for board in pair[:3]:
        board.enter_call(17, "reward.compute_reward", "ppo.py:33")
    pair[3].enter_call(17, "critic.compute_values", "ppo.py:31")
    assert look(pair, watch) == (
        "call order differs: rank 3 entered critic.compute_values (ppo.py:31) as call 17, "
        "rank 0 entered reward.compute_reward (ppo.py:33); a script may branch only on replicated values"
    )


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_may_run_ahead_of_each_other_and_divergence_is_still_found(ahead):
    """One rank is 300 calls ahead (more than a heartbeat carries); the other catches up and takes another branch at call 250."""
    pair = boards(2)
    watch = Watch(0, range(2), WatchLimits())

    def walk(board: Board, until: int, odd: int = 0) -> None:
        for seq in range(board.call[0] + 1, until + 1):
            board.enter_call(seq, "odd.one" if seq == odd else "actor.update_actor", "ppo.py:1")

    for seq in range(20, 301, 20):
        walk(pair[ahead], seq)
        assert look(pair, watch) is None
    for seq in range(20, 250, 20):
        walk(pair[1 - ahead], seq)
        assert look(pair, watch) is None
    walk(pair[1 - ahead], 250, odd=250)
    message = look(pair, watch)
    assert message is not None and "as call 250" in message and "odd.one" in message


def test_the_first_call_is_compared_too():
    pair = boards(2)
    Controller(solo(0), pair[0]).decide(False)
    Controller(solo(1), pair[1]).get()
    message = look(pair, Watch(0, range(2), WatchLimits()))
    assert message is not None and "rank 1 entered controller.get (" in message and "as call 1, rank 0" in message


def test_a_script_that_returns_early_on_one_rank_is_told_at_its_end():
    """It may then wait for messages, so its end counts as a call."""
    pair = boards(2)

    def script(controller: Controller, calls: int) -> None:
        for _ in range(calls):
            controller.decide(False)

    for board, calls in zip(pair, (2, 1), strict=True):
        controller = Controller(solo(board.launch.rank), board)
        controller.run(script, controller, calls)
    message, site = look(pair, Watch(0, range(2), WatchLimits())), rf"test_board\.py:{script.__code__.co_firstlineno + 2}"
    ended = rf"rank 1 entered controller\.settle \(end of the script after {site}\) as call 2"
    assert message is not None and re.search(rf"{ended}, rank 0 entered controller\.decide \({site}\)", message)


def test_a_call_that_a_beat_names_is_in_the_log_by_then():
    """Rank 0 may look between the two messages of a heartbeat: it must have the words of the call it judges."""
    looked_after: list[str] = []

    class Store(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.endswith("/1"):
                finding = pair[0]._look(watch)
                looked_after.append(f"{key}: {finding.call if finding else 'nothing'}")

    store, watch = Store(), Watch(0, range(2), WatchLimits())
    pair = [Board(Launch(rank, 2, rank, 2), store) for rank in range(2)]
    pair[0].enter_call(1, "reward.compute_reward", "ppo.py:33")
    pair[0]._publish()
    pair[1].enter_call(1, "critic.compute_values", "ppo.py:31")
    pair[1]._publish()
    assert looked_after == ["board/log/1: nothing", "board/beat/1: critic.compute_values"]


def test_a_rank_that_ended_while_another_entered_a_further_call():
    watch = Watch(0, range(2), WatchLimits())
    beats = {0: beat(0, seq=41, name="actor.update_actor"), 1: beat(1, seq=40, name="x.y", state="ended")}
    finding = watch.judge(0.0, beats, [], False, lambda rank, seq: "")
    assert finding is not None and finding.rank == 1
    assert "rank 1 ended the script after call 40, rank 0 entered actor.update_actor (call 41" in finding.message
    # the same number of calls: the slower one is only finishing
    beats[0] = beat(0, seq=40, name="x.y")
    assert Watch(0, range(2), WatchLimits()).judge(0.0, beats, [], False, lambda rank, seq: "") is None


@pytest.mark.parametrize(("suspect", "expected"), [(False, 20.0), (True, 6.0)])
def test_lost_rank(suspect, expected):
    watch = Watch(0, range(3), WatchLimits())
    found = None
    for tick in range(100):
        now = tick * 0.5
        # progress goes on elsewhere; rank 2 is silent from tick 10 on
        beats = {
            r: beat(r, count=tick if r < 2 else min(tick, 10), seq=17, name="actor.update_actor", progress=tick)
            for r in range(3)
        }
        found = watch.judge(now, beats, [], suspect, lambda rank, seq: "")
        if found is not None:
            break
    assert found is not None and found.rank == 2 and found.silent
    assert now - 5.0 == pytest.approx(expected, abs=0.6)
    assert found.message.startswith("rank 2 stopped answering in actor.update_actor (call 17, ppo.py:31, step 3)")


def test_a_rank_that_has_not_started_hides_none_that_is_lost():
    """It is given three times as long."""
    watch, found = Watch(0, range(3), WatchLimits()), None
    for tick in range(200):
        beats = {0: beat(0, count=tick, progress=tick), 1: beat(1, count=min(tick, 6))}
        found = watch.judge(tick * 0.5, beats, [], False, lambda rank, seq: "")
        if found is not None:
            break
    assert found is not None and found.rank == 1 and tick * 0.5 < 3 + 20 + 2


def test_a_watcher_that_was_held_up_blames_nobody():
    watch = Watch(0, range(2), WatchLimits())
    assert watch.judge(0.0, {0: beat(0), 1: beat(1)}, [], False, lambda rank, seq: "") is None
    assert watch.judge(1000.0, {0: beat(0, count=2), 1: beat(1)}, [], False, lambda rank, seq: "") is None


def test_stall_names_every_place():
    watch = Watch(0, range(3), WatchLimits(stall_s=10.0))
    for tick in range(60):
        names = {0: "actor.update_actor", 1: "actor.update_actor", 2: "critic.compute_values"}
        beats = {r: beat(r, count=tick, seq=17 if r < 2 else 16, name=names[r]) for r in range(3)}
        finding = watch.judge(tick * 0.5, beats, [], False, lambda rank, seq: "")
        if finding is not None:
            break
    assert finding is not None and finding.rank == 2 and tick == pytest.approx(20, abs=1)
    assert "ranks 0, 1 in actor.update_actor (call 17, ppo.py:31, step 3); rank 2 in critic.compute_values" in finding.message


def test_group_places_is_short_for_many_ranks():
    assert group_places([beat(r, seq=1, name="a.b") for r in range(100)]).startswith(
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more in a.b"
    )


def test_first_failure_wins_and_writes_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = boards(2)
    first.run_dir = second.run_dir = tmp_path
    second.last_checkpoint = "checkpoints/step_2"
    second.set_step(3)
    second.enter_call(17, "reward.compute_reward", "ppo.py:33")
    assert second.post_error("reward", "rank 1 failed in reward.compute_reward:\n too many")
    assert not first.post_error("hang", "a consequence")
    assert first.failure == second.failure and first.failure is not None and first.failure.code == 7
    assert capsys.readouterr().err == "rank 1 failed in reward.compute_reward: too many\n"
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert status == {
        "class": "reward",
        "code": 7,
        "rank": 1,
        "call": "reward.compute_reward",
        "step": 3,
        "last_checkpoint": "checkpoints/step_2",
        "message": "rank 1 failed in reward.compute_reward: too many",
    }


class Pipe(io.StringIO):
    """Whose reader is gone, or has stopped."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.reader, self.tried = reader, threading.Event()

    def write(self, text: str) -> int:
        self.tried.set()
        if self.reader == "gone":
            raise BrokenPipeError(32, "Broken pipe")
        threading.Event().wait()
        return 0


@pytest.mark.parametrize("reader", ["gone", "stopped"])
def test_nobody_hears_the_line_and_the_failure_is_posted_all_the_same(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (board,) = boards(1)
    board.run_dir, pipe = tmp_path, Pipe(reader)
    (tmp_path / "logs" / "rank_0.stack").mkdir(parents=True)  # where stacks should go cannot be written either
    board._dump_stacks()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        assert board.post_error("reward", "rank 0 failed")
    assert pipe.tried.is_set() and board.failure is not None
    assert json.loads((tmp_path / "exit_status.json").read_text())["code"] == 7


def test_a_line_comes_where_no_thread_can_be_started(monkeypatch, capsys):
    """As in a container that may have few processes; what was told at the end made exit code 1 of a run that was done."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    announce("a line with \x1b[2J", "Traceback")
    announce("another\none")
    assert capsys.readouterr().err == "Traceback\na line with \\x1b[2J\nanother one\n"


def test_a_call_costs_the_main_thread_microseconds():
    (board,) = boards(1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for seq in range(1000):
            board.enter_call(seq, "actor.update_actor", "ppo.py:31")
            board.leave_call()
        times.append((time.perf_counter() - start) / 1000)
    assert min(times) < 10e-6  # about 1 us on an idle core; a message to the store takes 30 at least


def test_every_sign_of_life_goes_into_the_heartbeat():
    """Calls, ticks of long calls, collectives and pieces of files: while any of them goes on, no rank stands still."""
    (board,) = boards(1)

    def progress() -> int:
        board._publish()
        return Heartbeat.decode(board._own.get("board/beat/0")).progress

    signs = [
        lambda: board.enter_call(1, "actor.update_actor", "ppo.py:40"),
        board.tick,
        board.leave_call,
        lambda: board.set_step(2),
        lambda: RECORDER.note("all_reduce", "world", 4),
        lambda: hash_tensor(torch.zeros(4)),
    ]
    for sign in signs:
        before = progress()
        sign()
        assert progress() > before


def test_who_is_at_work_is_to_blame_and_not_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward call of rank 1 goes on, as its heartbeats say, when rank 0 has waited in vain; rank 2 waits as well."""
    all_boards = boards(3)
    board, messages = all_boards[0], all_boards[0]._own
    monkeypatch.setattr(board, "_thread", threading.current_thread())
    board.enter_call(17, "reward.compute_reward", "ppo.py:33")

    def beats(progress: int) -> None:
        for rank in range(3):
            last = beat(rank, seq=17, name="reward.compute_reward", progress=progress if rank == 1 else 5)
            messages.set(f"board/beat/{rank}", last.encode())

    beats(5)
    waits: list[float] = []
    monkeypatch.setattr(board._known, "wait", lambda seconds: waits.append(seconds) or beats(6))
    assert not board.await_verdict(15.0), "another failure may come of what another rank does"
    beats(5)
    messages.store.add("board/waited", JUDGES - 1)  # others have read the heartbeats of all
    assert board.await_verdict(15.0, waited=True) and board.failure is not None
    beats(5)
    assert not board.await_verdict(15.0, waited=True), "of a thousand ranks that time out together a few read all heartbeats"
    assert waits[-2:] == [15.0, 30.0], "the others give those time to speak"
    assert (board.failure.rank, board.failure.call) == (1, "reward.compute_reward")
    assert board.failure.message == (
        "rank 1 was still at work in reward.compute_reward (call 17, ppo.py:31, step 3) when rank 0 had waited for it as long as "
        "timeout_s allows"
    )
