"""Tools: Python functions that the model calls. The chat template renders what they return as tool messages.

A call is JSON, ``{"name": ..., "arguments": {...}}`` (or Llama's ``parameters``), after a marker: ``<tool_call>``
(Qwen, Hermes), ``<|python_tag|>`` (Llama 3.1) or ``[TOOL_CALLS]`` (Mistral, a list of calls). A turn without a call is
the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_spmd.config.registry import resolve_function
from rlhf_spmd.config.schema import first_line
from rlhf_spmd.environments.config import ChatMessage

BEGIN = "<tool_call>"


class Tools:
    """``tools``: functions, each ``package.module:function`` or ``file.py:function``, called from many threads.

    ``begin``: the marker before a call; empty: the whole turn is the call, and any other turn is the answer. ``role``:
    role of the messages that the model reads.
    """

    gives_reward = False

    def __init__(self, tools: Sequence[str], begin: str = BEGIN, role: str = "tool") -> None:
        self.functions = _functions(tools)
        self.begin, self.role = begin, role

    @staticmethod
    def schemas(tools: Sequence[str], **_: str) -> list[dict[str, Any]]:
        return [tool_schema(function) for function in _functions(tools).values()]

    def reset(self, row: Mapping[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[str | list[ChatMessage], float, bool]:
        calls = find_calls(text, self.begin)
        if not calls:
            return "", 0.0, True
        return [self._answer(call if isinstance(call, dict) else {}) for call in calls], 0.0, False

    def _answer(self, call: Mapping[str, Any]) -> ChatMessage:
        """Returns what the function returned, as text or JSON, or what is wrong with the call."""
        name, arguments = str(call.get("name")), call.get("arguments", call.get("parameters", {}))
        if "name" not in call or not isinstance(arguments, dict):
            reply = 'error: a call is JSON: {"name": ..., "arguments": {...}}'
        elif name not in self.functions:
            reply = f"error: there is no tool {name!r}; there are {', '.join(self.functions)}"
        else:
            try:
                result = self.functions[name](**arguments)
                reply = result if isinstance(result, str) else json.dumps(result, default=str)
            # The boundary to the user's code, called with what the model wrote: the model reads the error and may try again.
            except (Exception, SystemExit) as error:
                reply = f"error: {type(error).__name__}: {error}"
        return {"role": self.role, "name": name, "content": reply}


environment = Tools


def find_calls(text: str, begin: str = BEGIN) -> list[Any]:
    """Returns the JSON after each ``begin`` (lists flattened), None for invalid JSON. Without ``begin``: the text, if it
    is a call."""
    found: list[Any] = []
    for part in text.split(begin)[1:] if begin else [text]:
        try:
            value, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except (ValueError, RecursionError):
            value = None
        found += value if isinstance(value, list) else [value]
    return found if begin else [call for call in found if isinstance(call, dict) and "name" in call]


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns OpenAI's schema of a function, from its type hints and its docstring's ``Args:``.

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
    """Returns the functions by the names that the model uses. Raises ValueError."""
    if isinstance(tools, str) or not tools:
        raise ValueError(f"tools={tools!r} must be a list of functions, each package.module:function or file.py:function")
    found = {function.__name__: function for function in (resolve_function(name, "tool") for name in tools)}
    if len(found) < len(tools):
        raise ValueError(f"tools={list(tools)}: two functions have one name, by which the model calls them")
    return found
