"""Algorithms (F6): what is computed, one short dataflow file each. ``algorithm.name`` names the module; a dotted name or a file names
your own.

A module is an algorithm if it exports these names:

- ``Config``: a frozen dataclass derived from :class:`base.AlgorithmConfig`. It says which data the algorithm reads, which roles there
  are, and which role is exported.
- ``step(models, data, config, global_step)``: makes the calls of one step and returns those whose values are its metrics.
- ``validate(models, data, config, global_step)``, optional: returns the metrics of a validation.

Every rank runs the step, and traces it first, so it may branch only on what all ranks know. It knows no ranks, meshes or collectives.
A module that imports ``step`` or ``validate`` from another takes it over as its own.
"""
