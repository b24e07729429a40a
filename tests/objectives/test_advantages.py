"""Arithmetic as a script gives it: PPO's advantages against the formulas as loops over rows and tokens, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_config import flat_config, with_knobs
from ragged_samples import LENGTHS, flat, naive_gae, rows_of, sample
from ranks import run_ranks
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import gae_advantages
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Rows

GAMMA, LAM, COEF = 0.9, 0.8, 0.3
PLAIN = flat_config(PPOConfig, gamma=GAMMA, lam=LAM, kl_ctrl=KLControlConfig(kl_coef=COEF))
ADAPTIVE = with_knobs(PLAIN, kl_ctrl=KLControlConfig("adaptive", COEF, target_kl=0.1, horizon=100))
WITHOUT = with_knobs(PLAIN, use_kl_in_reward=False)
TOKENS = ("values", "old_log_probs", "ref_log_prob")


def whole_fields() -> dict[str, Tensor]:
    return {name: sample(seed, sum(LENGTHS)) for seed, name in enumerate(TOKENS)} | {"scores": sample(3, len(LENGTHS))}


def rows_at(positions: list[int], mask: Ragged | None = None) -> Rows:
    at = torch.tensor(positions, dtype=torch.int64)
    return Rows(at, at // 2, torch.tensor([LENGTHS[i] for i in positions], dtype=torch.int64), mask)


def alone(state: dict[str, Any]) -> GlobalReduce:
    return GlobalReduce(lambda x: x, lambda x: x, state)


def expected(config: PPOConfig, coefficient: float) -> tuple[list[Tensor], dict[str, float]]:
    """Advantages and returns, and the metrics besides the coefficient."""
    fields = whole_fields()
    values, old, ref = (rows_of(fields[name], LENGTHS) for name in TOKENS)
    kl = [
        [a - b if config.kl.uses_reference else 0.0 for a, b in zip(one, other, strict=True)]
        for one, other in zip(old, ref, strict=True)
    ]
    rewards = [[-coefficient * x if config.kl.use_kl_in_reward else 0.0 for x in row] for row in kl]
    for row, score in zip(rewards, fields["scores"].tolist(), strict=True):
        row[-1] += score
    raw = flat(naive_gae(rewards, values, GAMMA, LAM))
    returns = raw + fields["values"]
    whitened = (raw - raw.mean()) * torch.rsqrt(raw.var(correction=1) + 1e-8)
    ends = {"critic/advantages": whitened, "critic/returns": returns}
    return [whitened, returns], {
        "reward/token_level_sum": sum(map(sum, rewards)) / len(rewards),
        "actor/kl": float(flat(kl).mean()),
        "actor/kl_per_row": sum(sum(row) / len(row) for row in kl) / len(kl),
        "critic/advantage_mean": float(raw.mean()),
        "critic/returns/mean": float(returns.mean()),
        **{f"{name}/max": float(x.max()) for name, x in ends.items()},
        **{f"{name}/min": float(x.min()) for name, x in ends.items()},
        "critic/explained_variance": float(1 - (returns - fields["values"]).var() / returns.var()),
    }


def computed(config: PPOConfig, state: dict[str, Any]) -> tuple[list[Tensor], dict[str, float]]:
    fields = whole_fields()
    if not config.kl.uses_reference:
        del fields["old_log_probs"], fields["ref_log_prob"]  # what the script does not read
    made, metrics = gae_advantages(config)(fields, rows_at(list(range(len(LENGTHS)))), alone(state))
    return [made[name].values for name in ("advantages", "returns")], metrics


@pytest.mark.parametrize(
    "config",
    [PLAIN, WITHOUT, with_knobs(WITHOUT, use_kl_loss=True)],
    ids=["KL in the reward", "no reference", "KL in the loss only"],
)
def test_advantages_are_gae_of_score_minus_kl(config: PPOConfig) -> None:
    state: dict[str, Any] = {}
    found, metrics = computed(config, state)
    wanted, told = expected(config, COEF)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)
    assert metrics == pytest.approx(told | {"actor/kl_coef": COEF}, rel=1e-9, abs=1e-12)
    assert state == {}, "a coefficient that does not move is the configuration's"


def test_an_adaptive_coefficient_moves_on_the_mean_over_rows_and_goes_on_from_the_state() -> None:
    state: dict[str, Any] = {"best": 3.0}  # another function's, which stays
    coefficient = COEF
    for _ in range(3):
        wanted, told = expected(ADAPTIVE, coefficient)
        error = min(max(told["actor/kl_per_row"] / 0.1 - 1, -0.2), 0.2)
        coefficient *= 1 + error * len(LENGTHS) / 100
        found, metrics = computed(ADAPTIVE, state)
        assert torch.allclose(found[0], wanted[0], rtol=1e-9, atol=1e-10), (
            "the step's own advantages use the coefficient before"
        )
        assert metrics["actor/kl_coef"] == pytest.approx(coefficient, rel=1e-12)
        assert state == {"best": 3.0, "kl_coef": metrics["actor/kl_coef"]}
    assert coefficient != COEF
    unmoved: dict[str, Any] = {}
    computed(with_knobs(ADAPTIVE, use_kl_in_reward=False, use_kl_loss=True), unmoved)
    assert unmoved == {"kl_coef": COEF}, "a KL that is in the loss only does not move it"


def test_tokens_of_an_environment_get_zeros() -> None:
    """Every row with one more token in front, which the model did not draw."""
    longer = torch.tensor([n + 1 for n in LENGTHS])
    starts = longer.cumsum(0) - longer
    mask = torch.ones(int(longer.sum()), dtype=torch.bool)
    mask[starts] = False
    rows = rows_at(list(range(len(LENGTHS))), Ragged(mask, longer))
    made, _ = gae_advantages(PLAIN)(whole_fields(), rows, alone({}))
    for name, wanted in zip(("advantages", "returns"), expected(PLAIN, COEF)[0], strict=True):
        field = made[name]
        assert isinstance(field, Ragged) and torch.equal(field.lengths, longer)
        assert torch.allclose(field.values[mask], wanted, rtol=1e-9, atol=1e-10) and not field.values[~mask].any()


def on_part(world: World, parts: list[list[int]]) -> tuple[list[int], list[Tensor], dict[str, float], dict[str, Any]]:
    mine, state = parts[world.rank], {}  # type: list[int], dict[str, Any]
    fields = {
        name: torch.cat([torch.empty(0, dtype=x.dtype), *(pick(x)[i] for i in mine)]) for name, x in whole_fields().items()
    }
    if not mine:
        fields = dict.fromkeys(fields, torch.empty(0))  # as arithmetic gives them to a rank without rows
    sums: Callable[[Tensor], Tensor] = lambda x: world.all.all_reduce(x, "control")  # noqa: E731
    largest: Callable[[Tensor], Tensor] = lambda x: world.all.all_reduce(x, "control", "max")  # noqa: E731
    made, metrics = gae_advantages(ADAPTIVE)(fields, rows_at(mine), GlobalReduce(sums, largest, state))
    return mine, [made[name].values for name in ("advantages", "returns")], metrics, state


def pick(x: Tensor) -> list[Tensor]:
    """By row, of a field per token or per row."""
    return list(x.split(LENGTHS) if len(x) == sum(LENGTHS) else x.split(1))


@pytest.mark.parametrize("parts", [[[0, 3, 4, 7], [1, 2, 5, 6]], [list(range(len(LENGTHS))), []]], ids=["halves", "none"])
def test_two_ranks_compute_what_one_does(parts: list[list[int]]) -> None:
    state: dict[str, Any] = {}
    whole, metrics = computed(ADAPTIVE, state)
    for mine, found, told, their_state in run_ranks(2, on_part, parts):
        assert told == pytest.approx(metrics, rel=1e-9) and their_state == pytest.approx(state, rel=1e-9)
        for one, other in zip(found, whole, strict=True):
            rows = [pick(other)[i] for i in mine]
            assert torch.allclose(one.double(), torch.cat([torch.empty(0, dtype=torch.float64), *rows]), rtol=1e-9, atol=1e-10)
