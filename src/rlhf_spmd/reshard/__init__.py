"""How weights move between layouts: the 3D-HybridEngine between training and generation, and reallocation (ReaL). Floor 4.

``plan`` and ``engines`` are pure: which part of which training shard goes where, as intersections of boxes, and what this costs.
``execute`` communicates and owns storage: :class:`HybridEngine` with ``to_generation()`` and ``to_training()``.
``reallocation`` (pure) and ``move`` take weights from any ranks and layout to any other, and to host memory and back.
It does not know roles or model architectures: it takes shards (boxes) and parameters by name.
"""

from rlhf_spmd.reshard.engines import ENGINES, Costs, Engine, choose_engine, held_by, missing_elements, num_shards
from rlhf_spmd.reshard.execute import HybridEngine
from rlhf_spmd.reshard.gather import LABEL
from rlhf_spmd.reshard.move import LABEL as LOAN_LABEL
from rlhf_spmd.reshard.move import Move, Storages, execute_reallocation
from rlhf_spmd.reshard.plan import Holding, holdings
from rlhf_spmd.reshard.reallocation import plan_reallocation, plan_traffic

LABELS = (LABEL, LOAN_LABEL)  # under which weights that move are counted

__all__ = [
    "ENGINES",
    "LABELS",
    "Costs",
    "Engine",
    "Holding",
    "HybridEngine",
    "Move",
    "Storages",
    "choose_engine",
    "execute_reallocation",
    "held_by",
    "holdings",
    "missing_elements",
    "num_shards",
    "plan_reallocation",
    "plan_traffic",
]
