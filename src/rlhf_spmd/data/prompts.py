"""The prompts that RL samples from: read, rendered, tokenised and filtered once, when the data set is built."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_spmd.data.batch import Batch, encode_json, ragged
from rlhf_spmd.data.encoding import EncodingConfig, PackedIds, PromptEncoder, check_ids, pack_ids
from rlhf_spmd.data.files import DataError, Row, read_rows


@dataclass(frozen=True)
class DataConfig(EncodingConfig):
    """``data``: prompts for training and validation. Lengths count tokens, batch sizes count prompts.

    ``path``, ``val_path``: file, glob pattern, directory or ``datasets`` name (with ``split``, ``subset``).
    ``seed``: of the training order; null = ``run.seed``. ``val_batch_size``: null = all rows at once. ``gen_batch_size``: prompts
    in flight; null = ``train_batch_size``: every response ends in the step that began it.
    """

    path: str = ""
    val_path: str | None = None
    split: str = "train"
    val_split: str = "test"
    subset: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 64
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    shuffle: bool = True
    seed: int | None = None
    filter_overlong_prompts: bool = True

    def check(self, where: str) -> None:
        super().check(where)
        if not self.path:
            raise ValueError(f"{where}.path must be given: a jsonl or parquet file, or the name of a data set")
        for key in (
            "max_prompt_length",
            "max_response_length",
            "train_batch_size",
            "val_batch_size",
            "train_max_samples",
            "val_max_samples",
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{where}.{key}={value} must be at least 1")
        if self.gen_batch_size is not None and self.gen_batch_size < self.train_batch_size:
            raise ValueError(
                f"{where}.gen_batch_size={self.gen_batch_size} is less than {where}.train_batch_size={self.train_batch_size}: "
                "it counts the prompts in flight, of which a step takes the second; raise the first or leave it out"
            )


class PromptDataset:
    """Prompts as token ids, and for each the row that rewards and rollout files see.

    ``batch(indices, row_ids)`` has the fields ``prompt_ids`` (Ragged int64) and ``row`` (Ragged uint8, JSON: the row's own
    columns, and always ``prompt`` (text), ``answer``, ``data_source`` and ``id``, null where the data have none).
    For messages, ``prompt`` is the rendered text and ``messages`` the list. A column ``prompt_ids`` is taken as it is where
    there is no prompt; only then may ``tokenizer`` be None.
    ``num_read`` rows were read, ``num_overlong`` of them dropped as longer than ``max_prompt_length`` tokens.
    """

    def __init__(self, rows: Sequence[Row], config: DataConfig, tokenizer: Any) -> None:
        self.num_read = len(rows)
        ids, texts = _encode(rows, config, tokenizer)
        limit = config.max_prompt_length
        fits = [i for i, tokens in enumerate(ids) if len(tokens) <= limit]
        self.num_overlong = len(rows) - len(fits)
        if self.num_overlong and not config.filter_overlong_prompts:
            first = next(i for i, tokens in enumerate(ids) if len(tokens) > limit)
            raise DataError(
                f"{rows[first].where}: the prompt has {len(ids[first])} tokens, more than data.max_prompt_length={limit}; "
                f"raise it, or set data.filter_overlong_prompts=true ({self.num_overlong} of {len(rows)} prompts are too long)"
            )
        if not fits:
            shortest = min(len(tokens) for tokens in ids)
            raise DataError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length={limit} tokens (the shortest has {shortest})"
            )
        self.ids: PackedIds = pack_ids([ids[i] for i in fits])
        self.rows = [_reward_row(rows[i], i, texts[i], config) for i in fits]
        digest = hashlib.sha256(self.ids.offsets.tobytes())
        digest.update(self.ids.values.tobytes())
        self.fingerprint = f"{len(self)}-{digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Rows by index; each row is its own group."""
        ids = torch.tensor(list(row_ids), dtype=torch.int64)
        fields = {
            "prompt_ids": ragged([torch.from_numpy(self.ids[i]) for i in indices], torch.int64),
            "row": encode_json(self.rows[i] for i in indices),
        }
        return Batch(ids, ids.clone(), fields)

    def summary(self) -> str:
        lengths = self.ids.lengths
        dropped = f", {self.num_overlong} over-long ones dropped" if self.num_overlong else ""
        return f"{len(self)} prompts of {lengths.min()} to {lengths.max()} tokens (mean {lengths.mean():.1f}){dropped}"


def load_prompts(config: DataConfig, tokenizer: Any, validation: bool = False) -> PromptDataset:
    """The training prompts, or the validation prompts of ``val_path``. Raises DataError."""
    if validation:
        assert config.val_path is not None, "load_prompts(validation=True) without data.val_path"
        rows = read_rows(config.val_path, config.val_split, config.subset, config.val_max_samples)
    else:
        rows = read_rows(config.path, config.split, config.subset, config.train_max_samples)
    return PromptDataset(rows, config, tokenizer)


def _encode(rows: Sequence[Row], config: DataConfig, tokenizer: Any) -> tuple[list[list[int]], list[str]]:
    ids: list[list[int]] = [[] for _ in rows]
    texts = ["" for _ in rows]
    texts_at: list[int] = []
    for i, row in enumerate(rows):
        if config.prompt_key not in row.values and "prompt_ids" in row.values:
            ids[i] = check_ids(row.values["prompt_ids"], None if tokenizer is None else len(tokenizer), row.where, "prompt_ids")
            texts[i] = "" if tokenizer is None else tokenizer.decode(ids[i])
        elif tokenizer is None:
            raise DataError(f"{row.where}: without a tokenizer a row must have 'prompt_ids'")
        else:
            texts_at.append(i)
    if texts_at:
        prompts = [rows[i].get(config.prompt_key, "data.prompt_key") for i in texts_at]
        encoded = PromptEncoder(tokenizer, config).encode(prompts, [rows[i].where for i in texts_at])
        for i, tokens, text in zip(texts_at, *encoded, strict=True):
            ids[i], texts[i] = tokens, text
    return ids, texts


def _reward_row(row: Row, index: int, rendered: str, config: DataConfig) -> dict[str, Any]:
    values = dict(row.values)
    prompt = values.get(config.prompt_key)
    if not isinstance(prompt, str):
        if prompt is not None:
            values["messages"] = prompt
        prompt = rendered
    own = {"answer": values.get(config.answer_key), "data_source": values.get("data_source"), "id": values.get("id", index)}
    return {**values, "prompt": prompt, **own}
