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
    """Return the text after the last closing tag, without the line breaks that begin it; None if reasoning is not closed.

    A response without any tag is its own answer, unless ``prompt`` ends with the opening tag. ``prompt`` and
    ``response`` are token ids; ``tags`` are (opening, closing).
    """
    opening, closing = tags
    special = Decoding(tokenizer).special_ids
    ids = [*map(int, response)]
    if closing in special:  # which text does not show
        end = next((i for i in reversed(range(len(ids))) if ids[i] == special[closing]), -1)
        rest = decode(tokenizer, [ids[end + 1 :]])[0]
        closed, open_again = end >= 0, special.get(opening) in ids[end + 1 :] or opening in rest
    else:
        _, closing_tag, rest = decode(tokenizer, [ids])[0].rpartition(closing)
        closed, open_again = bool(closing_tag), opening in rest
    if not closed and not open_again:
        open_again = begins_reasoning(decode(tokenizer, [prompt[-TAIL:]], skip_special_tokens=False)[0], opening)
    return None if open_again else rest.lstrip("\n")


def split_reasoning(text: str, begun: bool, tags: Sequence[str], ended: bool) -> tuple[str, str]:
    """Return the reasoning and the answer in a response, or in its beginning, as vLLM's reasoning parsers split it: at the
    first closing tag.

    ``begun``: the prompt ends with the opening tag. A response that neither begins with it nor follows one is all answer.
    Unless it has ``ended``, what may be the beginning of a tag is in neither, so both texts only grow.
    """
    opening, closing = tags
    start = text.lstrip()
    if not ended and opening.startswith(start) and start != opening:
        return "", ""
    if start.startswith(opening):
        text = start.removeprefix(opening)
    elif not begun:
        return "", text
    thoughts, closed, answer = text.partition(closing)
    if not closed and not ended:
        length = next((n for n in range(len(closing) - 1, 0, -1) if thoughts.endswith(closing[:n])), 0)
        thoughts = thoughts[: len(thoughts) - length]
    return thoughts, answer
