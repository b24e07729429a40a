"""PPO is the same run with every way to gather weights, buffer policy and generation layout, and says what its transitions cost."""

import functools
from pathlib import Path

import pytest

import tasks
from ranks import run_ranks

STEPS = 2
TP2_DP2 = ("models.actor.layout.tp=2", "models.actor.layout.dp=2")
ZERO3 = ("models.actor.layout.dp=4", "models.actor.layout.zero=3")


def generation(**settings: object) -> tuple[str, ...]:
    return tuple(f"models.actor.generation.{key}={value}" for key, value in settings.items())


RUNS: dict[str, tuple[str, ...]] = {
    "zero_redundancy": TP2_DP2,
    "full_gather, offload": (*TP2_DP2, *generation(reshard_method="full_gather", buffers="offload")),
    "naive_groups, keep": (*TP2_DP2, *generation(reshard_method="naive_groups", buffers="keep")),
    "overlap": (*TP2_DP2, *generation(overlap="true")),
    "zero3 -> tp2, rows move": (*ZERO3, *generation(tp=2, rebalance_steps=2)),
    "zero3 -> pp2 tp2, offload": (*ZERO3, *generation(pp=2, tp=2, buffers="offload")),
    "zero3 -> tp1, rows move, overlap": (*ZERO3, *generation(rebalance_steps=2, overlap="true")),
    "full_gather of zero3 -> tp2": (*ZERO3, *generation(tp=2, reshard_method="full_gather")),
}


@functools.cache
def run(directory: Path, name: str) -> tasks.Run:
    run_dir = directory / str(list(RUNS).index(name))
    more = (*RUNS[name], "models.actor.dtype=float64")
    run_ranks(4, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, STEPS, *more))
    return tasks.read_run(run_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


@pytest.mark.parametrize("name", RUNS)
def test_the_same_responses(directory: Path, name: str) -> None:
    one, other = run(directory, "zero_redundancy"), run(directory, name)
    assert other.responses == one.responses and len(one.responses) == STEPS * tasks.PROMPTS * tasks.SAMPLES
    difference, where = tasks.worst_tensor(one, other)
    assert difference < 1e-9, where
    assert other.log_prob_difference() < 1e-12
    assert [row["generation/weights_version"] for row in other.raw] == list(range(STEPS)), (
        "each step generates with the last update"
    )


def test_what_it_costs(directory: Path) -> None:
    """The actor's weights in float64; 37 tokens and the norms keep the formulas from being exact here."""
    size = sum(
        8 * tensor.numel()
        for (role, kind, _), tensor in run(directory, "zero_redundancy").weights.items()
        if (role, kind) == ("actor", "param")
    )
    received = {name: run(directory, name).raw[-1]["reshard/bytes"] / size for name in RUNS}
    peak = {name: run(directory, name).raw[-1]["reshard/peak_bytes"] / size for name in RUNS}
    assert received["zero_redundancy"] == received["overlap"] == pytest.approx(1 / 2, rel=0.02)
    assert received["naive_groups, keep"] == pytest.approx(1 / 2, rel=0.02)
    assert received["full_gather, offload"] == pytest.approx(3 / 4, rel=0.02)
    assert received["zero3 -> tp1, rows move, overlap"] == pytest.approx(3 / 4, rel=0.02)
    assert received["zero3 -> tp2, rows move"] < 1 / 2 and received["zero3 -> pp2 tp2, offload"] < 1 / 4
    assert 1 <= peak["zero_redundancy"] < 1.4 and peak["naive_groups, keep"] > 2 > peak["zero3 -> pp2 tp2, offload"]
