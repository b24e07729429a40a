"""Which of an algorithm's roles score responses in a run, and with what settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.rewards.config import RewardConfig, reward_key
from rlhf_spmd.rewards.eval_metrics import repeated_means
from rlhf_spmd.training import roles
from rlhf_spmd.workers import RewardWorker, RoleClass


def rewarded_roles(
    algorithm: AlgorithmConfig, sections: Mapping[str, Any], rewards: Mapping[str, RewardConfig], given: bool
) -> dict[str, RoleClass]:
    """The algorithm's roles, without those that score responses where there are no prompts, or no reward and need of one.

    Raises ValueError.
    """
    if any(isinstance(data, PromptsConfig) for data in sections.values()) and (algorithm.needs_reward or given):
        return dict(algorithm.roles)
    if rewards:
        missing = next(iter(s.key for s in algorithm.streams.values() if issubclass(s.config, PromptsConfig)), None)
        remedy = f"give {missing}.path, or leave the reward out" if missing else "leave it out"
        raise ValueError(f"{reward_key(next(iter(rewards)))} scores responses to prompts, and there are none: {remedy}")
    exported = algorithm.exported
    return {role: kind for role, kind in algorithm.roles.items() if role == exported or not issubclass(kind, RewardWorker)}


def with_templates(
    plans: Mapping[str, roles.RolePlan], rewards: Mapping[str, RewardConfig], sections: Mapping[str, Any]
) -> dict[str, RewardConfig]:
    """The settings of every reward role. Where text prompts go to the actor through a template, they do to reward models, too."""
    found = {role: rewards.get(role, RewardConfig()) for role, plan in plans.items() if issubclass(plan.worker, RewardWorker)}
    if any(isinstance(data, PromptsConfig) and data.apply_chat_template is True for data in sections.values()):
        found = {
            role: replace(one, apply_chat_template=True) if one.apply_chat_template == "auto" and one.judge is None else one
            for role, one in found.items()
        }
    return found


def repeated_of(dataset: TokenDataset, ready: Any) -> frozenset[str]:
    """Means of data sources that a validation by ``dataset`` says already. With several rewards none: it says their sum.
    ``ready``: the checked run (``Prepared`` of the training program)."""
    added = roles.added_rewards(ready.rewards, ready.plans)
    if len(added) != 1 or not isinstance(dataset, PromptDataset):
        return frozenset()
    return repeated_means({name: ready.rewards[name] for name in added}, dataset.examples_by_path())
