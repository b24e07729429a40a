"""Generation ahead of training: each step's responses come from the weights of the step before, whatever the clock says.

The reference is a script on one rank that trains on the rollout of the step before (``outside.one_step_late``): its step k + 1
does what step k does with a staleness of 1.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import tasks
from ranks import run_ranks
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.controller.versions import Versions
from rlhf_spmd.train import prepare

STEPS = 4
APART = (
    "placement.pools={train: [0, 1], generate: [2, 3]}",
    *(f"models.{role}.pool=train" for role in ("actor", "reference", "reward")),
    "models.actor.calls.generate_sequences.pool=generate",
)
# name -> overrides
LAYOUTS = {
    "replicas": APART,
    "only what has changed": (*APART, "models.actor.calls.generate_sequences.delta=true"),
    "rows in portions": (*APART, "placement.rollout_chunks=3"),
    "slices, from ZeRO": (*APART, "models.actor.layout.zero=3", "models.actor.calls.generate_sequences.layout.tp=2"),
    "stages, weights that rest": (
        *APART,
        "models.actor.offload=true",
        "models.actor.layout.pp=2",
        "models.actor.calls.generate_sequences.layout.pp=2",
    ),
    "generation on the first rank": (
        "placement.pools={train: [1, 2], generate: [0], others: [3]}",
        "models.actor.pool=train",
        *(f"models.{role}.pool=others" for role in ("reference", "reward")),
        "models.actor.calls.generate_sequences.pool=generate",
    ),
}
STALE = "placement.max_staleness=1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ahead")


def config_of(algorithm: str, directory: Path) -> str:
    """The shared task, with this algorithm in place of PPO, in float64, at a constant learning rate: the reference has a step more."""
    config = json.loads((tasks.task() / "ppo.json").read_text())
    config["algorithm"] = {"name": algorithm, "ppo_mini_batch_size": 4, "ppo_epochs": 2, "kl_loss_coef": 0.05}
    actor = config["models"]["actor"] | {"optim": {"lr": 1e-3, "eps": 1e-3}}
    config["models"] = {role: {**actor, "dtype": "float64"} for role in ("actor",)}
    config["models"]["reference"] = {"path": str(tasks.task() / "reference"), "dtype": "float64"}
    config["models"]["reward"] = {"dtype": "float64"}
    config["sampling"] = {"n": 3}
    file = directory / f"{algorithm}.json"
    file.write_text(json.dumps(config))
    return str(file)


def train(ranks: int, algorithm: str, run_dir: Path, *more: str, steps: int = STEPS) -> tasks.Run:
    every = f"run.log_samples={3 * tasks.PROMPTS}"
    overrides = tasks.settings(run_dir, steps, *more, every)
    run_ranks(ranks, tasks.train_here, config_of(algorithm, run_dir.parent), overrides)
    return tasks.read_run(run_dir)


@functools.cache
def late(directory: Path) -> tasks.Run:
    return train(1, "outside.one_step_late", directory / "late", steps=STEPS + 1)


@functools.cache
def ahead(directory: Path, name: str) -> tasks.Run:
    return train(4, "grpo", directory / f"ahead_{sorted(LAYOUTS).index(name)}", STALE, *LAYOUTS[name], "run.save_freq=1")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_staleness_of_one_is_training_on_the_rollout_of_the_step_before(directory: Path, name: str) -> None:
    one, other = late(directory), ahead(directory, name)
    assert other.responses == {key: ids for key, ids in one.responses.items() if key[0] <= STEPS}
    for mine, its in zip(other.metrics, one.metrics[1:], strict=True):
        for key in ("actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm", "actor/clip_frac"):
            assert mine[key] == pytest.approx(its[key], rel=1e-10, abs=1e-13), key
    newest = replace(other, weights={key: tensor for key, tensor in other.weights.items() if key[0] == "actor"})
    weights, tensor = tasks.worst_tensor(one, newest)
    assert weights < 1e-9, tensor
    assert [row["generation/weights_version"] for row in other.raw] == [0, 0, 1, 2]
    assert [row["rollout/stale_fraction"] for row in other.raw] == [0, 1, 1, 1]
    assert [row["step"] for row in other.raw] == [1, 2, 3, 4]
    assert sum(row["reshard/bytes"] > 0 for row in other.raw) >= 2, (
        "of four versions, the last two at least came in a step or after it"
    )
    rows = [json.loads(line) for line in (directory / f"ahead_{sorted(LAYOUTS).index(name)}/rollouts.jsonl").open()]
    assert {(row["step"], *(version for version, _ in row["versions"])) for row in rows} == {(1, 1), (2, 1), (3, 2), (4, 3)}


def test_old_log_probs_of_the_rollout(directory: Path) -> None:
    """With ``bypass_mode`` the first ratio is against the weights that drew the tokens, and no forward pass is made for others."""
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    one = train(1, "outside.one_step_late", directory / "late_bypass", bypass, steps=STEPS + 1)
    other = train(4, "grpo", directory / "ahead_bypass", STALE, *APART, bypass)
    assert other.responses == {key: ids for key, ids in one.responses.items() if key[0] <= STEPS}
    assert other.responses != ahead(directory, "replicas").responses, "it learns otherwise"
    for mine, its in zip(other.metrics, one.metrics[1:], strict=True):
        assert mine["actor/ppo_kl_first"] == pytest.approx(its["actor/ppo_kl_first"], rel=1e-9, abs=1e-13)
    assert abs(other.metrics[0]["actor/ppo_kl_first"]) < 1e-12 < 1e-6 < abs(other.metrics[2]["actor/ppo_kl_first"])
    assert not any("timing_s/compute_log_prob" in row for row in other.raw)
    both = tasks.settings(directory / "refused", 1, bypass, "algorithm.rollout_correction.rollout_is=token")
    with pytest.raises((ConfigError, ValueError), match=r"bypass_mode=true .*rollout_is finds no difference"):
        prepare(config_of("grpo", directory), both, 1)


def test_a_resumed_run_goes_on_with_the_same_samples(directory: Path) -> None:
    """The weights that the next step generates with are older than those that are trained: the checkpoint has both."""
    whole = ahead(directory, "replicas")
    checkpoint = directory / f"ahead_{sorted(LAYOUTS).index('replicas')}" / "checkpoints" / "step_3"
    for number, layout in enumerate(("replicas", "slices, from ZeRO")):
        more = STALE, *LAYOUTS[layout], "run.save_freq=1", f"run.resume={checkpoint}"
        resumed = train(4, "grpo", directory / f"resumed_{number}", *more)
        assert resumed.responses == {key: ids for key, ids in whole.responses.items() if key[0] == 4}
        assert resumed.raw[0]["generation/weights_version"] == whole.raw[3]["generation/weights_version"] == 2
        assert tasks.worst_tensor(whole, resumed)[0] < 1e-9
    together = train(1, "grpo", directory / "resumed_together", f"run.resume={checkpoint}", steps=5)
    assert [row["generation/weights_version"] for row in together.raw] == [
        3,
        4,
    ]


def test_two_steps_ahead_and_validations_between(directory: Path) -> None:
    """A validation generates with the newest weights, and the steps after it with those that they would have had without."""
    more = "placement.max_staleness=2", *APART, "run.save_freq=2"
    plain = train(4, "grpo", directory / "two", *more, steps=6)
    assert [row["generation/weights_version"] for row in plain.raw] == [0, 0, 0, 1, 2, 3]
    assert [row["step"] for row in plain.raw] == [1, 2, 3, 4, 5, 6]
    data = json.loads((tasks.task() / "ppo.json").read_text())["data"]["path"]
    tested = train(4, "grpo", directory / "tested", *more, f"data.val_path={data}", "run.test_freq=1", steps=6)
    assert tested.responses == plain.responses
    assert tasks.worst_tensor(plain, tested)[0] == 0
    one = train(1, "grpo", directory / "tested_one", f"data.val_path={data}", "run.test_freq=1", steps=1)
    assert tested.raw[1]["val/reward_mean"] == pytest.approx(one.raw[1]["val/reward_mean"], rel=1e-12)  # after the first update
    resumed = train(4, "grpo", directory / "two_resumed", *more, f"run.resume={directory / 'two/checkpoints/step_4'}", steps=6)
    assert resumed.responses == {key: ids for key, ids in plain.responses.items() if key[0] > 4}


def test_rows_in_flight_and_environments_ahead(directory: Path) -> None:
    partial = "data.gen_batch_size=16", "models.actor.generation.max_num_seqs=8", "run.save_freq=2"
    whole = train(4, "grpo", directory / "partial", STALE, *APART, *partial)
    for row in whole.raw[1:]:
        assert 0 < row["rollout/stale_fraction"] <= 1
    resume = f"run.resume={directory / 'partial/checkpoints/step_2'}"
    resumed = train(4, "grpo", directory / "partial_resumed", STALE, *APART, *partial, resume)
    assert resumed.responses == {key: ids for key, ids in whole.responses.items() if key[0] > 2}
    assert tasks.worst_tensor(whole, resumed)[0] == 0


PPO = (
    STALE,
    *APART,
    "models.critic.pool=train",
    *(f"models.{role}.dtype=float64" for role in ("actor", "critic", "reference", "reward")),
)


def ended_by(run_dir: Path, rank: int, how: signal.Signals) -> tuple[dict[str, object], dict[int, int]]:
    """A PPO run of which a rank got a signal in its third step or later: exit_status.json, and the ranks' codes."""
    process = tasks.start_program(4, run_dir, tasks.settings(run_dir, 8, *PPO), delay_s=0.05)
    try:
        tasks.await_steps(process, run_dir, 2)
        os.kill(process.ranks[rank], how)
        tasks.finish(process, run_dir)
    finally:
        tasks.kill(process)
    return json.loads((run_dir / "exit_status.json").read_text()), dict(process.codes)


