"""The process that answers the agents of a generation replica, and the rank's end of it.

The rank's process computes; HTTP, templates and forests are in another one, so that neither waits for the other's interpreter. It
lasts as long as the rank, without torch. Each line between the two is JSON:

- to the process: ``{"begin": ...}`` begins a generate call with new episodes, or goes on with one, and ``{"pause": true}`` ends that;
  ``{"draws": ...}`` answers turns
- to the rank: ``{"asked": ...}``, turns to generate; ``{"ended": ...}``, episodes with their rows

``python -m rlhf_spmd.agents.server SETTINGS`` is the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from rlhf_spmd.agents.agent_process import environment_without_rank
from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.endpoint import AgentEndpoint, AskedTurn
from rlhf_spmd.agents.episodes import Episode, Episodes
from rlhf_spmd.agents.forest import Draws, EpisodeRow, PathTurn
from rlhf_spmd.agents.listener import Listener
from rlhf_spmd.agents.outside_agents import OutsideAgents
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.rewards.worker_process import JOB_SIGNALS, ignore_job_signals

MESSAGES_FD = "RLHF_SPMD_AGENT_MESSAGES"
POLL_S = 0.02  # between looks at the clock and at how agents have ended
LATE_SHARE = 0.1  # of the limit of a call: so much later its rank gives the process up
END_S = 10.0  # for the process to end


class EndedEpisode(NamedTuple):
    """How an episode ended.

    - number: of the episode
    - failure: why it is left out, if it is; it has no rows and no reward then
    - turns: those that its agent has, also if it is left out
    - new_roots: conversations but the first
    - retries: attempts but the first
    - ignored_settings: requests with settings that the trainer decides
    """

    number: int
    ending: str
    reward: float
    failure: str | None
    rows: list[EpisodeRow]
    turns: int
    new_roots: int
    retries: int
    ignored_settings: int

    @staticmethod
    def of(message: Sequence[Any]) -> EndedEpisode:
        """Return what a message says, which JSON has made lists."""

        def row(turns: Sequence[Any], observations: Any, node: str, parent: str) -> EpisodeRow:
            return EpisodeRow([PathTurn(*turn) for turn in turns], observations, node, parent)

        episode = EndedEpisode(*message)
        return episode._replace(rows=[row(*each) for each in episode.rows])


class AgentServer:
    """The rank's end. Use it from one thread. The process ends with this object, or with the rank.

    - replica: number of this generation replica
    - listener: where programs outside ask, if they run the episodes
    """

    def __init__(self, config: AgentConfig, dialect: Dialect, vocab_size: int, replica: int = 0) -> None:
        encoding = {each.name: getattr(dialect.encoding, each.name) for each in fields(EncodingConfig)}
        settings = {
            "agent": asdict(config),
            "encoding": encoding,
            "tokenizer": dialect.tokenizer.name_or_path,
            "end_ids": [*dialect.end_ids],
            "vocab_size": vocab_size,
        }
        self.listener = None if config.external is None else Listener(config.external, replica)
        reader, writer = os.pipe()
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # until the process has its handlers
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_spmd.agents.server", json.dumps(settings)],
            stdin=subprocess.PIPE,
            text=True,
            env={
                **environment_without_rank(),
                MESSAGES_FD: str(writer),
                **(self.listener.environment if self.listener else {}),
            },
            pass_fds=[writer, *([self.listener.socket.fileno()] if self.listener else ())],
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        os.close(writer)
        if self.listener is not None:
            self.listener.socket.close()  # it is the process's
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._deadline = 0.0
        Thread(target=_read, args=(reader, self._messages), daemon=True).start()

    def __del__(self) -> None:
        if hasattr(self, "process"):
            self.close()

    def begin(self, call: str, episodes: Iterable[tuple[int, str, Mapping[str, Any]]], longest: int, limit_s: float) -> None:
        """Begin a call, or go on with it.

        - call: names it
        - episodes: new ones: number, name that keys the draws, and columns of the row
        - longest: tokens that a conversation may have
        - limit_s: from now on, of all episodes of the call together
        """
        self._deadline = time.monotonic() + (1 + LATE_SHARE) * limit_s
        self._send({"begin": {"call": call, "episodes": [*episodes], "longest": longest, "limit_s": limit_s}})

    def pause(self) -> None:
        """End a call. The time of episodes that have not ended stops."""
        self._send({"pause": True})

    def receive(self, wait_s: float) -> dict[str, list[Any]]:
        """Return the turns that have come (``asked``) and the episodes that have ended (``ended``), as lists that JSON can have.

        It waits up to ``wait_s`` for the first. Raises RuntimeError if the process has ended or does not answer.
        """
        news: dict[str, list[Any]] = {"asked": [], "ended": []}
        with suppress(Empty):
            while True:
                message = self._messages.get(timeout=0.0 if any(news.values()) or not wait_s else wait_s)
                if message is None:
                    raise RuntimeError(f"the process that answers agents ended with code {self.process.wait()}")
                for name, values in message.items():
                    news[name] += values
        if time.monotonic() > self._deadline:
            raise RuntimeError("the process that answers agents does not end their episodes")
        return news

    def send(self, draws: Mapping[int, Draws]) -> None:
        """Give agents the turns that have ended. ``draws``: by the turns' numbers."""
        if draws:
            self._send({"draws": [*draws.items()]})

    def close(self) -> None:
        """End the process, and the agents."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is among the messages
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()


def _read(fd: int, messages: SimpleQueue[dict[str, Any] | None]) -> None:
    with os.fdopen(fd) as lines:
        for line in lines:
            messages.put(json.loads(line))
    messages.put(None)


def main() -> None:
    """Answer agents until standard input ends."""
    ignore_job_signals()
    settings = json.loads(sys.argv[1])
    config = AgentConfig(**settings["agent"])
    out = os.fdopen(int(os.environ.pop(MESSAGES_FD)), "w")
    dialect = Dialect(load_tokenizer(settings["tokenizer"]), EncodingConfig(**settings["encoding"]), settings["end_ids"])
    events: SimpleQueue[AskedTurn | dict[str, Any] | None] = SimpleQueue()
    outside = None if config.external is None else OutsideAgents()
    endpoint = AgentEndpoint(config, dialect, settings["vocab_size"], events.put, outside)
    episodes = Episodes(config, endpoint.url_of, endpoint.close_forest, outside)
    endpoint.by_secret = episodes.by_secret
    if outside is not None:
        outside.by_secret = episodes.by_secret

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            for number, draws in message.get("draws", ()):
                endpoint.finish(number, Draws(*draws))
            if "draws" not in message:
                events.put(message)
        events.put(None)

    Thread(target=read, daemon=True).start()
    try:
        _answer(endpoint, episodes, events, out)
    except (EOFError, BrokenPipeError):
        pass  # the rank has ended
    finally:
        episodes.close()
        endpoint.close()


def _answer(endpoint: AgentEndpoint, episodes: Episodes, events: SimpleQueue[Any], out: Any) -> None:
    """Run episodes, and tell the rank what they ask for and how they end. Raises EOFError if the rank has ended."""
    while True:
        turns: list[AskedTurn] = []
        with suppress(Empty):
            while True:
                event = events.get(timeout=None if episodes.has_ended and not turns else 0.0 if turns else POLL_S)
                if event is None:
                    raise EOFError
                if isinstance(event, AskedTurn):
                    turns.append(event)
                elif "pause" in event:
                    episodes.pause()
                else:
                    _begin(event["begin"], endpoint, episodes)
        if turns:
            print(json.dumps({"asked": turns}), file=out, flush=True)
        if ended := episodes.advance():
            max_rows = episodes.config.max_rows
            print(json.dumps({"ended": [_ended_episode(each, max_rows) for each in ended]}), file=out, flush=True)


def _begin(call: Mapping[str, Any], endpoint: AgentEndpoint, episodes: Episodes) -> None:
    endpoint.longest = call["longest"]
    episodes.begin(call["call"], [Episode(*values) for values in call["episodes"]], call["limit_s"])


def _ended_episode(episode: Episode, max_rows: int) -> EndedEpisode:
    """Return how an episode ended, with the rows to learn if it is not left out."""
    forest = episode.forest
    rows = [*forest.rows()]
    counts = sum(row.num_turns for row in rows), max(forest.num_roots - 1, 0), max(episode.attempt - 1, 0), forest.num_ignored
    failure = episode.failure
    if failure is None and not rows:
        failure = "the agent has no answer of the model's"
        if forest.refusal:
            failure += f"; its last request was refused: {forest.refusal}"
    if len(rows) > max_rows:
        failure = f"the episode has {len(rows)} conversations, and agent.max_rows={max_rows}"
    if failure is None:
        assert episode.reward is not None, "the agent has ended"
        return EndedEpisode(episode.number, episode.ending, episode.reward, None, rows, *counts)
    ending = "failed" if episode.ending == "done" else episode.ending
    return EndedEpisode(episode.number, ending, 0.0, failure, [], *counts)


if __name__ == "__main__":
    main()
