"""InstructGPT's PPO-ptx (Ouyang et al. 2022) without a critic: the policy's loss and the likelihood of given text in one step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlhf_spmd.algorithms.base import AlgorithmConfig, StreamSpec, sample, score
from rlhf_spmd.algorithms.grpo import Config as GRPOConfig
from rlhf_spmd.algorithms.grpo import estimated_advantages
from rlhf_spmd.algorithms.kl import KLConfig
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.algorithms.sft import likelihood
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.sft import SftConfig


@dataclass(frozen=True)
class Config(GRPOConfig):
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False, use_kl_loss=False)
    ptx_coeff: float = 0.5
    streams: ClassVar[Mapping[str, StreamSpec]] = {**AlgorithmConfig.streams, "text": StreamSpec("pretraining", SftConfig)}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(scores, old)
    advantages = models.compute.apply(
        batch, estimated_advantages(config), ("scores",), outputs=("advantages",), keep_groups=True
    )
    objectives = [clipped_policy(config, data.sampling), replace(likelihood("token-mean"), weight=config.ptx_coeff)]
    update = models.actor.update([batch.union(advantages), data.text.next()], objectives, **config.schedule)
    return [rollout, *scored, old, advantages, update]
