"""What every endpoint does with a connection, a request and an error.

It reads a body within limits, waits while the client is there, answers errors, and ends connections that would only take a place.
"""

from __future__ import annotations

import asyncio
import json
import re
from ipaddress import ip_address
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_DEPTH = 100  # of nested lists and objects in a request's JSON
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half a character
REQUEST_S = 60.0  # within which the head of a connection's first request must arrive, and the body of each
UNREAD_S = 60.0  # after which a client that does not read its answer is cut off
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpError(ValueError):
    """An error with another HTTP status than 400."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def is_loopback(host: str) -> bool:
    """Return True for an address of this machine alone; False for a name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON of an answer to a request that failed with ``error``."""
    status = getattr(error, "status", 400 if isinstance(error, ValueError) else 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None, "code": getattr(error, "code", None)}}


def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed with ``error``. Starlette calls it."""
    status, content = error_answer(error)
    return JSONResponse(content, status, {"WWW-Authenticate": "Bearer"} if status == 401 else None)


def answer_nobody(request: Request, error: Exception) -> Response:
    """Return what is logged of a request whose client has gone away. Starlette calls it."""
    return Response(status_code=499)  # nginx's code for a client that has closed the connection


def read_body(raw: bytes) -> dict[str, Any]:
    """Return a request's JSON object. Raises ValueError if it is none, too deep, or has text that is not Unicode.

    The Python client's argument ``extra_body``, which proxies send as a field, stands for the fields that it has.
    """

    def depth(value: Any) -> int:
        children = value.values() if isinstance(value, dict) else value
        return 1 + max((depth(child) for child in children if isinstance(child, dict | list)), default=0)

    text = raw.decode("utf-8-sig")
    try:
        body = json.loads(text)
        is_deep = isinstance(body, dict) and depth(body) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"a request's JSON is at most {MAX_DEPTH} values deep")
    if not isinstance(body, dict):
        raise ValueError("a request is a JSON object")
    if SURROGATE.search(text):
        json.dumps(body, ensure_ascii=False).encode()
    extra = body.pop("extra_body", None) or {}
    if not isinstance(extra, dict):
        raise ValueError("extra_body must be an object")
    return extra | body


HANDLERS: dict[Any, ExceptionHandler] = {
    ValueError: answer_error,
    ClientDisconnect: answer_nobody,
}  # of a Starlette application


async def read_bytes(request: Request, max_bytes: int, key: str | None = None) -> bytes:
    """Return the body of a request. Raises HttpError if it is too slow, or longer than ``max_bytes``.

    ``key``: the setting that says how long; None: there is none.
    """
    body = bytearray()
    too_long = HttpError(413, f"a request has at most {f'{key}=' if key else ''}{max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:  # h11 has seen that it is a number
        raise too_long
    try:
        async with asyncio.timeout(REQUEST_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError as error:
        raise HttpError(408, f"the request has not come within {REQUEST_S:.0f} s") from error
    return bytes(body)


async def unless_gone(request: Request, awaited: Any) -> Any:
    """Return the result of ``awaited``, which is cancelled if the client goes away before. Raises ClientDisconnect then."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reply, disconnected = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({reply, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise ClientDisconnect
        return reply.result()
    finally:
        reply.cancel()
        disconnected.cancel()


class ServedConnection(H11Protocol):
    """A connection that is closed if the client sends no request in time or does not read for ``UNREAD_S``, or if there are too many.

    uvicorn's own would wait without end for the first request, for the rest of a request, and for a client that reads nothing. With
    ``limit_concurrency`` connections it would refuse requests on all of them; here there are fewer, since further ones are refused.
    """

    cut_off: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.limit_concurrency is not None and len(self.connections) + 1 >= self.limit_concurrency:
            self.transport = transport
            transport.write(BUSY)
            transport.close()
            return
        super().connection_made(transport)
        self._await_request(self.loop.time() + REQUEST_S)

    def data_received(self, data: bytes) -> None:
        due = self.timeout_keep_alive_task
        when = None if due is None or due.cancelled() else due.when()
        super().data_received(data)
        if self.timeout_keep_alive_task is None:
            self._await_request(self.loop.time() + self.timeout_keep_alive if when is None else when)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.cut_off = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cut_off is not None:
            self.cut_off.cancel()

    def _await_request(self, when: float) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_at(when, self.timeout_keep_alive_handler)
