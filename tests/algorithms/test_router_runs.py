"""Runs of a small mixture of experts: its routers' metrics, the load-balancing loss and replays, the same in every layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import tasks
from algorithm_cases import CASES, assert_same_run
from expert_tasks import ARCHITECTURES, GRPO, MODEL, train_grpo, write_model
from overrides import PARTIAL, layouts, micro_batches
from ranks import run_ranks
from rlhf_spmd.preflight.prepare import prepare
from tiers import tiers

STEPS = 2
MIXTURE = {**MODEL, "rope_theta": 10000.0, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]}
COEF = "models.actor.router_aux_loss_coef=0.1"
REPLAY, R3 = (f"models.actor.router_replay={mode}" for mode in ("R2", "R3"))
FP32 = "models.actor.dtype=float32"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    write_model(root / "actor", MIXTURE, ARCHITECTURES["actor"])
    return root


@functools.cache
def run(directory: Path, ranks: int, *more: str) -> tasks.Run:
    return train_grpo(directory / f"run_{len(list(directory.iterdir()))}", directory / "actor", *more, ranks=ranks)


ELSEWHERE = (
    *("placement.pools.a=[0]", "placement.pools.b=[1,2]", "models.actor.pool=a", "models.reward.pool=b"),
    *("models.actor.calls.compute_log_prob.pool=b", "models.actor.calls.compute_log_prob.layout.pp=2"),
    "rollout.chunks=2",
)
STAGES_ELSEWHERE = (
    *("placement.pools.a=[0,1]", "placement.pools.b=[2]", "models.actor.pool=b", "models.reward.pool=b"),
    *("models.actor.calls.generate_sequences.pool=a", "models.actor.calls.generate_sequences.layout.pp=2"),
    "rollout.chunks=2",
)
SMALL_PAGES = ("models.actor.generation.page_size=4", "models.actor.generation.num_pages=18")
# name -> ranks and overrides of one rank's run, and those that are added to them
LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "tp2": (2, (COEF,), layouts("actor tp2, generation tp2")),
    "pp2 dp2, replayed": (4, (COEF, REPLAY), (*layouts("actor pp2 dp2 zero1"), *micro_batches(rows=3))),
    "cp2, generation replayed": (2, (COEF, R3), (*layouts("actor cp2 zero3"), *micro_batches(tokens=40))),
    "experts in parallel, generation replayed": (2, (COEF, R3), layouts("actor dp2 ep2")),
    "old log-probs elsewhere, replayed": (3, (COEF, REPLAY), ELSEWHERE),
    "stages elsewhere, generation replayed": (3, (COEF, R3), STAGES_ELSEWHERE),
    "small pages, micro-batches of one row, generation replayed": (1, (COEF, R3), (*SMALL_PAGES, *micro_batches(rows=1))),
    "pp2 dp2, generation replayed": (4, (COEF, R3), (*layouts("actor pp2 dp2 zero1"), *micro_batches(rows=3))),
    "cp2 zero3, replayed": (4, (COEF, REPLAY), (*layouts("actor cp2 dp2 zero3"), *micro_batches(tokens=40))),
    "old log-probs elsewhere, generation replayed": (3, (COEF, R3), ELSEWHERE),
}


@pytest.mark.parametrize("name", tiers(LAYOUTS, list(LAYOUTS)[:7]))
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    """Where generation's experts are replayed, the pass of the old log-probs is made and takes them, too."""
    ranks, modes, more = LAYOUTS[name]
    assert_same_run(run(directory, 1, *modes), run(directory, ranks, *modes, *more))


def test_what_an_update_reports(directory: Path) -> None:
    """num_experts_per_tok is the loss if all experts have the same load."""
    plain, balanced = run(directory, 1), run(directory, 1, COEF)
    names = {"actor/moe/max_vio", "actor/moe/router_entropy"}
    for row in plain.metrics:
        assert names <= row.keys() and "actor/moe/load_balancing_loss" not in row
        assert 0 < row["actor/moe/max_vio"] < 6 / 2 - 1 and 0 < row["actor/moe/router_entropy"] < 1.8
    assert all(6 > row["actor/moe/load_balancing_loss"] > 2.0 for row in balanced.metrics)
    assert balanced.metrics[1]["actor/grad_norm"] != plain.metrics[1]["actor/grad_norm"]


