"""What a run directory says of runs that were started again, and what rows may ask for themselves."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tasks
from overrides import layout
from ranks import run_ranks
from rlhf_spmd.controller import Controller, Reference
from rlhf_spmd.data.files import DataError
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.exit import classify
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.train import main, prepare
from rlhf_spmd.training import recorder
from rlhf_spmd.training.recorder import merge_values
from rlhf_spmd.workers import RewardWorker
from rlhf_spmd.workers.flops import forward_flops
from rlhf_spmd.workers.objective import log_prob_metrics
from saved_models import flip_bit
from tasks import train_alone as train


def test_a_run_of_another_experiment_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another algorithm, model or data set, and other rows in the same file; a path in another form is the same path."""
    run_dir, data = tmp_path / "run", tmp_path / "data.jsonl"
    rows = (tasks.task() / "train.jsonl").read_text()
    data.write_text(rows)
    train(run_dir, 1, f"data.path={data}")
    config, step_1 = (run_dir / "config.yaml").read_text(), run_dir / "checkpoints" / "step_1"
    assert "other settings" not in capsys.readouterr().err
    train(run_dir, 1, f"data.path={data}", "algorithm.gamma=0.5")
    log = capsys.readouterr().err
    assert f"other settings than in {run_dir}/config.yaml: algorithm.gamma=0.5 (was 0.99)\n" in log
    assert "nothing to do: step 1 of 1 is done; raise run.steps or give another run.dir\n" in log
    with pytest.raises(ValueError, match=r"^run\.resume=never, but run\.dir=.* holds step_1; give another run\.dir$"):
        train(run_dir, 2, f"data.path={data}", "run.resume=never")
    other = {
        "algorithm.name=outside.unreported": "algorithm.name=outside.unreported (was ppo)",
        f"models.critic.path={tasks.task() / 'actor'}": rf"models.critic.path={tasks.task()}/actor (was {tasks.task()}/critic)",
        f"data.path={tasks.task() / 'train.jsonl'}": f"data.path={tasks.task() / 'train.jsonl'} (was {data})",
    }
    remedy = "; give another run.dir, or run.resume=force to go on with it"
    for override, difference in other.items():
        with pytest.raises(ValueError, match="^" + re.escape(f"{step_1} is of another experiment: {difference}{remedy}") + "$"):
            train(run_dir, 2, f"data.path={data}", override)
    without = json.loads((tasks.task() / "ppo.json").read_text())
    del without["models"]["critic"]
    (tmp_path / "rloo.json").write_text(json.dumps({**without, "algorithm": {"name": "rloo"}}))
    train(tmp_path / "rloo", 1, f"data.path={data}", config=tmp_path / "rloo.json")
    with pytest.raises(ValueError, match=r"algorithm\.name=ppo .*; give another run\.dir, since it holds no role 'critic'$"):
        train(tmp_path / "rloo", 2, f"data.path={data}")
    with pytest.raises(ValueError, match=rf"run\.resume={run_dir} is the directory of a run; give {run_dir}/checkpoints/lat"):
        train(tmp_path / "from", 2, f"data.path={data}", f"run.resume={run_dir}")
    data.write_text(rows + json.dumps({"prompt": "abc"}) + "\n")
    with pytest.raises(ValueError, match=r"another experiment: the prompts in the data are 21-\w+ \(were 20-\w+\); give"):
        train(run_dir, 2, f"data.path={data}")
    assert (run_dir / "config.yaml").read_text() == config and not step_1.with_name("step_2").exists()
    capsys.readouterr()

    data.write_text(rows)
    train(run_dir, 2, f"data.path={tmp_path}/./data.jsonl", "reward.function=tasks:coarse_share", "reward.weight=2.0")
    assert "reward.function=tasks:coarse_share (was tasks:even_share), reward.weight=2.0 (was 1.0)" in capsys.readouterr().err
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["reward"]["weight"] == 2.0, "the record of what ran"
    train(run_dir, 3, f"data.path={tasks.task() / 'train.jsonl'}", "run.resume=force")
    assert f"data.path={tasks.task() / 'train.jsonl'} (was " in capsys.readouterr().err


