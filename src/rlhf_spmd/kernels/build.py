"""Compiles the C++ kernels on this machine, once per user, source, compiler, target and CPU."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("dense.cpp", "attention.cpp", "elementwise.cpp", "block.cpp"))
FLAGS = ("-O3", "-std=c++17", "-Wno-psabi", "-shared", "-fPIC", "-fopenmp")
# what to compile for, as -march names it, and what a processor must have to run it
TARGETS = {"native": (), "x86-64-v3": ("avx2", "fma"), "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")}
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT_S = 300


def build(target: str = "native") -> Path:
    """Return the library compiled for ``target``, one of TARGETS.

    Raises OSError if there is no compiler or it fails, ValueError if the target is unknown or does not run on this processor.

    One rank of a machine compiles; the others wait for its file lock, which the system releases if that process dies.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} of the C++ kernels is not known; allowed: {', '.join(TARGETS)}")
    if missing := set(TARGETS[target]).difference(_cpu_flags().split()):
        raise ValueError(
            f"target {target} of the C++ kernels does not run here: this processor has no {', '.join(sorted(missing))}"
        )
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError(f"no C++ compiler ({', '.join(COMPILERS)}) on PATH")
    directory = cache_directory()
    library = directory / f"{_key(compiler, target)}.so"
    if not library.exists():
        with _locked(directory / "lock"):
            if not library.exists():
                _compile(compiler, target, library)
    return library


def cache_directory() -> Path:
    """Return the user's cache directory, or without a writable home a directory in /tmp that nobody else can write to."""
    fallback = Path(tempfile.gettempdir()) / f"rlhf_spmd-{os.getuid()}"
    for directory in (Path.home() / ".cache" / "rlhf_spmd" / "kernels", fallback):
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
                return directory
    raise OSError(f"no directory of this user's own for compiled kernels; tried {fallback}")


def _key(compiler: str, target: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    digest = hashlib.sha256(
        repr((FLAGS, target, compiler, platform.machine(), _cpu_flags(), torch.__version__)).encode() + version
    )
    for source in (*sorted(HERE.glob("*.h")), *SOURCES):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    """Return what -march=native depends on; a home directory may be shared by different machines."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as file:
        with contextlib.suppress(OSError):  # a file system without locks: every rank builds, the last one's file stays
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: str, library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    # threads of torch's own OpenMP, where it brings one: two sets of threads that wait spinning take the cores from each other
    threads = map(str, sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")))
    command = [compiler, *FLAGS, f"-march={target}", *map(str, SOURCES), "-Wl,--as-needed", *threads, "-o", str(unfinished)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        os.replace(unfinished, library)
    except subprocess.SubprocessError as error:
        raise OSError(f"{compiler}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
