"""Ranks and how a model is split over them (F2). Read in this order:

- ``world``: this process's place in the job; only this file reads torchrun's environment
- ``layout``: pp, tp, dp and ZeRO of one model, as numbers (pure)
- ``collectives``: ``Group``, the only way to communicate
- ``mesh``: the groups of one role along the axes of its layout
- ``boxes``: parameter shards as boxes in global tensors (pure)
- ``pipeline``, ``zero``, ``data_parallel``: schedules of a pipeline, FSDP2 over our groups, gradient sums

This package must not know models, roles or algorithms.
"""
