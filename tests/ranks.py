"""A pool of gloo ranks for tests: spawned once per size, torch imported once, reused by every test of the session.

``run_ranks(4, fn, *args)`` runs the top-level function ``fn(world, *args)`` on 4 ranks and returns their results in rank order.
A rank that raises fails the call with its traceback; the pool is then torn down, since its ranks may be out of step.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_POOLS: dict[int, RankPool] = {}


def _serve(rank: int, size: int, port: int, inbox: Any, outbox: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    from rlhf_spmd.parallel.world import Launch, World, init_world

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=60))
    launch = Launch(rank, size, rank, size)
    world: World = init_world(launch, dist.PrefixStore("pool", store), timeout_s=120.0, device=torch.device("cpu"))
    while (task := inbox.get()) is not None:
        fn, args = task
        try:
            outbox.put((rank, True, fn(world, *args)))
        except BaseException:  # the process boundary: the test process re-raises it
            outbox.put((rank, False, traceback.format_exc()))


class RankPool:
    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.size = size
        self.inboxes = [context.Queue() for _ in range(size)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(r, size, port, self.inboxes[r], self.outbox), daemon=True) for r in range(size)
        ]
        for process in self.processes:
            process.start()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for inbox in self.inboxes:
            inbox.put((fn, args))
        results: list[Any] = [None] * self.size
        deadline = time.monotonic() + timeout_s
        for _ in range(self.size):
            try:
                rank, ok, value = self.outbox.get(timeout=max(deadline - time.monotonic(), 0.1))
            except queue.Empty:
                self.close()
                raise TimeoutError(f"{fn.__name__} on {self.size} ranks took over {timeout_s} s") from None
            if not ok:
                self.close()
                raise AssertionError(f"rank {rank} of {self.size} failed in {fn.__name__}:\n{value}")
            results[rank] = value
        return results

    def close(self) -> None:
        _POOLS.pop(self.size, None)
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
    if size not in _POOLS:
        _POOLS[size] = RankPool(size)
    return _POOLS[size].run(fn, args, timeout_s)


@atexit.register
def _close_pools() -> None:
    for pool in list(_POOLS.values()):
        pool.close()
