"""Tokenizers and data: read, and checked against models, token budget and rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rlhf_spmd.config.load import resolved_key
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.encoding import EncodingConfig, read_template
from rlhf_spmd.data.loader import build_loader, load_dataset
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.data.tokenizer import decoding, load_tokenizer
from rlhf_spmd.environments.config import check_rows, tools_of
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import drawable_ids
from rlhf_spmd.generation.stopping import build_stop_criteria
from rlhf_spmd.models.spec import ModelSpec, with_end_tokens
from rlhf_spmd.preflight.checks import check_batches
from rlhf_spmd.rewards.config import reward_key
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers import RewardWorker
from rlhf_spmd.workers.retokenize import Retokenizer, build_retokenizer
from rlhf_spmd.workers.role_plan import RolePlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERED_ROWS = 100  # that a reward model's template must take before the run


# Tokenizers


def read_tokenizer(plan: RunPlan) -> RunPlan:
    """Return the plan with its tokenizer, the day and the tools that templates write, and the roles that read text.

    Raises ValueError, DataError.
    """
    tokenizer = load_tokenizer(plan.exported.directory)
    config = with_dates(plan.config, tokenizer)
    streams = {name: getattr(config, config.algorithm.streams[name].key) for name in plan.streams}
    for name, data in streams.items():
        if isinstance(data, PromptsConfig):
            streams[name] = replace(data, tools=tools_of(plan.environments, data.tools))
    plan = replace(plan, config=config, tokenizer=tokenizer, streams=streams)
    return replace(plan, roles=_with_text_readers(plan))


def with_dates(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainConfig:
    """Return the configuration with the day that templates write, where they ask for today's: that of the run's ``config.yaml``, so
    that a run which goes on on another day has the same data. The day is UTC's, which hosts of all time zones share.
    """
    written = Path(config.run.dir) / CONFIG_FILE
    dated: dict[str, EncodingConfig] = {}
    for section in config.algorithm.streams.values():
        data = getattr(config, section.key)
        if isinstance(data, EncodingConfig) and data.template_date is None and data.asks_for_date(tokenizer):
            before = resolved_key(written, f"{section.key}.template_date") if written.is_file() else None
            dated[section.key] = replace(data, template_date=str(before or datetime.now(UTC).date()))
    return replace(config, **cast(dict[str, Any], dated))


def _with_text_readers(plan: RunPlan) -> dict[str, RolePlan]:
    """Return the roles with the reward models marked that read text through their own tokenizers; all others must read the tokens of
    the exported role. Models that generate learn the end tokens of their tokenizers and of the template of ``data``.

    Raises ValueError, DataError.
    """
    roles, template = dict(plan.roles), read_template(getattr(plan.config.data, "chat_template", None), "data.chat_template")
    for role, placed in plan.generating.items():
        roles[role] = replace(placed, spec=with_end_tokens(_spec(placed), plan.tokenizer, template))
    vocab_size = _spec(plan.exported).vocab_size
    for role, placed in plan.roles.items():
        if placed.spec is None:
            continue
        remedy = "all roles read the same token ids"
        if role in plan.rewards and role != plan.config.algorithm.exported:
            retokenizer = _retokenizer(plan, role)
            if retokenizer is not None:
                spec = with_end_tokens(placed.spec, retokenizer.tokenizer, retokenizer.encoder.template)
                roles[role] = replace(placed, reads_text=True, spec=spec)
                continue
            setting = f"{reward_key(role)}.retokenize={plan.rewards[role].retokenize}"
            remedy = f"with {setting} and the tokenizer there it reads the same token ids"
        if placed.spec.vocab_size != vocab_size:
            raise ValueError(
                f"models.{role}.path={placed.config.path!r} has a vocabulary of {placed.spec.vocab_size}, that of "
                f"{plan.config.algorithm.exported} has {vocab_size}; {remedy}"
            )
    return roles


def _retokenizer(plan: RunPlan, role: str) -> Retokenizer | None:
    model = plan.roles[role]
    limits = _spec(model).max_position_embeddings, _spec(model).vocab_size
    return build_retokenizer(plan.rewards[role], str(model.directory), plan.tokenizer, *limits, reward_key(role))


def _spec(role: RolePlan) -> ModelSpec:
    assert role.spec is not None, "a role with a model"
    return role.spec


# Lengths


def check_lengths(plan: RunPlan) -> RunPlan:
    """Check the lengths of sampled rows against models, caches and token budget. Raises ValueError; returns ``plan``."""
    config = plan.config
    scores_by_model = any(
        issubclass(role.worker, RewardWorker) and role.worker.head == "value" and role.spec for role in plan.roles.values()
    )
    for section in config.algorithm.streams.values():
        data = getattr(config, section.key)
        if not isinstance(data, PromptsConfig):
            continue
        for name in ("val_sampling", "sampling") if isinstance(data, DatasetConfig) else ("val_sampling",):
            longest, words = _check_sampling(plan, name, section.key, data)
            # validation's rows are cut into micro-batches by a reward model only
            if name == "sampling" or (getattr(data, "val_path", True) and scores_by_model):
                _check_budget(plan, longest, words)
    return plan


def _check_sampling(plan: RunPlan, section: str, where: str, data: PromptsConfig) -> tuple[int, str]:
    """Check the longest row that the section ``section`` can make against the models' contexts and the caches of those that generate.
    ``where``: the section of ``data``.

    Returns the tokens of that row, and in words where they come from. Raises ValueError with both sides.
    """
    sampling: SamplingConfig = getattr(plan.config, section)
    key = f"{section if sampling.max_response_length else where}.max_response_length"
    max_response_length = sampling.max_response_length or data.max_response_length
    longest = data.max_prompt_length + max_response_length
    words = f"{where}.max_prompt_length + {key} = {longest} tokens"
    if sampling.min_response_length > max_response_length:
        raise ValueError(
            f"{section}.min_response_length={sampling.min_response_length}, {key}={max_response_length}: no response could be as "
            "long; lower the first or raise the second"
        )
    for role, placed in plan.roles.items():
        if placed.spec is not None and not placed.reads_text and longest > placed.spec.max_position_embeddings:
            raise ValueError(f"{words}, but models.{role} has a context of {placed.spec.max_position_embeddings}")
        if placed.generation is not None:
            placed.config.generation.check_row(f"models.{role}.generation", longest, words)
    return longest, words


def _check_budget(plan: RunPlan, length: int, words: str, noun: str = "row") -> None:
    """Raise ValueError where a micro-batch of some role cannot hold ``length`` tokens."""
    shapes = [(role, placed.shape) for role, placed in plan.roles.items() if placed.spec]
    for role, placed in plan.roles.items():
        shapes += [(role, call.shape) for call in placed.calls.values() if not call.shape.generation]
    cp, role = min((shape.layout.cp, role) for role, shape in shapes)
    budget = plan.config.algorithm.limits
    if budget.rows is None and length > budget.max_tokens * cp:
        raise ValueError(
            f"{budget.where}={budget.max_tokens}, models.{role}.layout.cp={cp}: {words}, and a micro-batch must hold a {noun}; raise "
            "the first, or lower the lengths"
        )


# Rows


def read_data(plan: RunPlan) -> RunPlan:
    """Return the plan with the training and the validation data of each stream. Raises ValueError, DataError.

    Does nothing if they are read already, as for a placement that needs the calls of a step.
    """
    if plan.training or plan.validation:
        return plan
    training: dict[str, TokenDataset] = {}
    validation: dict[str, TokenDataset] = {}
    for name, data in plan.streams.items():
        if isinstance(data, DatasetConfig):
            training[name] = load_dataset(data, plan.tokenizer)
            build_loader(training[name], data, plan.config.run.seed)  # raises if there are too few rows
        if not isinstance(data, DatasetConfig) or data.val_path:
            validation[name] = load_dataset(data, plan.tokenizer, validation=True)
        for section, dataset in (("sampling", training.get(name)), ("val_sampling", validation.get(name))):
            if dataset is not None:
                _check_vocabulary(dataset, plan.exported)
            if isinstance(data, PromptsConfig) and (dataset is not None or section == "val_sampling"):
                assert dataset is None or isinstance(dataset, PromptDataset)
                _check_prompts(plan, section, dataset)
            elif dataset is not None:
                _check_trained_rows(plan, plan.config.algorithm.streams[name].key, dataset)
    return replace(plan, training=training, validation=validation)


def _check_vocabulary(data: TokenDataset, role: RolePlan) -> None:
    """Raise ValueError if the tokenizer gave ids that the model does not have."""
    largest = max(int(ids.values.max()) for ids in data.columns.values())
    if largest >= _spec(role).vocab_size:
        raise ValueError(
            f"the data have token id {largest}, but the model in '{role.config.path}' has a vocabulary of "
            f"{_spec(role).vocab_size}: its tokenizer is larger than the model"
        )


def _check_prompts(plan: RunPlan, section: str, data: PromptDataset | None) -> None:
    """Check sampling against vocabulary and tokenizer of the models that answer ``data``, and against its rows' own limits.

    Raises ValueError.
    """
    sampling: SamplingConfig = getattr(plan.config, section)
    rows_have_minimum = data is not None and "min_response_length" in data.row_fields
    if data is not None and rows_have_minimum and sampling.max_response_length:
        largest = int(cast(Tensor, data.row_fields["min_response_length"]).max())
        if largest > sampling.max_response_length:
            raise ValueError(
                f"{section}.max_response_length={sampling.max_response_length}, but a row has min_response_length={largest}"
            )
    for role in plan.generating.values():
        spec, texts = _spec(role), decoding(plan.tokenizer)
        ends = build_stop_criteria(sampling, spec.eos_token_ids, texts, section)
        drawable = drawable_ids(spec.vocab_size, spec.eos_token_ids, texts)
        sampling.check_ids(spec.vocab_size, drawable, ends.token_ids, rows_have_minimum, section)


def _check_trained_rows(plan: RunPlan, key: str, dataset: TokenDataset) -> None:
    """Check rows that are trained on as they are against contexts and token budget. Raises ValueError with both sides."""
    longest = int(dataset.lengths.max())
    for role, placed in plan.roles.items():
        if placed.spec is not None and longest > (context := placed.spec.max_position_embeddings):
            raise ValueError(
                f"the longest row has {longest} tokens, more than the context of models.{role} = {context}; set "
                f"{key}.max_length={context} to drop such rows"
            )
    group_length = int(dataset.lengths.view(-1, dataset.group_size).sum(1).max())
    noun = "row" if dataset.group_size == 1 else "pair"
    _check_budget(plan, group_length, f"the longest {noun} of {key} has {group_length} tokens", noun)


def set_length(plan: RunPlan) -> RunPlan:
    """Return the plan with ``run.steps`` in place of ``data.epochs``. Raises ValueError for settings that do not fit this length."""
    if plan.epochs is None:
        return plan
    rows = next(len(plan.training[name]) for name, section in plan.config.algorithm.streams.items() if section.key == "data")
    steps = math.ceil(plan.epochs * rows / plan.config.data.train_batch_size)
    plan = replace(plan, epochs=None, config=with_steps(plan.config, steps))
    check_batches(plan.config, plan.roles)
    plan.config.algorithm.check_together(plan.config, plan.roles, plan.tokenizer)
    return plan


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the configuration with ``run.steps`` in place of ``data.epochs``: ``config.yaml`` could not have both."""
    return replace(config, run=replace(config.run, steps=steps), data=replace(config.data, epochs=None))


