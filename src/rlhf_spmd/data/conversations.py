"""Prompts with responses to token ids and a mask of those to learn: the one way for SFT, pairs, KTO and score."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.data.encoding import MARKED, CharSpan, EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, Row, RowError, named_row
from rlhf_spmd.data.messages import (
    NO_OPTIONS,
    THOUGHTS,
    ChatOptions,
    Message,
    chat_options,
    check_messages,
    is_text,
    thoughts_of,
)
from rlhf_spmd.data.tokenizer import PROBE, Decoding, TurnFrame, shared_length

MaskedPair = tuple[list[int], list[int], list[bool]]  # prompt ids, response ids, response mask


def end_ids(tokenizer: Any, append_eos: bool) -> list[int]:
    """Return the end token of a response if wanted. Raises DataError if the tokenizer has none."""
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
    return [int(tokenizer.eos_token_id)] if append_eos else []


@dataclass(frozen=True)
class Conversation:
    """Messages of which the assistant's are learnt, from message ``first`` on, unless their weight is 0.

    ``begun``: text of the assistant's message ``first`` that belongs to the prompt.
    """

    messages: list[Message]
    first: int = 0
    begun: str = ""
    options: ChatOptions = NO_OPTIONS


def conversation(prompt: Any, response: Any, options: ChatOptions = NO_OPTIONS) -> Conversation:
    """Return a prompt (text or messages) with its response (text or messages), or messages without a response.

    A response to a prompt that ends with the assistant's message continues that message. Raises DataError.
    """
    messages = check_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if response is None:
        return Conversation(messages, options=options)
    answers = check_messages([{"role": "assistant", "content": response}] if isinstance(response, str) else response)
    last, answer = messages[-1], answers[0]
    if not last["role"] == answer["role"] == "assistant":
        return Conversation([*messages, *answers], len(messages), options=options)
    if "tool_calls" in last:
        raise RowError("the prompt ends with the assistant's calls of tools; give the messages that answer them")
    begun = last["content"]
    last = {key: value for key, value in last.items() if key != "weight"}
    joined = {**last, **answer, "content": begun + answer["content"]}
    return Conversation([*messages[:-1], joined, *answers[1:]], len(messages) - 1, begun, options)


@dataclass(frozen=True)
class Example:
    """A row's prompt (text or messages) and response (text, messages, or None: the prompt has it), not yet as tokens.

    ``verbatim``: a text response follows the generation prompt as it is, and nothing closes its turn.
    """

    prompt: Any
    response: Any
    row: Row
    verbatim: bool = False


def encode_examples(examples: Sequence[Example], config: EncodingConfig, tokenizer: Any, append_eos: bool) -> list[MaskedPair]:
    """Return the tokens of each example's prompt and response, which ends as its template ends a turn.

    Texts without a template end with the tokenizer's end token if ``append_eos``. Raises DataError.
    """
    if not examples:
        return []
    if tokenizer is None:
        raise examples[0].row.error("messages and texts need a tokenizer")
    encoder, end = PromptEncoder(tokenizer, config), end_ids(tokenizer, append_eos)
    talks: ConversationEncoder | None = None
    pairs: list[MaskedPair | None] = [None] * len(examples)
    texts: dict[bool, list[tuple[int, str, str]]] = {True: [], False: []}
    for i, example in enumerate(examples):
        options = chat_options(example.row)
        is_chat = not isinstance(example.prompt, str) or config.apply_chat_template is True
        with named_row(example.row.where):
            if is_chat and not (example.verbatim and isinstance(example.response, str)):
                talks = talks or ConversationEncoder(encoder)
                talk = conversation(example.prompt, example.response, options)
                pairs[i] = talks.encode_pair(talk, end, closes=not example.verbatim)
            else:
                rendered, templated = encoder.render(example.prompt, options)
                texts[templated].append((i, rendered, _text(example)))
    for templated, numbered in texts.items():
        encoded = encoder.tokenize_pairs([(prompt, response) for _, prompt, response in numbered], special_tokens=not templated)
        for (i, _, _), (prompt, response) in zip(numbered, encoded, strict=True):
            pairs[i] = prompt, [*response, *end], [True] * (len(response) + len(end))
    return [_not_empty(pair, example.row) for pair, example in zip(pairs, examples, strict=True)]


def _text(example: Example) -> str:
    """Return the response to a text prompt as text. Raises DataError if text cannot hold it."""
    if isinstance(example.response, str):
        return example.response
    message = single_answer(example.response)
    if not is_text(message):
        raise example.row.error(
            "the prompt is text, so the response may have no thoughts, calls or weight beside its content; "
            "give messages as the prompt, or set data.apply_chat_template=true"
        )
    return str(message["content"])


def single_answer(response: Any) -> Message:
    """Return the one message of the assistant that a response is. Raises DataError."""
    messages = check_messages(response)
    if (roles := [message["role"] for message in messages]) != ["assistant"]:
        raise RowError(
            f"the response must be text or one message of the assistant, not messages of: {', '.join(roles)}; give the "
            "whole conversation as messages"
        )
    return messages[0]


def _not_empty(pair: MaskedPair | None, row: Row) -> MaskedPair:
    assert pair is not None, "every example is a conversation or a pair of texts"
    for ids, what in zip(pair, ("prompt", "response"), strict=False):
        if not ids:
            raise row.error(f"the {what} has no tokens")
    return pair


class ConversationEncoder:
    """Tokenises conversations, with a mask of the tokens to learn.

    A turn is learnt up to the token that closes it. If the template has ``{% generation %}``, its marks are the turns.
    Otherwise a turn is what the template writes after the messages before it and the generation prompt; the whole
    conversation must begin with these. One case is exempt: if only the last turn is learnt, its text is put behind the
    generation prompt, as in generation.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"conversations need a fast tokenizer (tokenizer.json), which '{self.tokenizer.name_or_path}' is not: it must say "
                "which characters a token stands for"
            )
        self._special = Decoding(self.tokenizer).special_ids

    def encode(self, talk: Conversation, closes: bool = True) -> tuple[list[int], list[bool]]:
        """Return token ids and the mask of those to learn. ``closes``: the last turn is closed. Raises DataError."""
        messages = self.encoder.with_system(talk.messages)
        first = talk.first + len(messages) - len(talk.messages)
        turns = [n for n, each in enumerate(messages) if n >= first and each["role"] == "assistant" and "weight" not in each]
        if not turns:
            raise _nothing_to_learn()
        rendering = _Rendering(self.encoder, messages, first, talk, tuple(self._special))
        rendering.check_calls(turns)
        is_marked = MARKED.search(self.encoder.source(talk.options))
        text, spans = rendering.marked(turns) if is_marked else rendering.unmarked(turns)
        if not closes and spans:
            start, stop = spans[-1]
            spans[-1] = start, start + len(text[start:stop].removesuffix(rendering.frame.closing))
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        added = self.tokenizer.added_tokens_decoder  # an added token may swallow the blanks that begin a response
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        mask = [
            any(begin < end and start < to and not (begin < start and token in added) for start, end in spans)
            for token, (begin, to) in zip(ids, places, strict=True)
        ]
        if not any(mask):
            raise _nothing_to_learn()
        return ids, mask

    def encode_pair(self, talk: Conversation, end: list[int], closes: bool = True) -> MaskedPair:
        """Split the conversation into prompt and response; the response spans the first to the last token to learn.

        ``end`` is appended if the template writes no end of its own. Raises DataError.
        """
        ids, mask = self.encode(talk, closes)
        start, stop = max(mask.index(True), 1), len(mask) - mask[::-1].index(True)
        if start == stop:
            raise RowError("the response has no tokens")
        if ids[stop - 1] in self._special.values():
            end = []
        return ids[:start], [*ids[start:stop], *end], [*mask[start:stop], *(True for _ in end)]


