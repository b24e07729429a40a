"""Programs that the trainer has not started: they fetch episodes from the endpoint of a replica and post rewards there.

- ``POST /episodes`` answers ``{"base_url": ..., "row": {...}}``, or 204 if there is none within ``LONG_POLL_S``. It needs the key that
  only the run's directory has, as a bearer token
- ``POST BASE_URL/reward`` takes ``{"reward": number}`` or ``{"failure": "why"}``, which ends the episode. It is below ``base_url``, so
  a program needs one address, and OpenAI's clients can post there. Sent again, it gets the same answer

``base_url`` begins with the address that the program itself has asked, so tunnels and other names of this machine work.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_spmd.agents.episodes import Episode
from rlhf_spmd.agents.http import HttpError, read_body, read_bytes, unless_gone
from rlhf_spmd.agents.listener import ADDRESSES_FILE, LISTENER
from rlhf_spmd.agents.run_episodes import read_reward

LONG_POLL_S = 30.0
LOOK_S = 0.05  # between looks for an episode
MAX_REWARD_BYTES = 1 << 16
MAX_FAILURE = 2000  # characters
MAX_POSTED = 1 << 16  # results that may be sent again: the latest


class OutsideAgents:
    """What :class:`AgentProcess` is for agents that the trainer starts. One thread answers requests, another one has the rest.

    ``by_secret``: the episodes that are offered or run. Whoever takes one out of it decides how its attempt ends.
    """

    is_ready = False  # the time of an episode begins when it is fetched
    has_ended = False
    is_silent = False

    def __init__(self) -> None:
        fd, self._key = os.environ.pop(LISTENER).split()
        self.socket = socket.socket(fileno=int(fd))
        self.by_secret: dict[str, Episode] = {}
        self.results: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.routes = [
            Route("/episodes", self._episodes, methods=["POST"]),
            Route("/{secret}/v1/reward", self._reward, methods=["POST"]),
        ]
        self._has_closed = False
        self._offers: deque[Mapping[str, Any]] = deque()
        self._posted: dict[str, dict[str, Any]] = {}  # by secret

    def send(self, episode: Mapping[str, Any]) -> None:
        """Offer an episode to whoever asks next."""
        self._offers.append(episode)

    def kill(self) -> int:
        """Withdraw what is offered, and offer nothing more. Returns 0: no process has ended."""
        self._has_closed = True
        self._offers.clear()
        return 0

    async def _episodes(self, request: Request) -> Response:
        header = request.headers.get("authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self._key}".encode()):
            raise HttpError(401, f"the key is missing or wrong; the run's {ADDRESSES_FILE} has it", "invalid_api_key")
        offer = await unless_gone(request, self._next_offer())
        if offer is None:
            return Response(status_code=204)
        path = urlsplit(offer["base_url"]).path
        return JSONResponse({"base_url": str(request.base_url).rstrip("/") + path, "row": offer["row"]})

    async def _next_offer(self) -> Mapping[str, Any] | None:
        """Return the first offered episode, whose time begins; None if there is none for a while."""
        end = time.monotonic() + LONG_POLL_S
        while time.monotonic() < end and not self._has_closed:
            await asyncio.sleep(LOOK_S)  # a client that has gone already is noticed meanwhile
            while self._offers:
                offer = self._offers.popleft()
                if (episode := self.by_secret.get(_secret(offer["base_url"]))) is not None:
                    episode.has_begun = True
                    return offer
        return None

    async def _reward(self, request: Request) -> Response:
        secret = request.path_params["secret"]
        result = _read_result(read_body(await read_bytes(request, MAX_REWARD_BYTES)))
        if (posted := self._posted.get(secret, result)) != result:
            raise HttpError(409, f"the episode has ended with {json.dumps(posted)}")
        if secret not in self._posted:
            if (episode := self.by_secret.pop(secret, None)) is None:  # from now on the episode does not time out
                raise HttpError(403, "there is no such episode, or it has ended", "invalid_api_key")
            self._posted[secret] = result
            self.results.put({"number": episode.attempt_number, **result})
            if len(self._posted) > MAX_POSTED:
                del self._posted[next(iter(self._posted))]
        return JSONResponse(result)


def _secret(base_url: str) -> str:
    return urlsplit(base_url).path.split("/")[1]


def _read_result(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return how an episode has ended as its program says it. Raises ValueError."""
    refusal = ValueError(f'post {{"reward": a finite number}} or {{"failure": "why"}}, not {dict(body)!r:.200}')
    if "failure" in body:
        if "reward" in body or not isinstance(body["failure"], str):
            raise refusal
        return {"failure": body["failure"][:MAX_FAILURE]}
    try:
        return {"reward": read_reward(body)}
    except (TypeError, OverflowError) as error:
        raise refusal from error
