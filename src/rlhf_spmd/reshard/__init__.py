"""How weights move (F4): between the training and generation layout (the 3D-HybridEngine), and to other ranks (ReaL).

Pure: ``plan`` and ``reshard_methods`` decide which part of which shard goes where, as intersections of boxes; ``bucketing`` decides
what travels together; ``delta`` finds what has changed since the last time. ``transfer`` executes a plan. ``storages`` gives up memory
for a while. ``hybrid`` holds weights that change their layout: :class:`HybridWeights` with ``to_generation()`` and ``to_training()``.
This package does not know roles or architectures: it takes shards (boxes) and parameters by name.
"""

from rlhf_spmd.reshard.bucketing import TransferStep
from rlhf_spmd.reshard.delta import Delta
from rlhf_spmd.reshard.hybrid import LABEL, HybridWeights
from rlhf_spmd.reshard.plan import Holding, holdings, missing_elements, plan_transfer
from rlhf_spmd.reshard.reshard_methods import METHODS, choose_method
from rlhf_spmd.reshard.storages import Storages
from rlhf_spmd.reshard.transfer import LABEL as WEIGHT_SYNC_LABEL
from rlhf_spmd.reshard.transfer import BackgroundTask, Transfer, start_transfer, transfer_steps

LABELS = (LABEL, WEIGHT_SYNC_LABEL)  # under which weights that move are counted
