"""One job per run directory: ``run.lock`` names the owner, rank 0's process, which touches the file while it lives.

A lock is stale, and is taken over, in three cases: its process on this machine is gone (its number may be reused); the
same SLURM job has been requeued since; or nobody touched it for ``STALE_S`` and this process cannot see the owner,
which is on another machine or in another container. Such an owner may only have been suspended and go on, so a job
checks that it still holds the lock before it writes.
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


_held: dict[Path, threading.Event] = {}  # lock file of this process -> event that stops its touching
_owners: dict[Path, LockOwner] = {}  # run directory -> the process of this job that owns it; on every rank


@dataclass(frozen=True)
class LockOwner:
    """A process. ``machine``: boot id and process namespace, in which ``pid`` and ``started`` (ticks since boot) are
    unique."""

    host: str
    pid: int
    machine: str
    started: str
    job: str  # "SLURM job 17", "torchrun job NAME", or "" without a number or name
    requeues: int

    def is_stale(self, here: LockOwner, age_s: float) -> bool:
        """Return True if the owner's job has ended, as seen from the process ``here``; ``age_s``: seconds since its last touch."""
        if self.job and self.job == here.job and self.requeues < here.requeues:
            return True
        if self.machine and self.machine == here.machine:
            return _started(self.pid) != self.started
        return age_s > STALE_S

    def __str__(self) -> str:
        return f"{self.job + ', ' if self.job else ''}process {self.pid} on {self.host}"


def acquire(run_dir: str | os.PathLike[str]) -> None:
    """Makes this process the owner. Raises ValueError, one line, if another job is, and WriteError."""
    path, here = Path(run_dir).resolve() / LOCK_FILE, this_process()
    with writing(path), _locked_file(path) as file:
        owner = _owner(file)
        if owner not in (None, here) and not owner.is_stale(here, _age(path)):
            raise ValueError(f"run.dir={run_dir} is in use by {owner}; wait for its end, or give another run.dir")
        file.truncate(0)
        file.write(json.dumps(asdict(here)) + "\n")
    _owners[Path(run_dir).absolute()] = here
    if path not in _held:
        _held[path] = threading.Event()
        threading.Thread(target=_keep_touching, args=(path, here, _held[path]), name="run.lock", daemon=True).start()


def note_owner(run_dir: str | os.PathLike[str]) -> None:
    """Other ranks: notes who owns the lock. Does nothing if it cannot be read."""
    owner = _read_owner(Path(run_dir) / LOCK_FILE)
    if owner is not None:
        _owners.setdefault(Path(run_dir).absolute(), owner)


def check_still_held(run_dir: str | os.PathLike[str]) -> None:
    """Raises LockLost, one line that names the new owner, if this job had the lock and lost it. Reads one small file."""
    own, path = _owners.get(Path(run_dir).absolute()), Path(run_dir) / LOCK_FILE
    try:
        owner = None if own is None else _read_owner(path)
    except OSError:  # a file system that does not answer proves nothing
        return
    if own == owner:
        return
    what = f"{path} was removed or written over" if owner is None else f"it is in use by {owner}"
    raise LockLost(f"run.dir={run_dir} was taken from this job ({own}): {what}; this job writes nothing more there")


def may_write_status(run_dir: str | os.PathLike[str]) -> bool:
    """Return True if this job may write exit_status.json: nobody else holds the lock or has reported an ending since it began."""
    own, owner = _owners.get(Path(run_dir).absolute()), None
    with suppress(OSError):  # unreadable: the write reports it
        owner = _read_owner(Path(run_dir) / LOCK_FILE)
    # the owner may release the lock while a rank still reports the ending
    return own is None or owner == own or (owner is None and not (Path(run_dir) / EXIT_STATUS_FILE).exists())


def release() -> None:
    """Releases all locks of this process."""
    _owners.clear()
    while _held:
        path, ended = _held.popitem()
        ended.set()
        with suppress(OSError):  # the directory may be gone
            if not path.exists():
                continue
            with _locked_file(path) as file:
                if _owner(file) == this_process():
                    path.unlink()


atexit.register(release)  # for exits that do not release themselves: a KeyboardInterrupt before the start


def other_owner(run_dir: str | os.PathLike[str]) -> LockOwner | None:
    """Return the living owner, unless it is this process. Raises OSError if the directory cannot be written."""
    path, here = Path(run_dir) / LOCK_FILE, this_process()
    owner = _read_owner(path)
    return None if owner in (None, here) or owner.is_stale(here, _age(path)) else owner


def this_process() -> LockOwner:
    env = os.environ
    slurm, torchrun = env.get("SLURM_JOB_ID"), env.get("TORCHELASTIC_RUN_ID", "none")
    job = f"SLURM job {slurm}" if slurm else "" if torchrun == "none" else f"torchrun job {torchrun}"
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        machine = ""
    requeues = int(env.get("SLURM_RESTART_COUNT", 0)) if slurm else 0
    return LockOwner(socket.gethostname(), os.getpid(), machine, _started(os.getpid()), job, requeues)


def _started(pid: int) -> str:
    """Return when a process began, in ticks since boot; "" if no such process runs."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if values[0] in "ZX" else values[19]


def _read_owner(path: Path) -> LockOwner | None:
    """Like :func:`_owner`, also None if there is no such file. Raises OSError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return _owner(file)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _owner(file: IO[str]) -> LockOwner | None:
    """Return None for an empty or unreadable file."""
    file.seek(0)
    try:
        return LockOwner(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def _age(path: Path) -> float:
    """Return seconds since the last touch, by the file system's clock."""
    with tempfile.TemporaryFile(dir=path.parent) as new:
        return os.fstat(new.fileno()).st_mtime - path.stat().st_mtime


@contextmanager
def _locked_file(path: Path) -> Iterator[IO[str]]:
    """Yields the lock file, made if missing, while no other process judges or writes it: one of two starts comes first."""
    while True:
        with path.open("a+", encoding="utf-8") as file:
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:  # the owner released it meanwhile
                same = False
            if same:
                yield file
                return


def _keep_touching(path: Path, here: LockOwner, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_S):
        with suppress(OSError):
            if _read_owner(path) == here:  # another job may have taken it
                os.utime(path)
