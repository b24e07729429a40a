"""What breaks each rule of ``algorithms``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from flat_config import flat_config
from rlhf_spmd.algorithms import dapo, distill, dpo, grpo, ppo, reinforce_plus_plus, remax, safe_rlhf
from rlhf_spmd.algorithms.base import MOVING_REFERENCE_RULES, MovingReferenceConfig, MovingReferenceSettings
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.rules import check_rules

GEO_MEAN = {"loss_mode": "geo_mean", "loss_agg_mode": "seq-mean-token-mean"}


def configured(algorithm: Any, **settings: Any) -> None:
    check_tree(flat_config(algorithm.Config, **settings), "algorithm")


def followed(ranks: tuple[int, int] = (0, 0), steps: int = 8, dtype: torch.dtype = torch.float32, is_same: bool = True) -> None:
    """Check a reference that follows every 4 steps. ``ranks``: of the adapters of actor and reference."""
    models = {
        role: SimpleNamespace(path=role, dtype="auto", lora=SimpleNamespace(rank=rank))
        for role, rank in zip(("actor", "reference"), ranks, strict=True)
    }
    moving = MovingReferenceConfig(sync_ref_model=True, ref_model_sync_steps=4)
    check_rules(MOVING_REFERENCE_RULES, MovingReferenceSettings(moving, models, SimpleNamespace(steps=steps), dtype, is_same))


CASES = [
    (
        lambda: followed(ranks=(4, 0)),
        "models.actor.lora.rank=4, algorithm.sync_ref_model=true: a reference cannot follow adapters; leave one of the two out",
    ),
    (
        lambda: followed(ranks=(0, 4)),
        "models.reference.lora.rank=4, algorithm.sync_ref_model=true: a reference cannot follow adapters; leave one of the two "
        "out",
    ),
    (
        lambda: followed(is_same=False),
        "models.reference.path=reference, models.actor.path=actor, algorithm.sync_ref_model=true: a reference that follows has "
        "the actor's architecture; leave models.reference.path out",
    ),
    (
        lambda: followed(dtype=torch.bfloat16),
        "algorithm.ref_model_mixup_alpha=0.6, models.reference.dtype=auto: in torch.bfloat16 the reference would round its "
        "small steps away and stay where it is; set models.reference.dtype=float32, or ref_model_mixup_alpha=1",
    ),
    (
        lambda: followed(steps=3),
        "algorithm.ref_model_sync_steps=4, run.steps=3: the reference would never follow; lower ref_model_sync_steps, or leave "
        "sync_ref_model out",
    ),
    (
        lambda: configured(grpo, use_kl_loss=False, sync_ref_model=True),
        "algorithm.sync_ref_model=true, algorithm.name=grpo: the algorithm has no reference with these settings; leave "
        "sync_ref_model out",
    ),
    (
        lambda: configured(grpo, use_dynamic_bsz=False),
        "algorithm.use_dynamic_bsz=false, algorithm.ppo_micro_batch_size_per_gpu=null: a micro-batch by rows needs their "
        "number; set ppo_micro_batch_size_per_gpu",
    ),
    (
        lambda: configured(grpo, entropy_coeff_end=0.0),
        "algorithm.entropy_coeff_end=0.0, algorithm.entropy_coeff_steps=null: a schedule has an end and a number of steps; give"
        " both, or leave both out",
    ),
    (
        lambda: configured(grpo, loss_mode="gspo"),
        "algorithm.loss_agg_mode=token-mean, algorithm.loss_mode=gspo: the loss is one of whole responses; set "
        "loss_agg_mode=seq-mean-token-mean",
    ),
    (
        lambda: configured(grpo, clip_ratio=0.1, clip_ratio_low=0.2, clip_ratio_high=0.3),
        "algorithm.clip_ratio=0.1, algorithm.clip_ratio_low=0.2, algorithm.clip_ratio_high=0.3: beside both bounds clip_ratio "
        "does nothing; leave clip_ratio out",
    ),
    (
        lambda: configured(grpo, **GEO_MEAN, rollout_correction={"rollout_is": "token"}),
        "algorithm.rollout_correction.rollout_is=token, algorithm.rollout_correction.rollout_rs=null, "
        "algorithm.loss_mode=geo_mean: the loss has one ratio per response; correct by sequence, or reject by seq_*",
    ),
    (
        lambda: configured(reinforce_plus_plus, adv_estimator="rloo"),
        "algorithm.adv_estimator=rloo, algorithm.name=reinforce_plus_plus: the algorithm compares no responses to a prompt; use"
        " name=grpo",
    ),
    (
        lambda: configured(grpo, **GEO_MEAN, adv_estimator="reinforce_plus_plus"),
        "algorithm.loss_mode=geo_mean, algorithm.adv_estimator=reinforce_plus_plus: the loss needs one advantage per response, "
        "and the estimator gives each token its own; change one of the two",
    ),
    (
        lambda: configured(grpo, **GEO_MEAN, turn_discount=0.9),
        "algorithm.loss_mode=geo_mean, algorithm.turn_discount=0.9: the loss needs one advantage per response, and each turn has its "
        "own; leave the second out",
    ),
    (
        lambda: configured(reinforce_plus_plus, turn_discount=0.9),
        "algorithm.adv_estimator=reinforce_plus_plus, algorithm.turn_discount=0.9: the estimator discounts rewards by tokens; use "
        "gamma in place of the second",
    ),
    (
        lambda: configured(ppo, adv_estimator="grpo"),
        "algorithm.adv_estimator=grpo: ppo has gae, and others are for algorithms without a critic; use name=grpo",
    ),
    (
        lambda: configured(ppo, **GEO_MEAN),
        "algorithm.loss_mode=geo_mean: the loss needs one advantage per response, and gae gives each token its own; use another"
        " loss_mode",
    ),
    (
        lambda: configured(ppo, share_actor_critic=True, critic_warmup=2),
        "algorithm.critic_warmup=2, algorithm.share_actor_critic=true: there is no critic to train by itself; leave "
        "critic_warmup out",
    ),
    (
        lambda: configured(safe_rlhf, lambda_init=9.0),
        "algorithm.lambda_init=9.0, algorithm.lambda_max=5.0: the multiplier starts within its bound; lower lambda_init",
    ),
    (
        lambda: configured(safe_rlhf, norm_value=True),
        "algorithm.share_actor_critic=false, algorithm.norm_reward=none, algorithm.norm_value=true: safe_rlhf has two critics, "
        "whose values and scores are as they come; leave these out",
    ),
    (
        lambda: configured(safe_rlhf, use_kl_in_reward=False, kl_ctrl={"kl_coef": 0.001}),
        "algorithm.use_kl_in_reward=false, algorithm.kl_ctrl.type=fixed: safe_rlhf has the KL in the rewards, with a fixed "
        "coefficient; leave these out; use_kl_loss may be added",
    ),
    (
        lambda: configured(dapo, use_kl_loss=True),
        "algorithm.use_kl_loss=true: dapo has no reference; use name=grpo, or leave use_kl_loss out",
    ),
    (
        lambda: configured(remax, **GEO_MEAN, use_kl_in_reward=True),
        "algorithm.loss_mode=geo_mean, algorithm.use_kl_in_reward=true: the loss needs one advantage per response, and the KL "
        "in the reward gives each token its own; leave use_kl_in_reward out and use use_kl_loss",
    ),
    (
        lambda: configured(distill, use_kl_loss=True),
        "algorithm.use_kl_loss=true: distill's KL is that to the teacher; leave use_kl_loss out",
    ),
    (
        lambda: configured(dpo, loss_type="robust"),
        "algorithm.loss_type=robust, algorithm.label_smoothing=0.0: the loss corrects for the share of wrong pairs; set "
        "label_smoothing to that share",
    ),
]
