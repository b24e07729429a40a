"""Reasoning between tags: where it ends in a response, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_spmd.data.tokenizer import Decoding, decode

TAIL = 32  # tokens of a prompt's end that may hold an opening tag


def begins_reasoning(text: str, opening: str) -> bool:
    """Return True if a prompt ends with the opening tag, as generation prompts of some reasoning models do."""
    return text.rstrip().endswith(opening)


def strip_reasoning(tokenizer: Any, prompt: Sequence[int], response: Sequence[int], tags: Sequence[str]) -> str | None:
    """Return the text after the last closing tag, without its first line breaks; None if reasoning is not closed.

    A response without any tag is its own answer, unless ``prompt`` ends with the opening tag. ``prompt`` and
    ``response`` are token ids; ``tags`` are (opening, closing).
    """
    opening, closing = tags
    special = Decoding(tokenizer).special_ids
    ids = [*map(int, response)]
    if closing in special:  # which text does not show
        end = next((i for i in reversed(range(len(ids))) if ids[i] == special[closing]), -1)
        answer = decode(tokenizer, [ids[end + 1 :]])[0]
        is_closed = end >= 0
        is_open = special.get(opening) in ids[end + 1 :] or opening in answer
    else:
        _, closing_tag, answer = decode(tokenizer, [ids])[0].rpartition(closing)
        is_closed = bool(closing_tag)
        is_open = opening in answer
    if not is_closed and not is_open:
        is_open = begins_reasoning(decode(tokenizer, [prompt[-TAIL:]], skip_special_tokens=False)[0], opening)
    return None if is_open else answer.lstrip("\n")


def split_reasoning(text: str, prompt_opens: bool, tags: Sequence[str], ended: bool) -> tuple[str, str]:
    """Return the reasoning and the answer in a response, or in its beginning; they part at the first closing tag.

    This is how vLLM's reasoning parsers split. ``prompt_opens``: the prompt ends with the opening tag. A response that
    neither begins with this tag nor follows one is all answer. Unless it has ``ended``, what may be the beginning of a
    tag is in neither text, so both only grow.
    """
    opening, closing = tags
    start = text.lstrip()
    if not ended and opening.startswith(start) and start != opening:
        return "", ""
    if start.startswith(opening):
        text = start.removeprefix(opening)
    elif not prompt_opens:
        return "", text
    thoughts, closed, answer = text.partition(closing)
    if not closed and not ended:
        length = next((n for n in range(len(closing) - 1, 0, -1) if thoughts.endswith(closing[:n])), 0)
        thoughts = thoughts[: len(thoughts) - length]
    return thoughts, answer
