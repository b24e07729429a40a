"""Reads tokenizers and data, and checks them against models, token budget and rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rlhf_spmd.config.load import resolved_key
from rlhf_spmd.data.cached_dataset import load_dataset
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.encoding import EncodingConfig, read_template
from rlhf_spmd.data.loader import build_loader
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.data.tokenizer import decoding, load_tokenizer
from rlhf_spmd.environments.config import check_rows, tools_of
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.sampler import num_drawable_ids
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

NUM_RENDERED_ROWS = 100  # rows that are rendered by the template of a reward model before the run


# Tokenizers


def read_tokenizer(run_plan: RunPlan) -> RunPlan:
    """Return the plan with its tokenizer, the date and the tools that templates write, and the roles that read text.

    Raises ValueError, DataError.
    """
    tokenizer = load_tokenizer(run_plan.exported.directory)
    config = with_dates(run_plan.config, tokenizer)
    streams = {name: getattr(config, config.algorithm.streams[name].key) for name in run_plan.streams}
    for name, data in streams.items():
        if isinstance(data, PromptsConfig):
            streams[name] = replace(data, tools=tools_of(run_plan.environments, data.tools))
    run_plan = replace(run_plan, config=config, tokenizer=tokenizer, streams=streams)
    return replace(run_plan, roles=_with_text_readers(run_plan))


def with_dates(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainConfig:
    """Return the configuration with the date that templates write, where they ask for today's.

    A resumed run takes the date of its ``config.yaml``, so that it has the same data. A new date is UTC's, which hosts of all time
    zones share.
    """
    file = Path(config.run.dir) / CONFIG_FILE
    dated: dict[str, EncodingConfig] = {}
    for section in config.algorithm.streams.values():
        data = getattr(config, section.key)
        if isinstance(data, EncodingConfig) and data.template_date is None and data.asks_for_date(tokenizer):
            earlier = resolved_key(file, f"{section.key}.template_date") if file.is_file() else None
            dated[section.key] = replace(data, template_date=str(earlier or datetime.now(UTC).date()))
    return replace(config, **cast(dict[str, Any], dated))


def _with_text_readers(run_plan: RunPlan) -> dict[str, RolePlan]:
    """Return the roles.

    Reward models with a tokenizer of their own are marked ``reads_text``; every other model must have the exported role's
    vocabulary. Models that generate get the end tokens of their tokenizers and of the template of ``data``.

    Raises ValueError, DataError.
    """
    role_plans = dict(run_plan.roles)
    template = read_template(getattr(run_plan.config.data, "chat_template", None), "data.chat_template")
    for role, role_plan in run_plan.generating.items():
        role_plans[role] = replace(role_plan, spec=with_end_tokens(_spec(role_plan), run_plan.tokenizer, template))
    vocab_size = _spec(run_plan.exported).vocab_size
    for role, role_plan in run_plan.roles.items():
        if role_plan.spec is None:
            continue
        remedy = "all roles read the same token ids"
        if role in run_plan.rewards and role != run_plan.config.algorithm.exported:
            retokenizer = _retokenizer(run_plan, role)
            if retokenizer is not None:
                spec = with_end_tokens(role_plan.spec, retokenizer.tokenizer, retokenizer.encoder.template)
                role_plans[role] = replace(role_plan, reads_text=True, spec=spec)
                continue
            setting = f"{reward_key(role)}.retokenize={run_plan.rewards[role].retokenize}"
            remedy = f"with {setting} and the tokenizer there it reads the same token ids"
        if role_plan.spec.vocab_size != vocab_size:
            raise ValueError(
                f"models.{role}.path={role_plan.config.path!r} has a vocabulary of {role_plan.spec.vocab_size}, that of "
                f"{run_plan.config.algorithm.exported} has {vocab_size}; {remedy}"
            )
    return role_plans


def _retokenizer(run_plan: RunPlan, role: str) -> Retokenizer | None:
    role_plan = run_plan.roles[role]
    limits = _spec(role_plan).max_position_embeddings, _spec(role_plan).vocab_size
    return build_retokenizer(run_plan.rewards[role], str(role_plan.directory), run_plan.tokenizer, *limits, reward_key(role))


def _spec(role_plan: RolePlan) -> ModelSpec:
    assert role_plan.spec is not None, "a role with a model"
    return role_plan.spec


# Lengths


def check_lengths(run_plan: RunPlan) -> RunPlan:
    """Check the lengths of sampled rows against models, caches and token budget. Return ``run_plan``. Raises ValueError."""
    config = run_plan.config
    scores_by_model = any(
        role_plan.spec and issubclass(role_plan.worker, RewardWorker) and role_plan.worker.head == "value"
        for role_plan in run_plan.roles.values()
    )
    for section in config.algorithm.streams.values():
        data = getattr(config, section.key)
        if not isinstance(data, PromptsConfig):
            continue
        for name in ("val_sampling", "sampling") if isinstance(data, DatasetConfig) else ("val_sampling",):
            longest, words = _check_sampling(run_plan, name, section.key, data)
            # only a reward model cuts the rows of a validation into micro-batches
            if name == "sampling" or (getattr(data, "val_path", True) and scores_by_model):
                _check_budget(run_plan, longest, words)
    return run_plan


def _check_sampling(run_plan: RunPlan, section: str, where: str, data: PromptsConfig) -> tuple[int, str]:
    """Check the longest row that sampling by ``section`` can make against contexts and caches of the models.

    ``where``: the key of ``data``. Return the tokens of that row, and in words where they come from. Raises ValueError with both
    sides.
    """
    sampling: SamplingConfig = getattr(run_plan.config, section)
    key = f"{section if sampling.max_response_length else where}.max_response_length"
    max_response_length = sampling.max_response_length or data.max_response_length
    longest = data.max_prompt_length + max_response_length
    words = f"{where}.max_prompt_length + {key} = {longest} tokens"
    if sampling.min_response_length > max_response_length:
        raise ValueError(
            f"{section}.min_response_length={sampling.min_response_length}, {key}={max_response_length}: no response could be as "
            "long; lower the first or raise the second"
        )
    for role, role_plan in run_plan.roles.items():
        if role_plan.spec is not None and not role_plan.reads_text and longest > role_plan.spec.max_position_embeddings:
            raise ValueError(f"{words}, but models.{role} has a context of {role_plan.spec.max_position_embeddings}")
        if role_plan.generation is not None:
            role_plan.config.generation.check_row(f"models.{role}.generation", longest, words)
    return longest, words


def _check_budget(run_plan: RunPlan, length: int, words: str, noun: str = "row") -> None:
    """Raise ValueError if a micro-batch of some role cannot hold ``length`` tokens."""
    shapes = [(role, role_plan.shape) for role, role_plan in run_plan.roles.items() if role_plan.spec]
    for role, role_plan in run_plan.roles.items():
        call_shapes = [call_plan.shape for call_plan in role_plan.calls.values()]
        shapes += [(role, shape) for shape in call_shapes if not shape.generation]
    cp, role = min((shape.layout.cp, role) for role, shape in shapes)
    limits = run_plan.config.algorithm.limits
    if limits.rows is None and length > limits.max_tokens * cp:
        raise ValueError(
            f"{limits.where}={limits.max_tokens}, models.{role}.layout.cp={cp}: {words}, and a micro-batch must hold a {noun}; raise "
            "the first, or lower the lengths"
        )


# Rows


def read_data(run_plan: RunPlan) -> RunPlan:
    """Return the plan with the training and the validation data of each stream. Raises ValueError, DataError.

    A plan that has data, because its placement needed them, is returned as it is.
    """
    if run_plan.training or run_plan.validation:
        return run_plan
    training: dict[str, TokenDataset] = {}
    validation: dict[str, TokenDataset] = {}
    for name, data in run_plan.streams.items():
        if isinstance(data, DatasetConfig):
            training[name] = load_dataset(data, run_plan.tokenizer)
            build_loader(training[name], data, run_plan.config.run.seed)  # raises if there are too few rows
        if not isinstance(data, DatasetConfig) or data.val_path:
            validation[name] = load_dataset(data, run_plan.tokenizer, validation=True)
        for section, dataset in (("sampling", training.get(name)), ("val_sampling", validation.get(name))):
            if dataset is not None:
                _check_vocabulary(dataset, run_plan.exported)
            if isinstance(data, PromptsConfig) and (dataset is not None or section == "val_sampling"):
                assert dataset is None or isinstance(dataset, PromptDataset)
                _check_prompts(run_plan, section, dataset)
            elif dataset is not None:
                _check_trained_rows(run_plan, run_plan.config.algorithm.streams[name].key, dataset)
    return replace(run_plan, training=training, validation=validation)


def _check_vocabulary(data: TokenDataset, role_plan: RolePlan) -> None:
    """Raise ValueError if the data have token ids that the model does not have."""
    largest = max(int(ids.values.max()) for ids in data.columns.values())
    if largest >= _spec(role_plan).vocab_size:
        raise ValueError(
            f"the data have token id {largest}, but the model in '{role_plan.config.path}' has a vocabulary of "
            f"{_spec(role_plan).vocab_size}: its tokenizer is larger than the model"
        )


def _check_prompts(run_plan: RunPlan, section: str, data: PromptDataset | None) -> None:
    """Check sampling against vocabulary and tokenizer of the models that answer ``data``, and against its rows' own limits.

    Raises ValueError.
    """
    sampling: SamplingConfig = getattr(run_plan.config, section)
    rows_have_minimum = data is not None and "min_response_length" in data.row_fields
    if data is not None and rows_have_minimum and sampling.max_response_length:
        largest = int(cast(Tensor, data.row_fields["min_response_length"]).max())
        if largest > sampling.max_response_length:
            raise ValueError(
                f"{section}.max_response_length={sampling.max_response_length}, but a row has min_response_length={largest}"
            )
    decode = decoding(run_plan.tokenizer)
    for spec in map(_spec, run_plan.generating.values()):
        stop_criteria = build_stop_criteria(sampling, spec.eos_token_ids, decode, section)
        drawable = num_drawable_ids(spec.vocab_size, spec.eos_token_ids, decode)
        sampling.check_ids(spec.vocab_size, drawable, stop_criteria.token_ids, rows_have_minimum, section)


def _check_trained_rows(run_plan: RunPlan, key: str, dataset: TokenDataset) -> None:
    """Check rows that are trained on without generation against contexts and token budget. Raises ValueError with both sides."""
    longest = int(dataset.lengths.max())
    for role, role_plan in run_plan.roles.items():
        if role_plan.spec is not None and longest > (context := role_plan.spec.max_position_embeddings):
            raise ValueError(
                f"the longest row has {longest} tokens, more than the context of models.{role} = {context}; set "
                f"{key}.max_length={context} to drop such rows"
            )
    group_length = int(dataset.lengths.view(-1, dataset.group_size).sum(1).max())
    noun = "row" if dataset.group_size == 1 else "pair"
    _check_budget(run_plan, group_length, f"the longest {noun} of {key} has {group_length} tokens", noun)


def set_length(run_plan: RunPlan) -> RunPlan:
    """Return the plan with ``run.steps`` in place of ``data.epochs``. Raises ValueError for settings that do not fit this length."""
    if run_plan.epochs is None:
        return run_plan
    stream = next(name for name, section in run_plan.config.algorithm.streams.items() if section.key == "data")
    steps = math.ceil(run_plan.epochs * len(run_plan.training[stream]) / run_plan.config.data.train_batch_size)
    run_plan = replace(run_plan, epochs=None, config=with_steps(run_plan.config, steps))
    check_batches(run_plan.config, run_plan.roles)
    run_plan.config.algorithm.check_together(run_plan.config, run_plan.roles, run_plan.tokenizer)
    return run_plan


def with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the configuration with ``run.steps`` in place of ``data.epochs``: ``config.yaml`` could not have both."""
    return replace(config, run=replace(config.run, steps=steps), data=replace(config.data, epochs=None))


