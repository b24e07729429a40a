"""Tools: Python functions, and tools of MCP servers, that the model calls. The chat template renders what they return as tool messages.

:mod:`tool_calls` reads the calls of a turn, in the form of the model's family. A turn without a call is the last.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import BoundedSemaphore, Thread
from typing import Any

from rlhf_spmd.config.registry import resolve_function
from rlhf_spmd.config.words import first_line
from rlhf_spmd.environments.config import ChatMessage
from rlhf_spmd.environments.mcp import ServerLost, tools_of_servers
from rlhf_spmd.environments.tool_calls import FORMATS, ToolCall, TurnContext, check_format, detect_format, parse_turn

MAX_PARALLEL_CALLS = 8  # of one turn
MAX_RUNNING = 512  # threads of calls in a process, with those that nobody waits for any more
RUNNING_CALLS = BoundedSemaphore(MAX_RUNNING)
SHARE_OF_TIME = 0.9  # that the calls have of a turn's; the rest is for reading the turn and rendering the results


class Tools:
    """Functions that the model calls. The calls of a turn run together, in threads.

    The model reads an error in place of a result that does not come in time; the thread of that call is left alone.

    - tools: functions, each ``package.module:function`` or ``file.py:function``; they are called from many threads, and a
      coroutine is awaited
    - servers: MCP servers, each ``{command: ..., env: {...}}`` or ``{url: ...}``, whose tools the model calls, too. A server that
      is gone costs the row
    - format: one of ``FORMATS``, the form of the model's calls; None: that of ``chat_template``
    - role: role of the messages that the model reads
    - chat_template: text of the model's template
    """

    gives_reward = False

    def __init__(
        self,
        tools: Sequence[str] = (),
        servers: Sequence[Mapping[str, Any]] = (),
        format: str | None = None,
        role: str = "tool",
        chat_template: str | None = None,
    ) -> None:
        check_format(format, "format")
        self.functions = _functions(tools)
        self.role = role
        self.format = format or detect_format(chat_template)
        self.text_parameters = {name: _text_parameters(function) for name, function in self.functions.items()}
        for name, (function, schema) in tools_of_servers(servers).items():
            self.functions[name] = function
            properties = schema["function"]["parameters"].get("properties", {})
            self.text_parameters[name] = frozenset(key for key, value in properties.items() if value.get("type") == "string")

    @staticmethod
    def schemas(
        tools: Sequence[str] = (), servers: Sequence[Mapping[str, Any]] = (), format: str | None = None, **_: str
    ) -> list[dict[str, Any]]:
        """Return OpenAI's schemas of the functions, then of the servers' tools. Raises ValueError, also for an unknown ``format``."""
        check_format(format, "format")
        if not (tools or servers):
            raise ValueError("give tools, or servers, or both")
        schemas = {name: tool_schema(function) for name, function in _functions(tools).items()}
        of_servers = {name: schema for name, (_, schema) in tools_of_servers(servers).items()}
        if twice := sorted(schemas.keys() & of_servers.keys()):
            raise ValueError(f"a function and a server have a tool {twice[0]!r}, and the model calls it by name")
        return [*schemas.values(), *of_servers.values()]

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, text: str, context: TurnContext | None = None) -> tuple[str | list[ChatMessage], float, bool]:
        calls = parse_turn(text, self.format, context, self.text_parameters).calls
        if not calls:
            return "", 0.0, True
        limit_s = SHARE_OF_TIME * (context or TurnContext()).timeout_s
        replies = self._run_calls(calls, limit_s)
        late = f"error: no result within {limit_s:g} s"
        names = [call.name if call else "" for call in calls]
        return [{"role": self.role, "name": name, "content": replies.get(i, late)} for i, name in enumerate(names)], 0.0, False

    def _run_calls(self, calls: Sequence[ToolCall | None], limit_s: float) -> dict[int, str]:
        """Return the replies that come within ``limit_s``, by the calls' numbers.

        Raises RuntimeError if no thread is free, and ServerLost.
        """
        deadline = time.monotonic() + limit_s
        replies: dict[int, str | ServerLost] = {}
        waiting = iter(enumerate(calls))  # an iterator of a list, which threads may share

        def work() -> None:
            for number, call in waiting:
                if time.monotonic() < deadline:
                    replies[number] = self._reply(call)
            RUNNING_CALLS.release()

        threads: list[Thread] = []
        max_threads = min(len(calls), MAX_PARALLEL_CALLS)
        while len(threads) < max_threads and RUNNING_CALLS.acquire(timeout=0.0 if threads else limit_s):
            threads.append(Thread(target=work, name="tool", daemon=True))
            threads[-1].start()
        if not threads:  # what the model reads would be the same in every later turn: this row fails, and is counted
            raise RuntimeError(f"{MAX_RUNNING} calls of tools have not returned; give the tools time limits of their own")
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        for reply in [*replies.values()]:
            if isinstance(reply, ServerLost):
                raise reply
        return {number: reply for number, reply in replies.items() if isinstance(reply, str)}

    def _reply(self, call: ToolCall | None) -> str | ServerLost:
        """Return what the function returned, as text or JSON, or what is wrong with the call."""
        if call is None:
            return f"error: the call cannot be read; a call is {FORMATS[self.format].form}"
        if call.name not in self.functions:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self.functions)}"
        try:
            result = self.functions[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_result_of(result))
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                raise TypeError("the tool returned a generator, not a result")
            return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except ServerLost as error:
            return error
        # The boundary to the user's code, called with what the model wrote: the model reads the error and may try again.
        except BaseException as error:
            return f"error: {type(error).__name__}: {error}"


environment = Tools


async def _result_of(result: Awaitable[Any]) -> Any:
    return await result


def _text_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that take text and nothing else."""
    hints = getattr(function, "__annotations__", {})
    return frozenset(name for name, hint in hints.items() if hint in (str, "str"))


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return OpenAI's schema of a function, from its type hints and its docstring's ``Args:``.

    Raises ValueError, one line, if they are missing.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(f"tool {name!r} needs type hints and a docstring with its arguments: {first_line(error)}") from error
    return schema


def _functions(tools: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the functions by the names that the model uses. Raises ValueError, also for a generator."""
    if isinstance(tools, str):
        raise ValueError(f"tools={tools!r} must be a list of functions, each package.module:function or file.py:function")
    functions = {function.__name__: function for function in (resolve_function(name, "tool") for name in tools)}
    if len(functions) < len(tools):
        raise ValueError(f"tools={list(tools)}: two functions have one name, by which the model calls them")
    for name, function in functions.items():
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError(f"tool {name!r} is a generator (it has a yield); it must return its result")
    return functions
