"""Environment variables that CUDA, torch's allocator and NCCL read before their first use; set unless the user has set them.

- ``CUDA_DEVICE_MAX_CONNECTIONS=32``: hardware queues for the streams of a process; CUDA's default is 8. Streams that share a queue
  wait for each other for no reason. A rank has streams for its computation, FSDP2 (four), tp, each direction of the pipeline,
  gathers and weight sync. Megatron sets 1, which on GPUs before Hopper orders a product's launch behind a collective. That does not
  suit FSDP2, whose copies would then queue behind its collectives, nor tensor parallelism here.
- ``PYTORCH_ALLOC_CONF=expandable_segments:True``: generation and training take turns with blocks of different sizes, so blocks of
  one phase would leave holes in the next. Expandable segments are mapped page by page instead. CUDA graphs may hold such memory,
  because a private pool's pages stay mapped. CUDA IPC of tensors and NCCL's registration of user buffers would not work with them;
  neither is used here. Pinned memory has another allocator.
- ``NCCL_GRAPH_REGISTER=0``, needed with it: NCCL would register the buffers of captured collectives by itself, and would read outside
  of them in expandable segments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its name before torch 2.9
EXPANDABLE = "expandable_segments:True"


def usual_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Returns what to add to the environment ``given``. Pure."""
    usual = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if not any(name in given for name in ALLOCATOR):
        usual[ALLOCATOR[0]] = EXPANDABLE
    if any(EXPANDABLE in {**given, **usual}.get(name, "") for name in ALLOCATOR):
        usual["NCCL_GRAPH_REGISTER"] = "0"
    return {name: value for name, value in usual.items() if name not in given}


def set_up_cuda() -> None:
    """For this process and its children. To be called before anything asks for a GPU; later it has no effect, and does nothing."""
    if not torch.cuda.is_initialized():
        os.environ.update(usual_settings(os.environ))
