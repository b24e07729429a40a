"""A program for test_program.py: a few fake calls with a collective each, and one kind of failure on one rank.

Usage: failing.py RUN_DIR KIND [LOST_S]. Every rank writes its process id to RUN_DIR/pid_N. RUN_DIR/stepped appears with the first
step of a run that goes on, and RUN_DIR/saving with a save that does not end.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_spmd.process import program
from rlhf_spmd.process.exit import Preempted
from rlhf_spmd.process.failure_detector import WatchLimits
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program

RUN_DIR = Path(sys.argv[1])
KIND = sys.argv[2]
LOST_S = float(sys.argv[3]) if len(sys.argv) > 3 else 20.0
CALLS = (("actor.generate_sequences", 30), ("critic.compute_values", 31), ("actor.update_actor", 32))


def prepare() -> None:
    rank = os.environ.get("RANK", "0")
    (RUN_DIR / f"pid_{rank}").write_text(str(os.getpid()))
    if KIND == "wait":
        (RUN_DIR / "stepped").touch()
        time.sleep(120)
    if KIND == "bad_config":
        raise ValueError("data.train_batch_size = 7: dp(2) does not divide it; use 6 or 8")
    if KIND == "bad_data_on_one" and rank == "1":
        raise FileNotFoundError(2, "No such file or directory", "/nowhere/prompts.jsonl")


def body(context: ProgramContext[None]) -> None:
    board, world = context.board, context.world
    if KIND == "never_left":
        program.LEAVE_S, dist.destroy_process_group = 0.5, lambda: time.sleep(120)
        return
    seq = 0
    for step in range(1, 400):
        board.set_step(step)
        for name, line in CALLS:
            if KIND == "diverge" and step == 2 and line == 31 and world.rank == 1:
                name, line = "reward.compute_reward", 33
            seq += 1
            board.enter_call(seq, name, f"ppo.py:{line}")
            if step == 2 and line == 32 and (KIND == "vanish" or world.rank == (0 if KIND == "kill_first" else world.size - 1)):
                fail()
            if KIND == "diverge" and step == 2 and line > 30:
                time.sleep(60)  # nothing hangs, the board alone finds it
            world.all.all_reduce(torch.ones(4), "sum")
            board.leave_call()
        flag = torch.tensor([float(board.preempted)])
        if world.all.all_reduce(flag, "preempted", "max") > 0:
            board.last_checkpoint = f"step_{step}"
            if KIND == "save_slowly":
                (RUN_DIR / "saving").touch()
                time.sleep(120)
            raise Preempted(f"saved step_{step}")
        if KIND == "exit_beside" and step == 2:
            return
        if KIND in ("run", "save_slowly"):
            (RUN_DIR / "stepped").touch()
            time.sleep(0.1)


def fail() -> None:
    if KIND == "raise":
        raise KeyError("no such column")
    if KIND == "forged":
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        store.set("rlhf_spmd/0/board/failure", "0" * 64 + '{"class_": "done", "message": "well done", "rank": 0}')
        time.sleep(60)
    if KIND == "exit":
        os._exit(0)
    if KIND == "exit_beside":
        threading.Thread(target=lambda: os._exit(7)).start()
    if KIND in ("kill", "kill_first", "stop", "vanish"):
        time.sleep(1.2)  # two heartbeats
    if KIND == "vanish":
        ctypes.CDLL(None)._exit(0)  # which Python does not see
    if KIND in ("kill", "kill_first"):
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    rate = "1e-2" if KIND == "bad_lr" and os.environ["RANK"] == "1" else "1e-3"
    alike = {"algorithm.name": "ppo", "models.actor.optim.lr": rate}
    settings = ProgramSettings(RUN_DIR, timeout_s=600.0, limits=WatchLimits(lost_s=LOST_S), must_match=alike)
    run_program(prepare, body, lambda _: settings, run_dir_hint=RUN_DIR, saves_on_signal=True)
