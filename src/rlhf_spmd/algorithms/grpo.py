"""GRPO (Shao et al. 2024, arXiv 2402.03300): no critic; a response is judged against the other responses to its prompt.

The step serves all algorithms without a critic. They differ in the defaults of ``policy``, ``kl`` and ``advantage``.
Settings: AlgorithmConfig -> RolloutConfig (base.py) -> PolicyConfig (policy.py) -> Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.estimators import GroupAdvantageConfig, estimated_advantages
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers import ReferenceWorker, RoleClass


@dataclass(frozen=True)
class Config(PolicyConfig):
    name: str = "grpo"
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False, use_kl_loss=True)
    advantage: GroupAdvantageConfig = inline(GroupAdvantageConfig)
    min_samples: ClassVar[int] = 2
    takes_agents: ClassVar[bool] = True

    rules: ClassVar[Rules] = (
        Rule(
            ("adv_estimator", "name"),
            lambda s: s.min_samples < 2 and not s.advantages_by_token,
            "the algorithm compares no responses to a prompt",
            "use name=grpo",
        ),
        Rule(
            ("loss_mode", "adv_estimator"),
            lambda s: s.policy.loss_mode == "geo_mean" and s.advantages_by_token,
            "the loss needs one advantage per response, and the estimator gives each token its own",
            "change one of the two",
        ),
        Rule(
            ("loss_mode", "turn_discount"),
            lambda s: s.policy.loss_mode == "geo_mean" and s.advantage.turn_discount < 1.0,
            "the loss needs one advantage per response, and each turn has its own",
            "leave the second out",
        ),
        Rule(
            ("adv_estimator", "turn_discount"),
            lambda s: s.advantages_by_token and s.advantage.turn_discount < 1.0,
            "the estimator discounts rewards by tokens",
            "use gamma in place of the second",
        ),
    )

    @property
    def advantages_by_token(self) -> bool:
        return self.advantage.by_token

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, **({"reference": ReferenceWorker} if self.kl.uses_reference else {})}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one step whose values are its metrics."""
    batch, rollout = sample(models, data, global_step)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(scores, old)
    if config.kl.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
    estimate = estimated_advantages(config, data.sampling.n, data.prompts.rows_per_episode)
    advantages = models.compute.apply(batch, estimate, ("scores", *config.kl.inputs), outputs=("advantages",), keep_groups=True)
    batch = batch.union(advantages)
    policy = clipped_policy(config, data.sampling, global_step)
    update = models.actor.update(batch, policy, **config.schedule)
    return [rollout, *scored, old, advantages, update]
