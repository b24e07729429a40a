"""Seeing: what a run writes about itself, and the report drawn from it.

Floor F1: imports the standard library and nothing else at import time (wandb runs in a process of its own).

- run_dir: the run directory, atomic writes, ``exit_status.json``, the process exit codes
- jsonl, logger, rollouts: ``metrics.jsonl`` (one object per step), ``rollouts.jsonl`` (samples), Weights & Biases
- progress, summary: what the person at the terminal sees during and after a run
- trace: spans of every rank, merged into ``trace.json`` (Perfetto)
- report: ``report.html``, one self-contained file (charts, timeline: its drawings)

It must not know torch, process groups, models or algorithms: it is given numbers and bytes.
"""

from rlhf_spmd.telemetry.logger import LoggerConfig, MetricLogger
from rlhf_spmd.telemetry.progress import ProgressBar
from rlhf_spmd.telemetry.rollouts import RolloutWriter
from rlhf_spmd.telemetry.run_dir import EXIT_CODES, ExitStatus, write_exit_status
from rlhf_spmd.telemetry.trace import Timeline, merge_trace, write_trace

__all__ = [
    "EXIT_CODES",
    "ExitStatus",
    "LoggerConfig",
    "MetricLogger",
    "ProgressBar",
    "RolloutWriter",
    "Timeline",
    "merge_trace",
    "write_exit_status",
    "write_trace",
]
