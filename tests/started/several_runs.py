"""Runs of the PPO task, one after the other, by ranks that stay: a rank of test_two_ranks_gpu.py. Usage: several_runs.py ORDERS.

ORDERS: a JSON file of a list of run directories with their overrides. When a rank has ended a run, DIR/ended_RANK appears, with the
traceback of what it has raised, if anything; then it ends. SIGUSR2 writes the stacks of all threads to stderr; so does a rank that
stands at its end.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

import tasks
from rlhf_spmd.parallel.world import join_world

if "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:  # then nccl refuses a GPU that another rank of the same host has
    os.environ["NCCL_HOSTID"] = f"rank{os.environ.get('RANK', '0')}"
faulthandler.register(signal.SIGUSR2, all_threads=True)
world = join_world(60.0)
for directory, overrides in json.loads(Path(sys.argv[1]).read_text()):
    ended = Path(directory) / f"ended_{world.rank}"
    try:
        tasks.train_here(world, os.environ["TASK"], overrides)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    except BaseException:  # the process boundary
        failing = ended.with_name(f"failing_{world.rank}")
        failing.write_text(traceback.format_exc())
        failing.rename(ended)  # whole from the first look on
        raise
    ended.touch()
faulthandler.dump_traceback_later(15, exit=True)
