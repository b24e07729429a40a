"""Prompts with responses to token ids and a mask of those to learn: the one way for SFT, pairs, KTO and score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.data.encoding import MARKED, EncodingConfig, PromptEncoder
from rlhf_spmd.data.files import DataError, Row, RowError, named_row
from rlhf_spmd.data.messages import NO_OPTIONS, ChatOptions, Message, chat_options, check_messages, is_text
from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.data.turn_spans import ConversationRendering

MaskedPair = tuple[list[int], list[int], list[bool]]  # prompt ids, response ids, response mask


def end_ids(tokenizer: Any, append_eos: bool) -> list[int]:
    """Return the end token if ``append_eos``, else nothing. Raises DataError if the tokenizer has no end token."""
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
    return [int(tokenizer.eos_token_id)] if append_eos else []


@dataclass(frozen=True)
class Conversation:
    """Messages of which the assistant's are learnt, from message ``first`` on, unless their weight is 0.

    ``answer_prefix``: text of the assistant's message ``first`` that belongs to the prompt.
    """

    messages: list[Message]
    first: int = 0
    answer_prefix: str = ""
    options: ChatOptions = NO_OPTIONS


def build_conversation(prompt: Any, response: Any, options: ChatOptions = NO_OPTIONS) -> Conversation:
    """Return the conversation of a prompt and its response (each text or messages), or of messages without a response.

    A response to a prompt that ends with the assistant's message continues that message. Raises DataError.
    """
    messages = check_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if response is None:
        return Conversation(messages, options=options)
    answers = check_messages([{"role": "assistant", "content": response}] if isinstance(response, str) else response)
    last = messages[-1]
    answer = answers[0]
    if not last["role"] == answer["role"] == "assistant":
        return Conversation([*messages, *answers], len(messages), options=options)
    if "tool_calls" in last:
        raise RowError("the prompt ends with the assistant's calls of tools; give the messages that answer them")
    answer_prefix = last["content"]
    fields = {key: value for key, value in last.items() if key != "weight"}
    joined = {**fields, **answer, "content": answer_prefix + answer["content"]}
    return Conversation([*messages[:-1], joined, *answers[1:]], len(messages) - 1, answer_prefix, options)


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
    encoder = PromptEncoder(tokenizer, config)
    end = end_ids(tokenizer, append_eos)
    conversation_encoder: ConversationEncoder | None = None
    pairs: list[MaskedPair | None] = [None] * len(examples)
    texts: dict[bool, list[tuple[int, str, str]]] = {True: [], False: []}  # by whether a template wrote the prompt
    for i, example in enumerate(examples):
        options = chat_options(example.row)
        is_chat = not isinstance(example.prompt, str) or config.apply_chat_template is True
        with named_row(example.row.where):
            if is_chat and not (example.verbatim and isinstance(example.response, str)):
                conversation_encoder = conversation_encoder or ConversationEncoder(encoder)
                conversation = build_conversation(example.prompt, example.response, options)
                pairs[i] = conversation_encoder.encode_pair(conversation, end, closes_last_turn=not example.verbatim)
            else:
                rendered, is_templated = encoder.render(example.prompt, options)
                texts[is_templated].append((i, rendered, _response_text(example)))
    for is_templated, numbered in texts.items():
        prompts_and_responses = [(prompt, response) for _, prompt, response in numbered]
        encoded = encoder.tokenize_pairs(prompts_and_responses, special_tokens=not is_templated)
        for (i, _, _), (prompt, response) in zip(numbered, encoded, strict=True):
            pairs[i] = prompt, [*response, *end], [True] * (len(response) + len(end))
    return [_not_empty(pair, example.row) for pair, example in zip(pairs, examples, strict=True)]


def _response_text(example: Example) -> str:
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
    for ids, noun in zip(pair, ("prompt", "response"), strict=False):
        if not ids:
            raise row.error(f"the {noun} has no tokens")
    return pair


class ConversationEncoder:
    """Tokenises conversations, with a mask of the tokens to learn.

    A turn is learnt up to the token that closes it. If the template has ``{% generation %}``, its marks are the turns.
    Otherwise a turn is what the template writes after the messages before it and the generation prompt; the whole
    conversation must begin with these. One case is exempt: if only the last turn is learnt, its text is put behind the
    generation prompt, as in generation.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"conversations need a fast tokenizer (tokenizer.json), which '{self.tokenizer.name_or_path}' is not: it must say "
                "which characters a token stands for"
            )
        self._special = Decoding(self.tokenizer).special_ids

    def encode(self, conversation: Conversation, closes_last_turn: bool = True) -> tuple[list[int], list[bool]]:
        """Return token ids and the mask of those to learn. Raises DataError."""
        messages = self.encoder.with_system(conversation.messages)
        first = conversation.first + len(messages) - len(conversation.messages)
        turns = [
            n for n, message in enumerate(messages) if message["role"] == "assistant" and "weight" not in message and n >= first
        ]
        if not turns:
            raise _nothing_to_learn()
        options = conversation.options
        special = tuple(self._special)
        rendering = ConversationRendering(self.encoder, messages, first, conversation.answer_prefix, options, special)
        rendering.check_calls(turns)
        is_marked = MARKED.search(self.encoder.source(options))
        text, spans = rendering.spans_by_marks(turns) if is_marked else rendering.spans_by_prefixes(turns)
        if not closes_last_turn and spans:
            start, stop = spans[-1]
            spans[-1] = start, start + len(text[start:stop].removesuffix(rendering.frame.closing))
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        added = self.tokenizer.added_tokens_decoder  # an added token may swallow the blanks that begin a response
        mask = [
            any(begin < end and start < stop and not (begin < start and token in added) for start, end in spans)
            for token, (begin, stop) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        if not any(mask):
            raise _nothing_to_learn()
        return ids, mask

    def encode_pair(self, conversation: Conversation, end: list[int], closes_last_turn: bool = True) -> MaskedPair:
        """Split the conversation into prompt and response; the response spans the first to the last token to learn.

        ``end`` is appended if the template writes no end of its own. Raises DataError.
        """
        ids, mask = self.encode(conversation, closes_last_turn)
        start = max(mask.index(True), 1)
        stop = len(mask) - mask[::-1].index(True)
        if start == stop:
            raise RowError("the response has no tokens")
        if ids[stop - 1] in self._special.values():
            end = []
        return ids[:start], [*ids[start:stop], *end], [*mask[start:stop], *(True for _ in end)]


def _nothing_to_learn() -> RowError:
    return RowError(
        "no message is the assistant's, or none of its tokens, or all have the weight 0; there is nothing to learn from"
    )
