"""The same numbers as verl's and TRL's own code, where those packages are installed (they are not needed to build or run).

Neither package is imported: both pull in much that a test machine lacks. The few functions of interest are taken from the
installed files and run alone.
"""

import ast
import collections
import importlib.metadata
import math
import types
from pathlib import Path
from typing import get_args

import pytest
import torch

from rlhf_spmd.algorithms.estimators import ESTIMATORS, WHITENED, GroupAdvantageConfig
from rlhf_spmd.algorithms.policy import LOSS_MODES, PolicyLossConfig
from rlhf_spmd.objectives import advantages as adv
from rlhf_spmd.objectives import kl, losses
from rlhf_spmd.objectives.rollout_correction import RejectionKind, RolloutCorrectionConfig, correction_weights

LENGTHS = torch.tensor([5, 1, 9, 3, 12, 7])
ROWS, WIDTH, TOTAL = len(LENGTHS), int(LENGTHS.max()), int(LENGTHS.sum())
MASK = (torch.arange(WIDTH)[None] < LENGTHS[:, None]).double()


def functions_of(package: str, file: str, names: list[str], **namespace: object) -> types.SimpleNamespace:
    """The named functions and classes of an installed file, without their decorators and the rest of the module."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if not path.exists():
        pytest.skip(f"this version of {package} has no {file}")
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in names]
    if {node.name for node in found} != set(names):
        pytest.skip(f"this version of {package} has not all of {names}")
    for node in found:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, object] = {"torch": torch, **namespace}
    exec(compile(ast.Module(body=[*future, *found], type_ignores=[]), str(path), "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


GROUP_IDS = torch.tensor([8, 3, 8, 3, 3, 8])
RATIO_LOSSES = ("gspo", "geo_mean", "cispo", "sapo")
GROUPED = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")


class Settings(dict):
    """verl's config objects answer to attributes and to ``get``."""

    __getattr__ = dict.__getitem__


@pytest.fixture(scope="module")
def verl():
    import numpy

    masked = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
    tools = functions_of("verl", "verl/utils/torch_functional.py", masked)
    names = ["agg_loss", "compute_policy_loss_vanilla", "compute_value_loss", "compute_gae_advantage_return", "kl_penalty"]
    names += ["kl_penalty_forward", "AdaptiveKLController", *(f"compute_policy_loss_{mode}" for mode in RATIO_LOSSES)]
    names += [f"compute_{name}_outcome_advantage" for name in (*GROUPED, "reinforce_plus_plus")]
    types_ = {"AlgoConfig": type(None), "ActorConfig": Settings, "defaultdict": collections.defaultdict}
    return functions_of("verl", "verl/trainer/ppo/core_algos.py", names, verl_F=tools, np=numpy, **types_)


