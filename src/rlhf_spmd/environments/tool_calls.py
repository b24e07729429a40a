"""Reads a turn of the model: its thoughts, content and calls of tools, in the form of the model's family.

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
from functools import partial
from typing import Any, NamedTuple

from rlhf_spmd.config.words import nearest


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


Calls = list[ToolCall | None]  # None stands for a call that cannot be read


class CallSpan(NamedTuple):
    """Where calls stand in a turn's text: from ``start`` to ``end``, with their marks.

    A call that cannot be read adds no text but its mark. A mark around several calls has none.
    """

    start: int
    end: int
    calls: Calls


class ParsedTurn(NamedTuple):
    """The parts of a turn. The text of a call that cannot be read stays in ``content``. ``spans``: in the order of the text."""

    content: str
    reasoning: str
    spans: list[CallSpan]

    @property
    def calls(self) -> Calls:
        return [call for span in self.spans for call in span.calls]


class TurnContext(NamedTuple):
    """Facts about a turn that its text does not show.

    - before: the end of the text that the turn continues, with its special tokens
    - marks: places in the turn where an added token begins, by its text; only for tokens whose text the turn also spells
      in other tokens
    - timeout_s: seconds that the call may take, after which its row is given up
    - thoughts: the marks around thoughts; None: those of the form
    """

    before: str = ""
    marks: Mapping[str, Collection[int]] = {}
    timeout_s: float = 30.0
    thoughts: tuple[str, str] | None = None


TextParameters = Mapping[str, Collection[str]]  # function -> its parameters that take text, which some forms do not quote
CallReader = Callable[[str, int, TextParameters], tuple[Calls, int]]  # text, place behind a mark -> calls, their end


class ToolFormat(NamedTuple):
    """The form of a family's calls.

    - form: for messages to the model
    - template_marks: texts of which each of the family's chat templates has one
    - open_end: returns where the end of a growing text begins that may become a call and is in no span yet
    """

    form: str
    template_marks: tuple[str, ...]
    parse: Callable[[str, TurnContext, TextParameters], ParsedTurn]
    open_end: Callable[[str], int]


class MarkedCalls(NamedTuple):
    """Calls behind marks.

    - marks: texts with which a call begins
    - read: reads calls from behind a mark on; raises ValueError for what is no call
    - thoughts: the marks around them
    - around: marks around several calls, which are no content
    - allows_unmarked: calls may also stand without a mark, if the content begins with ``{`` or ``[``
    """

    marks: tuple[str, ...]
    read: CallReader
    thoughts: tuple[str, str] = ("<think>", "</think>")
    around: tuple[str, ...] = ()
    allows_unmarked: bool = False

    def parse(self, text: str, context: TurnContext, texts: TextParameters) -> ParsedTurn:
        opening, closing = context.thoughts or self.thoughts
        any_mark = re.compile("|".join(map(re.escape, (opening, closing, *self.marks, *self.around))))
        end_of_thoughts = re.compile(re.escape(closing))
        content, reasoning = list[tuple[int, int]](), list[tuple[int, int]]()  # begins and ends of their parts
        spans = list[CallSpan]()
        position = 0
        is_thought = context.before.rstrip().endswith(opening)
        while mark := _next_mark(end_of_thoughts if is_thought else any_mark, text, position, context):
            (reasoning if is_thought else content).append((position, mark.start()))
            position = mark.end()
            if mark[0] == closing and not is_thought:  # nothing opened it: all before it is thought, drafts of calls included
                content, reasoning, spans = [], [(0, mark.start())], []
            elif mark[0] in (opening, closing):
                is_thought = mark[0] == opening
            elif mark[0] in self.around:
                spans.append(CallSpan(mark.start(), position, []))
            else:
                try:
                    calls, position = self.read(text, position, texts)
                except (ValueError, RecursionError):  # the mark is content
                    calls = [None]
                    content.append((mark.start(), position))
                spans.append(CallSpan(mark.start(), position, calls))
        (reasoning if is_thought else content).append((position, len(text)))
        if self.allows_unmarked and not spans:
            content, spans = self._read_unmarked(text, content, texts)
        spoken, thought = ("".join(text[begin:end] for begin, end in parts).strip() for parts in (content, reasoning))
        return ParsedTurn(spoken, thought, spans)

    def _read_unmarked(
        self, text: str, content: list[tuple[int, int]], texts: TextParameters
    ) -> tuple[list[tuple[int, int]], list[CallSpan]]:
        """Return the content without calls at its beginning, and these calls."""
        first = next((number for number, (begin, end) in enumerate(content) if text[begin:end].strip()), len(content))
        for begin, end in content[first : first + 1]:
            if text[begin:end].lstrip()[:1] in ("{", "["):
                with suppress(ValueError, RecursionError):
                    calls, behind = self.read(text[:end], begin, texts)
                    return [(behind, end), *content[first + 1 :]], [CallSpan(begin, behind, calls)]
        return content, []

    def open_end(self, text: str) -> int:
        """Return where the text begins that may be a call without a mark, or the beginning of a mark."""
        start = text.rfind(self.thoughts[1])
        start = 0 if start < 0 else start + len(self.thoughts[1])
        if self.allows_unmarked and text[start:].lstrip()[:1] in ("{", "["):
            return start
        return min(unfinished_mark(text, mark) for mark in (*self.marks, *self.around))


def unfinished_mark(text: str, mark: str) -> int:
    """Return where the last characters of a text begin that ``mark`` begins with; the text's length if there are none."""
    return len(text) - next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def parse_turn(text: str, name: str, context: TurnContext | None = None, texts: TextParameters | None = None) -> ParsedTurn:
    """Return the parts of a turn that is written in the form ``name`` of ``FORMATS``.

    Thoughts that nothing opens begin with the turn, and so do those that ``context.before`` opened. Thoughts that
    nothing closes go on to the end.
    """
    return FORMATS[name].parse(text, context or TurnContext(), texts or {})


def detect_format(template: str | Mapping[str, str] | None) -> str:
    """Return the name of the form whose marks a chat template has, or one of several by name; ``hermes`` if it has none."""
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    return next((name for name, form in FORMATS.items() if any(mark in text for mark in form.template_marks)), "hermes")


def check_format(name: str | None, where: str) -> None:
    """Raise ValueError unless ``name`` is None or one of ``FORMATS``."""
    if name is not None and name not in FORMATS:
        hint = nearest(str(name), list(FORMATS)) or ";"
        raise ValueError(f"{where}={name!r} is not a form of calls{hint} there are {', '.join(FORMATS)}")


def _next_mark(pattern: re.Pattern[str], text: str, position: int, context: TurnContext) -> re.Match[str] | None:
    """Return the first match from ``position`` on that is not text spelled in other tokens."""
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


def _json_calls(text: str, position: int, default: dict[str, Any] | None = None) -> tuple[Calls, int]:
    """Read one object, or a list of them, with ``name`` and ``arguments`` (Llama: ``parameters``), else ``default``."""
    value, end = _json(text, position)
    objects = value if isinstance(value, list) else [value]
    if not objects or not all(isinstance(each, dict) for each in objects):
        raise ValueError("not calls")
    return [_call(each.get("name"), each.get("arguments", each.get("parameters", default))) for each in objects], end


_HERMES_END = re.compile(r"\s*</tool_call>")


def _read_hermes(text: str, position: int, texts: TextParameters) -> tuple[Calls, int]:
    calls, end = _json_calls(text, position, {})
    return calls, _after(_HERMES_END, text, end)


_NEXT_CALL = re.compile(r"\s*;\s*(?=\{)")


def _read_llama(text: str, position: int, texts: TextParameters) -> tuple[Calls, int]:
    """Read objects with ``;`` between them, up to the first that cannot be read."""
    calls, end = _json_calls(text, position)
    while separator := _NEXT_CALL.match(text, end):
        try:
            more, end = _json_calls(text, separator.end())
        except (ValueError, RecursionError):
            return [*calls, None], end
        calls += more
    return calls, end


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?")


def _read_mistral(text: str, position: int, texts: TextParameters) -> tuple[Calls, int]:
    """Read a list of calls, or a name and its arguments."""
    if head := _MISTRAL_NAME.match(text, position):
        arguments, end = _json(text, head.end())
        return [_call(head[1], arguments)], end
    return _json_calls(text, position, {})


_CALLS_BEGIN = "<\uff5ctool▁calls▁begin\uff5c>"  # marks with full-width bars
_CALLS_END = "<\uff5ctool▁calls▁end\uff5c>"
_CALL_BEGIN = "<\uff5ctool▁call▁begin\uff5c>"
_CALL_END = "<\uff5ctool▁call▁end\uff5c>"
_SEPARATOR = "<\uff5ctool▁sep\uff5c>"
_DEEPSEEK_NAME = re.compile(rf"\s*(?:function{_SEPARATOR}([^\n<]+)\n```json|([^\n<]+){_SEPARATOR})")
_DEEPSEEK_END = re.compile(rf"\s*(?:```)?\s*{_CALL_END}")


def _read_deepseek(text: str, position: int, texts: TextParameters) -> tuple[Calls, int]:
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
    name: re.Pattern[str], argument: re.Pattern[str], closing: re.Pattern[str], text: str, position: int, texts: TextParameters
) -> tuple[Calls, int]:
    """Read a name, then tags around each argument. A value is text if it is no JSON, or if the function takes it as text."""
    head = name.match(text, position)
    if head is None:
        raise ValueError("no name")
    end = head.end()
    arguments: dict[str, Any] = {}
    while pair := argument.match(text, end):
        key = pair[1].strip()
        end = pair.end()
        arguments[key] = pair[2]
        if key not in texts.get(head[1], ()):
            with suppress(ValueError, RecursionError):
                arguments[key] = json.loads(pair[2])
    if _after(closing, text, end) == end:
        raise ValueError("the call does not end")
    return [ToolCall(head[1], arguments)], _after(closing, text, end)


_read_glm = partial(_read_tagged, _GLM_NAME, _GLM_ARGUMENT, _HERMES_END)
_read_coder = partial(_read_tagged, _CODER_NAME, _CODER_ARGUMENT, _CODER_END)


_CHANNEL = re.compile(r"<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def _parse_channels(text: str, context: TurnContext, texts: TextParameters) -> ParsedTurn:
    """Parse the messages of gpt-oss (OpenAI's harmony format): a header, ``<|message|>``, and the message.

    A message to a function is a call, whatever its channel; ``analysis`` is thought; the others are content.
    """
    content, reasoning, spans = list[str](), list[str](), list[CallSpan]()
    position = 0
    while start := _next_mark(_CHANNEL, text, position, context):
        begin = position
        header = text[position : start.start()]
        position = start.end()
        recipient = _RECIPIENT.search(header)
        call = None
        if recipient:
            with suppress(ValueError, RecursionError):
                arguments, end = _json(text, position)
                call = _call(recipient[1], arguments)
                position = end
        ending = _next_mark(_CHANNEL_END, text, position, context)
        body = text[position : ending.start() if ending else None]
        position = ending.end() if ending else len(text)
        if recipient:
            spans.append(CallSpan(begin, start.end() if call is None else position, [call]))
        if call is None:
            (reasoning if "<|channel|>analysis" in header else content).append(body)
    if position == 0:  # a message without a header
        content.append(text)
    return ParsedTurn("\n".join(content).strip(), "\n".join(reasoning).strip(), spans)


def _open_channel(text: str) -> int:
    """Return where the last message begins if its header has not ended, else the text's end."""
    start = max((end.end() for end in _CHANNEL_END.finditer(text) if end[0] != "<|start|>"), default=0)
    return start if _CHANNEL.search(text, start) is None else len(text)


def _marked_format(form: str, template_marks: tuple[str, ...], calls: MarkedCalls) -> ToolFormat:
    return ToolFormat(form, template_marks, calls.parse, calls.open_end)


_OBJECT = '{"name": ..., "arguments": {...}}'
# the most specific marks of templates first: some templates have those of several families
FORMATS = {
    "openai": ToolFormat(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}",
        ("<|channel|>",),
        _parse_channels,
        _open_channel,
    ),
    "deepseek_v31": _marked_format(
        f"{_CALL_BEGIN}NAME{_SEPARATOR}{{...}}{_CALL_END}",
        (_CALLS_BEGIN,),
        MarkedCalls((_CALL_BEGIN,), _read_deepseek, around=(_CALLS_BEGIN, _CALLS_END)),
    ),
    "mistral": _marked_format(
        f"[TOOL_CALLS][{_OBJECT}] or [TOOL_CALLS]NAME[ARGS]{{...}}",
        ("[TOOL_CALLS]",),
        MarkedCalls(("[TOOL_CALLS]",), _read_mistral, ("[THINK]", "[/THINK]")),
    ),
    "glm45": _marked_format(
        "<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>",
        ("<arg_key>",),
        MarkedCalls(("<tool_call>",), _read_glm),
    ),
    "qwen3_coder": _marked_format(
        "<tool_call><function=NAME><parameter=...>...</parameter></function></tool_call>",
        ("<function=",),
        MarkedCalls(("<function=",), _read_coder, around=("<tool_call>", "</tool_call>")),
    ),
    "hermes": _marked_format(
        f"<tool_call>{_OBJECT}</tool_call>", ("<tool_call>",), MarkedCalls(("<tool_call>",), _read_hermes)
    ),
    "llama3_json": _marked_format(
        '{"name": ..., "parameters": {...}}',
        ("<|python_tag|>", "<|start_header_id|>"),
        MarkedCalls(("<|python_tag|>",), _read_llama, allows_unmarked=True),
    ),
}