def check_rewards(run_plan: RunPlan) -> RunPlan:
    """Check that rewards, environments and templates fit the rows. Return ``run_plan``. Raises ValueError or DataError."""
    examples = list(_examples(run_plan))
    places = [place for place, _ in examples]
    rows = [row for _, row in examples]
    for name, reward in run_plan.rewards.items():
        reward.check_together(reward_key(name), run_plan.config.run.timeout_s)
        reward.check_rows(reward_key(name), rows, places)
    has_scores = [reward.function or run_plan.roles[name].spec for name, reward in run_plan.rewards.items()]
    check_rows(run_plan.environments, rows, places, has_other_reward=not has_scores or any(has_scores))
    for role, role_plan in run_plan.roles.items():
        retokenizer = _retokenizer(run_plan, role) if role_plan.reads_text else None
        if retokenizer is not None:
            for row in rows[:NUM_RENDERED_ROWS]:
                retokenizer.encode(row, "", ended=True)
    return run_plan


def _examples(run_plan: RunPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield examples of the prompts that rewards will score: the place of each, for messages, and its row."""
    for name, data in (*run_plan.training.items(), *run_plan.validation.items()):
        is_path = data is run_plan.training.get(name) or not isinstance(run_plan.streams[name], DatasetConfig)
        where = f"{run_plan.config.algorithm.streams[name].key}.{'path' if is_path else 'val_path'}"
        if isinstance(data, PromptDataset):
            for row in data.examples():
                yield f"{where}, row {row['id']!r}", row
