"""A method's calls on a pool and in a layout of their own: the same run, and only the weights that a rank lacks move."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tasks
from overrides import FP64
from ranks import run_ranks
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import missing_elements
from rlhf_spmd.workers import weight_sync
from role_workers import batch_of, build

ROLES = ("actor", "critic", "reference", "reward")


def call(name: str, pool: str = "", **layout: int) -> tuple[str, ...]:
    """Overrides; ``name`` is a role and a method, as in ``critic.compute_values``."""
    role, method = name.split(".")
    where = f"models.{role}.calls.{method}"
    return (*((f"{where}.pool={pool}",) if pool else ()), *(f"{where}.layout.{axis}={n}" for axis, n in layout.items()))


# on 4 ranks, on overlapping and disjoint pools
CALLS = (
    "placement.pools={train: [0, 1, 2], infer: [2, 3], first: [0, 1]}",
    "models.critic.pool=train",
    "models.critic.layout.zero=3",
    "models.reference.pool=first",
    "models.reference.offload=true",
    *call("actor.generate_sequences", "infer", tp=2),
    *call("critic.compute_values", "infer", tp=2),
    *call("actor.compute_log_prob", pp=2, vpp=2, tp=2),
    *call("reference.compute_ref_log_prob", "infer", dp=2, zero=3),
)


def test_the_same_run_in_fp64(tmp_path: Path) -> None:
    settings = (*FP64, "data.train_batch_size=4")
    reference = tasks.train(1, tmp_path / "one_rank", 2, *settings)
    run = tasks.train(4, tmp_path / "calls", 2, *settings, *CALLS)
    assert run.responses == reference.responses
    difference, where = tasks.worst_metric(reference, run, floor=1e-2)
    assert difference < 1e-10, where
    difference, where = tasks.worst_tensor(reference, run)
    assert difference < 1e-9, where
    assert run.log_prob_difference() < 1e-12
    assert all(row["reshard/bytes"] > 0 and row["timing_s/reallocate"] > 0 for row in run.raw)
    versions = [[row["generation/weights_version"] for row in each.raw] for each in (reference, run)]
    assert versions[0] == versions[1], "a replica generates with the weights of the last update too"


def test_rollouts_across_steps_and_a_resumed_run(tmp_path: Path) -> None:
    """The rows in flight lie where generation is: on a rank that trains nothing. The weights go there once a step, not once more to
    hand out what has ended."""
    partial = ("rollout.in_flight=16", "models.actor.generation.max_num_seqs=8", "run.save_freq=2", *FP64)
    apart = (
        "placement.pools={train: [0], generate: [1]}",
        *(f"models.{role}.pool=train" for role in ROLES),
        *call("actor.generate_sequences", "generate"),
    )
    config = str(tasks.task() / "ppo.json")
    reference = tasks.train(1, tmp_path / "one_rank", 3, *partial)
    run_ranks(2, tasks.train_here, config, tasks.settings(tmp_path / "apart", 3, *partial, *apart))
    run = tasks.read_run(tmp_path / "apart")
    assert run.responses == reference.responses
    difference, where = tasks.worst_metric(reference, run, floor=1e-2)
    assert difference < 1e-10, where
    weights = [tensor for (role, kind, _), tensor in run.weights.items() if (role, kind) == ("actor", "param")]
    assert {row["reshard/bytes"] for row in run.raw} == {sum(tensor.nbytes for tensor in weights)}
    resume = f"run.resume={tmp_path / 'apart' / 'checkpoints' / 'step_2'}"
    resumed = tasks.train(2, tmp_path / "resumed", 3, *partial, *apart, resume)
    assert resumed.responses == {key: ids for key, ids in run.responses.items() if key[0] > 2}
    assert resumed.metrics == run.metrics[2:]


def test_only_what_has_changed_travels_and_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """bf16, where a small learning rate leaves most elements as they are; also for a role that rests and ZeRO's padded rows."""
    settings = [*CALLS, "data.train_batch_size=4", *(f"models.{role}.dtype=bfloat16" for role in ROLES)]
    settings += [f"models.{role}.optim.{key}" for role in ("actor", "critic") for key in ("lr=1e-5", "lr_warmup_steps=0")]
    calls = sorted({setting.split(".layout.")[0] for setting in settings if ".calls." in setting and ".layout." in setting})
    full, delta = (
        tasks.train(4, tmp_path / name, 2, *settings, *more)
        for name, more in (("full", ()), ("delta", [f"{key}.delta=true" for key in calls]))
    )
    tasks.assert_bit_equal(full, delta)
    assert delta.raw[0]["reshard/bytes"] <= full.raw[0]["reshard/bytes"]
    assert delta.raw[-1]["reshard/bytes"] < 0.7 * full.raw[-1]["reshard/bytes"]


# -- one call at a time

LENGTHS = [(3, 5), (7, 2), (2, 9), (6, 6)]


def call_once(world: World, where: tuple[str, ...]) -> dict[str, Any]:
    controller, models = build(world, "models.critic.layout.tp=2", *where)
    critic = models.critic
    replica = critic.worker_of("compute_values")
    assert replica is not critic and critic.worker_of("update") is critic and replica.pool.name == "b"
    bytes_between_calls = stored(replica)
    with mock.patch.object(weight_sync, "transfer_steps", wraps=weight_sync.transfer_steps) as planned:
        for _ in range(2):
            before = RECORDER.received["weight_sync"]
            controller.run(lambda batch: critic.compute_values(batch), controller.source(batch_of(LENGTHS)))
            received = RECORDER.received["weight_sync"] - before
            bytes_between_calls += stored(replica)
    assert bytes_between_calls == 0, "a replica keeps weights between calls"
    lacking = 0
    if replica.member:
        home = critic.engine.param_shards() if critic.member else {}
        lacking = missing_elements(home, replica.engine.param_shards()) * 4
        assert lacking > 0 and replica.engine.optimizer is None
        assert not any(tensor.requires_grad for tensor in replica.engine.parameters().values())
    assert received == lacking
    return {"plans": planned.call_count, "at home": stored(critic) > 0}


def stored(worker: Any) -> int:
    """Bytes of the parameters' storages on this rank."""
    tensors = worker.engine.local_tensors().values() if worker.member else ()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("pool", ["[0, 1]", "[1, 2]", "[2, 3]"])
def test_a_call_receives_what_it_lacks_and_leaves_nothing(pool: str) -> None:
    """A plan's steps are made once for all calls."""
    pools = f"placement.pools={{a: [0, 1], b: {pool}, all: [0, 1, 2, 3]}}"
    where = (pools, "models.critic.pool=a", *call("critic.compute_values", "b", dp=2))
    where += tuple(f"models.{role}.pool=all" for role in ("actor", "reference", "reward"))
    expected = [{"plans": int(rank < 2 or str(rank) in pool), "at home": rank < 2} for rank in range(4)]
    assert run_ranks(4, call_once, where) == expected
