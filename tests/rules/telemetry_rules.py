"""What breaks each rule of ``telemetry``."""

from __future__ import annotations

from rlhf_spmd.config.load import check_tree
from rlhf_spmd.telemetry.trackers import LoggerConfig

CASES = [
    (
        lambda: check_tree(LoggerConfig(project=""), "logger"),
        "logger.project=: W&B lists runs by project; give the name of a project",
    ),
]