def test_damaged_checkpoints_do_not_count_as_kept_beside_a_given_one(tmp_path: Path) -> None:
    """A run that is sent back to its first checkpoint must not delete it for the sake of those that cannot be read."""
    run_dir, every = tmp_path / "run", ("run.save_freq=1", "run.keep_checkpoints=3")
    train(run_dir, 3, *every)
    good, *damaged = (run_dir / "checkpoints" / f"step_{step}" for step in (1, 2, 3))
    for path in damaged:
        flip_bit(next(path.glob("actor.*.safetensors")))
    train(run_dir, 4, "run.keep_checkpoints=2", f"run.resume={good}")
    assert good.is_dir(), "the only other one that can be read was deleted"


def test_a_run_goes_on_in_the_dtype_that_it_had_and_not_with_a_coefficient_that_was_fixed(tmp_path: Path) -> None:
    train(
        tmp_path,
        1,
        "models.critic.dtype=float64",
        "algorithm.kl_ctrl={type: fixed, kl_coef: 0, target_kl: 0.1, horizon: 10000}",
    )
    step_1 = tmp_path / "checkpoints" / "step_1"
    message = f"models.critic.dtype=auto (float32), but {step_1} has float64; go on with float64"
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        train(tmp_path, 2)
    train(tmp_path, 2, "models.critic.dtype=float64")
    assert metrics_of(tmp_path)[-1]["actor/kl_coef"] > 0


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_went_on_is_exported_as_it_ended(tmp_path: Path) -> None:
    """Also if it was ended between its last checkpoint and its export, when an export of an earlier end is there."""
    export = tmp_path / "export" / "model.safetensors"
    train(tmp_path, 1, "run.export=true")
    train(tmp_path, 2, "run.export=false")
    before = export.read_bytes()
    train(tmp_path, 2, "run.export=true")
    assert export.read_bytes() != before
    after = export.stat().st_mtime_ns
    train(tmp_path, 2, "run.export=true")
    assert export.stat().st_mtime_ns == after, "nothing to do, and nothing done"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.ppo_micro_batch_size_per_gpu=4", "size_per_gpu=4 does nothing without algorithm.use_dynamic_bsz=false"),
        ("run.max_shard_size=much", "run.max_shard_size='much' is no size; give one such as 5GB or 200MB"),
        ("run.keep_best=val/loss", "run.keep_best=val/loss does nothing without run.test_freq; leave it out"),
        ("run.export_freq=-1", "run.export_freq=-1: must be at least 0"),
        ("models.actor.optim.name=lion", "models.actor.optim.name='lion' is not known; allowed: adamw, adamw_8bit, muon"),
        ("sampling.allowed_token_ids=[0]", "leave no token to draw"),
        ("sampling.max_response_length=5", "sampling.max_response_length=5, but a row has min_response_length=7"),
    ],
)
def test_settings_that_cannot_be_or_would_do_nothing_are_refused(tmp_path: Path, override: str, message: str) -> None:
    """Also those by which a row's own minimum could not be drawn."""
    rows = [{"prompt": "12", "min_response_length": i} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.path={tmp_path / 'a.jsonl'}"] if override.startswith("sampling.") else []
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 2, *data, *override.split()), 1)


def test_a_start_is_recorded_and_a_run_ends_with_where_things_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 2, f"data.val_path={tasks.task() / 'train.jsonl'}", "run.test_freq=2", "run.export=true")
    places = [("report", "report.html"), ("export", "export"), ("checkpoint", "checkpoints/step_2")]
    assert capsys.readouterr().err.splitlines()[-3:] == [f"  {name:<20}{tmp_path / path}" for name, path in places]
    (start,) = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert (start["step"], start["ranks"]) == (0, "1")
    assert "torch " in start["versions"] and start["command"].startswith("torchrun ")
    times = [row["unix_s"] for row in metrics_of(tmp_path)]
    assert len(times) == 3 and sorted(times) == times


