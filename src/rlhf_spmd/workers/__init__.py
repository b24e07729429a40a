"""The roles (F5): a model's part on its pool, its training engine, and what an algorithm hands them as functions.

Public names: the classes of roles that an algorithm names in ``roles``; ``Objective`` with ``Rows`` and ``Totals``, what an update
takes; ``Function`` with ``GlobalReduce`` and ``Computed``, what arithmetic takes; ``BatchLimits`` and ``RoleConfig``, their settings;
``WorkerContext``, what they are built from. This package must not know algorithms, configuration files or the loop of a run.
"""

from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.actor_critic import ActorCriticWorker
from rlhf_spmd.workers.arithmetic import ArithmeticWorker, Computed, Function, GlobalReduce, RoleClass
from rlhf_spmd.workers.config import BatchLimits, RoleConfig
from rlhf_spmd.workers.critic import CriticWorker, ScoreWorker
from rlhf_spmd.workers.judge import JudgeWorker
from rlhf_spmd.workers.model_worker import ModelWorker, WorkerContext
from rlhf_spmd.workers.objective import Objective, Rows, Totals, joint
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker
