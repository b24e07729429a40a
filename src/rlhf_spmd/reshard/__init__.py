"""How weights move between layouts: the 3D-HybridEngine between training and generation. Floor 4.

``plan`` is pure: which part of which training shard goes where, as intersections of boxes, and the bytes that this takes.
``execute`` communicates and owns storage: :class:`HybridEngine` with ``to_generation()`` and ``to_training()``.
It does not know roles, engines or model architectures: it takes shards (boxes) and parameters by name.
"""

from rlhf_spmd.reshard.execute import HybridEngine
from rlhf_spmd.reshard.plan import gather_ranks, plan_gather, plan_homes, transition_bytes

__all__ = ["HybridEngine", "gather_ranks", "plan_gather", "plan_homes", "transition_bytes"]
