"""Chat messages, tools and template variables of rows and requests, in the one form that chat templates read.

Pure. ``chat_template_kwargs`` are variables that users give to a chat template, as vLLM's and SGLang's servers take
them. Every message of prompts, SFT, pairs, KTO, score, chat and serve passes :func:`normalise_message`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.config.words import first_line
from rlhf_spmd.data.files import Row, RowError, named_row

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of the field with a message's thoughts
Message = dict[str, Any]
TRAINER_ARGUMENTS = (  # arguments of transformers' apply_chat_template, and what it passes to the template itself
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs"),
)
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag, which Jinja does not know


class Arguments(dict[str, Any]):
    """Arguments of a call that the data have as JSON text, which is ``text``: some templates write it as it is."""

    text = "{}"


@dataclass(frozen=True)
class ChatOptions:
    """What a row adds to its messages: schemas of ``tools`` (None: no tools), and ``variables`` of the chat template."""

    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


NO_OPTIONS = ChatOptions()


def chat_options(row: Row, tools: list[Any] | None = None) -> ChatOptions:
    """Return the row's columns ``tools``, by default the configuration's ``tools``, and ``chat_template_kwargs``.

    Both may be JSON text. Tools that are an empty text are none. Raises DataError.
    """
    with named_row(row.where):
        column = row.values.get("tools")
        schemas = [] if column == "" else _parsed_json(column, "'tools'")
        if schemas is not None:
            schemas = [_parsed_json(schema, "'tools'") for schema in schemas] if isinstance(schemas, list) else [schemas]
            if not all(isinstance(schema, Mapping) for schema in schemas):
                raise RowError("'tools' must be a list of schemas, each an object, or its JSON text")
        variables = _parsed_json(row.values.get("chat_template_kwargs"), "'chat_template_kwargs'") or {}
        if not isinstance(variables, Mapping):
            raise RowError(f"'chat_template_kwargs' must be an object or its JSON text, not {variables!r}")
        try:
            check_variables("chat_template_kwargs", variables)
        except ValueError as error:
            raise RowError(str(error)) from error
    return ChatOptions((tools if schemas is None else schemas) or None, variables)


def row_weight(row: Row) -> int:
    """Return the row's own ``weight``, 0 or 1, by default 1: a row of weight 0 is not learnt. Raises DataError."""
    weight = row.values.get("weight")
    if weight not in (None, 0, 1):
        raise row.error(f"weight={weight!r} must be 0, which leaves the row out, or 1")
    return 1 if weight is None else int(weight)


def check_messages(prompt: Any) -> list[Message]:
    """Return the messages of a list, each as :func:`normalise_message` returns it. Raises DataError."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise RowError(f"a prompt must be text or a list of chat messages, not {type(prompt).__name__}")
    if not prompt:
        raise RowError("the prompt is an empty list of messages")
    return [normalise_message(message, number) for number, message in enumerate(prompt)]


def normalise_message(message: Any, number: int = 0) -> Message:
    """Return ``{"role": ..., "content": text}`` with the message's other fields, as chat templates read them.

    Fields that are None are left out. Text parts of the content are joined. A message of the assistant that only calls
    tools has the content "". OpenAI's older ``function_call`` is a call like others. Arguments of calls are objects.
    ``weight`` is there only if it is 0. ``number``: the message's place, for errors. Raises DataError.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"message {number} must be an object with 'role' and 'content'")
    fields = {key: value for key, value in message.items() if value is not None}
    calls = _normalised_calls(fields.pop("tool_calls", None), f"'tool_calls' of message {number}")
    name = f"'function_call' of message {number}"
    if function := _parsed_json(fields.pop("function_call", None), name):
        if calls:
            raise RowError(f"{name}: the message has 'tool_calls', too; give one of them")
        calls = [{"type": "function", "function": _normalised_call(function, name)}]
    if calls:
        fields["tool_calls"] = calls
    content = fields.get("content")
    if isinstance(content, list | tuple):
        content = _joined_text(content, number)
    if content is None and calls and fields["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RowError(f"the content of message {number} must be text, not {type(content).__name__}")
    for key in THOUGHTS:
        if not isinstance(fields.get(key, ""), str):
            raise RowError(f"'{key}' of message {number} must be text, not {type(fields[key]).__name__}")
    weight = fields.pop("weight", 1)
    if weight not in (0, 1):
        raise RowError(f"the weight of message {number} must be 0 or 1, not {weight!r}")
    return {**fields, "content": content} | ({} if weight else {"weight": 0})


def _joined_text(parts: Sequence[Any], number: int) -> str:
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"the content of message {number} has a part of the type {kind!r}; only text is supported")
    return "".join(part["text"] for part in parts)


