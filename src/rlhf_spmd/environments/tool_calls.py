"""Reads what a model wrote in its turn: thoughts, content and calls of tools, in the form of the model's family.

``FORMATS`` has a parser per form, by vLLM's name (``--tool-call-parser``); :func:`detect_format` chooses one by the chat
template. What lies inside thoughts is no call. Arguments are read from the mark on, by a JSON decoder where they are
JSON, so a mark inside an argument is text. Where a mark is a token of the vocabulary, the same text spelled in other
tokens is no mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rlhf_spmd.config.words import nearest


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ParsedTurn(NamedTuple):
    """``calls``: in order; None stands for one that cannot be read, whose text stays in ``content``."""

    content: str
    reasoning: str
    calls: list[ToolCall | None]


class TurnContext(NamedTuple):
    """Facts about a turn that its text does not show.

    - before: the end of the text that the turn continues, with its special tokens
    - marks: for each added token whose text the turn also spells in other tokens: where in the turn the token itself begins
    - timeout_s: seconds that the call may take, after which its row is given up
    """

    before: str = ""
    marks: Mapping[str, Collection[int]] = {}
    timeout_s: float = 30.0


Texts = Mapping[str, Collection[str]]  # function -> its parameters that are text, which some forms write without quotes
Calls = list[ToolCall | None]
Reader = Callable[[str, int, Texts], tuple[Calls, int]]  # text, place behind a mark -> calls, their end


class ToolFormat(NamedTuple):
    """The form of a family's calls. ``form``: for messages to the model; ``signs``: its chat templates have one of them."""

    form: str
    signs: tuple[str, ...]
    parse: Callable[[str, TurnContext, Texts], ParsedTurn]