def check_rewards(plan: RunPlan) -> RunPlan:
    """Check that rewards, environments and templates fit the rows. Raises ValueError or DataError; returns ``plan``."""
    examples = list(_examples(plan))
    places, rows = [place for place, _ in examples], [row for _, row in examples]
    for name, reward in plan.rewards.items():
        reward.check_together(reward_key(name), plan.config.run.timeout_s)
        reward.check_rows(reward_key(name), rows, places)
    unscored = [name for name, reward in plan.rewards.items() if reward.function is None and plan.roles[name].spec is None]
    check_rows(plan.environments, rows, places, not plan.rewards or len(unscored) < len(plan.rewards))
    for role, placed in plan.roles.items():
        retokenizer = _retokenizer(plan, role) if placed.reads_text else None
        if retokenizer is not None:
            for row in rows[:RENDERED_ROWS]:
                retokenizer.encode(row, "", ended=True)
    return plan


def _examples(plan: RunPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield examples of the prompts that rewards will see: for each its place, for messages, and its row."""
    for name, data in (*plan.training.items(), *plan.validation.items()):
        is_path = data is plan.training.get(name) or not isinstance(plan.streams[name], DatasetConfig)
        where = f"{plan.config.algorithm.streams[name].key}.{'path' if is_path else 'val_path'}"
        if isinstance(data, PromptDataset):
            for row in data.examples():
                yield f"{where}, row {row['id']!r}", row