PEAK = 1e15  # FLOP/s, of no machine that runs this


def flops_of(row: dict[str, Any]) -> float:
    return float(row["perf/mfu"] * row["timing_s/step"] * PEAK)


def test_utilisation_counts_the_calls_that_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that only the trace made, as of a step whose update is skipped; and those that it did not foresee. While only the
    critic learns nothing of the actor's update is reported."""
    monkeypatch.setattr(recorder, "matmul_rate", lambda device, dtype, local_size: PEAK)
    spec = {role: read_spec(tasks.task() / role) for role in ("actor", "critic")}

    def passes(row: dict[str, Any], role: str, batches: float = 1) -> float:
        tokens = row["perf/tokens_per_s"] * row["timing_s/step"] / batches
        return forward_flops(spec[role], tokens, tokens / (tasks.PROMPTS * tasks.SAMPLES))

    train(tmp_path / "ppo", 2, "algorithm.critic_warmup=1")
    warm, later = metrics_of(tmp_path / "ppo")
    assert "critic/vf_loss" in warm and "actor/kl" in warm and "critic/loss" not in warm, "one name of one number"
    assert not {"actor/pg_loss", "timing_s/update_actor", "rollout/log_prob_diff_max"} & warm.keys()
    assert {"actor/pg_loss", "timing_s/update_actor"} <= later.keys() and later["rollout/log_prob_diff_max"] == 0.0
    for row, updates in ((warm, 0), (later, 1)):
        actor = 2 + 2 * 3 * updates  # generation and reference; two epochs, each forward and twice that backward
        assert flops_of(row) == pytest.approx(actor * passes(row, "actor") + 7 * passes(row, "critic"), rel=1e-6)

    train(tmp_path / "in_flight", 2, "rollout.in_flight=16", "models.actor.generation.max_num_seqs=8")
    for row in metrics_of(tmp_path / "in_flight"):  # one pass more: tokens are of older weights
        assert flops_of(row) == pytest.approx(9 * passes(row, "actor") + 7 * passes(row, "critic"), rel=1e-6)

    config = json.loads((tasks.task() / "ppo.json").read_text())
    del config["models"]["critic"], config["models"]["reference"]
    config["algorithm"] = {"name": "dapo", "ppo_mini_batch_size": 4, "overlong_buffer": {"enable": False}}
    config["algorithm"]["filter_groups"] = {"enable": True, "max_num_gen_batches": 6}
    (tmp_path / "dapo.json").write_text(json.dumps(config))
    train(tmp_path / "dapo", 2, "reward.function=tasks:coarse_share", config=tmp_path / "dapo.json")
    rounds = [(row, row["dapo/num_gen_batches"]) for row in metrics_of(tmp_path / "dapo")]
    assert max(generated for _, generated in rounds) > 1
    for row, generated in rounds:
        assert flops_of(row) == pytest.approx((generated + 3) * passes(row, "actor", generated), rel=1e-6)

    for learns in (False, True):
        config["algorithm"] = {"name": "outside.undecided", "ppo_mini_batch_size": 4, "learns": learns}
        (tmp_path / "config.json").write_text(json.dumps(config))
        train(tmp_path / str(learns), 1, config=tmp_path / "config.json")
        (row,) = metrics_of(tmp_path / str(learns))
        assert ("actor/grad_norm" in row) == learns
        assert flops_of(row) == pytest.approx((4 if learns else 1) * passes(row, "actor"), rel=1e-6)

    # what a rank measures that has to wait for its core
    monkeypatch.setattr(recorder, "matmul_rate", lambda device, dtype, local_size: 1.0)
    train(tmp_path / "slow", 1)
    assert [row["perf/mfu"] for row in metrics_of(tmp_path / "slow")] == [1.0], "no step uses more than all of the device"


