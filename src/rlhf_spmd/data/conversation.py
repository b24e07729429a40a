"""Conversations to learn from: the tokens of all messages, and which of them the assistant is to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf_spmd.data.encoding import PromptEncoder, check_messages
from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.tokenizer import Decoding

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what the assistant generates
Span = tuple[int, int]  # characters of the rendered text, the end left out


class ConversationEncoder:
    """``encode(messages, first, where)``: token ids, and for each whether it is learnt: those of the assistant's turns from message
    ``first`` on.

    Where the template has ``{% generation %}`` the mask is what transformers' ``return_assistant_tokens_mask`` gives. Else a turn is
    what rendering adds to the conversation before it with the generation prompt, which must be how the text goes on; without the
    space behind a special token, which ends generation.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"conversations need a fast tokenizer (tokenizer.json), which '{self.tokenizer.name_or_path}' is not: it must say "
                "which characters a token stands for"
            )
        self._special = Decoding(self.tokenizer).special_ids

    def encode(self, given: Sequence[Any], first: int, where: str) -> tuple[list[int], list[bool]]:
        """Raises DataError."""
        messages = self.encoder.with_system(check_messages(given, where), where)
        first += len(messages) - len(given) if first else 0
        text = self.encoder.apply_template(messages, where, add_generation_prompt=False)
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        template = self.tokenizer.get_chat_template(self.encoder.template)
        if MARKED.search(template):
            options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            found = self.tokenizer.apply_chat_template(messages, chat_template=self.encoder.template, **options)
            start = len(self._prefix(messages, first, text, where)) if first else 0
            mask = [bool(said) and at >= start for said, (at, _) in zip(found["assistant_masks"], places, strict=True)]
        else:
            turns = [number for number, message in enumerate(messages) if number >= first and message["role"] == "assistant"]
            spans = [self._turn(messages, number, text, where) for number in turns]
            mask = [any(at < end and start < to for start, end in spans) for at, to in places]
        if not any(mask):
            raise DataError(f"{where}: no message is the assistant's, or none of its tokens; there is nothing to learn from")
        return ids, mask

    def ends_itself(self, token: int) -> bool:
        """Whether a turn that ends with this token needs no end token: generation stops there."""
        return token in self._special.values()

    def _prefix(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> str:
        """What is rendered before message ``number``, the assistant's. Raises DataError where the text does not begin so."""
        before = self.encoder.apply_template(messages[:number], where, add_generation_prompt=True) if number else ""
        if not text.startswith(before):
            raise self._not_nested(number, where)
        return before

    def _turn(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> Span:
        start = len(self._prefix(messages, number, text, where))
        whole = self.encoder.apply_template(messages[: number + 1], where, add_generation_prompt=False)
        if not text.startswith(whole) or len(whole) < start:
            raise self._not_nested(number, where)
        said = whole[start:].rstrip()
        return start, start + len(said) if said.endswith(tuple(self._special)) else len(whole)

    def _not_nested(self, number: int, where: str) -> DataError:
        return DataError(
            f"{where}: the chat template renders the messages before message {number} otherwise than inside the whole conversation, so "
            "the assistant's part cannot be told; set data.chat_template to one with {% generation %} around what the assistant says"
        )