def test_a_killed_rank_that_generates_is_named(directory: Path) -> None:
    status, codes = ended_by(directory / "killed", 3, signal.SIGKILL)
    assert (status["class"], status["rank"]) == ("lost", 3)
    assert codes == {0: 9, 1: 9, 2: 9, 3: -signal.SIGKILL}


def test_a_signal_saves_a_step_later_and_the_run_goes_on(directory: Path) -> None:
    status, codes = ended_by(directory / "preempted", 2, signal.SIGTERM)
    assert (status["class"], status["code"]) == ("preempted", 75) and set(codes.values()) == {75}
    config = str(tasks.task() / "ppo.json")
    run_ranks(4, tasks.train_here, config, tasks.settings(directory / "preempted", 8, *PPO))
    run_ranks(4, tasks.train_here, config, tasks.settings(directory / "uninterrupted", 8, *PPO))
    whole, resumed = (tasks.read_run(directory / name) for name in ("uninterrupted", "preempted"))
    assert resumed.responses == whole.responses and len(resumed.raw) == len(whole.raw) == 8
    assert tasks.worst_tensor(whole, resumed)[0] == 0


def test_steps_that_do_not_generate(directory: Path) -> None:
    """A step later than the bound says takes the newest weights: here that is every one, and a checkpoint holds no others."""
    plain = train(4, "outside.every_other_step", directory / "odd", *APART, "run.save_freq=2")
    ahead = train(4, "outside.every_other_step", directory / "odd_ahead", STALE, *APART, "run.save_freq=2")
    assert ahead.responses == plain.responses and {step for step, _ in ahead.responses} == {1, 3}
    assert tasks.worst_tensor(plain, ahead)[0] == 0


