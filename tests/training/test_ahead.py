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
from tiers import tiers

STEPS = 4


def pools(train: list[int], generate: list[int]) -> tuple[str, ...]:
    return (
        f"placement.pools={{train: {train}, generate: {generate}}}",
        *(f"models.{role}.pool=train" for role in ("actor", "reference", "reward")),
        "models.actor.calls.generate_sequences.pool=generate",
    )


APART = pools([0, 1], [2, 3])
TWO = pools([0], [1])
# name -> overrides
LAYOUTS = {
    "changes to the first rank, rows in portions": (
        *pools([1], [0]),
        "models.actor.calls.generate_sequences.delta=true",
        "rollout.chunks=3",
    ),
    "slices, from ZeRO": (*APART, "models.actor.layout.zero=3", "models.actor.calls.generate_sequences.layout.tp=2"),
    "stages, weights that rest": (
        *APART,
        "models.actor.offload=true",
        "models.actor.layout.pp=2",
        "models.actor.calls.generate_sequences.layout.pp=2",
    ),
}
SHORT = list(LAYOUTS)[:2]
STALE = "rollout.max_staleness=1"
CORRECTION = "algorithm.rollout_correction"


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


def overrides(*more: str) -> tuple[str, ...]:
    return (*more, f"run.log_samples={3 * tasks.PROMPTS}")


def train(ranks: int, algorithm: str, run_dir: Path, *more: str, steps: int = STEPS) -> tasks.Run:
    return tasks.train(ranks, run_dir, steps, *overrides(*more), config=config_of(algorithm, run_dir.parent))


def train_and_save(ranks: int, run_dir: Path, *more: str, steps: int = STEPS) -> tasks.Run:
    settings = tasks.settings(run_dir, steps, *overrides(*more))
    run_ranks(ranks, tasks.train_here, config_of("grpo", run_dir.parent), settings)
    return tasks.read_run(run_dir)


@functools.cache
def late(directory: Path) -> tasks.Run:
    return train(1, "outside.one_step_late", directory / "late", steps=STEPS + 1)


def directory_of(directory: Path, name: str) -> Path:
    return directory / f"ahead_{list(LAYOUTS).index(name)}"


@functools.cache
def ahead(directory: Path, name: str) -> tasks.Run:
    ranks = 2 if "first rank" in name else 4
    return train_and_save(ranks, directory_of(directory, name), STALE, *LAYOUTS[name], "run.save_freq=1")


def responses_after(run: tasks.Run, step: int) -> dict[tuple[int, int], list[int]]:
    return {key: ids for key, ids in run.responses.items() if key[0] > step}


