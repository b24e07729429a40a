"""The roles: what each does with its part of a model on this rank.

Floor F5. This package must not know algorithms, configuration files or the loop of a run.

Read in this order. What a role is:

- ``config``: ``models.<role>`` (``RoleConfig``), and ``WorkerContext``, from which all roles are built
- ``compute``: roles without a model; an algorithm passes them a ``Function`` of fields
- ``objective``: an algorithm's loss (``Objective``), the rows it sees (``Rows``), the counts it divides by (``Totals``); rows as packed
  micro-batches
- ``model_worker``: what all roles with a model share: ``update``, ``evaluate``, micro-batches

The roles:

- ``actor``, ``critic``, ``reference``
- ``reward``: scores by a function, a model or a judge. ``reward_report``: their statistics, failures and samples. ``retokenize``: rows
  for reward models with their own tokenizer
- ``role_plan``: what is decided about a role before it is built

Training and scoring:

- ``train_engine``: forward and backward passes of one role, gradients, the optimizer step
- ``rank_shards``: what a rank holds of a model
- ``optim_config``, ``optimizer``, ``muon``: ``models.<role>.optim``, AdamW and others, Muon
- ``router_replay``: updates with the experts of an earlier pass
- ``flops``: for model FLOPs utilisation

Weights:

- ``model_weights``: the weights of a role (``OwnedWeights``)
- ``weight_sync``: copies of these weights on other ranks (``WeightReplica``)

Generation:

- ``rollout_engine``: generation with a role's training weights
- ``partial_rollouts``: rows whose generation takes more than one step

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