def test_a_role_that_generates_and_is_not_trained(directory: Path) -> None:
    """Its weights are always the newest, wherever it generates."""
    config = json.loads(Path(config_of("outside.explorer", directory)).read_text())
    config["models"]["explorer"] = {"path": config["models"]["reference"]["path"], "dtype": "float64"}
    path = directory / "explorer.json"
    path.write_text(json.dumps(config))
    explorer = "models.explorer.pool=train", "models.explorer.calls.generate_sequences.layout.tp=2"
    runs = []
    for number, more in enumerate(((), (STALE,))):
        run_dir = directory / f"explorer_{number}"
        run_ranks(4, tasks.train_here, str(path), tasks.settings(run_dir, 3, *APART, *explorer, *more))
        runs.append(tasks.read_run(run_dir))
    plain, ahead = runs
    assert ahead.responses == plain.responses, "they are the explorer's, which do not depend on what the actor has learnt"
    newest = replace(ahead, weights={key: tensor for key, tensor in ahead.weights.items() if key in plain.weights})
    assert tasks.worst_tensor(plain, newest)[0] < 1e-12


def test_ranks_that_are_several_steps_ahead_may_wait_for_longer_than_a_call(directory: Path) -> None:
    """``run.timeout_s`` is for one call; what generates waits for the weights of several steps."""
    run_dir = directory / "patient"
    slow = "run.timeout_s=6", "reward.timeout_s=4", "placement.max_staleness=5"
    process = tasks.start_program(4, run_dir, tasks.settings(run_dir, 7, *PPO, *slow), delay_s=0.25)
    try:
        assert tasks.finish(process, run_dir) == 0, (run_dir / "output.txt").read_text()[-2000:]
    finally:
        tasks.kill(process)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert sum(row["timing_s/step"] for row in rows[:5]) > 6 and len(rows) == 7


