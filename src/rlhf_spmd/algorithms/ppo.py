"""PPO with a critic and a reference (Ziegler et al. 2019; Schulman et al. 2017): the dataflow of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.algorithms.values import ValueConfig, clipped_value, gae_advantages
from rlhf_spmd.config.constraints import NonNegativeFloat, NonNegativeInt
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers import ActorCriticWorker, ActorWorker, CriticWorker, ReferenceWorker, RewardWorker, RoleClass, joint


@dataclass(frozen=True)
class Config(PolicyConfig):
    """The names are verl's; one model for actor and critic is APP's AC-share, and ``vf_coef`` is TRL's name.

    - adv_estimator: the advantages: `gae`; without a critic `grpo`, `rloo`, `opo`, `reinforce_plus_plus`,
      `reinforce_plus_plus_baseline`: see [algorithms.md](algorithms.md#estimators)
    - critic_warmup: steps in which only the critic learns
    - share_actor_critic: actor and critic are one model with two heads and one update; there is no `models.critic` then
    - vf_coef: weight of the value loss in that update
    """

    name: str = "ppo"
    kl: KLConfig = inline(KLConfig)
    values: ValueConfig = inline(ValueConfig)
    adv_estimator: str = "gae"
    critic_warmup: NonNegativeInt = 0
    share_actor_critic: bool = False
    vf_coef: NonNegativeFloat = 0.1
    takes_agents: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"share_actor_critic": ("vf_coef",)}
    rules: ClassVar[Rules] = (
        Rule(
            ("adv_estimator",),
            lambda s: s.adv_estimator != "gae",
            "ppo has gae, and others are for algorithms without a critic",
            "use name=grpo",
        ),
        Rule(
            ("loss_mode",),
            lambda s: s.policy.loss_mode == "geo_mean",
            "the loss needs one advantage per response, and gae gives each token its own",
            "use another loss_mode",
        ),
        Rule(
            ("critic_warmup", "share_actor_critic"),
            lambda s: s.share_actor_critic and s.critic_warmup > 0,
            "there is no critic to train by itself",
            "leave critic_warmup out",
        ),
    )

    @property
    def advantages_by_token(self) -> bool:
        return True

    def training_steps(self, role: str, steps: int) -> int:
        return steps - self.critic_warmup if role == "actor" else steps

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        two_models: dict[str, RoleClass] = {"actor": ActorWorker, "critic": CriticWorker}
        roles: dict[str, RoleClass] = {"actor": ActorCriticWorker} if self.share_actor_critic else two_models
        if self.kl.uses_reference:
            roles["reference"] = ReferenceWorker
        return roles | {"reward": RewardWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one PPO step whose values are its metrics.

    The script is the same for every placement; what may run at the same time does.
    """
    # 1. the rollout, and what each model computes for it
    batch, rollout = sample(models, data, global_step)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    values = (models.actor if config.share_actor_critic else models.critic).compute_values(batch)
    batch = batch.union(scores, old, values)
    if config.kl.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))

    # 2. advantages
    inputs = ("scores", "values", "old_log_probs", *(("ref_log_prob",) if config.kl.uses_reference else ()))
    advantages = models.compute.apply(batch, gae_advantages(config), inputs, outputs=("advantages", "returns"))
    batch = batch.union(advantages).rename(values="old_values")

    # 3. updates
    policy = clipped_policy(config, data.sampling, global_step)
    value = clipped_value(config)
    calls = [rollout, *scored, old, advantages]
    if config.share_actor_critic:
        value = replace(value, temperature=policy.temperature, weight=config.vf_coef)
        return [*calls, models.actor.update(batch, joint(policy, value), **config.schedule)]
    calls.append(models.critic.update(batch, value, **config.schedule))
    if global_step > config.critic_warmup:
        calls.append(models.actor.update(batch, policy, **config.schedule))
    return calls
