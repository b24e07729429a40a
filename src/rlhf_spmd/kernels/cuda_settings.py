"""What CUDA, torch's allocator and NCCL read from the environment before their first use, where the user has not set it.

- ``CUDA_DEVICE_MAX_CONNECTIONS=32``: hardware queues for the streams of a process, 8 by itself. Streams that share a queue wait for
  each other although nothing says so. A rank has those of its computation, FSDP2 (four), tp, each direction of the pipeline, gathers
  and loans. 1 is Megatron's setting, which on cards before Hopper orders a product's launch behind a collective; FSDP2, whose copies
  would then follow its collectives in one line, does not want it, nor does tensor parallelism here.
- ``PYTORCH_ALLOC_CONF=expandable_segments:True``: generation and training take turns with blocks of other sizes, and blocks of one
  phase are holes in the next. Segments that grow are mapped page by page instead. CUDA graphs may hold such memory: a private pool's
  pages stay mapped. What does not go together: CUDA IPC of tensors and NCCL's registration of users' buffers, neither of which is used
  here. Pinned memory is another allocator's.
- ``NCCL_GRAPH_REGISTER=0`` beside it: NCCL would register the buffers of captured collectives by itself, and reads outside of them
  where they lie in segments that grow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its name before torch 2.9
EXPANDABLE = "expandable_segments:True"


def usual_settings(given: Mapping[str, str]) -> dict[str, str]:
    """What is to be added to the environment ``given``. Pure."""
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
