"""The prompts that RL samples from: read, rendered, tokenised and filtered once, when the data set is built."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.data.batch import Ragged, encode_json
from rlhf_spmd.data.dataset import DatasetConfig, RowsConfig, StoredRowsConfig, TokenDataset
from rlhf_spmd.data.encoding import PromptEncoder, check_ids
from rlhf_spmd.data.files import DataError, Given, Row, list_paths, names_of, stream_rows
from rlhf_spmd.data.tokenizer import prompt_texts

LIMITS = {"min_response_length": 0, "max_response_length": 1}  # columns of a row's own limits: the least that each may be
NUM_FIRST = 100  # rows that are always among the examples


@dataclass(frozen=True)
class QuestionsConfig(RowsConfig):
    """Prompts with their answers.

    - answer_key: column that rewards see as `answer`; with `answer` rows need not have it, and verl's
      `reward_model.ground_truth` is found too; another must be in every row
    - tools: OpenAI's schemas of functions that the chat template tells the model of, a list for each name that a row's column
      `environment` may have (`environment`: for rows without); those that an [environment](environments.md#tools) has are
      added
    """

    answer_key: str = "answer"
    tools: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptsConfig(QuestionsConfig):
    """Prompts to answer. Lengths count tokens.

    - max_prompt_length: longer prompts are dropped
    - max_response_length: limit of responses where `sampling` names none
    - filter_overlong_prompts: `false`: a longer prompt is an error
    """

    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    filter_overlong_prompts: bool = True

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> PromptDataset:
        return PromptDataset(rows, self, tokenizer)


@dataclass(frozen=True)
class ValidationPromptsConfig(StoredRowsConfig, PromptsConfig):
    """``val_prompts``: prompts to validate by.

    - max_samples: read only the first rows
    - val_batch_size: prompts per batch; null: all
    """

    max_samples: PositiveInt | None = None
    val_batch_size: PositiveInt | None = None

    def stream(self, validation: bool = True) -> Iterator[Given]:
        return stream_rows(self.path, self.split, self.subset, self.max_samples)

    @property
    def val_sets(self) -> dict[str, str]:
        """Where each set is. Raises ValueError."""
        return names_of(list_paths(self.path))


@dataclass(frozen=True)
class DataConfig(DatasetConfig, PromptsConfig):
    """``data``: prompts for training and validation. Batch sizes count prompts.

    - val_path: `path` of the prompts to validate by; a list, or a mapping from names: several sets
    - train_batch_size: prompts per step; divisible by the number of generation replicas
    - val_batch_size: prompts per batch of validation; null: all
    - gen_batch_size: prompts in flight, of which a step takes `train_batch_size`; null: the same number, every response ends in
      its step. See [generation.md](generation.md#responses-that-take-several-steps)
    """

    gen_batch_size: PositiveInt | None = None

    def check(self, where: str) -> None:
        super().check(where)
        if self.gen_batch_size is not None and self.gen_batch_size < self.train_batch_size:
            raise ValueError(
                f"{where}.gen_batch_size={self.gen_batch_size} is less than {where}.train_batch_size={self.train_batch_size}: "
                "it counts the prompts in flight, of which a step takes the second; raise the first or leave it out"
            )


class PromptDataset(TokenDataset):
    """Prompts as token ids, and for each the row that rewards and rollout files see.

    ``batch(indices, row_ids)`` has the fields ``prompt_ids`` (Ragged int64) and ``row`` (Ragged uint8, JSON: the row's own
    columns, and always ``prompt`` (text), ``answer``, ``data_source`` and ``id``, null where the data have none); and of
    ``min_response_length`` and ``max_response_length`` (int64 [rows], 0: the common one) those that a row has.
    For messages, ``prompt`` is the rendered text and ``messages`` the list. A column ``prompt_ids`` is taken as it is where
    there is no prompt; only then may ``tokenizer`` be None.
    """

    noun = "prompts"
    trivial: ClassVar[dict[str, int]] = dict.fromkeys(LIMITS, 0)
    in_batches: ClassVar[tuple[str, ...]] = ("row", *LIMITS)

    def __init__(self, rows: Sequence[Row], config: PromptsConfig, tokenizer: Any) -> None:
        encoded = encode_prompts(rows, config, tokenizer, None if tokenizer is None else len(tokenizer))
        longest, drop = config.max_prompt_length, config.filter_overlong_prompts
        super().__init__(
            rows, {"prompt_ids": [ids for ids, _ in encoded]}, ("max_prompt_length", longest), ("filter_overlong_prompts", drop)
        )
        kept = [(rows[i], *encoded[i]) for i in self.kept]
        seen = [reward_row(row, row.number, text, config) for row, _, text in kept]
        limits = torch.tensor([_limits_within(row, config.max_response_length) for row, *_ in kept], dtype=torch.int64)
        self.beside |= dict(zip(LIMITS, limits.view(-1, len(LIMITS)).T, strict=True))
        self.beside |= {"row": encode_json(seen), "kind": torch.tensor([_kind(row) for row in seen], dtype=torch.int64)}

    def row(self, index: int) -> dict[str, Any]:
        """What rewards see of a row, decoded when it is asked for."""
        field = cast(Ragged, self.beside["row"])
        begin, end = field.offsets[index : index + 2].tolist()
        found: dict[str, Any] = json.loads(bytes(field.values[begin:end].numpy()))
        return found

    def examples(self) -> list[dict[str, Any]]:
        """The first rows, and of every ``data_source``, ``environment`` and set of columns that have a value the first: what there
        is to check, without a look at every row."""
        _, first = np.unique(cast(Tensor, self.beside["kind"]).numpy(), return_index=True)
        return [self.row(i) for i in sorted({*range(min(len(self), NUM_FIRST)), *first.tolist()})]

    def examples_by_path(self) -> list[list[dict[str, Any]]]:
        """A list for each path: its first row of every kind, by ``data_source``, ``environment`` and the columns that have a value."""
        path, kind = self.sources.numpy(), cast(Tensor, self.beside["kind"]).numpy()
        _, first = np.unique(np.stack([path, kind]), axis=1, return_index=True)
        return [[self.row(i) for i in first.tolist() if path[i] == number] for number in np.unique(path)]


def _kind(row: Mapping[str, Any]) -> int:
    there = sorted(key for key, value in row.items() if value is not None)
    return zlib.crc32(json.dumps([str(row["data_source"]), str(row.get("environment")), there]).encode())


def has_ids(row: Row, config: RowsConfig) -> bool:
    """Whether the row's ``prompt_ids`` are its prompt, for which no tokenizer is needed."""
    return config.prompt_key not in row and "prompt_ids" in row


def encode_prompts(
    rows: Sequence[Row], config: RowsConfig, tokenizer: Any, vocab_size: int | None
) -> list[tuple[list[int], str]]:
    """Token ids and text of each row's prompt: messages rendered, given ids decoded (:func:`prompt_texts`).

    Raises DataError, also for given ids beyond ``vocab_size``.
    """
    texts = [row for row in rows if not has_ids(row, config)]
    encoded: Iterable[tuple[list[int], str]] = ()
    if texts:
        if tokenizer is None:
            raise DataError(f"{texts[0].where}: without a tokenizer a row must have 'prompt_ids'")
        prompts = [row.get(config.prompt_key, "data.prompt_key") for row in texts]
        known = getattr(config, "tools", {})
        tools = [known.get(row.values.get("environment") or "environment") for row in texts]
        encoded = PromptEncoder(tokenizer, config).encode(prompts, [row.where for row in texts], tools)
    given = [check_ids(row.values["prompt_ids"], vocab_size, row.where, "prompt_ids") for row in rows if has_ids(row, config)]
    from_ids, from_texts = zip(given, prompt_texts(tokenizer, given), strict=True), iter(encoded)
    return [next(from_ids if has_ids(row, config) else from_texts) for row in rows]


def response_limits(row: Row) -> list[int]:
    """The row's own ``min_response_length`` and ``max_response_length``, 0 where it has none. Raises DataError."""
    for key, least in LIMITS.items():
        value = row.values.get(key)  # a parquet column with nulls holds floats
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 or value < least):
            raise DataError(f"{row.where}: {key}={value!r} must be a whole number of at least {least}")
    return [int(row.values.get(key) or 0) for key in LIMITS]


def _limits_within(row: Row, limit: int) -> list[int]:
    least, most = response_limits(row)
    if most > limit:
        raise DataError(f"{row.where}: max_response_length={most} must be at most data.max_response_length={limit}; raise that")
    if least > (most or limit):
        what = "the row's" if most else "data's"
        raise DataError(f"{row.where}: min_response_length={least} must be at most {what} max_response_length={most or limit}")
    return [least, most]


def reward_row(row: Row, index: int, rendered: str, config: QuestionsConfig) -> dict[str, Any]:
    """What rewards see of a row: its columns, ``prompt`` (text), ``answer``, ``data_source`` and ``id`` (else ``index``)."""
    values = dict(row.values)
    prompt = row.get(config.prompt_key, "data.prompt_key") if config.prompt_key in row else None
    answer = values.get("answer") if config.answer_key == "answer" else row.get(config.answer_key, "data.answer_key")
    if answer is None and "reward_model.ground_truth" in row:
        answer = row.get("reward_model.ground_truth", "data.answer_key")
    if not isinstance(prompt, str):
        if prompt is not None:
            values["messages"] = prompt
        prompt = rendered
    own = {"answer": answer, "data_source": values.get("data_source"), "id": values.get("id", index)}
    return {**values, "prompt": prompt, **own}
