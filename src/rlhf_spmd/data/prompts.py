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
from rlhf_spmd.data.dataset import DatasetConfig, LengthLimit, RowsConfig, StoredRowsConfig, TokenDataset, Truncation
from rlhf_spmd.data.encoding import PromptEncoder, check_ids
from rlhf_spmd.data.files import Row, RowOrError, list_paths, named_row, set_names, stream_rows
from rlhf_spmd.data.messages import chat_options
from rlhf_spmd.data.tokenizer import prompt_texts

LIMITS = {"min_response_length": 0, "max_response_length": 1}  # columns with a row's own limits, and their lowest values
IS_CHAT = "prompt_is_messages"  # column that rows have whose prompt is messages; another column ``messages`` is none
NUM_FIRST = 100  # first rows that are always examples


@dataclass(frozen=True)
class QuestionsConfig(RowsConfig):
    """Prompts with their answers.

    - answer_key: column that rewards see as `answer`. With `answer` rows may lack it, and verl's
      `reward_model.ground_truth` is found too; any other column must be in every row
    - tools: functions that the chat template tells the model about, as OpenAI's schemas: `{environment: [...]}` for rows
      without a column `environment`, `{NAME: [...]}` for rows that name one; an environment's own are added, see
      [tools](environments.md#tools)
    """

    answer_key: str = "answer"
    tools: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptsConfig(QuestionsConfig):
    """Prompts to answer. Lengths count tokens.

    - max_prompt_length: longer prompts are dropped, or see `filter_overlong_prompts`
    - max_response_length: limit of responses unless `sampling` sets one
    - filter_overlong_prompts: `false`: `truncation` says what becomes of a longer prompt
    - truncation: `error`; `left`: it keeps its last tokens; `right`: its first, without the end that asks for an answer. Rewards
      see the whole prompt
    """

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"filter_overlong_prompts=false": ("truncation",)}

    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    filter_overlong_prompts: bool = True
    truncation: Truncation = "error"

    @property
    def max_kept_tokens(self) -> int | None:
        """Return the length above which prompts are dropped; None if they are not."""
        return self.max_prompt_length if self.filter_overlong_prompts else None

    def encode_chunk(self, rows: Sequence[Row], tokenizer: Any) -> PromptDataset:
        return PromptDataset(rows, self, tokenizer)


@dataclass(frozen=True)
class ValidationPromptsConfig(StoredRowsConfig, PromptsConfig):
    """``val_prompts``: prompts to validate by.

    - max_samples: read only the first rows
    - val_batch_size: prompts per batch; null: all
    """

    max_samples: PositiveInt | None = None
    val_batch_size: PositiveInt | None = None

    def stream(self, validation: bool = True) -> Iterator[RowOrError]:
        return stream_rows(self.path, self.split, self.subset, self.max_samples)

    @property
    def val_sets(self) -> dict[str, str]:
        """Return the path of each set by its name. Raises ValueError."""
        return set_names(list_paths(self.path))


@dataclass(frozen=True)
class DataConfig(DatasetConfig, PromptsConfig):
    """``data``: prompts for training and validation. Batch sizes count prompts.

    - val_path: `path` of the validation prompts; a list, or a mapping from names: several sets
    - train_batch_size: prompts per step; divisible by the number of generation replicas
    - val_batch_size: prompts per validation batch; null: all
    """


class PromptDataset(TokenDataset):
    """Prompts as token ids, and for each the row that rewards and rollout files see.

    ``batch(indices, row_ids)`` has ``prompt_ids`` (Ragged int64) and ``row`` (Ragged uint8, JSON): the row's columns,
    and always ``prompt`` (text), ``answer``, ``data_source`` and ``id``, null if missing. ``min_response_length`` and
    ``max_response_length`` (int64 [rows], 0: the common limit) are there if a row has one.

    For messages, ``prompt`` is the rendered text and ``messages`` the list. A row without a prompt may give
    ``prompt_ids``; only if all do, ``tokenizer`` may be None.
    """

    noun = "prompts"
    can_cut: ClassVar[bool] = True
    omitted_if: ClassVar[dict[str, int]] = dict.fromkeys(LIMITS, 0)
    batch_fields: ClassVar[tuple[str, ...]] = ("row", *LIMITS)

    def __init__(self, rows: Sequence[Row], config: PromptsConfig, tokenizer: Any) -> None:
        encoded = encode_prompts(rows, config, tokenizer, None if tokenizer is None else len(tokenizer))
        max_tokens = config.max_prompt_length
        num_cut = 0
        if config.truncation != "error":
            num_cut = sum(len(ids) > max_tokens for ids, _ in encoded)
            encoded = [(ids[-max_tokens:] if config.truncation == "left" else ids[:max_tokens], text) for ids, text in encoded]
        limit = LengthLimit("max_prompt_length", max_tokens, "filter_overlong_prompts", config.filter_overlong_prompts)
        super().__init__(rows, {"prompt_ids": [ids for ids, _ in encoded]}, limit)
        self.tally.num_cut = num_cut
        kept_rows = [rows[i] for i in self.kept_positions]
        reward_rows = [reward_row(rows[i], rows[i].number, encoded[i][1], config) for i in self.kept_positions]
        limits = torch.tensor([_limits_within(row, config.max_response_length) for row in kept_rows], dtype=torch.int64)
        self.row_fields |= dict(zip(LIMITS, limits.view(-1, len(LIMITS)).T, strict=True))
        self.row_fields["row"] = encode_json(reward_rows)
        self.row_fields["kind"] = torch.tensor([_kind(row) for row in reward_rows], dtype=torch.int64)

    def row(self, index: int) -> dict[str, Any]:
        """Return the row, decoded, that rewards see."""
        field = cast(Ragged, self.row_fields["row"])
        begin, end = field.offsets[index : index + 2].tolist()
        values: dict[str, Any] = json.loads(bytes(field.values[begin:end].numpy()))
        return values

    def examples(self) -> list[dict[str, Any]]:
        """Return the first rows, and the first row of every ``data_source``, ``environment`` and set of filled columns.

        Checks look at these instead of at every row.
        """
        _, firsts = np.unique(cast(Tensor, self.row_fields["kind"]).numpy(), return_index=True)
        return [self.row(i) for i in sorted({*range(min(len(self), NUM_FIRST)), *firsts.tolist()})]

    def examples_by_path(self) -> list[list[dict[str, Any]]]:
        """Return for each path the first row of every kind (``data_source``, ``environment``, filled columns)."""
        sources = self.sources.numpy()
        kinds = cast(Tensor, self.row_fields["kind"]).numpy()
        _, firsts = np.unique(np.stack([sources, kinds]), axis=1, return_index=True)
        return [[self.row(i) for i in firsts.tolist() if sources[i] == source] for source in np.unique(sources)]