def _nothing_to_learn() -> RowError:
    return RowError(
        "no message is the assistant's, or none of its tokens, or all have the weight 0; there is nothing to learn from"
    )


class _Rendering:
    """One conversation as text, with the characters to learn. ``special``: the texts of special tokens."""

    def __init__(
        self, encoder: PromptEncoder, messages: list[Message], first: int, talk: Conversation, special: tuple[str, ...]
    ) -> None:
        self.encoder, self.messages, self.first, self.talk, self.special = encoder, messages, first, talk, special
        self.options = talk.options
        self.frame: TurnFrame = encoder.frame_of(talk.options)

    def marked(self, turns: Sequence[int]) -> tuple[str, list[CharSpan]]:
        """Return the text and what the template marks in the messages ``turns``. Raises DataError."""
        text, marks = self.encoder.marked_parts(self.messages, self.options)
        if [n for n, message in enumerate(self.messages) if message["role"] == "assistant"] != [*turns]:
            bounds = [(self._num_marks(n), self._num_marks(n + 1, len(marks))) for n in turns]
            if wrong := [n for n, (begin, end) in zip(turns, bounds, strict=True) if not begin <= end <= len(marks)]:
                raise self._not_nested(wrong[0])
            marks = [mark for begin, end in bounds for mark in marks[begin:end]]
        spans = [(begin, self._end(text, begin, end)) for begin, end in marks]
        if self.talk.begun and spans:
            spans[0] = self._start(self.first, text), spans[0][1]
        return text, spans

    def _num_marks(self, number: int, of_all: int = 0) -> int:
        """Return how many parts the template marks in the messages before ``number``; ``of_all``: in all messages."""
        if number in (0, len(self.messages)):
            return of_all if number else 0
        return len(self.encoder.marked_parts(self.messages[:number], self.options)[1])

    def unmarked(self, turns: Sequence[int]) -> tuple[str, list[CharSpan]]:
        """Return the text and the assistant's messages ``turns`` in it. Raises DataError."""
        text = self._apply(self.messages, False)
        if [*turns] == [len(self.messages) - 1] and not self.talk.begun:
            text = self._behind_prompt(text)
        spans = []
        for number in turns:
            start = self._start(number, text)
            end = self._turn_end(number, start, text)
            self._check_thoughts(number, text[start:end])
            spans.append((start, end))
        return text, spans

    def _apply(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self.encoder.apply_template(messages, add_generation_prompt, self.options)

    def _before(self, number: int) -> str:
        """Return what is rendered before the assistant speaks in message ``number``."""
        if self.talk.begun and number == self.first:
            begun = {key: value for key, value in self.messages[number].items() if key not in ("tool_calls", *THOUGHTS)}
            messages = [*self.messages[:number], {**begun, "content": self.talk.begun}]
            return self.encoder.apply_template(messages, False, self.options, continues=True)
        if number:
            return self._apply(self.messages[:number], True)
        # no template renders a conversation without messages: what it writes before the content is the header
        return self._apply([{"role": "assistant", "content": PROBE}], False).partition(PROBE)[0]

    def _start(self, number: int, text: str) -> int:
        before = self._before(number)
        if not text.startswith(before):
            raise self._not_nested(number)
        return len(before)

    def _turn_end(self, number: int, start: int, text: str) -> int:
        """Return where message ``number`` ends in the text, with the token that ends it."""
        if number == len(self.messages) - 1:
            return self._end(text, start, max(start, len(text.removesuffix(self.frame.rest))))
        through = self._apply(self.messages[: number + 1], False).removesuffix(self.frame.rest)
        if text.startswith(through) and len(through) >= start:
            end = self._end(text, start, len(through))
            if self.frame.end_id is None:  # then the mark of the next role ends the turn, as GLM-4.5's <|user|> does
                end += max((len(name) for name in self.special if text.startswith(name, end)), default=0)
            return end
        # some templates write a last message otherwise than the same one followed by others
        following = [
            *self.messages[: number + 1],
            {**self.messages[number + 1], "content": PROBE},
            *self.messages[number + 2 :],
        ]
        limit = shared_length(self._apply(following, False).partition(PROBE)[0], text)
        closing_start = text.find(self.frame.closing, start, limit) if self.frame.end_id is not None else -1
        if closing_start < 0:
            raise self._not_nested(number)
        return closing_start + len(self.frame.closing)

    def _end(self, text: str, start: int, end: int) -> int:
        """Return ``end`` without the blanks behind a token that ends the turn."""
        said = text[start:end].rstrip()
        return start + len(said) if said.endswith(self.special) else end

    def _behind_prompt(self, text: str) -> str:
        """Return the text with the last message behind the generation prompt, if the template does not write it there.

        Templates of reasoning models open ``<think>`` in the generation prompt, or write an empty pair of tags there;
        they drop thoughts, and the data may repeat the tag. Raises DataError if thoughts would be opened and not closed,
        or twice.
        """
        *context, message = self.messages
        before, frame, content = self._before(len(context)), self.frame, str(message["content"])
        if frame.tag and not frame.opens_thoughts and self._thoughts(message):
            raise RowError(
                f"the generation prompt ends with {frame.thoughts!r}, which closes the thoughts, and message "
                f"{len(context)} has some; leave them out, or set data.chat_template_kwargs so that the model thinks"
            )
        if text.startswith(before):
            return text
        plain = {key: value for key, value in message.items() if key not in THOUGHTS}
        closing = self._apply([*context, {**plain, "content": PROBE}], False).partition(PROBE)[2]
        written = content + closing if content else closing.lstrip()
        header, opening, ending = before.removesuffix(frame.thoughts), f"<{frame.tag}>", f"</{frame.tag}>"
        if not frame.tag or not text.startswith(header):
            return before + written
        body = text[len(header) :]
        if not frame.opens_thoughts:
            empty = re.match(rf"\s*({re.escape(opening)}\s*)?{re.escape(ending)}\s*", body)
            return before + (body[empty.end() :] if empty else body)
        if body.lstrip().startswith(opening):
            said = body.lstrip().removeprefix(opening)
        elif ending in content:  # the template drops the thoughts
            said = written.lstrip().removeprefix(opening) if written.lstrip().startswith(opening) else written
        else:
            raise self._unclosed()
        return before + said.removeprefix("\n" * frame.thoughts.endswith("\n"))

    def _thoughts(self, message: Message) -> str:
        """Return the thoughts in a message's field, or before its closing tag."""
        thoughts, closed, _ = str(message["content"]).partition(f"</{self.frame.tag}>")
        return (thoughts_of(message) or thoughts.replace(f"<{self.frame.tag}>", "") * bool(closed)).strip()

    def _check_thoughts(self, number: int, said: str) -> None:
        """Raise DataError for thoughts that are not closed, opened twice, or left out by the template."""
        frame = self.frame
        if frame.opens_thoughts and not self.talk.begun and number:
            thoughts, closed, _ = said.partition(f"</{frame.tag}>")
            if not closed:
                raise self._unclosed()
            if f"<{frame.tag}>" in thoughts:
                raise RowError(f"the thoughts of message {number} open <{frame.tag}> within <{frame.tag}>")
        if number == len(self.messages) - 1 and (thoughts := thoughts_of(self.messages[number]).strip()) not in said:
            raise RowError(
                f"the chat template leaves out the thoughts of message {number}, {thoughts[:40]!r}; write them into "
                f"its content, or give {self.encoder.key}, one that reads 'reasoning_content'"
            )

    def check_calls(self, turns: Sequence[int]) -> None:
        """Raise DataError if the template leaves out calls of the messages ``turns``, or the content beside them."""
        probed, texts = [*self.messages], dict[str, str]()
        for number in turns:
            message = self.messages[number]
            if not (calls := message.get("tool_calls")):
                continue
            names = [f"{PROBE}-{number}-{i}-" for i in range(len(calls))]
            texts |= {name: f"call {i} of message {number}" for i, name in enumerate(names)}
            renamed = [
                {**call, "function": {**call["function"], "name": name}} if "function" in call else {**call, "name": name}
                for call, name in zip(calls, names, strict=True)
            ]
            probed[number] = {**message, "tool_calls": renamed}
            if message["content"].strip():
                probed[number]["content"] = content = f"{PROBE}-{number}."
                texts[content] = f"the content of message {number}, beside its calls"
        text = self._apply(probed, False) if texts else ""
        if lost := [words for name, words in texts.items() if name not in text]:
            raise RowError(f"the chat template leaves out {lost[0]}; split the message, or give {self.encoder.key}")

    def _unclosed(self) -> RowError:
        return RowError(
            f"the generation prompt ends with {self.frame.thoughts!r}, and the response has no </{self.frame.tag}>, "
            "so all of it would be learnt as thoughts; give the thoughts, or a data.chat_template that does not begin them"
        )

    def _not_nested(self, number: int) -> RowError:
        return RowError(
            f"the chat template renders the messages before message {number} otherwise than inside the whole "
            "conversation, so the assistant's part cannot be told; set data.chat_template to one with {% generation %} around "
            "what the assistant says"
        )
