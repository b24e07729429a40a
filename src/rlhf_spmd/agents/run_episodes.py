"""The program of the process that runs agents: ``python -m rlhf_spmd.agents.run_episodes SETTINGS``.

It reads an episode from each line of standard input, runs each in a thread of its own, and writes how it ended as a line to the file
that ``RESULTS_FD`` names. What the agent prints goes where the rank's own output goes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

from rlhf_spmd.agents.config import find_agent

RESULTS_FD = "RLHF_SPMD_AGENT_RESULTS"
KEY = "agents"  # OPENAI_API_KEY of a command: the secret of its episode is in the address


def main() -> None:
    """Run episodes until standard input ends."""
    settings = json.loads(sys.argv[1])
    results = os.fdopen(int(os.environ[RESULTS_FD]), "w")
    run = _function(settings["run"]) if settings["run"] else _command(settings["command"], settings["timeout_s"])
    lock = Lock()

    def run_episode(number: int, base_url: str, row: dict[str, Any]) -> None:
        try:
            result: dict[str, Any] = {"reward": _reward(run(base_url, row))}
        # The boundary to the user's agent: whatever it raises ends its episode.
        except BaseException as error:
            result = {"failure": f"{type(error).__name__}: {error}"[:2000]}
        with lock:
            print(json.dumps({"number": number, **result}), file=results, flush=True)

    for line in sys.stdin:
        Thread(target=run_episode, kwargs=json.loads(line), daemon=True).start()


def _function(name: str) -> Callable[[str, dict[str, Any]], Any]:
    """Return the user's coroutine function as a function that runs it."""
    function = find_agent(name)
    return lambda base_url, row: asyncio.run(function(base_url, row))


def _command(command: str, timeout_s: float) -> Callable[[str, dict[str, Any]], Any]:
    """Return a function that runs a program and reads the reward from its last line."""

    def run(base_url: str, row: dict[str, Any]) -> Any:
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY}
        environment.pop(RESULTS_FD)
        done = subprocess.run(
            shlex.split(command), input=json.dumps(row), stdout=subprocess.PIPE, text=True, timeout=timeout_s, env=environment
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with code {done.returncode}")
        lines = done.stdout.strip().splitlines()
        if not lines:
            raise ValueError(f"{command} has printed no reward")
        return json.loads(lines[-1])

    return run


def _reward(result: Any) -> float:
    """Return the reward in what an agent returned. Raises TypeError or ValueError."""
    value = result.get("reward") if isinstance(result, dict) else result
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f'an agent returns a number or {{"reward": number}}, not {result!r:.200}')
    reward = float(value)
    if reward != reward or abs(reward) == float("inf"):
        raise ValueError(f"the reward must be a finite number, not {reward}")
    return reward


if __name__ == "__main__":
    main()
