"""A pool of gloo ranks for tests: spawned once per size, torch imported once, reused by every test of the session.

``run_ranks(4, fn, *args)`` runs the top-level function ``fn(world, *args)`` on 4 ranks and returns their results in rank order.
A rank that raises or ends fails the call with its traceback or exit code, a call that takes too long with the stacks of all ranks;
the pool is then torn down, since its ranks may be out of step.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_POOLS: dict[int, RankPool] = {}
_PATIENCE_S = 300.0  # of a rank that waits for another one, at the start or in a collective; a busy machine needs minutes


def _serve(rank: int, size: int, port: int, stacks: str, parent: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    from rlhf_spmd.parallel.world import Launch, World, init_world

    faulthandler.register(signal.SIGUSR2, os.open(stacks, os.O_CREAT | os.O_WRONLY), all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_PATIENCE_S))
    launch = Launch(rank, size, rank, size)
    world: World = init_world(launch, dist.PrefixStore("pool", store), timeout_s=_PATIENCE_S, device=torch.device("cpu"))
    while True:
        try:
            task = parent.recv_bytes()
        except EOFError:  # the test process is gone
            os._exit(0)
        try:
            fn, args = pickle.loads(task)
            answer = pickle.dumps((True, fn(world, *args)))
        except BaseException:  # the process boundary: the test process re-raises it
            answer = pickle.dumps((False, traceback.format_exc()))
        parent.send_bytes(answer)


class RankPool:
    """Plain pipes and plain pickle: tensors are copied, so that neither shared memory nor open files can run out."""

    def __init__(self, size: int) -> None:
        from torch.distributed import TCPStore

        context = mp.get_context("spawn")
        self.size = size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that the system picks
        self.stacks = tempfile.TemporaryDirectory(prefix="rlhf_spmd_ranks_")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            pipe, theirs = context.Pipe()
            arguments = (rank, size, self.store.port, f"{self.stacks.name}/{rank}", theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()  # so that a rank that ends closes its pipe
            self.pipes.append(pipe)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        try:
            return self._run(fn, args, timeout_s)
        except BaseException:
            self.close()
            raise

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        task = pickle.dumps((fn, args))
        for pipe in self.pipes:
            pipe.send_bytes(task)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.size:
            late = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(late, max(deadline - time.monotonic(), 0.1))
            if not ready:
                raise TimeoutError(f"{fn.__name__} on {self.size} ranks took over {timeout_s} s\n{self._where()}")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                results[rank] = self._result(rank, fn.__name__)
        return [results[rank] for rank in range(self.size)]

    def _result(self, rank: int, name: str) -> Any:
        try:
            ok, value = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(10)
            ok, value = False, f"it ended with exit code {self.processes[rank].exitcode}"
        assert ok, f"rank {rank} of {self.size} failed in {name}:\n{value}"
        return value

    def _where(self) -> str:
        """The stacks of all ranks."""
        for process in self.processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(2.0)
        return "\n".join(f"{path}\n{path.read_text()}" for path in sorted(Path(self.stacks.name).iterdir()))

    def close(self) -> None:
        _POOLS.pop(self.size, None)
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.stacks.cleanup()


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 2 * _PATIENCE_S) -> list[Any]:
    if size not in _POOLS:
        _POOLS[size] = RankPool(size)
    return _POOLS[size].run(fn, args, timeout_s)


def close_pool(size: int) -> None:
    """After a function that left its ranks out of step on purpose."""
    _POOLS[size].close()


@atexit.register
def _close_pools() -> None:
    for size in list(_POOLS):
        close_pool(size)
