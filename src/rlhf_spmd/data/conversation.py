"""Conversations to learn from: the tokens of all messages, and which of them the assistant is to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf_spmd.data.encoding import PromptEncoder, check_messages
from rlhf_spmd.data.ends import PROBE
from rlhf_spmd.data.files import DataError
from rlhf_spmd.data.tokenizer import Decoding

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that says itself what the assistant generates
Span = tuple[int, int]  # characters of the rendered text, the end left out
Learnt = tuple[list[int], list[int], list[bool]]  # ids of prompt and response, and which of the response are learnt


def end_ids(tokenizer: Any, append_eos: bool) -> list[int]:
    """The end token after a response, if it is to have one. Raises DataError for a tokenizer without."""
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
    return [int(tokenizer.eos_token_id)] if append_eos else []


class ConversationEncoder:
    """Renders a conversation for every kind of data: ``encode(messages, first, where)`` has its token ids, and for each whether it is
    learnt, as those of the assistant's turns from message ``first`` on are.

    Where the template has ``{% generation %}`` the mask is what transformers' ``return_assistant_tokens_mask`` gives. Else a turn is
    what rendering adds to the conversation before it with the generation prompt, up to the token that closes it. That must be how the
    text goes on, but for a last turn that is the only one to learn: its text then follows the generation prompt, as in generation.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"conversations need a fast tokenizer (tokenizer.json), which '{self.tokenizer.name_or_path}' is not: it must say "
                "which characters a token stands for"
            )
        self._special = Decoding(self.tokenizer).special_ids
        self._marked = bool(MARKED.search(self.tokenizer.get_chat_template(encoder.template) if self._has_template else ""))

    @property
    def _has_template(self) -> bool:
        return bool(self.encoder.template or getattr(self.tokenizer, "chat_template", None))

    def encode(self, given: Sequence[Any], first: int, where: str) -> tuple[list[int], list[bool]]:
        """Raises DataError."""
        messages = self.encoder.with_system(check_messages(given, where), where)
        first += len(messages) - len(given) if first else 0
        text = self.encoder.apply_template(messages, where, add_generation_prompt=False)
        turns = [number for number, message in enumerate(messages) if number >= first and message["role"] == "assistant"]
        if not self._marked and turns == [len(messages) - 1]:
            prompt, frame = self._before(messages, turns[0], where), self.encoder.frame
            if not text.startswith(prompt):
                text = prompt + frame.opening + self._after(prompt, messages, where) + frame.closing
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        if self._marked:
            options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            options |= {"chat_template": self.encoder.template, **self.encoder.config.chat_template_kwargs}
            found = self.tokenizer.apply_chat_template(messages, **options)
            start = len(self._prefix(messages, first, text, where)) if first else 0
            mask = [bool(said) and at >= start for said, (at, _) in zip(found["assistant_masks"], places, strict=True)]
        else:
            spans = [self._turn(messages, number, text, where) for number in turns]
            added = self.tokenizer.added_tokens_decoder  # one may take the blanks behind it, which begin a response
            mask = [
                any(at < end and start < to and not (at < start and token in added) for start, end in spans)
                for token, (at, to) in zip(ids, places, strict=True)
            ]
        if not any(mask):
            raise DataError(f"{where}: no message is the assistant's, or none of its tokens; there is nothing to learn from")
        return ids, mask

    def learn(self, messages: Sequence[Any], first: int, where: str, end: list[int]) -> Learnt:
        """The conversation as prompt and response, which begins with the first token that is learnt and ends with the last. ``end``
        follows where the template writes no end of its own. Raises DataError."""
        ids, mask = self.encode(messages, first, where)
        start, stop = max(mask.index(True), 1), len(mask) - mask[::-1].index(True)
        if start == stop:
            raise DataError(f"{where}: the response has no tokens")
        own = [] if ids[stop - 1] in self._special.values() else end
        return ids[:start], [*ids[start:stop], *own], [*mask[start:stop], *(True for _ in own)]

    def _after(self, prompt: str, messages: Sequence[dict[str, Any]], where: str) -> str:
        """What of the last message follows a generation prompt that begins it, as those of reasoning models do with ``<think>``: the
        data may have that beginning too. Raises DataError for a message that has no such part."""
        probed = [*messages[:-1], {**messages[-1], "content": PROBE}]
        header = self.encoder.apply_template(probed, where, add_generation_prompt=False).partition(PROBE)[0]
        begun, content = prompt.removeprefix(header) if prompt.startswith(header) else "", str(messages[-1]["content"])
        if begun.strip() and content.lstrip().startswith(begun.strip()):
            return content.lstrip().removeprefix(begun.strip()).removeprefix("\n" * begun.endswith("\n"))
        for name in re.findall(r"<(\w+)>", begun):
            if f"</{name}>" not in content:
                raise DataError(
                    f"{where}: the generation prompt ends with {begun!r}, and the response has no </{name}>, so all of it would be "
                    "learnt as thoughts; give the thoughts, or a data.chat_template that does not begin them"
                )
        return content

    def _before(self, messages: list[dict[str, Any]], number: int, where: str) -> str:
        """What is rendered before the content of message ``number``, the assistant's."""
        if number:
            return self.encoder.apply_template(messages[:number], where, add_generation_prompt=True)
        # no template renders a conversation without messages: what it writes before the content is the header
        return self.encoder.apply_template([{**messages[0], "content": PROBE}], where, False).partition(PROBE)[0]

    def _prefix(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> str:
        """As :meth:`_before`. Raises DataError where the text does not begin so."""
        before = self._before(messages, number, where)
        if not text.startswith(before):
            raise self._not_nested(number, where)
        return before

    def _turn(self, messages: list[dict[str, Any]], number: int, text: str, where: str) -> Span:
        start = len(self._prefix(messages, number, text, where))
        if number == len(messages) - 1:
            whole = text
        else:
            whole = self.encoder.apply_template(messages[: number + 1], where, add_generation_prompt=False)
        whole = whole.removesuffix(self.encoder.frame.rest)
        if not text.startswith(whole) or len(whole) < start:
            raise self._not_nested(number, where)
        said = whole[start:].rstrip()
        return start, start + len(said) if said.endswith(tuple(self._special)) else len(whole)

    def _not_nested(self, number: int, where: str) -> DataError:
        return DataError(
            f"{where}: the chat template renders the messages before message {number} otherwise than inside the whole conversation, so "
            "the assistant's part cannot be told; set data.chat_template to one with {% generation %} around what the assistant says"
        )
