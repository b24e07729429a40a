"""From the start of a program to its first call, under torchrun; ``control.py`` starts it.

    python -m torch.distributed.run --standalone --nproc-per-node 8 control_start.py ours|bare BEGUN OUT.json

``bare``: torch imported, gloo connected. ``ours``: the same through ``rlhf_spmd``, the error board running, and a call to all whose
values are on rank 0. ``BEGUN`` is when the program started (``time.time()``); rank 0 writes the seconds
until the slowest rank was done.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def start_bare() -> Callable[[], object]:
    """Returns what ends the process, as :func:`start_ours` does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    return dist.destroy_process_group


def start_ours() -> Callable[[], object]:
    import torch

    from rlhf_spmd.controller import ONE_TO_ALL, Controller, GroupShape, ResourcePool, Worker, register
    from rlhf_spmd.parallel.layout import Layout
    from rlhf_spmd.parallel.world import connect_store, init_world, read_launch
    from rlhf_spmd.process.board import Board
    from rlhf_spmd.process.ending import end_process

    class Toy(Worker):
        @register(ONE_TO_ALL)
        def nothing(self) -> None:
            pass

    launch = read_launch()
    store = connect_store(launch)
    board = Board(launch, store)
    board.start()
    world = init_world(launch, store, device=torch.device("cpu"))
    controller = Controller(world.all, board)
    toy = Toy(controller, "toy", ResourcePool("all", tuple(range(world.size))), GroupShape(Layout(dp=world.size)))
    assert len(controller.get(toy.nothing())[0]) == world.size

    def end() -> None:
        board.finish()
        end_process(0)

    return end


def main() -> None:
    kind, begun, out = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    end = start_ours() if kind == "ours" else start_bare()
    taken = time.time() - begun
    import torch
    import torch.distributed as dist

    slowest = torch.tensor([taken], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"program_s": float(slowest)}), encoding="utf-8")
    end()


if __name__ == "__main__":
    main()
