"""How a chat template opens and closes a turn of the assistant, and the tokens that a response ends with."""

from __future__ import annotations

from typing import Any, NamedTuple

# what a template that refuses its messages may raise, beside jinja's own TemplateError: it is a program
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
PROBE = "A-TURN-OF-THE-MODEL"  # which no template writes by itself


class TurnFrame(NamedTuple):
    """What a template writes around the assistant's message, behind the generation prompt.

    ``opening``: before the content, as Llama 2's space. ``closing``: after it, up to the first token that was added to the vocabulary
    (``<|im_end|>``), whose id is ``end_id``; all of it and None where there is none. ``rest``: what follows the closing.
    """

    opening: str
    closing: str
    rest: str
    end_id: int | None


NO_TURN = TurnFrame("", "", "", None)


def turn_frame(tokenizer: Any, template: str | None = None, **arguments: Any) -> TurnFrame:
    """The frame of ``template``, by default the tokenizer's own. ``NO_TURN`` without a template, or with one that refuses a plain
    question and its answer. ``arguments``: the template's variables."""
    from jinja2 import TemplateError

    if template is None and not getattr(tokenizer, "chat_template", None):
        return NO_TURN
    question = [{"role": "user", "content": "?"}]
    answered = [*question, {"role": "assistant", "content": PROBE}]
    options = {"tokenize": False, "chat_template": template, **arguments}
    try:
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(answered, add_generation_prompt=False, **options)
    except (TemplateError, *REFUSALS):
        return NO_TURN
    before, _, after = whole.partition(PROBE)
    # some vocabularies have runs of blanks among their added tokens
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    places = [(after.find(text), -len(text), text) for text in added if text in after]
    opening = before[len(prompt) :] if before.startswith(prompt) else ""
    if not places:
        return TurnFrame(opening, after, "", None)
    at, _, text = min(places)
    stop = at + len(text)
    return TurnFrame(opening, after[:stop], after[stop:], added[text])


def turn_end(tokenizer: Any, template: str | None = None) -> str:
    """Text that closes an assistant's turn in the chat template; "" without one."""
    return turn_frame(tokenizer, template).closing


def end_token_ids(tokenizer: Any, template: str | None = None) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end token, and the one that closes the assistant's turn. Sorted; without a
    tokenizer none."""
    if tokenizer is None:
        return ()
    found = {getattr(tokenizer, "eos_token_id", None), turn_frame(tokenizer, template).end_id}
    return tuple(sorted(token for token in found if token is not None))
