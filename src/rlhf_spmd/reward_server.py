"""A reward server for ``reward.function=http``, as small as it gets: the standard library, and a reward function by its name.

rlhf-spmd reward-server --function gsm8k --port 8000
rlhf-spmd train ... reward.function=http 'reward.kwargs={url: "http://localhost:8000/score"}'

With ``--token-env NAME`` a request must bring the bearer token that is in that variable here and, named by ``kwargs.token_env``, there.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlhf_spmd.process.arguments import Parser, ignore_closed_pipes
from rlhf_spmd.rewards.binding import ReadyReward
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import read_result
from rlhf_spmd.rewards.row_values import TURNS


def score(reward: ReadyReward, request: dict[str, Any]) -> list[Any]:
    """Return a score for each row, null where the function does not apply or fails."""
    rows = []
    for row, prompt, completion in zip(request["rows"], request["prompts"], request["completions"], strict=True):
        text = completion if isinstance(completion, str) else ""
        additional_columns = {} if isinstance(completion, str) else {TURNS: completion}
        if isinstance(prompt, list):  # without a begun answer, which the completion contains
            additional_columns["messages"] = prompt
        rows.append((row.get("prompt", ""), text, row | additional_columns))
    calls = [rows] if reward.bound.batched else [[row] for row in rows]
    return [None if value is None else read_result(value)[0] for call in calls for value in reward.call(call, 60.0)]


def serve(reward: ReadyReward, port: int, token: str | None, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Return the server, not yet running; port 0 is a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            authorization = self.headers.get("Authorization", "")
            try:
                num_bytes = int(self.headers.get("Content-Length", 0))
                if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
                    self.answer(401, {"error": "wrong or no bearer token"})
                    return self.discard(num_bytes)
                body = self.rfile.read(num_bytes)
                return self.answer(200, {"scores": score(reward, json.loads(body))})
            except Exception as error:  # the boundary to the user's function: its error is the answer
                return self.answer(400, {"error": f"{type(error).__name__}: {error}"})

        def discard(self, num_bytes: int) -> None:
            """Read the body of a refused request in parts: with unread bytes the client would get a reset in place of the answer."""
            while num_bytes > 0 and (part := self.rfile.read(min(num_bytes, 1 << 16))):
                num_bytes -= len(part)

        def answer(self, code: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer((host, port), Handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Return the exit code: 2, after one line, if it cannot serve."""
    ignore_closed_pipes()
    parser = Parser("reward-server", __doc__)
    parser.add_argument("--function", required=True, help="as reward.function")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--token-env", help="variable with the bearer token")
    try:
        arguments = parser.parse_args(argv)
        server = open_server(arguments)
    except ValueError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    with server, suppress(KeyboardInterrupt):
        print(f"http://{arguments.host}:{server.server_port}/score", flush=True)
        server.serve_forever()
    return 0


def open_server(arguments: argparse.Namespace) -> ThreadingHTTPServer:
    """Return the server, not yet running. Raises ValueError, one line, for settings with which it cannot serve."""
    if arguments.token_env and arguments.token_env not in os.environ:
        raise ValueError(f"--token-env {arguments.token_env}: this variable is not set")
    token = os.environ[arguments.token_env] if arguments.token_env else None
    config = RewardConfig(function=arguments.function)
    try:
        config.check()
        reward = config.bind("reward").instantiate()
    except ValueError as error:
        raise ValueError(f"--function {arguments.function}: {error}") from error
    try:
        return serve(reward, arguments.port, token, arguments.host)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {arguments.host} --port {arguments.port}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
