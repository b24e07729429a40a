"""Triton's kernels compiled for a Hopper GPU, which need not be there: registers, stack, shared memory, loads, instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

triton_products = pytest.importorskip("rlhf_spmd.kernels.triton_products")
pytestmark = pytest.mark.long


def compiled(cache: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """What tests/started/<program> prints of each kernel."""
    environment = os.environ | {"PYTHONPATH": "src", "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, f"tests/started/{program}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "count", "registers", "loads"),
    [
        (("head",), 12, 64, 2),  # four blocks share a multiprocessor
        (("experts",), 13, 64, 0),
        (("layers", "bf16"), 14, 128, 0),
        (("layers", "fp32"), 14, 128, 0),
        (("delta", "bf16"), 3, 255, 0),
        (("delta", "fp32"), 3, 255, 0),
    ],
    ids=str,
)
def test_nothing_spills(tmp_path: Path, arguments: tuple[str, ...], count: int, registers: int, loads: int) -> None:
    kernels = compiled(tmp_path, "compile_kernels.py", *arguments)
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel["registers"] <= registers and kernel["stack"] == 0 and kernel["shared"] <= 227 << 10, kernel
        assert kernel["loads"] >= max(loads, "_sum_rows" in kernel["name"]), kernel


@pytest.mark.parametrize(("capability", "kib"), [(80, 163), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_shared_memory_suffices(tmp_path: Path, capability: int, kib: int) -> None:
    """Of all GPUs that are supported, by CUDA's guide."""
    kernels = compiled(tmp_path, "compile_shared.py", str(capability), str(kib << 10))
    assert len(kernels) > 15
    assert all(kernel["shared"] <= kib << 10 for kernel in kernels), kernels


def test_exact_kernels_have_one_kind_of_instruction(tmp_path: Path) -> None:
    """Nothing spills. All products of half precision are chains of one kind of wgmma; attention of chunks has the tensor cores'
    instructions of single tokens, and scores laid out over as many warps along the keys."""
    kernels = compiled(tmp_path, "compile_exact.py")
    assert all(kernel["stack"] == 0 for kernel in kernels), kernels
    multiplying = [kernel for kernel in kernels if kernel["name"] == "product"]
    assert len(multiplying) == len(triton_products.HALF_TILES) + 1 + len(triton_products.WIDE_TILES)
    for kernel in multiplying:
        assert kernel["instructions"]["mma.sync"] == 0, kernel
        assert kernel["products"] == (["m64.k16.f32.bf16.bf16"] if kernel["dtype"] == "bf16" else []), kernel
    attending = [kernel for kernel in kernels if kernel["name"] == "attention"]
    for chunks, singles in zip(attending[::2], attending[1::2], strict=True):
        assert (chunks["form"], singles["form"]) == ("chunks", "singles") and chunks["heads"] == singles["heads"]
        assert chunks["layouts"] == singles["layouts"] and len(chunks["layouts"]) == (chunks["dtype"] == "bf16"), chunks
        assert chunks["instructions"]["wgmma"] == singles["instructions"]["wgmma"] == 0
