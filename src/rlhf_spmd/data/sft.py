"""Prompt and response pairs, or plain text, as token ids; for SFT and for scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from rlhf_spmd.config.constraints import Range
from rlhf_spmd.data.batch import ragged
from rlhf_spmd.data.dataset import DatasetConfig, RowsConfig, TokenDataset
from rlhf_spmd.data.encoding import ConversationEncoder, MaskedPair, PromptEncoder, check_ids, check_messages, end_ids
from rlhf_spmd.data.files import DataError, Row

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


@dataclass(frozen=True)
class SftConfig(ResponsesConfig, PromptResponseConfig):
    """``data`` of SFT. Every assistant turn of messages under ``prompt_key`` or ``messages`` is learnt; if the completion
    is messages too, only the turns in it.

    - val_path: `path` of the rows for `val/loss`
    - text_key: column of one text in place of prompt and response; all of it is learnt (language modelling)
    """

    text_key: str | None = None

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> ResponseDataset:
        return ResponseDataset(rows, self, tokenizer)


class ResponseDataset(TokenDataset):
    """``batch(indices, row_ids)`` has ``prompt_ids`` and ``response_ids`` (Ragged int64); no row of either is empty.

    Columns ``prompt_ids`` and ``response_ids`` are used as given; only if all rows have them, ``tokenizer`` may be
    None. If a conversation goes on after the assistant's first turn, ``response_mask`` (Ragged bool) marks the tokens
    to learn.
    """

    omitted_if: ClassVar[dict[str, int]] = {"response_mask": 1}
    batch_fields: ClassVar[tuple[str, ...]] = ("response_mask",)

    def __init__(self, rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> None:
        vocab_size = None if tokenizer is None else len(tokenizer)
        talks = {} if config.text_key is not None else {i: talk for i, row in enumerate(rows) if (talk := _talk(row, config))}
        plain = [row for i, row in enumerate(rows) if i not in talks]
        pairs = iter(encode_pairs(plain, config, tokenizer, vocab_size, config.append_eos, config.text_key))
        learnt = _encode_talks(talks, rows, config, tokenizer)
        whole = [learnt[i] if i in learnt else (*next(pairs), None) for i in range(len(rows))]
        columns = {"prompt_ids": [prompt for prompt, _, _ in whole], "response_ids": [response for _, response, _ in whole]}
        super().__init__(rows, columns, ("max_length", config.max_length), ("filter_overlong", config.filter_overlong))
        masks = [whole[i][2] or [True] * len(whole[i][1]) for i in self.kept]
        self.row_fields["response_mask"] = ragged(masks, torch.bool)


def has_ids(row: Row) -> bool:
    return all(key in row.values for key in ID_KEYS)


def encode_pairs(
    rows: Sequence[Row],
    config: PromptResponseConfig,
    tokenizer: Any,
    vocab_size: int | None,
    append_eos: bool = False,
    text_key: str | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Returns (prompt ids, response ids) of each row: given ids, or its text's ids, with the end token if ``append_eos``.

    After chat messages a response is its text alone, without what the template would put around it. Raises DataError,
    also for ids beyond ``vocab_size``.
    """
    texts = [row for row in rows if not has_ids(row)]
    encoded = iter(_encode(texts, config, tokenizer, append_eos, text_key) if texts else ())

    def given(row: Row, key: str) -> list[int]:
        return check_ids(row.values[key], vocab_size, row.where, key)

    return [(given(row, "prompt_ids"), given(row, "response_ids")) if has_ids(row) else next(encoded) for row in rows]


