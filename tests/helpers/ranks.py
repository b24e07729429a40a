"""A pool of gloo ranks for tests, reused by every test of the session.

``run_ranks(4, fn, *args)`` runs the top-level function ``fn(world, *args)`` on 4 ranks and returns their results in rank order.
A rank that raises or ends fails the call with its traceback or exit code, a call that takes too long with the stacks of all ranks;
the pool is then torn down, since its ranks may be out of step.

``Program`` is the training program, or a script, on ranks of its own, as torchrun starts it.

Ranks are forked from templates, processes that have imported what a training run imports: that takes 11 CPU seconds once, a fork
milliseconds. A call on four ranks takes 4 ms of CPU time, so threads in their place would save nothing.
There are two templates, of even ranks and of odd ones, so that neighbours hash texts differently, as processes of torchrun do.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

_TEMPLATES: list[Template] = []
_STARTING = threading.Lock()
_POOLS: dict[int, RankPool] = {}
_PATIENCE_S = 300.0  # of a rank that waits for another one, at the start or in a collective; a busy machine needs minutes


def _fork_ranks(orders: Connection) -> None:
    """A template. ("fork", function, arguments) and an open file: a process that calls the function with the file and the arguments;
    ("wait", process id, options): its exit code, or None with os.WNOHANG while it lives."""
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.configuration_llama  # noqa: F401

    import rlhf_spmd.train  # noqa: F401

    gc.collect()
    gc.freeze()  # a rank that collects its garbage would write to, and so copy, every page that it shares
    while True:
        try:
            order, *arguments = orders.recv()
        except EOFError:  # the test process is gone
            os._exit(0)
        if order == "wait":
            ended, status = os.waitpid(*arguments)
            orders.send(os.waitstatus_to_exitcode(status) if ended else None)
            continue
        file = recv_handle(orders)
        process = os.fork()
        if process == 0:
            orders.close()
            function, more = arguments
            _leave(_code_of(function, file, *more))
        os.close(file)  # so that a rank that ends closes its pipe
        orders.send(process)


def _code_of(function: Callable[..., None], *arguments: Any) -> int:
    """With which a process would end that does nothing else."""
    try:
        function(*arguments)
    except SystemExit as ending:
        if isinstance(ending.code, int | None):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:  # the process boundary
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """As Python ends a process, but for taking its objects apart, which after a fork takes over a second: it copies all of them."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(pipe: int, rank: int, size: int, port: int, stacks: str) -> None:
    """A rank of a pool."""
    import torch
    import torch.distributed as dist

    from rlhf_spmd.parallel.launch import Launch
    from rlhf_spmd.parallel.world import World, init_world

    faulthandler.register(signal.SIGUSR2, os.open(stacks, os.O_CREAT | os.O_WRONLY), all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_PATIENCE_S))
    launch = Launch(rank, size, rank, size)
    world: World = init_world(launch, dist.PrefixStore("pool", store), timeout_s=_PATIENCE_S, device=torch.device("cpu"))
    parent = Connection(pipe)
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


