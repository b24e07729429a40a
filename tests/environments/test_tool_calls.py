"""Calls as each family writes them, beside thoughts, drafts and marks that are text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_spmd.environments.tool_calls import CallSpan, ParsedTurn, ToolCall, TurnContext, detect_format, parse_turn

TEXTS = {"f": ["s"]}
ARGUMENTS = {"n": 2, "s": "1"}
OBJECT = json.dumps({"name": "f", "arguments": ARGUMENTS})
LLAMA = OBJECT.replace("arguments", "parameters")
TAGGED = "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n"
CODER = "<function=f>\n<parameter=n>\n2\n</parameter>\n<parameter=s>\n1\n</parameter>\n</function>"
J = json.dumps(ARGUMENTS)
CALLS = {  # format -> two calls in one turn
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>{OBJECT}</tool_call>",
    "llama3_json": f"<|python_tag|>{LLAMA}; {LLAMA}",
    "mistral": f"[TOOL_CALLS]f[ARGS]{J}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{J}",
    "glm45": f"<tool_call>f\n{TAGGED}</tool_call>\n<tool_call>f\n{TAGGED}</tool_call>",
    "qwen3_coder": f"<tool_call>\n{CODER}\n</tool_call>\n{CODER}",
    "deepseek_v31": "<|tool▁calls▁begin|>"
    f"<|tool▁call▁begin|>f<|tool▁sep|>{J}<|tool▁call▁end|>"
    f"<|tool▁call▁begin|>function<|tool▁sep|>f\n```json\n{J}\n```<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", "\uff5c"),
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{J}<|call|>"
    f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{J}",
}
OTHER_FORMS = [
    ("mistral", f"[TOOL_CALLS][{OBJECT}, {OBJECT}]"),
    ("llama3_json", f"{LLAMA};\n{LLAMA}"),
    ("hermes", f"<tool_call>[{OBJECT}, {OBJECT}]"),
]


def calls_of(text: str, name: str, context: TurnContext | None = None) -> list[Any]:
    return [call if call is None else (call.name, call.arguments) for call in parse_turn(text, name, context, TEXTS).calls]


@pytest.mark.parametrize(("name", "text"), [*CALLS.items(), *OTHER_FORMS])
def test_calls_of_each_family(name: str, text: str) -> None:
    opening, closing = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    assert calls_of(text, name) == [("f", ARGUMENTS)] * 2
    assert calls_of("It is 42.", name) == calls_of("", name) == []
    if name == "openai":
        return
    parsed = parse_turn(f"{opening}Maybe {text}?{closing}\nSo.", name)
    assert parsed == ParsedTurn("So.", f"Maybe {text}?", [])
    parsed = parse_turn(f"{opening}hm{closing}{text}", name, None, TEXTS)
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("", "hm", [("f", ARGUMENTS)] * 2)
    assert calls_of(f"{text}?{closing}{text}", name) == [("f", ARGUMENTS)] * 2
    assert calls_of(f"hm {text}", name, TurnContext(f"assistant\n{opening}\n")) == []


def test_thoughts_and_calls_of_channels() -> None:
    thought = "<|channel|>analysis<|message|>to=functions.f {}<|end|><|start|>assistant"
    assert parse_turn(f"{thought}<|channel|>final<|message|>42", "openai") == ParsedTurn("42", "to=functions.f {}", [])
    assert calls_of(thought + CALLS["openai"], "openai") == [("f", ARGUMENTS)] * 2
    quoted = json.dumps({"s": "<|end|><|message|>"})
    assert calls_of(f"<|channel|>commentary to=functions.f<|message|>{quoted}<|call|>", "openai") == [("f", json.loads(quoted))]
    assert calls_of("<|channel|>commentary to=functions.f<|message|>{oh<|call|>", "openai") == [None]


@pytest.mark.parametrize("mark", ["<tool_call>", "</tool_call>", "<think>", "</think>", "line\nbreak"])
def test_a_mark_inside_an_argument_is_text(mark: str) -> None:
    inside = f'<tool_call>{{"name": "f", "arguments": {{"s": "{mark}"}}}}</tool_call>'
    assert parse_turn(f"So {inside}", "hermes") == ParsedTurn(
        "So", "", [CallSpan(3, 3 + len(inside), [ToolCall("f", {"s": mark})])]
    )
    coded = f"<tool_call><function=f><parameter=s>\n{mark}</parameter>\n</parameter></function></tool_call>"
    assert calls_of(coded, "qwen3_coder") == [("f", {"s": f"{mark}</parameter>"})]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "The form is <tool_call>...</tool_call>.</think>It is 3.", []),
        ("hermes", f"<tool_call>oh<tool_call>{OBJECT}</tool_call>", [None, ("f", ARGUMENTS)]),
        ("hermes", "<tool_call>" + "[" * 100_000, [None]),
        ("hermes", '<tool_call>{"name": 3}', [None]),
        ("hermes", '<tool_call>{"name": "f"}', [("f", {})]),
        ("hermes", "<tool_call>42", [None]),
        ("llama3_json", '{"name": "Ada"}', []),
        ("llama3_json", '[{"a": 1}]', []),
        ("llama3_json", f"{LLAMA}; {LLAMA[:-1]}", [("f", ARGUMENTS), None]),
        ("mistral", "[TOOL_CALLS]oh", [None]),
        ("glm45", "<tool_call>f<arg_key>s</arg_key>", [None]),
        ("glm45", "<tool_call>f", [None]),
        ("glm45", "<tool_call>f</tool_call>", [("f", {})]),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>cut", [None]),
        ("qwen3_coder", "<function=g><parameter=s>1</parameter></function>", [("g", {"s": 1})]),
        ("deepseek_v31", "<\uff5ctool▁call▁begin\uff5c>oh", [None]),
    ],
)
def test_what_is_no_call(name: str, text: str, expected: list[Any]) -> None:
    assert calls_of(text, name) == expected


def test_marks_that_are_only_spelled_are_text() -> None:
    text = f"Write <tool_call>{OBJECT}</tool_call>. <tool_call>{OBJECT}</tool_call>"
    assert calls_of(text, "hermes", TurnContext(marks={"<tool_call>": [text.rindex("<tool_call>")]})) == [("f", ARGUMENTS)]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ tools }}", "hermes"),
        ("<|im_start|><tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("<|start_header_id|>", "llama3_json"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<\uff5ctool▁calls▁begin\uff5c>", "deepseek_v31"),
        ("<|start|><|channel|>", "openai"),
    ],
)
def test_the_chat_template_tells_the_format(template: str | None, name: str) -> None:
    assert detect_format(template) == name
