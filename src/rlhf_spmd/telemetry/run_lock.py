"""One job per run directory: ``run.lock`` names the owner, rank 0's process, which touches the file while it lives.

Its lock counts as left behind, and is taken over, where its process on this machine is gone (its number may be another process's),
where the same SLURM job was put back into the queue since, and after ``STALE_S`` without a touch where nobody here can look at the
process: on another machine, or in another container. The owner may have been suspended all that time and go on: a job proves that the
lock is still its own before it writes.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rlhf_spmd.telemetry.run_dir import EXIT_STATUS_FILE, writing

LOCK_FILE = "run.lock"
TOUCH_S = 20.0
STALE_S = 300.0


class LockLost(RuntimeError):
    """The run directory is no longer this job's."""

    exit_class = "checkpoint"  # how the run ends: process/program.py


_held: dict[Path, threading.Event] = {}  # lock files of this process, each with what ends its touching
_owners: dict[Path, Owner] = {}  # run directory -> the process of this job that owns it, on every rank


@dataclass(frozen=True)
class Owner:
    """A process. ``machine``: the boot and the process namespace in which ``pid`` and ``started`` (ticks since boot) name just one."""

    host: str
    pid: int
    machine: str
    started: str
    job: str  # "SLURM job 17", "torchrun job NAME", or "" without a number or name
    requeues: int

    def left_behind(self, here: Owner, age_s: float) -> bool:
        """Whether its job has ended, as seen from the process ``here``; ``age_s``: since its last touch."""
        if self.job and self.job == here.job and self.requeues < here.requeues:
            return True
        if self.machine and self.machine == here.machine:
            return _started(self.pid) != self.started
        return age_s > STALE_S

    def __str__(self) -> str:
        return f"{self.job + ', ' if self.job else ''}process {self.pid} on {self.host}"


def take(run_dir: str | os.PathLike[str]) -> None:
    """Make this process the owner. Raises ValueError, one line that names the owner, where another job is, and WriteError."""
    path, here = Path(run_dir).resolve() / LOCK_FILE, this_process()
    with writing(path), _alone(path) as file:
        owner = _owner(file)
        if owner not in (None, here) and not owner.left_behind(here, _age(path)):
            raise ValueError(f"run.dir={run_dir} is in use by {owner}; wait for its end, or give another run.dir")
        file.truncate(0)
        file.write(json.dumps(asdict(here)) + "\n")
    _owners[Path(run_dir).absolute()] = here
    if path not in _held:
        _held[path] = threading.Event()
        threading.Thread(target=_keep_touching, args=(path, here, _held[path]), name="run.lock", daemon=True).start()


def follow(run_dir: str | os.PathLike[str]) -> None:
    """On the ranks beside the owner: take note of who has the lock. Does nothing where it cannot be read."""
    owner = _read_owner(Path(run_dir) / LOCK_FILE)
    if owner is not None:
        _owners.setdefault(Path(run_dir).absolute(), owner)


def prove(run_dir: str | os.PathLike[str]) -> None:
    """Raises LockLost, one line that names the new owner, where this job had the lock and has it no longer. Reads one small file."""
    own, path = _owners.get(Path(run_dir).absolute()), Path(run_dir) / LOCK_FILE
    try:
        owner = None if own is None else _read_owner(path)
    except OSError:  # a file system that does not answer proves nothing
        return
    if own == owner:
        return
    what = f"{path} was removed or written over" if owner is None else f"it is in use by {owner}"
    raise LockLost(f"run.dir={run_dir} was taken from this job ({own}): {what}; this job writes nothing more there")


def may_tell_ending(run_dir: str | os.PathLike[str]) -> bool:
    """Whether exit_status.json is this job's to write: nobody else has the lock, nor has told an ending since this job began."""
    own, owner = _owners.get(Path(run_dir).absolute()), None
    with suppress(OSError):  # that cannot be read: the writing will tell
        owner = _read_owner(Path(run_dir) / LOCK_FILE)
    # while a rank tells an ending the owner may end, and give up the lock
    return own is None or owner == own or (owner is None and not (Path(run_dir) / EXIT_STATUS_FILE).exists())


def release() -> None:
    """Give up what this process has taken; nothing where it has taken nothing."""
    _owners.clear()
    while _held:
        path, ended = _held.popitem()
        ended.set()
        with suppress(OSError):  # the directory may be gone
            if not path.exists():
                continue
            with _alone(path) as file:
                if _owner(file) == this_process():
                    path.unlink()


atexit.register(release)  # what leaves by neither of the ways that release by themselves: a KeyboardInterrupt before the start


def other_owner(run_dir: str | os.PathLike[str]) -> Owner | None:
    """The living owner, unless it is this process. Raises OSError where the directory cannot be written."""
    path, here = Path(run_dir) / LOCK_FILE, this_process()
    owner = _read_owner(path)
    return None if owner in (None, here) or owner.left_behind(here, _age(path)) else owner


def this_process() -> Owner:
    env = os.environ
    slurm, torchrun = env.get("SLURM_JOB_ID"), env.get("TORCHELASTIC_RUN_ID", "none")
    job = f"SLURM job {slurm}" if slurm else "" if torchrun == "none" else f"torchrun job {torchrun}"
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        machine = ""
    requeues = int(env.get("SLURM_RESTART_COUNT", 0)) if slurm else 0
    return Owner(socket.gethostname(), os.getpid(), machine, _started(os.getpid()), job, requeues)


def _started(pid: int) -> str:
    """When a process began, in ticks since boot; "" where there is none of this number that still runs."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if values[0] in "ZX" else values[19]


def _read_owner(path: Path) -> Owner | None:
    """As :func:`_owner`, None also where there is no such file. Raises OSError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _owner(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _owner(file: IO[str]) -> Owner | None:
    """None: nobody, or what cannot be read."""
    file.seek(0)
    try:
        return Owner(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def _age(path: Path) -> float:
    """Seconds since the last touch, by the clock of the file system."""
    with tempfile.TemporaryFile(dir=path.parent) as new:
        return os.fstat(new.fileno()).st_mtime - path.stat().st_mtime


@contextmanager
def _alone(path: Path) -> Iterator[IO[str]]:
    """The lock file, made if there is none, while no other process judges or writes it: of two that start at once one comes first."""
    while True:
        with path.open("a+", encoding="utf-8") as file:
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:  # its owner released it meanwhile
                same = False
            if same:
                yield file
                return


def _keep_touching(path: Path, here: Owner, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_S):
        with suppress(OSError):
            if _read_owner(path) == here:  # not one that another job has taken since
                os.utime(path)
