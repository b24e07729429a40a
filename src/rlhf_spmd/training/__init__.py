"""A training run, from its configuration to its last checkpoint.

Floor F7. This package must not know ``inference``, nor an algorithm or a role by its name.

Read in this order. Configuration:

- ``train_config``, ``run_config``: all keys of ``train``; its section ``run``

From a configuration to a checked run, before any process group exists:

- ``prepare``: the stages below, in order; returns a ``TrainJob`` (``job``)
- ``roles``: each role's model, pool and layout (``RolePlan``)
- ``placing``: which ranks each role has, from ``placement.strategy`` or a plan
- ``checks``, ``data_checks``: settings, and data, against each other
- ``memory_estimate``: bytes that each rank needs, role by role and call by call (``measure``)
- ``memory_check``: compares these bytes with the devices; decides ``activation_checkpointing=auto``; names settings that would fit
- ``disk``: room for checkpoints
- ``banner``: prints what was decided

The run:

- ``trainer``: the loop (``Trainer``)
- ``streams``: ``data`` of an algorithm's step: its streams of rows (``RowStream``, ``InFlightStream``)
- ``validation``: ``data.validation``: validation rows, and calls on them
- ``recorder``: metrics and samples, on rank 0
- ``checkpoint_writer``: writes checkpoints while the next step runs
- ``resume``: what a checkpoint has of a run, and whether it is of the same experiment
- ``exports``, ``model_card``: Hugging Face directories

Plans, for ``rlhf-spmd plan`` and ``placement.strategy=auto`` (the search itself is in ``planner``):

- ``plan_roles``: calls to plan from roles, and roles as a plan places them
- ``plan_stand_ins``: stand-ins for data, tokenizers and weights, which a plan can do without
- ``plan_profile``: measures this machine

``notebook_source`` makes a notebook's functions importable for ranks.
"""
