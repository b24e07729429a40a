"""PPO is the same run with every way to gather weights, buffer policy and generation layout, and says what its transitions cost."""

import functools
from pathlib import Path

import pytest

import tasks
from tiers import tiers

STEPS = 2
TP2_DP2 = ("models.actor.layout.tp=2", "models.actor.layout.dp=2")
ZERO3 = ("models.actor.layout.dp=4", "models.actor.layout.zero=3")


def generation(**settings: object) -> tuple[str, ...]:
    return tuple(f"models.actor.generation.{key}={value}" for key, value in settings.items())


RUNS: dict[str, tuple[str, ...]] = {
    "zero_redundancy": TP2_DP2,
    "zero3 -> pp2 tp2, offload": (*ZERO3, *generation(pp=2, tp=2, buffers="offload")),
    "zero3 -> tp1": ZERO3,
    "naive_groups, keep": (*TP2_DP2, *generation(reshard_method="naive_groups", buffers="keep")),
    "full_gather, offload": (*TP2_DP2, *generation(reshard_method="full_gather", buffers="offload")),
    "zero3 -> tp2": (*ZERO3, *generation(tp=2)),
    "full_gather of zero3 -> tp2": (*ZERO3, *generation(tp=2, reshard_method="full_gather")),
}
SHORT = list(RUNS)[:3]


@functools.cache
def run(directory: Path, name: str) -> tasks.Run:
    run_dir = directory / str(list(RUNS).index(name))
    return tasks.train(4, run_dir, STEPS, *RUNS[name], "models.actor.dtype=float64")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


@pytest.mark.parametrize("name", tiers(RUNS, SHORT))
def test_the_same_responses(directory: Path, name: str) -> None:
    first, other = run(directory, SHORT[0]), run(directory, name)
    assert other.responses == first.responses and len(first.responses) == STEPS * tasks.PROMPTS * tasks.SAMPLES
    difference, where = tasks.worst_tensor(first, other)
    assert difference < 1e-9, where
    assert other.log_prob_difference() < 1e-12
    assert [row["generation/weights_version"] for row in other.raw] == list(range(STEPS)), (
        "each step generates with the last update"
    )


def test_what_it_costs(directory: Path) -> None:
    """The actor's weights in float64; 37 tokens and the norms keep the formulas from being exact here."""
    weights = run(directory, SHORT[0]).weights.items()
    size = sum(8 * tensor.numel() for (role, kind, _), tensor in weights if (role, kind) == ("actor", "param"))
    last_rows = {name: run(directory, name).raw[-1] for name in SHORT}
    received = {name: row["reshard/bytes"] / size for name, row in last_rows.items()}
    peak = {name: row["reshard/peak_bytes"] / size for name, row in last_rows.items()}
    assert received["zero_redundancy"] == pytest.approx(1 / 2, rel=0.02)
    assert received["zero3 -> tp1"] == pytest.approx(3 / 4, rel=0.02)
    assert received["zero3 -> pp2 tp2, offload"] < 1 / 4
    assert 1 <= peak["zero_redundancy"] < 1.4 and peak["zero3 -> pp2 tp2, offload"] < 2
