"""One token of linear attention in Triton, against float64 computed head by head from the definition."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import DeltaShape, MixerWeights, StateRows
from rlhf_spmd.kernels.gpu_ops import GpuOps
from triton_device import DEVICE

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    DeltaShape(2, 4, 32, 32, 4),
    DeltaShape(3, 3, 5, 7, 4),
    DeltaShape(2, 6, 24, 16, 2),
    DeltaShape(4, 8, 12, 20, 3, 2),
    DeltaShape(1, 2, 128, 128, 4),
]
EPS = 1e-5


class Parts(NamedTuple):
    """What the first product gives for one row and token, whole: by key head, or by value head."""

    q: Tensor  # [H, K]
    k: Tensor
    v: Tensor  # [G, D]
    gate: Tensor
    rate: Tensor  # [G]
    decay: Tensor


def in_blocks(parts: Parts, blocks: int) -> Tensor:
    """One after the other, block by block."""
    return torch.cat([part.chunk(blocks)[i].flatten() for i in range(blocks) for part in parts])


def definition(tokens: list[Parts], weights: list[Tensor], shape: DeltaShape) -> Tensor:
    """What each token gives [S, value heads, D], in float64 from zeros. ``weights``: of the convolutions of q, k and v [heads, dim,
    kernel]; decay, bias and norm."""
    (*convs, log_rate, bias, norm), group = [w.double() for w in weights], shape.values // shape.keys
    memory = torch.zeros(shape.values, shape.key_dim, shape.value_dim, dtype=torch.float64)
    outs = []
    for t, token in enumerate(tokens):
        mixed = []
        for i, conv in enumerate(convs):
            total = sum(tokens[t - back][i].double() * conv[..., -1 - back] for back in range(min(shape.kernel, t + 1)))
            assert isinstance(total, Tensor)
            mixed.append(total / (1 + (-total).exp()))
        q, k, v = mixed
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        rows = []
        for head in range(shape.values):
            key, query = k[head // group], q[head // group] / shape.key_dim**0.5
            step = (token.decay[head].double() + bias[head]).exp().log1p()
            memory[head] *= (-log_rate[head].exp() * step).exp()
            rate = 1 / (1 + (-token.rate[head].double()).exp())
            memory[head] += torch.outer(key, rate * (v[head] - key @ memory[head]))
            out = query @ memory[head]
            out = out / (out.square().mean() + EPS).sqrt() * norm
            gate = token.gate[head].double()
            rows.append(out * gate / (1 + (-gate).exp()))
        outs.append(torch.stack(rows))
    return torch.stack(outs)


def drawn(shape: DeltaShape, dtype: torch.dtype, rows: int, length: int) -> tuple[list[list[Parts]], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    of_keys, of_values = (shape.keys, shape.key_dim), (shape.values, shape.value_dim)
    sizes = of_keys, of_keys, of_values, of_values, (shape.values,), (shape.values,)
    tokens = [[Parts(*(draw(*size) for size in sizes)) for _ in range(length)] for _ in range(rows)]
    convs = [draw(*size, shape.kernel) for size in sizes[:3]]
    return tokens, [*convs, draw(shape.values), draw(shape.values), 1 + draw(shape.value_dim) / 4]


def on_device(conv: Tensor, decay: Tensor, bias: Tensor, norm: Tensor) -> MixerWeights:
    return MixerWeights(conv.to(DEVICE), decay.to(DEVICE), bias.to(DEVICE), norm.to(DEVICE), EPS)


@pytest.mark.parametrize(("shape", "dtype"), [(shape, DTYPES[number % 2]) for number, shape in enumerate(SHAPES)], ids=str)
def test_a_token_equals_float64(shape: DeltaShape, dtype: torch.dtype) -> None:
    """Three rows, one of which begins later, and a copy of the first, in slots that held anything; other slots are not touched."""
    length, rows, ops = 6, 3, GpuOps()
    tokens, weights = drawn(shape, dtype, rows, length)
    convs, (log_rate, bias, norm) = weights[:3], weights[3:]
    blocked = [
        conv.chunk(shape.fused_slices)[i].reshape(-1, 1, shape.kernel) for i in range(shape.fused_slices) for conv in convs
    ]
    given = on_device(torch.cat(blocked), log_rate, bias, norm)
    heads = shape.keys, shape.values // shape.keys
    inputs = torch.full((5, shape.kernel - 1, shape.channels), torch.nan, dtype=dtype, device=DEVICE)
    memory = torch.full((5, *heads, shape.key_dim, shape.value_dim), torch.nan, device=DEVICE)
    found: list[list[Tensor]] = [[] for _ in range(rows)]
    for t in range(length):
        begins = [0, 0, 2]
        here = [row for row in range(rows) if t >= begins[row]]
        product = torch.stack([in_blocks(tokens[row][t - begins[row]], shape.fused_slices) for row in here])
        product = torch.cat([product, product[:1]]).to(DEVICE)  # padding
        slots = torch.tensor([[4, 1, 2][row] for row in here] + [-1], device=DEVICE)
        positions = torch.tensor([t - begins[row] for row in here] + [t], device=DEVICE)
        out = ops.delta_rule_step(product, given, shape, StateRows(inputs, memory, slots, positions))
        assert (
            out.shape == (len(here) + 1, shape.values, shape.value_dim) and out.dtype == dtype and torch.equal(out[-1], out[0])
        )
        for row, one in zip(here, out, strict=False):
            found[row].append(one.cpu().double())
    assert inputs[[0, 3]].isnan().all() and memory[[0, 3]].isnan().all()
    unit = 2e-6 if dtype == torch.float32 else 2**-7
    for row, outs in enumerate(found):
        wanted = definition(tokens[row][: len(outs)], weights, shape)
        errors = (torch.stack(outs) - wanted).abs() / wanted.abs().amax(-1, keepdim=True)
        # the norm enlarges the errors of heads whose query finds little
        assert errors.mean() < unit / 2 and errors.max() < 16 * unit, f"off by {errors.max() / unit:.2f} units"


def test_small_steps_are_not_lost() -> None:
    """A step of exp(-15), where 1 + exp(x) has lost the digits of x, makes the state smaller by about 1e-4."""
    shape = DeltaShape(1, 1, 4, 4, 2)
    row = torch.zeros(1, shape.channels + 6, device=DEVICE)
    row[0, -2:] = torch.tensor([-80.0, -15.0])  # nothing is written
    parts = torch.zeros(shape.channels, 1, 2), torch.tensor([6.0]), torch.zeros(1), torch.ones(4)
    given, memory = on_device(*parts), torch.ones(1, 1, 1, 4, 4, device=DEVICE)
    inputs, zero = torch.zeros(1, 1, shape.channels, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    GpuOps().delta_rule_step(row, given, shape, StateRows(inputs, memory, zero, zero + 5))
    exact = -math.expm1(-math.exp(6) * math.log1p(math.exp(-15)))
    assert (1 - memory.double() - exact).abs().max() < 0.002 * exact
