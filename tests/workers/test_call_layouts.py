"""A method's calls on a pool and in a layout of their own: the same run, and only the weights that a rank lacks move."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tasks
from ranks import run_ranks
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import missing_elements
from rlhf_spmd.workers import weight_sync
from role_workers import build

STEPS = 2
FP64 = tuple(f"models.{role}.dtype=float64" for role in ("actor", "critic", "reference", "reward"))


def call(name: str, pool: str = "", **layout: int) -> tuple[str, ...]:
    """Overrides; ``name`` is a role and a method, as in ``critic.compute_values``."""
    role, method = name.split(".")
    where = f"models.{role}.calls.{method}"
    return (*((f"{where}.pool={pool}",) if pool else ()), *(f"{where}.layout.{axis}={n}" for axis, n in layout.items()))


# name -> overrides, on 4 ranks
CALLS: dict[str, tuple[str, ...]] = {
    "inference in other layouts, on overlapping and disjoint pools": (
        "placement.pools={train: [0, 1, 2], infer: [2, 3], first: [0, 1]}",
        "models.critic.pool=train",
        "models.critic.layout.zero=3",
        "models.reference.pool=first",
        "models.reference.offload=true",
        *call("critic.compute_values", "infer", tp=2),
        *call("actor.compute_log_prob", pp=2, vpp=2, tp=2),
        *call("reference.compute_ref_log_prob", "infer", dp=2, zero=3),
    ),
    "generation on ranks of its own": (
        "placement.pools={train: [0, 1], generate: [2, 3]}",
        *(f"models.{role}.pool=train" for role in ("actor", "critic", "reference", "reward")),
        "models.actor.layout.pp=2",
        *call("actor.generate_sequences", "generate", tp=2),
        *call("critic.compute_values", "generate", pp=2),
    ),
    "one rank trains, all generate": (
        "placement.pools={train: [0, 1], last: [3], all: [0, 1, 2, 3]}",
        *(f"models.{role}.pool=train" for role in ("critic", "reference", "reward")),
        "models.actor.pool=last",
        *call("actor.generate_sequences", "all", tp=2),
        *call("actor.compute_log_prob", "all", pp=4),
    ),
}


def train(ranks: int, run_dir: Path, *more: str, steps: int = STEPS) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, steps, *more))
    return tasks.read_run(run_dir)


@functools.cache
def run(directory: Path, name: str, precision: str) -> tasks.Run:
    run_dir = directory / f"{precision}_{sorted(CALLS).index(name) if name else 'one_rank'}"
    return train(4 if name else 1, run_dir, *(CALLS[name] if name else ()), *(FP64 if precision == "fp64" else ()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.mark.parametrize("name", CALLS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    one, other = run(directory, "", "fp64"), run(directory, name, "fp64")
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor
    assert other.log_prob_difference() < 1e-12
    assert all(row["reshard/bytes"] > 0 and row["timing_s/reallocate"] > 0 for row in other.raw)
    versions = [[row["generation/weights_version"] for row in some.raw] for some in (one, other)]
    assert versions[0] == versions[1], "a replica generates with the weights of the last update too"


def test_the_same_run_in_fp32(directory: Path) -> None:
    name = "generation on ranks of its own"
    one, other = run(directory, "", "fp32"), run(directory, name, "fp32")
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    assert difference < 1e-4, where


def test_rollouts_across_steps_and_a_resumed_run(directory: Path) -> None:
    """The rows in flight lie where generation is: on ranks that train nothing. The weights go there once a step, not once more to
    hand out what has ended."""
    partial = ("data.gen_batch_size=16", "models.actor.generation.max_num_seqs=8", "run.save_freq=2", *FP64)
    apart = CALLS["generation on ranks of its own"]
    one = train(1, directory / "partial_one", *partial, steps=4)
    other = train(4, directory / "partial_apart", *partial, *apart, steps=4)
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    assert difference < 1e-10, where
    whole_steps = run(directory, "generation on ranks of its own", "fp64")
    assert {row["reshard/bytes"] for row in other.raw} == {row["reshard/bytes"] for row in whole_steps.raw}
    checkpoint = directory / "partial_apart" / "checkpoints" / "step_2"
    resumed = train(4, directory / "partial_resumed", *partial, *apart, f"run.resume={checkpoint}", steps=4)
    assert resumed.responses == {key: ids for key, ids in other.responses.items() if key[0] > 2}
    assert resumed.metrics == other.metrics[2:]


def test_only_what_has_changed_travels_and_the_run_is_the_same_bit_for_bit(directory: Path) -> None:
    """bf16, where a small learning rate leaves most elements as they are; also for a role that rests and ZeRO's padded rows."""
    more = [f"models.{role}.dtype=bfloat16" for role in ("actor", "critic", "reference", "reward")]
    more += [f"models.{role}.optim.{key}" for role in ("actor", "critic") for key in ("lr=1e-5", "lr_warmup_steps=0")]
    for number, (name, where) in enumerate(list(CALLS.items())[:2]):
        runs, keys = (
            [],
            sorted({setting.split(".layout.")[0] for setting in where if ".calls." in setting and ".layout." in setting}),
        )
        for kind, setting in (("full", ()), ("delta", tuple(f"{key}.delta=true" for key in keys))):
            runs.append(train(4, directory / f"{kind}{number}", *more, *where, *setting, steps=3))
        tasks.assert_bit_equal(*runs)
        full, delta = ([row["reshard/bytes"] for row in some.raw] for some in runs)
        print(f"{name}: full {full}, delta {delta}")
        assert delta[0] <= full[0] and delta[-1] < 0.7 * full[-1]