def _encode(
    rows: Sequence[Row], config: PromptResponseConfig, tokenizer: Any, append_eos: bool, text_key: str | None
) -> list[tuple[list[int], list[int]]]:
    if tokenizer is None:
        raise DataError(f"{rows[0].where}: without a tokenizer every row must have 'prompt_ids' and 'response_ids'")
    end = end_ids(tokenizer, append_eos)
    encoder = PromptEncoder(tokenizer, config)
    if text_key is not None:
        return _encode_texts(rows, text_key, encoder, end)
    pairs = [_prompt_and_response(row, config) for row in rows]
    rendered = [encoder.render(prompt, row.where) for (prompt, _), row in zip(pairs, rows, strict=True)]
    found: dict[int, tuple[list[int], list[int]]] = {}
    for templated in (True, False):
        its = [i for i, (_, from_template) in enumerate(rendered) if from_template is templated]
        texts = [(rendered[i][0], pairs[i][1]) for i in its]
        found |= zip(its, encoder.tokenize_pairs(texts, special_tokens=not templated), strict=True)
    return [(_not_empty(found[i][0], row, "prompt"), _not_empty([*found[i][1], *end], row)) for i, row in enumerate(rows)]


def _talk(row: Row, config: SftConfig) -> tuple[list[Any], int] | None:
    """Returns the row's messages and the first message to learn from, or None if the row has texts or ids."""
    key = config.prompt_key if config.prompt_key in row else "messages"
    if has_ids(row) or key not in row:
        return None
    messages, response = row.get(key, "data.prompt_key"), _response(row, config)
    if isinstance(messages, str) and config.apply_chat_template is True and response is not None:
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, str):
        return None
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    if response is None:
        return check_messages(messages, row.where), 0
    return [*check_messages(messages, row.where), *check_messages(response, row.where)], len(messages)


def _response(row: Row, config: PromptResponseConfig) -> Any:
    key = config.response_key if config.response_key in row else "completion"
    return row.get(key, "data.response_key") if key in row else None


def _encode_talks(
    talks: Mapping[int, tuple[list[Any], int]], rows: Sequence[Row], config: SftConfig, tokenizer: Any
) -> dict[int, MaskedPair]:
    if not talks:
        return {}
    if tokenizer is None:
        raise DataError(f"{rows[next(iter(talks))].where}: messages need a tokenizer")
    encoder, end = ConversationEncoder(PromptEncoder(tokenizer, config)), end_ids(tokenizer, config.append_eos)
    return {i: encoder.encode_pair(messages, first, rows[i].where, end) for i, (messages, first) in talks.items()}


def _encode_texts(rows: Sequence[Row], key: str, encoder: PromptEncoder, end: list[int]) -> list[tuple[list[int], list[int]]]:
    """The first token is the prompt, because nothing predicts it: the tokenizer's start token if it adds one."""
    texts = [row.get(key, "data.text_key") for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise DataError(f"{row.where}: '{key}' must be text that is not empty")
    ids = encoder.tokenize(texts, special_tokens=True)
    return [(tokens[:1], _not_empty([*tokens[1:], *end], row)) for tokens, row in zip(ids, rows, strict=True)]


def _prompt_and_response(row: Row, config: PromptResponseConfig) -> tuple[Any, str]:
    prompt = row.get(config.prompt_key, "data.prompt_key")
    response = _response(row, config)
    if not isinstance(prompt, str) and response is None:
        messages = check_messages(prompt, row.where)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"{row.where}: without '{config.response_key}', the last of two or more messages must be the assistant's"
            )
        return messages[:-1], messages[-1]["content"]
    if response is None and "messages" in row:
        raise DataError(
            f"{row.where} has '{config.prompt_key}' and 'messages', and no '{config.response_key}' (data.response_key); set "
            "data.prompt_key=messages to take the conversation"
        )
    response = row.get(config.response_key, "data.response_key") if response is None else response
    if isinstance(response, list) and response:
        messages = check_messages(response, row.where)
        if (roles := [message["role"] for message in messages]) != ["assistant"]:
            raise DataError(
                f"{row.where}: the response must be text or one message of the assistant, not messages of: {', '.join(roles)}; give "
                f"the whole conversation as messages in '{config.prompt_key}'"
            )
        response = messages[0]["content"]
    if not isinstance(response, str):
        raise DataError(f"{row.where}: '{config.response_key}' must be text, not {type(response).__name__}")
    return prompt, response


def _not_empty(ids: list[int], row: Row, what: str = "response") -> list[int]:
    if not ids:
        raise DataError(f"{row.where}: the {what} has no tokens")
    return ids
