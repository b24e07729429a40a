"""Stand-ins for data, tokenizers and weights, with which ``rlhf-spmd plan`` traces a step of a configuration.

A step's calls depend on the number of rows, not on their contents. So :func:`stand_in` makes rows up, :class:`CharacterTokenizer`
replaces a tokenizer, and a model can be given by its sizes or a published name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from rlhf_spmd.config.constraints import PositiveFloat, PositiveInt
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset, concat_datasets
from rlhf_spmd.data.files import Row
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.models.published import published_config
from rlhf_spmd.planner.shapes import Workload
from rlhf_spmd.workers import RoleConfig

UNLIMITED_TOKENS = 1 << 30
FIRST_LETTER = 0x4E00  # the first of twenty thousand characters, of which each prompt gets one


@dataclass(frozen=True)
class SizesConfig:
    """``models.<role>.spec``: sizes of a Llama, in place of a directory.

    - hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size: as in `config.json`
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt


@dataclass(frozen=True)
class PlannedRoleConfig(RoleConfig):
    """``models.<role>`` of a plan.

    - spec: sizes of a Llama, which go before `path`
    """

    spec: SizesConfig | None = None


@dataclass(frozen=True)
class WorkloadConfig:
    """``workload``.

    - prompt_length: tokens of a prompt, on average; null: `data.max_prompt_length`
    - response_lengths: tokens of responses at equally likely quantiles, ascending, the last one the longest; empty: all
      `data.max_response_length`
    """

    prompt_length: PositiveFloat | None = None
    response_lengths: list[PositiveFloat] = field(default_factory=list)
    rules: ClassVar[Rules] = (
        Rule(
            ("response_lengths",),
            lambda workload: workload.response_lengths != sorted(workload.response_lengths),
            "quantiles ascend",
            "sort them",
        ),
    )

    def workload(self, section: Any, rows_per_prompt: int) -> Workload:
        """Return the lengths of rows of a section of data. The number of rows is left open, as it differs between calls.

        Raises ValueError for lengths that the section does not allow.
        """
        if isinstance(section, PromptsConfig):
            check_rules(LENGTH_RULES, _RowLengths(self, section))
            prompt, longest = section.max_prompt_length, float(section.max_response_length)
        else:
            prompt = longest = section.max_length / 2
        responses = tuple(self.response_lengths) or (longest,)
        return Workload(0, float(self.prompt_length or prompt), responses, group=rows_per_prompt)


@dataclass(frozen=True)
class _RowLengths:
    """The subject of rules about the lengths of rows."""

    workload: WorkloadConfig
    data: PromptsConfig


LENGTH_RULES: Rules = (
    Rule(
        ("workload.prompt_length", "data.max_prompt_length"),
        lambda lengths: (lengths.workload.prompt_length or 0) > lengths.data.max_prompt_length,
        "no prompt is longer than the second",
        "lower the first",
    ),
    Rule(
        ("workload.response_lengths", "data.max_response_length"),
        lambda lengths: max(lengths.workload.response_lengths, default=0) > lengths.data.max_response_length,
        "no response is longer than the second",
        "lower the last of the first",
    ),
)


def typical_workload(section: Any, rows_per_prompt: int, training: Mapping[str, TokenDataset]) -> Workload:
    """Return the lengths of a run's rows: the mean length of its prompts, and the limit of its responses."""
    workload = WorkloadConfig().workload(section, rows_per_prompt)
    prompts = [data for data in training.values() if isinstance(data, PromptDataset)]
    return replace(workload, prompt=float(prompts[0].lengths.double().mean())) if prompts else workload


class CharacterTokenizer:
    """Replaces a tokenizer: one token per character."""

    eos_token_id = 0
    name_or_path = "none"
    chat_template = "{{ messages }}"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __len__(self) -> int:
        return UNLIMITED_TOKENS

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * len(text) for text in texts]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " " * len(ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], tools: Any = None, **options: Any) -> str:
        return "".join(message["content"] for message in messages)


def stand_in(section: DatasetConfig, in_flight: int = 0) -> TokenDataset:
    """Return as many rows as a step takes, at least ``in_flight``, each of a token or two, with the fields that ``section`` names."""
    keys = [key for key in vars(section) if key.endswith("_key") and getattr(section, key) is not None]

    def row(number: int) -> Row:
        typed: dict[str, Any] = {
            "label_key": number % 2 == 0,
            "safe_chosen_key": True,
            "safe_rejected_key": False,
            "margin_key": 0.0,
        }
        values = {getattr(section, key): typed.get(key, chr(ord("a") + index)) for index, key in enumerate(keys)}
        if isinstance(section, PromptsConfig):
            values = {"prompt_ids": [0]}
        else:
            values[section.prompt_key] = chr(FIRST_LETTER + number)
        return Row({**values, "id": number}, f"row {number}", number)

    batch = max(section.train_batch_size, in_flight, 2)
    plain = replace(section, apply_chat_template="auto", system_prompt=None)  # rows are no conversations
    return concat_datasets([plain.encode_chunk([row(number) for number in range(batch)], CharacterTokenizer())])


@contextmanager
def model_directories(models: Mapping[str, RoleConfig]) -> Iterator[dict[str, RoleConfig]]:
    """Yield ``models``, with a temporary directory for each model that is given by sizes or by a published name."""
    with TemporaryDirectory() as folder:
        model_configs = dict(models)
        for role, config in models.items():
            sizes = published_config(config.path) if config.path and not Path(config.path).is_dir() else None
            if isinstance(config, PlannedRoleConfig) and config.spec is not None:
                sizes = {"model_type": "llama", "max_position_embeddings": UNLIMITED_TOKENS, **vars(config.spec)}
                config = replace(config, spec=None)
            if sizes is not None:
                path = Path(folder) / role
                path.mkdir()
                (path / "config.json").write_text(json.dumps(sizes))
                model_configs[role] = replace(config, path=str(path), random_init=True)
        yield model_configs
