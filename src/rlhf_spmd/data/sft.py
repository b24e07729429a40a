"""Prompt and response pairs, or plain text, as token ids: for SFT and for scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.data.dataset import DatasetConfig, RowsConfig, TokenDataset
from rlhf_spmd.data.encoding import PromptEncoder, check_ids, check_messages
from rlhf_spmd.data.files import DataError, Row

ID_KEYS = ("prompt_ids", "response_ids")


@dataclass(frozen=True)
class PairsConfig(RowsConfig):
    """A row has ``prompt_key`` and ``response_key``; or messages under ``prompt_key``, the last one the assistant's."""

    response_key: str = "response"


@dataclass(frozen=True)
class SftConfig(DatasetConfig, PairsConfig):
    """``data`` of SFT. ``max_length`` counts prompt and response tokens together; batch sizes count rows.

    With ``text_key`` a row has one text that is all response (language modelling).
    ``append_eos`` ends every response with the tokenizer's end token.
    """

    text_key: str | None = None
    max_length: int = 1024
    filter_overlong: bool = True
    append_eos: bool = True

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "max_length", least=2)

    def tokenize(self, rows: Sequence[Row], tokenizer: Any) -> ResponseDataset:
        return ResponseDataset(rows, self, tokenizer)


class ResponseDataset(TokenDataset):
    """``batch(indices, row_ids)`` has ``prompt_ids`` and ``response_ids`` (Ragged int64, no row empty in either).

    Columns ``prompt_ids`` and ``response_ids`` are taken as they are, nothing appended; only then may ``tokenizer`` be None.
    """

    def __init__(self, rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> None:
        vocab_size = None if tokenizer is None else len(tokenizer)
        pairs = encode_pairs(rows, config, tokenizer, vocab_size, config.append_eos, config.text_key)
        columns = dict(zip(ID_KEYS, zip(*pairs, strict=True), strict=True))
        super().__init__(rows, columns, ("max_length", config.max_length), ("filter_overlong", config.filter_overlong))


def has_ids(row: Row) -> bool:
    return all(key in row.values for key in ID_KEYS)


def encode_pairs(
    rows: Sequence[Row],
    config: PairsConfig,
    tokenizer: Any,
    vocab_size: int | None,
    append_eos: bool = False,
    text_key: str | None = None,
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each row: those that it gives, else its text's, with the end token if ``append_eos``.

    Raises DataError, also for given ids beyond ``vocab_size``.
    """
    texts = [row for row in rows if not has_ids(row)]
    encoded = iter(_encode(texts, config, tokenizer, append_eos, text_key) if texts else ())
    pairs = []
    for row in rows:
        if has_ids(row):
            prompt, response = (check_ids(row.values[key], vocab_size, row.where, key) for key in ID_KEYS)
            pairs.append((prompt, response))
        else:
            pairs.append(next(encoded))
    return pairs


def _encode(
    rows: Sequence[Row], config: PairsConfig, tokenizer: Any, append_eos: bool, text_key: str | None
) -> list[tuple[list[int], list[int]]]:
    if tokenizer is None:
        raise DataError(f"{rows[0].where}: without a tokenizer every row must have 'prompt_ids' and 'response_ids'")
    end: list[int] = []
    if append_eos:
        if tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
        end = [int(tokenizer.eos_token_id)]
    encoder = PromptEncoder(tokenizer, config)
    if text_key is not None:
        return _encode_texts(rows, text_key, encoder, end)
    pairs = [_prompt_and_response(row, config) for row in rows]
    prompts = encoder.encode([prompt for prompt, _ in pairs], [row.where for row in rows])
    responses = encoder.tokenize([response for _, response in pairs], special_tokens=False)
    return [
        (prompt, _not_empty([*response, *end], row))
        for (prompt, _), response, row in zip(prompts, responses, rows, strict=True)
    ]


def _encode_texts(rows: Sequence[Row], key: str, encoder: PromptEncoder, end: list[int]) -> list[tuple[list[int], list[int]]]:
    """The first token has nothing before it to predict it, so it is the prompt: the tokenizer's start token, if it adds one."""
    texts = [row.get(key, "data.text_key") for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise DataError(f"{row.where}: '{key}' must be text that is not empty")
    ids = encoder.tokenize(texts, special_tokens=True)
    return [(tokens[:1], _not_empty([*tokens[1:], *end], row)) for tokens, row in zip(ids, rows, strict=True)]


def _prompt_and_response(row: Row, config: PairsConfig) -> tuple[Any, str]:
    prompt = row.get(config.prompt_key, "data.prompt_key")
    if not isinstance(prompt, str) and config.response_key not in row:
        messages = check_messages(prompt, row.where)
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"{row.where}: without '{config.response_key}', the last of two or more messages must be the assistant's"
            )
        return messages[:-1], messages[-1]["content"]
    response = row.get(config.response_key, "data.response_key")
    if isinstance(response, list) and response:
        response = check_messages(response, row.where)[-1]["content"]
    if not isinstance(response, str):
        raise DataError(f"{row.where}: '{config.response_key}' must be text, not {type(response).__name__}")
    return prompt, response


def _not_empty(response: list[int], row: Row) -> list[int]:
    if not response:
        raise DataError(f"{row.where}: the response has no tokens")
    return response
