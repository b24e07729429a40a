"""A reader that goes before a program ends, as ``head`` does, makes no traceback and no other status."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTS = """
import sys
from rlhf_spmd.process.arguments import ignore_closed_pipes
ignore_closed_pipes(); ignore_closed_pipes()
for number in range(3):
    print("x" * 100_000)
    print("y" * 10, file=sys.stderr)
sys.stdout.flush()
print("z")
raise SystemExit(3)
"""


@pytest.mark.parametrize("flags", [[], ["-u"]])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_program_goes_on_without_its_reader(flags: list[str], stream: str) -> None:
    other = "stderr" if stream == "stdout" else "stdout"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *flags, "-c", PRINTS]
    ended = subprocess.run(command, check=False, text=True, **{stream: writer, other: subprocess.PIPE})  # type: ignore[call-overload]
    os.close(writer)
    assert ended.returncode == 3
    said = ("x" * 100_000 + "\n") * 3 + "z\n" if stream == "stderr" else ("y" * 10 + "\n") * 3
    assert getattr(ended, other) == said


def test_the_command_makes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "rlhf_spmd", "--help"], stdout=writer, stderr=subprocess.PIPE, check=False, text=True
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_streams_of_others_are_left_alone() -> None:
    from rlhf_spmd.process.arguments import ignore_closed_pipes

    before = sys.stdout, sys.stderr
    ignore_closed_pipes()
    assert (sys.stdout, sys.stderr) == before