def test_a_mean_is_over_tokens_not_over_replicas() -> None:
    """A tenth of a nat for each of 10 tokens here, none for 990 tokens there, and a rank without rows."""
    there = [log_prob_metrics(difference) for difference in (torch.full((10,), 0.1), torch.zeros(990), torch.empty(0))]
    extras = [{"extras": {"reward/extra/length": pair}} for pair in ([30.0, 10], [70.0, 990])]
    metrics, samples = merge_values([json.loads(json.dumps(there)), extras, [{"samples": [{"row_id": 3}]}]])
    assert metrics == pytest.approx(
        {"rollout/log_prob_diff_max": 0.1, "rollout/log_prob_diff_mean": 0.001, "reward/extra/length": 0.1}
    )
    assert samples == [{"row_id": 3}]
    parts = [{"r/mean": [3.0, 2], "r/std": [3.0, 2, 5.0], "r/failures": [1], "r/max": 2.0}, {"r/failures": [0]}]
    parts[1] |= {"r/mean": [4.0, 1], "r/std": [4.0, 1, 16.0], "r/max": 4.0}
    pooled = {"r/mean": 7 / 3, "r/std": statistics.pstdev([1, 2, 4]), "r/failures": 1.0, "r/max": 4.0}
    for calls in ([parts], [[part] for part in parts]):  # two members of a call, or two calls
        assert merge_values(calls)[0] == pytest.approx(pooled)
    assert merge_values([[{"a/mean": [0.0, 0]}, {"a/min": 2.0}, {"a/min": -1.0, "a/seconds": 1.0}, {"a/seconds": 2.0}]])[0] == {
        "a/mean": 0.0,
        "a/min": -1.0,
        "a/seconds": 1.5,
    }


def report_late(world: World) -> list[list[Any]]:
    """On rank 0 what each step received. The other rank goes on without waiting, sends late, and more each time."""
    controller, received = Controller(world.all), []
    for number in range(1, 5):
        if world.rank == 1:
            time.sleep(0.02 * (number % 2))
        controller.send_report([world.rank, number, "x" * 1000 * number])
        if world.rank == 0:
            time.sleep(0.03 * (number == 3))
            received.append([[rank, step, len(text)] for rank, step, text in controller.receive_reports()])
    controller.settle()
    world.all.barrier("control")
    return received


def test_a_source_of_rows_is_not_among_what_the_function_returns_besides() -> None:
    rows = [("", "", {"data_source": source}) for source in ("extra", "other")]
    worker: Any = SimpleNamespace(name="reward")
    values = list(RewardWorker._scores_by_source(worker, rows, torch.ones(2), torch.tensor([True, True])))
    assert values == [{"reward/data_source extra/mean": (1.0, 1)}, {"reward/other/mean": (1.0, 1)}]


def test_reports_of_a_step_are_received_in_that_step() -> None:
    received, none = run_ranks(2, report_late)
    assert none == [] and received == [[[rank, number, 1000 * number] for rank in (0, 1)] for number in range(1, 5)]


def test_an_algorithm_need_not_return_the_call_that_counts_tokens(tmp_path: Path) -> None:
    train(tmp_path, 1, "algorithm.name=outside.unreported")
    row = metrics_of(tmp_path)[0]
    assert row["actor/grad_norm"] > 0 and "critic/vf_loss" in row and row["timing_s/step"] > 0
    assert {key for key in row if key.startswith(("perf/", "response_length/"))} == set()


def test_paths_of_models_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tasks.task()))
    paths = [f"models.{role}.path=~/{role}" for role in ("actor", "critic", "reference")]
    ready = prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, *paths), 1)
    assert [ready.roles[role].config.path for role in ("actor", "critic")] == [
        str(tasks.task() / role) for role in ("actor", "critic")
    ]


