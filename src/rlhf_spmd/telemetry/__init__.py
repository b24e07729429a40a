"""What a run writes about itself, and the report drawn from it.

Floor F1: imports ``config``, tqdm, yaml and the standard library, nothing else at import time (wandb runs in its own process).
It must not know torch, process groups, models or algorithms: it is given numbers and bytes.

Read in this order:

- ``run_dir``: the run directory, atomic writes, append-only JSON lines, ``exit_status.json``, the process exit codes
- ``run_lock``: one job per run directory
- ``trace``: spans of every rank, merged into ``trace.json`` (Perfetto)
- ``signals``: rules by which metrics say that a run learns nothing or goes astray
- ``progress``: what the person at the terminal sees during a run

From the files of runs:

- ``trackers``: settings of Weights & Biases and TensorBoard, and the process of each that follows a run's files
- ``timeline_chart``: the timeline as SVG
- ``episodes``: episodes of agents as segments of tokens, each token once
- ``report``: ``report.html``, one self-contained page about one or several runs; ``report.js`` draws it with uPlot
  (``uplot/``)
- ``summary``: what the person at the terminal sees after a run
"""
