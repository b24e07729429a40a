"""Ranks, how they communicate, and how a model is split over them (F2). This package must not know models, roles or algorithms.

Files in reading order. The pure ones need no process group.

Ranks and communication:

- ``launch``: ``Launch``, this process's rank from torchrun's environment; the key-value store of the job
- ``device_setup``: which GPU a rank takes, or how torch computes on its CPU
- ``collectives``: ``Group``, some ranks with every operation by which they communicate
- ``world``: ``World``, all ranks of the job; starts torch.distributed and makes the groups' communicators

How a model is split:

- ``layout``: ``Layout`` and ``GenerationLayout``, the grid [pp, dp, cp, tp] of a model's ranks, as numbers (pure)
- ``mesh``: ``Mesh``, this rank's coordinates and groups in a layout on a pool
- ``boxes``: ``ParamShard``, a rank's part of a parameter, as boxes of Hugging Face tensors (pure)

Training over ranks:

- ``pipeline``: the order of forward and backward passes (pure), and the loop that runs it
- ``zero``: ZeRO by FSDP2, over our groups
- ``data_parallel``: gradient sums and the squared norm

They are used in this order::

    launch = read_launch()
    world = init_world(launch, connect_store(launch))
    mesh = build_mesh(world, (4, 5, 6, 7), Layout(pp=2, dp=2))  # a pool of four of the job's ranks
    mesh.dp.all_reduce(gradient, "gradients")  # every rank of that dp group calls it
"""
