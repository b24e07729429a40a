"""Checks of data against models, token budget and rewards. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.config.load import resolved_key
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.data.tokenizer import decoding
from rlhf_spmd.environments.config import EnvironmentConfig, tools_of
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import drawable_ids
from rlhf_spmd.generation.stopping import build_stop_criteria
from rlhf_spmd.preflight.roles import RolePlan, generating
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE
from rlhf_spmd.workers import RewardWorker


def with_tools(sections: Mapping[str, Any], environments: Mapping[str, EnvironmentConfig]) -> dict[str, Any]:
    """Return the sections of data, with the environments' tools in those whose prompts present tools."""
    return {
        name: replace(data, tools=tools_of(environments, data.tools)) if isinstance(data, PromptsConfig) else data
        for name, data in sections.items()
    }


def with_dates(config: Any, tokenizer: Any) -> Any:
    """Return the configuration with the day that templates write, where they ask for today's: that of the run's ``config.yaml``, so
    that a run which goes on on another day has the same data. The day is UTC's, which hosts of all time zones share.
    """
    written = Path(config.run.dir) / CONFIG_FILE
    dated = {}
    for section in config.algorithm.streams.values():
        data = getattr(config, section.key)
        if isinstance(data, EncodingConfig) and data.template_date is None and data.asks_for_date(tokenizer):
            before = resolved_key(written, f"{section.key}.template_date") if written.is_file() else None
            dated[section.key] = replace(data, template_date=str(before or datetime.now(UTC).date()))
    return replace(config, **dated)


def scored_rows(
    algorithm: AlgorithmConfig,
    sections: Mapping[str, Any],
    training: Mapping[str, TokenDataset],
    validation: Mapping[str, TokenDataset],
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return examples of the prompts that rewards will see: for each its place, for messages, and its row."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, data in (*training.items(), *validation.items()):
        trains = data is training.get(name) or not isinstance(sections[name], DatasetConfig)
        where = f"{algorithm.streams[name].key}.{'path' if trains else 'val_path'}"
        if isinstance(data, PromptDataset):
            found += [(f"{where}, row {row['id']!r}", row) for row in data.examples()]
    return [place for place, _ in found], [row for _, row in found]


def check_vocabulary(data: TokenDataset, plan: RolePlan) -> None:
    """Raises ValueError if the tokenizer gave ids that the model does not have."""
    spec = plan.spec
    assert spec is not None
    largest = max(int(ids.values.max()) for ids in data.columns.values())
    if largest >= spec.vocab_size:
        raise ValueError(
            f"the data have token id {largest}, but the model in '{plan.config.path}' has a vocabulary of "
            f"{spec.vocab_size}: its tokenizer is larger than the model"
        )


def check_sampling(
    section: str, sampling: SamplingConfig, where: str, data: PromptsConfig, plans: Mapping[str, RolePlan]
) -> tuple[int, str]:
    """Check the section ``section`` against the models' contexts and the cache of those that generate. ``where``: the section
    of ``data``.

    Returns the tokens of the longest row, and in words where they come from. Raises ValueError with both sides.
    """
    key = f"{section if sampling.max_response_length else where}.max_response_length"
    longest = data.max_prompt_length + (sampling.max_response_length or data.max_response_length)
    lengths = f"{where}.max_prompt_length + {key} = {longest} tokens"
    if sampling.min_response_length > longest - data.max_prompt_length:
        raise ValueError(
            f"{section}.min_response_length={sampling.min_response_length} must be at most {key}={longest - data.max_prompt_length}"
        )
    for role, plan in plans.items():
        if plan.spec is not None and not plan.reads_text and longest > plan.spec.max_position_embeddings:
            raise ValueError(f"{lengths}, but models.{role} has a context of {plan.spec.max_position_embeddings}")
    for role, plan in generating(plans).items():
        plan.config.generation.check_row(f"models.{role}.generation", longest, lengths)
    return longest, lengths


def check_prompts(
    section: str, sampling: SamplingConfig, data: PromptDataset | None, tokenizer: Any, plans: Mapping[str, RolePlan]
) -> None:
    """Check the section ``section`` against vocabulary and tokenizer of the models that answer ``data``, and against its rows'
    own limits.

    Raises ValueError.
    """
    own_minimum = data is not None and "min_response_length" in data.row_fields
    if data is not None and own_minimum and sampling.max_response_length:
        least = int(cast(Tensor, data.row_fields["min_response_length"]).max())
        if least > sampling.max_response_length:
            raise ValueError(
                f"{section}.max_response_length={sampling.max_response_length}, but a row has min_response_length={least}"
            )
    for plan in generating(plans).values():
        assert plan.spec is not None, "a role that generates has a model"
        ends = build_stop_criteria(sampling, plan.spec.eos_token_ids, decoding(tokenizer), section)
        drawable = drawable_ids(plan.spec.vocab_size, plan.spec.eos_token_ids, decoding(tokenizer))
        sampling.check_ids(plan.spec.vocab_size, drawable, ends.token_ids, own_minimum, section)


def check_lengths(config: Any, algorithm: AlgorithmConfig, plans: Mapping[str, RolePlan]) -> None:
    """Check the lengths of sampled rows against the models and the token budget. Raises ValueError with both sides."""
    by_model = any(
        issubclass(plan.worker, RewardWorker) and plan.worker.head == "value" and plan.spec for plan in plans.values()
    )
    for section in algorithm.streams.values():
        data = getattr(config, section.key)
        if not isinstance(data, PromptsConfig):
            continue
        for name in ("val_sampling", "sampling") if isinstance(data, DatasetConfig) else ("val_sampling",):
            longest, lengths = check_sampling(name, getattr(config, name), section.key, data, plans)
            # validation's rows are cut into micro-batches by a reward model only
            if name == "sampling" or (getattr(data, "val_path", True) and by_model):
                _check_budget(algorithm, plans, longest, f"{lengths}, more than")


def check_rows(
    key: str, data: DatasetConfig, dataset: TokenDataset, algorithm: AlgorithmConfig, plans: Mapping[str, RolePlan]
) -> None:
    """Check rows that are trained on as they are against contexts and token budget. Raises ValueError with both sides."""
    longest = int(dataset.lengths.max())
    for role, plan in plans.items():
        if plan.spec is not None and longest > plan.spec.max_position_embeddings:
            raise ValueError(
                f"the longest row has {longest} tokens, more than the context of models.{role} = {plan.spec.max_position_embeddings}; "
                f"set {key}.max_length={plan.spec.max_position_embeddings} to drop such rows"
            )
    together = int(dataset.lengths.view(-1, dataset.group_size).sum(1).max())
    what = "row" if dataset.group_size == 1 else "pair"
    _check_budget(algorithm, plans, together, f"the longest {what} of {key} has {together} tokens, more than", what)


def _check_budget(
    algorithm: AlgorithmConfig, plans: Mapping[str, RolePlan], longest: int, words: str, what: str = "row"
) -> None:
    """Raises ValueError where a micro-batch of some role cannot hold ``longest`` tokens."""
    budget = algorithm.limits
    cutting = [(role, plan.shape) for role, plan in plans.items() if plan.spec]
    cutting += [(role, call.shape) for role, plan in plans.items() for call in plan.calls.values() if not call.shape.generation]
    cp, role = min((shape.layout.cp, role) for role, shape in cutting)
    if budget.rows is None and longest > budget.max_tokens * cp:
        shared = f" * models.{role}.layout.cp={cp}" if cp > 1 else ""
        raise ValueError(
            f"{words} {budget.where}={budget.max_tokens}{shared}: a micro-batch must hold a {what}; raise it, or lower the lengths"
        )
