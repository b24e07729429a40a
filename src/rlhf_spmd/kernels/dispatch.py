"""The choice of the :class:`Ops` of a model by its dtype and device, when the model is built."""

from __future__ import annotations

import logging
import os
import subprocess
import zlib
from functools import cache

import torch

from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.build import build
from rlhf_spmd.kernels.cpp_ops import CppOps
from rlhf_spmd.kernels.devices import capabilities, model_device, unavailable
from rlhf_spmd.kernels.flash_attention import DTYPES, TorchFlash, choose_packed
from rlhf_spmd.kernels.flash_linear_attention import choose_packed_delta
from rlhf_spmd.kernels.ops import Ops

ATTENTION = ("auto", "torch", "cpp")
TARGET = "RLHF_SPMD_TARGET"  # environment variable: what the C++ kernels are compiled for, to try another processor's build
_log = logging.getLogger(__name__)


@cache
def _load() -> CppOps | None:
    try:
        return CppOps(str(build(os.environ.get(TARGET, "native"))))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.warning("C++ kernels do not build here, torch computes instead: %s", error)
        return None


@cache
def _load_gpu(dtype: torch.dtype) -> Ops:
    from rlhf_spmd.kernels.gpu_ops import GpuOps  # triton may be missing elsewhere

    return GpuOps(choose_packed(dtype), choose_packed_delta(dtype))


@cache
def _load_batch_invariant_gpu(dtype: torch.dtype) -> Ops:
    from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps

    flash = dtype in DTYPES and torch.backends.cuda.is_flash_attention_available()
    return BatchInvariantGpuOps(TorchFlash() if flash else None)


_BATCH_INVARIANT = BatchInvariantOps()
_TORCH = Ops()


def choose_ops(
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    where: str = "attention",
    batch_invariant_gpu: bool = False,
) -> Ops:
    """Return the ops of a model of ``dtype`` on ``device``; the package's docstring has the table.

    - device: "meta" (no memory yet) stands for the device of this process's models
    - attention: one of ATTENTION, the value of the configuration key ``where``
    - batch_invariant_gpu: ops on GPUs must be batch-invariant, which is slower; the caller has checked that Triton compiles

    Compiles the C++ kernels at first use. Raises ValueError if ``attention`` is cpp and they do not serve here, or if the
    environment names an impossible target.
    """
    if attention not in ATTENTION:
        raise ValueError(f"{where}={attention!r} is not known; allowed: {', '.join(ATTENTION)}")
    batch_invariant = capabilities(model_device() if device.type == "meta" else device).batch_invariant
    cpp = _load() if batch_invariant and attention != "torch" and dtype in (torch.float32, torch.bfloat16) else None
    if attention == "cpp" and cpp is None:
        raise ValueError(
            f"{where}=cpp: the C++ kernels compute float32 and bfloat16 on the CPU where a C++ compiler is installed, here "
            f"{dtype} on {device.type}; set it to auto or torch"
        )
    if batch_invariant:
        return cpp or _BATCH_INVARIANT
    if batch_invariant_gpu:
        return _load_batch_invariant_gpu(dtype)
    # a plan may be for GPUs that are not here: it computes nothing, so it needs no GPU kernels
    needs_no_gpu_kernels = attention == "torch" or not torch.cuda.is_available()
    if needs_no_gpu_kernels or unavailable("triton", torch.device("cuda"), dtype) is not None:
        return _TORCH
    return _load_gpu(dtype)


def processor_kind() -> int:
    """Return a number that hosts share if their GPUs are alike, or without GPUs their vector units.

    Results of hosts with different numbers differ in the last bits.
    """
    if capabilities(model_device()).streams:
        return zlib.crc32(torch.cuda.get_device_name().encode())
    return zlib.crc32(f"{torch.backends.cpu.get_cpu_capability()} {os.environ.get(TARGET, '')}".encode())
