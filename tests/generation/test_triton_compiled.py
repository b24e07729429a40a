"""The kernels of attention and of draws, compiled for a Hopper GPU, which need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

pytestmark = pytest.mark.long


def output_of(cache: Path, script: str, *arguments: str) -> list[str]:
    """The lines that a script of ``tests/started`` prints."""
    environment = os.environ | {"PYTHONPATH": "src", "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, f"tests/started/{script}.py", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()


# the most registers of a thread that Triton 3.6 and its ptxas gave for sm_90
@pytest.mark.parametrize(
    ("script", "dtype", "registers"),
    [("triton", "bf16", 255), ("triton", "fp32", 111), ("latent", "bf16", 255), ("latent", "fp32", 107)],
)
def test_attention(script: str, dtype: str, registers: int, tmp_path: Path) -> None:
    """Nothing spills, at DeepSeek's sizes neither, a multiprocessor's registers and shared memory hold a program, and keys arrive while
    others are computed. Chunks take Hopper's products of warp groups. Multiplications and additions are fused in the matrix products
    alone: elsewhere both forms must round alike."""
    kernels = [json.loads(line) for line in output_of(tmp_path, f"compile_{script}", dtype)]
    assert len(kernels) > 4
    for kernel in kernels:
        name, counts, attends = kernel["name"], kernel["instructions"], kernel["name"].startswith("attend")
        assert kernel["stack"] == 0 and kernel["registers"] <= (registers if attends else 64), kernel
        assert kernel["registers"] * kernel.get("threads", 0) <= 1 << 16 and kernel["shared"] <= 227 << 10, kernel
        assert not attends or counts["cp.async"] > 0, kernel
        if dtype == "bf16" and attends:
            product = "wgmma" if script == "triton" and "chunks" in name and "wide" not in name else "mma.sync"
            assert counts[product] > 0, kernel
        if script == "triton":
            assert counts["fma"] == (kernel["products"] if dtype == "fp32" else 0), kernel


def test_draws(tmp_path: Path) -> None:
    """Without spills, with few enough registers, and with no addition fused with a multiplication, so that weights round alike."""
    rows = [line.split() for line in output_of(tmp_path, "compile_draw")]
    names = ["_sum_tiles", "_sum_tiles", "_pick", "_count_weights", "_gather_candidates", "_pick_filtered"]
    assert [row[0] for row in rows] == names
    for name, registers, stack, shared, fused in rows:
        assert int(registers) <= 128 and int(stack) == 0 and int(shared) <= 32 << 10 and int(fused) == 0, name
