"""YAML whose plain values stay text: only the type of a key, which ``schema`` knows, says what its value is.

YAML 1.1, which PyYAML reads, makes ``false`` of ``No``, 750 of ``12:30``, 8 of ``010`` and 7 of ``007``. A text key must get the text
that was written, and a numeric key the number that a person means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode, YAMLError

MAX_DEPTH = 64  # levels of a file
MAX_VALUES = 100_000  # values of a file, where each alias counts as a copy
MAX_DIGITS = 4000  # of an integer
NULLS = ("", "~", "null", "Null", "NULL")
TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"[-+]?(0|[1-9]\d*)", re.ASCII)  # what begins with 0 is rather a name than a number
REAL = re.compile(r"[-+]?(\.\d+|(0|[1-9]\d*)(\.\d*)?)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
SPECIAL = re.compile(r"[-+]?\.(inf|nan)", re.ASCII | re.IGNORECASE)


class Plain(str):
    """A value that was written without quotes and is not null."""

    __slots__ = ()


def resolve(value: Any) -> Any:
    """Return ``value`` for a key of any type: plain values become what YAML 1.2's core schema makes of them.

    Its integers are decimal and have no leading zeros.
    """
    if isinstance(value, dict):
        return {resolve(key): resolve(child) for key, child in value.items()}
    if isinstance(value, list):
        return [resolve(child) for child in value]
    if not isinstance(value, Plain):
        return value
    if value in TRUTHS:
        return TRUTHS[value]
    if INTEGER.fullmatch(value):
        return int(value) if len(value) < MAX_DIGITS else float(value)  # infinite: Python refuses to read it
    if REAL.fullmatch(value):
        return float(value)
    return float(value.replace(".", "")) if SPECIAL.fullmatch(value) else str(value)


def parse(text: str) -> Any:
    """Return the value of a YAML document: dicts, lists, None, :class:`Plain`, and quoted text as str. Raises YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _Builder().value(node, 0)
    except RecursionError:
        raise YAMLError(_too_deep()) from None


def parse_value(text: str) -> Any:
    """Return the value of an override. Raises YAMLError.

    It is YAML if it begins as a list, a mapping or quoted text. Any other value is plain, whatever characters it has.
    """
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        return parse(text)
    return None if text in NULLS else Plain(text)


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return a copy of mappings and sequences of any kind, in dicts and lists. Raises ValueError for too deep nesting."""
    if depth > MAX_DEPTH:
        raise ValueError(_too_deep())
    if isinstance(value, Mapping):
        return {key: to_plain(child, depth + 1) for key, child in value.items()}
    return [to_plain(child, depth + 1) for child in value] if isinstance(value, list | tuple) else value


class _Loader(yaml.BaseLoader):
    """Reads YAML's nodes. A scalar's tag is ``plain`` if it has neither quotes nor a tag of its own."""

    def resolve(self, kind: type[Node], value: str | None, implicit: Any) -> str:
        if kind is ScalarNode:
            return "plain" if implicit[0] else "str"
        return "seq" if kind is SequenceNode else "map"


class _Builder:
    """Builds the values of nodes. The value of an alias is built again, and counted again, wherever the alias stands."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, node: Node, depth: int) -> Any:
        self._num_values += 1
        if depth > MAX_DEPTH:
            raise YAMLError(_too_deep())
        if self._num_values > MAX_VALUES:
            raise YAMLError(f"more than {MAX_VALUES} values, its aliases followed")
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, MappingNode) and tag == "map":
            return self._mapping(node, depth)
        if isinstance(node, SequenceNode) and tag == "seq":
            return [self.value(child, depth + 1) for child in node.value]
        if isinstance(node, ScalarNode) and tag in ("plain", "str", "int", "float", "bool", "null"):
            if tag == "null" or (tag == "plain" and node.value in NULLS):
                return None
            return str(node.value) if tag == "str" else Plain(node.value)
        raise yaml.MarkedYAMLError(problem=f"there is no {node.tag} here", problem_mark=node.start_mark)

    def _mapping(self, node: MappingNode, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, child in node.value:
            if not isinstance(key, ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.tag == "plain" and key.value == "<<":
                for part in self._merged(child, depth):
                    merged = {**part, **merged}  # of a key in several mappings the first value counts
                continue
            if key.value in values:
                raise yaml.MarkedYAMLError(problem=f"found duplicate key {key.value}", problem_mark=key.start_mark)
            values[Plain(key.value) if key.tag == "plain" else str(key.value)] = self.value(child, depth + 1)
        return {**merged, **values}

    def _merged(self, node: Node, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the mappings whose keys ``<<`` merges into another one."""
        for part in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(part, MappingNode):
                raise yaml.MarkedYAMLError(problem="<< takes a mapping, or a list of them", problem_mark=part.start_mark)
            yield self.value(part, depth + 1)


def _too_deep() -> str:
    return f"it is nested deeper than {MAX_DEPTH} levels"
