"""Episodes on a generation replica: each has its agent, its forest, and a secret in its address.

:class:`Episodes` starts agents in a process of their own (``run_episodes``), gives each up after ``agent.timeout_s``, and begins one
whose agent failed again, up to ``agent.attempts`` times.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.forest import Forest
from rlhf_spmd.agents.run_episodes import RESULTS_FD

END_S = 2.0  # for the agents' process to end before it is killed


@dataclass(eq=False)
class Episode:
    """An episode of a row.

    - row_id: the first of its rows
    - name: keys its draws
    - attempt: how often it has begun
    - forest, secret: of this attempt
    - reward: of the agent; None until it ends, and if it failed
    - failure: why it failed; None: it did not
    - ending: `done`, `timeout` or `failed`; "" while it runs
    """

    row_id: int
    name: str
    row: Mapping[str, Any]
    attempt: int = 0
    forest: Forest = field(default_factory=lambda: Forest(""))
    secret: str = ""
    deadline: float = 0.0
    reward: float | None = None
    failure: str | None = None
    ending: str = ""

    def begin(self, timeout_s: float) -> None:
        """Begin an attempt, with nothing of earlier ones."""
        self.attempt += 1
        self.forest = Forest(f"{self.name}.{self.attempt}")
        self.secret = secrets.token_urlsafe(16)
        self.deadline = time.monotonic() + timeout_s


class Episodes:
    """Runs the episodes of one call after another. Use it from one thread; ``by_secret`` may be read by others.

    ``url_of``: the address of the endpoint for a secret.
    """

    def __init__(self, config: AgentConfig, url_of: Callable[[str], str]) -> None:
        self.config = config
        self.limit_s = self.deadline = 0.0
        self.url_of = url_of
        self.by_secret: dict[str, Episode] = {}
        self.waiting: deque[Episode] = deque()
        self.running: dict[int, Episode] = {}  # by number of the attempt
        self.retries = 0
        self._results: SimpleQueue[tuple[subprocess.Popen[str], dict[str, Any] | None]] = SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._attempts = 0
        self._has_leftovers = False  # agents that were given up and may still run

    def begin(self, episodes: Sequence[Episode], limit_s: float) -> None:
        """Begin episodes, as many at a time as ``agent.concurrency`` allows.

        ``limit_s``: of all together; those that have not ended by then are given up as if each took too long.
        """
        self.retries = 0
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.waiting.extend(episodes)
        self._start()

    def end_call(self) -> None:
        """End what agents that were given up still do, with their process; otherwise it stays for the next call."""
        if self._has_leftovers:
            self.close()

    @property
    def has_ended(self) -> bool:
        """Return True if no episode runs or waits."""
        return not (self.running or self.waiting)

    def advance(self) -> None:
        """Note how agents have ended, give up those that take too long, and start others."""
        while not self._results.empty():
            process, result = self._results.get()
            if result is not None:
                episode = self.running.pop(result["number"], None)
                if episode is not None:
                    self._end(episode, "failed" if "failure" in result else "done", result.get("reward"), result.get("failure"))
            elif process is self._process:  # the process has ended, and all agents in it
                self._process = None
                for episode in [*self.running.values()]:
                    self._end(episode, "failed", None, f"the agents' process ended with code {process.wait()}")
                self.running.clear()
        now = time.monotonic()
        for number, episode in [*self.running.items()]:
            if now > episode.deadline:
                del self.running[number]
                self._end(episode, "timeout", None, f"the agent has not ended within agent.timeout_s={self.config.timeout_s}")
        if now > self.deadline:
            for episode in [*self.running.values(), *self.waiting]:
                reason = f"the episodes of a step have not ended within {self.limit_s:.0f} s, for which other ranks wait"
                self._end(episode, "timeout", None, reason)
            self.running.clear()
            self.waiting.clear()
        self._start()

    def close(self) -> None:
        """End the agents' process; what still runs there is lost."""
        process, self._process = self._process, None
        self._has_leftovers = False
        self.by_secret.clear()
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(ProcessLookupError):  # its group, with the programs of agents
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _end(self, episode: Episode, ending: str, reward: float | None, failure: str | None) -> None:
        """Note the end of an attempt. One that failed begins again, if it may."""
        self.by_secret.pop(episode.secret, None)
        self._has_leftovers |= ending == "timeout"
        if ending == "failed" and episode.attempt < self.config.attempts:
            self.retries += 1
            self.waiting.append(episode)
            return
        if ending == "timeout" and self.config.on_timeout == "keep":
            reward, failure = 0.0, None
        episode.ending, episode.reward, episode.failure = ending, reward, failure

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.config.concurrency:
            episode = self.waiting.popleft()
            episode.begin(self.config.timeout_s)
            self.by_secret[episode.secret] = episode
            self._attempts += 1
            self.running[self._attempts] = episode
            line = {"number": self._attempts, "base_url": self.url_of(episode.secret), "row": dict(episode.row)}
            self._send(json.dumps(line))

    def _send(self, line: str) -> None:
        if self._process is None:
            self._process = self._begin_process()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # its end is among the results

    def _begin_process(self) -> subprocess.Popen[str]:
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "rlhf_spmd.agents.run_episodes", json.dumps(asdict(self.config))]
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
        environment = {**os.environ, RESULTS_FD: str(writer), "NO_PROXY": no_proxy, "no_proxy": no_proxy}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, env=environment, pass_fds=[writer], start_new_session=True
        )
        os.close(writer)

        def read() -> None:
            with os.fdopen(reader) as results:
                for line in results:
                    self._results.put((process, json.loads(line)))
            self._results.put((process, None))

        Thread(target=read, daemon=True).start()
        return process
