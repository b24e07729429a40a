"""Runs of a small mixture of experts: its routers' metrics, the load-balancing loss and replays, the same in every layout."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasks
from overrides import PARTIAL, layout, micro_batches
from places import ROOT
from ranks import run_ranks
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.training.prepare import prepare

STEPS = 2
GRPO = {"name": "grpo", "ppo_mini_batch_size": 4, "ppo_epochs": 2, "use_kl_loss": False}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": len(tasks.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "eos_token_id": tasks.EOS,
    "initializer_range": 0.15,
}
REPLAY, R3 = (f"models.actor.router_replay={mode}" for mode in ("R2", "R3"))
COEF = "models.actor.router_aux_loss_coef=0.1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    write_random_model(root / "actor", MIXTURE, 1)
    shutil.copytree(tasks.task() / "tokenizer", root / "actor", dirs_exist_ok=True)
    return root


@functools.cache
def run(directory: Path, ranks: int, *more: str) -> tasks.Run:
    run_dir = directory / f"run_{len(list(directory.iterdir()))}"
    own = f"models.actor.path={directory / 'actor'}", "models.actor.dtype=float64", "models.actor.optim.eps=1e-3"
    given = tasks.settings(run_dir, STEPS, *own, *more)
    run_ranks(ranks, tasks.train_here, tasks.other_task(GRPO, "actor"), given)
    return tasks.read_run(run_dir)


def assert_same(one: tasks.Run, other: tasks.Run, name: str) -> None:
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "micro-batches of one row": (1, micro_batches(rows=1)),
    "tp2": (2, (*layout("actor", tp=2), *layout("generation", tp=2))),
    "pp2 dp2": (4, (*layout("actor", pp=2, dp=2, zero=1), *micro_batches(rows=3))),
    "cp2 zero3": (4, (*layout("actor", cp=2, dp=2, zero=3), *micro_batches(tokens=40))),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    ranks, more = LAYOUTS[name]
    assert_same(run(directory, 1, COEF), run(directory, ranks, COEF, *more), name)


def test_what_an_update_reports(directory: Path) -> None:
    """num_experts_per_tok is the loss if all experts have the same load."""
    plain, balanced = run(directory, 1), run(directory, 1, COEF)
    names = {"actor/moe/max_vio", "actor/moe/router_entropy"}
    for row in plain.metrics:
        assert names <= row.keys() and "actor/moe/load_balancing_loss" not in row
        assert 0 < row["actor/moe/max_vio"] < 6 / 2 - 1 and 0 < row["actor/moe/router_entropy"] < 1.8
    assert all(6 > row["actor/moe/load_balancing_loss"] > 2.0 for row in balanced.metrics)
    assert balanced.metrics[1]["actor/grad_norm"] != plain.metrics[1]["actor/grad_norm"]


ELSEWHERE = (
    *("placement.pools.a=[0]", "placement.pools.b=[1,2]", "models.actor.pool=a", "models.reward.pool=b"),
    *("models.actor.calls.compute_log_prob.pool=b", "models.actor.calls.compute_log_prob.layout.pp=2"),
    "placement.rollout_chunks=2",
)


@pytest.mark.parametrize("name", [*LAYOUTS, "old log-probs elsewhere"])
def test_the_same_replays_in_fp64(directory: Path, name: str) -> None:
    ranks, more = LAYOUTS.get(name, (3, ELSEWHERE))
    assert_same(run(directory, 1, REPLAY), run(directory, ranks, REPLAY, *more), name)


APART = (
    "placement.pools.a=[0,1]",
    "placement.pools.b=[2]",
    "models.actor.pool=b",
    "models.actor.calls.generate_sequences.pool=a",
)
GENERATED: dict[str, tuple[int, tuple[str, ...]]] = {
    **LAYOUTS,
    "experts in parallel": (2, layout("actor", dp=2, ep=2)),
    "old log-probs elsewhere": (3, ELSEWHERE),
    "generation elsewhere": (3, (*APART, "models.reward.pool=a", "placement.rollout_chunks=2")),
    "stages elsewhere": (
        3,
        (*APART, "models.actor.calls.generate_sequences.layout.pp=2", "models.reward.pool=b", "placement.rollout_chunks=2"),
    ),
    "small pages": (1, ("models.actor.generation.page_size=4", "models.actor.generation.num_pages=18")),
}


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_replays_of_generation_in_fp64(directory: Path, name: str) -> None:
    """Where the pass of the old log-probs is made and takes generation's experts, too."""
    ranks, more = GENERATED[name]
    assert_same(run(directory, 1, R3), run(directory, ranks, R3, *more), name)


def test_generations_own_log_probs_serve(directory: Path) -> None:
    """In fp32 they are exact: no other pass is made, and the first update finds the same bits with the experts of generation."""
    narrow = run(directory, 1, R3, "models.actor.dtype=float32")
    assert [row["actor/ppo_kl_first"] for row in narrow.metrics] == [0.0] * STEPS
    assert narrow.log_prob_difference() == 0.0 and not any("compute_log_prob" in key for key in narrow.raw[0])