def draw(seed: int, spread: float = 1.0) -> torch.Tensor:
    """Padded [rows, width] with arbitrary numbers in the padding, which must not matter."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def pack(x: torch.Tensor) -> torch.Tensor:
    return x[MASK.bool()]


def test_verl_advantages(verl):
    rewards, values = draw(0), draw(1)
    theirs, their_returns = verl.compute_gae_advantage_return(rewards, values, MASK, 0.98, 0.9)
    advantages, returns = adv.gae(pack(rewards), pack(values), LENGTHS, 0.98, 0.9)
    torch.testing.assert_close(returns, pack(their_returns), rtol=0, atol=1e-12)
    # verl adds 1e-8 to the count under its mean and variance, hence not to the last digit.
    torch.testing.assert_close(adv.whiten(advantages, adv.moments(advantages)), pack(theirs), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", [*kl.KL_KINDS, "k1+", "k3+"])
def test_verl_kl(verl, kind):
    ours, theirs = draw(2, 2.0).requires_grad_(), draw(2, 2.0).requires_grad_()
    reference = draw(3, 2.0)
    a, b = kl.kl_penalty(ours, reference, kind), verl.kl_penalty(theirs, reference, kind)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_verl_kl_controller(verl):
    theirs = verl.AdaptiveKLController(0.02, 0.3, 5000)
    ours, coefficient = kl.KLControlConfig("adaptive", 0.02, 0.3, 5000), 0.02
    for current in (0.1, 0.31, 2.0, 0.0, 0.29):
        theirs.update(current, 256)
        coefficient = ours.moved(coefficient, current, 256)
        assert coefficient == pytest.approx(theirs.value, rel=1e-14)


@pytest.mark.parametrize("mode", losses.LOSS_AGG_MODES)
def test_verl_policy_loss(verl, mode):
    theirs = (draw(4) + draw(5, 0.8)).requires_grad_()
    ours = pack(theirs).detach().requires_grad_()
    old, advantages = draw(4), draw(6)
    config = Settings(clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.28, clip_ratio_c=1.8, global_batch_info={})
    their_loss, stats = verl.compute_policy_loss_vanilla(old, theirs, advantages, MASK, mode, config)
    tokens, masks = losses.policy_loss(ours, pack(old), pack(advantages), 0.15, 0.28, 1.8)
    loss = losses.aggregate(tokens, LENGTHS, mode, TOTAL, ROWS, max_length=WIDTH)
    torch.testing.assert_close(loss, their_loss, rtol=1e-7, atol=1e-7)
    loss.backward()
    their_loss.backward()
    torch.testing.assert_close(ours.grad, pack(theirs.grad), rtol=1e-7, atol=1e-9)
    assert float(masks["clipped"].double().mean()) == pytest.approx(stats["actor/pg_clipfrac"], rel=1e-6)
    assert float(masks["dual_clipped"].double().mean()) == pytest.approx(stats["actor/pg_clipfrac_lower"], rel=1e-6)
    assert float(masks["ppo_kl"].mean()) == pytest.approx(stats["actor/ppo_kl"], rel=1e-6)


def test_verl_value_loss(verl):
    theirs = (draw(7) + draw(8, 0.5)).requires_grad_()
    ours = pack(theirs).detach().requires_grad_()
    old, returns = draw(7), draw(9)
    their_loss, share = verl.compute_value_loss(theirs, returns, old, MASK, 0.3)
    tokens, clipped = losses.value_loss(ours, pack(old), pack(returns), 0.3)
    loss = losses.aggregate(tokens, LENGTHS, "token-mean", TOTAL, ROWS)
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=1e-12)
    loss.backward()
    their_loss.backward()
    torch.testing.assert_close(ours.grad, pack(theirs.grad), rtol=1e-12, atol=1e-12)
    assert float(clipped.double().mean()) == pytest.approx(float(share), rel=1e-6)


@pytest.mark.parametrize("mode", RATIO_LOSSES)
def test_verl_ratio_losses(verl, mode):
    """One advantage for a row, both signs; gspo, geo_mean and sapo are means over rows of the row's mean."""
    theirs = (draw(4) + draw(5, 0.6)).requires_grad_()
    ours = pack(theirs).detach().requires_grad_()
    old = draw(4)
    advantages = draw(6)[:, :1].expand(ROWS, WIDTH)
    agg = "token-mean" if mode == "cispo" else "seq-mean-token-mean"
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.28}
    settings = Settings(**clips, tau_pos=1.0, tau_neg=1.05, global_batch_info={})
    their_loss, _ = getattr(verl, f"compute_policy_loss_{mode}")(old, theirs, advantages, MASK, agg, settings)
    knobs = {} if mode == "sapo" else clips
    config = PolicyLossConfig(loss_mode=mode, loss_agg_mode=agg, **knobs)
    tokens, _ = LOSS_MODES[mode].loss(config, ours, pack(old), pack(advantages), LENGTHS)
    loss = losses.aggregate(tokens, LENGTHS, agg, TOTAL, ROWS)
    torch.testing.assert_close(loss, their_loss, rtol=1e-7, atol=1e-8)
    loss.backward()
    their_loss.backward()
    torch.testing.assert_close(ours.grad, pack(theirs.grad), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", GROUPED)
def test_verl_estimators(verl, name):
    scores, lengths = draw(11)[:, 0], LENGTHS
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    rewards[torch.arange(ROWS), lengths - 1] = scores
    theirs, _ = getattr(verl, f"compute_{name}_outcome_advantage")(rewards, MASK, GROUP_IDS.numpy())
    ours = torch.repeat_interleave(ESTIMATORS[name](GroupAdvantageConfig(), scores, GROUP_IDS, lengths), lengths)
    if name in WHITENED:
        ours = adv.whiten(ours, adv.moments(ours))
    torch.testing.assert_close(ours, pack(theirs), rtol=1e-6, atol=1e-6)  # verl computes some of it in float32


def test_verl_reinforce_plus_plus(verl):
    rewards = draw(12) * MASK
    theirs, their_returns = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, MASK, Settings(gamma=0.97))
    returns, _ = adv.gae(pack(rewards), torch.zeros(TOTAL, dtype=torch.float64), LENGTHS, 0.97, 1.0)
    torch.testing.assert_close(returns, pack(their_returns), rtol=0, atol=1e-12)
    torch.testing.assert_close(adv.whiten(returns, adv.moments(returns)), pack(theirs), rtol=1e-7, atol=1e-7)