def _run(output: int, environment: dict[str, str], script: str, arguments: Sequence[str]) -> None:
    """A rank of the training program, or of ``script``; it ends with its exit code."""
    from rlhf_spmd.train import main

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    if not script:
        return main(arguments)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _command(output: int, environment: dict[str, str], module: str, arguments: Sequence[str]) -> None:
    """What ``python -m module`` does, with the file of errors behind that of output: ``output`` and ``output``.err."""
    errors = os.open(os.readlink(f"/proc/self/fd/{output}") + ".err", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


class Template:
    """A process from which ranks are forked, seen from the test process."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=_fork_ranks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.lock = threading.Lock()

    def fork(self, function: Callable[..., None], file: int, *arguments: Any) -> int:
        """The process id of a rank that calls ``function(file, *arguments)``; ``file``: a descriptor, which it gets a copy of."""
        with self.lock:
            self.orders.send(("fork", function, arguments))
            send_handle(self.orders, file, self.process.pid)
            return int(self.orders.recv())

    def wait(self, process: int, options: int = 0) -> int | None:
        """The exit code of a rank that ends; with os.WNOHANG None while it lives."""
        with self.lock:
            self.orders.send(("wait", process, options))
            code: int | None = self.orders.recv()
            return code


def _templates(size: int) -> list[Template]:
    """Those of ranks 0 to ``size`` - 1; any thread may ask."""
    with _STARTING:
        while len(_TEMPLATES) < min(size, 2):
            _TEMPLATES.append(Template())
        return [_TEMPLATES[rank % 2] for rank in range(size)]


def _host_store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that the system picks


class Program:
    """``rlhf_spmd.train <arguments>``, or ``script``, on ranks in the environment that torchrun gives them, and with its store. But
    nobody ends the other ranks where one has failed. ``output``: the file that what they write is added to. ``ranks``: process ids."""

    def __init__(
        self, size: int, arguments: Sequence[str], output: Path, environment: Mapping[str, str], script: str = ""
    ) -> None:
        self.store, self.codes = _host_store(), dict[int, int]()
        self.ranks: list[int] = []
        job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
        job |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0}
        with output.open("a") as file:
            for rank, template in enumerate(_templates(size)):
                own = {key: str(value) for key, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()}
                self.ranks.append(template.fork(_run, file.fileno(), {**environment, **own}, script, list(arguments)))

    def poll(self) -> int | None:
        """None while a rank lives, then the largest exit code; ``codes`` has those of the ranks that have ended."""
        for rank, process in enumerate(self.ranks):
            if rank not in self.codes and (code := _TEMPLATES[rank % 2].wait(process, os.WNOHANG)) is not None:
                self.codes[rank] = code
        return max(map(abs, self.codes.values())) if len(self.codes) == len(self.ranks) else None

    def wait(self, timeout_s: float = _PATIENCE_S) -> int:
        """What :meth:`poll` says when all ranks have ended. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rlhf_spmd.train", timeout_s)
            time.sleep(0.01)
        return code


def run_command(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """``python -m module <arguments>``, but for what importing takes. Not for what depends on how an interpreter starts or ends."""
    with tempfile.TemporaryDirectory(prefix="rlhf_spmd_command_") as directory:
        out = Path(directory) / "out"
        with out.open("w") as file:
            (template,) = _templates(1)
            process = template.fork(_command, file.fileno(), dict(environment), module, list(arguments))
        while (code := template.wait(process, os.WNOHANG)) is None:
            time.sleep(0.01)
        return subprocess.CompletedProcess([module, *arguments], code, out.read_text(), Path(f"{out}.err").read_text())


class RankPool:
    """Plain pipes and plain pickle: tensors are copied, so that neither shared memory nor open files can run out."""

    def __init__(self, size: int) -> None:
        self.size, self.store = size, _host_store()
        self.stacks = tempfile.TemporaryDirectory(prefix="rlhf_spmd_ranks_")
        self.pipes: list[Connection] = []
        self.running: dict[int, int] = {}  # rank -> process id
        for rank, template in enumerate(_templates(size)):
            pipe, theirs = mp.Pipe()
            arguments = rank, size, self.store.port, f"{self.stacks.name}/{rank}"
            self.running[rank] = template.fork(_serve, theirs.fileno(), *arguments)
            self.pipes.append(pipe)
            theirs.close()

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
            ok, value = False, f"it ended with exit code {_TEMPLATES[rank % 2].wait(self.running.pop(rank))}"
        assert ok, f"rank {rank} of {self.size} failed in {name}:\n{value}"
        return value

    def _where(self) -> str:
        """The stacks of all ranks."""
        for process in self.running.values():
            os.kill(process, signal.SIGUSR2)
        time.sleep(2.0)
        return "\n".join(f"{path}\n{path.read_text()}" for path in sorted(Path(self.stacks.name).iterdir()))

    def close(self) -> None:
        _POOLS.pop(self.size, None)
        for rank, process in self.running.items():
            os.kill(process, signal.SIGKILL)
            _TEMPLATES[rank % 2].wait(process)
        for pipe in self.pipes:
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