@pytest.mark.parametrize("name", tiers(LAYOUTS, SHORT))
def test_a_staleness_of_one_is_training_on_the_rollout_of_the_step_before(directory: Path, name: str) -> None:
    reference, run = late(directory), ahead(directory, name)
    assert run.responses == {key: ids for key, ids in reference.responses.items() if key[0] <= STEPS}
    for row, expected in zip(run.metrics, reference.metrics[1:], strict=True):
        for key in ("actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "actor/grad_norm", "actor/clip_frac"):
            assert row[key] == pytest.approx(expected[key], rel=1e-10, abs=1e-13), key
    newest = replace(run, weights={key: tensor for key, tensor in run.weights.items() if key[0] == "actor"})
    weights, tensor = tasks.worst_tensor(reference, newest)
    assert weights < 1e-9, tensor
    assert [row["generation/weights_version"] for row in run.raw] == [0, 0, 1, 2]
    assert [row["rollout/stale_fraction"] for row in run.raw] == [0, 1, 1, 1]
    assert [row["step"] for row in run.raw] == [1, 2, 3, 4]
    assert sum(row["reshard/bytes"] > 0 for row in run.raw) >= 2, (
        "of four versions, the last two at least came in a step or after it"
    )
    rows = [json.loads(line) for line in (directory_of(directory, name) / "rollouts.jsonl").open()]
    assert {(row["step"], *(version for version, _ in row["versions"])) for row in rows} == {(1, 1), (2, 1), (3, 2), (4, 3)}


def test_old_log_probs_of_the_rollout(directory: Path) -> None:
    """With ``bypass_mode`` the first ratio is against the weights that drew the tokens, and no forward pass is made for others."""
    bypass = f"{CORRECTION}.bypass_mode=true"
    reference = train(1, "outside.one_step_late", directory / "late_bypass", bypass, steps=STEPS + 1)
    run = train(2, "grpo", directory / "ahead_bypass", STALE, *TWO, bypass)
    assert run.responses == {key: ids for key, ids in reference.responses.items() if key[0] <= STEPS}
    assert run.responses != ahead(directory, SHORT[0]).responses, "it learns otherwise"
    for row, expected in zip(run.metrics, reference.metrics[1:], strict=True):
        assert row["actor/ppo_kl_first"] == pytest.approx(expected["actor/ppo_kl_first"], rel=1e-9, abs=1e-13)
    assert abs(run.metrics[0]["actor/ppo_kl_first"]) < 1e-12 < 1e-6 < abs(run.metrics[2]["actor/ppo_kl_first"])
    assert not any("timing_s/compute_log_prob" in row for row in run.raw)


def test_a_resumed_run_goes_on_with_the_same_samples(directory: Path) -> None:
    """The weights that the next step generates with are older than those that are trained: the checkpoint has both."""
    run = ahead(directory, "slices, from ZeRO")
    resume = f"run.resume={directory_of(directory, 'slices, from ZeRO')}/checkpoints/step_3"
    resumed = train(2, "grpo", directory / "resumed", STALE, *LAYOUTS[SHORT[0]], resume)
    assert resumed.responses == responses_after(run, 3)
    assert resumed.raw[0]["generation/weights_version"] == run.raw[3]["generation/weights_version"] == 2
    assert tasks.worst_tensor(run, resumed)[0] < 1e-9
    together = train(1, "grpo", directory / "resumed_together", resume, steps=5)
    assert [row["generation/weights_version"] for row in together.raw] == [3, 4]


def test_two_steps_ahead_and_validations_between(directory: Path) -> None:
    """A validation generates with the newest weights, and the steps after it with those that they would have had without."""
    more = "rollout.max_staleness=2", *TWO
    plain = train(2, "grpo", directory / "two", *more, steps=5)
    assert [row["generation/weights_version"] for row in plain.raw] == [0, 0, 0, 1, 2]
    assert [row["step"] for row in plain.raw] == [1, 2, 3, 4, 5]
    data = json.loads((tasks.task() / "ppo.json").read_text())["data"]["path"]
    validation = f"data.val_path={data}", "run.test_freq=1"
    tested = train_and_save(2, directory / "tested", *more, *validation, "run.save_freq=3", steps=5)
    assert tested.responses == plain.responses
    assert tasks.worst_tensor(plain, tested)[0] == 0
    alone = train(1, "grpo", directory / "tested_alone", *validation, steps=1)
    assert tested.raw[1]["val/reward_mean"] == pytest.approx(alone.raw[1]["val/reward_mean"], rel=1e-12)  # after an update
    resumed = train(2, "grpo", directory / "two_resumed", *more, f"run.resume={directory}/tested/checkpoints/step_3", steps=5)
    assert resumed.responses == responses_after(plain, 3)


@pytest.mark.long
def test_rows_in_flight_and_environments_ahead(directory: Path) -> None:
    partial = "rollout.max_staleness=2", *TWO, "rollout.in_flight=16", "models.actor.generation.max_num_seqs=8"
    run = train_and_save(2, directory / "partial", *partial, "run.save_freq=2")
    for row in run.raw[1:]:
        assert 0 < row["rollout/stale_fraction"] <= 1
    resume = f"run.resume={directory / 'partial/checkpoints/step_2'}"
    resumed = train(2, "grpo", directory / "partial_resumed", *partial, resume)
    assert resumed.responses == responses_after(run, 2)
    assert tasks.worst_tensor(run, resumed)[0] == 0


PPO = (
    STALE,
    *APART,
    "models.critic.pool=train",
    *(f"models.{role}.dtype=float64" for role in ("actor", "critic", "reference", "reward")),
)


@pytest.mark.long
def test_a_signal_saves_a_step_later_and_the_run_goes_on(directory: Path) -> None:
    run_dir = directory / "preempted"
    process = tasks.start_program(4, run_dir, tasks.settings(run_dir, 8, *PPO), delay_s=0.05)
    try:
        tasks.await_steps(process, run_dir, 2)
        os.kill(process.ranks[2], signal.SIGTERM)
        tasks.finish(process, run_dir)
    finally:
        tasks.kill(process)
    status = json.loads((run_dir / "exit_status.json").read_text())
    assert (status["class"], status["code"]) == ("preempted", 75) and set(process.codes.values()) == {75}
    resumed = tasks.train(4, run_dir, 8, *PPO)
    uninterrupted = tasks.train(4, directory / "uninterrupted", 8, *PPO)
    assert resumed.responses == uninterrupted.responses and len(resumed.raw) == len(uninterrupted.raw) == 8
    assert tasks.worst_tensor(uninterrupted, resumed)[0] == 0


def test_steps_that_do_not_generate(directory: Path) -> None:
    """A step later than the bound says takes the newest weights: here that is every one."""
    plain = train(2, "outside.every_other_step", directory / "odd", *TWO)
    ahead = train(2, "outside.every_other_step", directory / "odd_ahead", STALE, *TWO)
    assert ahead.responses == plain.responses and {step for step, _ in ahead.responses} == {1, 3}
    assert tasks.worst_tensor(plain, ahead)[0] == 0, "and a checkpoint holds no others"


def test_a_role_that_generates_and_is_not_trained(directory: Path) -> None:
    """Its weights are always the newest, wherever it generates."""
    config = json.loads(Path(config_of("outside.explorer", directory)).read_text())
    config["models"]["explorer"] = {"path": config["models"]["reference"]["path"], "dtype": "float64"}
    path = directory / "explorer.json"
    path.write_text(json.dumps(config))
    plain, ahead = (
        tasks.train(2, directory / f"explorer_{len(more)}", 3, *TWO, "models.explorer.pool=train", *more, config=path)
        for more in ((), (STALE,))
    )
    assert ahead.responses == plain.responses, "they are the explorer's, which do not depend on what the actor has learnt"
    newest = replace(ahead, weights={key: tensor for key, tensor in ahead.weights.items() if key in plain.weights})
    assert tasks.worst_tensor(plain, newest)[0] < 1e-12


@pytest.mark.long
def test_ranks_that_are_several_steps_ahead_may_wait_for_longer_than_a_call(directory: Path) -> None:
    """``run.timeout_s`` is for one call; what generates waits for the weights of several steps."""
    run_dir = directory / "patient"
    slow = "run.timeout_s=6", "reward.timeout_s=4", "rollout.max_staleness=5"
    process = tasks.start_program(4, run_dir, tasks.settings(run_dir, 7, *PPO, *slow), delay_s=0.25)
    try:
        assert tasks.finish(process, run_dir) == 0, (run_dir / "output.txt").read_text()[-2000:]
    finally:
        tasks.kill(process)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert sum(row["timing_s/step"] for row in rows[:5]) > 6 and len(rows) == 7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((STALE,), r"rollout.max_staleness=1 lets models.actor .* on ranks \[0, 1\]"),
        (("rollout.max_staleness=-1",), r"max_staleness=-1"),
        (
            (STALE, *TWO, f"{CORRECTION}={{bypass_mode: true, rollout_is: token}}"),
            r"bypass_mode=true, .*a correction finds no difference",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        prepare(config_of("grpo", tmp_path), tasks.settings(tmp_path, 1, *more), 2)


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
