"""The roles (F5): a model's part on its pool, its training engine, and what an algorithm passes to them as functions.

Public names: the role classes that an algorithm names in ``roles``; ``Objective`` with ``Rows`` and ``Totals``, which updates take;
``Function`` with ``GlobalReduce`` and ``Computed``, which ``models.compute`` takes; ``BatchLimits`` and ``RoleConfig``, the
settings; ``WorkerContext``, from which roles are built. This package must not know algorithms, configuration files or the loop of
a run.
"""

from rlhf_spmd.workers.actor import ActorCriticWorker, ActorWorker
from rlhf_spmd.workers.compute import Computed, ComputeWorker, Function, GlobalReduce, RoleClass
from rlhf_spmd.workers.config import BatchLimits, RoleConfig, WorkerContext
from rlhf_spmd.workers.critic import CriticWorker, ScoreWorker
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import Objective, Rows, Totals, joint
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import JudgeWorker, RewardWorker