def test_replays_change_what_later_updates_learn(directory: Path) -> None:
    """The first update has the weights of the pass before: the same experts either way."""
    plain, replayed = run(directory, 1, COEF), run(directory, 1, COEF, REPLAY)
    first, first_replayed = ({row: ids for row, ids in run.responses.items() if row[0] == 1} for run in (plain, replayed))
    assert first == first_replayed
    assert tasks.worst_tensor(plain, replayed)[0] > 1e-6


@pytest.mark.parametrize(("mode", "has_pass"), [(REPLAY, True), (R3, False)])
def test_in_fp32_the_first_update_finds_the_same_bits(directory: Path, mode: str, has_pass: bool) -> None:
    """With the experts of generation its own log-probs serve: no other pass is made."""
    narrow = run(directory, 1, mode, FP32)
    assert [row["actor/ppo_kl_first"] for row in narrow.metrics] == [0.0] * STEPS
    assert narrow.log_prob_difference() == 0.0
    assert any("compute_log_prob" in key for key in narrow.raw[0]) == has_pass


def stale(directory: Path, lr: str, *more: str) -> dict[str, float]:
    """The metrics of a second step, whose rows are those of the weights before the first."""
    pools = ("placement.pools.a=[0]", "placement.pools.b=[1]", "models.actor.pool=b", "models.reward.pool=a")
    ahead = "rollout.max_staleness=1", "models.actor.calls.generate_sequences.pool=a"
    return run(directory, 2, FP32, f"models.actor.optim.lr={lr}", *pools, *ahead, *more).raw[1]


@pytest.mark.parametrize("bypass", tiers([False, True], [False]))
def test_updates_take_the_experts_of_older_weights(directory: Path, bypass: bool) -> None:
    """Generation is a step behind. At a learning rate of nearly 0 its experts are those of the current weights, too."""
    mode = f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}"
    fast, slow, free = stale(directory, "3e-2", mode, R3), stale(directory, "1e-12", mode, R3), stale(directory, "3e-2", mode)
    load = "actor/moe/max_vio"
    assert fast[load] == slow[load] and abs(free[load] - slow[load]) > 0.1
    if not bypass:  # then there is a pass whose log-probs differ from the rollout's, and less with the same experts
        for name in ("rollout/log_prob_diff_mean", "rollout_corr/k3_kl", "training/rollout_probs_diff_mean"):
            assert 0 < fast[name] < free[name]


def test_rows_in_flight_keep_their_experts(directory: Path) -> None:
    """They cross steps, and a checkpoint has them: a resumed run is the run that was never ended."""
    runs = []
    for name, more in (("in_flight", ()), ("resumed", (f"run.resume={directory / 'in_flight' / 'checkpoints' / 'step_3'}",))):
        overrides = tasks.settings(directory / name, 5, f"models.actor.path={directory / 'actor'}", R3, *PARTIAL, *more)
        run_ranks(1, tasks.train_here, tasks.other_task(GRPO, "actor"), overrides)
        runs.append(tasks.read_run(directory / name))
    uninterrupted, resumed = runs
    assert max(float(row["rollout/stale_fraction"]) for row in uninterrupted.raw) > 0.05
    later = {row: ids for row, ids in uninterrupted.responses.items() if row[0] > 3}
    tasks.assert_bit_equal(resumed, replace(uninterrupted, metrics=uninterrupted.metrics[3:], responses=later))


REUSED = "models.actor.generation.reuse_rollout_log_probs=true"
DENSE = f"models.actor.path={tasks.task() / 'actor'}"


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("dr_grpo", (REPLAY, REUSED), "R2 takes the experts of a forward pass of its own"),
        ("grpo", ("models.reference.router_replay=R2",), "this role does not train on rows that it generates"),
        ("grpo", ("models.reference.router_aux_loss_coef=0.1",), "this role is not trained; leave it out"),
        ("dr_grpo", (DENSE, COEF), "router_aux_loss_coef.*models of llama have no experts; leave it out"),
        ("dr_grpo", (DENSE, REPLAY), "router_replay.*models of llama have no experts; leave it out"),
        ("orpo", (REPLAY,), "router_replay=R2: orpo trains on rows whose old log-probs no forward"),
        ("orpo", (R3,), "router_replay=R3: orpo trains on rows that models.actor does not generate"),
    ],
)
def test_what_cannot_be(directory: Path, name: str, more: tuple[str, ...], message: str) -> None:
    case = CASES[name]
    paths = [f"models.{role}.path={directory / 'actor'}" for role in (*case.roles, *(case.frozen if name == "grpo" else ()))]
    with pytest.raises(ValueError, match=message):
        prepare(case.file, tasks.settings(directory / "no", 1, *case.overrides(), *paths, *more), 1)
