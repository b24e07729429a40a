"""What every endpoint does with a request and an error: reads a body within limits, waits while its client is there, answers errors."""

from __future__ import annotations

import asyncio
import json
import re
from ipaddress import ip_address
from typing import Any

from starlette.requests import ClientDisconnect, Request

MAX_DEPTH = 100  # of nested lists and objects in a request's JSON
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells half a character
BODY_S = 60.0  # within which a request must arrive whole


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


async def read_bytes(request: Request, max_bytes: int, key: str) -> bytes:
    """Return the body of a request. Raises HttpError if it is too slow, or longer than ``max_bytes``, the setting ``key``."""
    body = bytearray()
    too_long = HttpError(413, f"a request has at most {key}={max_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > max_bytes:  # h11 has seen that it is a number
        raise too_long
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError as error:
        raise HttpError(408, f"the request has not come within {BODY_S:.0f} s") from error
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
