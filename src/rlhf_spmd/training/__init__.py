"""A training run (F7), in the order in which a run meets the files.

Configuration: ``train_config`` is the whole schema, ``run_config`` its section ``run``. ``prepare`` goes from a configuration to a
checked run (``job``) in stages, before any process group exists: ``roles`` (models, pools, layouts), ``placing`` (ranks),
``checks`` and ``data_checks`` (settings and data against each other), ``memory`` and ``memory_check`` (what each rank needs, and
whether it has it), ``disk`` (room for checkpoints). ``banner`` prints what was decided.

The run: ``trainer`` is the loop, ``streams`` the ``data`` of an algorithm's step, ``recorder`` writes metrics and samples on rank 0,
``exports`` and ``model_card`` write Hugging Face directories, ``resume`` continues from a checkpoint.

Plans: ``plan_inputs`` and ``planning`` connect a run's roles with the planner, ``profiling`` measures this machine.
``notebook_source`` makes a notebook's functions importable for ranks.

This package must not know ``inference``, nor an algorithm or a role by its name.
"""
