"""A training run: its plan, its loop, and what it writes.

Floor F7. This package must not know ``preflight``, which makes the plan, nor ``inference``, nor an algorithm or a role by its name.

Read in this order:

- ``train_config``: all keys of ``train``, with the section ``run``
- ``run_plan``: what is known of a run before it starts (``RunPlan``)
- ``build``: from the plan to the models, the data and the script of a step
- ``trainer``: the loop (``Trainer``)
- ``streams``: ``data`` of an algorithm's step: its streams of rows (``RowStream``, ``InFlightStream``)
- ``validation``: ``data.validation``: validation rows, and calls on them
- ``recorder``: metrics and samples, on rank 0
- ``checkpoints``: what a checkpoint holds, written while the next step runs; whether a run may go on from one
- ``exports``: Hugging Face directories with their cards

``notebook_source`` makes a notebook's functions importable for ranks.
"""
