"""Episodes on a generation replica: each has its agent, its forest, and a secret in its address.

:class:`Episodes` starts agents in a process of their own, gives each up after ``agent.timeout_s``, and begins one whose agent failed
again, up to ``agent.attempts`` times. If the process ends or hangs, all episodes there begin again, fewer at a time, until the one that
is at fault runs alone: only that one has failed.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.agents.agent_process import AgentProcess, EpisodeRunner
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.forest import Forest


@dataclass(eq=False)
class Episode:
    """An episode of a row.

    - row_id: the first of its rows
    - name: keys its draws
    - attempt: how often it has begun
    - number: of this attempt among all
    - forest, secret: of this attempt
    - reward: of the agent; None until it ends, and if it failed
    - failure: why it failed; None: it did not
    - ending: `done`, `timeout` or `failed`; "" while it runs
    - is_suspect: the process ended while it ran alone there, so it runs alone again
    """

    row_id: int
    name: str
    row: Mapping[str, Any]
    attempt: int = 0
    number: int = 0
    forest: Forest = field(default_factory=lambda: Forest(""))
    secret: str = ""
    deadline: float = 0.0
    reward: float | None = None
    failure: str | None = None
    ending: str = ""
    is_suspect: bool = False

    def begin(self) -> None:
        """Begin an attempt, with nothing of earlier ones."""
        self.attempt += 1
        self.forest = Forest(f"{self.name}.{self.attempt}")
        self.secret = secrets.token_urlsafe(16)
        self.deadline = 0.0


class Episodes:
    """Runs the episodes of one call after another. Use it from one thread; ``by_secret`` may be read by others.

    - url_of: the address of the endpoint for a secret
    - settle: waits until what the endpoint has answered so far is noted
    - outside: programs that the trainer has not started; None: it starts a process of agents
    """

    def __init__(
        self,
        config: AgentConfig,
        url_of: Callable[[str], str],
        settle: Callable[[], None] = lambda: None,
        outside: EpisodeRunner | None = None,
    ) -> None:
        self.config = config
        self.limit_s = self.deadline = 0.0
        self.url_of, self.settle, self.outside = url_of, settle, outside
        self.by_secret: dict[str, Episode] = {}
        self.waiting: deque[Episode] = deque()
        self.running: dict[int, Episode] = {}  # by number of the attempt
        self.retries = 0
        self._process: EpisodeRunner | None = None
        self._attempts = 0
        self._width = config.concurrency  # episodes that run at a time
        self._has_leftovers = False  # agents that were given up and may still run

    def begin(self, episodes: Sequence[Episode], limit_s: float) -> None:
        """Begin episodes, as many at a time as ``agent.concurrency`` allows.

        ``limit_s``: of all together; those that have not ended by then are given up as if each took too long.
        """
        self.retries = 0
        self._width = self.config.concurrency
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
        if self._process is not None:
            self._read(self._process)
        now = time.monotonic()
        for number, episode in [*self.running.items()]:
            if not episode.deadline and self._process is not None and self._process.is_ready:
                episode.deadline = now + self.config.timeout_s  # the import of the agent does not count
            if 0 < episode.deadline < now:
                del self.running[number]
                # nobody sees whether a program outside is slow or gone, so another one may try
                may_retry = self.outside is not None and self.config.on_timeout == "drop"
                ending = "failed" if may_retry and episode.attempt < self.config.attempts else "timeout"
                self._end(episode, ending, None, f"the agent has not ended within agent.timeout_s={self.config.timeout_s}")
        if now > self.deadline:
            for episode in [*self.running.values(), *self.waiting]:
                reason = f"the episodes of a step have not ended within {self.limit_s:.0f} s, for which other ranks wait"
                if self.outside is not None and not episode.deadline:
                    reason = f"no program outside has fetched the episode within {self.limit_s:.0f} s"
                self._end(episode, "timeout", None, reason)
            self.running.clear()
            self.waiting.clear()
        self._start()

    def close(self) -> None:
        """End the agents' process; what still runs there is lost."""
        process, self._process = self._process, None
        self._has_leftovers = False
        self.by_secret.clear()
        if process is not None:
            process.kill()

    def _read(self, process: EpisodeRunner) -> None:
        """Note what the agents' process has written, and its end."""
        has_ended = False
        while not process.results.empty():
            result = process.results.get()
            if result is None:
                has_ended = True
            elif "number" in result and (episode := self.running.pop(result["number"], None)) is not None:
                self._end(episode, "failed" if "failure" in result else "done", result.get("reward"), result.get("failure"))
                self._width = min(self._width + 1, self.config.concurrency)
            process.is_ready |= bool(result and "ready" in result)
        if has_ended or process.has_ended:
            self._lose_process(f"the agents' process ended with code {process.kill()}", process.is_ready)
        elif process.is_silent:
            process.kill()
            self._lose_process("an agent has let no other thread of its process run", True)

    def _lose_process(self, reason: str, was_ready: bool) -> None:
        """Begin the episodes of a process that is gone again. One that ran alone has failed; all have if the import did."""
        self._process = None
        episodes, self.running = [*self.running.values()], {}
        if len(episodes) == 1 or not was_ready:
            for episode in episodes:
                episode.is_suspect = was_ready
                self._end(episode, "failed", None, reason)
            return
        for episode in reversed(episodes):
            self.by_secret.pop(episode.secret, None)
            episode.attempt -= 1
            self.waiting.appendleft(episode)
        if episodes:
            self._width = max(len(episodes) // 4, 1)

    def _end(self, episode: Episode, ending: str, reward: float | None, failure: str | None) -> None:
        """Note the end of an attempt. One that failed begins again, if it may."""
        self.by_secret.pop(episode.secret, None)
        self.settle()
        episode.forest.is_closed = True  # what still comes is not learned
        self._has_leftovers |= ending == "timeout"
        if ending == "failed" and episode.attempt < self.config.attempts:
            self.retries += 1
            self.waiting.append(episode)
            return
        if ending == "timeout" and self.config.on_timeout == "keep" and episode.deadline:
            reward, failure = 0.0, None
        episode.ending, episode.reward, episode.failure = ending, reward, failure

    def _start(self) -> None:
        while self.waiting and len(self.running) < self._width:
            if self.running and (self.waiting[0].is_suspect or any(e.is_suspect for e in self.running.values())):
                return
            episode = self.waiting.popleft()
            episode.begin()
            self.by_secret[episode.secret] = episode
            self._attempts += 1
            episode.number = self._attempts
            self.running[self._attempts] = episode
            self._process = self._process or self.outside or AgentProcess(self.config)
            self._process.send({"number": self._attempts, "base_url": self.url_of(episode.secret), "row": dict(episode.row)})
