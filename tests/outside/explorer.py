"""GRPO on the responses of a second policy, which is not trained; the actor's own are drawn and not used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import score
from rlhf_spmd.algorithms.grpo import Config as GRPOConfig
from rlhf_spmd.algorithms.grpo import estimated_advantages
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers import ActorWorker, RoleClass


class Explorer(ActorWorker):
    trained = False


@dataclass(frozen=True)
class Config(GRPOConfig):
    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "explorer": Explorer}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    prompts = data.prompts.next()
    mine = models.actor.generate_sequences(prompts, data.sampling, number)
    rollout = models.explorer.generate_sequences(prompts, data.sampling, number)
    batch = prompts.union(rollout)
    scores, scored = score(models, batch)
    batch = batch.union(scores, models.actor.compute_log_prob(batch))
    batch = batch.union(models.reference.compute_ref_log_prob(batch))
    advantages = models.compute.apply(
        batch, estimated_advantages(config), ("scores",), outputs=("advantages",), keep_groups=True
    )
    update = models.actor.update(batch.union(advantages), clipped_policy(config, data.sampling), **config.schedule)
    return [mine, rollout, *scored, update]