VALIDATION = ["val_prompts.path=@", "reward.function=gsm8k", "run.test_freq=1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.test_freq=2"], r"^run\.test_freq=2: .* give data\.val_path or val_prompts\.path, or"),
        (["val_prompts.path=@", "val_prompts.shuffle=false"], r"^unknown key 'val_prompts\.shuffle'"),
        (["val_prompts.max_prompt_length=9"], r"^val_prompts\.path must be given"),
        (
            [*VALIDATION, "val_prompts.max_prompt_length=60"],
            r"max_response_length = 572 tokens, but models\.actor has a context of",
        ),
    ],
)
def test_sft_refuses_what_it_would_have_to_ignore(overrides: list[str], message: str) -> None:
    data = str(tasks.task() / "train.jsonl")
    common = [f"models.actor.path={tasks.task() / 'actor'}", f"data.path={data}", "data.response_key=prompt"]
    with pytest.raises(ValueError, match=message):
        prepare(None, [*common, *(text.replace("@", data) for text in overrides)], 1, "sft")


# -- limits of a row's own

LIMITS: list[dict[str, int]] = [{}, {"max_response_length": 3}, {"min_response_length": 9}, {"max_response_length": 5}]


def test_training_honours_limits_of_rows(tmp_path: Path) -> None:
    """Every fourth prompt has no limit, a minimum, one or another maximum; responses take several steps, on two ranks of tp."""
    rows = [json.loads(line) for line in (tasks.task() / "train.jsonl").read_text().splitlines()]
    rows = [{**row, **LIMITS[i % 4]} for i, row in enumerate(rows)]
    (tmp_path / "limited.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (
        *layout("actor", tp=2),
        *layout("generation", tp=2),
        "rollout.in_flight=16",
        "models.actor.generation.max_num_seqs=8",
    )
    tasks.train(2, tmp_path / "run", 3, f"data.path={tmp_path}/limited.jsonl", "sampling.logit_bias={0: 1.0}", *more)
    kinds = {row["prompt"]: i % 4 for i, row in enumerate(rows)}
    lengths: list[set[int]] = [set() for _ in LIMITS]  # of responses without the stop token
    for sample in map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()):
        lengths[kinds[sample["prompt"]]].add(len(sample["response"]))
        assert sample["finish_reason"] == ("stop" if len(sample["response"]) < sample["length"] else "length")
    assert max(lengths[1]) == 3 and max(lengths[3]) == 5 and max(lengths[0]) > 5
    assert min(lengths[2]) >= 9 and min(lengths[0]) < 9


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"max_response_length": 13}, r"a\.jsonl:2: max_response_length=13 must be at most data\.max_response_length=12"),
        ({"max_response_length": "3"}, r"a\.jsonl:2: max_response_length='3' must be a whole number of at least 1"),
        ({"min_response_length": 13}, r"a\.jsonl:2: min_response_length=13 must be at most data's max_response_length=12"),
        (
            {"max_response_length": 3, "min_response_length": 4},
            r"min_response_length=4 must be at most the row's max_response_length=3",
        ),
    ],
)
def test_limits_of_rows_are_checked(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "12"}, {"prompt": "34", **row}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(DataError, match=message):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, f"data.path={tmp_path / 'a.jsonl'}"), 1)


def broken(role: str, tensor: str) -> Callable[[Path], list[str]]:
    """A model with a number that is none."""

    def overrides(directory: Path) -> list[str]:
        copy = directory / role
        shutil.copytree(tasks.task() / role, copy)
        tensors = load_file(copy / "model.safetensors")
        tensors[f"model.{tensor}.weight"][5] = torch.nan
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return [f"models.{role}.path={copy}"]

    return overrides


def too_slow(directory: Path) -> list[str]:
    return ["data.train_batch_size=1", "algorithm.ppo_mini_batch_size=1", "reward.timeout_s=0.2"]


def too_large(directory: Path) -> list[str]:
    (directory / "ten.py").write_text("def ten(prompt, response, row):\n    return 10.0\n")
    return [f"reward.function={directory / 'ten.py'}:ten", "reward.weight=1e38"]


def too_fast(directory: Path) -> list[str]:
    return [*FAST, "models.actor.optim.lr=1e38"]


