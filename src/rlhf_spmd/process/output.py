"""Standard output and standard error of a process whose readers may go before it ends."""

from __future__ import annotations

import io
import sys
from typing import Any


class _Pipe(io.FileIO):
    """What is written after the reader has gone goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def let_readers_go() -> None:
    """From now on nothing fails because nobody reads standard output or standard error any more: ``| head`` ends no run, and makes no
    traceback. May be called again; streams that somebody else has put there are left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:
            continue
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)
        if type(stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer) is io.FileIO:
            stream.flush()
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            given: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
            given |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(pipe) if is_buffered else pipe, **given))
