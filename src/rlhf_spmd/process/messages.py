"""Messages in the store that all ranks share, signed with a key that only the job's processes have.

The store asks for no password: whoever reaches its port can write into it, but cannot write what a rank takes for a
message of the job. Counters are not signed, so a stranger can make ranks wait or fail, but not end well.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rlhf_spmd.parallel.launch import JOB_KEY, LOOK_S, Launch, start_limit

SIGNATURE_LENGTH = 64  # characters of the signature, which precedes the text
VERDICT = "prepare/verdict"  # about the input: "ok", or the refusal
FAILURE = "board/failure"  # the failure that ends the job
ALL_ENDED = "board/all_ended"  # the script has ended on every rank
DONE = "board/done"  # rank 0 has recorded that the job is done
KEY_FILE = "rlhf_spmd_key_"


class ForgedMessage(RuntimeError):
    """The store holds a message that no process of this job has written."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the store that all ranks share holds a message ({name}) without the signature of this job: another process writes "
            "there, or a rank has not got the job's key"
        )


@dataclass(frozen=True)
class Messages:
    """Signed texts in a store. Reading raises :class:`ForgedMessage`, or RuntimeError if the store does not answer.

    - key: what signs the texts; only processes of the job have it
    - key_file: the file through which rank 0 gives the key to the others; None on other ranks, or without such a file
    """

    store: dist.Store
    key: bytes
    key_file: Path | None = None

    def set(self, name: str, text: str) -> None:
        self.store.set(name, self._sign(name, text) + text)

    def get(self, name: str) -> str:
        """Wait for the message ``name``, and return its text."""
        return self._verified_text(name, self.store.get(name))

    def get_all(self, names: Sequence[str]) -> list[str]:
        """Wait for several messages, and return their texts."""
        values = self.store.multi_get(list(names)) if names else []
        return [self._verified_text(name, value) for name, value in zip(names, values, strict=True)]

    def find(self, name: str) -> str | None:
        """Return the text of the message ``name``; None if there is no such message yet."""
        return self.get(name) if self.store.check([name]) else None

    def put_first(self, name: str, text: str) -> str:
        """Write the text unless there is a message of that name. Return the text that the store then has."""
        return self._verified_text(name, self.store.compare_set(name, "", self._sign(name, text) + text))

    def forget_key_file(self) -> None:
        """Remove the key file, once all ranks have read it or the job ends."""
        if self.key_file is not None:
            with suppress(OSError):
                self.key_file.unlink(missing_ok=True)

    def _sign(self, name: str, text: str) -> str:
        return hmac.new(self.key, f"{name}\0{text}".encode(), "sha256").hexdigest()

    def _verified_text(self, name: str, value: bytes) -> str:
        signature = value[:SIGNATURE_LENGTH]
        text = value[SIGNATURE_LENGTH:].decode(errors="replace")
        if not hmac.compare_digest(signature, self._sign(name, text).encode()):
            raise ForgedMessage(name)
        return text


def key_of_start(text: str, restart: int = 0) -> bytes:
    """Return the key for the text in the environment. Each restart of the ranks has another key, so it reads no older messages."""
    return f"{restart} {text}".encode()


def await_key(store: dist.Store, key: str, limit_s: float, on_wait: Callable[[], object] = lambda: None) -> bool:
    """Return True once the store has ``key``, False if it has not within ``limit_s``.

    ``on_wait`` is called again and again and may raise; during the store's own wait Python would handle no signal.
    """
    deadline = time.monotonic() + limit_s
    pause_s = 0.005
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        on_wait()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LOOK_S)
    return True


def agree_on_key(
    launch: Launch, store: dist.Store, directory: Path | None, on_wait: Callable[[str], object] = lambda awaited: None
) -> Messages:
    """Return ``store`` with the job's key, from the environment or from a file that only this user can read.

    The store holds the file's name. The file is in the machine's temporary directory if all ranks are on one machine,
    otherwise in ``directory``, which all ranks see. Without a directory the key is empty, and messages are not protected.
    Raises ValueError if this rank cannot read the file, TimeoutError if rank 0 does not come. ``on_wait``: see
    :func:`connect_store`.

    Collective over the world: every rank of it must call, in program order.
    """
    if text := os.environ.get(JOB_KEY):
        if launch.rank == 0:
            store.set("key/file", "")  # for a rank whose environment lacks the key
        return Messages(store, key_of_start(text, launch.restart_count))
    if launch.size == 1:
        return Messages(store, secrets.token_bytes(32))
    if launch.local_size == launch.size:
        directory = Path(tempfile.gettempdir())
    if launch.rank == 0:
        name = "" if directory is None else _write_key(directory)
        store.set("key/file", name)
    elif directory is None:
        return Messages(store, b"")
    else:
        limit_s = start_limit(launch)
        if not await_key(store, "key/file", limit_s, lambda: on_wait("rank 0 to start")):
            raise TimeoutError(f"rank {launch.rank} has waited {limit_s:.0f} s for rank 0 to start")
        name = store.get("key/file").decode(errors="replace")
    if directory is None or (launch.rank == 0 and not name):
        return Messages(store, b"")
    return Messages(store, _read_key(directory, name), directory / name if launch.rank == 0 else None)


def _write_key(directory: Path) -> str:
    """Return the name of a new file with a key, or "" if none can be written; the check of the input reports that."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=KEY_FILE, dir=directory)  # readable by this user only
    except OSError:
        return ""
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return Path(path).name


def _read_key(directory: Path, name: str) -> bytes:
    """Return the key. The file must be this user's own, because a stranger may have written the name."""
    file_text = f"{directory}/{name}, through which ranks share the key of the job,"
    if not (name.startswith(KEY_FILE) and name.replace("_", "").isalnum()):
        remedy = f"all nodes must see the same directory, or have the same {JOB_KEY}"
        raise ValueError(f"rank 0 has no file in {directory} for the key of the job; {remedy}")
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file, tempfile.TemporaryFile(dir=directory) as new_file:
            status = os.fstat(file.fileno())
            user = os.fstat(new_file.fileno()).st_uid
            key = file.read()
    except OSError as error:
        raise ValueError(f"{file_text} cannot be read ({error.strerror}); all nodes must see the same directory") from error
    if status.st_uid != user or status.st_mode & 0o077 or not key:
        raise ValueError(f"{file_text} is not this user's own; another process writes into the store of this job")
    return key
