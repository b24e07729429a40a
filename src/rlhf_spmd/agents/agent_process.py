"""The process in which agents run, as the process that answers them sees it. ``run_episodes`` is its program.

What agents do there must not reach the run: a full pipe, a child that holds one open, the memory of the machine. Nor do signals of a
scheduler end it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.run_episodes import RESULTS_FD
from rlhf_spmd.rewards.worker_process import JOB_SIGNALS

SILENT_S = 30.0  # without a beat: some agent lets no other thread of its process run
PROGRAM_END_S = 1.0  # that programs of agents have to end
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RANK_PREFIXES = ("MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "RLHF_SPMD_")


def environment_without_rank() -> dict[str, str]:
    """Return the variables of this process but those by which a rank finds the others, and their secret."""
    return {
        name: value for name, value in os.environ.items() if name not in RANK_VARIABLES and not name.startswith(RANK_PREFIXES)
    }


class EpisodeRunner(Protocol):
    """What runs episodes: a process of agents, or programs outside (:class:`~.outside_agents.OutsideAgents`).

    - results: how episodes have ended, by number; None: all that run there are lost
    - is_ready: the time of episodes that are sent begins
    - is_silent: it runs, and nothing can be done there
    """

    results: SimpleQueue[dict[str, Any] | None]
    is_ready: bool

    @property
    def has_ended(self) -> bool: ...
    @property
    def is_silent(self) -> bool: ...
    def send(self, episode: Mapping[str, Any]) -> None: ...
    def kill(self) -> int: ...


class AgentProcess:
    """A running process. Use it from one thread.

    - results: what it has written, by lines; None at its end
    - is_ready: it has imported the agent
    """

    def __init__(self, config: AgentConfig) -> None:
        reader, writer = os.pipe()
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
        more = {RESULTS_FD: str(writer), "NO_PROXY": no_proxy, "no_proxy": no_proxy, "PYTHONHASHSEED": "0"}
        more["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are the trainer's
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # until it has its handlers
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_spmd.agents.run_episodes", json.dumps(asdict(config)), str(os.getpid())],
                stdin=subprocess.PIPE,
                text=True,
                env={**os.environ, **more},
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        os.close(writer)
        self.results: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.runs_programs = config.command is not None
        self.is_ready = False
        self.last_sign = time.monotonic()
        self._outgoing: SimpleQueue[str | None] = SimpleQueue()
        Thread(target=self._read, args=(reader,), daemon=True).start()
        Thread(target=self._write, daemon=True).start()

    def send(self, episode: Mapping[str, Any]) -> None:
        """Begin an episode there. Returns at once, also if the process does not read."""
        self._outgoing.put(json.dumps(episode))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_silent(self) -> bool:
        """Return True if no thread of the process can run."""
        return self.is_ready and time.monotonic() - self.last_sign > SILENT_S

    def kill(self) -> int:
        """End the process and the programs of its agents. Returns its exit code."""
        self._outgoing.put(None)
        with suppress(ProcessLookupError):
            if self.runs_programs:
                os.killpg(self.process.pid, signal.SIGTERM)  # for the programs alone: the process has a handler
                time.sleep(PROGRAM_END_S)
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                self.last_sign = time.monotonic()
                self.results.put(json.loads(line))
        self.results.put(None)

    def _write(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            while (line := self._outgoing.get()) is not None:
                stdin.write(line + "\n")
                stdin.flush()
