"""The same numbers as verl's and TRL's own code, where those packages are installed (they are not needed to build or run).

Neither package is imported: both pull in much that a test machine lacks. The few functions of interest are taken from the
installed files and run alone.
"""

import ast
import importlib.metadata
import types
from pathlib import Path

import pytest
import torch

from rlhf_spmd.objectives import advantages as adv
from rlhf_spmd.objectives import kl, losses

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


class Settings(dict):
    """verl's config objects answer to attributes and to ``get``."""

    __getattr__ = dict.__getitem__


@pytest.fixture(scope="module")
def verl():
    import numpy

    masked = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
    tools = functions_of("verl", "verl/utils/torch_functional.py", masked)
    names = ["agg_loss", "compute_policy_loss_vanilla", "compute_value_loss", "compute_gae_advantage_return", "kl_penalty"]
    names += ["kl_penalty_forward", "AdaptiveKLController"]
    return functions_of("verl", "verl/trainer/ppo/core_algos.py", names, verl_F=tools, np=numpy, AlgoConfig=type(None))


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
    ours = kl.AdaptiveKLController(0.02, 0.3, 5000)
    for current in (0.1, 0.31, 2.0, 0.0, 0.29):
        theirs.update(current, 256)
        ours.update(current, 256)
        assert ours.value == pytest.approx(theirs.value, rel=1e-14)


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


def test_trl_whitening():
    trl = functions_of("trl", "trl/core.py", ["masked_mean", "masked_var", "masked_whiten"], Optional=object)
    x = draw(10)
    theirs = pack(trl.masked_whiten(x, MASK))
    torch.testing.assert_close(adv.whiten(pack(x), adv.moments(pack(x))), theirs, rtol=1e-7, atol=1e-7)