# -- one call at a time


def rows() -> Batch:
    lengths = [(3, 5), (7, 2), (2, 9), (6, 6)]
    prompts, responses = ([torch.arange(n) + 3 for n in side] for side in zip(*lengths, strict=True))
    ids = torch.arange(len(lengths))
    return Batch(ids, ids, {"prompt_ids": ragged(prompts, torch.int64), "response_ids": ragged(responses, torch.int64)})


def call_once(world: World, where: tuple[str, ...]) -> dict[str, Any]:
    controller, models = build(world, "models.critic.layout.tp=2", *where)
    critic = models.critic
    replica = critic.worker_of("compute_values")
    assert replica is not critic and critic.worker_of("update") is critic and replica.pool.name == "b"
    found: dict[str, Any] = {"empty": stored(replica)}
    with mock.patch.object(weight_sync, "transfer_steps", wraps=weight_sync.transfer_steps) as made:
        for _ in range(2):
            before = RECORDER.received["weight_sync"]
            controller.run(lambda batch: critic.compute_values(batch), controller.source(rows()))
            found["received"] = RECORDER.received["weight_sync"] - before
            found["empty"] += stored(replica)
    found["planned"] = made.call_count
    if replica.member:
        home = critic.engine.param_shards() if critic.member else {}
        found["lacked"] = missing_elements(home, replica.engine.param_shards()) * 4
        found["optimizer"] = replica.engine.optimizer
        found["gradients"] = sum(tensor.requires_grad for tensor in replica.engine.parameters().values())
    found["home"] = stored(critic)
    return found


def stored(worker: Any) -> int:
    """Bytes of the parameters' storages on this rank."""
    tensors = worker.engine.local_tensors().values() if worker.member else ()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("pool", ["[0, 1]", "[1, 2]", "[2, 3]"])
def test_a_call_receives_what_it_lacks_and_leaves_nothing(pool: str) -> None:
    placement = f"placement.pools={{a: [0, 1], b: {pool}, all: [0, 1, 2, 3]}}"
    where = (
        "models.critic.pool=a",
        "models.critic.calls.compute_values.pool=b",
        "models.actor.pool=all",
        "models.reward.pool=all",
    )
    where += ("models.critic.calls.compute_values.layout.dp=2", "models.reference.pool=all")
    for rank, found in enumerate(run_ranks(4, call_once, (placement, *where))):
        assert found["empty"] == 0, "a replica keeps weights between calls"
        assert (found["home"] > 0) == (rank < 2), "the home keeps its own"
        assert found["received"] == found.get("lacked", 0)
        assert found["planned"] == (rank < 2 or str(rank) in pool), "a plan's steps are made once for all calls"
        if "lacked" in found:
            assert found["lacked"] > 0 and found["optimizer"] is None and not found["gradients"]


def weights_at_rest(world: World) -> tuple[int, int, bool]:
    controller, models = build(world, "models.reference.offload=true", "models.reference.layout.zero=3")
    sizes, held = [stored(models.reference)], models.reference.owned.between_calls()
    versions = [tensor._version for tensor in held.values()]
    for _ in range(2):
        controller.run(lambda batch: models.reference.compute_ref_log_prob(batch), controller.source(rows()))
        sizes.append(stored(models.reference))
    return sum(sizes), stored(models.critic), versions == [tensor._version for tensor in held.values()]


def test_a_role_that_rests_in_host_memory_holds_nothing_between_calls() -> None:
    """And what no call has changed is not copied to the host again."""
    for resting, other, untouched in run_ranks(2, weights_at_rest):
        assert resting == 0 and other > 0 and untouched