def stale(directory: Path, lr: str, *more: str) -> dict[str, float]:
    """The metrics of a second step, whose rows are those of the weights before the first."""
    own = "models.actor.dtype=float32", f"models.actor.optim.lr={lr}", "placement.max_staleness=1", "models.reward.pool=a"
    pools = (
        "placement.pools.a=[0]",
        "placement.pools.b=[1]",
        "models.actor.pool=b",
        "models.actor.calls.generate_sequences.pool=a",
    )
    return run(directory, 2, *own, *pools, *more).raw[1]


@pytest.mark.parametrize("bypass", [False, True])
def test_updates_take_the_experts_of_older_weights(directory: Path, bypass: bool) -> None:
    """Generation is a step behind. At a learning rate of nearly 0 its experts are those of the current weights, too."""
    more = (f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}",)
    fast, slow, free, current = (stale(directory, lr, *more, *mode) for mode in ((R3,), ()) for lr in ("3e-2", "1e-12"))
    load = "actor/moe/max_vio"
    assert fast[load] == slow[load] and abs(free[load] - current[load]) > 0.1
    if not bypass:  # then there is a pass whose log-probs differ from the rollout's, and less with the same experts
        for name in ("rollout/log_prob_diff_mean", "rollout_corr/k3_kl", "training/rollout_probs_diff_mean"):
            assert 0 < fast[name] < free[name]


def test_rows_in_flight_keep_their_experts(directory: Path) -> None:
    """They cross steps, and a checkpoint has them: a resumed run is the run that was never ended."""
    found = []
    for name, more in (("in_flight", ""), ("resumed", f"run.resume={directory / 'in_flight' / 'checkpoints' / 'step_3'}")):
        given = tasks.settings(
            directory / name, 5, f"models.actor.path={directory / 'actor'}", R3, *PARTIAL, *filter(None, [more])
        )
        run_ranks(1, tasks.train_here, tasks.other_task(GRPO, "actor"), given)
        found.append(tasks.read_run(directory / name))
    whole, resumed = found
    assert max(float(row["rollout/stale_fraction"]) for row in whole.raw) > 0.05
    later = {row: ids for row, ids in whole.responses.items() if row[0] > 3}
    tasks.assert_bit_equal(resumed, replace(whole, metrics=whole.metrics[3:], responses=later))


def test_replays_change_what_later_updates_learn(directory: Path) -> None:
    """The first update has the weights of the pass before: the same experts either way, and a ratio of 1 in fp32 too."""
    plain, replayed = run(directory, 1), run(directory, 1, REPLAY)
    first = [{row: ids for row, ids in one.responses.items() if row[0] == 1} for one in (plain, replayed)]
    assert first[0] == first[1]
    assert tasks.worst_tensor(plain, replayed)[0] > 1e-6
    narrow = run(directory, 1, REPLAY, "models.actor.dtype=float32")
    assert [row["actor/ppo_kl_first"] for row in narrow.metrics] == [0.0] * STEPS
    assert narrow.log_prob_difference() == 0.0 and any("compute_log_prob" in key for key in narrow.raw[0])


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (
            GRPO,
            ("algorithm.rollout_correction.bypass_mode=true",),
            "with bypass_mode no forward pass computes the old log-probs",
        ),
        (GRPO, ("models.actor.generation.reuse_rollout_log_probs=true",), "R2 takes the experts of a forward pass of its own"),
        (
            {**GRPO, "use_kl_loss": True},
            ("models.reference.router_replay=R2",),
            "this role does not train on rows that it generates",
        ),
    ],
)
def test_runs_that_cannot_replay(directory: Path, config: dict[str, Any], more: tuple[str, ...], said: str) -> None:
    roles = ("actor", "reference") if config["use_kl_loss"] else ("actor",)
    paths = (f"models.{role}.path={directory / 'actor'}" for role in roles)
    with pytest.raises(ValueError, match=said):
        prepare(tasks.other_task(config, *roles), tasks.settings(directory / "no", 1, *paths, REPLAY, *more), 1)


@pytest.mark.parametrize(
    ("mode", "said"), [("R2", "whose old log-probs no forward"), ("R3", "that models.actor does not generate")]
)
def test_training_on_rows_without_experts_cannot_replay(directory: Path, mode: str, said: str) -> None:
    own = f"models.actor.path={directory / 'actor'}", f"models.actor.router_replay={mode}"
    given = (f"data.path={tasks.pairs()}", "data.val_path=null", "run.test_freq=0", "data.train_batch_size=4", *own)
    with pytest.raises(ValueError, match=f"models.actor.router_replay={mode}: orpo trains on rows {said}"):
        prepare(str(ROOT / "configs" / "quickstart_orpo.yaml"), given, 1)


def test_a_role_that_has_no_use_for_it(directory: Path) -> None:
    config = tasks.other_task({**GRPO, "use_kl_loss": True}, "actor", "reference")
    for key, said in (
        ("reference.router_aux_loss_coef=0.1", "this role is not trained; leave it out"),
        ("actor.router_aux_loss_coef=0.1", "models of llama have no experts; leave it out"),
        ("actor.router_replay=R2", "models of llama have no experts; leave it out"),
        ("actor.router_replay=R3", "models of llama have no experts; leave it out"),
    ):
        with pytest.raises(ValueError, match=f"models.{key}.*{said}"):
            prepare(config, tasks.settings(directory / "no", 1, f"models.{key}"), 1)
