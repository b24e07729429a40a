"""The arithmetic of models by device (floor F1), and what a device can.

A model is built over an :class:`Ops`. :func:`choose_ops` chooses its class once, from dtype and device: torch's (``ops``), on CPUs
torch's in an order that the batch does not change (``batch_invariant``) or C++ (``cpp_ops``), on GPUs Triton's (``gpu``). The C++
library is compiled at first use (a C++ compiler, some seconds), kept in the user's cache directory and loaded with ctypes.
Everything about a result's bits is in the headers of the sources.
:func:`capabilities` says what a device can, by the ability's name; nobody else asks which kind a device is.

Must not know: modules, models, ranks.
"""

from rlhf_spmd.kernels.choice import ATTENTION, choose_ops, processor_kind, suspended
from rlhf_spmd.kernels.cpp_ops import CppOps
from rlhf_spmd.kernels.devices import capabilities, has_amx, model_device, on_device, wait
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import AttentionRule, Context, HeadShape, LayerOptions, Packing, PageTarget
from rlhf_spmd.kernels.routing import RoutingRule

__all__ = [
    "ATTENTION",
    "AttentionRule",
    "Context",
    "CppOps",
    "HeadShape",
    "LayerOptions",
    "Ops",
    "Packing",
    "PageTarget",
    "RoutingRule",
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
