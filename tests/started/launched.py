"""A program for test_launch.py, called as train is: ``--config FILE run.dir=DIR run.resume=auto run.steps=N``.

Each step is one collective and 0.2 s (0.01 s of a start that resumed); rank 0 keeps the last step in DIR/last_step, which a later
start resumes from. DIR/starts gets a line per start: ranks, first step, and the nodes in rank order.
"""

import argparse
import os
import time
from pathlib import Path

import torch

from rlhf_spmd.process.exit import Preempted
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("overrides", nargs="*")
arguments = parser.parse_args()


def prepare() -> dict[str, str]:
    if not Path(arguments.config).is_file():
        raise ValueError(f"--config={arguments.config}: no such file")
    return dict(override.split("=", 1) for override in arguments.overrides)


def body(context: ProgramContext[dict[str, str]]) -> None:
    world, board, keys = context.world, context.board, context.prepared
    saved = Path(keys["run.dir"]) / "last_step"
    first = int(saved.read_text()) + 1 if saved.exists() and keys.get("run.resume") == "auto" else 1
    node = int(os.environ.get("SLURM_NODEID", os.environ.get("GROUP_RANK", "0")))
    nodes = [int(t) for t in world.all.all_gather(torch.tensor([node]), "nodes")]
    if world.rank == 0:
        with (saved.parent / "starts").open("a") as file:
            file.write(f"ranks {world.size} step {first} nodes {nodes}\n")
    for step in range(first, int(keys["run.steps"]) + 1):
        board.set_step(step)
        board.enter_call(step, "actor.update_actor", "launched.py:46")
        time.sleep(0.2 if first == 1 else 0.01)  # a test has to meet the first start in its steps
        signalled = world.all.all_reduce(torch.tensor([float(board.preempted)]), "preempted", "max")
        board.leave_call()
        if world.rank == 0:
            saved.write_text(str(step))
        board.last_checkpoint = f"step_{step}"
        if signalled > 0:
            raise Preempted(f"saved step_{step}")


if __name__ == "__main__":
    run_program(prepare, body, lambda keys: ProgramSettings(Path(keys["run.dir"])), saves_on_signal=True)
