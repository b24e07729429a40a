"""How weights move (F4): between a role's training and generation layout (the 3D-HybridEngine), and to other ranks (ReaL).

An example: tensor-parallel size 4 in training, 2 in generation. A weight has four slices of rows, w0 to w3. Brackets are memory::

                     rank 0         rank 1         rank 2         rank 3
    training         [w0]           [w1]           [w2]           [w3]
    allocated        [w0] [.. ..]   [w1] [.. ..]   [w2] [.. ..]   [w3] [.. ..]   the generation parameter, still empty
    gathered         [w0] [w0 w1]   [w1] [w0 w1]   [w2] [w2 w3]   [w3] [w2 w3]   all-gathers in {0, 1} and in {2, 3}
    generation       [w0 w1]        [w0 w1]        [w2 w3]        [w2 w3]        two replicas: ranks {0, 2} and ranks {1, 3}
    views            w0             w1             w2             w3             training parameters, parts of the row above
    training again   [w0]           [w1]           [w2]           [w3]           copied out; nothing is sent

A generation replica has ranks 0 and 2, not 0 and 1. So each rank already holds a part of what it needs. Only one bucket of parameters
at a time has two copies, as in the third row. Earlier ones have become views, later ones are still as in training.

Words:

- *box*: a rectangular part of a Hugging Face tensor, ``name[start : start + size]`` (``parallel/boxes.py``). *shard*: a rank's local
  parameter, made of one or several boxes.
- *holding*: some ranks, and the shards that each of them holds. A *side* of a move, source or target, is a list of holdings.
- *cell*: the largest part of a tensor that no box's edge crosses. So a rank holds all of it or nothing.
- *copy*: one slice that one rank sends to another, or copies inside itself. *step*: messages that start together. *bucket*: the
  parameters that one step moves.

Files in reading order. The first six communicate nothing:

- ``holdings``: which ranks hold which shards in a layout
- ``cells``: the cells of a tensor, and who sends each of them to whom
- ``plan``: the copies of one rank, for any two sides
- ``reshard_methods``: the three ways from training to generation, as sides
- ``bucketing``: which copies travel together, and in which order
- ``delta``: what has changed since the last transfer
- ``transfer``: starts and awaits the steps of a plan
- ``storages``: frees the memory of tensors for a while, or moves it to the host
- ``hybrid``: :class:`HybridWeights`, with ``to_generation()`` and ``to_training()``: the drawing above

This package does not know roles or architectures. It takes shards and parameters by name.
"""

from rlhf_spmd.reshard.bucketing import TransferStep
from rlhf_spmd.reshard.delta import Delta
from rlhf_spmd.reshard.holdings import Holding, holdings, missing_elements
from rlhf_spmd.reshard.hybrid import LABEL, HybridWeights
from rlhf_spmd.reshard.plan import plan_transfer
from rlhf_spmd.reshard.reshard_methods import METHODS, choose_method
from rlhf_spmd.reshard.storages import Storages
from rlhf_spmd.reshard.transfer import LABEL as WEIGHT_SYNC_LABEL
from rlhf_spmd.reshard.transfer import BackgroundTask, Transfer, start_transfer, transfer_steps

LABELS = (LABEL, WEIGHT_SYNC_LABEL)  # under which weights that move are counted