def _normalised_calls(value: Any, name: str) -> list[Message]:
    """Return the calls of a message with their arguments as objects; ``name`` stands before what is wrong."""
    calls = _parsed_json(value, name)
    if calls is not None and not isinstance(calls, list):
        raise RowError(f"{name} must be a list of calls, not {type(calls).__name__}")
    return [_normalised_call(call, name) for call in calls or ()]


def _normalised_call(call: Any, name: str) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"{name}: a call must be an object with a function's 'name' and 'arguments', not {call!r}")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":  # no arguments, as some servers write it
        arguments = {}
    elif isinstance(arguments, str):
        text = arguments
        arguments = _parsed_json(text, f"{name}: the arguments of {function['name']!r}")
        if isinstance(arguments, Mapping):
            arguments = Arguments(arguments)
            arguments.text = text
    if not isinstance(arguments, Mapping):
        raise RowError(f"{name}: the arguments of {function['name']!r} must be an object or its JSON text, not {arguments!r}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _parsed_json(value: Any, name: str) -> Any:
    """Return the value of JSON text; another value as it is. Raises DataError."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, unique_keys=True)
    except ValueError as error:
        raise RowError(f"{name} is not valid JSON: {first_line(error)}: {value[:80]!r}") from error


def with_arguments(messages: Sequence[Message], rewrite: Callable[[Mapping[str, Any]], Any]) -> list[Message]:
    """Return the messages with ``rewrite(arguments)`` in place of the arguments of each call."""

    def rewritten(call: Message) -> Message:
        function = call.get("function", call)
        function = {**function, "arguments": rewrite(function["arguments"])}
        return {**call, "function": function} if "function" in call else function

    return [
        {**message, "tool_calls": [rewritten(call) for call in message["tool_calls"]]} if "tool_calls" in message else message
        for message in messages
    ]


def argument_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text: the data's own text if they have it."""
    return arguments.text if isinstance(arguments, Arguments) else json.dumps(arguments, ensure_ascii=False)


def all_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the arguments of all calls."""
    return [call.get("function", call)["arguments"] for message in messages for call in message.get("tool_calls", ())]


def thoughts_of(message: Message) -> str:
    """Return the thoughts that a message has in a field of their own; "" if there are none."""
    return next((message[key] for key in THOUGHTS if message.get(key)), "")


def is_text(message: Message) -> bool:
    """Return True if the message's content is all that the assistant says in it."""
    return not message.get("tool_calls") and not thoughts_of(message).strip() and "weight" not in message


def check_variables(where: str, variables: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is not text or that the trainer sets, and for a value that JSON cannot hold."""
    for name, value in variables.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: the name {name!r} must be text, as in {{enable_thinking: false}}")
        if name in TRAINER_ARGUMENTS:
            raise ValueError(f"{where}.{name} is no variable of a template: the trainer sets it itself")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}.{name}={value!r} must be a JSON value: {error}") from error


def read_names(template: str) -> set[str]:
    """Return the variables that a template reads, without those that transformers passes.

    Text that is no template reads none.
    """
    from jinja2 import Environment, TemplateError, meta

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    except TemplateError:
        return set()
    return set(meta.find_undeclared_variables(parsed)) - {*TRAINER_ARGUMENTS, "raise_exception", "strftime_now"}


def unread_variables(where: str, variables: Mapping[str, Any], tokenizer: Any, template: str | None = None) -> list[str]:
    """Return a warning for each variable that ``template``, by default the tokenizer's, never reads."""
    if not variables or tokenizer is None:
        return []
    if template is None and not getattr(tokenizer, "chat_template", None):
        return [f"{where}.{name} does nothing: the tokenizer has no chat template" for name in variables]
    tool_lists: tuple[list[Any] | None, ...] = (None, [{}])
    templates = {tokenizer.get_chat_template(template, tools) for tools in tool_lists}  # there may be one for tools
    names = set().union(*map(read_names, templates))
    variable_names = sorted(name for name in names if not name.endswith("_token"))  # bos_token is the tokenizer's
    reads = f"it reads {', '.join(variable_names)}" if variable_names else "it reads none"
    return [
        f"{where}.{name} does nothing: the chat template never reads it; {reads}" for name in variables if name not in names
    ]
