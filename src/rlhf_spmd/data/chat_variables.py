"""Variables that users give to a chat template (``chat_template_kwargs``), as vLLM's and SGLang's servers take them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

TRAINERS = (  # arguments of transformers' apply_chat_template, and what it passes to the template itself
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs"),
)
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # transformers' own tag, which Jinja does not know


def check_variables(where: str, variables: Mapping[str, Any]) -> None:
    """Raises ValueError for a name that is not text or that the trainer sets, and for a value that JSON cannot hold."""
    for name, value in variables.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: the name {name!r} must be text, as in {{enable_thinking: false}}")
        if name in TRAINERS:
            raise ValueError(f"{where}.{name} is no variable of a template: the trainer sets it itself")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}.{name}={value!r} must be a JSON value: {error}") from error


def read_names(template: str) -> set[str]:
    """Returns the variables that a template reads, without those that transformers passes. Returns none for text that is no
    template."""
    from jinja2 import Environment, TemplateError, meta

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    except TemplateError:
        return set()
    return set(meta.find_undeclared_variables(parsed)) - {*TRAINERS, "raise_exception", "strftime_now"}


def unread_variables(where: str, variables: Mapping[str, Any], tokenizer: Any, template: str | None = None) -> list[str]:
    """Returns a warning for each variable that the template never reads. ``template``: in place of the tokenizer's."""
    if not variables or tokenizer is None:
        return []
    if template is None and not getattr(tokenizer, "chat_template", None):
        return [f"{where}.{name} does nothing: the tokenizer has no chat template" for name in variables]
    asked: tuple[list[Any] | None, ...] = (None, [{}])
    texts = {tokenizer.get_chat_template(template, tools) for tools in asked}  # a tokenizer may have one for tools
    known = set().union(*map(read_names, texts))
    own = sorted(name for name in known if not name.endswith("_token"))  # the others are the tokenizer's: bos_token
    does = f"it reads {', '.join(own)}" if own else "it reads none"
    return [f"{where}.{name} does nothing: the chat template never reads it; {does}" for name in variables if name not in known]
