"""A run that was ended in the middle and started again is the run that was not: same bits, and close to them in another layout.

The training program itself under torchrun, 2 ranks. Runs of this file that do not disturb each other go side by side: most of
their time is start-up.
"""

import functools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tasks
from ranks import run_ranks

STEPS = 6
# ZeRO on the actor and tensor slices in the critic, so that both kinds of shards are saved and read
OVERRIDES = ("run.save_freq=2", "models.actor.layout.zero=2", "models.critic.layout.tp=2")
OTHER_LAYOUTS = {
    1: ("models.actor.layout.zero=0", "models.critic.layout.tp=1"),
    2: ("models.actor.layout.tp=2", "models.actor.layout.zero=0", "models.critic.layout.tp=1", "models.critic.layout.pp=2"),
}
KILLS = 3
TORCHRUN = 0.15  # seconds that a reward takes in a run that is going to be ended: 8 rows per rank, so a step is over a second


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


def start(run_dir: Path, delay_s: float = 0.0):
    return tasks.start_torchrun(run_dir, tasks.settings(run_dir, STEPS, *OVERRIDES), *tasks.one_node(2), delay_s=delay_s)


@functools.cache
def uninterrupted(directory: Path) -> tasks.Run:
    run_dir = directory / "uninterrupted"
    assert tasks.finish(start(run_dir), run_dir) == 0
    assert json.loads((run_dir / "exit_status.json").read_text())["class"] == "done"
    return tasks.read_run(run_dir)
