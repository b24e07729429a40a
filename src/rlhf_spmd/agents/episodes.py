"""Episodes on a generation replica: each has its agent, its forest, and a secret in its address.

:class:`Episodes` starts agents in a process of their own, gives each up after ``agent.timeout_s``, and begins one whose agent failed
again, up to ``agent.attempts`` times. If the process ends or hangs, all episodes there begin again, fewer at a time, until the one that
is at fault runs alone: only that one has failed.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.agents.agent_process import AgentProcess, EpisodeRunner
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.forest import Forest


@dataclass(eq=False)
class Episode:
    """An episode of a row.

    - number: among all episodes of the replica
    - name: keys its draws
    - call: the generate calls to which it belongs
    - attempt: how often it has begun
    - attempt_number: of this attempt among all
    - forest, secret, left_s: of this attempt; seconds that the agent may take yet
    - has_begun: the agent of this attempt runs, so its time does
    - reward: of the agent; None until it ends, and if it failed
    - failure: why it failed; None: it did not
    - ending: `done`, `timeout` or `failed`; "" while it runs
    - is_suspect: the process ended while it ran alone there, so it runs alone again
    """

    number: int
    name: str
    row: Mapping[str, Any]
    call: str = ""
    attempt: int = 0
    attempt_number: int = 0
    forest: Forest = field(default_factory=lambda: Forest(""))
    secret: str = ""
    left_s: float = 0.0
    has_begun: bool = False
    reward: float | None = None
    failure: str | None = None
    ending: str = ""
    is_suspect: bool = False

    def begin(self, timeout_s: float) -> None:
        """Begin an attempt, with nothing of earlier ones."""
        self.attempt += 1
        self.left_s = timeout_s
        self.has_begun = False
        self.forest = Forest(f"{self.name}.{self.attempt}", self.number)
        self.secret = secrets.token_urlsafe(16)


class Episodes:
    """Runs the episodes of generate calls. Use it from one thread; ``by_secret`` may be read by others.

    Episodes of training may go on over several calls, and others, of a validation, may come between. Their time runs only in calls of
    their own, since nobody answers them in others, nor between calls. The agents go on all the time.

    - url_of: the address of the endpoint for a secret
    - close_forest: notes what the endpoint has answered so far of an attempt, and refuses what comes later
    - outside: programs that the trainer has not started; None: it starts a process of agents
    """

    def __init__(
        self,
        config: AgentConfig,
        url_of: Callable[[str], str],
        close_forest: Callable[[Forest], None] = lambda forest: None,
        outside: EpisodeRunner | None = None,
    ) -> None:
        self.config = config
        self.limit_s, self.deadline = 0.0, math.inf
        self.url_of, self.close_forest, self.outside = url_of, close_forest, outside
        self.by_secret: dict[str, Episode] = {}
        self.call: str | None = None  # whose episodes are answered now
        self.waiting: defaultdict[str, deque[Episode]] = defaultdict(deque)  # by call
        self.running: dict[int, Episode] = {}  # by number of the attempt
        self._ended: list[Episode] = []
        self._clock = 0.0  # when :meth:`advance` last looked
        self._process: EpisodeRunner | None = None
        self._attempts = 0
        self._width = config.concurrency  # episodes of a call that run at a time
        self._leftovers: set[int] = set()  # attempts that were given up and whose agents still run

    def begin(self, call: str, episodes: Sequence[Episode], limit_s: float) -> None:
        """Begin a call, or go on with it, with more episodes. As many run at a time as ``agent.concurrency`` allows.

        ``limit_s``: from now on for the call; those that have not ended by then are given up as if each took too long.
        """
        self.call = call
        self._width = self.config.concurrency
        self.limit_s = limit_s
        self._clock = time.monotonic()
        self.deadline = self._clock + limit_s
        for episode in episodes:
            episode.call = call
        self.waiting[call].extend(episodes)
        self._start()

    def pause(self) -> None:
        """Stop the time of all episodes. If none is left, end what agents that were given up still do, with their process."""
        self.call, self.deadline = None, math.inf
        self.waiting = defaultdict(deque, {call: episodes for call, episodes in self.waiting.items() if episodes})
        if self._leftovers and self.has_ended:
            self.close()

    @property
    def has_ended(self) -> bool:
        """Return True if no episode runs or waits."""
        return not (self.running or any(self.waiting.values()))

    def advance(self) -> list[Episode]:
        """Note how agents have ended, give up those that take too long, and start others. Return the episodes that have ended."""
        if self._process is not None:
            self._read(self._process)
        now = time.monotonic()
        elapsed_s, self._clock = now - self._clock, now
        is_ready = self._process is not None and self._process.is_ready  # the import of the agent does not count
        for number, episode in self._answered():
            episode.has_begun |= is_ready
            episode.left_s -= elapsed_s * episode.has_begun
            if episode.left_s < 0:
                # nobody sees whether a program outside is slow or gone, so another one may try
                may_retry = (
                    self.outside is not None and self.config.on_timeout == "drop" and episode.attempt < self.config.attempts
                )
                reason = f"the agent has not ended within agent.timeout_s={self.config.timeout_s}"
                self._give_up(number, reason, "failed" if may_retry else "timeout")
        if now > self.deadline and self.call is not None:
            reason = f"the episodes of a step have not ended within {self.limit_s:.0f} s, for which other ranks wait"
            unfetched = f"no program outside has fetched the episode within {self.limit_s:.0f} s"
            for number, episode in self._answered():
                self._give_up(number, unfetched if self.outside and not episode.has_begun else reason)
            for episode in self.waiting.pop(self.call, ()):
                self._end(episode, "timeout", None, unfetched if self.outside else reason)
        self._start()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the agents' process; what still runs there is lost."""
        process, self._process = self._process or self.outside, None
        self._leftovers.clear()
        self.by_secret.clear()
        if process is not None:
            process.kill()

    def _answered(self) -> list[tuple[int, Episode]]:
        """Return the running episodes of this call, with the numbers of their attempts."""
        return [(number, episode) for number, episode in self.running.items() if episode.call == self.call]

    def _read(self, process: EpisodeRunner) -> None:
        """Note what the agents' process has written, and its end."""
        has_ended = False
        while not process.results.empty():
            result = process.results.get()
            if result is None:
                has_ended = True
            elif "number" in result:
                self._leftovers.discard(result["number"])
                if (episode := self.running.pop(result["number"], None)) is not None:
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
        self._leftovers.clear()
        episodes, self.running = [*self.running.values()], {}
        if len(episodes) == 1 or not was_ready:
            for episode in episodes:
                episode.is_suspect = was_ready
                self._end(episode, "failed", None, reason)
            return
        self._begin_again(episodes)
        if episodes:
            self._width = max(len(episodes) // 4, 1)

    def _begin_again(self, episodes: Sequence[Episode]) -> None:
        """Let episodes wait again whose process is gone, as if this attempt had not been."""
        for episode in reversed(episodes):
            self.by_secret.pop(episode.secret, None)
            self.close_forest(episode.forest)
            episode.attempt -= 1
            self.waiting[episode.call].appendleft(episode)

    def _give_up(self, number: int, reason: str, ending: str = "timeout") -> None:
        """End a running attempt that takes too long, unless its reward has just been taken. Its agent is told to stop."""
        if self.by_secret.pop(self.running[number].secret, None) is None:
            return  # how it ended is among the results
        episode = self.running.pop(number)
        if self._process is not None and self.outside is None:
            self._leftovers.add(number)
            self._process.send({"cancel": number})
        self._end(episode, ending, None, reason)

    def _end(self, episode: Episode, ending: str, reward: float | None, failure: str | None) -> None:
        """Note the end of an attempt. One that failed begins again, if it may."""
        self.by_secret.pop(episode.secret, None)
        self.close_forest(episode.forest)
        if ending == "failed" and episode.attempt < self.config.attempts:
            self.waiting[episode.call].append(episode)
            return
        if ending == "timeout" and self.config.on_timeout == "keep" and episode.has_begun:
            reward, failure = 0.0, None
        episode.ending, episode.reward, episode.failure = ending, reward, failure
        self._ended.append(episode)

    def _start(self) -> None:
        """Start episodes of this call that wait."""
        if self.call is None:
            return
        waiting = self.waiting[self.call]
        running = [episode for _, episode in self._answered()]
        if waiting and len(self._leftovers) >= self.config.concurrency:
            if running:
                return
            episodes, self.running = [*self.running.values()], {}  # of other calls
            self._begin_again(episodes)
            self.close()
        while waiting and len(running) < self._width:
            if running and (waiting[0].is_suspect or any(episode.is_suspect for episode in running)):
                return
            episode = waiting.popleft()
            running.append(episode)
            episode.begin(self.config.timeout_s)
            self.by_secret[episode.secret] = episode
            self._attempts += 1
            episode.attempt_number = self._attempts
            self.running[self._attempts] = episode
            self._process = self._process or self.outside or AgentProcess(self.config)
            self._process.send({"number": self._attempts, "base_url": self.url_of(episode.secret), "row": dict(episode.row)})
