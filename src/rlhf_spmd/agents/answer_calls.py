"""Reads the calls of tools in the responses to a chat, whole or while they grow."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from rlhf_spmd.data.tokenizer import Decoding, added_places, spelled_marks
from rlhf_spmd.environments.tool_calls import FORMATS, ToolCall, TurnContext, parse_turn

ID_CHARACTERS = 9  # of a call's id: Mistral's templates take no other length


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for what is none of OpenAI's schemas of a function."""
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{number}] must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}")


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls of ``tools``, of at most one unless ``parallel``, as vLLM has it.

    Raises ValueError if two tools define one name differently.
    """
    definitions: dict[str, dict[str, Any]] = {}
    items = []
    for function in (tool["function"] for tool in tools):
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        for section in ("$defs", "definitions"):  # where references look for them: at the top
            defined = definitions.setdefault(section, {})
            for name, schema in parameters.pop(section, {}).items():
                if defined.setdefault(name, schema) != schema:
                    raise ValueError(f"tools: functions define {section}/{name} differently; give one of them another name")
        properties = {"name": {"const": function["name"]}, "parameters": parameters}
        items.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": items}} | ({} if parallel else {"maxItems": 1})
    return schema | {section: defined for section, defined in definitions.items() if defined}


def forced_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with the characters that calls of ``tools`` must have by :func:`calls_schema`."""
    functions = [tool["function"] for tool in tools]
    required = [(function.get("parameters") or {}).get("required") or [] for function in functions]
    calls = [
        {"name": function["name"], "parameters": dict.fromkeys(names, "")}
        for function, names in zip(functions, required, strict=True)
    ]
    return json.dumps(calls, ensure_ascii=False)


def text_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return for each function of OpenAI's schemas the parameters that take text and nothing else."""
    names: dict[str, set[str]] = {}
    for function in (tool["function"] for tool in tools):
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        items = properties.items() if isinstance(properties, dict) else ()
        names[function["name"]] = {key for key, value in items if isinstance(value, dict) and value.get("type") == "string"}
    return names


@dataclass(frozen=True)
class AnswerCalls:
    """How calls in a response are read.

    - format: one of ``FORMATS``
    - text_parameters: function -> its parameters that take text
    - parallel: false: only the first call is given
    - prompt: its text, with its special tokens
    - thoughts: the tags between which reasoning is separated; None: it is not separated
    - hides_special: the content has no special tokens
    """

    tokenizer: Any
    format: str
    text_parameters: Mapping[str, Collection[str]]
    parallel: bool
    prompt: str
    thoughts: tuple[str, str] | None
    hides_special: bool

    def split(self, ids: Sequence[int], text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the text without calls, and the calls in OpenAI's form.

        ``ids``: the tokens of a response, or of its beginning; ``text``: their text with special tokens. A text without a
        call that can be read is returned as it is. Unless the response has ``ended``, the text stops where a call may begin,
        so both results only grow.
        """
        context = TurnContext(self.prompt, spelled_marks(self.tokenizer, [*ids], text), thoughts=self.thoughts)
        turn = parse_turn(text, self.format, context, self.text_parameters)
        hidden = self._special_places(ids) if self.hides_special else []
        keep = filter if ended else takewhile  # what cannot be read yet may become one or more calls
        calls = [call for call in keep(lambda call: call is not None, turn.calls) if call]
        if not ended:
            end = turn.spans[0].start if turn.spans else FORMATS[self.format].open_end(text)
            shown = _without(text[:end], hidden).rstrip()
        elif calls:
            read = [span for span in turn.spans if span.calls != [None]]
            ends = [0, *(span.end for span in read)]
            starts = [*(span.start for span in read), len(text)]
            parts = [_without(text[:start], hidden, end) for end, start in zip(ends, starts, strict=True)]
            shown = "".join(part.rstrip() for part in parts)
        else:
            shown = _without(text, hidden)
        calls = calls if self.parallel else calls[:1]
        return shown, [openai_call(self.prompt, number, call) for number, call in enumerate(calls)]

    def _special_places(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        special = {*Decoding(self.tokenizer).special_ids.values()}
        if special.isdisjoint(ids):
            return []
        return [(begin, end) for token, begin, end in added_places(self.tokenizer, ids) if token in special]


@dataclass(frozen=True)
class ForcedCalls:
    """How calls in a response are read that follows :func:`calls_schema`.

    - prompt: its text, with its special tokens
    - thoughts_end: the tag behind which the calls begin; "": with the response
    """

    prompt: str
    thoughts_end: str = ""

    def split(self, ids: Sequence[int], text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the calls, as :meth:`AnswerCalls.split` does. Each call is complete."""
        calls: list[dict[str, Any]] = []
        thoughts, closed, answer = text.partition(self.thoughts_end) if self.thoughts_end else ("", "", text)
        if self.thoughts_end and not closed:
            return text, calls
        thoughts, text = thoughts + closed, answer
        start = text.find("{")
        while start >= 0:
            try:
                call, end = json.JSONDecoder().raw_decode(text, start)
            except ValueError:  # the response goes on, or was cut off
                break
            calls.append(openai_call(self.prompt, len(calls), ToolCall(call["name"], call["parameters"])))
            start = text.find("{", end)
        return thoughts + text * (ended and not calls), calls


def openai_call(prompt: str, number: int, call: ToolCall) -> dict[str, Any]:
    """Return a call with an id that depends on the conversation alone, so a rollout can be repeated."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    try:
        arguments.encode()
    except UnicodeEncodeError:  # half a character
        arguments = json.dumps(call.arguments)
    name = call.name.encode(errors="replace").decode()
    key = json.dumps([prompt, number, name, arguments])
    digest = blake2b(key.encode()).hexdigest()[:ID_CHARACTERS]
    return {"id": digest, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without(text: str, hidden: Sequence[tuple[int, int]], start: int = 0) -> str:
    """Return ``text`` from ``start`` on without the ``hidden`` places, which are in order."""
    parts = []
    for begin, end in hidden:
        parts.append(text[start:begin])
        start = max(start, end)
    return "".join([*parts, text[start:]])
