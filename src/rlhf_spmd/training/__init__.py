"""A training run: its plan, its loop, and what it writes.

Floor F7. This package must not know ``preflight``, which makes the plan, nor ``inference``.

Read in this order. A run before it starts:

- ``train_config``: all keys of ``train``, with the section ``run``
- ``run_plan``: all that is known about a run (``RunPlan``)
- ``build``: from the plan to the models, the data and the script of a step

Its steps:

- ``trainer``: the loop (``Trainer``)
- ``streams``: ``data`` of an algorithm's step: its streams of rows (``RowStream``, ``InFlightStream``)
- ``validation``: ``data.validation``: validation rows, and calls on them

Its files:

- ``recorder``: metrics and samples, on rank 0
- ``checkpoints``: what a checkpoint holds, written while the next step runs; ``resume_checks``: whether a run may resume from it
- ``exports``: Hugging Face directories with their model cards

Notebooks: ``notebook_source`` writes functions of a notebook into files from which ranks can import them.
"""
