"""A process between a rank and a worker, which ends all that the worker has started.

It runs none of the user's code. Linux gives it each process whose parent has ended (a subreaper), so a daemon of a reward function
is still below it. It ends what is below it when the worker has ended, when the rank says so (``END``), and when the rank has ended,
however that was; then it ends as the worker did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

from rlhf_spmd.rewards.sandbox import descendants, remove_unused

END = signal.SIGRTMAX  # no scheduler sends it
TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)  # a scheduler sends them to all processes of a job
MOST = 100_000  # processes that are looked for
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def keep(parent: int, *pipes: int) -> None:
    """Returns in a new process, the worker, which ends with this one. ``pipes``: those of the worker alone. ``parent``: the rank."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (END, signal.SIGCHLD, *TOLD_TO_END))
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    _end_with(parent, END)
    keeper, worker = os.getpid(), os.fork()
    if worker == 0:
        _end_with(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, *TOLD_TO_END})  # until the worker has its handlers
        return
    for number in pipes:
        os.close(number)
    remove_unused()
    ended: dict[int, int] = {}
    while worker not in ended and signal.sigwait((END, signal.SIGCHLD)) != END:
        _wait(ended, os.WNOHANG)
    while True:
        for process in descendants(keeper, MOST):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not _wait(ended, 0):
            _end_as(ended.get(worker, 0))


def _end_with(parent: int, number: int) -> None:
    """Have the kernel send a signal when the thread that started this process ends."""
    _control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(0)


def _control(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _wait(ended: dict[int, int], how: int) -> bool:
    """Add a child that has ended, and with WNOHANG all that have, with their status. False where there are no children."""
    try:
        while (found := os.waitpid(-1, how))[0]:
            ended[found[0]] = found[1]
            if not how:
                break
    except ChildProcessError:
        return False
    return True


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        os.kill(os.getpid(), -code)
    os._exit(code)