def test_generation_where_it_trains_is_refused(directory: Path) -> None:
    overrides = tasks.settings(directory / "refused", 1, STALE)
    with pytest.raises((ConfigError, ValueError), match=r"placement.max_staleness=1 lets models.actor .* on ranks \[0, 1\]"):
        prepare(config_of("grpo", directory), overrides, 2)
    with pytest.raises((ConfigError, ValueError), match=r"max_staleness=-1"):
        prepare(config_of("grpo", directory), [*overrides, "placement.max_staleness=-1"], 2)


def test_versions_of_steps() -> None:
    versions = Versions(ahead=2)
    taken = []
    for number in range(1, 7):
        versions.begin_step(number)
        taken.append((versions.generating("actor"), versions.generating_step("actor", number), versions.generating("judge")))
        for _ in range(number % 2 + 1):  # some steps train twice
            versions.train("actor")
        versions.end_step()
        assert versions.generating("actor") == versions.newest("actor"), "outside steps it is the newest"
    assert taken == [(0, 1, 0), (0, 1, 0), (0, 1, 0), (2, 2, 0), (3, 3, 0), (5, 4, 0)]
    assert versions.needed_later("actor") == {6, 8, 9}
    other = Versions(ahead=2)
    other.load_state(json.loads(json.dumps(versions.state())))
    other.begin_step(7)
    assert (other.generating("actor"), other.generating_step("actor", 7)) == (6, 5)
    none = Versions()
    none.load_state(versions.state())
    none.begin_step(7)
    assert none.generating("actor") == 9 and none.needed_later("actor") == {9}


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_what_a_step_takes_was_the_newest_when_some_step_generated(ahead: int) -> None:
    """Whatever steps leave out, do twice or in another order: only such versions are on the ranks that generate. The bound holds."""
    draws = random.Random(ahead)
    versions, there, newest_at = Versions(ahead), {0}, {}
    for number in range(1, 200):
        versions.begin_step(number)
        newest_at[number] = versions.newest("actor")
        for action in draws.choices(("train", "generate"), k=draws.randrange(4)):
            if action == "train":
                versions.train("actor")
                continue
            wanted = versions.generating("actor")
            there.add(versions.newest("actor"))
            assert wanted in there and wanted >= newest_at[max(number - ahead, 1)]
            there &= versions.needed_later("actor") | {wanted}
        versions.end_step()
        assert versions.needed_later("actor") - {versions.newest("actor")} <= there, "what a checkpoint must hold"
