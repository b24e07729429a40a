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
    """The run directory no longer belongs to this job."""

    exit_class = "checkpoint"  # how the run ends: process/program.py


_stop_events: dict[Path, threading.Event] = {}  # lock file of this process -> event that stops its touching
_owners: dict[Path, LockOwner] = {}  # run directory -> the process of this job that owns it; on every rank


@dataclass(frozen=True)
class LockOwner:
    """A process that owns a run directory.

    - machine: boot id and process namespace, in which ``pid`` and ``started`` (ticks since boot) are unique
    - job: "SLURM job 17", "torchrun job NAME", or "" without a number or name
    - requeues: how often SLURM has requeued the job
    """

    host: str
    pid: int
    machine: str
    started: str
    job: str
    requeues: int

    def is_stale(self, observer: LockOwner, age_s: float) -> bool:
        """Return True if the owner's job has ended, as ``observer`` sees it; ``age_s``: seconds since its last touch."""
        if self.job and self.job == observer.job and self.requeues < observer.requeues:
            return True
        if self.machine and self.machine == observer.machine:
            return _started(self.pid) != self.started
        return age_s > STALE_S

    def __str__(self) -> str:
        return f"{self.job + ', ' if self.job else ''}process {self.pid} on {self.host}"


def acquire(run_dir: str | os.PathLike[str]) -> None:
    """Make this process the owner. Raises ValueError, one line, if another job is the owner, and WriteError."""
    path = Path(run_dir).resolve() / LOCK_FILE
    this_owner = this_process()
    with writing(path), _locked_file(path) as file:
        owner = _owner(file)
        if owner not in (None, this_owner) and not owner.is_stale(this_owner, _age(path)):
            raise ValueError(f"run.dir={run_dir} is in use by {owner}; wait for its end, or give another run.dir")
        file.truncate(0)
        file.write(json.dumps(asdict(this_owner)) + "\n")
    _owners[Path(run_dir).absolute()] = this_owner
    if path not in _stop_events:
        _stop_events[path] = threading.Event()
        threading.Thread(
            target=_keep_touching, args=(path, this_owner, _stop_events[path]), name="run.lock", daemon=True
        ).start()


def note_owner(run_dir: str | os.PathLike[str]) -> None:
    """Remember the owner of the lock, on ranks that do not own it; nothing happens if it cannot be read."""
    owner = _read_owner(Path(run_dir) / LOCK_FILE)
    if owner is not None:
        _owners.setdefault(Path(run_dir).absolute(), owner)


def check_still_held(run_dir: str | os.PathLike[str]) -> None:
    """Raise LockLost, one line that names the new owner, if this job had the lock and lost it. Reads one small file."""
    job_owner = _owners.get(Path(run_dir).absolute())
    path = Path(run_dir) / LOCK_FILE
    try:
        owner = None if job_owner is None else _read_owner(path)
    except OSError:  # a file system that does not answer proves nothing
        return
    if job_owner == owner:
        return
    reason = f"{path} was removed or written over" if owner is None else f"it is in use by {owner}"
    raise LockLost(f"run.dir={run_dir} was taken from this job ({job_owner}): {reason}; this job writes nothing more there")


def may_write_status(run_dir: str | os.PathLike[str]) -> bool:
    """Return True if this job may write exit_status.json.

    That is so if no other job has the lock or has reported an ending since this one began.
    """
    job_owner = _owners.get(Path(run_dir).absolute())
    owner = None
    with suppress(OSError):  # unreadable: the write reports it
        owner = _read_owner(Path(run_dir) / LOCK_FILE)
    # the owner may release the lock while a rank still reports the ending
    return job_owner is None or owner == job_owner or (owner is None and not (Path(run_dir) / EXIT_STATUS_FILE).exists())


def release() -> None:
    """Release all locks of this process."""
    _owners.clear()
    while _stop_events:
        path, stop = _stop_events.popitem()
        stop.set()
        with suppress(OSError):  # the directory may be gone
            if not path.exists():
                continue
            with _locked_file(path) as file:
                if _owner(file) == this_process():
                    path.unlink()


atexit.register(release)  # for exits that do not release themselves: a KeyboardInterrupt before the start


def other_owner(run_dir: str | os.PathLike[str]) -> LockOwner | None:
    """Return the living owner, unless it is this process. Raises OSError if the directory cannot be written."""
    path = Path(run_dir) / LOCK_FILE
    this_owner = this_process()
    owner = _read_owner(path)
    return None if owner in (None, this_owner) or owner.is_stale(this_owner, _age(path)) else owner


def this_process() -> LockOwner:
    """Return this process as an owner."""
    env = os.environ
    slurm_id = env.get("SLURM_JOB_ID")
    torchrun_id = env.get("TORCHELASTIC_RUN_ID", "none")
    job = f"SLURM job {slurm_id}" if slurm_id else "" if torchrun_id == "none" else f"torchrun job {torchrun_id}"
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        machine = ""
    requeues = int(env.get("SLURM_RESTART_COUNT", 0)) if slurm_id else 0
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
    """Return the owner that the file names; None for an empty or unreadable file."""
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
    """Yield the lock file, made if missing, while no other process judges or writes it: one of two starts comes first."""
    while True:
        with path.open("a+", encoding="utf-8") as file:
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:  # the owner released it meanwhile
                is_current = False
            if is_current:
                yield file
                return


def _keep_touching(path: Path, this_owner: LockOwner, stop: threading.Event) -> None:
    while not stop.wait(TOUCH_S):
        with suppress(OSError):
            if _read_owner(path) == this_owner:  # another job may have taken it
                os.utime(path)
