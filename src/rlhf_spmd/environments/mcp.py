"""Tools of MCP servers, through the package ``mcp``. A process has one session with each server, for all rows."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from threading import Lock, Thread
from typing import Any, NamedTuple

from rlhf_spmd.config.words import first_line
from rlhf_spmd.environments.libraries import import_library

START_S = 60.0  # for a server to begin, and to list its tools
CALL_S = 3600.0  # after which the thread of a call ends for which nobody waits any more
KEYS = ("command", "env", "url")


class ServerLost(RuntimeError):
    """A server does not answer any more. It costs the row, and the next call begins another session."""


class Session(NamedTuple):
    """``closing`` ends the task that holds the session open."""

    client: Any
    closing: asyncio.Event


class McpServer:
    """A session with a server.

    - command: begins a server that speaks over its standard streams, with the variables ``env`` beside PATH, HOME and such
    - url: of a server that runs, in place of ``command``
    - schemas: OpenAI's schemas of the server's tools
    """

    def __init__(self, command: str | None = None, env: Mapping[str, str] | None = None, url: str | None = None) -> None:
        import_library("mcp.client", "mcp")
        self.command, self.env, self.url = command, dict(env or {}), url
        self.name = str(command or url)
        self._loop = asyncio.new_event_loop()
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        self.schemas: list[dict[str, Any]] = self._run(self._schemas(), START_S)

    def call(self, tool: str, /, **arguments: Any) -> str:
        """Return what a tool answers: text, or JSON of other content. Raises RuntimeError for its error, and ServerLost."""
        result = self._run(self._call(tool, arguments), CALL_S)
        parts = [part.text if part.type == "text" else part.model_dump_json(exclude_none=True) for part in result.content]
        if result.is_error:
            raise RuntimeError("\n".join(parts))
        return "\n".join(parts) if parts else json.dumps(result.structured_content, ensure_ascii=False)

    def _run(self, coroutine: Any, limit_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        except FutureTimeoutError:
            future.cancel()
            raise ServerLost(f"the MCP server {self.name!r} has not answered within {limit_s:g} s") from None

    async def _schemas(self) -> list[dict[str, Any]]:
        client = (await self._open()).client
        tools: list[Any] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if not (cursor := page.next_cursor):
                break
        functions = [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema} for tool in tools
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        session = await self._open()
        try:
            return await session.client.call_tool(tool, arguments)
        except Exception as error:  # the boundary to the library and the server
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                raise RuntimeError(error.message) from error  # the server has answered
            session.closing.set()
            if self._session is session:
                self._session = None
            raise ServerLost(f"the MCP server {self.name!r} is gone: {type(error).__name__}: {first_line(error)}") from error

    async def _open(self) -> Session:
        """Return the session; begin one if there is none. Raises ServerLost."""
        async with self._lock:
            if self._session is None:
                opened: asyncio.Future[Session] = self._loop.create_future()
                self._task = self._loop.create_task(self._hold_open(opened))
                self._session = await opened
            return self._session

    async def _hold_open(self, opened: asyncio.Future[Session]) -> None:
        """Hold a session open in one task, as the library asks for."""
        from mcp.client import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        server: Any = self.url
        if self.command is not None:
            program, *arguments = shlex.split(self.command)
            server = stdio_client(StdioServerParameters(command=program, args=arguments, env=self.env))
        try:
            async with Client(server) as client:
                session = Session(client, asyncio.Event())
                opened.set_result(session)
                await session.closing.wait()
        except Exception as error:  # the boundary to the library and the server
            if not opened.done():
                reason = f"{type(error).__name__}: {first_line(error)}"
                opened.set_exception(ServerLost(f"the MCP server {self.name!r} cannot be reached: {reason}"))


_servers: dict[str, McpServer] = {}  # of this process, by their settings as JSON
_lock = Lock()


def server_of(settings: Mapping[str, Any]) -> McpServer:
    """Return the process's session with a server. Raises ValueError for wrong settings and a server that does not begin."""
    key = json.dumps(settings, sort_keys=True)
    unknown = sorted(settings.keys() - {*KEYS})
    if unknown or ("command" in settings) == ("url" in settings):
        raise ValueError(f"servers: {key} must have a command (and env), or a url")
    with _lock:
        try:
            return _servers.get(key) or _servers.setdefault(key, McpServer(**settings))
        except ServerLost as error:
            raise ValueError(f"servers: {error}") from error


def tools_of_servers(servers: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return a function and OpenAI's schema for each tool of the servers, by name. Raises ValueError."""
    if not isinstance(servers, list | tuple) or not all(isinstance(server, Mapping) for server in servers):
        raise ValueError(f"servers={servers!r} must be a list, each with a command or a url")
    tools: dict[str, tuple[Any, dict[str, Any]]] = {}
    for server in map(server_of, servers):
        for schema in server.schemas:
            name = schema["function"]["name"]
            if name in tools:
                raise ValueError(f"servers: two of them have a tool {name!r}, and the model calls it by name")
            tools[name] = partial(server.call, name), schema
    return tools
