"""How weights move between layouts: between training and generation (the 3D-HybridEngine), and to other ranks (ReaL). Floor 4.

``plan``, ``methods`` and ``messages`` are pure: which part of which shard goes where, as intersections of boxes, what this costs,
and what of it travels together; ``delta``, what has changed since the last time. ``transfer`` carries a plan out; ``storages`` is
memory that is given up for a while.
``hybrid`` owns the weights that change their layout: :class:`HybridWeights` with ``to_generation()`` and ``to_training()``.
It does not know roles or model architectures: it takes shards (boxes) and parameters by name.
"""

from rlhf_spmd.reshard.delta import Delta
from rlhf_spmd.reshard.hybrid import LABEL, HybridWeights
from rlhf_spmd.reshard.methods import METHODS, choose_method
from rlhf_spmd.reshard.plan import Holding, holdings, missing_elements, plan_transfer
from rlhf_spmd.reshard.storages import Storages
from rlhf_spmd.reshard.transfer import LABEL as LOAN_LABEL
from rlhf_spmd.reshard.transfer import BackgroundTask, Transfer, start_transfer, transfer_steps

LABELS = (LABEL, LOAN_LABEL)  # under which weights that move are counted
