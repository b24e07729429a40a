"""HTTP in front of a ``Service``: who may ask, how much, and how errors are answered.

It runs on a thread of its own, so that connections do not slow down the rank that computes.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import count
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_spmd.agents.forms import CHAT, TRANSLATED, AnswerForm, Form
from rlhf_spmd.agents.http import (
    HANDLERS,
    HttpError,
    ServedConnection,
    answer_error,
    is_loopback,
    read_body,
    read_bytes,
    unless_gone,
)
from rlhf_spmd.inference.openai_forms import Dialect
from rlhf_spmd.inference.service import Part, Service

MAX_CONNECTIONS = 1024  # further ones are refused
READERS = 2  # threads that tokenise long requests, and as many for short ones, which so wait for no long one
LONG_BYTES = 1 << 16  # of a long request
SILENT_S = 75.0  # after which a connection without a further request is closed
CLOSE_S = 2.0  # for clients to read their answers when the service has ended


@dataclass(frozen=True)
class AccessRules:
    """Who may ask, and how much.

    - host: the address that the endpoint was told to listen at
    - token: the bearer token that requests for the model must have; None: none
    - origins: of web pages whose scripts may ask from a browser; "*": all
    - max_body_bytes: of a request; max_queued_requests: that are read or wait for their first turn
    """

    host: str
    token: str | None
    origins: Sequence[str]
    max_body_bytes: int = 1 << 23
    max_queued_requests: int = 1024

    def check_source(self, headers: Mapping[str, str], bound: str) -> None:
        """Raise HttpError. ``bound``: the address that the endpoint listens at.

        If it is a loopback address, a web page whose host name resolves to it (DNS rebinding) must not be answered.
        """
        name = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
        if is_loopback(bound) and not (name in ("localhost", self.host) or is_loopback(name)):
            raise HttpError(
                403, f"Host: {name!r} is not this machine; ask {bound} by its address, or serve others with host=0.0.0.0"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins and "*" not in self.origins:
            raise HttpError(403, f"Origin: {origin!r} is not among allowed_origins={[*self.origins]}")

    def check_token(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError for a missing or wrong bearer token. Clients of Anthropic's may send it as ``x-api-key``."""
        header = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        if self.token is not None and not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise HttpError(401, "the bearer token is missing or wrong", "invalid_api_key")


