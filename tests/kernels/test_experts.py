"""A mixture of experts as GPUs compute it, against float64, by torch's grouped products on CPUs and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from launches import counted_launches
from rlhf_spmd.kernels import Ops, triton_experts
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.models.experts import MixtureWeights, apply_experts, mix_experts
from rlhf_spmd.models.layer_kinds import BY_EXPERT, SCORE_BIAS, Experts
from triton_device import DEVICE
from wide_products import wide_products_on_cpus

HIDDEN, WIDTH, COUNT = 24, 16, 7


@pytest.fixture(autouse=True)
def wide_products() -> Iterator[None]:
    with wide_products_on_cpus():
        yield


def draw(tokens: int, blocks: int, hidden: int = HIDDEN, per_token: int = 2) -> list[Tensor]:
    """x, router, gate_up, down; some experts get no rows, of which one is the first and one the last. Rounding changes no route."""
    generator = torch.Generator().manual_seed(tokens + blocks)
    shapes = (20 * tokens, hidden), (COUNT, hidden), (COUNT * 2 * WIDTH, hidden), (COUNT * hidden, WIDTH)
    x, router, entry, down = (torch.randn(shape, generator=generator) * 0.5 for shape in shapes)
    x, router = x.abs(), router.abs()
    router[[0, 3, COUNT - 1]] = -1.0  # every token likes these least
    x, router, entry, down = (part.bfloat16() for part in (x, router, entry, down))
    ranked = (x.double() @ router.double().t()).sort(1, descending=True).values
    clear = (ranked[:, per_token - 1] - ranked[:, per_token] > 0.1).nonzero()[:tokens, 0]
    assert len(clear) == tokens
    return [x[clear], router, entry, down]


def mix(ops: Ops, parts: Sequence[Tensor], experts: Experts, blocks: int = 1) -> Tensor:
    x, *weights = parts
    return mix_experts(ops, x, MixtureWeights(*weights), experts, False, blocks)


@pytest.mark.parametrize(
    ("blocks", "per_token", "normalise", "tokens"), [(1, 1, False, 1), (2, 3, True, 33), (1, 4, False, 33), (2, 4, False, 2)]
)
def test_outputs_and_gradients_equal_float64(blocks: int, per_token: int, normalise: bool, tokens: int) -> None:
    parts, experts = draw(tokens, blocks, per_token=per_token), Experts(COUNT, per_token, WIDTH, normalise)
    weight = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for ops, dtype in ((Ops(), torch.float64), (GpuOps(), torch.bfloat16)):
        inputs = [part.to(DEVICE, dtype).requires_grad_() for part in parts]
        out = mix(ops, inputs, experts, blocks)
        results.append([out, *torch.autograd.grad(out, inputs, weight.to(DEVICE, dtype))])
    names = ("output", "x", "router", "gate_up", "down")
    for name, want, got in zip(names, *results, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == want.shape
        assert not want.any() or (got.double() - want).norm() < 0.02 * want.norm(), name
    idle = results[1][4].view(COUNT, -1)[[0, 3, COUNT - 1]]
    assert not idle.any(), "experts without rows have gradients"


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, HIDDEN), (torch.bfloat16, 20)], ids=str)
def test_what_grouped_products_do_not_take_is_a_loop(dtype: torch.dtype, hidden: int) -> None:
    parts, experts = [part.to(DEVICE, dtype) for part in draw(9, 1, hidden)], Experts(COUNT, 2, WIDTH, True)
    found, plain = (mix(ops, parts, experts) for ops in (GpuOps(), Ops()))
    assert not triton_experts.fits_grouped_product(parts[0], parts[3].view(COUNT, 1, hidden, -1))
    torch.testing.assert_close(found, plain, atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)


def test_gradients_of_idle_experts_are_cleared_whatever_was_there() -> None:
    ends = torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32, device=DEVICE)
    out = torch.full((5, 3, 701), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    triton_experts.clear_idle(ends, out)
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, False, True, False]
    assert not out[[0, 2, 4]].any()


LAYERS = {
    "Qwen3-30B-A3B": (2048, Experts(128, 8, 768, True)),
    "GLM-4.5-Air": (
        4096,
        Experts(128, 8, 1408, True, (), "sigmoid", 1.0, score_biased=True, shared_size=1408, wide_router=True),
    ),
    "gpt-oss-20b": (
        2880,
        Experts(32, 4, 2880, False, scoring="chosen", has_biases=True, clamp=(1.702, 7.0), files_are_transposed=True),
    ),
    "DeepSeek-V3": (
        7168,
        Experts(256, 8, 2048, True, (), "sigmoid", 2.5, 8, 4, score_biased=True, shared_size=2048, wide_router=True),
    ),
    "Qwen1.5-MoE-A2.7B": (2048, Experts(60, 4, 1408, False, shared_size=5632, shared_gate=True)),
}


@pytest.mark.parametrize(
    ("tokens", "trains", "tp", "most"),
    [(256, False, 1, 20), (4096, True, 1, 60), (256, False, 4, 20)],
    ids=["decoded", "trained", "whole"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_launches_of_a_layer(name: str, tokens: int, trains: bool, tp: int, most: int) -> None:
    """The host waits for none of them. Whole experts on ranks of ``tp``: what a rank computes has one shape, wherever tokens go."""
    hidden, experts = LAYERS[name]
    options = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": trains}
    weights = {}
    for key, (rows, *columns) in shapes_of(experts, hidden).items():
        weights[key] = torch.empty(rows // tp if key in BY_EXPERT else rows, *columns, **options)
    weights = {key: tensor.detach() if key == SCORE_BIAS else tensor for key, tensor in weights.items()}
    x, first = torch.empty(tokens, hidden, **options), {} if tp == 1 else {"first": experts.num_experts // tp}
    with counted_launches(run=False) as work, torch.set_grad_enabled(trains):
        out = mix_experts(GpuOps(), x, MixtureWeights(**weights), experts, False, 1, **first)
        if trains:
            leaves = [tensor for tensor in (x, *weights.values()) if tensor.requires_grad]
            torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert not work.waits and most / 3 < len(work.names) <= most, work.names


def shapes_of(experts: Experts, hidden: int) -> dict[str, tuple[int, ...]]:
    count, width, shared = experts.num_experts, experts.intermediate_size, experts.shared_size
    shapes = {"router": (count, hidden), "gate_up": (count * 2 * width, hidden), "down": (count * hidden, width)}
    shapes |= {
        "score_bias": (count, 3),
        "router_bias": (count,),
        "gate_up_bias": (count * 2 * width,),
        "down_bias": (count * hidden,),
        "shared_gate_up": (2 * shared, hidden),
        "shared_down": (hidden, shared),
        "shared_gate": (1, hidden),
    }
    return {name: shapes[name] for name in experts.matrices}


@pytest.mark.parametrize(("dtype", "clamp"), [(torch.bfloat16, (1.7, 7.0)), (torch.float32, None)])
def test_experts_that_nobody_chose(dtype: torch.dtype, clamp: tuple[float, float] | None) -> None:
    """Ranks that share experts may get no rows: gradients of their weights are 0."""
    experts = Experts(COUNT, 2, WIDTH, True, clamp=clamp, has_biases=clamp is not None)
    for ops in (Ops(), GpuOps()):
        shapes = {"gate_up": (COUNT * 2 * WIDTH, HIDDEN), "down": (COUNT * HIDDEN, WIDTH)}
        shapes |= {"gate_up_bias": (COUNT * 2 * WIDTH,), "down_bias": (COUNT * HIDDEN,)} if clamp else {}
        weights = {name: torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for name, shape in shapes.items()}
        rows = torch.zeros(0, HIDDEN, device=DEVICE, dtype=dtype, requires_grad=True)
        numbers = torch.zeros(0, device=DEVICE, dtype=torch.int64)
        held = MixtureWeights(router=torch.zeros(COUNT, HIDDEN), **weights)
        out = apply_experts(ops, rows, numbers, held, experts, False, 1)
        out.sum().backward()
        assert out.shape == (0, HIDDEN) and rows.grad is not None
        assert all(weight.grad is not None and not weight.grad.any() for weight in weights.values())


@pytest.mark.parametrize(("tokens", "clamp"), [(1, None), (33, (1.7, 7.0))])
def test_whole_experts_of_several_ranks_add_up(tokens: int, clamp: tuple[float, float] | None) -> None:
    """Seven ranks compute one expert each, some without any row; their sum is that of one rank in float64, and none reads what it
    did not compute."""
    experts = Experts(COUNT, 3, WIDTH, True, has_biases=clamp is not None, clamp=clamp)
    x, *parts = (part.double() for part in draw(tokens, 1, per_token=3))
    whole = dict(zip(("router", "gate_up", "down"), parts, strict=True))
    if clamp:
        sizes = {"gate_up_bias": COUNT * 2 * WIDTH, "down_bias": COUNT * HIDDEN}
        whole |= {name: torch.linspace(-1, 1, size).bfloat16().double() for name, size in sizes.items()}
        whole["router_bias"] = torch.zeros(COUNT, dtype=torch.float64)
    want = mix_experts(Ops(), x, MixtureWeights(**whole), experts, False, 1)
    for ops, dtype in ((Ops(), torch.float64), (GpuOps(), torch.bfloat16), (GpuOps(), torch.float32)):
        total = torch.zeros_like(want)
        for first in range(COUNT):
            own = {name: tensor.tensor_split(COUNT)[first] if name in BY_EXPERT else tensor for name, tensor in whole.items()}
            held = MixtureWeights(**{name: tensor.to(DEVICE, dtype) for name, tensor in own.items()})
            with torch.no_grad():
                total += mix_experts(ops, x.to(DEVICE, dtype), held, experts, False, 1, first=first).to(total)
        assert (total - want).norm() <= {8: 1e-12, 4: 1e-6, 2: 2e-2}[dtype.itemsize] * want.norm(), (ops, dtype)


def test_rows_of_other_ranks_are_not_read() -> None:
    weights = torch.tensor([[0.5, 0.0], [0.0, 0.0]], device=DEVICE)
    rows = torch.tensor([[2.0], [torch.nan], [torch.inf], [torch.nan]], device=DEVICE)
    assert triton_experts.sum_rows(rows, torch.arange(4, device=DEVICE), 2, weights).tolist() == [[1.0], [0.0]]
