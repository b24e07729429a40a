"""Every algorithm, from its file in configs/, is the same run on one rank and in other layouts: responses, metrics, weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

import tasks
from ranks import run_ranks
from test_ppo_layouts import layout, micro_batches

STEPS = 3
CONFIGS = tasks.ROOT / "configs"


@dataclass(frozen=True)
class Case:
    """``config``: a file in configs/. ``roles``: those with a model, which are small ones here; ``frozen`` are not trained.
    ``more``: overrides. ``split``: those of the run on two pools. ``cut``: those that cut its rows into several micro-batches."""

    config: str
    roles: tuple[str, ...] = ("actor",)
    frozen: tuple[str, ...] = ("reference",)
    more: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    cut: tuple[str, ...] = micro_batches(rows=4)

    def overrides(self) -> list[str]:
        root = tasks.task()
        models = [
            f"models.{role}.path={root / ('actor' if role == 'actor' else 'reference')}" for role in (*self.roles, *self.frozen)
        ]
        models += [f"models.{role}.dtype=float64" for role in (*self.roles, *self.frozen)]
        # Adam does not magnify what rounds off at 0
        trained = [f"models.{role}.optim.{key}" for role in self.roles for key in ("lr=1e-3", "eps=1e-3")]
        return [*models, *trained, "run.test_freq=0", "run.save_freq=0", *self.more]


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
    for key in ("rollout_is=sequence", "rollout_is_threshold=1.1", "rollout_rs=token_k1", "rollout_rs_threshold=1.5")
)
GMPO = ("algorithm.loss_mode=geo_mean", "algorithm.loss_agg_mode=seq-mean-token-mean", "algorithm.ppo_epochs=2")
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


def of_pairs(name: str, *more: str, roles: tuple[str, ...] = ("actor",), frozen: tuple[str, ...] = ()) -> Case:
    """20 pairs in batches of 8 pairs: the third step has rows of the second epoch."""
    return Case(f"quickstart_{name}", roles, frozen, (*PAIRS, *more), cut=("algorithm.max_token_len_per_gpu=80",))


CASES: dict[str, Case] = {
    "ppo, one model": Case("quickstart_ppo_shared", more=(*ROLLOUTS, "algorithm.kl_ctrl.kl_coef=0.05")),
    "grpo": Case("quickstart_grpo", more=(*ROLLOUTS, "algorithm.ppo_epochs=2", "algorithm.kl_loss_coef=0.05")),
    "dr_grpo": Case("quickstart_dr_grpo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2")),
    "rloo": Case("quickstart_rloo", more=(*ROLLOUTS, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")),
    "reinforce_plus_plus": Case("quickstart_reinforce_plus_plus", more=(*ROLLOUTS, "algorithm.gamma=0.97")),
    "reinforce_plus_plus_baseline": Case("quickstart_reinforce_plus_plus_baseline", more=ROLLOUTS),
    "gspo": Case("quickstart_gspo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2", "algorithm.clip_ratio_high=0.001")),
    "cispo": Case("quickstart_cispo", frozen=(), more=(*ROLLOUTS, "algorithm.ppo_epochs=2", *CORRECTED)),
    "sapo with opo": Case("quickstart_grpo", more=(*ROLLOUTS, "algorithm.adv_estimator=opo", "algorithm.loss_mode=sapo")),
    "gmpo": Case("quickstart_dr_grpo", frozen=(), more=(*ROLLOUTS, *GMPO)),
    "ppo": Case("quickstart_ppo", ("actor", "critic"), more=(*ROLLOUTS, *NORMALISED)),
    "grpo, a reference that follows": Case(
        "quickstart_grpo",
        more=(*ROLLOUTS, "algorithm.kl_loss_coef=0.5", "algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=1"),
        split=(
            "placement.pools={a: [0, 1], b: [2, 3]}",
            *(f"models.{key}" for key in ("actor.pool=a", "actor.layout.dp=1", "actor.layout.zero=0", "reward.pool=b")),
            *("models.reference.pool=b", "models.reference.layout={dp: 2, zero: 3}"),
        ),
    ),
    "remax": Case("quickstart_remax", more=(*ROLLOUTS, "algorithm.use_kl_loss=true")),
    "dapo": Case("quickstart_dapo", frozen=(), more=(*ROLLOUTS, "reward.function=tasks:coarse_share")),
    "distill": Case("quickstart_distill", frozen=("teacher",), more=(*ROLLOUTS, "algorithm.gamma=0.5")),
    "reward_model": of_pairs("reward_model", roles=("reward",)),
    "cost_model": of_pairs("cost_model", roles=("cost",)),
    "dpo": of_pairs("dpo", frozen=("reference",)),
    "dpo, robust, by token": of_pairs(
        "dpo",
        *(f"algorithm.{key}" for key in ("loss_type=robust", "label_smoothing=0.1", "length_normalized=true")),
        frozen=("reference",),
    ),
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
LAYOUTS = ("tp2 dp2 -> tp1", "pp2 dp2")


@functools.cache
def run(directory: Path, name: str, where: str) -> tasks.Run:
    case = CASES[name]
    placed: tuple[str, ...] = ()
    if where == LAYOUTS[0]:
        placed = tuple(key for role in case.roles for key in layout(role, tp=2, dp=2))
    elif where == LAYOUTS[1]:
        placed = (
            *(key for role in case.roles for key in layout(role, pp=2, dp=2, zero=1)),
            *case.cut,
            *case.split,
        )
    run_dir = directory / f"{name.replace(' ', '_')}_{LAYOUTS.index(where) if where else 'one_rank'}"
    overrides = tasks.settings(run_dir, STEPS, *case.overrides(), *placed)
    run_ranks(4 if where else 1, tasks.train_here, str(CONFIGS / f"{case.config}.yaml"), overrides)
    return tasks.read_run(run_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_run(directory: Path, name: str, where: str) -> None:
    """fp64. Sums in another order round differently: 1e-16 of a number, magnified by a loss of digits in differences."""
    one, other = run(directory, name, ""), run(directory, name, where)
    assert sum(row["step"] > 0 for row in one.metrics) == STEPS and other.responses == one.responses
    difference, what = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}, {where}: metrics {difference:.1e} ({what}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, what
    assert weights < 1e-9, tensor


@pytest.mark.parametrize("name", CASES)
def test_it_learns_something(directory: Path, name: str) -> None:
    """The exported role has moved in every step, so that the comparison above compares more than a start."""
    norms = [row[key] for row in run(directory, name, "").metrics for key in row if key.endswith("/grad_norm")]
    assert len(norms) >= STEPS and min(norms) > 1e-6
