"""The arithmetic of models on each kind of device.

Floor F1. This package must not know modules, models or process groups.

A model calls the methods of one :class:`Ops`. :func:`choose_ops` picks its class once, when the model is built:

==========================  ====================================================================  =====================
device and dtype            setting or condition                                                  class
==========================  ====================================================================  =====================
CPU, fp32 or bf16           the C++ kernels compile, ``attention`` is not torch                   ``CppOps``
CPU, any                    otherwise                                                             ``BatchInvariantOps``
GPU, fp32, bf16 or fp16     Triton compiles for the GPU, ``attention`` is not torch               ``GpuOps``
GPU, fp32, bf16 or fp16     ``generation.reuse_rollout_log_probs=true``                           ``BatchInvariantGpuOps``
GPU, any                    otherwise                                                             ``Ops``
==========================  ====================================================================  =====================

Any device, in reading order:

- ``ops``: class ``Ops``, every operation in torch; start here
- ``products``: class ``ProductOps``, the part of ``Ops`` that multiplies by weights, also those of experts
- ``dispatch``: :func:`choose_ops`
- ``layer_args``: arguments: the rule of an attention's scores, the shape of heads, a layer's parameters
- ``packing``: packed sequences as rectangles and tiles; which keys a query sees
- ``dense_attention``: attention by torch's own kernels, or by plain products; latent attention's queries and keys
- ``linear_attention``: the gated delta rule, by torch
- ``routing``: which experts a token takes
- ``gradients``: makes one autograd node of a forward and a backward function
- ``devices``: :func:`capabilities`, what a device can, so that other packages ask for an ability; settings of CUDA

CPUs:

- ``batch_invariant``: class ``BatchInvariantOps``, torch in an order of sums that the batch does not change
- ``cpp_ops``: class ``CppOps``, the C++ kernels, bound with ctypes
- ``build``: compiles the C++ kernels at first use and caches the library; the first lines of a source say how bits come about

GPUs:

- ``gpu_ops``: class ``GpuOps``, torch's matrix products and Triton kernels
- ``batch_invariant_gpu``, ``triton_products``: class ``BatchInvariantGpuOps`` and its matrix products; slower, for equal bits
- ``flash_attention``: attention of training, over packed sequences
- ``flash_linear_attention``: linear attention of training and prefill by the package of this name
- ``triton_qkv``: q, k and v from the qkv product: norm, rotation, cache
- ``triton_paged_attention``: attention of generation, over the pages of the KV cache
- ``triton_latent``: queries and keys of latent attention, to the cache
- ``triton_layers``: norms and the gated activation
- ``triton_delta``: one token of linear attention
- ``triton_route``, ``triton_experts``: routing, products and row sums of a mixture of experts
- ``triton_lm_head``: log-probs and entropies from logits, and their gradients
- ``sampling_tensors``, ``triton_draw``, ``triton_filter``: tokens from logits, without and with top_k, top_p and min_p
- ``pinned_memory``: page-locked host memory for copies to and from a GPU
"""

from rlhf_spmd.kernels.cpp_ops import CppOps
from rlhf_spmd.kernels.devices import capabilities, has_amx, model_device, on_device, wait
from rlhf_spmd.kernels.dispatch import ATTENTION, choose_ops, processor_kind
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.layer_args import AttentionRule, HeadShape, LayerKernelArgs, LayerOptions, LayerParts, PageTarget
from rlhf_spmd.kernels.linear_attention import DeltaShape, DeltaStates, HasDeltaRuleStep, MixerWeights, StateRows, delta_rule
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import Packing
from rlhf_spmd.kernels.routing import RoutingRule

__all__ = [
    "ATTENTION",
    "AttentionRule",
    "CppOps",
    "DeltaShape",
    "DeltaStates",
    "HasDeltaRuleStep",
    "HeadShape",
    "LayerKernelArgs",
    "LayerOptions",
    "LayerParts",
    "MixerWeights",
    "Ops",
    "Packing",
    "PageTarget",
    "RoutingRule",
    "StateRows",
    "capabilities",
    "choose_ops",
    "delta_rule",
    "differentiable",
    "has_amx",
    "model_device",
    "on_device",
    "processor_kind",
    "wait",
]
