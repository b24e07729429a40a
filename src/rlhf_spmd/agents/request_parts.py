"""What the other forms of chats have in common: content that is a list of typed parts, and tools. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def kind_of(part: Any, default: str | None = None) -> str | None:
    """Return the type of a part of a request; of one that is no object, Python's name of what it is."""
    return part.get("type", default) if isinstance(part, dict) else type(part).__name__


def joined_text(content: Any, kinds: Collection[str], where: str) -> str:
    """Return text, or the texts of a list of parts of these ``kinds`` as one. Raises ValueError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: the content must be text or a list of texts, not {content!r}")
    for part in content:
        if kind_of(part) not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part of the type {kind_of(part)!r}; only text is supported")
    return "".join(part["text"] for part in content)


def chat_tools(tools: Any, kind: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return tools as a chat has them. ``names``: a chat's name of each of their fields. Raises ValueError for another ``kind``."""
    if not isinstance(tools, list):
        raise ValueError("tools must be a list of functions")
    for number, tool in enumerate(tools):
        if kind_of(tool, kind) != kind:
            reason = f"only {kind!r} is supported: the server has no tools of its own"
            raise ValueError(f"tools[{number}] has the type {kind_of(tool)!r}; {reason}")
    return [{"type": "function", "function": {names[key]: tool[key] for key in names if tool.get(key)}} for tool in tools]
