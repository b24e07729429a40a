"""Where programs outside find the endpoints of a run: the rank's process listens, and writes addresses and keys to the run's directory.

The process that answers agents takes the socket over (:mod:`~.outside_agents`).
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_spmd.agents.config import read_address
from rlhf_spmd.telemetry.run_dir import atomic_write_bytes

ADDRESSES_FILE = "agents.jsonl"  # of a run's directory
LISTENER = "RLHF_SPMD_AGENT_LISTENER"  # variable of the process that answers agents: its socket's number and its key


class Listener:
    """A socket for programs outside, in the rank's process. Raises ValueError if it cannot listen.

    - url, key: what they must know
    - environment: how the process that answers them takes the socket over
    """

    def __init__(self, external: str, replica: int) -> None:
        host, port = read_address(external, "agent.external")
        port += replica if port else 0
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            reason = f"agent.external={external!r}: replica {replica} cannot listen at port {port}"
            raise ValueError(f"{reason}: {getattr(error, 'strerror', None) or error}") from error
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.socket.getsockname()[1]}"
        self.key = secrets.token_urlsafe(32)
        self.environment = {LISTENER: f"{self.socket.fileno()} {self.key}"}


def write_addresses(run_dir: Path, listeners: Sequence[Mapping[str, str] | None]) -> Path:
    """Write a line of JSON with ``url`` and ``key`` for each replica, for this user alone. Returns the file's path."""
    path = run_dir / ADDRESSES_FILE
    lines = [json.dumps(listener) + "\n" for listener in listeners if listener is not None]
    atomic_write_bytes(path, "".join(lines).encode(), mode=0o600)
    return path
