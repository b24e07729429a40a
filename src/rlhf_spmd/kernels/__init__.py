"""The arithmetic of models by device (floor F1), and what a device can.

A model is built over an :class:`Ops`, chosen once by :func:`choose_ops` from dtype and device: torch's (``ops``), torch's with exact
attention and products (``exact``, CPUs), or kernels in C++ (``library``, CPUs): products, attention and small operations whose
bits do not depend on the batch. The library is compiled at first use (a C++ compiler, some seconds), kept in the user's cache
directory and loaded with ctypes. Everything about a result's bits is in the headers of the sources.
:func:`capabilities` says what a device can, by the ability's name; nobody else asks which kind a device is.

Must not know: modules, models, ranks.
"""

from rlhf_spmd.kernels.choice import ATTENTION, choose_ops, processor_kind, suspended
from rlhf_spmd.kernels.devices import capabilities, has_amx, model_device, on_device, wait
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.library import Kernels
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import AttentionRule, Context, HeadShape, Packing, PageTarget

__all__ = [
    "ATTENTION",
    "AttentionRule",
    "Context",
    "HeadShape",
    "Kernels",
    "Ops",
    "Packing",
    "PageTarget",
    "capabilities",
    "choose_ops",
    "differentiable",
    "has_amx",
    "model_device",
    "on_device",
    "processor_kind",
    "suspended",
    "wait",
]
