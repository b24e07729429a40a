"""What a run writes about itself, and the report drawn from it.

Floor F1: imports config, tqdm and the standard library, nothing else at import time (wandb runs in its own process).

- run_dir: the run directory, atomic writes, append-only JSON lines, ``exit_status.json``, the process exit codes
- run_lock: one job per run directory
- trackers: settings of Weights & Biases and TensorBoard, and the process of each that follows a run's files
- signals: rules by which metrics say that a run learns nothing or goes astray
- progress, summary: what the person at the terminal sees during and after a run
- trace: spans of every rank, merged into ``trace.json`` (Perfetto)
- report: ``report.html``, one self-contained page about one or several runs; ``report.js`` draws it with uPlot
  (``uplot/``)
- timeline_chart: the timeline as SVG

It must not know torch, process groups, models or algorithms: it is given numbers and bytes.
"""
