"""Prompt and response pairs, or plain text, as token ids; for SFT and for scoring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from rlhf_spmd.config.constraints import Range
from rlhf_spmd.data.batch import ragged
from rlhf_spmd.data.conversations import Example, MaskedPair, encode_examples, end_ids, single_answer
from rlhf_spmd.data.dataset import DatasetConfig, LengthLimit, RowsConfig, TokenDataset, Truncation
from rlhf_spmd.data.encoding import PromptEncoder, check_ids
from rlhf_spmd.data.files import Row, RowError, named_row
from rlhf_spmd.data.messages import check_messages, is_text, row_weight

ID_KEYS = ("prompt_ids", "response_ids")


@dataclass(frozen=True)
class PromptResponseConfig(RowsConfig):
    """A prompt and a response (or ``completion``, TRL's name): text, or one message of the assistant. Or messages under
    ``prompt_key`` that end with the assistant's.

    - prompt_key: column of the prompt, or of messages; if missing, `messages`
    - response_key: column of the response; if missing, `completion`
    """

    response_key: str = "response"


@dataclass(frozen=True)
class ResponsesConfig(DatasetConfig):
    """Rows with responses.

    - max_length: tokens of prompt and response together; the longer response of a pair counts
    - filter_overlong: drop longer rows; `false`: an error
    - append_eos: end responses with the tokenizer's end token; after chat messages only if the template writes no end
      itself
    """

    max_length: Annotated[int, Range(least=2)] = 1024
    filter_overlong: bool = True
    append_eos: bool = True

    @property
    def length_limit(self) -> LengthLimit:
        return LengthLimit("max_length", self.max_length, "filter_overlong", self.filter_overlong)


@dataclass(frozen=True)
class SftConfig(ResponsesConfig, PromptResponseConfig):
    """``data`` of SFT. Every assistant turn of messages under ``prompt_key`` or ``messages`` is learnt; if the completion
    is messages too, only the turns in it.

    - val_path: `path` of the rows for `val/loss`
    - text_key: column of one text in place of prompt and response; all of it is learnt (language modelling)
    - truncation: for `filter_overlong=false`: `error`; of a longer row `left` keeps the last tokens of prompt and response
      together, `right` the first. A row of which nothing to learn is left counts as left out
    """

    text_key: str | None = None
    truncation: Truncation = "error"
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"filter_overlong=false": ("truncation",)}

    def encode_chunk(self, rows: Sequence[Row], tokenizer: Any) -> ResponseDataset:
        return ResponseDataset(rows, self, tokenizer)


class ResponseDataset(TokenDataset):
    """``batch(indices, row_ids)`` has ``prompt_ids`` and ``response_ids`` (Ragged int64); no row of either is empty.

    Columns ``prompt_ids`` and ``response_ids`` are used as given; only if all rows have them, ``tokenizer`` may be
    None. If a conversation goes on after the assistant's first turn, ``response_mask`` (Ragged bool) marks the tokens
    to learn.
    """

    can_cut: ClassVar[bool] = True
    omitted_if: ClassVar[dict[str, int]] = {"response_mask": 1}
    batch_fields: ClassVar[tuple[str, ...]] = ("response_mask",)

    def __init__(self, rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> None:
        vocab_size = None if tokenizer is None else len(tokenizer)
        left_out = {"weight is 0": [row for row in rows if row_weight(row) == 0]}
        rows = [row for row in rows if row_weight(row)]
        encode = _encode if config.text_key is None else _encode_texts
        pairs = _ids_or_encoded(rows, tokenizer, vocab_size, lambda texts: encode(texts, config, tokenizer))
        num_cut = 0
        if config.truncation != "error":
            cut = [_cut(pair, config.max_length, config.truncation) for pair in pairs]
            usable = [i for i, (_, _, mask) in enumerate(cut) if any(mask)]
            num_cut = sum(cut[i] is not pairs[i] for i in usable)
            left_out["prompt leaves no room"] = [rows[i] for i in sorted({*range(len(rows))} - {*usable})]
            rows = [rows[i] for i in usable]
            pairs = [cut[i] for i in usable]
        columns = {"prompt_ids": [prompt for prompt, _, _ in pairs], "response_ids": [response for _, response, _ in pairs]}
        super().__init__(rows, columns, config.length_limit)
        self.row_fields["response_mask"] = ragged([pairs[i][2] for i in self.kept_positions], torch.bool)
        self.tally.num_cut = num_cut
        self.tally.left_out = {reason: len(dropped) for reason, dropped in left_out.items() if dropped}
        self.tally.first_left_out = next((row.where for dropped in left_out.values() for row in dropped), "")


def _cut(pair: MaskedPair, limit: int, side: str) -> MaskedPair:
    """Return ``limit`` tokens of a longer row, of which at least the first is prompt, because nothing predicts it."""
    prompt, response, mask = pair
    if len(prompt) + len(response) <= limit:
        return pair
    if side == "right":
        room = max(limit - len(prompt), 0)
        return prompt, response[:room], mask[:room]
    ids = (prompt + response)[-limit:]
    begin = max(limit - len(response), 1)
    return ids[:begin], ids[begin:], mask[-(limit - begin) :]


def has_ids(row: Row) -> bool:
    return all(key in row.values for key in ID_KEYS)


def encode_pairs(
    rows: Sequence[Row], config: PromptResponseConfig, tokenizer: Any, vocab_size: int | None
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, response ids) of each row: ids that the row has, or those of its text without an end token.

    After chat messages a response that is text stays as it is. Of one that is a message, this is what the template
    writes, without what closes its turn. Raises DataError, also for ids beyond ``vocab_size``.
    """

    def encoded(texts: Sequence[Row]) -> list[MaskedPair]:
        examples = []
        for row in texts:
            with named_row(row.where):
                examples.append(replace(_last_message(_example(row, config)), verbatim=True))
        return encode_examples(examples, config, tokenizer, append_eos=False)

    return [(prompt, response) for prompt, response, _ in _ids_or_encoded(rows, tokenizer, vocab_size, encoded)]


def _ids_or_encoded(
    rows: Sequence[Row], tokenizer: Any, vocab_size: int | None, encode: Callable[[Sequence[Row]], list[MaskedPair]]
) -> list[MaskedPair]:
    """Return the ids of rows that have them, and what ``encode`` returns for the others. Raises DataError."""

    def ids(row: Row) -> MaskedPair:
        with named_row(row.where):
            prompt, response = (check_ids(row.values[key], vocab_size, key) for key in ID_KEYS)
        return prompt, response, [True] * len(response)

    texts = [row for row in rows if not has_ids(row)]
    if texts and tokenizer is None:
        raise texts[0].error("without a tokenizer every row must have 'prompt_ids' and 'response_ids'")
    encoded = iter(encode(texts))
    return [ids(row) if has_ids(row) else next(encoded) for row in rows]


def _encode(rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> list[MaskedPair]:
    return encode_examples([_example(row, config) for row in rows], config, tokenizer, config.append_eos)


def _example(row: Row, config: PromptResponseConfig) -> Example:
    """Return the row's prompt and response, or its whole conversation. Raises DataError."""
    key = config.response_key if config.response_key in row else "completion"
    response = row.get(key, "data.response_key") if key in row else None
    prompt_column = config.prompt_key if config.prompt_key in row or "messages" not in row else "messages"
    prompt = row.get(prompt_column, "data.prompt_key")
    if response is None and prompt_column == PromptResponseConfig.prompt_key and isinstance(prompt, list):
        last = prompt[-1] if prompt else None
        if isinstance(last, dict) and last.get("role") != "assistant":  # a prompt whose answers have other names
            row.get(config.response_key, "data.response_key")
    if response is None and isinstance(prompt, str):
        if "messages" in row:
            raise row.error(
                f"it has '{config.prompt_key}' and 'messages', and no '{config.response_key}' (data.response_key); set "
                "data.prompt_key=messages to take the conversation"
            )
        response = row.get(config.response_key, "data.response_key")
    if isinstance(response, dict):
        response = [response]
    if (response is not None and not isinstance(response, str | list)) or (isinstance(prompt, str) and response is None):
        raise row.error(f"'{config.response_key}' must be text, not {type(response).__name__}")
    return Example(prompt, response, row)


def _last_message(example: Example) -> Example:
    """Return a whole conversation as the prompt and the last message, the response. Raises DataError."""
    if example.response is None:
        messages = check_messages(example.prompt)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise RowError("without a response, the last of two or more messages must be the assistant's")
        example = replace(example, prompt=messages[:-1], response=messages[-1:])
    if isinstance(example.response, list):
        answer = single_answer(example.response)
        return replace(example, response=answer["content"] if is_text(answer) else [answer])
    return example


def _encode_texts(rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> list[MaskedPair]:
    """Return the tokens of each row's text. Raises DataError.

    The first token is the prompt, because nothing predicts it: the tokenizer's start token if it adds one.
    """
    if not rows:
        return []
    key = str(config.text_key)
    end = end_ids(tokenizer, config.append_eos)
    texts = [row.get(key, "data.text_key") for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise row.error(f"'{key}' must be text that is not empty")
    pairs = [(ids[:1], [*ids[1:], *end]) for ids in PromptEncoder(tokenizer, config).tokenize(texts, special_tokens=True)]
    for row, (_, response) in zip(rows, pairs, strict=True):
        if not response:
            raise row.error("the response has no tokens")
    return [(prompt, response, [True] * len(response)) for prompt, response in pairs]