@pytest.fixture(scope="module")
def verl_correction():
    import typing

    tools = functions_of("verl", "verl/utils/torch_functional.py", ["masked_sum", "masked_mean"])
    names = ["compute_rollout_correction_weights", "compute_is_metrics", "compute_rollout_rejection_mask", "compute_rs_metrics"]
    names += ["_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds"]
    kinds = get_args(RejectionKind)
    known = {"TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": set(kinds[:3]), "SUPPORTED_ROLLOUT_RS_OPTIONS": set(kinds)}
    known |= {"verl_F": tools, "SAFETY_BOUND": 20.0, "math": math, "Optional": typing.Optional, "Any": typing.Any}
    return functions_of("verl", "verl/trainer/ppo/rollout_corr_helper.py", names, **known)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_rollout_weights(verl_correction, level):
    log_ratio = draw(13, 0.3)
    theirs, _ = verl_correction.compute_rollout_correction_weights(log_ratio, MASK, level, 1.2)
    ours, _ = correction_weights(RolloutCorrectionConfig(level, 1.2), pack(log_ratio), torch.zeros(TOTAL), LENGTHS)
    torch.testing.assert_close(ours, pack(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", get_args(RejectionKind))
def test_verl_rollout_rejection(verl_correction, kind):
    """Bounds of the ratio that are each other's reciprocals: verl's are of the ratio's inverse."""
    log_ratio = draw(13, 0.3)
    upper = {"token_k1": 1.2, "seq_mean_k1": 1.05, "seq_sum_k1": 2.2}.get(kind, 0.3 if "sum" in kind else 0.04)
    theirs, _ = verl_correction.compute_rollout_rejection_mask(log_ratio, MASK, kind, upper)
    config = RolloutCorrectionConfig(rollout_rs=kind, rollout_rs_threshold=upper)
    ours, _ = correction_weights(config, pack(log_ratio), torch.zeros(TOTAL), LENGTHS)
    assert torch.equal(ours, pack(theirs.double())) and 0 < float(ours.sum()) < TOTAL


def test_trl_whitening():
    trl = functions_of("trl", "trl/core.py", ["masked_mean", "masked_var", "masked_whiten"], Optional=object)
    x = draw(10)
    theirs = pack(trl.masked_whiten(x, MASK))
    torch.testing.assert_close(adv.whiten(pack(x), adv.moments(pack(x))), theirs, rtol=1e-7, atol=1e-7)
