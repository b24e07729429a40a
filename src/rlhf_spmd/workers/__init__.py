"""The roles: what each does with its part of a model on this rank.

Floor F5. This package must not know algorithms, configuration files or the loop of a run.

Read in this order:

- ``config``: ``models.<role>`` (``RoleConfig``), and ``WorkerContext``, from which all roles are built
- ``compute``: roles without a model; an algorithm passes them a ``Function`` of fields
- ``objective``: an algorithm's loss (``Objective``), the rows it sees (``Rows``), the counts it divides by (``Totals``)
- ``model_worker``: what all roles with a model share: ``update``, ``evaluate``, micro-batches
- ``actor``, ``critic``, ``reference``, ``reward``: the roles; ``retokenize`` is for rewards with their own tokenizer
- ``train_engine``: forward and backward passes of one role, gradients, the optimizer step
- ``rank_shards``: what a rank holds of a model
- ``optim_config``, ``optimizer``, ``muon``: ``models.<role>.optim``, AdamW and others, Muon
- ``model_weights``: the weights of a role (``OwnedWeights``)
- ``weight_sync``: copies of these weights on other ranks (``WeightReplica``)
- ``rollout_engine``: generation with a role's training weights
- ``router_replay``: updates with the experts of the pass before
- ``partial_rollouts``: rows whose generation takes more than one step
- ``flops``: for model FLOPs utilisation

Three classes are called an engine. ``TrainEngine`` trains and scores. ``RolloutEngine`` puts the weights of a ``TrainEngine`` into the
generation layout and generates. ``inference.inference_engine.InferenceEngine`` generates without training, for ``generate``,
``evaluate`` and ``serve``. Both of the latter run a ``generation.Generator``.
"""

from rlhf_spmd.workers.actor import ActorCriticWorker, ActorWorker, LikelihoodWorker
from rlhf_spmd.workers.compute import Computed, ComputeWorker, Function, GlobalReduce, RoleClass
from rlhf_spmd.workers.config import BatchLimits, RoleConfig, WorkerContext
from rlhf_spmd.workers.critic import CriticWorker, ScoreWorker
from rlhf_spmd.workers.model_worker import ModelWorker
from rlhf_spmd.workers.objective import Objective, Rows, Totals, joint
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import JudgeWorker, RewardWorker