def _kind(row: Mapping[str, Any]) -> int:
    """Return a number that rows with the same ``data_source``, ``environment`` and filled columns share."""
    filled = sorted(key for key, value in row.items() if value is not None)
    return zlib.crc32(json.dumps([str(row["data_source"]), str(row.get("environment")), filled]).encode())


def has_ids(row: Row, config: RowsConfig) -> bool:
    """Return True if ``prompt_ids`` are the row's prompt, so no tokenizer is needed."""
    return config.prompt_key not in row and "prompt_ids" in row


def encode_prompts(
    rows: Sequence[Row], config: RowsConfig, tokenizer: Any, vocab_size: int | None
) -> list[tuple[list[int], str]]:
    """Return token ids and text of each row's prompt: messages are rendered, given ids are decoded.

    Raises DataError, also for ids beyond ``vocab_size``.
    """
    texts = [row for row in rows if not has_ids(row, config)]
    encoded: Iterable[tuple[list[int], str]] = ()
    if texts:
        if tokenizer is None:
            raise texts[0].error("without a tokenizer a row must have 'prompt_ids'")
        prompts = [row.get(config.prompt_key, "data.prompt_key") for row in texts]
        tools = config.tools if isinstance(config, QuestionsConfig) else {}
        options = [chat_options(row, tools.get(row.values.get("environment") or "environment")) for row in texts]
        max_kept_tokens = config.max_kept_tokens if isinstance(config, PromptsConfig) else None
        wheres = [row.where for row in texts]
        encoded = PromptEncoder(tokenizer, config).encode(prompts, wheres, options, max_kept_tokens=max_kept_tokens)
    ids = []
    for row in rows:
        if has_ids(row, config):
            with named_row(row.where):
                ids.append(check_ids(row.values["prompt_ids"], vocab_size, "prompt_ids"))
    from_ids = zip(ids, prompt_texts(tokenizer, ids), strict=True)
    from_texts = iter(encoded)
    return [next(from_ids if has_ids(row, config) else from_texts) for row in rows]


def response_limits(row: Row) -> list[int]:
    """Return the row's own ``min_response_length`` and ``max_response_length``, 0 for none. Raises DataError."""
    for key, lowest in LIMITS.items():
        value = row.values.get(key)  # a parquet column with nulls holds floats
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value % 1 == 0 and value >= lowest):
            raise row.error(f"{key}={value!r} must be a whole number of at least {lowest}")
    return [int(row.values.get(key) or 0) for key in LIMITS]


def _limits_within(row: Row, limit: int) -> list[int]:
    shortest, longest = response_limits(row)
    if longest > limit:
        raise row.error(f"max_response_length={longest} must be at most data.max_response_length={limit}; raise that")
    if shortest > (longest or limit):
        owner = "the row's" if longest else "data's"
        raise row.error(f"min_response_length={shortest} must be at most {owner} max_response_length={longest or limit}")
    return [shortest, longest]


def reward_row(row: Row, index: int, rendered: str, config: QuestionsConfig) -> dict[str, Any]:
    """Return what rewards see of a row: its columns, ``prompt`` (text), ``answer``, ``data_source`` and ``id``.

    A row without an id has ``index``.
    """
    values = dict(row.values)
    prompt = row.get(config.prompt_key, "data.prompt_key") if config.prompt_key in row else None
    answer = values.get("answer") if config.answer_key == "answer" else row.get(config.answer_key, "data.answer_key")
    if answer is None and "reward_model.ground_truth" in row:
        answer = row.get("reward_model.ground_truth", "data.answer_key")
    if not isinstance(prompt, str):
        if prompt is not None:
            values |= {"messages": prompt, IS_CHAT: True}
        prompt = rendered
    source = values.get("data_source")
    return {**values, "prompt": prompt, "answer": answer, "data_source": source, "id": values.get("id", index)}