FAST = ["algorithm.ppo_mini_batch_size=8", "algorithm.ppo_epochs=1", "models.actor.optim.lr_warmup_steps=0"]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (too_slow, RewardError, r"^reward\.function 'tasks:even_share' failed in 2 of 2 calls of the first step; first"),
        (too_large, RewardError, r"^reward: the score of row \d+ is beyond float32; lower the weights, or what"),
        (broken("actor", "embed_tokens"), FloatingPointError, r"^row \d+: the log-prob of a drawn token is not finite"),
        # not the critic, whose update is the first that such numbers reach
        (
            broken("reference", "norm"),
            FloatingPointError,
            r"^row \d+: the result of reference is not finite; check the weights that",
        ),
        (
            broken("critic", "norm"),
            FloatingPointError,
            r"the result of critic is not finite; lower models\.critic\.optim\.lr=0\.001",
        ),
        (too_fast, FloatingPointError, r"^the weights of actor are not finite after .* lower models\.actor\.optim\.lr=1e\+38"),
    ],
)
def test_what_ends_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: Any, error: type[Exception], message: str
) -> None:
    if overrides is too_slow:
        monkeypatch.setenv("REWARD_DELAY", "60")
    with pytest.raises(error, match=message):
        train(tmp_path / "run", 1, *overrides(tmp_path))


@pytest.mark.long
def test_an_actor_that_learns_too_fast_is_named_where_generation_has_older_weights(tmp_path: Path) -> None:
    """There its weights give numbers that are none before the critic's gradients are not finite."""
    apart = ["placement.pools={train: [0], generate: [1]}", "models.actor.calls.generate_sequences.pool=generate"]
    apart += [f"models.{role}.pool=train" for role in ("actor", "critic", "reference", "reward")]
    more = ["rollout.max_staleness=1", "algorithm.kl_ctrl={type: fixed, target_kl: 0.1, horizon: 10000}"]
    more += [*FAST, "models.actor.optim.lr=1e20"]
    run_dir = tmp_path / "ahead"
    program = tasks.start_program(2, run_dir, tasks.settings(run_dir, 4, *apart, *more))
    assert tasks.finish(program, run_dir) == 6
    status = json.loads((run_dir / "exit_status.json").read_text())
    assert status["call"] == "actor.compute_log_prob" and "lower models.actor.optim.lr=1e+20" in status["message"], status


def test_mini_batches_are_shuffled_by_the_seed_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, seeds = Controller.settle, list[int]()

    def noting(self: Controller, spare: int = 0) -> None:
        seeds.extend(
            call_input.partition_spec.seed
            for call in self.graph.nodes
            if call.spec.kind == "train"
            for call_input in call.inputs
        )
        settle(self, spare)

    monkeypatch.setattr(Controller, "settle", noting)
    train(tmp_path, 1, "run.seed=3")
    assert seeds and set(seeds) == {3}


def test_a_step_that_does_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_spmd.algorithms import ppo

    for result, message in (
        (None, "step returned None; it must return the list of the calls"),
        ([1, 2], r"step returned \[1, 2\]; it must return the list of the calls that it reports"),
        (Reference(None), r"step returned one call; return \[it\]"),
        ([], "made no call in step 1"),
    ):
        monkeypatch.setattr(ppo, "step", lambda *args, result=result: result)
        with pytest.raises((ValueError, RuntimeError), match=message):
            train(tmp_path / str(result), 1)


