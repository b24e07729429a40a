"""Prompt and response pairs, or plain text, as token ids: for SFT and for scoring."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.data.encoding import EncodingConfig, PackedIds, PromptEncoder, check_ids, check_messages, pack_ids
from rlhf_spmd.data.files import DataError, Row, read_rows


@dataclass(frozen=True)
class SftConfig(EncodingConfig):
    """``data`` of SFT. ``max_length`` counts prompt and response tokens together; batch sizes count rows.

    A row has ``prompt_key`` and ``response_key``; or messages under ``prompt_key``, the last one the assistant's; or, with
    ``text_key``, one text that is all response (language modelling).
    ``append_eos`` ends every response with the tokenizer's end token.
    """

    path: str = ""
    val_path: str | None = None
    split: str = "train"
    val_split: str = "test"
    subset: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "response"
    text_key: str | None = None
    max_length: int = 1024
    filter_overlong: bool = True
    append_eos: bool = True
    train_batch_size: int = 64
    val_batch_size: int | None = None
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    shuffle: bool = True
    seed: int | None = None

    def check(self, where: str) -> None:
        super().check(where)
        if not self.path:
            raise ValueError(f"{where}.path must be given: a jsonl or parquet file, or the name of a data set")
        if self.max_length < 2:
            raise ValueError(f"{where}.max_length={self.max_length} must be at least 2")
        for key in ("train_batch_size", "val_batch_size", "train_max_samples", "val_max_samples"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{where}.{key}={value} must be at least 1")


class ResponseDataset:
    """``batch(indices, row_ids)`` has ``prompt_ids`` and ``response_ids`` (Ragged int64, no row empty in either).

    Columns ``prompt_ids`` and ``response_ids`` are taken as they are, nothing appended; only then may ``tokenizer`` be None.
    ``num_read`` rows were read, ``num_overlong`` of them dropped as longer than ``max_length`` tokens.
    """

    def __init__(self, rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> None:
        self.num_read = len(rows)
        pairs = _encode(rows, config, tokenizer)
        fits = [i for i, (prompt, response) in enumerate(pairs) if len(prompt) + len(response) <= config.max_length]
        self.num_overlong = len(rows) - len(fits)
        if self.num_overlong and not config.filter_overlong:
            first = min(set(range(len(rows))) - set(fits))
            total = len(pairs[first][0]) + len(pairs[first][1])
            raise DataError(
                f"{rows[first].where}: {total} tokens are more than data.max_length={config.max_length}; "
                f"raise it, or set data.filter_overlong=true ({self.num_overlong} of {len(rows)} rows are too long)"
            )
        if not fits:
            raise DataError(f"all {len(rows)} rows are longer than data.max_length={config.max_length} tokens")
        self.rows = [rows[i].values for i in fits]
        self.prompts: PackedIds = pack_ids([pairs[i][0] for i in fits])
        self.responses: PackedIds = pack_ids([pairs[i][1] for i in fits])
        digest = hashlib.sha256()
        for packed in (self.prompts, self.responses):
            digest.update(packed.offsets.tobytes())
            digest.update(packed.values.tobytes())
        self.fingerprint = f"{len(fits)}-{digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Rows by index; each row is its own group."""
        ids = torch.tensor(list(row_ids), dtype=torch.int64)
        fields = {
            "prompt_ids": ragged([torch.from_numpy(self.prompts[i]) for i in indices], torch.int64),
            "response_ids": ragged([torch.from_numpy(self.responses[i]) for i in indices], torch.int64),
        }
        return Batch(ids, ids.clone(), fields)

    def summary(self) -> str:
        tokens = self.prompts.lengths + self.responses.lengths
        dropped = f", {self.num_overlong} over-long ones dropped" if self.num_overlong else ""
        return f"{len(self)} rows of {tokens.min()} to {tokens.max()} tokens (mean {tokens.mean():.1f}){dropped}"


def load_responses(config: SftConfig, tokenizer: Any, validation: bool = False) -> ResponseDataset:
    """The training rows, or the validation rows of ``val_path``. Raises DataError."""
    if validation:
        assert config.val_path is not None, "load_responses(validation=True) without data.val_path"
        rows = read_rows(config.val_path, config.val_split, config.subset, config.val_max_samples)
    else:
        rows = read_rows(config.path, config.split, config.subset, config.train_max_samples)
    return ResponseDataset(rows, config, tokenizer)


def _encode(rows: Sequence[Row], config: SftConfig, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each row."""
    if all("prompt_ids" in row.values and "response_ids" in row.values for row in rows):
        vocab_size = None if tokenizer is None else len(tokenizer)
        keys = ("prompt_ids", "response_ids")
        given = [[check_ids(row.values[key], vocab_size, row.where, key) for key in keys] for row in rows]
        return [(prompt, response) for prompt, response in given]
    if tokenizer is None:
        raise DataError(f"{rows[0].where}: without a tokenizer every row must have 'prompt_ids' and 'response_ids'")
    end: list[int] = []
    if config.append_eos:
        if tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer '{tokenizer.name_or_path}' has no eos token; set data.append_eos=false")
        end = [int(tokenizer.eos_token_id)]
    encoder = PromptEncoder(tokenizer, config)
    if config.text_key is not None:
        return _encode_texts(rows, config.text_key, encoder, end)
    pairs = [_prompt_and_response(row, config) for row in rows]
    prompts, _ = encoder.encode([prompt for prompt, _ in pairs], [row.where for row in rows])
    responses = encoder.tokenize([response for _, response in pairs], special_tokens=False)
    return [
        (prompt, _not_empty([*response, *end], row)) for prompt, response, row in zip(prompts, responses, rows, strict=True)
    ]


def _encode_texts(rows: Sequence[Row], key: str, encoder: PromptEncoder, end: list[int]) -> list[tuple[list[int], list[int]]]:
    """The first token has nothing before it to predict it, so it is the prompt: the tokenizer's start token, if it adds one."""
    texts = [row.get(key, "data.text_key") for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if not isinstance(text, str) or not text:
            raise DataError(f"{row.where}: '{key}' must be text that is not empty")
    ids = encoder.tokenize(texts, special_tokens=True)
    return [(tokens[:1], _not_empty([*tokens[1:], *end], row)) for tokens, row in zip(ids, rows, strict=True)]


def _prompt_and_response(row: Row, config: SftConfig) -> tuple[Any, str]:
    prompt = row.get(config.prompt_key, "data.prompt_key")
    if not isinstance(prompt, str) and config.response_key not in row.values:
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
