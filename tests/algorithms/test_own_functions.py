"""Estimators and policy losses of the user's own: what they are given, what they report, what they may not return."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_config import flat_config
from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.estimators import estimated_advantages
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Rows, Totals

LENGTHS = torch.tensor([3, 1, 2, 4])
GROUPS = torch.tensor([7, 7, 2, 2])
ROWS = Rows(torch.arange(4), GROUPS, LENGTHS)
FIELDS = {"scores": torch.tensor([1.0, 0.0, 0.5, math.nan], dtype=torch.float64)}

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """The path of a file with this text."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text("import torch\n" + textwrap.dedent(text))
        return str(path)

    return write


def estimated(name: str) -> tuple[Tensor, dict[str, float]]:
    config = flat_config(grpo.Config, adv_estimator=name, use_kl_loss=False)
    check_tree(config, "algorithm")
    made, metrics = estimated_advantages(config, 2)(FIELDS, ROWS, GlobalReduce(lambda x: x, lambda x: x, {}))
    field: Any = made["advantages"]
    return field.values, metrics


def test_an_estimator_gives_a_number_for_each_row_or_each_token(write: Write) -> None:
    file = write("""
        def estimate(rewards, group_ids, lengths):
            assert rewards.shape == group_ids.shape == lengths.shape and rewards.isnan().tolist() == [False] * 3 + [True]
            return rewards * 2

        def by_token(lengths, config, other=1):
            assert config.adv_estimator.endswith("mine.py:by_token")
            return torch.arange(int(lengths.sum())).double()
    """)
    by_row, metrics = estimated(file)
    assert by_row.tolist() == [2.0] * 3 + [0.0] + [1.0] * 2 + [0.0] * 4, "the row without a score has 0"
    assert metrics["critic/advantages/max"] == 2.0 and metrics["actor/zero_advantage_fraction"] == 0.5
    by_token, _ = estimated(f"{file}:by_token")
    assert by_token.tolist() == [0.0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert metrics.keys() == estimated("grpo")[1].keys(), "whoever computes them, the same is told"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(rewards): return rewards[:3]", r"mine.py' returned a tensor of shape \[3\]; .* each row \[4\] .* \[10\]$"),
        ("(rewards): return rewards.tolist()", r"mine.py' returned a list; it must return a tensor"),
        ("(rewards): return rewards / 0", r"mine.py' returned inf for a row of group 7, whose reward is 1;"),
        ("(rewards, tokens): return rewards", r"mine.py' takes 'tokens', for which .* may be rewards, group_ids, "),
        ("s(rewards): return rewards", r"has no function 'estimate'; did you mean 'estimates'"),
        ("(rewards, /): return rewards", r"takes rewards by position alone"),
    ],
)
def test_what_an_estimator_may_not_do_is_one_line(write: Write, body: str, message: str) -> None:
    with pytest.raises((ValueError, FloatingPointError), match=message) as raised:
        estimated(write(f"def estimate{body}"))
    assert "algorithm.adv_estimator" in str(raised.value) and "\n" not in str(raised.value)


def test_what_an_estimator_raises_is_told_with_its_line(write: Write) -> None:
    with pytest.raises(KeyError) as raised:
        estimated(write("def estimate(rewards):\n    raise KeyError('no')"))
    (note,) = raised.value.__notes__
    assert note.startswith("algorithm.adv_estimator '") and note.endswith("mine.py:3")


def lost(name: str, **more: Any) -> tuple[float, Tensor, dict[str, float]]:
    config = flat_config(PolicyConfig, loss_mode=name, **more)
    check_tree(config, "algorithm")
    drawn = torch.randn(10, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.3
    log_probs = (drawn - 1).requires_grad_()
    fields = {"log_probs": log_probs, "old_log_probs": drawn.flip(0) - 1, "entropy": drawn, "advantages": drawn * 2}
    objective = clipped_policy(config, SamplingConfig(max_response_length=5))
    loss, metrics = objective.loss(fields, ROWS, Totals(10, 4))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return float(loss.detach()), gradient, {key: float(value) for key, value in metrics.items()}


PPO = """
    def loss(log_prob, old_log_prob, advantages, config):
        ratio = (log_prob - old_log_prob).exp()
        low, high = config.clip_range
        free, bound = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
        ceiling = torch.where(advantages < 0, -advantages * config.clip_ratio_c, torch.inf)
        single = torch.maximum(free, bound)
        metrics = {"clipped": bound > free, "dual_clipped": single > ceiling, "my/ratio": ratio.detach()}
        return torch.minimum(single, ceiling), metrics
"""


def test_a_loss_of_one_s_own_reports_what_the_built_in_ones_do(write: Write) -> None:
    file, settings = (
        write(PPO + "\n    def other(log_prob, advantages):\n        return -advantages * log_prob\n"),
        {"clip_ratio": 0.1, "loss_agg_mode": "seq-mean-token-sum", "entropy_coeff": 0.1},
    )
    (loss, gradient, metrics), (builtin_loss, builtin_gradient, builtin_metrics) = (
        lost(file, **settings),
        lost("vanilla", **settings),
    )
    assert loss == pytest.approx(builtin_loss, rel=1e-12) and torch.allclose(gradient, builtin_gradient, rtol=1e-12)
    assert metrics.pop("my/ratio") > 0 and metrics == pytest.approx(builtin_metrics)
    assert lost(f"{file}:other")[2].keys() == lost("sapo")[2].keys(), "of a loss that clips nothing"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(log_prob): return log_prob.sum()", r"returned a tensor of shape \[\]; it must return the loss of each .* \[10\]"),
        ("(log_prob): return (log_prob, log_prob, {})", r"returned a tuple; it must return the loss of each"),
        ("(log_prob): return log_prob.detach()", r"returned a loss without gradients"),
        ("(log_prob): return log_prob * torch.nan", r"returned a loss that is not finite, and its arguments are"),
        ("(log_prob): return log_prob, {'share': log_prob}", r"the statistic 'share'; allowed: clipped, dual_clipped, and"),
        ("(log_prob): return log_prob, {'a/b': 3.0}", r"statistic 'a/b', returned a float; it must return a tensor \[10\]"),
        ("(log_prob): return log_prob, 3.0", r"returned float beside its loss"),
        ("(log_prob, ref): return log_prob", r"takes 'ref', for which .* may be log_prob, old_log_prob, advantages, "),
    ],
)
def test_what_a_loss_may_not_do_is_one_line(write: Write, body: str, message: str) -> None:
    with pytest.raises((ValueError, FloatingPointError), match=message) as raised:
        lost(write(f"def loss{body}"))
    assert "algorithm.loss_mode" in str(raised.value) and "mine.py" in str(raised.value)
