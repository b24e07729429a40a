"""Seeing: what a run writes about itself, and the report drawn from it.

Floor F1: imports config, tqdm and the standard library, nothing else at import time (wandb runs in a process of its own).

- run_dir: the run directory, atomic writes, ``exit_status.json``, the process exit codes
- run_lock: one job per run directory
- jsonl, logger: ``metrics.jsonl`` (one object per step), ``rollouts.jsonl`` (samples), ``starts.jsonl``, Weights & Biases
- progress, summary: what the person at the terminal sees during and after a run
- trace: spans of every rank, merged into ``trace.json`` (Perfetto)
- report: ``report.html``, one self-contained page of a run or several: data from here, panels by ``report.js`` with uPlot (``uplot/``)
- timeline_chart: the timeline as SVG, measured or planned

It must not know torch, process groups, models or algorithms: it is given numbers and bytes.
"""
