"""Who asks what a device is, and which arithmetic a model gets for it."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from places import ROOT
from rlhf_spmd.kernels import CppOps, Ops, capabilities, choose_ops, dispatch, model_device
from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps

KINDS = re.compile(r"device\.type|\.is_cuda|cuda\.is_available")
ALLOWED = {
    "parallel/device_setup.py",  # sets the device of a rank up
    "parallel/world.py",  # chooses the backend for it
    "parallel/mesh.py",  # names it to torch
    "checkpoint/files.py",  # asserts where bytes lie
    "preflight/banner.py",  # prints it
    "training/recorder.py",  # notes it of a start
}


def test_kinds_of_devices_are_told_apart_in_one_place() -> None:
    source = ROOT / "src" / "rlhf_spmd"
    asking = {str(path.relative_to(source)) for path in source.rglob("*.py") if KINDS.search(path.read_text())}
    assert {name for name in asking if not name.startswith("kernels/")} <= ALLOWED


def test_models_name_no_device_and_no_kernel() -> None:
    for path in sorted((ROOT / "src" / "rlhf_spmd" / "models").glob("*.py")):
        found = re.findall(r"is_cuda|device\.type|\bKernels\b|BatchInvariantOps|\"cuda\"", path.read_text())
        assert not found, f"{path.name} has {found}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_arithmetic_follows_dtype_and_device(dtype: torch.dtype) -> None:
    cpu, gpu, meta = map(torch.device, ("cpu", "cuda", "meta"))
    assert type(choose_ops(dtype, gpu)) is Ops and not capabilities(gpu).batch_invariant
    assert type(choose_ops(dtype, cpu, "torch")) is BatchInvariantOps and capabilities(cpu).batch_invariant
    assert choose_ops(dtype, meta) is choose_ops(dtype, model_device()), "memory still to come"
    with mock.patch.object(dispatch, "_load", return_value=None):
        assert type(choose_ops(dtype, cpu)) is BatchInvariantOps
    assert dtype != torch.float64 or not isinstance(choose_ops(dtype, cpu), CppOps)
    with pytest.raises(ValueError, match="attention='flash' is not known; allowed: auto, torch, cpp"):
        choose_ops(dtype, cpu, "flash")
    with pytest.raises(ValueError, match=r"here=cpp: the C\+\+ kernels compute float32 and bfloat16 on the CPU"):
        choose_ops(dtype, gpu, "cpp", "here")