class Endpoint:
    """Passes requests to ``service`` and its answers back. Raises ValueError if it cannot listen."""

    def __init__(self, port: int, access: AccessRules, service: Service) -> None:
        self.access = access
        self.service = service
        self.numbers = count()
        self.readers = [ThreadPoolExecutor(READERS, f"read-{kind}-requests") for kind in ("short", "long")]
        host = access.host
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise ValueError(f"host={host}, port={port}: cannot listen there: {error.strerror or error}") from error
        self.bound, self.port = self.socket.getsockname()[:2]
        self.url = f"http://{f'[{self.bound}]' if ':' in self.bound else self.bound}:{self.port}/v1"
        config = uvicorn.Config(
            self._app(),
            interface="asgi3",
            proxy_headers=False,
            http=ServedConnection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=MAX_CONNECTIONS,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=int(SILENT_S),
            timeout_graceful_shutdown=int(CLOSE_S),
        )
        self.server = uvicorn.Server(config)
        self.thread = Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening; answers that are being sent are finished first."""
        self.server.should_exit = True
        self.thread.join(2 * CLOSE_S)
        for pool in self.readers:
            pool.shutdown(wait=False, cancel_futures=True)

    def _app(self) -> ASGIApp:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", partial(self._answer, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", partial(self._answer, "chat"), methods=["POST"]),
            *(Route(f"/v1/{form.path}", partial(self._answer, "chat", form=form), methods=["POST"]) for form in TRANSLATED),
            Route("/inference/v1/generate", partial(self._answer, "generate"), methods=["POST"]),
            Route("/metrics", self._metrics),
            Route("/health", self._health),
            Route("/version", self._version),
        ]
        cors = Middleware(CORSMiddleware, allow_origins=self.access.origins, allow_methods=["*"], allow_headers=["*"])
        handlers = {**HANDLERS, HTTPException: _answer_http_error, Exception: answer_error}
        app = Starlette(routes=routes, middleware=[cors] if self.access.origins else [], exception_handlers=handlers)
        return partial(self._gate, app)

    async def _gate(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse requests from elsewhere, and log each request in a line on standard error."""
        start_time = time.perf_counter()
        status = "gone"
        request = Request(scope)

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            self.access.check_source(request.headers, self.bound)
            await app(scope, receive, send_and_note_status)
        except HttpError as error:
            await answer_error(request, error)(scope, receive, send_and_note_status)
        finally:
            client = f"{request.client.host}:{request.client.port}" if request.client else "-"
            line = f"{request.method} {scope['raw_path'].decode('ascii', 'replace')}"
            seconds = time.perf_counter() - start_time
            print(f"{time.strftime('%H:%M:%S')} {client} {line} {status} {seconds:.3f} s", file=sys.stderr, flush=True)

    async def _models(self, request: Request) -> Response:
        self.access.check_token(request.headers)
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in self.service.names]})

    async def _model(self, request: Request) -> Response:
        self.access.check_token(request.headers)
        if (name := request.path_params["name"]) not in self.service.names:
            raise HttpError(404, f"the model {name!r} is not here; there is {', '.join(self.service.names)}", "model_not_found")
        return JSONResponse(self._model_object(name))

    def _model_object(self, name: str) -> dict[str, Any]:
        """Return OpenAI's object for a model, with vLLM's fields. An adapter has the model as its ``parent``."""
        service = self.service
        parent = {} if name == service.name else {"parent": service.name}
        length = service.processor.longest
        return {"id": name, "object": "model", "created": 0, "owned_by": "rlhf_spmd", "max_model_len": length, **parent}

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": self.service.state}, 200 if self.service.state == "on" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("rlhf_spmd")})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.service.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _read(self, raw: bytes, dialect: Dialect, form: Form) -> tuple[dict[str, Any], AnswerForm]:
        """Return a request as the service takes it, and the form of its answer. Raises ValueError."""
        body = read_body(raw)
        return self.service.read(form.chat_of(body), dialect), form.answer(body)

    async def _answer(self, dialect: Dialect, request: Request, form: Form = CHAT) -> Response:
        """Answer a request. Raises ValueError, or ClientDisconnect if the client goes away.

        ``form``: in which a chat is asked for and answered.
        """
        self.access.check_token(request.headers)
        loop = asyncio.get_running_loop()
        service = self.service
        limit = self.access.max_queued_requests
        if len(service.replies) - len(service.running) >= limit:
            raise HttpError(429, f"max_queued_requests={limit} requests wait already; ask again later")
        parts: asyncio.Queue[Part] = asyncio.Queue()
        number = next(self.numbers)
        service.replies[number] = lambda part: loop.call_soon_threadsafe(parts.put_nowait, part)
        is_served = False  # the service has the request, and has not ended its answer

        def leave() -> None:
            del service.replies[number]
            if is_served:
                service.arrivals.put((number, None))

        async def events(part: Part) -> AsyncIterator[str]:
            nonlocal is_served
            while part is not None:
                for event in answer.events(part[1]):
                    yield event
                part = await parts.get()
            is_served = False
            for event in answer.end():
                yield event

        is_stream = False
        try:
            raw = await read_bytes(request, self.access.max_body_bytes, "max_body_bytes")
            reader = self.readers[len(raw) > LONG_BYTES]
            body, answer = await loop.run_in_executor(reader, self._read, raw, dialect, form)
            del raw
            if service.state != "on":
                raise HttpError(503, "the server is ending")
            service.arrivals.put((number, body))
            is_served = True
            first = await unless_gone(request, parts.get())
            assert first is not None, "an answer has a part"
            is_stream = first[0] == 200 and bool(body["body"].get("stream"))
            is_served = is_stream
            if is_stream:
                return EventStream(events(first), leave)
            return JSONResponse(answer.whole(first[1]) if first[0] == 200 else first[1], first[0])
        finally:
            if not is_stream:
                leave()


class EventStream(StreamingResponse):
    """Server-sent events. ``leave`` is called at their end, also if the client goes away."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


def _answer_http_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request for an unknown path or method."""
    assert isinstance(error, HTTPException), "registered for it"
    path = request.url.path
    text = f"{path} takes no {request.method}" if error.status_code == 405 else f"there is nothing at {path}"
    response = answer_error(request, HttpError(error.status_code, text))
    response.headers.update(error.headers or {})
    return response