class MarkedCalls(NamedTuple):
    """Calls behind marks.

    - marks, read: what a call begins with, and what reads it from there on; raises ValueError for what is no call
    - thoughts: the marks around them
    - around: marks around several calls, which are no content
    - bare: without any mark, content that begins with an object or a list may be calls
    """

    marks: tuple[str, ...]
    read: Reader
    thoughts: tuple[str, str] = ("<think>", "</think>")
    around: tuple[str, ...] = ()
    bare: bool = False

    def parse(self, text: str, context: TurnContext, texts: Texts) -> ParsedTurn:
        opening, closing = self.thoughts
        any_mark, end_mark = (
            re.compile("|".join(map(re.escape, each))) for each in ((*self.thoughts, *self.marks), (closing,))
        )
        content, reasoning, calls = "", "", Calls()
        position, thinking = 0, context.before.rstrip().endswith(opening)
        while mark := _next_mark(end_mark if thinking else any_mark, text, position, context):
            between, position = text[position : mark.start()], mark.end()
            if thinking:
                reasoning, thinking = reasoning + between, False
            elif mark[0] == closing:  # nothing opened it: all before it was thought, drafts of calls included
                content, reasoning, calls = "", text[: mark.start()], []
            elif mark[0] == opening:
                content, thinking = content + between, True
            else:
                content += between
                try:
                    read, position = self.read(text, position, texts)
                    calls += read
                except (ValueError, RecursionError):
                    content += mark[0]
                    calls.append(None)
        content, reasoning = (content, reasoning + text[position:]) if thinking else (content + text[position:], reasoning)
        for each in self.around:
            content = content.replace(each, "")
        if self.bare and not calls and content.lstrip()[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                calls, position = self.read(content, 0, texts)
                content = content[position:]
        return ParsedTurn(content.strip(), reasoning.strip(), calls)


def parse_turn(text: str, name: str, context: TurnContext | None = None, texts: Texts | None = None) -> ParsedTurn:
    """Return the parts of a turn that is written in the form ``name`` of ``FORMATS``.

    Thoughts that nothing opens begin with the turn, and so do those that ``context.before`` opened. Thoughts that
    nothing closes go on to the end.
    """
    return FORMATS[name].parse(text, context or TurnContext(), texts or {})


def detect_format(template: str | None) -> str:
    """Return the name of the form that a chat template's text has, ``hermes`` if it has none of them."""
    return next((name for name, form in FORMATS.items() if any(sign in (template or "") for sign in form.signs)), "hermes")


def check_format(name: str | None, where: str) -> None:
    """Raise ValueError unless ``name`` is None or one of ``FORMATS``."""
    if name is not None and name not in FORMATS:
        hint = nearest(str(name), list(FORMATS)) or ";"
        raise ValueError(f"{where}={name!r} is not a form of calls{hint} there are {', '.join(FORMATS)}")


def _next_mark(pattern: re.Pattern[str], text: str, position: int, context: TurnContext) -> re.Match[str] | None:
    """Return the first match from ``position`` on that is not merely spelled."""
    marks = context.marks
    return next((m for m in pattern.finditer(text, position) if m[0] not in marks or m.start() in marks[m[0]]), None)


_JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings as they are
_BLANK = re.compile(r"\s*")


def _json(text: str, position: int) -> tuple[Any, int]:
    return _JSON.raw_decode(text, _after(_BLANK, text, position))


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return the end of the match that begins at ``position``, or ``position``."""
    match = pattern.match(text, position)
    return match.end() if match else position


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return ToolCall(name, arguments)


def _json_calls(text: str, position: int, none: dict[str, Any] | None = None) -> tuple[Calls, int]:
    """Read one object, or a list of them, with ``name`` and ``arguments`` (Llama's ``parameters``; ``none``: without)."""
    value, end = _json(text, position)
    objects = value if isinstance(value, list) else [value]
    if not objects or not all(isinstance(each, dict) for each in objects):
        raise ValueError("not calls")
    return [_call(each.get("name"), each.get("arguments", each.get("parameters", none))) for each in objects], end


_HERMES_END = re.compile(r"\s*</tool_call>")


def _read_hermes(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    calls, end = _json_calls(text, position, {})
    return calls, _after(_HERMES_END, text, end)


_ANOTHER = re.compile(r"\s*;\s*(?=\{)")


def _read_llama(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    """Read objects with ``;`` between them."""
    calls, end = _json_calls(text, position)
    while separator := _ANOTHER.match(text, end):
        more, end = _json_calls(text, separator.end())
        calls += more
    return calls, end


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?")


def _read_mistral(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    """Read a list of calls, or a name and its arguments."""
    if head := _MISTRAL_NAME.match(text, position):
        arguments, end = _json(text, head.end())
        return [_call(head[1], arguments)], end
    return _json_calls(text, position, {})


_FIRST, _LAST, _BEGIN, _BETWEEN, _END = (  # marks with full-width bars
    f"<\uff5ctool▁{each}\uff5c>" for each in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
_DEEPSEEK_NAME = re.compile(rf"\s*(?:function{_BETWEEN}([^\n<]+)\n```json|([^\n<]+){_BETWEEN})")
_DEEPSEEK_END = re.compile(rf"\s*(?:```)?\s*{_END}")


def _read_deepseek(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    """Read the call of V3.1, or that of V3 and R1, whose arguments are a block of code."""
    head = _DEEPSEEK_NAME.match(text, position)
    if head is None:
        raise ValueError("no name")
    arguments, end = _json(text, head.end())
    return [_call((head[1] or head[2]).strip(), arguments)], _after(_DEEPSEEK_END, text, end)


_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))", re.S)
_CODER_NAME = re.compile(r"([^>\n]+)>\s*")
_CODER_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.S)
_CODER_END = re.compile(r"\s*</function>")


def _read_tagged(
    name: re.Pattern[str], argument: re.Pattern[str], closing: re.Pattern[str], text: str, position: int, texts: Texts
) -> tuple[Calls, int]:
    """Read a name, then tags around each argument. What is no JSON is text, and so is what the function takes as text."""
    head = name.match(text, position)
    if head is None:
        raise ValueError("no name")
    end, arguments = head.end(), dict[str, Any]()
    while pair := argument.match(text, end):
        key, value, end = pair[1].strip(), pair[2], pair.end()
        arguments[key] = value
        if key not in texts.get(head[1], ()):
            with suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    if _after(closing, text, end) == end:
        raise ValueError("the call does not end")
    return [ToolCall(head[1], arguments)], _after(closing, text, end)


def _read_glm(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    return _read_tagged(_GLM_NAME, _GLM_ARGUMENT, _HERMES_END, text, position, texts)


def _read_coder(text: str, position: int, texts: Texts) -> tuple[Calls, int]:
    return _read_tagged(_CODER_NAME, _CODER_ARGUMENT, _CODER_END, text, position, texts)


_CHANNEL = re.compile(r"<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _parse_channels(text: str, context: TurnContext, texts: Texts) -> ParsedTurn:
    """Parse the messages of gpt-oss (OpenAI's harmony format): a header, ``<|message|>``, and the message.

    A message to a function is a call, whatever its channel; ``analysis`` is thought; the others are content.
    """
    content, reasoning, calls, position = list[str](), list[str](), Calls(), 0
    while start := _next_mark(_CHANNEL, text, position, context):
        header, position = text[position : start.start()], start.end()
        recipient = _RECIPIENT.search(header)
        if recipient:
            call = None
            with suppress(ValueError, RecursionError):
                value, end = _json(text, position)
                call, position = _call(recipient[1], value), end
            calls.append(call)
        ending = _next_mark(_CHANNEL_END, text, position, context)
        body, position = text[position : ending.start() if ending else None], ending.end() if ending else len(text)
        if recipient is None or calls[-1] is None:
            (reasoning if "<|channel|>analysis" in header else content).append(body)
    if position == 0:  # a message without a header
        content.append(text)
    return ParsedTurn("\n".join(content).strip(), "\n".join(reasoning).strip(), calls)


_OBJECT = '{"name": ..., "arguments": {...}}'
# the most specific signs first: some templates have those of several families
FORMATS = {
    "openai": ToolFormat(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}", ("<|channel|>",), _parse_channels
    ),
    "deepseek_v31": ToolFormat(
        f"{_BEGIN}NAME{_BETWEEN}{{...}}{_END}",
        (_FIRST,),
        MarkedCalls((_BEGIN,), _read_deepseek, around=(_FIRST, _LAST)).parse,
    ),
    "mistral": ToolFormat(
        f"[TOOL_CALLS][{_OBJECT}] or [TOOL_CALLS]NAME[ARGS]{{...}}",
        ("[TOOL_CALLS]",),
        MarkedCalls(("[TOOL_CALLS]",), _read_mistral, ("[THINK]", "[/THINK]")).parse,
    ),
    "glm45": ToolFormat(
        "<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>",
        ("<arg_key>",),
        MarkedCalls(("<tool_call>",), _read_glm).parse,
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call><function=NAME><parameter=...>...</parameter></function></tool_call>",
        ("<function=",),
        MarkedCalls(("<function=",), _read_coder, around=("<tool_call>", "</tool_call>")).parse,
    ),
    "hermes": ToolFormat(
        f"<tool_call>{_OBJECT}</tool_call>", ("<tool_call>",), MarkedCalls(("<tool_call>",), _read_hermes).parse
    ),
    "llama3_json": ToolFormat(
        '{"name": ..., "parameters": {...}}',
        ("<|python_tag|>", "<|start_header_id|>"),
        MarkedCalls(("<|python_tag|>",), _read_llama, bare=True).parse,
    ),
}
