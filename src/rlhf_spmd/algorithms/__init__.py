"""Algorithms: what is computed, one short dataflow file each.

Floor F6. A module here knows no ranks, meshes or collectives.

``algorithm.name`` names the module; a dotted name or a file names your own. A module is an algorithm if it exports these names:

- ``Config``: a frozen dataclass derived from :class:`base.AlgorithmConfig`. It says which data the algorithm reads, which roles there
  are, and which role is exported.
- ``step(models, data, config, global_step)``: makes the calls of one step and returns those whose values are its metrics.
- ``validate(models, data, config, global_step)``, optional: returns the metrics of a validation.

Every rank runs the step, and traces it first, so it may branch only on what all ranks know. A module that imports ``step`` or
``validate`` from another takes it over as its own.

Start with ``grpo`` or ``ppo``. What several algorithms share:

- ``base``: ``sample`` and ``score``, the first calls of a step; settings of all
- ``policy``, ``values``: losses of actor and critic, with their settings
- ``estimators``: advantages within groups of responses
- ``overlong``: a penalty for responses near the length limit
- ``kl``: KL in the reward or in the loss
- ``preferences``: losses of pairs
- ``user_functions``: a user's advantage estimator or policy loss
"""
