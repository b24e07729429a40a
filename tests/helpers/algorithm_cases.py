"""Every algorithm as a case: its configuration on the small task (``tasks``), and what is compared of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tasks
from overrides import micro_batches
from places import ROOT

CONFIGS = ROOT / "configs"


@dataclass(frozen=True)
class Case:
    """``config``: a file in configs/. ``roles``: those with a model, which are small ones here; ``frozen`` are not trained.
    ``more``: overrides. ``cut``: those that cut its rows into several micro-batches.
    ``steps``: two of those that draw responses, so that the second draws with weights that the first has changed."""

    config: str
    roles: tuple[str, ...] = ("actor",)
    frozen: tuple[str, ...] = ("reference",)
    more: tuple[str, ...] = ()
    cut: tuple[str, ...] = micro_batches(rows=4)
    steps: int = 2

    @property
    def file(self) -> str:
        return str(CONFIGS / f"{self.config}.yaml")

    def overrides(self) -> list[str]:
        root = tasks.task()
        models = [
            f"models.{role}.path={root / ('actor' if role == 'actor' else 'reference')}" for role in (*self.roles, *self.frozen)
        ]
        models += [f"models.{role}.dtype=float64" for role in (*self.roles, *self.frozen)]
        # Adam does not magnify what rounds off at 0
        trained = [f"models.{role}.optim.{key}" for role in self.roles for key in ("lr=1e-3", "eps=1e-3")]
        return [*models, *trained, "run.test_freq=0", "run.save_freq=0", *self.more]

    def train(self, run_dir: Path, *more: str, ranks: int = 1, steps: int | None = None) -> tasks.Run:
        return tasks.train(ranks, run_dir, steps or self.steps, *self.overrides(), *more, config=self.file)


def assert_same_run(one: tasks.Run, other: tasks.Run, metrics: float = 1e-10, weights: float = 1e-9) -> None:
    """The same responses; metrics and weights within bounds of relative differences, which are those of fp64: sums in another order
    round differently, 1e-16 of a number, magnified by a loss of digits in differences."""
    assert other.responses == one.responses
    difference, metric = tasks.worst_metric(one, other, floor=1e-2)
    distance, tensor = tasks.worst_tensor(one, other)
    print(f"metrics {difference:.1e} ({metric}), weights {distance:.1e} ({tensor})")
    assert difference < metrics, metric
    assert distance < weights, tensor


ROLLOUTS = (
    f"data.path={tasks.task() / 'train.jsonl'}",
    "data.val_path=null",
    "data.max_prompt_length=12",
    f"data.max_response_length={tasks.MAX_RESPONSE}",
    f"data.train_batch_size={tasks.PROMPTS}",
    "sampling.n=4",
    "run.log_samples=32",
    "algorithm.ppo_mini_batch_size=4",
    "reward.function=tasks:even_share",
)

CORRECTED = tuple(
    f"algorithm.rollout_correction.{key}"
    for key in (
        *("rollout_is=sequence", "rollout_is_threshold=1.1", "rollout_rs=token_k1", "rollout_rs_threshold=1.5"),
        "rollout_token_veto_threshold=0.5",
    )
)

NORMALISED = (
    *("algorithm.norm_reward=mean_std", "algorithm.norm_value=true", "algorithm.kl_ctrl.kl_coef=0.05"),
    *("algorithm.entropy_coeff=0.02", "algorithm.entropy_coeff_end=0", "algorithm.entropy_coeff_steps=3"),
)

PAIRS = (
    f"data.path={tasks.pairs()}",
    f"data.val_path={tasks.pairs('pairs_val', 7)}",
    "data.train_batch_size=8",
    "run.test_freq=2",
)


def of_pairs(name: str, roles: tuple[str, ...] = ("actor",), frozen: tuple[str, ...] = ()) -> Case:
    """20 pairs in batches of 8 pairs: the third step has rows of the second epoch."""
    return Case(f"quickstart_{name}", roles, frozen, PAIRS, cut=("algorithm.max_token_len_per_gpu=80",), steps=3)


CASES: dict[str, Case] = {
    "ppo": Case("quickstart_ppo", ("actor", "critic"), more=(*ROLLOUTS, *NORMALISED)),
    "ppo, one model": Case("quickstart_ppo_shared", more=(*ROLLOUTS, "algorithm.kl_ctrl.kl_coef=0.05")),
    "grpo": Case("quickstart_grpo", more=(*ROLLOUTS, "algorithm.ppo_epochs=2", "algorithm.kl_loss_coef=0.05")),
    "grpo with adapters": Case(
        "quickstart_grpo",
        frozen=(),
        more=(*ROLLOUTS, "algorithm.ppo_epochs=2", "algorithm.kl_loss_coef=0.05", "models.actor.lora={rank: 4, alpha: 8}"),
    ),
    "dr_grpo": Case("quickstart_dr_grpo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2")),
    "rloo": Case("quickstart_rloo", more=(*ROLLOUTS, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")),
    "reinforce_plus_plus": Case("quickstart_reinforce_plus_plus", more=(*ROLLOUTS, "algorithm.gamma=0.97")),
    "reinforce_plus_plus_baseline": Case("quickstart_reinforce_plus_plus_baseline", more=ROLLOUTS),
    "gspo": Case("quickstart_gspo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2", "algorithm.clip_ratio_high=0.001")),
    "cispo": Case("quickstart_cispo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2", *CORRECTED)),
    "remax": Case("quickstart_remax", more=(*ROLLOUTS, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05")),
    "dapo": Case("quickstart_dapo", frozen=(), more=(*ROLLOUTS, "reward.function=tasks:coarse_share")),
    "distill": Case("quickstart_distill", frozen=("teacher",), more=(*ROLLOUTS, "algorithm.gamma=0.5")),
    "reward_model": of_pairs("reward_model", roles=("reward",)),
    "cost_model": of_pairs("cost_model", roles=("cost",)),
    "dpo": of_pairs("dpo", frozen=("reference",)),
    "kto": of_pairs("kto", frozen=("reference",)),
    "orpo": of_pairs("orpo"),
    "simpo": of_pairs("simpo"),
    "online_dpo": Case("quickstart_online_dpo", more=ROLLOUTS),
    "safe_rlhf": Case(
        "quickstart_safe_rlhf",
        roles=("actor", "critic", "cost_critic"),
        more=(
            *ROLLOUTS,
            f"ptx.path={tasks.pairs()}",
            "ptx.response_key=chosen",
            "ptx.train_batch_size=8",
            f"rewards.cost.model={tasks.task() / 'critic'}",
            "models.cost.dtype=float64",
            "algorithm.threshold=0.1",
            "algorithm.lambda_lr=1.0",
        ),
    ),
}
