"""The board without processes: judging heartbeats, the first failure wins, and what a heartbeat says."""

import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from controllers import Toy, prompts
from rlhf_spmd.checkpoint.files import hash_tensor
from rlhf_spmd.controller import Controller, GroupShape, ResourcePool
from rlhf_spmd.parallel.collectives import RECORDER, solo
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.process.board import MAX_JUDGES, Board, Failure
from rlhf_spmd.process.exit import ready_to_end
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


def first_finding(watch: Watch, beats_at: Callable[[int], dict[int, Heartbeat]], suspect: bool = False) -> tuple[Any, float]:
    """What a watch says first of heartbeats that come every half second, and after how many seconds."""
    for tick in range(200):
        finding = watch.judge(tick * 0.5, beats_at(tick), [], suspect, lambda rank, seq: ("", ""))
        if finding is not None:
            return finding, tick * 0.5
    return None, math.inf


def test_what_goes_through_the_store_comes_out_of_it() -> None:
    original = beat(3, seq=17, name="critic.compute_values", calls=[[16, 5], [17, 9]])
    assert Heartbeat.decode(original.encode()) == original
    failure = Failure("lost", "rank 1 left", 1, "actor.update", 3, None, os.getpid(), "host")
    assert Failure.decode(failure.encode()) == failure


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_a_rank_whose_other_thread_fails_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    (board,) = boards(1)
    board.run_dir, board.failing = tmp_path, True
    monkeypatch.setattr("rlhf_spmd.process.board.end_process", sys.exit)
    thread = threading.Timer(delay_s, board.post_error, ("lost", "a thread left"))
    thread.start()
    with pytest.raises(SystemExit) as ending:
        board.finish()
    thread.join()
    assert ending.value.code == json.loads((tmp_path / "exit_status.json").read_text())["code"] == 9


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


def test_a_script_that_returns_early_on_one_rank_is_told_at_its_end():
    """It may then wait for messages, so its end counts as a call."""
    pair = boards(2)

    def script(controller: Controller, calls: int) -> None:
        for _ in range(calls):
            controller.any_rank(False)

    for board, calls in zip(pair, (2, 1), strict=True):
        controller = Controller(solo(board.launch.rank), board)
        controller.run(script, controller, calls)
    message, site = look(pair, Watch(0, range(2), WatchLimits())), rf"test_board\.py:{script.__code__.co_firstlineno + 2}"
    ended = rf"rank 1 entered controller\.settle \(end of the script after {site}\) as call 2"
    assert message is not None and re.search(rf"{ended}, rank 0 entered controller\.any_rank \({site}\)", message)


def test_a_mask_that_differs_between_ranks_is_named_with_both_sites():
    """The calls are the same, their rows are not."""
    pair, prompt = boards(2), prompts(4, 1)

    def script(controller: Controller, toy: Any, ids: list[int]) -> None:
        toy.count(controller.source(prompt).take(ids))

    for board, ids in zip(pair, ([0, 1], [0, 2]), strict=True):
        rank, layout = board.launch.rank, Layout(1, 1, 1)
        controller = Controller(solo(rank), board)
        toy = Toy(controller, "toy", ResourcePool("p", (rank,)), GroupShape(layout, GenerationLayout(layout, 1, 1)))
        controller.run(script, controller, toy, ids)
    site = rf"toy\.count \(test_board\.py:{script.__code__.co_firstlineno + 1}\) with 2 rows \(their ids: \w{{8}}\)"
    message = look(pair, Watch(0, range(2), WatchLimits()))
    assert message is not None and re.match(
        rf"call order differs: rank 1 entered {site} as call 1, rank 0 entered {site};", message
    )


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
    finding = watch.judge(0.0, beats, [], False, lambda rank, seq: ("", ""))
    assert finding is not None and finding.rank == 1
    assert "rank 1 ended the script after call 40, rank 0 entered actor.update_actor (call 41" in finding.message
    # the same number of calls: the slower one is only finishing
    beats[0] = beat(0, seq=40, name="x.y")
    assert Watch(0, range(2), WatchLimits()).judge(0.0, beats, [], False, lambda rank, seq: ("", "")) is None


