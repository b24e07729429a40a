"""How episodes of a replica end, without a model."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.agents import agent_process
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.episodes import Episode, Episodes


def run(config: AgentConfig, limit_s: float, number: int = 3) -> list[Episode]:
    """Episodes of agents that ask nothing."""
    episodes = [Episode(i, f"e{i}", {"prompt": str(i)}) for i in range(number)]
    runner = Episodes(config, lambda secret: f"http://127.0.0.1:1/{secret}/v1")
    runner.begin("call", episodes, limit_s)
    started = time.monotonic()
    while not runner.has_ended:
        assert time.monotonic() - started < 60
        runner.advance()
        time.sleep(0.02)
    runner.close()
    return episodes


def test_episodes_that_wait_for_others_end_with_the_call() -> None:
    """One at a time, and each hangs: other ranks do not wait for all of them in turn."""
    started = time.monotonic()
    episodes = run(AgentConfig(command="sleep 600", timeout_s=1.5, concurrency=1), limit_s=3.0, number=20)
    assert time.monotonic() - started < 20 and {episode.ending for episode in episodes} == {"timeout"}
    assert {episode.reward for episode in episodes} == {None} and all(episode.failure for episode in episodes)


def test_the_time_of_an_agent_stops_between_calls_and_in_others(tmp_path: Path) -> None:
    """An agent takes 4 s and has 2.5 s, of which it uses 1 s before its call pauses; another call comes between."""
    config = agent(tmp_path, "sleeps", timeout_s=2.5, concurrency=1)
    runner = Episodes(config, lambda secret: f"http://127.0.0.1:1/{secret}/v1")
    slow, quick = (Episode(i, f"e{i}", {"prompt": seconds}) for i, seconds in enumerate(("4", "0")))

    def advance(seconds: float) -> list[Episode]:
        until = time.monotonic() + seconds
        ended = []
        while time.monotonic() < until:
            ended += runner.advance()
            time.sleep(0.02)
        return ended

    runner.begin("one", [slow], 60.0)
    while not runner._process or not runner._process.is_ready:
        advance(0.05)
    assert advance(1.0) == []
    runner.begin("two", [quick], 60.0)
    assert advance(1.0) == [quick], "it does not wait for the other call's"
    runner.pause()
    assert advance(1.2) == []
    runner.begin("one", [], 60.0)
    assert advance(1.3) == [slow] and slow.reward == 1.0
    runner.close()


def test_episodes_whose_process_dies_between_calls_begin_again(tmp_path: Path) -> None:
    runner = Episodes(agent(tmp_path, "sleeps", timeout_s=20.0), lambda secret: f"http://127.0.0.1:1/{secret}/v1")
    episodes = [Episode(i, f"e{i}", {"prompt": "1.5"}) for i in range(3)]
    runner.begin("one", episodes, 60.0)
    while not runner._process or not runner._process.is_ready:
        assert runner.advance() == []
    runner.pause()
    os.kill(runner._process.process.pid, 9)
    for _ in range(50):
        assert runner.advance() == []
        time.sleep(0.02)
    runner.begin("one", [], 60.0)
    ended: list[Episode] = []
    while len(ended) < 3:
        ended += runner.advance()
        time.sleep(0.02)
    assert {(episode.reward, episode.attempt) for episode in ended} == {(1.0, 1)}
    runner.close()


@pytest.mark.parametrize("kind", ["run", "command"])
def test_an_agent_that_takes_too_long_is_told_to_stop(tmp_path: Path, kind: str) -> None:
    """And its process goes on with others."""
    program = tmp_path / "agent.sh"
    program.write_text(f"echo $$ > {tmp_path}/pid\nexec sleep 600\n")
    config = (
        AgentConfig(command=f"sh {program}", timeout_s=2.0) if kind == "command" else agent(tmp_path, "sleeps", timeout_s=2.0)
    )
    runner = Episodes(config, lambda secret: f"http://127.0.0.1:1/{secret}/v1")
    runner.begin("call", [Episode(0, "e", {"prompt": "600"})], 60.0)
    ended: list[Episode] = []
    while not ended or runner._leftovers:
        ended += runner.advance()
        time.sleep(0.02)
    process = runner._process
    runner.pause()
    assert [episode.ending for episode in ended] == ["timeout"] and process is not None
    assert runner._process is process and process.process.poll() is None
    runner.close()


def test_a_process_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    def number() -> tuple[int, int]:
        return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()

    config = agent(tmp_path, "sleeps")
    before = number()
    for _ in range(3):
        process = agent_process.AgentProcess(config)
        process.kill()
    for _ in range(100):
        if number() == before:
            break
        time.sleep(0.05)
    assert number() == before


def test_programs_of_agents_end_with_their_call(tmp_path: Path) -> None:
    program = tmp_path / "agent.sh"
    program.write_text(f"echo $$ > {tmp_path}/pid\nexec sleep 600\n")
    run(AgentConfig(command=f"sh {program}", timeout_s=2.0), limit_s=30.0, number=1)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        raise AssertionError("the program of the agent lives on")


def test_a_reward_is_the_last_line(tmp_path: Path) -> None:
    program = tmp_path / "agent.sh"
    program.write_text('cat > /dev/null\necho thinking\necho \'{"reward": 0.5, "steps": 2}\'\n')
    episodes = run(AgentConfig(command=f"sh {program}", timeout_s=20.0), limit_s=30.0)
    assert [(episode.ending, episode.reward) for episode in episodes] == [("done", 0.5)] * 3
    program.write_text("cat > /dev/null\necho nothing\n")
    failed = run(AgentConfig(command=f"sh {program}", timeout_s=20.0, attempts=3), limit_s=30.0, number=1)
    assert failed[0].ending == "failed" and failed[0].attempt == 3 and "JSONDecodeError" in (failed[0].failure or "")


AGENTS = '''
import asyncio, os, re, subprocess, time

async def reads(base_url, row):
    """Starts a program that reads standard input to its end."""
    return len(subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=10).stdout)

async def sleeps(base_url, row):
    await asyncio.sleep(float(row["prompt"]))
    return 1.0

async def exits(base_url, row):
    await asyncio.sleep(0.2)
    if row["prompt"] == "3":
        os._exit(7)
    return 1.0

async def blocks(base_url, row):
    """Row 2 lets no other thread run for minutes."""
    if row["prompt"] == "2":
        re.match(r"(a+)+$", "a" * 40 + "b")
    await asyncio.sleep(0.2)
    return 1.0

async def forks(base_url, row):
    if os.fork() == 0:
        return 5.0
    await asyncio.sleep(0.5)
    return 1.0

'''


def agent(tmp_path: Path, name: str, **settings: Any) -> AgentConfig:
    (tmp_path / "several.py").write_text(AGENTS)
    return AgentConfig(run=f"{tmp_path / 'several.py'}:{name}", **settings)


def test_agents_see_no_gpu_unless_they_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    program = tmp_path / "agent.sh"
    program.write_text("echo ${#CUDA_VISIBLE_DEVICES}\n")
    for command, length in ((f"sh {program}", 0), (f"env CUDA_VISIBLE_DEVICES=10 sh {program}", 2)):
        (episode,) = run(AgentConfig(command=command), limit_s=30.0, number=1)
        assert episode.reward == length


def test_programs_of_agents_do_not_read_other_episodes(tmp_path: Path) -> None:
    episodes = run(agent(tmp_path, "reads", timeout_s=20.0), limit_s=30.0, number=8)
    assert [(episode.ending, episode.reward) for episode in episodes] == [("done", 0.0)] * 8


def test_an_agent_that_ends_its_process_costs_itself_alone(tmp_path: Path) -> None:
    episodes = run(agent(tmp_path, "exits", timeout_s=20.0), limit_s=50.0, number=12)
    assert [episode.ending for episode in episodes] == ["done"] * 3 + ["failed"] + ["done"] * 8
    assert [episode.attempt for episode in episodes] == [1] * 3 + [2] + [1] * 8


@pytest.mark.long
def test_an_agent_that_blocks_its_process_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "SILENT_S", 6.0)
    episodes = run(agent(tmp_path, "blocks", timeout_s=50.0), limit_s=59.0, number=4)
    assert [episode.ending for episode in episodes] == ["done", "done", "failed", "done"]


def test_the_import_of_an_agent_is_not_its_time(tmp_path: Path) -> None:
    config = agent(tmp_path, "exits", timeout_s=2.0)
    (tmp_path / "several.py").write_text("import time\ntime.sleep(3)\n" + AGENTS)
    assert [episode.ending for episode in run(config, limit_s=50.0)] == ["done"] * 3


def test_an_agent_that_cannot_be_imported_there_fails_at_once(tmp_path: Path) -> None:
    config = agent(tmp_path, "exits", timeout_s=20.0)
    imports = tmp_path / "imports"
    (tmp_path / "several.py").write_text(f"import os\nopen({str(imports)!r}, 'a').write('x')\nos._exit(5)\n")
    episodes = run(config, limit_s=50.0, number=12)
    assert {(episode.ending, episode.attempt) for episode in episodes} == {("failed", 2)} and imports.read_text() == "xx"


def test_a_child_of_an_agent_does_not_end_its_episode(tmp_path: Path) -> None:
    episodes = run(agent(tmp_path, "forks", timeout_s=20.0), limit_s=30.0)
    assert [(episode.ending, episode.reward) for episode in episodes] == [("done", 1.0)] * 3
