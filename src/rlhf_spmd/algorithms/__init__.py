"""Algorithms (F6): what is computed. One short dataflow file each; ``algorithm.name`` names the module, a dotted name or file your own.

A module is an algorithm if it exports ``Config``, a frozen dataclass that derives from :class:`base.AlgorithmConfig` and says which
data the algorithm reads, which roles there are and which is exported; and ``step(models, data, config, number)``, which makes the
calls of one step and returns those whose values are its metrics. ``validate(models, data, config, number)``, if it is there, returns
the metrics of a validation. A step runs on every rank and is traced first, so it may branch only on what all ranks know. It must not
know ranks, meshes or collectives.

A module that imports ``step`` or ``validate`` of another and does not use it takes it over as its own.
"""
