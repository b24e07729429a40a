"""The process that answers agents, with draws that a test invents: every token that is learned is the one that was drawn."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toy_agents
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.forest import Draws, row_tokens
from rlhf_spmd.agents.server import AgentServer, EndedEpisode
from tool_models import END

LONGEST = 4000


def server_of(dialect: Dialect, agent: str, **settings: Any) -> AgentServer:
    return AgentServer(AgentConfig(run=f"{toy_agents.__file__}:{agent}", **settings), dialect, 200)


def drawn(number: int, asked: list[Any]) -> Draws:
    """What the model draws for a turn, by the number that keys it."""
    _, _, _, limit, draw_number, _ = asked
    random_of = random.Random(draw_number)
    ids = [random_of.randrange(3, 98) for _ in range(min(limit, 1 + draw_number % 7))]
    return Draws([*ids[:-1], END], [-random_of.random() for _ in ids], [number % 3] * len(ids), "stop")


def answer_call(
    server: AgentServer, episodes: range, draws: dict[int, Draws], prompts: dict[int, list[int]]
) -> list[EndedEpisode]:
    """Answer a call's turns to its end, some of them late. The episodes in order."""
    server.begin(str(episodes), [(i, f"7.1.{i}", {"prompt": f"{i} what", "seed": i}) for i in episodes], LONGEST, 600.0)
    waiting: list[Any] = []
    ended: list[Any] = []
    while len(ended) < len(episodes):
        news = server.receive(0.01)
        ended += news["ended"]
        waiting += news["asked"]
        random.Random(len(draws)).shuffle(waiting)
        ready, waiting = waiting[: len(waiting) // 2 + 1], waiting[len(waiting) // 2 + 1 :]
        new = {turn[0]: drawn(turn[0], turn) for turn in ready}
        prompts |= {turn[0]: turn[2] for turn in ready}
        draws |= new
        server.send(new)
    server.pause()
    return sorted(map(EndedEpisode.of, ended))


def ended_of(server: AgentServer) -> list[EndedEpisode]:
    """The next episodes that end, whose agents ask no more."""
    while not (ended := server.receive(1.0)["ended"]):
        pass
    return [*map(EndedEpisode.of, ended)]


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_each_learned_token_was_drawn_and_is_learned_once(dialect: Dialect, number: int) -> None:
    """Agents that branch, ask again, retry, go away in the middle, ask in parallel, and write other histories."""
    draws: dict[int, Draws] = {}
    prompts: dict[int, list[int]] = {}
    server = server_of(dialect, "erratic", max_rows=64, attempts=1, timeout_s=50)
    ended = answer_call(server, range(number), draws, prompts)
    assert {episode.ending for episode in ended} == {"done"} and len(ended) == number
    learned: Counter[int] = Counter()
    for episode in ended:
        for row in episode.rows:
            tokens = row_tokens(row.turns, draws)
            position = 0
            for turn in row.turns:
                ids, log_probs, versions, *_ = draws[turn.number]
                begin = position + len(turn.read_ids)
                position = begin + len(ids)
                assert tokens.ids[:begin] == prompts[turn.number], "the model read what the row has"
                assert tokens.ids[begin:position] == ids and tokens.versions[begin:position] == versions
                assert tokens.mask[begin:position] == [turn.is_new] * len(ids)
                assert tokens.log_probs[begin:position] == (log_probs if turn.is_new else [0.0] * len(ids))
                learned[turn.number] += turn.is_new
            assert position == len(tokens.ids)
    assert set(learned.values()) == {1}, "each turn once"
    undelivered = len(draws) - len(learned)
    assert 0 < undelivered < len(draws) / 4, "turns whose agent went away and did not come back"
    expected = sum(len(draws[turn].ids) for turn in learned)
    rows = [row_tokens(row.turns, draws) for episode in ended for row in episode.rows]
    assert sum(sum(row.mask) for row in rows) == expected
    assert sum(episode.new_roots for episode in ended) > 0
    server.close()


def children(pid: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            yield int(status.parent.name)


def test_the_agents_process_stays_for_the_next_call_unless_some_hang_in_it(dialect: Dialect) -> None:
    server = server_of(dialect, "hanging_once", attempts=1, timeout_s=3)
    pids = []
    for first in (0, 1, 2):
        ended = answer_call(server, range(first, 4), {}, {})
        pids.append([*children(server.process.pid)])
        assert [episode.ending for episode in ended].count("timeout") == (first == 0)
    assert pids[0] != pids[1] == pids[2] and len(pids[1]) == 1, "row 0 hangs, in the first call"
    server.close()


def test_a_server_that_dies_ends_the_call(dialect: Dialect) -> None:
    server = server_of(dialect, "tool_user")
    server.begin("a", [(0, "a", {"prompt": "x"})], LONGEST, 60.0)
    while not server.receive(1.0)["asked"]:
        pass
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(RuntimeError, match="the process that answers agents ended with code -9"):
        server.receive(20.0)


def test_a_rank_that_ends_leaves_nothing(dialect: Dialect, tmp_path: Path) -> None:
    server = AgentServer(AgentConfig(command="sleep 600"), dialect, 200)
    server.begin("a", [(0, "a", {"prompt": "x"})], LONGEST, 60.0)
    while not (agents := [*children(server.process.pid)]) or not (programs := [*children(agents[0])]):
        time.sleep(0.05)
    assert server.process.stdin is not None
    server.process.stdin.close()  # as the end of a rank does
    server.process.wait(20)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in (*agents, *programs))


def test_a_scheduler_s_signals_do_not_end_a_call_and_agents_do_not_know_the_ranks(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "RLHF_SPMD_KEY"):
        monkeypatch.setenv(name, "7")
    server = server_of(dialect, "outsider", attempts=1)
    server.begin("a", [(0, "a", {"prompt": "x"})], LONGEST, 60.0)
    while not (asked := server.receive(1.0)["asked"]):
        pass
    for pid in (server.process.pid, *children(server.process.pid)):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    server.send({asked[0][0]: drawn(0, asked[0])})
    assert [(episode.ending, episode.reward) for episode in ended_of(server)] == [("done", 0.0)]
    server.close()


def test_what_comes_after_the_reward_is_not_learned(dialect: Dialect) -> None:
    """However long other episodes of the call take."""
    server = server_of(dialect, "late_asker", attempts=1)
    server.begin("a", [(i, str(i), {"prompt": f"{i} what"}) for i in range(2)], LONGEST, 60.0)
    draws: dict[int, Draws] = {}
    late = 0.0
    slow: list[Any] = []
    ended: list[Any] = []
    while len(ended) < 2:
        message = server.receive(0.01)
        ended += message["ended"]
        for turn in message["asked"]:
            is_slow = len(draws) + len(slow) >= 2
            slow += [turn] if is_slow else []
            draws |= {} if is_slow else {turn[0]: drawn(0, turn)}
            server.send({} if is_slow else {turn[0]: draws[turn[0]]})
            late = time.monotonic() + 2.0
        if slow and time.monotonic() > late:
            server.send({slow[0][0]: drawn(0, slow.pop())})
    assert late and not slow
    assert [(episode.ending, len(episode.rows)) for episode in map(EndedEpisode.of, ended)] == [("done", 1), ("done", 1)]
    server.close()
