"""One conversation as the text that its chat template writes, with the characters of it to learn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlhf_spmd.data.encoding import CharSpan, PromptEncoder
from rlhf_spmd.data.files import RowError
from rlhf_spmd.data.messages import THOUGHTS, ChatOptions, Message, thoughts_of
from rlhf_spmd.data.tokenizer import PROBE, TurnFrame, shared_length


@dataclass(frozen=True)
class ConversationRendering:
    """Finds the assistant's turns in a rendered conversation::

        <|user|>One and one?<|assistant|>Two.<|end|><|user|>Sure?<|assistant|>Yes.<|end|>
                                         ^^^^^^^^^^^                          ^^^^^^^^^^^

    A span begins behind the generation prompt and ends with the token that closes the turn.

    - messages: the conversation, system prompt included
    - first: number of the first message to learn
    - answer_prefix: text of message ``first`` that belongs to the prompt
    - special: texts of the special tokens
    """

    encoder: PromptEncoder
    messages: list[Message]
    first: int
    answer_prefix: str
    options: ChatOptions
    special: tuple[str, ...]

    @cached_property
    def frame(self) -> TurnFrame:
        """Return how the template opens and closes a turn of the assistant."""
        return self.encoder.frame_of(self.options)

    def spans_by_marks(self, turns: Sequence[int]) -> tuple[str, list[CharSpan]]:
        """Return the text and what the template marks in the messages ``turns``. Raises DataError."""
        text, marks = self.encoder.marked_parts(self.messages, self.options)
        if [n for n, message in enumerate(self.messages) if message["role"] == "assistant"] != [*turns]:
            bounds = [(self._num_marks(n), self._num_marks(n + 1, len(marks))) for n in turns]
            if wrong := [n for n, (begin, end) in zip(turns, bounds, strict=True) if not begin <= end <= len(marks)]:
                raise self._prefix_error(wrong[0])
            marks = [mark for begin, end in bounds for mark in marks[begin:end]]
        spans = [(begin, self._without_trailing_blanks(text, begin, end)) for begin, end in marks]
        if self.answer_prefix and spans:
            spans[0] = self._turn_start(self.first, text), spans[0][1]
        return text, spans

    def _num_marks(self, number: int, of_all: int = 0) -> int:
        """Return how many parts the template marks in the messages before ``number``; ``of_all``: in all messages."""
        if number in (0, len(self.messages)):
            return of_all if number else 0
        return len(self.encoder.marked_parts(self.messages[:number], self.options)[1])

    def spans_by_prefixes(self, turns: Sequence[int]) -> tuple[str, list[CharSpan]]:
        """Return the text and the assistant's messages ``turns`` in it. Raises DataError.

        A turn begins where the rendered messages before it end; the whole text must begin with these.
        """
        text = self._apply(self.messages, False)
        if [*turns] == [len(self.messages) - 1] and not self.answer_prefix:
            text = self._with_generation_prompt(text)
        spans = []
        for number in turns:
            start = self._turn_start(number, text)
            end = self._turn_end(number, start, text)
            self._check_thoughts(number, text[start:end])
            spans.append((start, end))
        return text, spans

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self.encoder.apply_template(messages, add_generation_prompt, self.options)

    def _prompt_of(self, number: int) -> str:
        """Return what is rendered before the assistant speaks in message ``number``."""
        if self.answer_prefix and number == self.first:
            fields = {key: value for key, value in self.messages[number].items() if key not in ("tool_calls", *THOUGHTS)}
            messages = [*self.messages[:number], {**fields, "content": self.answer_prefix}]
            return self.encoder.apply_template(messages, False, self.options, continues=True)
        if number:
            return self._apply(self.messages[:number], True)
        # no template renders a conversation without messages: what it writes before the content is the header
        return self._apply([{"role": "assistant", "content": PROBE}], False).partition(PROBE)[0]

    def _turn_start(self, number: int, text: str) -> int:
        prompt = self._prompt_of(number)
        if not text.startswith(prompt):
            raise self._prefix_error(number)
        return len(prompt)

    def _turn_end(self, number: int, start: int, text: str) -> int:
        """Return where message ``number`` ends in the text, with the token that ends it."""
        frame = self.frame
        if number == len(self.messages) - 1:
            return self._without_trailing_blanks(text, start, max(start, len(text.removesuffix(frame.after_closing))))
        through = self._apply(self.messages[: number + 1], False).removesuffix(frame.after_closing)
        if text.startswith(through) and len(through) >= start:
            end = self._without_trailing_blanks(text, start, len(through))
            if frame.end_id is None:  # then the mark of the next role ends the turn, as GLM-4.5's <|user|> does
                end += max((len(name) for name in self.special if text.startswith(name, end)), default=0)
            return end
        # some templates write a last message otherwise than the same one followed by others
        following = {**self.messages[number + 1], "content": PROBE}
        probed = [*self.messages[: number + 1], following, *self.messages[number + 2 :]]
        limit = shared_length(self._apply(probed, False).partition(PROBE)[0], text)
        closing_start = text.find(frame.closing, start, limit) if frame.end_id is not None else -1
        if closing_start < 0:
            raise self._prefix_error(number)
        return closing_start + len(frame.closing)

    def _without_trailing_blanks(self, text: str, start: int, end: int) -> int:
        """Return ``end`` without the blanks behind a token that ends the turn."""
        turn = text[start:end].rstrip()
        return start + len(turn) if turn.endswith(self.special) else end

    def _with_generation_prompt(self, text: str) -> str:
        """Return the text with the last message behind the generation prompt, if the template does not write it there.

        Templates of reasoning models open ``<think>`` in the generation prompt, or write an empty pair of tags there. In
        a finished conversation they drop the thoughts. Here the message is ``why</think>Two.``::

            generation prompt   <|user|>One and one?<|assistant|><think>
            text                <|user|>One and one?<|assistant|>Two.<|end|>
            returned            <|user|>One and one?<|assistant|><think>why</think>Two.<|end|>
                                                                        ^^^^^^^^^^^^^^^^^^^^^^ the turn to learn

        Raises DataError if thoughts would be opened and not closed, or twice.
        """
        number = len(self.messages) - 1
        prompt = self._prompt_of(number)
        frame = self.frame
        if frame.tag and not frame.opens_thoughts and self._thoughts_in(self.messages[number]):
            raise RowError(
                f"the generation prompt ends with {frame.prompt_thoughts!r}, which closes the thoughts, and message "
                f"{number} has some; leave them out, or set data.chat_template_kwargs so that the model thinks"
            )
        if text.startswith(prompt):
            return text
        header = prompt.removesuffix(frame.prompt_thoughts)
        if not frame.tag or not text.startswith(header):
            return prompt + self._last_turn()
        turn = text[len(header) :]
        return prompt + (self._without_opening_tag(turn) if frame.opens_thoughts else self._without_empty_thoughts(turn))

    def _last_turn(self) -> str:
        """Return the content of the last message as it is, and what the template closes it with."""
        *context, message = self.messages
        probe = {key: value for key, value in message.items() if key not in THOUGHTS} | {"content": PROBE}
        closing = self._apply([*context, probe], False).partition(PROBE)[2]
        content = str(message["content"])
        return content + closing if content else closing.lstrip()

    def _without_opening_tag(self, turn: str) -> str:
        """Return the last turn without the tag that opens its thoughts, for a generation prompt that has this tag.

        ``turn``: as the template writes it. Raises DataError if the thoughts are not closed.
        """
        opening = f"<{self.frame.tag}>"
        if not turn.lstrip().startswith(opening):
            if f"</{self.frame.tag}>" not in str(self.messages[-1]["content"]):
                raise self._unclosed_error()
            turn = self._last_turn()  # the template drops the thoughts
        if turn.lstrip().startswith(opening):
            turn = turn.lstrip().removeprefix(opening)
        return turn.removeprefix("\n" * self.frame.prompt_thoughts.endswith("\n"))

    def _without_empty_thoughts(self, turn: str) -> str:
        """Return the last turn without empty thoughts at its beginning, for a generation prompt that has them."""
        tag = re.escape(self.frame.tag)
        empty = re.match(rf"\s*(<{tag}>\s*)?</{tag}>\s*", turn)
        return turn[empty.end() :] if empty else turn

    def _thoughts_in(self, message: Message) -> str:
        """Return the thoughts in a message's field, or before its closing tag."""
        thoughts, closed, _ = str(message["content"]).partition(f"</{self.frame.tag}>")
        return (thoughts_of(message) or thoughts.replace(f"<{self.frame.tag}>", "") * bool(closed)).strip()

    def _check_thoughts(self, number: int, turn: str) -> None:
        """Raise DataError for thoughts that are not closed, opened twice, or left out by the template."""
        frame = self.frame
        if frame.opens_thoughts and not self.answer_prefix and number:
            thoughts, closed, _ = turn.partition(f"</{frame.tag}>")
            if not closed:
                raise self._unclosed_error()
            if f"<{frame.tag}>" in thoughts:
                raise RowError(f"the thoughts of message {number} open <{frame.tag}> within <{frame.tag}>")
        if number == len(self.messages) - 1 and (thoughts := thoughts_of(self.messages[number]).strip()) not in turn:
            raise RowError(
                f"the chat template leaves out the thoughts of message {number}, {thoughts[:40]!r}; write them into "
                f"its content, or give {self.encoder.key}, one that reads 'reasoning_content'"
            )

    def check_calls(self, turns: Sequence[int]) -> None:
        """Raise DataError if the template leaves out calls of the messages ``turns``, or the content beside them."""
        probed = [*self.messages]
        descriptions: dict[str, str] = {}  # probe -> what it stands for
        for number in turns:
            message = self.messages[number]
            if not (calls := message.get("tool_calls")):
                continue
            names = [f"{PROBE}-{number}-{i}-" for i in range(len(calls))]
            descriptions |= {name: f"call {i} of message {number}" for i, name in enumerate(names)}
            renamed = [
                {**call, "function": {**call["function"], "name": name}} if "function" in call else {**call, "name": name}
                for call, name in zip(calls, names, strict=True)
            ]
            probed[number] = {**message, "tool_calls": renamed}
            if message["content"].strip():
                probed[number]["content"] = content = f"{PROBE}-{number}."
                descriptions[content] = f"the content of message {number}, beside its calls"
        text = self._apply(probed, False) if descriptions else ""
        if lost := [words for probe, words in descriptions.items() if probe not in text]:
            raise RowError(f"the chat template leaves out {lost[0]}; split the message, or give {self.encoder.key}")

    def _unclosed_error(self) -> RowError:
        return RowError(
            f"the generation prompt ends with {self.frame.prompt_thoughts!r}, and the response has no </{self.frame.tag}>, "
            "so all of it would be learnt as thoughts; give the thoughts, or a data.chat_template that does not begin them"
        )

    def _prefix_error(self, number: int) -> RowError:
        return RowError(
            f"the chat template renders the messages before message {number} otherwise than inside the whole "
            "conversation, so the assistant's part cannot be told; set data.chat_template to one with {% generation %} around "
            "what the assistant says"
        )
