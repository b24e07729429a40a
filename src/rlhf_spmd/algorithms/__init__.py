"""Algorithms (F6): what is computed. One short dataflow file each; ``algorithm.name`` names the module, a dotted name your own.

A module is an algorithm if it exports ``Config``, a frozen dataclass that derives from :class:`base.AlgorithmConfig` and says
which roles there are (a role may be a worker class of the module itself), and ``step(models, prompts, config, sampling, number)``,
which makes the calls of one step and returns those whose values are its metrics. The step runs on every rank and is traced first,
so it may branch only on what all ranks know. It must not know ranks, meshes or collectives.
"""