@pytest.mark.parametrize(("suspect", "expected"), [(False, 20.0), (True, 6.0)])
def test_lost_rank(suspect: bool, expected: float) -> None:
    """Rank 2 is silent from the tenth heartbeat on, while progress goes on elsewhere."""

    def beats(tick: int) -> dict[int, Heartbeat]:
        counts = {0: tick, 1: tick, 2: min(tick, 10)}
        return {rank: beat(rank, counts[rank], seq=17, name="actor.update_actor", progress=tick) for rank in counts}

    finding, seconds = first_finding(Watch(0, range(3), WatchLimits()), beats, suspect)
    assert finding.rank == 2 and finding.silent and seconds - 5.0 == pytest.approx(expected, abs=0.6)
    assert finding.message.startswith("rank 2 stopped answering in actor.update_actor (call 17, ppo.py:31, step 3)")


def test_a_rank_that_has_not_started_hides_none_that_is_lost() -> None:
    """It is given three times as long."""
    watch = Watch(0, range(3), WatchLimits())
    finding, seconds = first_finding(watch, lambda tick: {0: beat(0, tick, progress=tick), 1: beat(1, min(tick, 6))})
    assert finding.rank == 1 and seconds < 3 + 20 + 2


def test_a_watcher_that_was_held_up_blames_nobody() -> None:
    watch = Watch(0, range(2), WatchLimits())
    assert watch.judge(0.0, {0: beat(0), 1: beat(1)}, [], False, lambda rank, seq: ("", "")) is None
    assert watch.judge(1000.0, {0: beat(0, count=2), 1: beat(1)}, [], False, lambda rank, seq: ("", "")) is None


def test_stall_names_every_place() -> None:
    calls = ((17, "actor.update_actor"), (17, "actor.update_actor"), (16, "critic.compute_values"))

    def beats(tick: int) -> dict[int, Heartbeat]:
        return {rank: beat(rank, tick, seq=seq, name=name) for rank, (seq, name) in enumerate(calls)}

    many = group_places([beat(rank, seq=1, name="a.b") for rank in range(100)])
    assert many.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more in a.b")
    finding, seconds = first_finding(Watch(0, range(3), WatchLimits(stall_s=10.0)), beats)
    assert finding.rank == 2 and seconds == pytest.approx(10, abs=0.5)
    assert "ranks 0, 1 in actor.update_actor (call 17, ppo.py:31, step 3); rank 2 in critic.compute_values" in finding.message


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
    place = {"rank": 1, "call": "reward.compute_reward", "step": 3, "last_checkpoint": "checkpoints/step_2"}
    assert status == {"class": "reward", "code": 7, **place, "message": "rank 1 failed in reward.compute_reward: too many"}


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
        with ready_to_end():
            assert board.post_error("reward", "rank 0 failed")
    assert pipe.tried.is_set() and board.failure is not None
    assert json.loads((tmp_path / "exit_status.json").read_text())["code"] == 7


def test_every_sign_of_life_goes_into_the_heartbeat():
    """Calls, ticks of long calls, collectives and pieces of files: while any of them goes on, no rank stands still."""
    (board,) = boards(1)

    def progress() -> int:
        board._publish()
        return Heartbeat.decode(board._messages.get("board/beat/0")).progress

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
    board, messages = all_boards[0], all_boards[0]._messages
    monkeypatch.setattr(board, "_thread", threading.current_thread())
    board.enter_call(17, "reward.compute_reward", "ppo.py:33")

    def beats(progress: int) -> None:
        for rank in range(3):
            last = beat(rank, seq=17, name="reward.compute_reward", progress=progress if rank == 1 else 5)
            messages.set(f"board/beat/{rank}", last.encode())

    beats(5)
    waits: list[float] = []
    monkeypatch.setattr(board._failure_known, "wait", lambda seconds: waits.append(seconds) or beats(6))
    assert not board.await_verdict(15.0), "another failure may come of what another rank does"
    beats(5)
    messages.store.add("board/waited", MAX_JUDGES - 1)  # others have read the heartbeats of all
    assert board.await_verdict(15.0, timed_out=True) and board.failure is not None
    beats(5)
    assert not board.await_verdict(15.0, timed_out=True), "of a thousand ranks that time out together a few read all heartbeats"
    assert waits[-2:] == [15.0, 30.0], "the others give those time to speak"
    assert (board.failure.rank, board.failure.call) == (1, "reward.compute_reward")
    assert board.failure.message == (
        "rank 1 was still at work in reward.compute_reward (call 17, ppo.py:31, step 3) when rank 0 had waited for it as long as "
        "timeout_s allows"
    )
