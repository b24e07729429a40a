"""Does what docs/tasks.md says, literally, and compares what comes out with what the page promises.

EXTRAS=dev source scripts/environment.sh; python scripts/tasks.py [--only NAME ...] [--dir DIR] [--out FILE.json]

``--only``: tasks by the beginning of their heading (``quickstart``, ``own-data``, ...); those after the first need what it makes.
All of them write to ``runs/`` of the checkout, or of ``DIR``, where everything else is a link to it. Exit status 1 where a task fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tasks.md"
OWN_TERMINAL = "# in a terminal of its own\n"
LIMIT_S = 900
WAIT_S = 120  # for what a program in a terminal of its own says
NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str:
        """The name that a file's first line gives."""
        found = re.match(r"# ([\w./]+)\n", self.text)
        if not found:
            raise ValueError(f"{PAGE.name}: the first line of this block names no file:\n{self.text}")
        return found[1]


def read_page() -> dict[str, list[Block]]:
    """Blocks of each task, by its heading."""
    tasks = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = re.sub(r"[^\w -]", "", section.partition("\n")[0].lower()).replace(" ", "-")
        found = re.findall(r"^```(\w+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
        tasks[name] = [Block(language, text) for language, text in found]
    return tasks


def missing(promised: str, output: str) -> list[str]:
    """Lines of ``promised`` that no line of ``output`` is, blanks aside; with the line that has another number, where there is one."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return [told for line in promised.splitlines() if (told := _missing(" ".join(line.split()), lines))]


def _missing(line: str, lines: list[str]) -> str:
    parts = re.split(r"(\.\.\.|<\S+ to \S+>)", line)
    pattern = re.compile("".join({"...": ".*", "<": NUMBER}.get(p if p == "..." else p[:1], re.escape(p)) for p in parts))
    bounds = [tuple(map(float, bound)) for bound in re.findall(r"<(\S+) to (\S+)>", line)]
    alike = [(found[0], [float(number) for number in found.groups()]) for one in lines if (found := pattern.fullmatch(one))]
    if any(all(low <= number <= high for number, (low, high) in zip(numbers, bounds, strict=True)) for _, numbers in alike):
        return ""
    return f"promised: {line}" + "".join(f"\n  there is: {text}" for text, _ in alike[-1:])


class Terminal:
    """Commands of the page in ``directory``; their output goes to ``log``. A list of what went wrong is empty where all is well."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.directory, self.log, self.beside = directory, log, list[subprocess.Popen[bytes]]()
        log.write_bytes(b"")

    def follow(self, blocks: list[Block]) -> list[str]:
        try:
            for block in blocks:
                if wrong := self._do(block):
                    return wrong
            return self._end()
        finally:
            for process in self.beside:
                _kill(process)

    def _do(self, block: Block) -> list[str]:
        if block.language == "text":
            deadline = time.monotonic() + (WAIT_S if self.beside else 0)
            while (wrong := missing(block.text, self.log.read_text(errors="replace"))) and time.monotonic() < deadline:
                time.sleep(0.2)
            return wrong
        if block.language != "sh":
            file = self.directory / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            return []
        process = self._start(block.text)
        if block.text.startswith(OWN_TERMINAL):
            self.beside.append(process)
            return []
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            return [f"not done in {LIMIT_S} s:\n{block.text}"]
        return [f"exit status {code}:\n{block.text}"] if code else []

    def _start(self, text: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        with self.log.open("ab") as log:
            command = ["bash", "-euo", "pipefail", "-c", text]
            return subprocess.Popen(command, cwd=self.directory, env=env, stdout=log, stderr=log, start_new_session=True)

    def _end(self) -> list[str]:
        """Ctrl-C in the terminals of their own."""
        for process in self.beside:
            os.killpg(process.pid, signal.SIGINT)
            try:
                if process.wait(WAIT_S):
                    return [f"after Ctrl-C exit status {process.returncode}"]
            except subprocess.TimeoutExpired:
                return ["Ctrl-C did not end it"]
        return []


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepare(directory: Path) -> None:
    """``directory`` as a checkout, with ``runs/`` of its own and nothing from earlier tasks in it."""
    if directory != ROOT:
        directory.mkdir(parents=True, exist_ok=True)
        for entry in ROOT.iterdir():
            if entry.name not in ("runs", ".git") and not (directory / entry.name).exists():
                (directory / entry.name).symlink_to(entry)
    shutil.rmtree(directory / "runs" / "tasks", ignore_errors=True)
    (directory / "runs" / "tasks").mkdir(parents=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--dir", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, help="a JSON file with the table")
    args = parser.parse_args()
    tasks = read_page()
    if unknown := [only for only in args.only if not any(name.startswith(only) for name in tasks)]:
        parser.error(f"--only {' '.join(unknown)}: no such task; there are {', '.join(tasks)}")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and what it starts would too
    prepare(directory := args.dir.resolve())
    rows: list[dict[str, Any]] = []
    for name in (name for name in tasks if name.startswith(tuple(args.only))):
        began, log = time.monotonic(), directory / "runs" / "tasks" / f"{name}.log"
        wrong = Terminal(directory, log).follow(tasks[name])
        rows.append({"task": name, "seconds": round(time.monotonic() - began, 1), "ok": not wrong, "wrong": wrong})
        print(f"{name:<24} {rows[-1]['seconds']:>7.1f} s  {'ok' if not wrong else 'FAILED'}", flush=True)
        if wrong:
            print(*wrong, f"in full: {log}; its end:", *log.read_text(errors="replace").splitlines()[-15:], sep="\n  ")
    print(f"{'all':<24} {sum(row['seconds'] for row in rows):>7.1f} s")
    if args.out:
        args.out.write_text(json.dumps({"tasks": rows, "cores": os.cpu_count(), "load": os.getloadavg()}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