FROZEN = "@dataclass(frozen=True)\nclass Config(PPOConfig):\n    "


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Config(PPOConfig):\n    ppo_epochs: int = 4\n", "put @dataclass(frozen=True) above Config"),
        (FROZEN + "ppo_epochs = 4\n", "give ppo_epochs a type"),
        (FROZEN + "lam: float = 0.9\n", "lam is a key of its field values: give it"),
        (FROZEN + "beta: 'Absent' = 0.3\n", "the types of its Config cannot be read: name 'Absent' is not defined"),
        (
            FROZEN + "def check(self, where):\n        assert self.vf_coef < 0, 'no'\n",
            "algorithm.Config raises AssertionError: no",
        ),
        (
            "class Base(PPOConfig):\n    x: float = 1\n\n" + FROZEN.replace("PPOConfig", "Base") + "pass\n",
            "put @dataclass(frozen=True) above Base",
        ),
        (
            "Config = PPOConfig\n\ndef step(models, data, config):\n    return []\n",
            "step must take (models, data, config, global_step)",
        ),
    ],
)
def test_settings_of_an_algorithm_s_own_are_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    name = f"own_{len(source)}"
    head = "from dataclasses import dataclass\nfrom rlhf_spmd.algorithms.ppo import Config as PPOConfig, step\n"
    (tmp_path / name).mkdir()
    (tmp_path / name / "algorithm.py").write_text(head + source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(str(tasks.task() / "ppo.json"), tasks.settings(tmp_path, 1, f"algorithm.name={name}.algorithm"), 1)


def test_what_an_own_step_raises_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a run, in its trace, and in a step that only runs; and a step without an update says so."""
    own = tmp_path / "mine.py"
    text = """from rlhf_spmd.algorithms import ppo
Config = ppo.Config


def step(models, data, config, number):
    calls = [models.actor.generate_sequences(data.prompts.next(), data.sampling, number)]
    check(models.controller.get(*calls)[0])
    return calls


def check(values):
    if WHEN:
        raise ValueError("not like this")
"""
    arguments = ["--config", str(tasks.task() / "ppo.json"), f"algorithm.name={own}"]
    for when, code in (("True", 2), ("values", 1)):
        own.write_text(text.replace("WHEN", when))
        sys.modules.pop(f"mine@{own}", None)
        with pytest.raises(SystemExit) as ending:
            main([*arguments, *tasks.settings(tmp_path / when, 1)])
        assert ending.value.code == code
        *_, line = lines = capsys.readouterr().err.splitlines()
        assert line.endswith(f"not like this (algorithm '{own}', {own}:13)"), line
    assert sum("makes no update: nothing is trained" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("models.refernce", r"there is no role 'refernce'; did you mean 'reference'\? this run has: actor, .*"),
        (
            "models.critic.compute_value(rows)",
            r"critic has no call 'compute_value'; did you mean 'compute_values'\? it has: .*",
        ),
        ("rows.prompt_ids", "a reference has no 'prompt_ids': it stands for rows that are still to be computed; .*apply.*"),
        ("models.reference.update(rows, Objective(print))", r".* trains reference \(mine\.py:6\), which does not learn; actor"),
    ],
)
def test_what_an_own_step_asks_for_that_there_is_not(tmp_path: Path, line: str, message: str) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from rlhf_spmd.algorithms import ppo\nfrom rlhf_spmd.workers.objective import Objective\nConfig = ppo.Config\n"
        "def step(models, data, config, number):\n"
        f"    rows, _ = ppo.sample(models, data, number)\n    {line}\n    return []\n"
    )
    overrides = tasks.settings(tmp_path, 1, f"algorithm.name={own}")
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        prepare(str(tasks.task() / "ppo.json"), overrides, 1, launch=Launch())
    assert classify(refused.value) == "config"


def test_updates_that_a_step_does_not_return_are_told(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from rlhf_spmd.algorithms import ppo\nConfig = ppo.Config\n\ndef step(models, data, config, number):\n"
        "    return ppo.step(models, data, config, number)[:-1]\n"
    )
    overrides = tasks.settings(tmp_path, 1, f"algorithm.name={own}")
    ready = prepare(str(tasks.task() / "ppo.json"), overrides, 1, launch=Launch())
    warnings = [warning for warning in ready.warnings if "is not among the calls that step returns" in warning]
    assert len(warnings) == 1 and re.match(r"actor\.update_actor \(ppo\.py:\d+\) is", warnings[0]), ready.warnings
