"""Which arithmetic a model gets: chosen when it is built, from its dtype and device."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import zlib
from collections.abc import Iterator
from functools import cache

import torch

from rlhf_spmd.kernels.batch_invariant import BatchInvariantOps
from rlhf_spmd.kernels.build import build
from rlhf_spmd.kernels.cpp_ops import CppOps
from rlhf_spmd.kernels.devices import capabilities, model_device, unavailable
from rlhf_spmd.kernels.flash import DTYPES, TorchFlash, choose_packed
from rlhf_spmd.kernels.ops import Ops

ATTENTION = ("auto", "torch", "cpp")
TARGET = "RLHF_SPMD_TARGET"  # variable of the environment: what the kernels are compiled for, to try another processor's build
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
    from rlhf_spmd.kernels.gpu import GpuOps  # triton may be missing elsewhere

    return GpuOps(choose_packed(dtype))


@cache
def _load_exact_gpu(dtype: torch.dtype) -> Ops:
    from rlhf_spmd.kernels.batch_invariant_gpu import BatchInvariantGpuOps

    flash = dtype in DTYPES and torch.backends.cuda.is_flash_attention_available()
    return BatchInvariantGpuOps(TorchFlash() if flash else None)


_suspended = False
_EXACT, _PLAIN = BatchInvariantOps(), Ops()


def choose_ops(
    dtype: torch.dtype, device: torch.device, wanted: str = "auto", where: str = "attention", exact_gpu: bool = False
) -> Ops:
    """The arithmetic of models of ``dtype`` on ``device``; "meta", memory still to come, is where this process's models are. The C++
    kernels are built at first use. ``wanted``: one of ATTENTION, of which ``where`` is the key. ``exact_gpu``: what is exact
    on GPUs, too, though slower there; the caller has made sure that Triton serves.

    Raises ValueError if cpp is wanted where it cannot be, or the environment names a target that cannot be.
    """
    if wanted not in ATTENTION:
        raise ValueError(f"{where}={wanted!r} is not known; allowed: {', '.join(ATTENTION)}")
    exact = capabilities(model_device() if device.type == "meta" else device).batch_invariant
    fits = exact and not _suspended and wanted != "torch" and dtype in (torch.float32, torch.bfloat16)
    found = _load() if fits else None
    if wanted == "cpp" and found is None:
        raise ValueError(
            f"{where}=cpp: the C++ kernels compute float32 and bfloat16 on the CPU where a C++ compiler is installed, here "
            f"{dtype} on {device.type}; set it to auto or torch"
        )
    if exact_gpu and not exact:
        return _load_exact_gpu(dtype)
    plain = exact or wanted == "torch" or not torch.cuda.is_available()  # such as a plan for GPUs that are not here
    if plain or unavailable("triton", torch.device("cuda"), dtype) is not None:
        return found or (_EXACT if exact else _PLAIN)
    return _load_gpu(dtype)


def processor_kind() -> int:
    """A number that hosts share where their GPUs, or without these their vectors, are alike. Others differ in the last bits."""
    if capabilities(model_device()).streams:
        return zlib.crc32(torch.cuda.get_device_name().encode())
    return zlib.crc32(f"{torch.backends.cpu.get_cpu_capability()} {os.environ.get(TARGET, '')}".encode())


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """No kernels for what is built in here, as on a machine without a compiler: for comparisons. Generation and training must both be
    inside."""
    global _suspended
    before, _suspended = _suspended, True
    try:
        yield
    finally:
        _suspended = before
