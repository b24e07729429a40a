"""The section ``agent``: programs of the user's own that ask the model over HTTP, and how long and how often they may."""

from __future__ import annotations

import inspect
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlhf_spmd.config import registry
from rlhf_spmd.config.constraints import Fraction, PositiveInt, Seconds, Workers
from rlhf_spmd.config.rules import Rule, Rules

KINDS = "run", "command", "external"  # keys of which one says what runs episodes
CALL_SHARE = 0.8  # of the time that other ranks wait: within it all episodes of a step end


@dataclass(frozen=True)
class AgentConfig:
    """``agent``: a program that answers each row by asking the model over HTTP, as often as it likes; see
    [agents.md](agents.md).

    - run: `FILE.py:NAME` or a dotted name of `async def NAME(base_url, row)`, which returns the reward, or `{"reward": ...}`
    - command: a program in place of `run`. It gets the row as JSON on standard input, and `OPENAI_BASE_URL` and `OPENAI_API_KEY`
      in its environment; the last line of its output is the reward, as JSON
    - external: `HOST:PORT` where programs that you start yourself, here or elsewhere, fetch episodes and post rewards. Each generation
      replica has a port, counted from `PORT`; 0: any free ones. The file `agents.jsonl` of `run.dir` has their addresses and keys
    - timeout_s: of an episode
    - max_turns: requests of an episode; further ones are refused
    - max_tokens: tokens that the model may draw in a request that sets no lower `max_tokens`; null: as many as the row has room for
    - max_rows: conversations of an episode that are learned, each with its branches' own turns; an episode with more is left out
    - concurrency: episodes that run at a time, for each generation replica
    - attempts: how often an episode is begun whose agent failed; then it is left out
    - on_timeout: `drop`: an episode that takes longer is left out; `keep`: it is learned, with a reward of 0 from the agent
    - max_failure_rate: share of a step's episodes that may be left out before the run ends with class `reward`
    """

    rules: ClassVar[Rules] = (
        Rule(
            KINDS,
            lambda s: sum(getattr(s, kind) is not None for kind in KINDS) > 1,
            "each of them says what runs episodes",
            "give one of them",
        ),
        Rule(
            KINDS,
            lambda s: not s.is_on and s != type(s)(),
            "other keys of the section are set, and nothing says what runs episodes",
            "give one of them",
        ),
    )
    run: str | None = None
    command: str | None = None
    external: str | None = None
    timeout_s: Seconds = 240.0
    max_turns: PositiveInt = 64
    max_tokens: PositiveInt | None = None
    max_rows: PositiveInt = 8
    concurrency: Workers = 64
    attempts: PositiveInt = 2
    on_timeout: Literal["drop", "keep"] = "drop"
    max_failure_rate: Fraction = 0.5

    @property
    def is_on(self) -> bool:
        """Return True if agents answer the rows."""
        return self.key is not None

    @property
    def key(self) -> str | None:
        """Return the key that says what runs episodes; None if no agents answer the rows."""
        return next((kind for kind in KINDS if getattr(self, kind) is not None), None)

    def check(self, where: str) -> None:
        """Raise ValueError if ``run`` names no coroutine function, ``command`` no program, or ``external`` no address.

        Imports the user's module.
        """
        if self.external is not None:
            read_address(self.external, f"{where}.external")
        if self.run is not None:
            find_agent(self.run, where)
        if self.command is not None:
            try:
                program = shlex.split(self.command)[:1]
            except ValueError as error:
                raise ValueError(f"{where}.command={self.command!r} cannot be read: {error}") from error
            if not program or shutil.which(program[0]) is None:
                raise ValueError(f"{where}.command={self.command!r}: there is no program {''.join(program)!r}")


def read_address(address: str, where: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or set(address) & {"/", " "} or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{where}={address!r} must be HOST:PORT, such as 127.0.0.1:0, where only this machine can ask")
    return host.strip("[]"), int(port)


def find_agent(name: str, where: str = "agent") -> Callable[..., Any]:
    """Return the user's coroutine function. Raises ValueError."""
    function = registry.resolve_function(name, f"{where}.run")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{where}.run={name!r} must be `async def f(base_url, row)`")
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise ValueError(f"{where}.run={name!r} must be `async def f(base_url, row)`: {error}") from error
    return function
