"""On-policy distillation: the student answers, and learns by a divergence from a teacher on its own tokens.

MiniLLM (Gu et al. 2023, arXiv 2306.08543) takes the gradient of KL(student || teacher) of whole responses by REINFORCE, which is
``gamma`` 1. GKD (Agarwal et al. 2023, arXiv 2306.13649) takes each token's divergence by itself, which is 0; its generalised
Jensen-Shannon divergence is ``beta``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.config.constraints import Fraction, PositiveFloat
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.objectives.advantages import gae
from rlhf_spmd.objectives.kl import token_divergence
from rlhf_spmd.workers import ActorWorker, Computed, Function, GlobalReduce, ReferenceWorker, RewardWorker, RoleClass, Rows


@dataclass(frozen=True)
class Config(PolicyConfig):
    """A reward is for metrics and validation only, and may be left out.

    - gamma: weight of a token's divergence from the teacher in the advantage of the token before it
    - beta: the divergence: 1 is the reverse KL(student || teacher), 0 the forward KL(teacher || student), between them GKD's
      generalised JSD, with this share of the teacher in the mixture; TRL's name and meaning
    - teacher_temperature: the teacher's distribution is at this temperature, the student's at `sampling.temperature`; null: at the same
    """

    name: str = "distill"
    gamma: Fraction = 0.0
    beta: Fraction = 1.0
    teacher_temperature: PositiveFloat | None = None
    needs_reward: ClassVar[bool] = False

    rules: ClassVar[Rules] = (
        Rule(("use_kl_loss",), lambda s: s.kl.use_kl_loss, "distill's KL is that to the teacher", "leave use_kl_loss out"),
    )

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        super().check_together(config, plans, tokenizer)
        settings = config.models.get("teacher")
        if settings is None or settings.path is None:
            raise ValueError("models.teacher.path must be given: a Hugging Face model directory, with the student's tokenizer")
        if settings.random_init:
            raise ValueError("models.teacher.random_init=true: there is nothing to learn from such a teacher; leave it out")
        teacher = load_tokenizer(plans["teacher"].config.path, required=False)
        if teacher is not None and teacher.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"models.teacher.path={settings.path!r}: its tokenizer has another vocabulary than that of models.actor; a teacher "
                "must read the student's tokens"
            )
        if config.run.test_freq and not any(issubclass(plan.worker, RewardWorker) for plan in plans.values()):
            raise ValueError(
                f"run.test_freq={config.run.test_freq} validates by a reward; give reward.function, or set it to 0"
            )

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {"actor": ActorWorker, "teacher": ReferenceWorker, "reward": RewardWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one step whose values are its metrics."""
    batch, rollout = sample(models, data, global_step)
    scored = score(models, batch)[1] if models.rewards else []
    old = models.actor.compute_log_prob(batch)
    teacher = models.teacher.compute_ref_log_prob(batch, config.teacher_temperature).rename(ref_log_prob="teacher_log_probs")
    batch = batch.union(old, teacher)
    reads = ("old_log_probs", "teacher_log_probs")
    advantages = models.compute.apply(batch, distillation_advantages(config), reads, outputs=("advantages",))
    policy = clipped_policy(config, data.sampling, global_step)
    update = models.actor.update(batch.union(advantages), policy, **config.schedule)
    return [rollout, *scored, old, advantages, update]


def distillation_advantages(config: Config) -> Function:
    """Return a function that computes a token's advantage: its own pull towards the teacher, minus the sum over the later tokens of its
    response of gamma^distance * their divergence. In expectation over the student's tokens its gradient is that of the divergence, for
    ``gamma`` 1 of whole responses.
    """

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        kl = fields["old_log_probs"].double() - fields["teacher_log_probs"].double()
        divergence, pull = token_divergence(kl, config.beta)
        sums, _ = gae(-divergence, torch.zeros_like(kl), rows.lengths, config.gamma, 1.0)
        parts = reduce.sums(
            kl=kl.sum(), divergence=divergence.sum(), tokens=kl.new_tensor(len(kl)), rows=kl.new_tensor(len(rows))
        )
        kl_sum, divergence_sum, tokens, num_rows = (float(part) for part in parts.values())
        report = {"actor/reverse_kl": kl_sum / tokens, "actor/reverse_kl_per_row": kl_sum / num_rows}
        report |= {"actor/divergence": divergence_sum / tokens} if config.beta < 1 else {}
        return {"advantages": rows.per_token(sums + (divergence + pull))}, report

    return compute_advantage
