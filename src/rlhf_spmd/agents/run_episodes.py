"""The program of the process that runs agents: ``python -m rlhf_spmd.agents.run_episodes SETTINGS PARENT``.

It reads an episode from each line of standard input, or the number of one to cancel. It runs each in a thread of its own, and writes
how it ended as a line to the file that ``RESULTS_FD`` names, besides a line when the agent is imported and one every second. What the
agent prints goes where the rank's own output goes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from rlhf_spmd.agents.config import find_agent
from rlhf_spmd.environments.runner import error_words
from rlhf_spmd.rewards.worker_process import end_with, ignore_job_signals

RESULTS_FD = "RLHF_SPMD_AGENT_RESULTS"
BEAT_S = 1.0
KEY = "agents"  # OPENAI_API_KEY of a command: the secret of its episode is in the address


def main() -> None:
    """Run episodes until standard input ends."""
    settings = json.loads(sys.argv[1])
    ignore_job_signals()
    end_with(int(sys.argv[2]), signal.SIGKILL)
    with suppress(OSError):  # if memory runs out, the kernel should end this process, not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    results_fd = int(os.environ.pop(RESULTS_FD))
    os.set_inheritable(results_fd, False)
    episodes_fd = os.dup(0)  # programs that agents start inherit standard input
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def close_in_child() -> None:  # or the end of this process would not be seen
        os.close(results_fd)
        os.close(episodes_fd)

    os.register_at_fork(after_in_child=close_in_child)
    results = os.fdopen(results_fd, "w")
    lock = Lock()

    def write(line: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(line), file=results, flush=True)

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            write({})

    run = _function(settings["run"]) if settings["run"] else _command(settings["command"])
    cancels: dict[int, Callable[[], object]] = {}  # by the number of a running episode
    write({"ready": True})
    Thread(target=beat, daemon=True).start()

    process = os.getpid()

    def run_episode(number: int, base_url: str, row: dict[str, Any]) -> None:
        try:
            result: dict[str, Any] = {"reward": read_reward(run(base_url, row, partial(cancels.__setitem__, number)))}
        # The boundary to the user's agent: whatever it raises ends its episode.
        except BaseException as error:
            result = {"failure": error_words(error)}
        if os.getpid() != process:  # a child that the agent has forked
            os._exit(0)
        cancels.pop(number, None)
        write({"number": number, **result})

    with os.fdopen(episodes_fd) as episodes:
        for line in episodes:
            message = json.loads(line)
            if "cancel" not in message:
                Thread(target=run_episode, kwargs=message, daemon=True).start()
            elif (cancel := cancels.get(message["cancel"])) is not None:
                with suppress(RuntimeError):  # it has ended meanwhile
                    cancel()


CancelNote = Callable[[Callable[[], object]], None]  # takes the function that cancels an episode
Run = Callable[[str, dict[str, Any], CancelNote], Any]


def _function(name: str) -> Run:
    """Return the user's coroutine function as a function that runs it."""
    function = find_agent(name)

    async def main(base_url: str, row: dict[str, Any], note_cancel: CancelNote) -> Any:
        task = asyncio.current_task()
        assert task is not None
        note_cancel(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await function(base_url, row)

    return lambda *arguments: asyncio.run(main(*arguments))


def _command(command: str) -> Run:
    """Return a function that runs a program and reads the reward from its last line."""

    def run(base_url: str, row: dict[str, Any], note_cancel: CancelNote) -> Any:
        root = base_url.removesuffix("/v1")  # Anthropic's clients add it
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY, "ANTHROPIC_BASE_URL": root}
        environment["ANTHROPIC_API_KEY"] = KEY
        pipe = subprocess.PIPE
        with subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True, env=environment) as program:
            note_cancel(program.kill)
            output, _ = program.communicate(json.dumps(row))
        if program.returncode:
            raise RuntimeError(f"{command} ended with code {program.returncode}")
        lines = output.strip().splitlines()
        if not lines:
            raise ValueError(f"{command} has printed no reward")
        return json.loads(lines[-1])

    return run


def read_reward(result: Any) -> float:
    """Return the reward in what an agent returned. Raises TypeError or ValueError."""
    value = result.get("reward") if isinstance(result, dict) else result
    if not isinstance(value, Real):  # also of numpy
        raise TypeError(f'an agent returns a number or {{"reward": number}}, not {result!r:.200}')
    reward = float(value)
    if reward != reward or abs(reward) == float("inf"):
        raise ValueError(f"the reward must be a finite number, not {reward}")
    return reward


if __name__ == "__main__":
    main()
